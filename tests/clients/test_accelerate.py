"""Accelerate trains on Shoal as it trains on DeepSpeed 0.19.8: the curves, the facts, what is saved."""

from __future__ import annotations

import pytest

from tests.clients.running import BOUNDS, ClientRun, differences, golden, run_script

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(1200)

SCRIPT = "accelerate_cases"
FROZEN = "resume-own-offload"  # DeepSpeed's learning rate stays where the checkpoint left it


@pytest.fixture(scope="module")
def run() -> ClientRun:
    return run_script(f"{SCRIPT}.py", timeout=1100)


@pytest.mark.parametrize("name", sorted(set(golden(SCRIPT)["cases"]) - {FROZEN}))
def test_accelerate_trains_and_saves_as_with_deepspeed(run: ClientRun, name: str) -> None:
    theirs = golden(SCRIPT)["cases"][name]
    if name == "own-stage0":  # DeepSpeed knows no norm at stage 0
        assert "norm" not in theirs["curves"]
        assert len(run.case(name)["curves"]["norm"]) == 6
    assert differences(run.case(name), theirs, BOUNDS["bf16" if "bf16" in name else "fp32"]) == []


def test_the_learning_rate_moves_on_after_a_resume_with_offload_and_ones_own_optimizer(run: ClientRun) -> None:
    theirs = golden(SCRIPT)["cases"][FROZEN]["curves"]
    ours = run.case(FROZEN)["curves"]
    bound = BOUNDS["fp32"]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=bound)
    assert ours["resumed_loss"] == pytest.approx(ours["loss"][3:], abs=bound)
    assert theirs["resumed_loss"] != pytest.approx(theirs["loss"][3:], abs=bound)


def test_no_rank_is_told_that_its_schedule_steps_before_its_optimizer(run: ClientRun) -> None:
    assert run.case(FROZEN)
    assert not [text for text in run.said if "Detected call of `lr_scheduler.step()`" in text]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resumed_run_goes_on_with_the_same_losses_and_rates(run: ClientRun, stage: int) -> None:
    curves = run.case(f"resume-stage{stage}")["curves"]
    assert curves["resumed_loss"] == pytest.approx(curves["loss"][3:], abs=1e-6)
    assert curves["resumed_lr"] == curves["lr"][3:]
