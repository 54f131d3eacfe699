"""``shoal.verify``: gradients reach the optimizer summed over what their rows name, and divided by the ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.protocol import FinishedWork
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.gradient import Gradient
from shoal.simulation.verify import verify
from tests.simulation.dry_run.test_verify import Model, typed

MISSING = "its row sums the gradient, and no collective has before the step"


def without(monkeypatch: pytest.MonkeyPatch, axis: str) -> None:
    """Leave out the sums over an axis of the mesh."""
    right = FlatBuffer.issue

    def issue(buffer: FlatBuffer, move: Any, *args: Any, **options: Any) -> Any:
        is_left_out = move.axis == axis and move.collective != "all_gather"
        return FinishedWork(buffer.memory) if is_left_out else right(buffer, move, *args, **options)

    monkeypatch.setattr(FlatBuffer, "issue", issue)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_sum_over_replicas_that_is_never_issued_is_found(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "dp_replicate" if stage else "dp_shard")
    found = typed(8, stage=stage, dp_replicate=2).findings
    assert found[0].what == MISSING
    assert found[0].axis == ("dp_replicate" if stage else "dp_shard")
    assert {"layers.0.up.weight", "layers.1.norm.bias", "head.weight"} <= set(found[0].parameters)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_sum_of_norms_between_split_sequences_that_is_never_issued_is_found(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "tp")
    found = typed(stage=stage, tp_sequence_parallel=True).findings
    fault = next(each for each in found if each.what == MISSING)
    assert fault.axis == "tp"
    assert {name.split(".", 2)[-1] for name in fault.parameters} == {"norm.weight", "norm.bias", "down.bias"}


@pytest.mark.parametrize(
    ("stage", "pre", "post", "is_of"), [(0, 1.0, 1.0, "1"), (1, 0.5, 0.5, "0.25"), (3, 1.0, 0.25, "0.25")]
)
def test_a_mean_over_the_ranks_that_is_never_taken_or_taken_twice_is_found(
    stage: int, pre: float, post: float, is_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Gradient.__init__

    def init(gradient: Gradient, *args: Any, **options: Any) -> None:
        right(gradient, *args, **options)
        gradient.policy = dataclasses.replace(gradient.policy, pre_scale=pre, post_scale=post)

    monkeypatch.setattr(Gradient, "__init__", init)
    (fault,) = typed(stage=stage).findings
    assert fault.what == f"the sum of the ranks' gradients is multiplied by {is_of}, and their mean is 0.5 of it"
    assert (fault.axis, len(fault.parameters)) == ("dp_shard", 14)


@pytest.mark.parametrize("is_of_ranks", [True, False])
def test_a_loss_that_the_script_divides_by_the_ranks_is_found(is_of_ranks: bool) -> None:
    def train() -> None:
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        engine = shoal.initialize(model=Model(), config=settings)[0]
        tokens = torch.zeros(2, 8, dtype=torch.long)
        loss = engine(tokens, tokens) / (engine.world_size if is_of_ranks else 2)
        engine.backward(loss)
        engine.step()
        engine.destroy()

    found = verify(train, 2).findings
    what = "the loss is multiplied by 0.5, by 0.25 on twice the ranks: the engine takes the mean over the ranks too"
    assert [(each.axis, each.what) for each in found] == ([("dp_shard", what)] if is_of_ranks else [])
