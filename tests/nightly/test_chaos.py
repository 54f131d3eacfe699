"""Random faults in jobs of every layout: each ends with the bits of the run without faults, and leaves no process and
no file.

    CHAOS_RUNS=500 CHAOS_SEED=1 make test-nightly

A job restarts from its last checkpoint after each fault. The seed of a run is in the test's name.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.chaos import ACTIONS, PLACES, STEPS, Fault, Jobs, Layout
from tests.helpers.composition import num_ranks
from tests.ranks.launch.test_launch import is_alive

RUNS = int(os.environ.get("CHAOS_RUNS", "12"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
SECONDS = 150  # of a job, at most

ASYNC = {"checkpoint": {"async_save": True}}
LAYOUTS = {
    "dp 0": Layout({"ranks": "2", "stage": "0"}),
    "dp 1": Layout({"ranks": "2", "stage": "1"}, ASYNC),
    "dp 1 bf16": Layout({"ranks": "2", "stage": "1", "accumulation": "2", "precision": "bf16"}),
    "dp 2 host": Layout({"ranks": "2", "stage": "2", "state": "host"}),
    "dp 2 disk": Layout({"ranks": "2", "stage": "2", "state": "disk"}),
    "dp 3": Layout({"ranks": "4", "stage": "3"}, ASYNC),
    "dp 3 host": Layout({"ranks": "2", "stage": "3", "state": "host", "parameters": "host"}),
    "tp": Layout({"tp": "2", "stage": "1"}),
    "tp split": Layout({"tp": "2 split", "stage": "3"}),
    "tp dp": Layout({"tp": "2", "ranks": "2", "stage": "2"}, ASYNC),
    "pp": Layout({"pp": "2", "stage": "1", "accumulation": "2"}),
    "pp dp": Layout({"pp": "2", "ranks": "2", "stage": "0", "head": "own"}),
    "zbv": Layout({"pp": "2", "schedule": "zbv", "stage": "1", "accumulation": "2"}, ASYNC),
    "ep": Layout({"ranks": "2", "experts": "ep 2", "stage": "2"}),
    "ep 1 copies": Layout({"ranks": "2", "experts": "ep 1", "stage": "1"}, ASYNC),
    "sp": Layout({"sp": "2", "stage": "2"}),
    "sp dp": Layout({"sp": "2", "ranks": "2", "stage": "3"}),
    "cp": Layout({"cp": "2", "stage": "3"}, ASYNC),
}


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.close()


class References:
    """What jobs without faults end with, by layout."""

    def __init__(self, jobs: Jobs, folder: Path) -> None:
        self._jobs, self._folder = jobs, folder
        self._done: set[str] = set()

    def get(self, name: str) -> Path:
        if name not in self._done:
            layout = LAYOUTS[name]
            code, text = self._jobs.run(self._folder / name, layout, num_ranks(layout.axes), [], SECONDS)
            assert code == 0, text
            self._done.add(name)
        return self._folder / name


@pytest.fixture(scope="module")
def references(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(jobs, tmp_path_factory.mktemp("references"))


def draw(seed: int) -> tuple[str, Layout, list[Fault]]:
    """The layout and the faults of a seed."""
    random_ = random.Random(seed)
    name = random_.choice([*LAYOUTS])
    layout = replace(LAYOUTS[name], is_gloo=random_.random() < 0.4)
    faults = []
    for _ in range(random_.choice([1, 1, 2, 3])):
        place, action = random_.choice(PLACES), random_.choice(ACTIONS)
        if action == "not finite":
            place = "before_backward"
        elif action == "flip":
            place = "before_forward"
        elif place == "start" and action == "stop":
            place = "load"  # the config's time-outs apply from initialize on
        step = 0 if place in ("start", "load") else random_.randrange(STEPS)
        faults.append(Fault(random_.randrange(num_ranks(layout.axes)), place, action, step))
    return name, layout, faults


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("seed", range(SEED, SEED + RUNS))
def test_random_faults_change_no_bit(seed: int, jobs: Jobs, references: References, tmp_path: Path) -> None:
    name, layout, faults = draw(seed)
    expected_folder, size = references.get(name), num_ranks(layout.axes)
    folder = tmp_path / "job"
    code, text = jobs.run(folder, layout, size, faults, SECONDS)
    what = f"seed {seed}, {name}, {layout}, {faults}"
    assert code == 0, f"{what}:\n{text}"
    for rank in range(size):
        found, expected = (load_file(each / f"final-{rank}.safetensors") for each in (folder, expected_folder))
        assert found.keys() == expected.keys(), what
        differing = [key for key in expected if not torch.equal(found[key], expected[key])]
        assert differing == [], f"{what}:\n{text}"
    assert not any(is_alive(int(pid)) for pid in (folder / "pids").read_text().split()), what
    left = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("shoal-hang-")]
    assert left == [], f"{what}:\n{text}"
