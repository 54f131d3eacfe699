"""``deepspeed.utils.numa``: lists of cores as text."""

from __future__ import annotations

from shoal.compat.absent import absent_function
from shoal.errors import ConfigError

_DO = "set OMP_NUM_THREADS, or start the command under numactl."

get_numactl_cmd = absent_function("deepspeed.utils.numa.get_numactl_cmd", _DO)
get_numa_cores = absent_function("deepspeed.utils.numa.get_numa_cores", _DO)


def parse_range(rng: str) -> range:
    """``"3"`` or ``"2-4"``, the end included. Raises: ConfigError: anything else."""
    first, _, last = rng.partition("-")
    if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first) or rng.endswith("-"):
        raise ConfigError(f"{rng!r} is not a core or a range of cores.", do="write 3 or 2-4.", code="cores")
    return range(int(first), int(last or first) + 1)


def parse_range_list(range_str: str) -> list[int]:
    """The numbers of a list of ranges, which ascend.

    Raises: ConfigError: it is no such list, or does not ascend.

    >>> parse_range_list("0,2-4,6")
    [0, 2, 3, 4, 6]
    """
    numbers: list[int] = []
    for part in range_str.split(","):
        cores = parse_range(part)
        if numbers and cores[0] <= numbers[-1]:
            raise ConfigError(
                f"{range_str!r}: {part} does not come after {numbers[-1]}.",
                do="let the ranges ascend, without overlap.",
                code="cores",
            )
        numbers += cores
    return numbers


__all__ = ["get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list"]
