"""Trainer on Shoal goes on where it fails on DeepSpeed."""

from __future__ import annotations

import pytest

from tests.clients.running import ClientRun, run_script

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def run() -> ClientRun:
    return run_script("trainer_beyond_cases.py", timeout=280)


def test_a_weight_normed_model_from_pretrained_trains_sharded_as_it_does_whole(run: ClientRun) -> None:
    whole, sharded = run.case("speech-stage2"), run.case("speech-stage3")
    assert len(sharded["curves"]["loss"]) == 8 and sharded["curves"]["norm"][0] > 0.1
    assert sharded["curves"] == whole["curves"] and sharded["weights"] == whole["weights"]


def test_one_trainer_evaluates_and_then_trains_as_if_it_had_only_trained(run: ClientRun) -> None:
    both, trained = run.case("evaluated-and-trained"), run.case("trained")
    assert both["ends"][0] == pytest.approx(both["curves"]["logged"][0], abs=0.1)  # of the same untrained model
    assert both["curves"] == trained["curves"] and both["weights"] == trained["weights"]
