"""The columns of a parameter that have the largest gradients.

A parameter of shape [rows, ...] is a matrix of ``numel // rows`` columns. A parameter of one dim has none: all of it is
important.

    norm of a column    sum of absolute values, in fp64, over this rank's elements of it, then over the ranks
    important           the ``ratio`` of the columns with the largest norms, at least one; of equal ones the first
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.protocol import Communicator
from shoal.device import is_fake
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.param_group import ParameterRange
from shoal.streams import host_memory


def num_columns(spec: ParameterSpec) -> int:
    """Of a parameter; 0: it is no matrix."""
    return spec.numel // spec.shape[0] if len(spec.shape) > 1 and spec.numel else 0


def in_important_columns(
    ranges: Sequence[ParameterRange],
    gradient: torch.Tensor,
    specs: Sequence[ParameterSpec],
    ratio: float,
    comm: Communicator,
    device: torch.device,
) -> list[torch.Tensor]:
    """By range, True for elements that lie in important columns, and for those of no matrix. On the host.

    Args:
        gradient: of this rank's owned range, on the host. Shape: [owned numel].
        specs: of all parameters of the buffer, the same on all ranks.
        comm: along which the parameters are sharded. ``device``: that it sends from.

    Communicates: one all_reduce of 8 bytes a column. Order: blocks the host.
    """
    sizes = [num_columns(spec) for spec in specs]
    norms = host_memory(torch.zeros(sum(sizes), dtype=torch.float64, device="cpu"), is_pinned=False)
    by_slot = norms.split(sizes)
    for part in ranges:
        for each in part.segments:
            if size := sizes[each.slot]:
                values = gradient[part.start + each.start : part.start + each.stop]
                by_slot[each.slot].add_(_column_sums(values, each.offset % size, size))
    summed = torch.empty(norms.shape, dtype=norms.dtype, device=device).copy_(norms)
    comm.blocking.all_reduce(summed, label="norms of columns")
    norms.copy_(summed)
    chosen = [_largest(of_slot, max(1, int(ratio * len(of_slot)))) for of_slot in by_slot]
    masks = []
    for part in ranges:
        mask = host_memory(torch.ones(part.stop - part.start, dtype=torch.bool, device="cpu"), is_pinned=False)
        for each in part.segments:
            if size := sizes[each.slot]:
                first, stop = each.offset % size, each.offset % size + each.stop - each.start
                mask[each.start : each.stop] = chosen[each.slot].repeat(-(-stop // size))[first:stop]
        masks.append(mask)
    return masks


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """True for the ``count`` largest ones; of equal ones the first."""
    order = torch.sort(values, descending=True, stable=True).indices
    return torch.zeros_like(values, dtype=torch.bool).index_fill_(0, order[:count], 1)


def _column_sums(values: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Sums of absolute values of a range of a matrix that begins in column ``first``. Shape: [size], fp64."""
    rows = -(-(first + values.numel()) // size)
    whole = values.new_zeros(rows * size)
    whole[first : first + values.numel()] = values
    return whole.abs_().view(rows, size).sum(0, dtype=torch.float64)


def sizes_of(total: torch.Tensor, gradient: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of absolute values, and number, of elements of ``total`` outside of the mask, and of ``gradient`` in it."""
    rest, own = total[~mask].abs(), gradient[mask].abs()
    sizes = (rest.sum(dtype=torch.float64), rest.numel(), own.sum(dtype=torch.float64), own.numel())
    return torch.tensor([float(size) for size in sizes], dtype=torch.float64, device="cpu")


def have_grown(sizes: torch.Tensor, share: float, comm: Communicator, device: torch.device) -> bool:
    """True if in this share of the matrices the mean size outside of the mask has reached that in the mask.

    Args:
        sizes: this rank's part of ``sizes_of`` each parameter. Shape: [parameters, 4].

    Communicates: one all_reduce of 32 bytes a parameter. Order: blocks the host.
    """
    summed = torch.empty(sizes.shape, dtype=sizes.dtype, device=device).copy_(sizes)
    comm.blocking.all_reduce(summed, label="sizes of gradients")
    if is_fake(summed):
        return False
    rows = [row for row in summed.tolist() if row[1] and row[3]]
    reached = sum(rest / num_rest >= own / num_own for rest, num_rest, own, num_own in rows)
    return bool(rows) and reached >= share * len(rows)
