"""What all communicators share: a work that is done already, the range that a rank owns, and JSON as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from shoal.errors import UsageError


class FinishedWork:
    """A collective that needed no other rank, or that blocked until it was done."""

    __slots__ = ("_result",)

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def wait(self) -> torch.Tensor:
        return self._result

    def drain(self) -> None:
        return None


def own_range(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rank ``rank``'s range of ``full``: all ranges but the last few are of one size, so any numel works."""
    chunk = -(-full.numel() // size)
    return full[min(rank * chunk, full.numel()) : min((rank + 1) * chunk, full.numel())]


def check_divides(op: str, full: torch.Tensor, shard: torch.Tensor | None, size: int, *, label: str) -> None:
    """Raises: UsageError: ``full`` is not ``size`` times ``shard``."""
    if full.numel() % size or (shard is not None and shard.numel() * size != full.numel()):
        raise UsageError(
            f"{op} {label!r}: the full tensor has {full.numel()} elements and the shard "
            f"{'none' if shard is None else shard.numel()}, over {size} ranks",
            do="pad the full tensor to a multiple of the ranks, and give a shard of full numel / ranks.",
        )


def gather_json(value: Any, exchange: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> list[Any]:
    """Every rank's ``value`` by two exchanges: of the lengths, then of the padded JSON texts."""
    try:
        text = json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"a {type(value).__name__} cannot be sent to other ranks: {error}",
            do="send only what JSON holds: numbers, strings, lists, and dicts with string keys.",
        ) from error
    lengths = exchange(torch.tensor([len(text)], dtype=torch.int64, device=device)).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = exchange(padded.to(device)).cpu()
    return [json.loads(rows[rank, :length].numpy().tobytes().decode()) for rank, length in enumerate(map(int, lengths))]
