"""Attention with scores or masks that a function gives: torch's flex attention, and a plain path.

On CPU torch's ``flex_attention`` has no backward pass, so a plain path computes the same: all scores of a rank's heads,
with autograd. On an accelerator it is ``torch.compile(flex_attention)``. The functions see the numbers that heads have
in the whole model: Ulysses gives a rank some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.parallel.sequence.kernels import accumulated, grouped, ungrouped
from shoal.parallel.sequence.options import AttentionOptions, MaskMod, ScoreMod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def of_heads(options: AttentionOptions, own: range) -> AttentionOptions:
    """The options for some of the heads that they are for."""
    mask, score_mod, block_mask = options.mask, options.score_mod, options.block_mask
    if mask is not None and mask.dim() > 3 and mask.shape[-3] > 1:
        mask = mask.narrow(-3, own.start, len(own))
    if score_mod is not None:
        score_mod = _shifted_score(score_mod, own.start)
    if block_mask is not None:
        block_mask = _shifted_mask(block_mask, own.start) if callable(block_mask) else _blocks_of_heads(block_mask, own)
    sinks = None if options.sinks is None else options.sinks[own.start : own.stop]
    return replace(options, mask=mask, score_mod=score_mod, block_mask=block_mask, sinks=sinks)


def _shifted_score(score_mod: ScoreMod, first: int) -> ScoreMod:
    return lambda score, row, head, query, key: score_mod(score, row, head + first, query, key)


def _shifted_mask(mask_mod: MaskMod, first: int) -> MaskMod:
    return lambda row, head, query, key: mask_mod(row, head + first, query, key)


def _blocks_of_heads(block_mask: BlockMask, own: range) -> BlockMask:
    def some(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[1] == 1 else tensor[:, own.start : own.stop]

    full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    num_full, full_indices = (None if tensor is None else some(tensor) for tensor in full)
    return type(block_mask).from_kv_blocks(
        some(block_mask.kv_num_blocks),
        some(block_mask.kv_indices),
        num_full,
        full_indices,
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=_shifted_mask(block_mask.mask_mod, own.start),
        seq_lengths=block_mask.seq_lengths,
    )


def flexible_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attention with ``score_mod`` and ``block_mask``.

    Memory: on CPU all scores, [B, H, L, S], also for backward.
    """
    block_mask, scale = options.block_mask, options.scale
    if query.device.type == "cpu":
        return _with_scores(query, key, value, scale, lambda scores: _modified(scores, options))
    from torch.nn.attention.flex_attention import create_block_mask

    if callable(block_mask):
        block_mask = create_block_mask(
            block_mask, query.shape[0], query.shape[1], query.shape[2], key.shape[2], device=query.device
        )
    out: Tensor = _compiled()(
        query, key, value, score_mod=options.score_mod, block_mask=block_mask, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def capped_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attention with a mask and a soft cap or sinks, or keys of earlier calls. Memory: all scores, in backward too."""
    softcap, mask = options.softcap, options.mask

    def modify(scores: Tensor) -> Tensor:
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if options.is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        if mask is None:
            return scores
        return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask

    return _with_scores(query, key, value, options.scale, modify, options.sinks)


def _with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    modify: Callable[[Tensor], Tensor],
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by all scores, [B, H, L, S] in the dtype of sums; queries without a score above -inf get zeros."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    num_heads = query.shape[1]
    scores = modify(ungrouped(grouped(accumulated(query), key) @ accumulated(key).mT * scale, num_heads))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    else:
        is_empty = (scores == float("-inf")).all(-1, keepdim=True)
        weights = scores.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)
    return ungrouped(grouped(weights, key) @ accumulated(value), num_heads).to(query.dtype)


def _modified(scores: Tensor, options: AttentionOptions) -> Tensor:
    """Scores as ``score_mod`` and ``block_mask`` make them, [B, H, L, S]."""
    score_mod, block_mask = options.score_mod, options.block_mask
    indices = [torch.arange(size, device=scores.device) for size in scores.shape]
    with _TensorIndices():
        if score_mod is not None:
            scores = _of_each(score_mod, has_score=True)(scores, *indices)
        if block_mask is None:
            return scores
        mask_mod = block_mask if callable(block_mask) else block_mask.mask_mod
        allowed = _of_each(mask_mod, has_score=False)(*indices)
    if not callable(block_mask):
        blocks = block_mask.to_dense().bool()
        for dim, size in zip((2, 3), block_mask.BLOCK_SIZE, strict=True):
            blocks = blocks.repeat_interleave(size, dim).narrow(dim, 0, scores.shape[dim])
        allowed = allowed & blocks
    return scores.masked_fill(~allowed, float("-inf"))


def _of_each(function: Callable[..., Tensor], *, has_score: bool) -> Callable[..., Tensor]:
    """``function``, written for one score, for all scores of [B, H, L, S]."""
    score = (0,) if has_score else ()
    for at in (3, 2, 1, 0):
        dims = (*score, *(0 if index == at else None for index in range(4)))
        function = torch.vmap(function, in_dims=dims)
    return function


class _TensorIndices(TorchFunctionMode):
    """Indexing by tensors alone looks up values on the device: ``bias[head]`` works where ``head`` is mapped over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(index, Tensor) for index in indices):
                return torch.ops.aten.index.Tensor(args[0], list(indices))
        return func(*args, **(kwargs or {}))
