"""Random faults in replicas that are jobs of their own: those that are left go on as one job without the samples of the
one that failed, which is started again and joins.

    CHAOS_RUNS=40 CHAOS_SEED=1 make test-nightly

Replica 0 has no fault. The seed of a run is in the test's name.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.data import shuffled
from shoal.process import is_stopped
from tests.helpers.composition import settings_of
from tests.helpers.replicas import FATES, NUM_SAMPLES, SEED, Decoder, Run, Task, running, settings, trained_in_one_job

RUNS = int(os.environ.get("CHAOS_RUNS", "6"))
FIRST_SEED = int(os.environ.get("CHAOS_SEED", "1"))
PLACES = ("forward", "arrive", "mean", "vote", "send", "after")
STEPS = 6  # of a replica, in which its fault is
LEFT_OUT_SECONDS = 4

# By name: ranks of a replica, axes of the composition matrix or none, the stage without axes, more sections.
LAYOUTS: dict[str, tuple[int, dict[str, str], int, dict[str, Any]]] = {
    "dp 0": (1, {}, 0, {}),
    "dp 1 accumulation": (1, {}, 1, {"gradient_accumulation_steps": 2}),
    "dp 2 bf16": (2, {}, 2, {"bf16": {"enabled": True}}),
    "dp 3": (2, {}, 3, {}),
    "a sample with a NaN": (1, {}, 1, {"precision": {"nonfinite": "skip"}}),
    "local steps": (1, {}, 1, {"local_steps": {"every": 4}}),
    "tp": (2, {"tp": "2", "stage": "1"}, 0, {}),
    "pp": (2, {"pp": "2", "stage": "1"}, 0, {}),
    "sp": (2, {"sp": "2", "stage": "3"}, 0, {}),
    "experts": (2, {"experts": "ep 2", "stage": "2"}, 0, {}),
}


def fault(draw: random.Random, *, is_first: bool) -> str:
    """What happens, and where: in the first step of one that takes another's place also while it joins."""
    place = draw.choice(PLACES if is_first else (*PLACES, "join", "receive", "mean"))
    at = 0 if place in ("join", "receive") or (not is_first and draw.random() < 0.3) else draw.randrange(STEPS)
    return f"{place} {at} {draw.choice([*FATES])}"


def is_halted(run: Run, number: int) -> bool:
    return any(process.exitcode is None and is_stopped(process.pid) for process in run.processes[number])


def replace_failed(run: Run, slots: list[tuple[int, list[str]]]) -> None:
    """Start a replica again whenever one has failed, until no fault is left.

    Args:
        slots: the number of the replica that runs, and the faults of those that take its place.
    """

    def is_through(number: int) -> bool:
        return len(run.steps(number)) > STEPS + 2

    while True:
        run.wait_for(
            lambda: (
                all(is_through(number) for number, _ in slots)
                or any(run.has_ended(number) or is_halted(run, number) for number, _ in slots)
            ),
            any_may_end=True,
        )
        failed = [at for at, (number, _) in enumerate(slots) if run.has_ended(number) or is_halted(run, number)]
        if not failed:
            return
        for at in failed:
            number, faults = slots[at]
            if is_halted(run, number):
                goal = len(run.steps(0)) + 2
                run.wait_for(lambda goal=goal: len(run.steps(0)) > goal, any_may_end=True)  # type: ignore[misc]
                for process in run.processes[number]:
                    os.kill(process.pid, signal.SIGCONT)
                own = len(run.steps(number))
                run.wait_for(  # one that had not joined yet is not left out
                    lambda number=number, own=own: run.has_ended(number) or len(run.steps(number)) > own,  # type: ignore[misc]
                    any_may_end=True,
                )
                if not run.has_ended(number):
                    continue
            run.end(number)
            slots[at] = run.start(faults.pop(0) if faults else ""), faults


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_the_rest_goes_on_and_what_failed_joins_again(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    name = draw.choice([*LAYOUTS])
    size, axes, stage, sections = LAYOUTS[name]
    order = shuffled(range(NUM_SAMPLES), NUM_SAMPLES, SEED, 0).tolist()
    task = Task(order[draw.randrange(20)] if "NaN" in name else -1)
    num_batch = size
    if axes:
        sections, of_layout = settings_of(axes)
        stage = sections.pop("zero_optimization")["stage"]
        sections.pop("gradient_clipping")
        task, num_batch = Decoder(replace(of_layout, is_tied=False)), 2 if "experts" in axes else 1
    faults = [
        [fault(draw, is_first=at == 0) for at in range(draw.choice(number_of_faults))]
        for number_of_faults in ([1, 2], [0, 1, 2])
    ]
    print(f"seed {seed}, {name}: {faults}")
    every = sections.get("local_steps", {}).get("every", 1)
    with running(
        tmp_path, 3, settings(stage, **sections), size, timeout_seconds=LEFT_OUT_SECONDS, task=task, num_batch=num_batch
    ) as run:
        run.start()
        slots = [(run.start(of_one.pop(0) if of_one else ""), of_one) for of_one in faults]
        replace_failed(run, slots)
        run.stop([0, *(number for number, _ in slots)])
        run.check_samples(every)
        run.check_alike([number for number in range(1, len(run.processes)) if run.steps(number)], every)
        losses = [line["loss"] for line in run.steps(0)]
        if every > 1:
            return
        tolerance = 1e-2 if "bf16" in sections else 1e-5  # of the first losses, which are about 1
        for of_rank in trained_in_one_job(run):
            expected = [loss for _, loss in of_rank]
            assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True)
