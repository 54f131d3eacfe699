"""``shoal.attention``: one call for attention on one rank, over ``sp`` (Ulysses), over ``cp`` (ring), and over both.

    context = SequenceContext(sp=world.communicator("sp", mesh))
    with sequence_parallel(context):
        out = shoal.attention(query, key, value, is_causal=True)  # [B, H, L / P, E]: this rank's positions

Letters: B rows, H heads, K heads of keys and values, L positions of this rank, E head size, F head size of values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.compiler import untraced
from shoal.parallel.sequence.chunks import Documents, chunks_of
from shoal.parallel.sequence.context import SequenceContext, current_sequence_context
from shoal.parallel.sequence.exchange import RingPlan
from shoal.parallel.sequence.kernels import EfficientKernel, HeadGroups, PlainKernel, heads, kernel_for
from shoal.parallel.sequence.options import (
    AttentionOptions,
    MaskMod,
    ScoreMod,
    capped_attention,
    check_documents,
    check_options,
    check_shapes,
    flexible_attention,
    of_heads,
)
from shoal.parallel.sequence.ring import ring_attention
from shoal.parallel.sequence.ulysses import HeadExchange, check_heads, split_heads

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_ALONE = SequenceContext()


@untraced
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    mask: Tensor | None = None,
    documents: Documents | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | MaskMod | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    context: SequenceContext | None = None,
    label: str = "attention",
) -> Tensor:
    """Attention of this rank's queries to the keys of the whole sequence: ``softmax(scale * Q K^T) V``.

    Without a context, or on one rank, torch's ``scaled_dot_product_attention`` where it has the options. On several
    ranks the result is that of one rank with the whole sequence.

    Args:
        query: [B, H, L, E].
        key, value: [B, K, L, E] and [B, K, L, F]; K divides H (grouped queries).
        is_causal: a position attends to itself and to earlier ones. Positions are those of the whole sequence.
        mask: as torch's ``attn_mask``, of the whole sequence: [.., L of all ranks, L of all ranks]. Not over ``cp``.
        documents: packed in the rows. As a tensor, [B, L], this rank's number of a document for each position, which
            each call gathers: give a ``Documents`` where there is more than one layer.
        window: a position attends to itself and to the ``window - 1`` positions before it; unless ``is_causal``, also
            to as many after it.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        score_mod, block_mask: as torch's ``flex_attention`` takes them, for the heads and positions of the whole
            sequence; ``block_mask`` may be its ``mask_mod``. They replace the options above. Not over ``cp``.
        sinks: [H]: for each head the score of one more key, to which every position attends and whose value is zero
            (GPT-OSS). Not with ``score_mod`` or ``block_mask``.
        scale: None: 1 / sqrt(E).
        dropout_p: on one rank, where torch's function computes.
        context: None: the one that is set.

    Returns: [B, H, L, F].
    Raises: UsageError: shapes or options that do not fit, what ``cp`` does not have, dropout over several ranks; before
        any collective.
    Communicates: over ``sp`` two all-to-alls, two in backward; over ``cp`` P - 1 sends of keys and values, in backward
        P - 1 of these and P - 1 of their gradients (or all-gathers and a reduce-scatter: ``context.exchange``). With a
        window or documents over ``cp`` only keys and values that another rank's queries attend to are sent.
    """
    context = context or current_sequence_context() or _ALONE
    query, key, value = _cast_for_autocast(query, key, value)
    check_heads(query.shape[1], key.shape[1])
    if context.is_alone:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    options = AttentionOptions(
        is_causal, mask, documents, window, softcap, score_mod, block_mask, scale, dropout_p, sinks
    )
    if context.size == 1 and options.are_torchs:
        return _torchs(query, key, value, options)
    check_options(options, context)
    if context.size == 1 and documents is None and window is None and key.shape[2] != query.shape[2]:
        return _plain(query, key, value, options)  # with a cache of keys
    check_shapes(query, key, value, options, context)
    length = context.whole_length(query.shape[2], "attention's query")
    split = None if context.sp_size == 1 else split_heads(query.shape[1], key.shape[1], context.sp_size)
    if isinstance(documents, Tensor):
        options = replace(options, documents=context.documents(documents))
    check_documents(options, query.shape[0], length)
    if options.window is not None and options.window >= length:
        options = replace(options, window=None)
    if context.sp is None or split is None:
        return _inner(query, key, value, options, context, length, label)
    exchange = HeadExchange(context.sp, context.sp_lengths(length))
    query, key, value = exchange.to_heads(
        (query, key, value), (split.queries, split.keys, split.keys), f"{label}: heads"
    )
    rank = context.sp.rank
    options = of_heads(options, split.queries[rank])
    out = _inner(query, key, value, options, context, length, label, split.groups(rank))
    return exchange.to_positions(out, split.queries, f"{label}: positions")


def _inner(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    context: SequenceContext,
    length: int,
    label: str,
    groups: HeadGroups = (),
) -> Tensor:
    """Attention of what a coordinate of ``cp`` holds.

    Args:
        groups: of the heads of this rank; empty or one: those of keys divide those of queries.
    """
    is_even = len(groups) < 2
    is_torchs = options.are_torchs and context.cp_size == 1 and not _repeats_keys(query, key, value, options)
    if is_torchs or options.is_flexible or options.mask is not None:
        compute = _torchs if is_torchs else _plain
        if is_even:
            return compute(query, key, value, options)
        parts = [
            compute(heads(query, mine), heads(key, shared), heads(value, shared), of_heads(options, mine))
            for mine, shared in groups
        ]
        return torch.cat(parts, 1)
    assert not isinstance(options.documents, Tensor)
    plan = RingPlan(
        comm=context.cp,
        chunks=chunks_of(length, context.cp_size, context.order),
        is_causal=options.is_causal,
        documents=None if options.documents is None else options.documents.begins,
        scale=1 / math.sqrt(query.shape[3]) if options.scale is None else options.scale,
        exchange=context.exchange,
        label=f"{label}: keys and values",
        window=options.window,
        softcap=options.softcap,
        groups=None if is_even else groups,
    )
    return ring_attention(query, key, value, plan, options.sinks)


def _torchs(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, options.mask, options.dropout_p, options.is_causal, scale=options.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )  # fmt: skip


def _plain(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """What neither torch's function nor the kernels compute."""
    return (flexible_attention if options.is_flexible else capped_attention)(query, key, value, options)


def _repeats_keys(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """True if torch's function would copy a head of keys for each head of queries, and hold all scores."""
    is_grouped = query.shape[1] != key.shape[1] and options.mask is None
    return is_grouped and isinstance(kernel_for(query, value), EfficientKernel | PlainKernel)


def _cast_for_autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """Each in autocast's dtype where it is on, as torch's function takes it."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return iter(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return (tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
