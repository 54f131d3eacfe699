"""The columns of a parameter that have the largest gradients.

A parameter of shape [rows, ...] is a matrix of ``numel // rows`` columns. A parameter of one dim has none: all of it is
important.

    norm of a column    sum of absolute values, in fp64, over this rank's elements of it, then over the ranks
    important           the ``ratio`` of the columns with the largest norms, at least one; of equal ones the first
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from shoal.comm.protocol import Communicator
from shoal.device import is_fake
from shoal.sharding.layout import ParameterSpec, Segment
from shoal.streams import host_memory


def num_columns(spec: ParameterSpec) -> int:
    """Of a parameter; 0: it is no matrix."""
    return spec.numel // spec.shape[0] if len(spec.shape) > 1 and spec.numel else 0


def important_columns(
    gradients: Iterable[tuple[Segment, torch.Tensor]],
    specs: Sequence[ParameterSpec],
    ratio: float,
    comm: Communicator,
    device: torch.device,
) -> list[torch.Tensor]:
    """By slot, which columns are important. Each [number of columns], bool, on the host.

    Args:
        gradients: this rank's parts of parameters, on the host. Each [segment's numel].
        specs: of all parameters of the buffer, the same on all ranks.
        comm: along which the parameters are sharded. ``device``: that it sends from.

    Communicates: one all_reduce of 8 bytes a column. Order: blocks the host.
    """
    sizes = [num_columns(spec) for spec in specs]
    norms = host_memory(torch.zeros(sum(sizes), dtype=torch.float64), is_pinned=False)
    by_slot = norms.split(sizes)
    for segment, values in gradients:
        if size := sizes[segment.slot]:
            by_slot[segment.slot].add_(_column_sums(values, segment.offset % size, size))
    summed = torch.empty(norms.shape, dtype=norms.dtype, device=device).copy_(norms)
    comm.blocking.all_reduce(summed, label="norms of columns")
    norms.copy_(summed)
    chosen = []
    for size, of_slot in zip(sizes, by_slot, strict=True):
        order = torch.sort(of_slot, descending=True, stable=True).indices
        ranks = torch.empty_like(order).scatter_(0, order, torch.arange(size))
        chosen.append(ranks < max(1, int(ratio * size)))
    return chosen


def _column_sums(values: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Sums of absolute values of a range of a matrix that begins in column ``first``. Shape: [size], fp64."""
    rows = -(-(first + values.numel()) // size)
    whole = values.new_zeros(rows * size)
    whole[first : first + values.numel()] = values
    return whole.abs_().view(rows, size).sum(0, dtype=torch.float64)


def in_columns(segments: Sequence[Segment], numel: int, chosen: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """True for the elements of a range that lie in one of the columns, and for those of no matrix. Shape: [numel].

    Args:
        chosen: by slot, of matrices.
    """
    mask = host_memory(torch.ones(numel, dtype=torch.bool), is_pinned=False)
    for segment in segments:
        if (columns := chosen.get(segment.slot)) is not None:
            first, count = segment.offset % len(columns), segment.stop - segment.start
            mask[segment.start : segment.stop] = columns.repeat(-(-(first + count) // len(columns)))[first:][:count]
    return mask


def no_sizes(specs: Sequence[ParameterSpec]) -> torch.Tensor:
    """Of each parameter as ``sizes_of``, of no elements. Shape: [parameters, 4], on the host."""
    return host_memory(torch.zeros(len(specs), 4, dtype=torch.float64), is_pinned=False)


def sizes_of(total: torch.Tensor, gradient: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of absolute values, and number, of elements of ``total`` outside of the mask, and of ``gradient`` in it."""
    rest, own = total[~mask].abs(), gradient[mask].abs()
    sizes = (rest.sum(dtype=torch.float64), rest.numel(), own.sum(dtype=torch.float64), own.numel())
    return torch.tensor([float(size) for size in sizes], dtype=torch.float64)


def have_grown(sizes: torch.Tensor, share: float, comm: Communicator, device: torch.device) -> bool:
    """True if in this share of the matrices the mean size outside of the mask has reached that in the mask.

    Args:
        sizes: as of ``no_sizes``, this rank's part.

    Communicates: one all_reduce of 32 bytes a parameter. Order: blocks the host.
    """
    summed = torch.empty(sizes.shape, dtype=sizes.dtype, device=device).copy_(sizes)
    comm.blocking.all_reduce(summed, label="sizes of gradients")
    if is_fake(summed):
        return False
    rows = [row for row in summed.tolist() if row[1] and row[3]]
    reached = sum(rest / num_rest >= own / num_own for rest, num_rest, own, num_own in rows)
    return bool(rows) and reached >= share * len(rows)
