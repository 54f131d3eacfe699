"""A part of a larger tensor (``ParameterSpec.local``): cut out of the whole, read, and put together with the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, product

import torch

from shoal.comm.protocol import Communicator
from shoal.sharding.layout import ParameterSpec

_READ_NUMEL = 4 << 20


def take(tensor: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The ranges of ``tensor`` along ``dim``, concatenated: a view where there is one range, else a copy."""
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def cut(whole: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """The part that ``spec`` names: a view where each dim has one range. Shape: ``spec.shape``."""
    for dim, ranges in enumerate(spec.local):
        whole = take(whole, dim, ranges)
    return whole


def read_part(spec: ParameterSpec, read_range: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """The part that ``spec`` names of a tensor that is read by ranges of its flattened elements, as from a file.

    Args:
        read_range: elements [begin, end) of the whole tensor, 1-D.

    Memory: this part, twice while it is put together; with it, at most 4 Mi elements or one row of the whole tensor: of
        its first dim, or of all dims before the first one that is split.
    """
    split_dims = (dim for dim, ranges in enumerate(spec.local) if ranges != ((0, spec.global_shape[dim]),))
    num_outer = max(1, next(split_dims, 0))
    num_rows, inner = math.prod(spec.global_shape[:num_outer]), math.prod(spec.global_shape[num_outer:])
    step = max(1, _READ_NUMEL // max(1, inner))
    pieces = []
    for start, stop in spec.local[0] if num_outer == 1 else ((0, num_rows),):
        for row in range(start, stop, step) or (start,):
            piece = read_range(row * inner, min(row + step, stop) * inner).view(-1, *spec.global_shape[num_outer:])
            for dim, ranges in enumerate(spec.local[num_outer:], 1):
                piece = take(piece, dim, ranges)
            pieces.append(piece.clone())
    return torch.cat(pieces).view(spec.shape)


def paste(part: torch.Tensor, spec: ParameterSpec, whole: torch.Tensor) -> None:
    """Write the part to its place in the whole."""
    sizes = [[stop - start for start, stop in ranges] for ranges in spec.local]
    ends = [accumulate(each) for each in sizes]
    for box in product(*(zip(*each, strict=True) for each in zip(spec.local, sizes, ends, strict=True))):
        source, target = part, whole
        for dim, ((start, _), size, end) in enumerate(box):
            source, target = source.narrow(dim, end - size, size), target.narrow(dim, start, size)
        target.copy_(source)


def gather_parts(part: torch.Tensor, spec: ParameterSpec, comm: Communicator) -> torch.Tensor:
    """The whole tensor, of which every rank along ``comm`` holds another part. Shape: ``spec.global_shape``.

    Communicates: an all-reduce of the whole: each element has one summand that is not zero.
    """
    whole = comm.empty(spec.global_numel, part.dtype, part.device).zero_()
    paste(part, spec, whole.view(spec.global_shape))
    comm.blocking.all_reduce(whole, label=f"parts of {spec.name}")
    return whole.view(spec.global_shape)
