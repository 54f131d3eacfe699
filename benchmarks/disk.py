"""The disk tier's bandwidth beside fio's: same folder, same block size, same depth, past the page cache, in turn.

    python -m benchmarks.disk --folder /a/disk --size-mib 1024 --rounds 5

Every round: fio writes, Shoal writes, fio reads, Shoal reads, each a file of the same size that was written before. In
every second round Shoal comes first. A figure is the median over rounds; the ratio is the median of the ratios of each
round, because what the disk gives drifts.

| contender | what it is |
| --- | --- |
| ``fio-libaio`` | one process that keeps ``--depth`` requests of ``--block-kib`` in flight (the goal is 0.85 of it) |
| ``fio-psync`` | as many threads as Shoal's, one request each |
| ``shoal`` | ``DiskTier``: units of ``--unit-mib`` through ``--buffers`` page-aligned buffers |
| ``shoal-small-pages`` | the same with memory in pages of 4 KiB, as fio has it, instead of 2 MiB |
| ``shoal-unaligned`` | the same with memory that does not begin on a page: every byte through a bounce buffer |
| ``shoal-sums`` | with the xxh3 of each block kept, and checked at the read |
"""

from __future__ import annotations

import argparse
import json
import mmap
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.arena import machine, table
from shoal.memory.disk import DiskTier
from shoal.memory.host import aligned_empty
from shoal.memory.io_threads import Ticket

MIB = 2**20
CONTENDERS = ("fio-libaio", "fio-psync", "shoal", "shoal-small-pages", "shoal-unaligned", "shoal-sums")
Figures = dict[str, dict[str, list[float]]]  # contender to "write" and "read" to MiB/s of each round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/disk-benchmark"))
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--unit-mib", type=int, default=64)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS[:4], metavar="NAME")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    arguments = parser.parse_args()
    names = [name for name in arguments.contenders if not name.startswith("fio") or shutil.which("fio")]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = compete(names, arguments)
    rows = summary(found)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(table(rows))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine(), "MiB/s": found}, indent=1) + "\n")


def compete(names: list[str], arguments: argparse.Namespace) -> Figures:
    """Every contender in turn, in every round; the first round only makes the files."""
    tiers: list[DiskTier] = []
    laid = arguments.folder / "fio.bin"
    try:
        movers: dict[str, Callable[[str], float]] = {}
        for name in names:
            if name.startswith("fio"):
                movers[name] = Fio(laid, arguments, engine=name.removeprefix("fio-"))
            else:
                tier = DiskTier(
                    arguments.folder,
                    rank=0,
                    num_threads=arguments.threads,
                    block_nbytes=arguments.block_kib * 1024,
                    queue_depth=arguments.depth,
                    checks_sums=name == "shoal-sums",
                )
                tiers.append(tier)
                movers[name] = Shoal(tier, arguments, memory_of(name))
        found: Figures = {name: {"write": [], "read": []} for name in names}
        for round_number in range(arguments.rounds + 1):
            order = names if round_number % 2 else names[::-1]
            for direction in ("write", "read"):
                for name in order:
                    rate = movers[name](direction)
                    if round_number:
                        found[name][direction].append(rate)
    finally:
        for tier in tiers:
            tier.close()
        laid.unlink(missing_ok=True)
    return found


def summary(found: Figures) -> list[list[str]]:
    """A row a contender: its median rate, the least and the most, and its ratio to the first one that is fio."""
    peer = next((name for name in found if name.startswith("fio")), None)
    rows = [["contender", "write MiB/s", "spread", "ratio", "read MiB/s", "spread", "ratio"]]
    for name, figures in found.items():
        row = [name]
        for direction in ("write", "read"):
            rates = figures[direction]
            ratios = [a / b for a, b in zip(rates, found[peer][direction], strict=True)] if peer else []
            row += [f"{median(rates):.0f}", f"{min(rates):.0f}-{max(rates):.0f}"]
            row += [f"{median(ratios):.2f}" if ratios else ""]
        rows.append(row)
    return rows


def memory_of(name: str) -> Callable[[int], torch.Tensor]:
    """What a contender's buffers are made by."""
    return {"shoal-small-pages": small_pages, "shoal-unaligned": off_the_page}.get(name, aligned_empty)


def small_pages(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def off_the_page(nbytes: int) -> torch.Tensor:
    return aligned_empty(nbytes + 64)[64:]


class Fio:
    """One run of fio over the whole file, which it lays out the first time."""

    def __init__(self, path: Path, arguments: argparse.Namespace, *, engine: str) -> None:
        self._path = path
        self._arguments = arguments
        self._engine = engine

    def __call__(self, direction: str) -> float:
        arguments = self._arguments
        is_async = self._engine == "libaio"
        jobs = 1 if is_async else arguments.threads
        share = arguments.size_mib // jobs
        done = subprocess.run(
            [
                "fio", "--name=disk", f"--filename={self._path}", f"--filesize={arguments.size_mib}m",
                f"--bs={arguments.block_kib}k", "--direct=1", f"--rw={direction}", f"--ioengine={self._engine}",
                f"--iodepth={arguments.depth if is_async else 1}", f"--numjobs={jobs}", "--thread",
                f"--size={share}m", f"--offset_increment={share}m", "--group_reporting", "--output-format=json",
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        text = done.stdout[done.stdout.index("{") :]
        job = json.loads(text)["jobs"][0][direction]
        assert job["io_bytes"] == share * jobs * MIB, "fio moved another number of bytes"
        return float(job["io_bytes"] / MIB / (job["runtime"] / 1000))


class Shoal:
    """One pass over units that lie in extents of a tier."""

    def __init__(self, tier: DiskTier, arguments: argparse.Namespace, memory: Callable[[int], torch.Tensor]) -> None:
        self._tier = tier
        unit_nbytes = arguments.unit_mib * MIB
        count = arguments.size_mib // arguments.unit_mib
        self._extents = [tier.allocate(f"{index}", unit_nbytes) for index in range(count)]
        self._make_buffers = lambda: [memory(unit_nbytes).random_() for _ in range(arguments.buffers)]

    def __call__(self, direction: str) -> float:
        # New ones in every round, as fio's are: how scattered small pages lie decides how fast they are. Random, as
        # fio's: a device may compress.
        buffers = self._make_buffers()
        move = self._tier.write if direction == "write" else self._tier.read
        tickets: list[Ticket] = []
        begun = time.perf_counter()
        for index, extent in enumerate(self._extents):
            if index >= len(buffers):
                tickets[index - len(buffers)].wait()
            tickets.append(move(extent, buffers[index % len(buffers)]))
        for ticket in tickets:
            ticket.wait()
        seconds = time.perf_counter() - begun
        return sum(extent.nbytes for extent in self._extents) / MIB / seconds


if __name__ == "__main__":
    main()
