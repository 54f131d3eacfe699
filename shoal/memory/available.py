"""How many bytes of host memory this process may still take: the least of what machine, cgroup and limits leave."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoal.streams import simulation


def host_available_nbytes(root: Path = Path("/")) -> int:
    """Bytes that may still be allocated without swapping, being killed, or being refused. In a dry run: by its machine.

    Args:
        root: where ``proc`` and ``sys`` are mounted.
    """
    simulated = simulation()
    if simulated is not None and simulated.host_nbytes is not None:
        return simulated.host_nbytes
    found = [*_of_machine(root), *_of_cgroups(root), *_of_limits(root)]
    return max(0, min(found)) if found else 0


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
