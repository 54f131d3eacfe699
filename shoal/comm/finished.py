"""What all communicators share: a finished work, several works as one, ranges and parts of tensors, JSON as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.errors import CommError, UsageError


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
    if size == 1:
        return full
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


def split_parts(
    tensor: torch.Tensor, split_sizes: Sequence[int] | None, size: int, *, label: str
) -> tuple[torch.Tensor, ...]:
    """``tensor`` as one part a rank: ``size`` equal parts, or parts of ``split_sizes`` elements.

    Raises: UsageError: the parts do not add up to the tensor.
    """
    if split_sizes is None:
        check_divides("all_to_all", tensor, None, size, label=label)
        split_sizes = [tensor.numel() // size] * size
    if len(split_sizes) != size or sum(split_sizes) != tensor.numel() or min(split_sizes) < 0:
        raise UsageError(
            f"all_to_all {label!r}: split sizes {list(split_sizes)} for a tensor of {tensor.numel()} elements and "
            f"{size} ranks",
            do="give one split size for each rank; their sum is the number of elements.",
        )
    return tuple(tensor.detach().split(list(split_sizes)))


def check_both_splits(out: object, source: object, *, label: str) -> None:
    """Raises: UsageError: only one of the two has split sizes."""
    if (out is None) != (source is None):
        raise UsageError(
            f"all_to_all {label!r}: only one of out_splits and source_splits is given",
            do="give both, or neither for equal parts.",
        )


def check_peer(op: str, peer: int, rank: int, size: int, *, label: str) -> None:
    """Raises: UsageError: ``peer`` is this rank, or not on the axis."""
    if peer == rank or not 0 <= peer < size:
        raise UsageError(
            f"{op} {label!r}: rank {rank} of {size} names peer {peer}",
            do="name the coordinate of another rank on the axis.",
        )


def split_mismatch(axis: str, label: str, rank: int, peer: int, sent: int, expected: int) -> CommError:
    """The error of two ranks whose split sizes of one all_to_all differ."""
    return CommError(
        f"all_to_all {label!r} on axis {axis!r}: rank {peer} sends {sent} elements to rank {rank}, which expects "
        f"{expected}",
        do="make out_splits[peer] of each rank equal to source_splits[rank] of each peer.",
        code="comm-mismatch",
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
