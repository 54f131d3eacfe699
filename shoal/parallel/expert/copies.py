"""Copies of a layer's most loaded experts on every rank, for one forward and backward.

    owner      expert 3 --broadcast--> a copy on each rank; each computes its own tokens of expert 3, and sends none
    backward   the gradients of the copies --all-reduce--> the owner's gradient

A copy has neither main parameters nor optimizer state: parameters, their shards and checkpoints are as without it. Of
experts in stacked parameters.
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
        return torch.tensor(places).to(index.device, non_blocking=True)[index]

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
            comm.broadcast(flat, owner, label=f"{label} copies").drain()
            for copy, values in zip(copies, _like(flat, [copy[number] for copy in copies]), strict=True):
                copy[number] = values
        return tuple(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = _flat(gradients, ctx.comm)
        ctx.comm.all_reduce(flat, label=f"{ctx.label} copies backward").drain()
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
