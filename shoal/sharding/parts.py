"""A part of a larger tensor (``ParameterSpec.local``): cut out of the whole, and put together with the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.protocol import Communicator
from shoal.sharding.layout import ParameterSpec


def take(tensor: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The ranges of ``tensor`` along ``dim``, concatenated: a view where there is one range, else a copy."""
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def cut(whole: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """The part that ``spec`` names: a view where each dim has one range. Shape: ``spec.shape``."""
    for dim, ranges in enumerate(spec.local):
        whole = take(whole, dim, ranges)
    return whole


def paste(part: torch.Tensor, spec: ParameterSpec, whole: torch.Tensor) -> None:
    """Write the part to its place in the whole."""
    split = next((dim for dim, ranges in enumerate(spec.local) if len(ranges) > 1), 0)
    for dim, ranges in enumerate(spec.local):
        if dim != split:
            whole = whole.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])
    at = 0
    for start, stop in spec.local[split] if spec.local else ():
        whole.narrow(split, start, stop - start).copy_(part.narrow(split, at, stop - start))
        at += stop - start


def gather_parts(part: torch.Tensor, spec: ParameterSpec, comm: Communicator) -> torch.Tensor:
    """The whole tensor, of which every rank along ``comm`` holds another part. Shape: ``spec.global_shape``.

    Communicates: an all-reduce of the whole: each element has one summand that is not zero.
    """
    whole = comm.empty(spec.global_numel, part.dtype, part.device).zero_()
    paste(part, spec, whole.view(spec.global_shape))
    comm.all_reduce(whole, label=f"parts of {spec.name}").drain()
    return whole.view(spec.global_shape)
