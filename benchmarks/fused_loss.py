"""The loss in chunks beside logits and ``F.cross_entropy``: time of forward and backward, and peak memory.

    python -m benchmarks.fused_loss --tokens 4096 --width 768 --vocabulary 50257 128256

Both run in turn, in one process, on the same tensors: ``--rounds`` pairs, of which the medians and the median of the
pairs' ratios are given. The peak counts the bytes of living storages above those of the inputs, on a GPU the
allocator's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.arena import machine, table
from shoal.parallel.loss import linear_cross_entropy
from tests.helpers.live_storages import LiveStorages

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def one_pass(compute: Compute, hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Seconds of forward and backward."""
    hidden.grad = weight.grad = None
    synchronize(hidden.device)
    start = time.perf_counter()
    compute(hidden, weight, targets).backward()
    synchronize(hidden.device)
    return time.perf_counter() - start


def peak_bytes(compute: Compute, hidden: Tensor, weight: Tensor, targets: Tensor) -> int:
    hidden.grad = weight.grad = None
    if hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compute(hidden, weight, targets).backward()
        return torch.cuda.max_memory_allocated() - before
    with LiveStorages() as storages:
        compute(hidden, weight, targets).backward()
    return storages.peak


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(tokens: int, width: int, vocabulary: int, dtype: torch.dtype, device: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype, device=device).requires_grad_()
    weight = (torch.randn(vocabulary, width, dtype=dtype, device=device) / width**0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    contenders: list[Compute] = [plain, linear_cross_entropy]
    peaks = [peak_bytes(each, hidden, weight, targets) for each in contenders]  # warms up, too
    times = [[one_pass(each, hidden, weight, targets) for each in contenders] for _ in range(rounds)]
    medians = [statistics.median(pair[index] for pair in times) for index in (0, 1)]
    return {
        "tokens": tokens,
        "width": width,
        "vocabulary": vocabulary,
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": medians,
        "time_ratio": statistics.median(ours / theirs for theirs, ours in times),
        "peak_bytes": peaks,
        "memory_ratio": peaks[0] / peaks[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[50257, 128256])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = [
        compare(given.tokens, given.width, each, getattr(torch, given.dtype), given.device, given.rounds)
        for each in given.vocabulary
    ]
    lines = [["tokens", "width", "vocabulary", "dtype", "plain s", "ours s", "time", "plain MiB", "ours MiB", "memory"]]
    for row in found:
        shape = [str(row[key]) for key in ("tokens", "width", "vocabulary", "dtype")]
        seconds = [f"{value:.3f}" for value in row["seconds"]]
        peaks = [f"{value / 2**20:.0f}" for value in row["peak_bytes"]]
        lines.append([*shape, *seconds, f"{row['time_ratio']:.3f}", *peaks, f"{row['memory_ratio']:.2f}"])
    print(table(lines))
    if given.out:
        given.out.write_text(json.dumps({"machine": machine(), "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
