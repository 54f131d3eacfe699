"""Memory that a step frees stays in the process for the next step, and returns to the kernel above a limit."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

import shoal
from shoal import host_heap
from shoal.host_heap import HostHeap
from shoal.launch.environment import heap_is_set

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

# A process of its own: how a heap behaves depends on all that was in it before.
FAULTS = """
import resource, sys, torch
from shoal.host_heap import HostHeap, resident_nbytes
heap = HostHeap.begin() if sys.argv[1] == "keep" else None
MIB = 2**20
def use():
    torch.ones(48 * MIB, dtype=torch.uint8)
    torch.ones(20 * MIB, dtype=torch.uint8)
for _ in range(8):  # until places are found that fit with their alignment
    use()
    if heap and not HostHeap.is_kept:
        heap.after_step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    use()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = resident_nbytes()
if heap:
    heap.give_back()
print(faults, (kept - resident_nbytes()) // MIB)
"""


def faults_and_given_mib(mode: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True, timeout=50)
    faults, given = done.stdout.split()
    return int(faults), int(given)


def test_blocks_that_are_taken_again_are_not_cleared_again_and_go_back_when_asked() -> None:
    faults, given = faults_and_given_mib("keep")
    assert faults < 200  # of the 52,000 pages that were written
    assert given >= 45
    assert faults_and_given_mib("as it is")[0] > 10_000


def test_the_heap_goes_back_where_the_process_has_grown_by_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    sizes = iter([1000, 1250, 1251, 900, 1125, 1126])

    def resident() -> int:
        size = next(sizes)
        given.append(0)
        return size

    class Library:
        def malloc_trim(self, padding: int) -> None:
            given[-1] = 1

    monkeypatch.setattr(host_heap, "resident_nbytes", resident)
    monkeypatch.setattr(host_heap, "_library", Library)
    monkeypatch.setattr(HostHeap, "is_kept", True)
    heap = HostHeap()
    for _ in range(6):
        heap.after_step()
    assert given == [0, 0, 1, 0, 0, 1]


def test_zero_init_maps_large_blocks_until_the_next_step_of_any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = shoal.initialize(model=torch.nn.Linear(2, 2), config=config)[0]

    def step() -> bool:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        return HostHeap.is_kept

    kept = [HostHeap.is_kept, step()]
    with shoal.zero.Init():
        torch.nn.Linear(2, 2)
    kept += [HostHeap.is_kept, step()]
    engine.destroy()
    assert kept == [False, True, False, True]


def test_what_the_user_said_about_the_heap_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not heap_is_set({"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.rtld.nns=2"})
    assert heap_is_set({"GLIBC_TUNABLES": "glibc.rtld.nns=2:glibc.malloc.trim_threshold=0"})
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"):
        assert heap_is_set({name: "1"})

    def heap() -> HostHeap | None:
        model = torch.nn.Linear(2, 2)
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
        engine = shoal.initialize(model=model, config=config)[0]
        engine.destroy()
        return engine.properties.device.heap

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert heap() is not None
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert heap() is None


# The map of the process shows where a step's blocks lie.
LASTS = """
import sys, torch, shoal
from shoal.host_heap import HostHeap
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1},
          "bf16": {"enabled": True}}
engine = shoal.initialize(model=model, config=config)[0]
if sys.argv[1] == "kept at once":
    engine.properties.device.heap.after_step()
for _ in range(2):
    engine.backward(engine(torch.ones(64, 512, dtype=torch.bfloat16)).float().sum())
    engine.step()
heap = next(line for line in open("/proc/self/maps") if line.endswith("[heap]\\n"))
start, end = (int(address, 16) for address in heap.split()[0].split("-"))
pieces = [part.param for group in engine.optimizer.sharded_step.groups for part in group.ranges]
moments = [value for state in engine.optimizer.optimizer.state.values() for value in state.values() if value.dim()]
large = [tensor for tensor in pieces + moments if tensor.nbytes >= 2**17]
print(sum(start <= tensor.data_ptr() < end for tensor in large), len(large))
"""


def num_inside_of_the_heap(when: str) -> int:
    done = subprocess.run([sys.executable, "-c", LASTS, when], capture_output=True, text=True, check=True, timeout=50)
    inside, large = (int(word) for word in done.stdout.split()[-2:])
    assert large == 12  # of four weights: main_parameters and two moments each
    return inside


def test_main_parameters_and_optimizer_state_lie_outside_the_blocks_that_steps_allocate_and_free() -> None:
    # A block goes into a gap of the heap that fits, if the imports have left one.
    assert num_inside_of_the_heap("kept after the first step") <= 2
    assert num_inside_of_the_heap("kept at once") >= 8
