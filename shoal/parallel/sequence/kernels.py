"""Attention of one tile with the log-sum-exp of its scores, and its gradients: torch's kernels, or a plain path.

    name        used for                                                        scores in memory
    cpu         CPU, one head size for queries and values                       a block of the kernel's
    flash       CUDA, fp16 and bf16, a head size that divides by 8, up to 256   none
    efficient   CUDA, fp16, bf16 and fp32, head sizes that divide by 8          none
                (on GPUs before Ampere no flash, and no bf16; on sm_86, sm_89 and
                sm_120 no flash for head sizes from 200 to 224)
    plain       everything else, and a soft cap of the scores                   1,024 queries against the tile's keys

K divides H: consecutive heads of queries share a head of keys, which no kernel copies. ``UnevenGroups`` is for heads of
keys that serve different numbers of heads of queries.

The backward of a kernel computes the probabilities again, as exp(score - log-sum-exp). Given the output and the
log-sum-exp over all keys it gives the tile's share of the gradients, so that the shares of all tiles add up.

Letters: B rows, H heads of queries, K heads of keys and values, L queries, S keys, E head size, F head size of values.

Source: online softmax and its backward: FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from shoal.device import capability

HeadGroups = tuple[tuple[range, range], ...]  # heads of queries, and the heads of keys that they share evenly
Output = tuple[Tensor, Tensor]  # of a tile's queries, and the log-sum-exp of their scores
Saved = Sequence[Tensor]  # query, key, value; output and log-sum-exp
Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value

_aten: Any = torch.ops.aten
_PLAIN_QUERIES = 1024
_ROUNDED_QUERIES = 32  # the efficient kernel's log-sum-exp has a multiple of so many queries


class AttentionKernel(Protocol):
    """Attention of [B, H, L, E] queries to [B, K, S, E] keys and [B, K, S, F] values; all of ``dense_heads``."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Output:
        """Returns: output, [B, H, L, F]; log-sum-exp, [B, H, L], in fp32 (fp64 for fp64)."""
        ...

    def backward(self, gradient: Tensor, saved: Saved, is_causal: bool, scale: float) -> Gradients:
        """
        Args:
            saved: query, key and value; output and log-sum-exp over all keys, of this tile and of others.

        Returns: the tile's share of the gradients of queries, keys and values.
        """
        ...


class CpuKernel:
    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Output:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        return out, lse

    def backward(self, gradient: Tensor, saved: Saved, is_causal: bool, scale: float) -> Gradients:
        gradients: Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *saved, 0.0, is_causal, scale=scale
        )
        return gradients


class FlashKernel:
    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Output:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
        return out, lse

    def backward(self, gradient: Tensor, saved: Saved, is_causal: bool, scale: float) -> Gradients:
        query, key, value, out, lse = saved
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # dropout seed and offset; dropout is 0
        unused = torch.zeros((), dtype=torch.uint64, device=query.device)
        gradients: Gradients = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0,
            is_causal, seed, unused, scale=scale,
        )  # fmt: skip
        return gradients


class EfficientKernel:
    """Takes as many heads of keys as of queries: one call for each head of queries of a group."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Output:
        outputs = [
            _aten._scaled_dot_product_efficient_attention(some, key, value, None, True, 0.0, is_causal, scale=scale)
            for some in _members(query, key)
        ]
        if len(outputs) == 1:
            return outputs[0][0], outputs[0][1][..., : query.shape[2]]
        out = torch.stack([each[0] for each in outputs], 2).flatten(1, 2)
        return out, torch.stack([each[1][..., : query.shape[2]] for each in outputs], 2).flatten(1, 2)

    def backward(self, gradient: Tensor, saved: Saved, is_causal: bool, scale: float) -> Gradients:
        query, key, value, out, lse = saved
        rounded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _ROUNDED_QUERIES), value=float("inf"))
        zero = torch.zeros((), dtype=torch.int64, device=query.device)  # dropout seed and offset; dropout is 0
        of_query = []
        of_key, of_value = (torch.zeros((), dtype=torch.float32, device=key.device) for _ in range(2))
        members = (_members(tensor, key) for tensor in (gradient, query, out, rounded))
        for of_out, some, part, some_lse in zip(*members, strict=True):
            grads = _aten._scaled_dot_product_efficient_attention_backward(
                of_out, some, key, value, None, _by_position(part), some_lse.contiguous(), zero, zero, 0.0,
                [True, True, True, False], is_causal, scale=scale,
            )  # fmt: skip
            of_query.append(grads[0])
            if query.shape[1] == key.shape[1]:
                return grads[0], grads[1], grads[2]
            of_key, of_value = of_key + accumulated(grads[1]), of_value + accumulated(grads[2])
        return torch.stack(of_query, 2).flatten(1, 2), of_key, of_value


def _by_position(out: Tensor) -> Tensor:
    """[B, H, L, F], in memory by positions, each with its heads, as the kernel writes it.

    Its backward of 16-bit tensors takes the stride of a position from the shape, and checks nothing.
    """
    is_so = out.stride(2) == out.shape[1] * out.shape[3] and out.stride(3) == 1
    return out if is_so else out.transpose(1, 2).contiguous().transpose(1, 2)


def _members(tensor: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """For each place in a group its heads of [B, H, ..]: views, [B, K, ..]."""
    members: tuple[Tensor, ...] = tensor.unflatten(1, (key.shape[1], -1)).unbind(2)
    return members


P = ParamSpec("P")
R = TypeVar("R")


def as_given(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, of whose products the dtype is that of the factors: autocast would round the scores to 16 bits."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(each.device for each in args if isinstance(each, Tensor))
        with torch.autocast(device.type, enabled=False):
            return function(*args, **kwargs)

    return call


class PlainKernel:
    """Matrix products in fp32 (fp64 for fp64).

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)``; None: they stay.
    """

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    @as_given
    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Output:
        key, values = accumulated(key), accumulated(value)
        out = value.new_empty((*query.shape[:3], value.shape[3]))
        lse = key.new_empty(query.shape[:3])
        for start in range(0, query.shape[2], _PLAIN_QUERIES):
            some = slice(start, start + _PLAIN_QUERIES)
            scores = self._scores(query[:, :, some], key, scale)
            if is_causal:
                _hide_later(scores, start, query[:, :, some])
            sums = torch.logsumexp(scores, -1, keepdim=True)
            lse[:, :, some] = ungrouped(sums, query.shape[1]).squeeze(-1)
            out[:, :, some] = ungrouped(scores.sub_(sums).exp_() @ values, query.shape[1])
        return out, lse

    @as_given
    def backward(self, gradient: Tensor, saved: Saved, is_causal: bool, scale: float) -> Gradients:
        query, key, value, out, lse = saved
        key, value = accumulated(key), accumulated(value)
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for start in range(0, query.shape[2], _PLAIN_QUERIES):
            some = slice(start, start + _PLAIN_QUERIES)
            of_out = grouped(accumulated(gradient[:, :, some]), key)
            scores = self._scores(query[:, :, some], key, scale)
            slope = None if self._softcap is None else 1 - (scores / self._softcap).square_()
            if is_causal:
                _hide_later(scores, start, query[:, :, some])
            probabilities = scores.sub_(grouped(lse[:, :, some, None], key)).exp_()
            of_value += probabilities.mT @ of_out
            mean = (of_out * grouped(out[:, :, some], key)).sum(-1, keepdim=True)
            of_scores = (of_out @ value.mT).sub_(mean).mul_(probabilities).mul_(scale)
            if slope is not None:
                of_scores.mul_(slope)
            of_query[:, :, some] = ungrouped(of_scores @ key, query.shape[1])
            of_key += of_scores.mT @ grouped(accumulated(query[:, :, some]), key)
        return of_query, of_key, of_value

    def _scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """[B, K, H / K * L, S]."""
        scores = grouped(accumulated(query), key) @ key.mT * scale
        return scores if self._softcap is None else scores.div_(self._softcap).tanh_().mul_(self._softcap)


def _hide_later(scores: Tensor, start: int, query: Tensor) -> None:
    """Set to -inf what a causal mask hides from queries whose first has the place ``start``."""
    length = query.shape[2]
    positions = torch.arange(start, start + length, device=query.device)
    later = torch.arange(scores.shape[3], device=query.device) > positions[:, None]
    scores.unflatten(2, (-1, length)).masked_fill_(later, float("-inf"))


def grouped(tensor: Tensor, key: Tensor) -> Tensor:
    """[B, H, L, ..] as [B, K, H / K * L, ..]: the queries that share a head of keys, one head after the other."""
    groups: Tensor = tensor.unflatten(1, (key.shape[1], -1))
    return groups.flatten(2, 3)


def ungrouped(tensor: Tensor, heads: int) -> Tensor:
    """The inverse of :func:`grouped`."""
    groups: Tensor = tensor.unflatten(2, (heads // tensor.shape[1], -1))
    return groups.flatten(1, 2)


class UnevenGroups:
    """A kernel for heads of keys that serve different numbers of heads of queries: one call for each number.

    Args:
        groups: heads of queries and the heads of keys that they share evenly; all heads in order.
    """

    def __init__(self, kernel: AttentionKernel, groups: HeadGroups) -> None:
        self._kernel = kernel
        self._groups = groups

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Output:
        outputs = [
            self._kernel.forward(heads(query, mine), heads(key, shared), heads(value, shared), is_causal, scale)
            for mine, shared in self._groups
        ]
        return torch.cat([out for out, _ in outputs], 1), torch.cat([lse for _, lse in outputs], 1)

    def backward(self, gradient: Tensor, saved: Saved, is_causal: bool, scale: float) -> Gradients:
        shares = []
        for mine, shared in self._groups:
            some = [heads(tensor, of) for tensor, of in zip(saved, (mine, shared, shared, mine, mine), strict=True)]
            shares.append(self._kernel.backward(heads(gradient, mine), some, is_causal, scale))
        of_query, of_key, of_value = (torch.cat(grads, 1) for grads in zip(*shares, strict=True))
        return of_query, of_key, of_value


def heads(tensor: Tensor, some: range) -> Tensor:
    """Some heads of [B, H, ..]: a view."""
    return tensor.narrow(1, some.start, len(some))


def dense_heads(tensor: Tensor) -> Tensor:
    """``tensor``, [B, H, L, E], with the elements of a head next to each other in memory, as torch's kernels read them.

    The CPU's kernel does not check it; it computes with other elements, or with what lies behind the tensor.
    """
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of sums of tensors like this: fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def accumulated(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype of sums."""
    return tensor.to(sum_dtype(tensor))


def kernel_for(
    query: Tensor, value: Tensor, softcap: float | None = None, groups: HeadGroups | None = None
) -> AttentionKernel:
    """The fastest kernel for tensors like these."""
    kernel = PlainKernel(softcap) if softcap is not None else _kernel_of(query, value)
    return kernel if groups is None else UnevenGroups(kernel, groups)


def _kernel_of(query: Tensor, value: Tensor) -> AttentionKernel:
    size, value_size = query.shape[3], value.shape[3]
    if query.device.type == "cpu" and size == value_size:
        return CpuKernel()
    if query.device.type == "cuda" and size % 8 == 0 and value_size % 8 == 0:
        generation = capability(query)
        is_old = (0, 0) < generation < (8, 0)  # Volta and Turing
        # There a block has too little shared memory for the backward of these sizes, and torch refuses it.
        is_small = 192 < size <= 224 and ((8, 6) <= generation <= (8, 9) or (12, 0) <= generation <= (12, 1))
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        if is_half and size == value_size <= 256 and not (is_old or is_small):
            return FlashKernel()
        if query.dtype in (torch.float16, torch.float32) or (query.dtype == torch.bfloat16 and not is_old):
            return EfficientKernel()
    return PlainKernel()
