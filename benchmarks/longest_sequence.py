"""The longest sequence that trains in the memory that a plain run needs, part by part.

    python -m benchmarks.longest_sequence --tokens 512

The memory is the peak of the plain run with ``--tokens`` in one sequence: parameters, gradients, AdamW's states and
activations of one rank, after a first step. Each row adds a part to those above it. The length is doubled until the
peak is above that; between the last two lengths it grows linearly, and the longest that fits is run. Peaks count the
bytes of living storages; activations that are offloaded to the host are copied to memory that is not counted, as on a
GPU's rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import shoal
from benchmarks.arena import machine, table
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.loss import linear_cross_entropy
from shoal.parallel.recompute import Recompute, RecomputeSettings, recompute_blocks
from shoal.parallel.tiled import tile_modules
from tests.helpers.live_storages import LiveStorages

PARTS = ["fused loss", "recompute", "on the host", "tiled feed-forward"]


class Done:
    def wait(self) -> None: ...


class UncountedCopies:
    """A host beside the device: its memory is not counted."""

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, Done]:
        with _disable_current_modes():
            return source.detach().clone(memory_format=torch.contiguous_format), Done()

    def to_device(self, host: torch.Tensor, target: torch.Tensor) -> Done:
        target.copy_(host)
        return Done()


def peak_bytes(given: argparse.Namespace, tokens: int, parts: list[str]) -> tuple[int, float]:
    """The peak of the second step, and its seconds."""
    with LiveStorages(has_resizes=False) as storages:
        torch.manual_seed(0)
        loss = functools.partial(linear_cross_entropy, chunk_tokens=given.tile)
        shape = GPTConfig(given.vocabulary, tokens, given.layers, given.width, given.width // 32)
        model = GPT(shape, loss=loss if "fused loss" in parts else None)
        if "tiled feed-forward" in parts:
            tile_modules(model, "FeedForward", tile_tokens=given.tile)
        if "recompute" in parts:
            settings = RecomputeSettings(is_offloaded="on the host" in parts)
            recompute_blocks(model, "Block", recompute=Recompute(settings, copies_of=lambda _: UncountedCopies()))
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "steps_per_print": None}
        engine = shoal.initialize(model=model, config=config)[0]
        sequence = torch.randint(0, given.vocabulary, (1, tokens + 1))
        for _ in range(2):
            storages.reset_peak()
            start = time.perf_counter()
            engine.backward(engine(sequence[:, :-1], sequence[:, 1:]))
            engine.step()
        seconds = time.perf_counter() - start
        peak = storages.peak
        engine.destroy()
    return peak, seconds


def longest(given: argparse.Namespace, parts: list[str], budget: int) -> dict[str, Any]:
    """The longest sequence whose measured peak is within ``budget``."""
    lengths, peaks = [given.tokens], [0]
    while peaks[-1] <= budget:  # in short sequences constants hide what a token costs
        lengths.append(2 * lengths[-1])
        peaks.append(peak_bytes(given, lengths[-1], parts)[0])
    if len(peaks) == 2:
        peaks[0] = peak_bytes(given, lengths[0], parts)[0]
    per_token = (peaks[-1] - peaks[-2]) / (lengths[-1] - lengths[-2])
    tokens = int((budget - peaks[-2]) / per_token) + lengths[-2]
    tokens -= tokens % 64
    peak, seconds = peak_bytes(given, tokens, parts)
    while peak > budget:
        tokens -= 64
        peak, seconds = peak_bytes(given, tokens, parts)
    return {"tokens": tokens, "peak_bytes": peak, "bytes_per_token": per_token, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tile", type=int, default=256, help="tokens of a chunk of the loss and of a tile")
    parser.add_argument("--only-all", action="store_true", help="leave out the rows between none and all parts")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    budget, seconds = peak_bytes(given, given.tokens, [])
    rows: list[dict[str, Any]] = [
        {"parts": [], "tokens": given.tokens, "peak_bytes": budget, "bytes_per_token": None, "seconds": seconds}
    ]
    for count in [len(PARTS)] if given.only_all else range(1, len(PARTS) + 1):
        rows.append({"parts": PARTS[:count], **longest(given, PARTS[:count], budget)})
        print(rows[-1], flush=True)
    lines = [["parts", "longest", "times", "peak MiB", "KiB a token", "s a step"]]
    for row in rows:
        per_token = f"{row['bytes_per_token'] / 1024:.1f}" if row["bytes_per_token"] else ""
        times, mib = f"{row['tokens'] / given.tokens:.1f}", f"{row['peak_bytes'] / 2**20:.1f}"
        name = "+ " + row["parts"][-1] if row["parts"] else "none"
        lines.append([name, str(row["tokens"]), times, mib, per_token, f"{row['seconds']:.1f}"])
    print(table(lines))
    if given.out:
        given.out.write_text(json.dumps({"machine": machine(), "budget_bytes": budget, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
