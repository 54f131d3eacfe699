"""Memory on pages, sets of ranges, and what the host has left."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.memory import host as aligned
from shoal.memory.host import aligned_empty, host_available_nbytes
from shoal.memory.transfer import Intervals

RANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 40)), max_size=12)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 5_000_001])
def test_memory_begins_on_a_page_and_has_the_size_asked_for(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    assert (memory.shape, memory.dtype, memory.data_ptr() % 4096) == ((nbytes,), torch.uint8, 0)
    memory.fill_(3)
    assert int(memory.sum(dtype=torch.int64)) == 3 * nbytes


def test_no_bytes_are_an_empty_tensor() -> None:
    assert aligned_empty(0).shape == (0,)


def test_memory_that_cannot_be_locked_is_ordinary_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(aligned, "_pinned", refuse)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        memory = aligned_empty(12288, is_pinned=True)
    assert [record.getMessage() for record in caplog.records] == [
        "12 KiB of host memory could not be page-locked (CUDA error: out of memory); ordinary memory is used instead, "
        "so copies to the device are slower."
    ]
    assert memory.shape == (12288,)


def test_a_limit_on_the_address_space_is_obeyed() -> None:
    """The limit is real, so it is set in a process of its own (row V4)."""
    program = """
import resource, torch
from shoal.errors import OutOfMemoryError
from shoal.memory.host import aligned_empty
from shoal.memory.host import host_available_nbytes
pages = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (pages + 2**28, pages + 2**28))
print(2**27 < host_available_nbytes() <= 2**28)
aligned_empty(2**20).fill_(1)
try:
    aligned_empty(2**30)
except OutOfMemoryError as error:
    print(error.code, "1 GiB (1073741824 bytes) are needed" in str(error), "bytes) are available" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.splitlines() == ["True", "host-too-small True True"], done.stderr


def a_host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_smallest_of_machine_and_groups_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 90 kB\n",
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "50000\n",
        "sys/fs/cgroup/a/memory.current": "30000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 20000\ninactive_file 5000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "30000\n",
        "sys/fs/cgroup/a/b/memory.stat": "inactive_file 5000\n",
    }
    assert host_available_nbytes(a_host(tmp_path / "one", files)) == 25_000
    files["sys/fs/cgroup/a/memory.max"] = "10000\n"
    assert host_available_nbytes(a_host(tmp_path / "two", files)) == 0
    del files["proc/self/cgroup"]
    assert host_available_nbytes(a_host(tmp_path / "three", files)) == 92_160


def test_the_older_groups_count_too(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 90 kB\n",
        "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/not/mounted/here\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "50000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "30000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 4000\n",
    }
    assert host_available_nbytes(a_host(tmp_path, files)) == 24_000


@given(RANGES)
def test_ranges_are_a_set_of_bytes(changes: list[tuple[bool, int, int]]) -> None:
    ranges, model = Intervals(), set()
    for is_added, start, stop in changes:
        if is_added:
            ranges.add(start, stop)
            model |= set(range(start, stop))
        else:
            ranges.remove(start, stop)
            model -= set(range(start, stop))
    assert {byte for low, high in ranges.ranges for byte in range(low, high)} == model
    assert all(a[1] < b[0] for a, b in zip(ranges.ranges, ranges.ranges[1:], strict=False))
    for start in range(0, 41, 7):
        for stop in range(0, 41, 5):
            assert ranges.covers(start, stop) == (set(range(start, stop)) <= model)
