"""What an engine times: one step for ``flops_profiler``, and at start-up a gather as it is and encoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shoal.comm.encoded import gather_milliseconds
from shoal.comm.formats import WireFormat
from shoal.device import Device, is_fake
from shoal.engine.accumulation import Accumulation
from shoal.engine.settings import Properties
from shoal.observe.flops import OperationCount
from shoal.observe.flops_profiler import FlopsProfiler
from shoal.observe.flops_text import StepSeconds
from shoal.observe.timers import StepTimers
from shoal.running.runtime import ShardedModel
from shoal.sharding.param_group import ParameterGroup
from shoal.streams import simulation


class _Ranks:
    """What ``FlopsProfiler`` reads from an engine."""

    def __init__(self, properties: Properties, accumulation: Accumulation) -> None:
        self.world_size = properties.world.size
        self.dp_world_size = properties.axes.batch.size
        self.mp_world_size = properties.axes.mesh.tp
        self._accumulation = accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._accumulation.micro_batch


class ProfilingTimers(StepTimers):
    """The timers of an engine that profiles one step, where the config asks for it.

    In that step rank 0 counts forward by module and backward as a whole, and times all three phases. With several
    micro-batches the figures are those of the step's last. Other steps and other ranks run as with ``StepTimers``.
    """

    def __init__(
        self, model: nn.Module, properties: Properties, accumulation: Accumulation, num_recomputed: int
    ) -> None:
        config = properties.config
        super().__init__(
            properties.device, is_on=bool(config.wall_clock_breakdown), reads_memory=bool(config.memory_breakdown)
        )
        self.profiler = FlopsProfiler(
            model, _Ranks(properties, accumulation), float(config.flops_profiler.recompute_fwd_factor)
        )
        self._properties = properties
        self._accumulation = accumulation
        self._num_recomputed = num_recomputed
        self._settings = config.flops_profiler
        self._taken: dict[str, float] = {}
        self._backward_flops: int | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        profiler, step = self.profiler, self._accumulation.counters.global_steps
        is_profiled = self._properties.rank == 0 and step == self._settings.profile_step
        with super().phase(name):
            if not is_profiled:
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
        settings = self._settings
        profiler.seconds = StepSeconds(
            forward=self._taken.get("forward", 0.0),
            backward=self._taken.get("backward"),
            step=self._taken["step"],
            num_micro=self._accumulation.num_micro,
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
        notes, num_micro = [], self._accumulation.num_micro
        if num_micro > 1:
            notes.append(f"one of {num_micro} micro-batches is shown, the last of the step.")
        if "backward" not in self._taken:
            notes.append("backward was not measured: the script calls loss.backward(), not engine.backward(loss).")
        if self._properties.stage == 3 and self._properties.axes.world.size > 1:
            notes.append("latencies of modules include the gathering of their parameters.")
        if self._num_recomputed and not self._settings.recompute_fwd_factor:
            notes.append(
                f"{self._num_recomputed} modules are recomputed in backward, which the FLOPS of backward leave out:"
                " recompute_fwd_factor says how many forward passes they are."
            )
        return notes


_MOST_NUMEL = 1 << 22  # elements that are gathered, at most
_SLOWER = 1.1  # times the plain gather, from which it is said
_LEAST = 0.1  # milliseconds that are worth a line


def format_notes(sharded: ShardedModel, device: Device) -> list[str]:
    """A note where this link is so fast that sending fewer bits takes longer. It changes nothing.

    Communicates: where a format is set, six all_gathers of up to 4 Mi elements, in size that of the largest group.
    Memory: what they gather, until the return. Order: blocks the host.
    """
    sent = [(group, found) for group in sharded.groups if (found := _format_of(group)) is not None]
    if not sent or simulation() is not None or is_fake(sent[0][0].buffer.full):
        return []
    group, form = max(sent, key=lambda each: each[0].buffer.layout.numel)
    buffer = group.buffer
    numel = min(buffer.layout.numel, _MOST_NUMEL) // buffer.comm.size * buffer.comm.size
    full = torch.zeros(numel, dtype=buffer.dtype, device=buffer.device)
    plain, coded = (gather_milliseconds(buffer.comm, full, each, device.synchronize) for each in (None, form))
    if coded <= _SLOWER * plain + _LEAST:
        return []
    return [
        f"wire: on this link a gather of {numel:,} elements takes {plain:.2f} ms as they are and {coded:.2f} ms as"
        f" {form.name}: the format costs more time than it saves."
    ]


def _format_of(group: ParameterGroup) -> WireFormat | None:
    """The format along the axis that shards the group; None: it is sent as it is."""
    sent, shard = group.row.sent, group.axes.shard
    formats = [*([] if sent.gather is None else [(shard, sent.gather)]), *sent.reduce]
    return next((form for axis, form in formats if axis == shard), None)
