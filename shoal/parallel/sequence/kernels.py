"""Attention of one tile with the log-sum-exp of its scores, and its gradients: torch's kernels, or a plain path.

    name        used for                                                        scores in memory
    cpu         CPU, one head size for queries and values                       a block of the kernel's
    flash       CUDA, fp16 and bf16, a head size that divides by 8, up to 256   none
    efficient   CUDA, fp16, bf16 and fp32, head sizes that divide by 8          none
    plain       everything else                                                 1,024 queries against the tile's keys

The backward of a kernel computes the probabilities again, as exp(score - log-sum-exp). Given the output and the
log-sum-exp over all keys it gives the tile's share of the gradients, so that the shares of all tiles add up.

Letters: B rows, H heads of queries, K heads of keys and values, L queries, S keys, E head size, F head size of values.

Source: online softmax and its backward: FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

_aten: Any = torch.ops.aten
_PLAIN_QUERIES = 1024
_ROUNDED_QUERIES = 32  # the efficient kernel's log-sum-exp has a multiple of so many queries


class AttentionKernel(Protocol):
    """Attention of [B, H, L, E] queries to [B, H, S, E] keys and [B, H, S, F] values."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns: output, [B, H, L, F]; log-sum-exp, [B, H, L], in fp32 (fp64 for fp64)."""
        ...

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Args:
            out, lse: over all keys, of this tile and of others.

        Returns: the tile's share of the gradients of queries, keys and values.
        """
        ...


class CpuKernel:
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        return out, lse

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, is_causal, scale=scale
        )
        return found


class FlashKernel:
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
        return out, lse

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of the dropout, which there is none of
        unused = torch.zeros((), dtype=torch.uint64, device=query.device)
        found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0,
            is_causal, random, unused, scale=scale,
        )  # fmt: skip
        return found


class EfficientKernel:
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
        return out, lse[..., : query.shape[2]]

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rounded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _ROUNDED_QUERIES), value=float("inf"))
        zero = torch.zeros((), dtype=torch.int64, device=query.device)  # of the dropout, which there is none of
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, None, out, rounded, zero, zero, 0.0, [True, True, True, False], is_causal,
            scale=scale,
        )  # fmt: skip
        return grads[0], grads[1], grads[2]


class PlainKernel:
    """Matrix products in fp32 (fp64 for fp64)."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        key, values = accumulated(key), accumulated(value)
        out = value.new_empty((*query.shape[:3], value.shape[3]))
        lse = key.new_empty(query.shape[:3])
        for start in range(0, query.shape[2], _PLAIN_QUERIES):
            some = slice(start, start + _PLAIN_QUERIES)
            scores = self._scores(query[:, :, some], key, start, is_causal, scale)
            lse[:, :, some] = torch.logsumexp(scores, -1)
            out[:, :, some] = scores.sub_(lse[:, :, some, None]).exp_() @ values
        return out, lse

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        key, value = accumulated(key), accumulated(value)
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for start in range(0, query.shape[2], _PLAIN_QUERIES):
            some = slice(start, start + _PLAIN_QUERIES)
            of_out = accumulated(gradient[:, :, some])
            scores = self._scores(query[:, :, some], key, start, is_causal, scale)
            probabilities = scores.sub_(lse[:, :, some, None]).exp_()
            of_value += probabilities.mT @ of_out
            mean = (of_out * out[:, :, some]).sum(-1, keepdim=True)
            of_scores = (of_out @ value.mT).sub_(mean).mul_(probabilities).mul_(scale)
            of_query[:, :, some] = of_scores @ key
            of_key += of_scores.mT @ accumulated(query[:, :, some])
        return of_query, of_key, of_value

    def _scores(self, query: Tensor, key: Tensor, start: int, is_causal: bool, scale: float) -> Tensor:
        scores = accumulated(query) @ key.mT * scale
        if is_causal:
            positions = torch.arange(start, start + query.shape[2], device=query.device)
            later = torch.arange(key.shape[2], device=query.device) > positions[:, None]
            scores.masked_fill_(later, float("-inf"))
        return scores


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of sums of tensors like this: fp32, or fp64 for fp64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def accumulated(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype of sums."""
    return tensor.to(sum_dtype(tensor))


def kernel_for(query: Tensor, value: Tensor) -> AttentionKernel:
    """The fastest kernel for tensors like these."""
    size, value_size = query.shape[3], value.shape[3]
    if query.device.type == "cpu" and size == value_size:
        return CpuKernel()
    if query.device.type == "cuda" and size % 8 == 0 and value_size % 8 == 0:
        if query.dtype in (torch.float16, torch.bfloat16) and size == value_size <= 256:
            return FlashKernel()
        if query.dtype in (torch.float16, torch.bfloat16, torch.float32):
            return EfficientKernel()
    return PlainKernel()


def repeated(tensor: Tensor, heads: int) -> Tensor:
    """[B, K, S, E] with each head as often as it takes to have ``heads``: a copy, where there are fewer."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def summed(tensor: Tensor, heads: int) -> Tensor:
    """The gradient of what :func:`repeated` has repeated: [B, H, S, E] to [B, heads, S, E], in the dtype of sums."""
    tensor = accumulated(tensor)
    return tensor if tensor.shape[1] == heads else tensor.unflatten(1, (heads, -1)).sum(2)
