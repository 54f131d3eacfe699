"""The random search draws runnable cases, sees a wrong number, and makes failing cases small."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import reference
from tests.helpers.places import ROOT
from tests.search.__main__ import shrink
from tests.search.cases import OPTIONS, complete, draw, world_size


def test_the_reference_and_the_searchs_models_import_nothing_of_shoal() -> None:
    for name in ("helpers/reference.py", "search/models.py", "search/cases.py"):
        tree = ast.parse((ROOT / "tests" / name).read_text())
        for node in ast.walk(tree):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [each for each in names if each.split(".")[0] == "shoal"], name


def test_the_reference_steps_as_a_loop_of_pytorch_does() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [{"x": torch.randn(number, 4)} for number in (2, 3, 4, 1)]

    def loss_of(module: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = module(batch["x"]).square().mean()
        return loss

    found = reference.train(
        model,
        [batches[:2], batches[2:]],
        loss_of,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        count=lambda batch: len(batch["x"]),
        numbers=reference.Numbers(by_tokens=True, clip=0.5),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = loss_of(model, {"x": torch.cat([each["x"] for each in batches[2 * step : 2 * step + 2]])})
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert found.losses[step] == pytest.approx(loss.item(), rel=1e-6)
        assert found.norms[step] == pytest.approx(norm.item(), rel=1e-6)
    torch.testing.assert_close(found.parameters["weight"], model.weight.detach())


def test_a_seed_gives_the_same_case_which_has_at_most_four_ranks_and_known_options() -> None:
    for seed in range(200):
        case = draw(seed)
        assert case == draw(seed)
        whole = complete(case)
        assert whole is not None
        assert world_size(whole) <= 4
        assert whole.keys() == OPTIONS.keys()


def test_a_failing_case_is_shrunk_to_the_options_that_it_needs() -> None:
    class Worker:
        def run(self, case: dict[str, Any]) -> dict[str, Any]:
            fails = case.get("tp", 1) > 1 and case.get("clip", 0) > 0
            return {"kind": "wrong" if fails else "equal", "what": ""}

    case = {"model": "gpt2", "stage": 3, "dp": 2, "tp": 2, "clip": 0.05, "ragged": True, "precision": "bf16"}
    worker: Any = Worker()
    small, _ = shrink(case, worker.run(case), worker)
    assert small == {"model": "own", "tp": 2, "clip": 0.05}
