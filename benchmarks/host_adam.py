"""AdamW on host memory: bf16 gradient in, fp32 master weights and moments updated, bf16 parameter out.

    python -m benchmarks.host_adam --rounds 15                # 64 Mi parameters, 2 threads
    python -m benchmarks.host_adam --small --contenders copy whole threads

One process and one set of tensors for all, in turn, A B C, A B C: what else the machine does falls on all alike.
Ratios are medians of the ratios within a round. A round in which other processes used more than 0.15 cores is loud,
and left out where five quiet ones remain.

| contender | what it does |
| --- | --- |
| ``copy`` | copies 14 bytes a parameter to 14 others: the 28 that a step reads and writes, on the same threads |
| ``deepspeed`` | casts the gradient to fp32, ``DeepSpeedCPUAdam``, casts the weights to the parameter |
| ``whole`` | the same with torch's fused AdamW |
| ``threads``, ``blocks``, ``plain`` | ``shoal.optim.host.HostStep`` on that path |
| ``-huge`` appended | the same on tensors of its own in pages of 2 MiB, where the system gives them |
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.arena import machine, table

CONTENDERS = ("copy", "deepspeed", "whole", "threads", "blocks", "plain", "threads-huge")
BYTES_PER_PARAMETER = 28
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LOUD_CORES = 0.15
HUGE_PAGE = 2 << 20
PAUSE_SECONDS = 0.02  # OpenMP's threads spin for some milliseconds after their work, in the next contender's time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="16 Mi parameters in place of 64 Mi")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="NAME")
    parser.add_argument("--block", type=int, default=None, help="elements of a thread's block, in Ki")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    numel = (16 if arguments.small else 64) << 20
    runs = build(numel, arguments)
    times, is_loud = measure(runs, arguments.rounds)
    rows = [summary(name, times, is_loud, numel) for name in runs]
    quiet = sum(not loud for loud in is_loud)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(f"{numel >> 20} Mi parameters, {arguments.threads} threads, {quiet} of {len(is_loud)} rounds quiet")
    print(show(rows))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine(), "numel": numel, "threads": arguments.threads, "quiet": quiet, "rows": rows}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


class Tensors:
    """What one step reads and writes, and a room for gradients in fp32."""

    def __init__(self, numel: int, *, huge: bool, room: bool) -> None:
        make = in_huge_pages if huge else torch.empty
        self.master = make(numel, dtype=torch.float32).normal_()
        self.first = make(numel, dtype=torch.float32).zero_()
        self.second = make(numel, dtype=torch.float32).zero_()
        self.gradient = make(numel, dtype=torch.bfloat16).normal_(0, 1e-2)
        self.parameter = make(numel, dtype=torch.bfloat16).copy_(self.master)
        self.wide = make(numel if room else 0, dtype=torch.float32).zero_()


def in_huge_pages(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that asks the system for pages of 2 MiB. Shape: [numel]."""
    nbytes = numel * torch.empty((), dtype=dtype).element_size()
    held = mmap.mmap(-1, nbytes + 2 * HUGE_PAGE)
    held.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(held, dtype=torch.uint8)
    start = -flat.data_ptr() % HUGE_PAGE
    return flat[start : start + nbytes].view(dtype)


def build(numel: int, arguments: argparse.Namespace) -> dict[str, Callable[[], None]]:
    names = arguments.contenders
    tensors = Tensors(numel, huge=False, room="deepspeed" in names or "whole" in names)
    own = Tensors(numel, huge=True, room=False) if any(name.endswith("-huge") for name in names) else tensors
    runs: dict[str, Callable[[], None]] = {}
    for name in names:
        if name == "copy":
            runs[name] = plain_copy(numel)
        elif name == "deepspeed":
            runs[name] = deepspeed(tensors)
        elif name == "whole":
            runs[name] = whole(tensors)
        else:
            path, _, pages = name.partition("-")
            runs[name] = shoal(path, own if pages else tensors, arguments)
    return runs


def plain_copy(numel: int) -> Callable[[], None]:
    source, target = torch.ones(numel * 14 // 4), torch.zeros(numel * 14 // 4)

    def step() -> None:
        target.copy_(source)

    return step


def deepspeed(tensors: Tensors) -> Callable[[], None]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.nn.Parameter(tensors.master)
    weight.grad = tensors.wide
    optimizer = DeepSpeedCPUAdam([weight], **HYPER)
    optimizer.state[weight].update(step=0, exp_avg=tensors.first, exp_avg_sq=tensors.second)

    def step() -> None:
        tensors.wide.copy_(tensors.gradient)
        optimizer.step()
        tensors.parameter.copy_(weight.detach())

    return step


def whole(tensors: Tensors) -> Callable[[], None]:
    weight = torch.nn.Parameter(tensors.master)
    weight.grad = tensors.wide
    optimizer = torch.optim.AdamW([weight], fused=True, **HYPER)  # type: ignore[arg-type]
    optimizer.state[weight].update(step=torch.tensor(0.0), exp_avg=tensors.first, exp_avg_sq=tensors.second)

    def step() -> None:
        tensors.wide.copy_(tensors.gradient)
        optimizer.step()
        tensors.parameter.copy_(weight.detach())

    return step


def shoal(path: Any, tensors: Tensors, arguments: argparse.Namespace) -> Callable[[], None]:
    from shoal.optim.host import BLOCK_NUMEL, HostStep
    from shoal.optim.host_rules import Rule

    block = arguments.block * 1024 if arguments.block else BLOCK_NUMEL
    host = HostStep(path, num_threads=arguments.threads, block_numel=block)
    states = {"exp_avg": tensors.first, "exp_avg_sq": tensors.second}

    def step() -> None:
        rule = Rule.of("AdamW", HYPER, 5)
        host.start(rule, tensors.master, states, tensors.gradient, tensors.parameter).wait()

    return step


def measure(runs: dict[str, Callable[[], None]], rounds: int) -> tuple[dict[str, list[float]], list[bool]]:
    """Seconds by contender and round, and which rounds were loud. One round before them is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    is_loud = []
    for run in runs.values():
        run()
    for _ in range(rounds):
        begin, others = time.perf_counter(), cores_used_by_others()
        for name, run in runs.items():
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        seconds = time.perf_counter() - begin
        is_loud.append((cores_used_by_others() - others) / seconds > LOUD_CORES)
    return times, is_loud


def cores_used_by_others() -> float:
    """Processor seconds that all other processes have used since the machine started."""
    with open("/proc/stat", encoding="ascii") as stat:
        ticks = [int(value) for value in stat.readline().split()[1:]]
    own = os.times()
    # user, nice, system, irq, softirq, steal
    return sum(ticks[i] for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def summary(name: str, times: dict[str, list[float]], is_loud: list[bool], numel: int) -> dict[str, Any]:
    kept = [index for index, loud in enumerate(is_loud) if not loud]
    if len(kept) < 5:
        kept = list(range(len(is_loud)))
    own = [times[name][index] for index in kept]
    row: dict[str, Any] = {"contender": name, "ms": 1e3 * median(own), "least": 1e3 * min(own), "most": 1e3 * max(own)}
    row["gb_per_second"] = BYTES_PER_PARAMETER * numel / median(own) / 1e9
    for other in ("deepspeed", "copy"):
        if other in times:
            row[f"time_to_{other}"] = median(times[name][index] / times[other][index] for index in kept)
    return row


def show(rows: list[dict[str, Any]]) -> str:
    head = ["contender", "ms", "least to most", "GB/s of 28 bytes", "time / deepspeed", "bandwidth / copy"]
    lines = [head]
    for row in rows:
        ratio, copy = row.get("time_to_deepspeed"), row.get("time_to_copy")
        cells = [row["contender"], f"{row['ms']:.1f}", f"{row['least']:.1f} to {row['most']:.1f}"]
        cells += [f"{row['gb_per_second']:.1f}", f"{ratio:.2f}" if ratio else "", f"{1 / copy:.2f}" if copy else ""]
        lines.append(cells)
    return table(lines)


if __name__ == "__main__":
    main()
