"""``FlopsProfiler`` and ``get_model_profile``: what a model computes and how long it takes, as DeepSpeed's users ask.

flops, macs, params = get_model_profile(model, (8, 3, 224, 224), as_string=False)
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shoal.errors import AssertedUsageError, UsageError
from shoal.observe.flops import Counted, ModuleCounts
from shoal.observe.flops_text import (
    StepSeconds,
    duration_to_string,
    macs_to_string,
    num_parameters,
    number_to_string,
    page,
    params_to_string,
    summary_rows,
    top_table,
)

logger = logging.getLogger("shoal")


class FlopsProfiler:
    """Counts the forward passes of a model between ``start_profile()`` and ``stop_profile()``.

    A multiply-add is two flops; ``shoal/observe/flops.py`` says what else counts. Backward is not counted, but
    estimated as twice forward, and ``recompute_fwd_factor`` more.

    Args:
        model: any module; a sharded one has its whole parameters counted.
        ds_engine: the engine that trains it, for the number of ranks and the batch; or None.
        recompute_fwd_factor: forward passes that backward repeats: 1 where all activations are recomputed.

    Attributes: ``flops``, ``macs``, ``params``: of the last profile, once it was stopped or printed.
    Communicates: nothing of its own. A forward pass of a sharded model gathers, so every rank must run it.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.flops = self.macs = self.params = 0
        self.seconds: StepSeconds | None = None  # of a whole step, where an engine has measured it
        self.notes: Sequence[str] = ()
        self._counts: ModuleCounts | None = None

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Count from zero.

        Args:
            ignore_list: classes whose modules have no figures of their own: what they compute is their parents'.
        """
        self.stop_profile()
        self.reset_profile()
        self.started = True
        self._running().start(tuple(ignore_list or ()))

    def stop_profile(self) -> None:
        """Stop counting; the figures stay. Idempotent."""
        if self._counts is not None and self._counts.is_running:
            self._counts.stop()
            self._note_totals()

    def reset_profile(self) -> None:
        """Reset the figures to zero. Counting continues if it was active."""
        if self._counts is None:
            self._counts = ModuleCounts(self.model)
        self._counts.clear()

    def end_profile(self) -> None:
        """Stop, and delete the figures by module; ``flops``, ``macs`` and ``params`` stay. Idempotent."""
        self.stop_profile()
        self.started = False
        self._counts = None

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations of the forward passes. Raises: UsageError: nothing was counted."""
        flops = self._total().flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-adds of the forward passes. Raises: UsageError: nothing was counted."""
        macs = self._total().macs
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forward passes. Raises: UsageError: nothing was counted."""
        seconds = self._total().seconds
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the whole model, also where ranks share them. Raises: UsageError: nothing was counted."""
        params = num_parameters(self._running().model)
        return params_to_string(params) if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the profile, or write it into a file.

        Args:
            profile_step: the number in the title.
            module_depth: the last depth of modules that is shown; 0: the model, -1: all.
            top_modules: how many classes are named at each depth.
            detailed: show the tree of modules too.
            output_file: is made anew, its folder too.

        Raises: OSError: the file cannot be written.
        """
        if self._counts is None:
            logger.info("the profiler has nothing to print: call print_model_profile() before end_profile().")
            return
        self._note_totals()
        text = page(
            f"Flops Profiler: step {profile_step}",
            self._rows(self._counts),
            [*self._own_notes(self._counts), *self.notes],
            self._counts,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
        )
        if output_file:
            path = Path(output_file)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                logger.warning("the profile cannot be written, training goes on: %s", error)
        else:
            sys.stdout.write(f"\n{text}\n")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print only the classes that have most parameters, multiply-adds and time at each depth."""
        if self._counts is None:
            logger.info("the profiler has nothing to print: call start_profile() first.")
            return
        text = top_table(self._counts, module_depth=module_depth, top_modules=top_modules)
        sys.stdout.write(f"{text}\n")

    def _running(self) -> ModuleCounts:
        if self._counts is None:
            raise UsageError(
                "the profiler has no figures: it was not started, or was ended.",
                do="call start_profile() before the forward pass, and ask before end_profile().",
                code="flops-not-started",
            )
        return self._counts

    def _total(self) -> Counted:
        return self._running().of(self.model)

    def _note_totals(self) -> None:
        total = self._total()
        self.flops, self.macs, self.params = total.flops, total.macs, num_parameters(self.model)

    def _rows(self, counts: ModuleCounts) -> list[tuple[str, str]]:
        engine, ranks, num_data_parallel = self.ds_engine, {}, 1
        if engine is not None:
            num_data_parallel = int(engine.dp_world_size or engine.seq_dp_world_size)
            ranks = {
                "world size:": int(engine.world_size),
                "data parallel size:": num_data_parallel,
                "model parallel size:": int(engine.mp_world_size),
            }
        return summary_rows(
            counts,
            ranks=ranks,
            micro_batch=int(engine.train_micro_batch_size_per_gpu()) if engine is not None else None,
            num_data_parallel=num_data_parallel,
            seconds=self.seconds,
            recompute_fwd_factor=self.recompute_fwd_factor,
        )

    def _own_notes(self, counts: ModuleCounts) -> list[str]:
        notes = []
        if counts.num_compiled:
            notes.append(
                f"{counts.num_compiled} compiled modules ran uncompiled while they were counted, so latencies and"
                " rates are those of uncompiled code."
            )
        if counts.operations.failed:
            notes.append(f"not counted: {', '.join(sorted(counts.operations.failed))}.")
        return notes


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type[nn.Module]] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[Any, Any, Any]:
    """Run a model once in evaluation and say what it computes.

    Args:
        input_shape: of the only input, which is made of ones in the format and on the device of the first parameter.
        args, kwargs: the inputs themselves, instead.
        warm_up: passes before the one that is counted.
        as_string: return text ("866.08 M") instead of numbers.
        ignore_modules: as ``FlopsProfiler.start_profile`` takes it.
        mode: call the model, or its ``generate``.
        print_profile, detailed, module_depth, top_modules, output_file: as ``print_model_profile`` takes them.

    Returns: floating-point operations, multiply-adds, parameters.
    Raises: AssertedUsageError: no module, no input, or a shape that is no tuple.
    """
    given = _inputs(model, input_shape, args, kwargs)
    was_training = [module for module in model.modules() if module.training]
    call = model.generate if mode == "generate" else model
    named = dict(kwargs or {})
    profiler = FlopsProfiler(model)
    model.eval()
    try:
        for _ in range(warm_up):
            call(*given, **named)  # type: ignore[operator]  # a module's generate() has no type
        profiler.start_profile(ignore_modules)
        call(*given, **named)  # type: ignore[operator]  # a module's generate() has no type
        profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    finally:
        profiler.end_profile()
        for module in was_training:
            module.training = True
    if as_string:
        return number_to_string(profiler.flops), macs_to_string(profiler.macs), params_to_string(profiler.params)
    return profiler.flops, profiler.macs, profiler.params


def _inputs(
    model: Any, input_shape: tuple[int, ...] | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Sequence[Any]:
    if not isinstance(model, nn.Module):
        raise AssertedUsageError(
            f"model must be a torch.nn.Module, got {type(model).__name__}.", do="pass the model.", code="flops-input"
        )
    if input_shape is None:
        if not args and not kwargs:
            raise AssertedUsageError(
                "there is no input: args and kwargs are empty, and input_shape is None.",
                do="pass input_shape=(batch, ...), or the inputs as args= or kwargs=.",
                code="flops-input",
            )
        return args
    if not isinstance(input_shape, tuple) or not input_shape:
        raise AssertedUsageError(
            f"input_shape must be a tuple of at least one number, got {input_shape!r}.",
            do="pass input_shape=(batch, ...).",
            code="flops-input",
        )
    parameter = next(model.parameters(), None)
    if parameter is None:
        return [torch.ones(input_shape)]
    return [torch.ones(input_shape, dtype=parameter.dtype, device=parameter.device)]
