"""``loss_spike``: what a step does whose loss is far above those before."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import NonFiniteError, UsageError

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


class Numbered(Dataset[Any]):
    """Samples with their numbers; ``poisoned`` ones have a loss that is far off."""

    def __init__(self, poisoned: set[int]) -> None:
        self._values = torch.randn(200, 4, generator=torch.Generator().manual_seed(7))
        self._poisoned = poisoned

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, float, int]:
        return self._values[number], 1000.0 * (number in self._poisoned), number


SAVED, LAST = 12, 17  # the step that is saved, and the one that a run ends with


def train_on(
    action: str | None,
    stage: int,
    poisoned: set[int],
    folder: Path | None = None,
    *,
    num_steps: int = LAST,
    resumes: bool = False,
    given: list[list[list[int]]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, float, list[list[int]], int]:
    """Train until ``global_steps`` is ``num_steps``.

    Args:
        folder: where step ``SAVED`` is saved; ``resumes``: where it is loaded.
        given: by rank, the numbers of the samples of each step, instead of those of the loader.

    Returns: the weight, its average of squares, the learning rate, the numbers of each step's samples, the steps.
    """
    data = Numbered(poisoned)
    model = torch.nn.Linear(4, 1)  # ranks are threads, which share torch's generator
    model.load_state_dict({"weight": torch.tensor([[0.5, -0.3, 0.1, 0.2]]), "bias": torch.zeros(1)})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "loss_spike": {"action": action, "window": 20, "factor": 20.0},
    }
    engine, _, loader, _ = shoal.initialize(model=model, config=config, training_data=data)
    if resumes:
        engine.load_checkpoint(folder)
    rank, numbers = current_world().rank, []
    batches = iter(shoal.data.RepeatingLoader(loader))
    while engine.global_steps < num_steps:
        if given is None:
            values, offset, number = next(batches)
        else:
            number = torch.tensor(given[rank][len(numbers)])
            values, offset = torch.stack([data[int(each)][0] for each in number]), torch.zeros(2)
        numbers.append(number.tolist())
        engine.backward((engine(values).square().squeeze(1) + offset).mean())
        engine.step()
        if engine.global_steps == SAVED and folder is not None and len(numbers) == SAVED and not resumes:
            engine.save_checkpoint(folder)
    weight = engine.module_state_dict()["weight"].clone()
    average = shoal.zero.safe_get_full_optimizer_state(next(engine.module.parameters()), "exp_avg_sq").clone()
    found = weight, average, engine.get_lr()[0], numbers, engine.skipped_steps
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "spikes"), [(0, [15]), (1, [15, 17]), (3, [15, 17])])
def test_a_rewound_run_is_as_one_that_never_saw_the_samples_since_the_checkpoint(
    stage: int, spikes: list[int], tmp_path: Path
) -> None:
    order = [numbers for _, _, _, numbers, _ in run_ranks(2, partial(train_on, None, stage, set(), num_steps=30))]
    poisoned = {order[1][step][0] for step in spikes}  # one sample of rank 1
    found = run_ranks(2, train_on, "rewind", stage, poisoned, tmp_path / "saved")
    after = [numbers[spikes[-1] + 1 :][: LAST - SAVED] for numbers in order]
    expected = run_ranks(2, partial(train_on, None, stage, set(), tmp_path / "saved", resumes=True, given=after))
    for rank in range(2):
        weight, average, rate, numbers, num_skipped = found[rank]
        reference = expected[rank]
        assert numbers == order[rank][: len(numbers)] and len(numbers) == spikes[-1] + 1 + LAST - SAVED
        assert num_skipped == reference[4] == 0
        assert torch.equal(weight, reference[0]) and torch.equal(average, reference[1]) and rate == reference[2]


def test_a_run_that_gets_no_further_stops_after_three_rewinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order = [numbers for _, _, _, numbers, _ in run_ranks(2, partial(train_on, None, 0, set(), num_steps=30))]
    poisoned = {number for numbers in order for step in numbers[15:] for number in step}
    with pytest.raises(NonFiniteError, match="went back to a checkpoint 3 times and got no further"):
        run_ranks(2, train_on, "rewind", 0, poisoned, tmp_path / "saved")
    texts = [record.getMessage() for record in caplog.records if "are left out" in record.getMessage()]
    path = tmp_path / "saved/global_step12"
    assert texts == [f"went back to step 12 of {path}; samples 48 to {stop} are left out." for stop in (64, 68, 72)]


def test_a_spike_before_the_first_checkpoint_stops() -> None:
    order = [numbers for _, _, _, numbers, _ in run_ranks(2, train_on, None, 0, set())]
    with pytest.raises(NonFiniteError, match="No checkpoint was saved to go back to"):
        run_ranks(2, train_on, "rewind", 0, {order[0][15][0]})


def test_a_run_whose_samples_cannot_be_left_out_does_not_start() -> None:
    with pytest.raises(
        UsageError, match=r"\[data-skip\] loss_spike.action 'rewind' leaves samples out[^$]*training_data="
    ):
        run_ranks(1, train, 0, "rewind", [0.0])
