"""Host memory: how much this process may still take, and memory that begins on a page, as direct access wants it."""

from __future__ import annotations

import logging
import mmap
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from shoal.device import is_fake, locked_empty
from shoal.errors import OutOfMemoryError
from shoal.streams import host_memory, simulation
from shoal.text import format_bytes


def host_available_nbytes(root: Path = Path("/")) -> int:
    """Bytes that may still be allocated without swapping, being killed, or being refused. In a dry run: by its machine.

    The least of what the machine, its cgroups and the process's limits leave.

    Args:
        root: where ``proc`` and ``sys`` are mounted.
    """
    simulated = simulation()
    if simulated is not None and simulated.host_nbytes is not None:
        return simulated.host_nbytes
    limits = [*_of_machine(root), *_of_cgroups(root), *_of_limits(root)]
    return max(0, min(limits)) if limits else 0


def _of_machine(root: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _of_cgroups(root: Path) -> Iterator[int]:
    """What each memory group above this process leaves. What its page cache holds can be dropped, so it is free."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                mount = root / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            group = mount / path.lstrip("/")
            # In a container the path may be the host's, which is not mounted here: then the mount itself is the group.
            for folder in (group, *group.parents):
                yield from _of_group(folder, *names)
                if folder == mount:
                    break


def _of_group(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    with suppress(OSError, ValueError):
        limit = int((folder / limit_name).read_text())  # "max": no limit
        usage = int((folder / usage_name).read_text())
        fields = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
        yield limit - usage + int(fields.get(cache_name, 0))


def _of_limits(root: Path) -> Iterator[int]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            num_pages = int((root / "proc/self/statm").read_text().split()[0])
            yield limit - num_pages * resource.getpagesize()


logger = logging.getLogger("shoal")

PAGE = 4096  # bytes: what direct input and output aligns address, length and offset to
_HUGE_PAGE = 2 * 1024 * 1024


def round_down(value: int, unit: int) -> int:
    return value // unit * unit


def round_up(value: int, unit: int) -> int:
    """
    >>> round_up(4097, 4096), round_up(4096, 4096)
    (8192, 4096)
    """
    return -(-value // unit) * unit


def aligned_empty(nbytes: int, *, is_pinned: bool = False, is_inherited: bool = True) -> torch.Tensor:
    """Host memory that begins on a page. Shape: [nbytes], uint8; the values are arbitrary.

    Args:
        is_pinned: page-lock it for an accelerator. Without an accelerator this is ignored; where no more memory can be
            locked the memory is an ordinary one, and a line in the log says so.
        is_inherited: processes forked from this one see the memory. Where they do not, a fork during a direct read
            cannot turn the page that is being read into the child's (kernels before 5.19 could). Pinned memory is as
            the accelerator's driver made it.

    Raises: OutOfMemoryError: the system refuses that much.
    """
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    if not nbytes:
        return empty
    if is_fake(empty):
        return host_memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"), is_pinned=is_pinned)
    if is_pinned and torch.accelerator.is_available():
        try:
            return _pinned(nbytes)
        except (RuntimeError, OSError) as error:
            logger.warning(
                "%s of host memory could not be page-locked (%s); ordinary memory is used instead, so copies to the "
                "device are slower.",
                format_bytes(nbytes),
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise host_too_small(nbytes) from error
    if nbytes >= _HUGE_PAGE:
        with suppress(OSError):  # fewer pages to look up for each request
            memory.madvise(mmap.MADV_HUGEPAGE)
    if not is_inherited:
        with suppress(OSError):
            memory.madvise(mmap.MADV_DONTFORK)
    return host_memory(torch.frombuffer(memory, dtype=torch.uint8), is_pinned=is_pinned)


def _pinned(nbytes: int) -> torch.Tensor:
    memory = locked_empty(nbytes)
    if memory.data_ptr() % PAGE == 0:
        return memory
    memory = locked_empty(nbytes + PAGE)
    skipped = -memory.data_ptr() % PAGE
    return memory[skipped : skipped + nbytes]


def host_too_small(needed_nbytes: int) -> OutOfMemoryError:
    """The error where host memory is less than what is needed; it names both."""
    available = host_available_nbytes()
    return OutOfMemoryError(
        f"host memory is too small: {format_bytes(needed_nbytes)} ({needed_nbytes} bytes) are needed, "
        f"{format_bytes(available)} ({available} bytes) are available.",
        do="offload less to the host (ratio, max_in_cpu), use fewer or smaller buffers (buffer_count, buffer_size), "
        "run fewer ranks on this machine, or raise the limit.",
        code="host-too-small",
    )
