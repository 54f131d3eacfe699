"""Replicas whose ranks divide layers, sequences or experts: one is killed inside the sum, and joins again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.composition import settings_of
from tests.helpers.replicas import Decoder, lose_and_replace_the_second, running, settings, trained_in_one_job

EXACT = {
    "tp": {"tp": "2", "stage": "1"},
    "pp": {"pp": "2", "stage": "1"},
    "sp": {"sp": "2", "stage": "3"},
    "sp 2": {"sp": "2", "stage": "2"},
    "experts": {"experts": "ep 2", "stage": "2"},
}
# One job sums over its ranks once a step here, after the micro-batches, and each replica before the mean.
OTHER_ORDER = {
    "tp split": {"tp": "2 split", "stage": "3"},
    "pp tied": {"pp": "2", "stage": "0", "accumulation": "2"},
    "zbv": {"pp": "2", "schedule": "zbv", "stage": "1", "accumulation": "2"},
}


@pytest.mark.parametrize("name", [*EXACT, *OTHER_ORDER])
def test_the_rest_goes_on_as_one_job_of_the_layout(name: str, tmp_path: Path) -> None:
    of_layout, run_of_layout = settings_of((EXACT | OTHER_ORDER)[name])
    stage = of_layout.pop("zero_optimization")["stage"]
    of_layout.pop("gradient_clipping")
    task = Decoder(replace(run_of_layout, is_tied=name == "pp tied"))
    num_batch = 2 if name == "experts" else 1
    with running(tmp_path, 2, settings(stage, **of_layout), 2, task=task, num_batch=num_batch) as run:
        first = lose_and_replace_the_second(run)
        one_job = trained_in_one_job(run)
        for rank in range(2):
            steps = run.steps(first, rank)
            assert [line["loss"] for line in steps] == pytest.approx(
                [loss for _, loss in one_job[rank]], rel=1e-6 if name in EXACT else 1e-5
            )
            if name in EXACT:
                assert [line["digest"] for line in steps] == [bits for bits, _ in one_job[rank]]
