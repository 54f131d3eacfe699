"""Products of linears inside of autograd functions; column linears of an input that sequence parallelism gathers.

Of such an input a rank keeps its own part for backward:

    forward     the region gathers the input once, for all linears that read it
    backward    gathered again, for the weight's gradient, while the input's gradient is computed

The last linear's backward gathers for all of them; the first one's frees what was gathered.

Source: Korthikanti et al., section 4.2.2 (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from shoal.comm.autograd import Gathering, begin_gather, once_differentiable
from shoal.comm.protocol import Communicator
from shoal.parallel.saved_tensors import checkpoint_around


def add_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In the dtype of ``output``, as ``F.linear`` does it under autocast."""
    return output if bias is None else output + bias.to(output.dtype)


def weight_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Of ``x @ weight.t()``. Shape: [..., M], [..., K] -> [M, K]."""
    return gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def cast_for_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All in autocast's dtype where it is on: autograd functions are not cast."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]


class InputGather:
    """Gathers one input again in backward, once for all linears that read it."""

    def __init__(self, comm: Communicator, dim: int, label: str) -> None:
        self.num_linears = 0
        self._comm, self._dim, self._label = comm, dim, f"{label} again backward"
        self._num_left = 0
        self._gathering: Gathering | None = None

    def begin(self, own: torch.Tensor) -> Gathering:
        """Start to gather ``own``, unless another linear has."""
        if self._gathering is None:
            self._num_left = self.num_linears
            self._gathering = begin_gather(own, self._comm, self._dim, self._label)
        gathering, self._num_left = self._gathering, self._num_left - 1
        if not self._num_left:
            self._gathering = None
        return gathering


class GatheredInput:
    """This rank's part of a gathered input, by dtype: autocast casts it once for all linears."""

    def __init__(self, own: torch.Tensor, gather: InputGather) -> None:
        self.gather = gather
        self.checkpoint = checkpoint_around()  # a recomputed function inside of this one keeps the whole input
        self._own = {own.dtype: own.detach()}

    def own(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._own:
            self._own[dtype] = next(iter(self._own.values())).to(dtype)
        return self._own[dtype]


def column_linear_of(
    gathered: GatheredInput, whole: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``whole @ weight.t() + bias``, of which backward keeps this rank's part of ``whole``.

    Args:
        whole: [..., L, K], of which ``gathered`` has this rank's part.

    Communicates: in backward the all-gather of ``whole``, once for all linears that read it.
    """
    apply: Callable[..., torch.Tensor] = _ColumnOfGathered.apply
    whole, weight = cast_for_autocast(whole, weight)
    if weight.requires_grad and torch.is_grad_enabled():
        gathered.gather.num_linears += 1
    output = apply(whole, gathered.own(whole.dtype), weight, gathered.gather)
    return add_bias(output, bias)


class _ColumnOfGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, own: torch.Tensor, weight: torch.Tensor, gather: InputGather
    ) -> torch.Tensor:
        ctx.save_for_backward(own if weight.requires_grad else None, weight)
        ctx.gather = gather
        return F.linear(whole, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        gathering = None if own is None else ctx.gather.begin(own)
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = None if gathering is None else weight_gradient(gradient, gathering.wait())
        return of_input, None, of_weight, None
