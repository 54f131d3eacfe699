"""``flops_profiler`` of the config: one step of the engine is counted and timed, and rank 0 prints what it found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from shoal.config import Config
from shoal.device import Device
from shoal.observe.flops import OperationCount
from shoal.observe.flops_profiler import FlopsProfiler
from shoal.observe.flops_text import StepSeconds
from shoal.observe.timers import StepTimers

if TYPE_CHECKING:
    from shoal.engine.engine import Engine


class ProfilingTimers(StepTimers):
    """The timers of an engine that profiles one step: in the place of ``StepTimers``, where the config asks for it.

    In that step, on rank 0, forward counts by module, backward counts as a whole, and all three phases are timed. With
    several micro-batches the figures are those of the step's last. No other step and no other rank does anything.
    """

    def __init__(self, engine: Engine, device: Device, config: Config) -> None:
        super().__init__(device, is_on=bool(config.wall_clock_breakdown))
        self._engine = engine
        self._settings = config.flops_profiler
        self._taken: dict[str, float] = {}
        self._backward_flops: int | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        engine, profiler = self._engine, self._engine.flops_profiler
        is_here = engine.global_rank == 0 and engine.global_steps == self._settings.profile_step
        with super().phase(name):
            if profiler is None or not is_here:
                yield
            elif name == "forward":
                with self._forward(profiler):
                    yield
            elif name == "backward" and profiler.started:
                with self._timed(name), OperationCount() as count:
                    yield
                self._backward_flops = 2 * count.macs
            elif name == "step" and profiler.started:
                try:
                    with self._timed(name):
                        yield
                    self._print(profiler)
                finally:
                    profiler.end_profile()
            else:
                yield

    @contextmanager
    def _forward(self, profiler: FlopsProfiler) -> Iterator[None]:
        if not torch.is_grad_enabled():  # an evaluation between two steps
            yield
            return
        self._taken.clear()
        self._backward_flops = None
        profiler.start_profile()
        try:
            with self._timed("forward"):
                yield
        finally:
            profiler.stop_profile()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = self.now()
        yield
        self._taken[name] = self.now() - began

    def _print(self, profiler: FlopsProfiler) -> None:
        engine, settings = self._engine, self._settings
        profiler.seconds = StepSeconds(
            forward=self._taken.get("forward", 0.0),
            backward=self._taken.get("backward"),
            step=self._taken["step"],
            num_micro=engine.gradient_accumulation_steps(),
            backward_flops=self._backward_flops,
        )
        profiler.notes = self._notes()
        profiler.print_model_profile(
            profile_step=int(settings.profile_step),
            module_depth=int(settings.module_depth),
            top_modules=int(settings.top_modules),
            detailed=bool(settings.detailed),
            output_file=settings.output_file,
        )

    def _notes(self) -> list[str]:
        engine = self._engine
        notes = []
        if engine.gradient_accumulation_steps() > 1:
            notes.append(f"one of {engine.gradient_accumulation_steps()} micro-batches is shown, the last of the step.")
        if "backward" not in self._taken:
            notes.append("backward was not measured: the script calls loss.backward(), not engine.backward(loss).")
        if engine.zero_optimization_stage() == 3 and engine.dp_world_size > 1:
            notes.append("latencies of modules include the gathering of their parameters.")
        if engine.recomputed is not None and not self._settings.recompute_fwd_factor:
            notes.append(
                f"{len(engine.recomputed)} modules are recomputed in backward, which the FLOPS of backward leave out:"
                " recompute_fwd_factor says how many forward passes they are."
            )
        return notes
