"""The cores of each rank near its GPU, by a made-up folder of the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.launch.cores import BoundCores, cores_near, describe_cores

GPUS = ["0000:0f:00.0", "0000:10:00.0", "0000:9d:00.0", "0000:9e:00.0"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of 4 cores with 2 threads: even CPUs are node 0's, which has GPUs 2 and 3; odd ones node 1's."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    nodes = {0: "0,2,4,6,8,10,12,14", 1: "1,3,5,7,9,11,13,15"}
    for node, cpus in nodes.items():
        write(tmp_path / f"devices/system/node/node{node}/cpulist", cpus)
    for cpu in range(16):
        write(tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 8},{cpu % 8 + 8}")
    for number, gpu in enumerate(GPUS):
        write(tmp_path / f"bus/pci/devices/{gpu}/local_cpulist", nodes[1 - number // 2])
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_ranks_share_the_cores_of_their_gpus_node(machine: Path) -> None:
    bound = cores_near(GPUS, 4, machine)
    assert bound == BoundCores([[1, 3, 9, 11], [5, 7, 13, 15], [0, 2, 8, 10], [4, 6, 12, 14]], 2)
    assert describe_cores(bound, GPUS).startswith("shoal: cores of rank 0: 1,3,9,11 (GPU 0000:0f:00.0); 1: 5,7,13,15 ")


def test_a_rank_alone_on_its_node_has_all_of_it_and_all_ranks_as_many_threads(machine: Path) -> None:
    assert cores_near(GPUS, 3, machine) == BoundCores([[1, 3, 9, 11], [5, 7, 13, 15], [0, 2, 4, 6, 8, 10, 12, 14]], 2)


def test_ranks_of_one_node_leave_the_other_one_alone(machine: Path) -> None:
    assert cores_near(GPUS, 2, machine) == BoundCores([[1, 3, 9, 11], [5, 7, 13, 15]], 2)


def test_only_cores_that_this_process_may_use_are_given(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 3, 5, 9, 0, 2})
    assert cores_near(GPUS, 4, machine) == BoundCores([[1, 9], [3], [0], [2]], 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 0, 2})
    with pytest.raises(ConfigError, match="2 ranks, each with cores of its own, and 1 cores"):
        cores_near(GPUS, 4, machine)


@pytest.mark.parametrize("case", ["no GPUs", "no core of a GPU's node is allowed", "the kernel knows no node"])
def test_else_all_cores_are_divided_in_the_order_of_their_nodes(
    case: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = BoundCores([[0, 2, 8, 10], [4, 6, 12, 14], [1, 3, 9, 11], [5, 7, 13, 15]], 2)
    gpus = GPUS
    if case == "no GPUs":
        gpus = []
    elif case == "the kernel knows no node":
        for gpu in GPUS:
            write(machine / f"bus/pci/devices/{gpu}/local_cpulist", "0-15")
    else:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2, 4, 6})
        expected = BoundCores([[0], [2], [4], [6]], 1)
    assert cores_near(gpus, 4, machine) == expected
