"""``loss_spike``: what a step does whose loss is far above those before."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import NonFiniteError

SPIKE = 15  # the step whose loss is so far off on rank 1


def train(
    stage: int, action: str | None, offsets: list[float], folder: Path | None = None, left_out: int | None = None
) -> tuple[torch.Tensor, int]:
    """A step for each offset of the loss. Returns: the weight, and the steps that were skipped."""
    model = torch.nn.Linear(4, 1)  # ranks are threads, which share torch's generator
    model.load_state_dict({"weight": torch.tensor([[0.5, -0.3, 0.1, 0.2]]), "bias": torch.zeros(1)})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "loss_spike": {"action": action, "window": 20},
    }
    engine, *_ = shoal.initialize(model=model, config=config)
    if folder is not None and folder.exists():
        engine.load_checkpoint(folder)
    generator = torch.Generator().manual_seed(current_world().rank)
    for number, offset in enumerate(offsets):
        batch = torch.randn(2, 4, generator=generator)
        if number != left_out:
            engine.backward(engine(batch).square().mean() + offset * current_world().rank)
            engine.step()
    if folder is not None:
        engine.save_checkpoint(folder)
    weight = engine.module_state_dict()["weight"].clone()
    skipped = engine.skipped_steps
    engine.destroy()
    return weight, skipped


OFFSETS = [1000.0 if number == SPIKE else 0.0 for number in range(20)]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_skipped_spike_leaves_everything_as_if_the_step_had_not_been(stage: int) -> None:
    found = run_ranks(2, train, stage, "skip", OFFSETS)
    expected = run_ranks(2, train, stage, None, [0.0] * 20, None, SPIKE)
    for (weight, skipped), (reference, _) in zip(found, expected, strict=True):
        assert skipped == 1
        assert torch.equal(weight, reference)


def test_a_spike_is_logged_with_the_losses_before(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="shoal"):
        found = run_ranks(2, train, 0, "warn", OFFSETS)
    assert found[0][1] == 0
    (text,) = [record.message for record in caplog.records if "losses before" in record.message]
    assert text.startswith(f"step {SPIKE}: the loss 50") and "the mean of the 15 losses before is " in text


def test_a_spike_ends_the_run_where_the_config_says_so() -> None:
    with pytest.raises(NonFiniteError, match=rf"\[loss-spike\] the loss 50.* is above .*\n  where: step {SPIKE}\n"):
        run_ranks(2, train, 0, "stop", OFFSETS)


def test_a_level_that_stays_is_no_spike_after_ten_steps() -> None:
    offsets = [0.0] * 15 + [1000.0] * 15
    assert [skipped for _, skipped in run_ranks(2, train, 0, "skip", offsets)] == [10, 10]


def test_the_losses_before_are_in_the_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, train, 1, "skip", [0.0] * 15, tmp_path / "saved")
    assert [skipped for _, skipped in run_ranks(2, train, 1, "skip", [1000.0, 0.0], tmp_path / "saved")] == [1, 1]


def test_without_enough_losses_nothing_is_judged() -> None:
    assert run_ranks(1, train, 0, "stop", [0.0] * 5 + [1000.0])[0][1] == 0
