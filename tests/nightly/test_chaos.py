"""Random faults in jobs of every layout: each ends with the bits of the run without faults, and leaves no process and
no file.

    CHAOS_RUNS=500 CHAOS_SEED=1 make test-nightly

A job restarts from its last checkpoint after each fault. The seed of a run is in the test's name.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.chaos import ACTIONS, PLACES, STEPS, Fault, Jobs, Layout
from tests.helpers.composition import num_ranks
from tests.jobs.launch.test_launch import is_alive

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
    "mics": Layout({"ranks": "4", "stage": "3", "hybrid": "mics"}),
    "hpz": Layout({"ranks": "4", "stage": "3", "hybrid": "hpz"}, ASYNC),
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
        rank = random_.randrange(num_ranks(layout.axes))
        if action == "stop" and any((each.action, each.rank, each.step) == ("stop", rank, step) for each in faults):
            action = "kill"  # the launcher would end a job in which one rank hangs twice in a step
        fault = Fault(rank, place, action, step)
        if (place, action) == ("start", "exit 1") and fault in faults:
            fault = Fault(rank, place, "kill", step)  # the launcher would end a job that fails twice alike there
        faults.append(fault)
    return name, layout, faults


def check_bits(folder: Path, expected_folder: Path, size: int, what: str) -> None:
    for rank in range(size):
        found, expected = (load_file(each / f"final-{rank}.safetensors") for each in (folder, expected_folder))
        assert found.keys() == expected.keys(), what
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], what


def check_nothing_is_left(folder: Path, what: str) -> None:
    assert not any(is_alive(int(pid)) for pid in (folder / "pids").read_text().split()), what
    left = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("shoal-hang-")]
    assert left == [], what


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("seed", range(SEED, SEED + RUNS))
def test_random_faults_change_no_bit(seed: int, jobs: Jobs, references: References, tmp_path: Path) -> None:
    name, layout, faults = draw(seed)
    expected_folder, size = references.get(name), num_ranks(layout.axes)
    folder = tmp_path / "job"
    code, text = jobs.run(folder, layout, size, faults, SECONDS)
    what = f"seed {seed}, {name}, {layout}, {faults}"
    assert code == 0, f"{what}:\n{text}"
    check_bits(folder, expected_folder, size, f"{what}:\n{text}")
    check_nothing_is_left(folder, f"{what}:\n{text}")


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize(
    ("name", "is_gloo", "fault", "cause"),
    [
        ("dp 1", False, Fault(1, "before_step", "kill", 0), "it was ended by SIGKILL"),
        ("dp 3", True, Fault(0, "before_step", "kill", STEPS - 1), "it was ended by SIGKILL"),
        ("dp 2 host", False, Fault(1, "reduce", "kill", 2), "it was ended by SIGKILL"),
        ("dp 3", True, Fault(2, "reduce", "kill", 3), "it was ended by SIGKILL"),
        ("dp 0", False, Fault(1, "before_forward", "leave", 2), "[rank-failed] rank 1 failed"),
        ("tp", False, Fault(0, "before_backward", "abort", 3), "it was ended by SIGABRT"),
        ("pp", True, Fault(0, "at_step", "kill", 3), "it was ended by SIGKILL"),
        ("dp 1", False, Fault(1, "data", "hang", 2), "hangs; section 'data' of rank 1"),
    ],
    ids=lambda each: str(each),
)  # fmt: skip
def test_a_fault_ends_a_job_with_its_cause_and_after_a_restart_changes_no_bit(
    name: str, is_gloo: bool, fault: Fault, cause: str, jobs: Jobs, references: References, tmp_path: Path
) -> None:
    layout = replace(LAYOUTS[name], is_gloo=is_gloo)
    if fault.place == "data":
        layout = replace(layout, config={"timeouts": {"init": 20, "data": 3, "step": 4, "checkpoint": 4}})
    size = num_ranks(layout.axes)
    for restarts in (0, 2):
        folder = tmp_path / str(restarts)
        code, text = jobs.run(folder, layout, size, [fault], SECONDS, max_restarts=restarts)
        assert (folder / "fault-0").exists()
        assert (code == 0) is (restarts > 0), text
        assert f"rank {fault.rank} " in text and cause in text, text
        check_nothing_is_left(folder, text)
    check_bits(folder, references.get(name), size, text)


def test_a_job_that_fails_more_often_than_it_may_says_each_time_why_and_ends(jobs: Jobs, tmp_path: Path) -> None:
    faults = [Fault(step % 2, "before_step", "raise", step) for step in range(4)]
    code, text = jobs.run(tmp_path / "job", LAYOUTS["dp 1"], 2, faults, SECONDS, max_restarts=2)
    assert code == 1
    for number in range(2):
        assert f"shoal: all ranks are started anew: rank {number} failed: RuntimeError: fault {number} (at " in text
    assert "RuntimeError: fault 2" in text.rpartition("shoal: rank 0 failed first: ")[2] and "fault 3" not in text
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "job" / "pids").read_text().split())


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces, 10.99.0.1 and 10.99.0.2, joined by a link."""
    names = [f"shoal-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces here")
    try:
        ip("-n", names[0], "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.99.0.{number + 1}/24", "dev", "link0")
            for device in ("lo", "link0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.timeout(2 * SECONDS)
def test_a_link_that_is_down_for_two_seconds_changes_no_bit(references: References, tmp_path: Path) -> None:
    patient = {"timeouts": dict.fromkeys(("init", "data", "step", "checkpoint"), 60)}
    layout = replace(LAYOUTS["dp 3 host"], is_gloo=True, config=patient)
    arguments = [str(tmp_path), json.dumps(asdict(layout)), json.dumps([asdict(Fault(0, "before_step", "slow", 2))])]
    run = "import sys; from tests.helpers.chaos import rank_main; rank_main(*sys.argv[1:])"
    with two_hosts() as names:
        ranks = []
        for rank, name in enumerate(names):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "link0",
                "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": "",
            }  # fmt: skip
            command = ["ip", "netns", "exec", name, sys.executable, "-c", run, *arguments]
            ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        try:
            deadline = time.monotonic() + SECONDS
            while not (tmp_path / "fault-0").exists():
                assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks)
                time.sleep(0.02)
            ip("-n", names[0], "link", "set", "link0", "down")
            time.sleep(2)
            ip("-n", names[0], "link", "set", "link0", "up")
            errors = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for number in range(2):
        found, expected = (
            load_file(each / f"final-{number}.safetensors") for each in (tmp_path, references.get("dp 3 host"))
        )
        assert all(torch.equal(found[key], expected[key]) for key in expected)
