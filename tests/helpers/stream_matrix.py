"""The settings that change which streams there are and what they wait for, and a run of them under ``check_streams``.

The model, the batches and most axes are those of the composition matrix.
"""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.engine.pipeline import PipelineEngine
from shoal.parallel import activations
from shoal.simulation.check import StreamCheck
from shoal.streams import Simulation, simulation
from tests.helpers import composition_runs
from tests.helpers.compiling import CountsGraphs
from tests.helpers.composition import AXES, Combination, Run, Values, on_disk, settings_of
from tests.helpers.composition_runs import Block


def _some(axis: str, *values: str) -> Values:
    return {value: AXES[axis][value] for value in values}


STREAM_AXES: dict[str, Values] = {
    "optimizer": AXES["optimizer"],
    "units": _some("units", "blocks"),
    "stage": AXES["stage"],
    "ranks": _some("ranks", "2", "1"),
    "tp": _some("tp", "1", "2"),
    "sp": AXES["sp"],
    "cp": AXES["cp"],
    "pp": AXES["pp"],
    "schedule": _some("schedule", "1f1b", "zb_h1"),
    "experts": _some("experts", "no", "ep 2"),
    "hybrid": _some("hybrid", "no", "mics", "hpz"),
    "state": _some("state", "device", "host", "ahead", "disk"),
    "parameters": AXES["parameters"],
    "recompute": _some("recompute", "no", "host", "offload"),
    "precision": _some("precision", "fp32", "bf16", "fp16"),
    "accumulation": AXES["accumulation"],
    "overlap": {"yes": AXES["overlap"]["yes"], "no": {"zero_optimization": {"overlap_param_gather": False}}},
    "gathering": AXES["gathering"],
    "registered": {"no": {}, "yes": {"zero_optimization": {"nccl_ub": True}}},
    "wire": AXES["wire"],
    "between": {
        "nothing": {},
        "evaluation": {"run": {"between": "evaluate"}},
        "save": {"checkpoint": {"async_save": True}, "run": {"between": "save"}},
        "resume": AXES["between"]["resume"],
        "exception": {"run": {"between": "fail"}},
    },
    "stream": {"one": {}, "of the model": {"run": {"style": "stream"}}, "of the script": {"run": {"style": "script"}}},
}


class BlockOnTwoStreams(Block):
    """A block whose keys are computed on a stream of the model's own, beside the queries."""

    waits = True

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        accelerator, own = accelerator_of_thread(), self.k_proj
        compute, side = accelerator.current(), accelerator.stream()

        def beside(y: torch.Tensor) -> torch.Tensor:
            if self.waits:
                side.wait_stream(compute)
            with side:
                keys = own(y)
            if self.waits:
                compute.wait_stream(side)
            accelerator.record_stream(keys, compute)
            return keys

        self.__dict__["k_proj"] = beside
        try:
            return super().forward(x, *others)
        finally:
            del self.__dict__["k_proj"]


def accelerator_of_thread() -> Simulation:
    found = simulation()
    assert found is not None
    return found


class CheckedTrainer(composition_runs.Trainer):
    """A trainer with what only matters to streams."""

    def start(self) -> shoal.Engine:
        engine = super().start()
        if self.run.style == "stream":
            for module in engine.module.modules():
                if isinstance(module, Block):
                    module.__class__ = BlockOnTwoStreams
        self.script_stream = accelerator_of_thread().stream() if self.run.style == "script" else None
        return engine

    @property
    def is_pipeline(self) -> bool:
        return self.run.pp > 1

    def micro_step(self, index: int, is_last: bool) -> torch.Tensor:
        # Every other micro-step runs on the script's stream. That it waits for the one before is the engine's matter.
        stream = self.script_stream if index % 2 else None
        before = accelerator_of_thread().current()
        inside: AbstractContextManager[Any] = nullcontext() if stream is None else stream
        with inside:
            found = super().micro_step(index, is_last)
        if stream is not None:
            before.wait_stream(stream)
            accelerator_of_thread().record_stream(found, before)
        return found

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder, tag="middle")

    def change(self) -> None:
        """The script changes parameters, on the first rank of each axis."""
        parameters = list(self.engine.module.parameters())
        with shoal.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.5)

    def fail(self) -> None:
        """An exception of the user's own in the middle of a forward, which the script catches.

        Where the ranks of a pipeline stage have collectives of their own, an error ends the run: nothing to catch.
        """
        if isinstance(self.engine, PipelineEngine) and not self.engine._runner._goes_on:
            return

        def stop(*_: Any) -> None:
            raise ArithmeticError("the user's own")

        blocks = [module for module in self.engine.module.modules() if isinstance(module, Block)]
        handle = blocks[-1].register_forward_pre_hook(stop)
        try:
            if self.is_pipeline:
                self.engine.train_batch(self.batch(98) for _ in range(self.engine.gradient_accumulation_steps()))
            else:
                self.micro_step(98, True)
        except Exception as error:
            if "the user's own" not in f"{error} {error.__cause__}":
                raise
        finally:
            handle.remove()


def checks_of(combination: Combination, *, num_steps: int = 3) -> list[StreamCheck]:
    """Train as a combination says, on ranks that are threads. Returns: what each rank's check found."""
    settings, run = settings_of(combination, STREAM_AXES)
    return checks_of_run(
        settings, Run(**{**run.__dict__, "steps": num_steps, "blocks": 2 if run.blocks == 3 else run.blocks})
    )


def checks_of_run(settings: dict[str, Any], run: Run) -> list[StreamCheck]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "LEAST_NBYTES", 0)
        settings = on_disk(settings, name)

        def rank() -> StreamCheck:
            with shoal.check_streams(raises=False) as check:
                CheckedTrainer(settings, run, Path(name) / "checkpoint", CountsGraphs("aot_eager")).train()
            return check

        return run_ranks(run.world_size, rank, timeout=120)


def reports(checks: list[StreamCheck]) -> str:
    return "\n\n".join(str(finding) for check in checks for finding in check.findings)


def plain() -> Combination:
    """The first value of each axis."""
    return {axis: next(iter(values)) for axis, values in STREAM_AXES.items()}


def named(combination: Combination) -> str:
    """A combination by the values that are not their axis's first."""
    first = plain()
    return ", ".join(f"{axis} {value}" for axis, value in combination.items() if value != first[axis]) or "plain"
