"""What a training forward gets by the step: lengths of a curriculum, the share of layers to keep; also after a stop."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from tests.helpers.models import SEQUENCE, Plain, cross_entropy
from tests.helpers.resuming import Run, assert_goes_on, engine_of, resume, stop
from tests.helpers.training import adamw, batch, config, make

DROP = {"progressive_layer_drop": {"enabled": True, "theta": 0.2, "gamma": 0.5}}
LENGTHS: dict[str, Any] = {
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 2,
        "max_difficulty": 5,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 1},
    }
}
CUSTOM = {"curriculum_learning": {**LENGTHS["curriculum_learning"], "schedule_type": "custom"}}
STEPS = 8
THETAS = [1.0] + [0.8 * math.exp(-0.5 * step) + 0.2 for step in range(STEPS - 1)]  # a forward gets the last step's
GROWN = [2, 3, 3, 4, 4, 5, 5, 5]  # 2 + 3 step / 6


class Shortened(Plain):
    """Cuts the sequences and skips blocks as it is told, the deeper ones sooner; keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float | None, int | None]] = []
        self.share = 1.0
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            drawn = ((int(self.num_passes) * 7 + index * 3) % 10) / 10  # the same on every rank
            if drawn < 1 - (index + 1) / len(self.blocks) * (1 - self.share):
                x = block(x)
        return x

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        *,
        progressive_layer_drop: bool = False,
        pld_theta: float | None = None,
        curriculum_seqlen: int | None = None,
    ) -> torch.Tensor:
        assert progressive_layer_drop is (pld_theta is not None)
        self.told.append((pld_theta, curriculum_seqlen))
        self.num_passes += 1
        self.share = 1.0 if pld_theta is None else pld_theta
        length = SEQUENCE if curriculum_seqlen is None else curriculum_seqlen
        return cross_entropy(self.logits(tokens[:, :length]), targets[:, :length])


def alone(model: Shortened, world: int) -> list[float]:
    """Plain PyTorch, with the curriculum written out. Returns: the mean loss of each step."""
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(world):
            model.num_passes.fill_(step)
            theta = THETAS[step]
            loss = model(
                *batch(step, rank, world),
                progressive_layer_drop=True,
                pld_theta=theta,
                curriculum_seqlen=GROWN[step],
            )
            (loss / world).backward()
            total += float(loss.detach()) / world
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_configured_by_the_file_train_as_one_process_configured_in_code(stage: int) -> None:
    model = make(Shortened)
    expected = alone(copy.deepcopy(model), 2)

    def rank() -> tuple[list[float], list[tuple[float | None, int | None]], list[float | None]]:
        engine = engine_of(Run(config(stage, **DROP, **LENGTHS), 2, lambda: copy.deepcopy(model), adamw))
        losses, after = [], []
        for step in range(STEPS):
            loss = engine(*batch(step, current_world().rank, 2))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            after.append(engine.get_pld_theta())
        told = engine.module.told
        engine.destroy()
        return losses, told, after

    results = run_ranks(2, rank)
    for _, told, after in results:
        assert [theta for theta, _ in told] == pytest.approx(THETAS, abs=1e-15)
        assert [length for _, length in told] == GROWN
        assert after == pytest.approx([*THETAS[1:], 0.8 * math.exp(-0.5 * (STEPS - 1)) + 0.2], abs=1e-15)
    mean = [sum(values) / 2 for values in zip(*(losses for losses, _, _ in results), strict=True)]
    assert mean == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_micro_batches_of_a_step_get_the_same_values_and_evaluation_none(stage: int) -> None:
    settings = config(stage, gradient_accumulation_steps=2, **DROP, **LENGTHS)

    def rank() -> list[tuple[float | None, int | None]]:
        engine = engine_of(Run(settings, 2, Shortened, adamw))
        for index in range(4):
            engine.backward(engine(*batch(index, current_world().rank, 2)))
            engine.step()
        engine.eval()
        engine(*batch(9, current_world().rank, 2))
        told: list[tuple[float | None, int | None]] = engine.module.told
        engine.destroy()
        return told

    for told in run_ranks(2, rank):
        assert told == [(1.0, 2), (1.0, 2), (1.0, 3), (1.0, 3), (None, None)]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_stop_changes_no_reported_value(stage: int, tmp_path: Path) -> None:
    run = Run(config(stage, **DROP, **LENGTHS), 2, Shortened, adamw)
    assert_goes_on(run, tmp_path, at=3, until=6, dirty=1)


def told_after_resume(run: Run, folder: Path, ranks: int = 2) -> list[Any]:
    def rank() -> Any:
        engine = engine_of(replace(run, world=ranks))
        engine.load_checkpoint(folder)
        engine(*batch(0, current_world().rank, 2))
        told = engine.module.told[-1]
        engine.destroy()
        return told

    return run_ranks(ranks, rank)


def test_another_schedule_than_the_checkpoints_goes_by_the_step_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop(Run(config(3, **DROP, **LENGTHS), 2, Shortened, adamw), tmp_path, at=4)
    slower = copy.deepcopy(LENGTHS)
    slower["curriculum_learning"]["schedule_config"]["total_curriculum_step"] = 15
    faster = {"progressive_layer_drop": {"enabled": True, "theta": 0.0, "gamma": 1.0}}
    other = Run(config(3, **faster, **slower), 2, Shortened, adamw)
    for theta, length in told_after_resume(other, tmp_path):
        assert theta == pytest.approx(math.exp(-3.0)) and length == 3
    assert "curriculum_learning differs from the checkpoint's" in caplog.text
    assert "progressive_layer_drop differs from the checkpoint's" in caplog.text


def test_a_checkpoint_without_schedules_is_one_at_its_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = Run(config(0), 2, Shortened, adamw)
    stop(plain, tmp_path / "plain", at=4)
    other = Run(config(0, **DROP, **LENGTHS), 2, Shortened, adamw)
    for theta, length in told_after_resume(other, tmp_path / "plain"):
        assert theta == pytest.approx(0.8 * math.exp(-1.5) + 0.2) and length == 4
    assert "the checkpoint has no curriculum_learning" in caplog.text
    stop(other, tmp_path / "with", at=1)
    resume(plain, tmp_path / "with", at=1, until=2)
    assert "the checkpoint's run had progressive_layer_drop, this one has not" in caplog.text


def test_a_custom_schedule_is_the_scripts_and_keeps_its_last_value_after_a_stop(tmp_path: Path) -> None:
    def rank() -> list[list[int]]:
        found = []
        for _ in range(2):
            engine = engine_of(Run(config(3, **CUSTOM), 2, Shortened, adamw))
            engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: [2, 2, 4, 5, 3][min(step, 4)]})
            if found:
                engine.load_checkpoint(tmp_path)
            for index in range(3):
                engine.backward(engine(*batch(index, current_world().rank, 2)))
                engine.step()
            engine.save_checkpoint(tmp_path)
            found.append([length for _, length in engine.module.told])
            engine.destroy()
        return found

    for first, second in run_ranks(2, rank):
        assert first == [2, 4, 5] and second == [5, 5, 5]


def one(settings: dict[str, Any], model: nn.Module) -> shoal.Engine:
    return shoal.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings)[0]


@pytest.mark.parametrize(("section", "argument"), [(DROP, "progressive_layer_drop"), (LENGTHS, "curriculum_seqlen")])
def test_a_model_that_does_not_take_it_is_an_error_that_names_the_section(
    section: dict[str, Any], argument: str
) -> None:
    engine = one(config(0, **section), make(Plain))
    with pytest.raises(TypeError, match=argument) as caught:
        engine(*batch(0, 0, 1))
    assert f'shoal: "{next(iter(section))}" in the config passes' in caught.value.__notes__[0]
    engine.eval()
    engine(*batch(0, 0, 1))
    engine.destroy()


def test_a_function_for_a_schedule_that_takes_none_is_refused() -> None:
    for settings in (config(0), config(0, **LENGTHS)):
        engine = one(settings, make(Shortened))
        with pytest.raises(UsageError, match="no curriculum that takes one"):
            engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 1})
        engine.destroy()
    engine = one(config(0, **CUSTOM), make(Shortened))
    with pytest.raises(UsageError, match="no function for curriculum_type 'seqlen'"):
        engine.set_custom_curriculum_learning_schedule({"rarity": lambda step: 1})
    with pytest.raises(UsageError, match="no function was set"):
        engine(*batch(0, 0, 1))
    engine.destroy()


@pytest.mark.usefixtures("deepspeed_classes")
def test_the_engine_answers_in_deepspeeds_words() -> None:
    engine = one(config(0, **DROP, **LENGTHS), make(Shortened))
    assert engine.pld_enabled() and engine.curriculum_enabled_legacy()
    assert engine.progressive_layer_drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    assert engine.pld_params() == {"enabled": True, "theta": 0.2, "gamma": 0.5}
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 2
    assert engine.curriculum_params_legacy()["curriculum_type"] == "seqlen"
    engine.destroy()
    engine = one(config(0), make(Shortened))
    assert not engine.pld_enabled() and not engine.curriculum_enabled_legacy()
    assert engine.progressive_layer_drop is None and engine.curriculum_scheduler_legacy is None
    assert engine.get_pld_theta() is None and engine.pld_params() is False
    engine.destroy()
