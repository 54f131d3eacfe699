"""Ranks with equal loads: which experts change ranks, and copies of the most loaded experts on every rank.

    placement     ids of the experts by rank:   rank 0: 0 1 2 3      rank 1: 4 5 6 7
    loads         tokens by expert:             9 9 1 1              1 1 1 1
    new placement                               rank 0: 4 1 2 3      rank 1: 0 5 6 7

An expert changes its rank, never its place among the experts of a rank: the same range of every flat buffer moves, so
that ranks which shard it alike exchange it among themselves.

    copy        expert 3 --broadcast--> every rank, which computes its own tokens of expert 3 and sends none
    backward    the gradients of the copies --all-reduce--> the gradient of expert 3 on its rank

A copy exists for one forward and backward. It has neither main parameters nor optimizer state: parameters, their shards
and checkpoints are as without it. Only experts in stacked parameters are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.autograd import once_differentiable
from shoal.comm.protocol import Communicator
from shoal.device import numbers_on

ExpertsByRank = tuple[tuple[int, ...], ...]  # ids

_WORTH_A_COPY = 0.1  # a copy is sent in every forward; a smaller excess over the mean costs less


def plan_placement(loads: Sequence[float], placement: ExpertsByRank, *, tolerance: float = 0.02) -> ExpertsByRank:
    """Exchange experts between the most loaded rank and others, the best exchange first, until none helps.

    Args:
        loads: by expert.
        placement: the present one: ids of the experts by rank, equally many on each.
        tolerance: a most loaded rank that exceeds the mean by at most this share is left as it is.

    Returns: the new placement. Every rank that calls this with the same arguments gets the same.

    >>> plan_placement([9, 9, 1, 1, 1, 1, 1, 1], ((0, 1, 2, 3), (4, 5, 6, 7)))
    ((4, 1, 2, 3), (0, 5, 6, 7))
    """
    ids = [list(of_rank) for of_rank in placement]
    totals = _totals(loads, ids)
    limit = (1 + tolerance) * sum(totals) / len(totals)
    while max(totals) > limit:
        first = totals.index(max(totals))
        most, other, place = min(
            (max(totals[first] - gap, totals[rank] + gap), rank, place)
            for place, expert in enumerate(ids[first])
            for rank in range(len(ids))
            for gap in [loads[expert] - loads[ids[rank][place]]]
        )
        if most >= totals[first]:
            break
        gap = loads[ids[first][place]] - loads[ids[other][place]]
        totals[first], totals[other] = totals[first] - gap, totals[other] + gap
        ids[first][place], ids[other][place] = ids[other][place], ids[first][place]
    return tuple(map(tuple, ids))


def plan_copies(
    loads: Sequence[float], placement: ExpertsByRank, max_copies: int
) -> tuple[tuple[int, ...], ExpertsByRank]:
    """Choose experts that every rank gets a copy of, so that each computes its own tokens of them.

    The most loaded expert is copied as long as the rest, exchanged by :func:`plan_placement`, leave a rank whose load
    exceeds the mean by more than ``_WORTH_A_COPY``.

    Returns: the copied experts, and the placement of all.

    >>> plan_copies([90, 2, 2, 2], ((0, 1), (2, 3)), 1)
    ((0,), ((0, 1), (2, 3)))
    """
    rest = list(loads)
    copied: list[int] = []
    while True:
        planned = plan_placement(rest, placement)
        totals = _totals(rest, planned)
        excess = max(totals) - sum(totals) / len(totals)
        if len(copied) == max_copies or excess * len(totals) <= _WORTH_A_COPY * sum(loads):
            return tuple(copied), planned
        copied.append(max(range(len(rest)), key=rest.__getitem__))
        rest[copied[-1]] = 0.0


def most_loaded(loads: Sequence[float], placement: ExpertsByRank) -> float:
    """The load of the most loaded rank over the mean of the ranks; 1 where they are equal, or have none.

    >>> most_loaded([9, 9, 1, 1], ((0, 1), (2, 3)))
    1.8
    """
    totals = _totals(loads, placement)
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def _totals(loads: Sequence[float], placement: Sequence[Sequence[int]]) -> list[float]:
    """The loads of the ranks."""
    return [sum(loads[expert] for expert in of_rank) for of_rank in placement]


def num_moved(before: ExpertsByRank, after: ExpertsByRank) -> int:
    """How many experts change ranks."""
    return sum(a != b for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))


class ExpertCopies:
    """The experts of one layer that every rank has a copy of.

    Args:
        module: whose parameters are [local experts, ...].
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.experts: tuple[int, ...] = ()

    def place_of(self, index: Tensor, num_experts: int) -> Tensor:
        """The copy of each expert of ``index``; -1: it has none."""
        places = [-1] * (num_experts + 1)  # the last entry is that of -1
        for place, expert in enumerate(self.experts):
            places[expert] = place
        return numbers_on(index.device, places)[index]

    def gather(self, ids: Sequence[int], owners: Sequence[int], comm: Communicator, label: str) -> list[Tensor]:
        """The copies' parameters, in the order of the module's. Each shape: [copies, ...].

        Args:
            ids: the experts that this rank holds.
            owners: by expert, the rank that holds it.

        Communicates: a broadcast of each expert; in backward one all-reduce of the gradients of all.
        Memory: the copies, until backward ends; in backward a gradient of the local experts' shape.
        """
        sources = [(owners[expert], ids.index(expert) if expert in ids else -1) for expert in self.experts]
        copies: tuple[Tensor, ...] = _GatherCopies.apply(sources, comm, label, *self._module.parameters())
        return list(copies)

    @contextmanager
    def used(self, copies: Sequence[Tensor]) -> Iterator[None]:
        """Inside the block the module's parameters are the copies."""
        places = [
            (module, key, parameter)
            for module in self._module.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        try:
            for (module, key, _), copy in zip(places, copies, strict=True):
                module._parameters[key] = copy  # type: ignore[assignment]
            yield
        finally:
            for module, key, parameter in places:
                module._parameters[key] = parameter


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sources: list[tuple[int, int]], comm: Communicator, label: str, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sources, ctx.comm, ctx.label = sources, comm, label
        ctx.shapes = [parameter.shape for parameter in parameters]
        copies = [parameter.new_empty(len(sources), *parameter.shape[1:]) for parameter in parameters]
        for number, (owner, place) in enumerate(sources):
            flat = _flat([parameter[max(place, 0)] for parameter in parameters], comm)
            comm.blocking.broadcast(flat, owner, label=f"{label} copies")
            for copy, values in zip(copies, _like(flat, [copy[number] for copy in copies]), strict=True):
                copy[number] = values
        return tuple(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = _flat(gradients, ctx.comm)
        ctx.comm.blocking.all_reduce(flat, label=f"{ctx.label} copies backward")
        results: list[Tensor] = []
        for gradient, shape in zip(_like(flat, gradients), ctx.shapes, strict=True):
            result = gradient.new_zeros(shape)
            for number, (_, place) in enumerate(ctx.sources):
                if place >= 0:
                    result[place] = gradient[number]
            results.append(result)
        return None, None, None, *results


def _flat(tensors: Sequence[Tensor], comm: Communicator) -> Tensor:
    """The tensors one after the other, in memory that ``comm`` sends from. Shape: [numel]."""
    flat = comm.empty(sum(tensor.numel() for tensor in tensors), tensors[0].dtype, tensors[0].device)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=flat)


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of ``flat``, in the shapes of the tensors."""
    ends = list(accumulate(tensor.numel() for tensor in tensors))
    return [flat[end - like.numel() : end].view_as(like) for end, like in zip(ends, tensors, strict=True)]
