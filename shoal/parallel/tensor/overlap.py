"""Linears whose communication runs beside their matrix products (``tp_overlap_comm``).

    row, forward          the product in chunks of tokens; each chunk's sum is under way while the next one is computed
    row, backward         sequence parallel: each chunk's gradient is gathered while the one before it is multiplied
    column, backward      the sum of the input's gradient is under way while the weight's gradient is computed

A column whose input entered the region with a module around it (``prepare_input``) is not covered: the sum of the
input's gradient begins when the last of the layers inside has computed its own. Values are those of the plain layers; a
weight's gradient that is computed in chunks is a sum in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from shoal.comm.protocol import Communicator

NUM_CHUNKS = 4


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, comm: Communicator, *, splits_sequence: bool, label: str
) -> torch.Tensor:
    """``x @ weight.t()`` summed over the ranks; with ``splits_sequence`` this rank's part of the sum.

    Args:
        x: [..., L, K].
        weight: [M, K].

    Communicates: as one all_reduce (reduce_scatter), in up to NUM_CHUNKS calls.
    """
    apply: Callable[..., torch.Tensor] = (_ScatteredRow if splits_sequence else _SummedRow).apply
    return apply(*cast_for_autocast(x, weight), comm, label)


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, comm: Communicator, *, label: str
) -> torch.Tensor:
    """``x @ weight.t() + bias`` of an input that every rank has; its gradient is summed over the ranks."""
    apply: Callable[..., torch.Tensor] = _Column.apply
    output = apply(*cast_for_autocast(x, weight), comm, label)
    return add_bias(output, bias)


class _SummedRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, comm: Communicator, label: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        tokens = x.reshape(-1, x.shape[-1])
        out = comm.empty(tokens.shape[0] * weight.shape[0], x.dtype, x.device)
        works, stop = [], 0
        for chunk in tokens.chunk(NUM_CHUNKS):
            start, stop = stop, stop + chunk.shape[0] * weight.shape[0]
            out[start:stop].view(-1, weight.shape[0]).copy_(F.linear(chunk, weight))
            works.append(comm.all_reduce(out[start:stop], label=label))
        for work in works:
            work.drain()
        return out.resize_(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, _of_weight(ctx, gradient, x), None, None


class _ScatteredRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, comm: Communicator, label: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.label = comm, f"{label} backward"
        by_rank = _by_rank(x, comm.size)  # [ranks, B, L of a rank, K]
        works, outs = [], []
        for chunk in by_rank.chunk(_num_chunks(by_rank), 2):
            partial = comm.empty(chunk[..., :1].numel() * weight.shape[0], x.dtype, x.device)
            partial.view(*chunk.shape[:-1], weight.shape[0]).copy_(F.linear(chunk, weight))
            outs.append(torch.empty((*chunk.shape[1:-1], weight.shape[0]), dtype=x.dtype, device=x.device))
            works.append(comm.reduce_scatter(partial, outs[-1].view(-1), label=label))
        for work in works:
            work.drain()
        whole = torch.cat(outs, 1)  # [B, L of a rank, M]
        return whole.resize_(*x.shape[:-2], *whole.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        comm: Communicator = ctx.comm
        by_rank = _by_rank(x, comm.size)
        num_chunks = _num_chunks(by_rank)
        own = gradient.reshape(by_rank.shape[1], -1, weight.shape[0]).chunk(num_chunks, 1)
        works, gathered = [], []
        for part in own:
            gathered.append(torch.empty((comm.size, *part.shape), dtype=part.dtype, device=part.device))
            works.append(comm.all_gather(gathered[-1].view(-1), part.contiguous().view(-1), label=ctx.label))
        of_input = torch.empty_like(by_rank)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for work, whole, chunk, target in zip(
            works, gathered, by_rank.chunk(num_chunks, 2), of_input.chunk(num_chunks, 2), strict=True
        ):
            work.wait()
            target.copy_(whole @ weight)
            if of_weight is not None:
                of_weight += weight_gradient(whole, chunk)
        for work in works:
            work.drain()
        return of_input.transpose(0, 1).reshape(x.shape), of_weight, None, None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, comm: Communicator, label: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.label = comm, f"{label} backward"
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_input = ctx.comm.empty(x.numel(), x.dtype, x.device)
        of_input.view(x.shape).copy_(gradient @ weight)
        work = ctx.comm.all_reduce(of_input, label=ctx.label)
        of_weight = _of_weight(ctx, gradient, x)
        work.drain()
        return of_input.resize_(x.shape), of_weight, None, None


def _of_weight(ctx: Any, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    if not ctx.needs_input_grad[1]:  # a frozen weight
        return None
    return weight_gradient(gradient, x)


def add_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In the dtype of ``output``, as ``F.linear`` does it under autocast."""
    return output if bias is None else output + bias.to(output.dtype)


def weight_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def _by_rank(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., L, K] as [ranks, B, L of a rank, K]."""
    return x.reshape(-1, size, x.shape[-2] // size, x.shape[-1]).transpose(0, 1)


def _num_chunks(by_rank: torch.Tensor) -> int:
    return min(NUM_CHUNKS, by_rank.shape[2])


def cast_for_autocast(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in autocast's dtype where it is on: autograd functions are not cast."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype)
