"""The section ``compile`` of the config: which modules are compiled, that they train alike, and that it is undone."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers import models
from tests.helpers.compiling import CountsGraphs, compiling, overwriting
from tests.helpers.composition import AXES, settings_of
from tests.helpers.composition_runs import Trainer, Values
from tests.helpers.training import config, finish, largest_difference, run_steps, start, train_alone

SCALE: ContextVar[float] = ContextVar("scale", default=0.5)


def plain() -> nn.Module:
    return models.Plain(num_blocks=6)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> CountsGraphs:
    """torch.compile without code generation, which takes a minute on a CPU."""
    backend, compile_ = CountsGraphs("eager"), torch.compile

    def compiled(function: Any, *, mode: str) -> Any:
        return compile_(function, backend=backend, dynamic=False)  # no mode, which is inductor's

    monkeypatch.setattr(torch, "compile", compiled)
    return backend


@pytest.mark.parametrize("recomputed", [{}, {"activation_checkpointing": {"modules": ["blocks.*"]}}], ids=["", "again"])
@pytest.mark.parametrize(("regional", "stage"), [(True, 1), (True, 3), (False, 3)])
def test_a_compiled_run_ends_where_one_without_ends(
    regional: bool, stage: int, recomputed: dict[str, Any], counting: CountsGraphs
) -> None:
    alone = train_alone(plain, world=2, steps=3)

    def job() -> tuple[dict[str, torch.Tensor], list[str], bool, list[str]]:
        section = {"enabled": True, "regional": regional}
        engine = start(plain, config(stage, compile=section, **recomputed))
        model = engine.module

        def compiled() -> list[str]:
            return [name for name, m in model.named_modules() if m._compiled_call_impl is not None]

        names, is_compiled = compiled(), engine.is_compiled
        run_steps(engine, 3)
        return finish(engine, []).parameters, names, is_compiled, compiled()

    with compiling():
        results = run_ranks(2, job)
    for parameters, names, is_compiled, left in results:
        assert names == ([f"blocks.{index}" for index in range(6)] if regional else [""])
        assert is_compiled
        assert left == []
        assert largest_difference(parameters, alone.parameters) <= 1e-5
    assert counting.num_graphs >= 1


def test_a_model_without_alike_blocks_is_compiled_whole(
    counting: CountsGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with compiling():
        settings = {"train_batch_size": 1, "compile": {"enabled": True, "mode": "max-autotune"}}
        engine = start(lambda: nn.Linear(4, 1), settings)
        assert engine.is_compiled
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        engine.destroy()
    assert 'compile: the whole model (Linear) by torch.compile(mode="max-autotune")' in caplog.text
    assert not engine.is_compiled
    assert counting.num_graphs == 1


class Unreadable(nn.Module):
    """The compiler cannot read ``ContextVar.get``, and divides no recomputed function into several graphs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * SCALE.get()


@pytest.mark.parametrize("readable", [True, False])
def test_a_section_without_effect_is_logged(
    readable: bool, counting: CountsGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) if readable else Unreadable(4) for _ in range(2)))

    with compiling():
        torch._dynamo.utils.counters.clear()
        engine = start(model, {"train_batch_size": 1, "compile": {"enabled": True}})
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        engine.destroy()
    assert caplog.text.count("nothing was compiled in the first step") == (not readable)
    assert (counting.num_graphs == 0) == (not readable)


def test_without_the_section_nothing_is_compiled() -> None:
    engine = start(plain, config(0))
    assert not engine.is_compiled
    engine.destroy()


Job = tuple[list[tuple[str, str, int]], torch.Tensor, Values]
DEEP = {"deepcompile": True, "offload_opt_states": True, "offload_parameters": True}
CASES: dict[str, tuple[int, dict[str, str], dict[str, Any]]] = {  # stage, axes, section
    "stage 0": (0, {}, {"enabled": True}),
    "stage 1 and tp": (1, {"tp": "2"}, {"enabled": True}),
    "stage 2 and sp": (2, {"sp": "2"}, {"enabled": True}),
    "tp that splits the sequence": (3, {"tp": "2 split"}, {"enabled": True}),
    "cp": (3, {"cp": "2"}, {"enabled": True}),
    "tp in bf16": (3, {"tp": "2", "precision": "autocast"}, {"enabled": True}),
    "recomputed": (3, {"recompute": "blocks"}, {"enabled": True}),
    "experts in bf16, int8 rows": (
        3,
        {"ranks": "2", "experts": "ep 2", "precision": "autocast", "wire": "activations"},
        {"enabled": True},
    ),
    "experts that move, recomputed": (
        3,
        {"ranks": "2", "experts": "ep 2 moved", "recompute": "blocks"},
        {"enabled": True},
    ),
    "experts split by tp": (1, {"ranks": "2", "tp": "2", "experts": "ep 2 split"}, {"enabled": True}),
    "DeepCompile": (3, {"state": "host", "parameters": "host"}, DEEP),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_over_ranks_are_one_graph_and_end_to_the_bit_as_uncompiled(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage, axes, section = CASES[case]
    plain_axes = {name: next(iter(values)) for name, values in AXES.items()}
    settings, run = settings_of({**plain_axes, "ranks": "1", "stage": str(stage), **axes})
    run = replace(run, steps=2, blocks=5, heads=8, spare_width=0)  # blocks of unequal parts are several graphs
    backend, compile_ = CountsGraphs(overwriting), torch.compile
    how = {"backend": backend, "dynamic": False, "fullgraph": True}
    monkeypatch.setattr(torch, "compile", lambda function, *, mode: compile_(function, **how))

    def job(settings: dict[str, Any]) -> Job:
        torch.set_autocast_cache_enabled(False)
        with current_world().recorder.recording() as entries:
            losses, parameters = Trainer(settings, run, tmp_path, backend).train()
        return sorted((entry.op, entry.label, entry.nbytes) for entry in entries), losses, parameters

    asked = {**settings, "compile": section}
    if section is DEEP:  # it stands for the sections that the uncompiled run names
        kept = settings["zero_optimization"].items()
        asked["zero_optimization"] = {name: value for name, value in kept if not name.startswith("offload_")}
    with compiling():
        compiled = run_ranks(run.world_size, lambda: job(asked))
    uncompiled = run_ranks(run.world_size, lambda: job(settings))
    assert 1 <= backend.num_graphs <= run.world_size  # not one for each of the five blocks
    for mine, plain_run in zip(compiled, uncompiled, strict=True):
        assert mine[0] == plain_run[0]
        assert torch.equal(mine[1], plain_run[1])
        assert all(torch.equal(value, plain_run[2][name]) for name, value in mine[2].items())
