"""Optimizers of whole tensors (LAMB, Muon) beside tensor parallelism: parameters equal those of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers.training import make
from tests.ranks.parallel.tensor.test_engine import ROWS, config, gpt, heads_of_7, train

STEPS = 3
LAMB = {"type": "Lamb", "params": {"lr": 0.05, "weight_decay": 0.1, "max_coeff": 10, "min_coeff": 0.001}}
MUON = {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.1}}
HOST = {"offload_optimizer": {"device": "cpu"}}


BOUND = {"Lamb": 1e-6, "Muon": 1e-12}


def made(factory: Any, optimizer: dict[str, Any]) -> Any:
    """Muon's five iterations multiply what sums round, by 20 and more: its models are in fp64."""
    model = make(factory)
    return model.double() if optimizer is MUON else model


def in_fp64() -> Any:
    return heads_of_7().double()


def run(
    factory: Any, optimizer: dict[str, Any], stage: int, tp: int, rows: int = ROWS, more: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[Any]]:
    """The parameters after the steps, and what the last step communicated."""
    settings = config(stage, tp, optimizer=optimizer, **copy.deepcopy(more or {}))
    settings["train_micro_batch_size_per_gpu"] = rows
    engine = shoal.initialize(model=made(factory, optimizer), config=settings)[0]
    train(engine, range(STEPS - 1), num_rows=rows)
    with current_world().recorder.recording() as entries:
        train(engine, range(STEPS - 1, STEPS), num_rows=rows)
    return engine.module_state_dict(), list(entries)


@pytest.mark.parametrize("optimizer", [LAMB, MUON], ids=["Lamb", "Muon"])
@pytest.mark.parametrize(
    ("factory", "size", "tp", "stage", "more"),
    [
        (gpt, 2, 2, 0, {}),
        (gpt, 4, 2, 3, {}),
        (in_fp64, 4, 2, 1, {}),
        (heads_of_7, 4, 4, 1, {}),
        (heads_of_7, 4, 2, 3, {"parallel": {"tp_sequence_parallel": True}}),
        (gpt, 4, 2, 2, {"zero": HOST}),
        (gpt, 8, 4, 1, {"parallel": {"tp_grid": "2d"}}),
    ],
)
def test_parts_of_tensors_are_updated_as_whole_tensors_are(
    optimizer: dict[str, Any], factory: Any, size: int, tp: int, stage: int, more: dict[str, Any]
) -> None:
    rows = ROWS * size // tp
    ((expected, _),) = run_ranks(1, run, factory, optimizer, 0, 1, rows)
    for values, _ in run_ranks(size, run, factory, optimizer, stage, tp, ROWS, more):
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            error = float((values[name] - value).norm() / value.norm())
            assert error < BOUND[optimizer["type"]], (name, error)


def test_the_step_sends_what_the_optimizers_document() -> None:
    """Of 16 x 16 parts of matrices that two ranks split: sums of squares; the parts there and the results back."""

    class Mlp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(self.up(x)).square().mean()
            return out

    def job(kind: str) -> list[Any]:
        parallel = {"tp": 2, "tp_plan": {"up": "column", "down": "row"}}
        settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": kind}, "parallel": parallel}
        torch.manual_seed(0)
        engine = shoal.initialize(model=Mlp(), config=settings)[0]
        engine.backward(engine(torch.ones(2, 16)))
        with current_world().recorder.recording() as entries:
            engine.step()
        return [(entry.op, entry.label, entry.nbytes) for entry in entries if entry.label.startswith(kind.lower())]

    assert run_ranks(2, job, "Lamb") == [[("all_reduce", "lamb.parts", 16)]] * 2
    # each rank orthogonalises one matrix of 16 x 32: it receives the other rank's half, and its half of the other one
    sent = [("all_to_all", f"muon.parts.{what}", 4 * 256) for what in ("updates", "results")]
    assert run_ranks(2, job, "Muon") == [[("gather_objects", "muon.specs", 0), *sent]] * 2


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("optimizer", [LAMB, MUON], ids=["Lamb", "Muon"])
def test_a_split_tensor_without_a_gradient_is_left_alone(optimizer: dict[str, Any], stage: int) -> None:
    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Linear(16, 32, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor, is_late: bool) -> torch.Tensor:
            y = self.first(x)
            return ((y + self.second(x)) if is_late else y).square().mean()

    def job(tp: int, rows: int) -> dict[str, Any]:
        settings = config(stage, tp, optimizer=optimizer)
        settings["train_micro_batch_size_per_gpu"] = rows
        settings["parallel"]["tp_plan"] = {"first": "column_gather_output", "second": "column_gather_output"}
        engine = shoal.initialize(model=made(Late, optimizer), config=settings)[0]
        x = torch.linspace(-1, 1, rows * 16, dtype=torch.float64 if optimizer is MUON else torch.float32).view(rows, 16)
        for is_late in (False, False, True, False):
            engine.backward(engine(x, is_late))
            engine.step()
        return engine.module_state_dict()

    (expected,) = run_ranks(1, job, 1, ROWS)
    for values in run_ranks(4, job, 2, ROWS):
        for name, value in expected.items():
            assert float((values[name] - value).norm() / value.norm()) < BOUND[optimizer["type"]], name


@pytest.mark.parametrize("optimizer", [LAMB, MUON], ids=["Lamb", "Muon"])
def test_their_state_loads_on_another_number_of_ranks(optimizer: dict[str, Any], tmp_path: Path) -> None:
    def job(stage: int, tp: int, first: int, rows: int) -> dict[str, Any]:
        settings = config(stage, tp, optimizer=optimizer)
        settings["train_micro_batch_size_per_gpu"] = rows
        engine = shoal.initialize(model=made(heads_of_7, optimizer), config=settings)[0]
        if first:
            engine.load_checkpoint(tmp_path, "tag")
        train(engine, range(first, STEPS), num_rows=rows)
        if not first:
            engine.save_checkpoint(tmp_path, "tag")
        train(engine, range(STEPS, STEPS + 2), num_rows=rows)
        return engine.module_state_dict()

    expected = run_ranks(4, job, 3, 2, 0, ROWS)[0]
    values = run_ranks(4, job, 1, 4, STEPS, 2 * ROWS)[0]
    for name, value in expected.items():
        assert float((values[name] - value).norm() / value.norm()) < BOUND[optimizer["type"]], name
