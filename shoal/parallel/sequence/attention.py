"""``shoal.attention``: one call for attention on one rank, over ``sp`` (Ulysses), over ``cp`` (ring), and over both.

    context = SequenceContext(sp=world.communicator("sp", mesh))
    with sequence_parallel(context):
        out = shoal.attention(query, key, value, is_causal=True)  # [B, H, L / P, E]: this rank's positions

Letters: B rows, H heads, K heads of keys and values, L positions of this rank, E head size, F head size of values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.compiler import untraced
from shoal.errors import UsageError
from shoal.parallel.sequence.chunks import chunks_of
from shoal.parallel.sequence.context import SequenceContext, current_sequence_context
from shoal.parallel.sequence.documents import Documents
from shoal.parallel.sequence.ring import RingPlan, ring_attention
from shoal.parallel.sequence.ulysses import HeadExchange, check_heads, split_heads

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
    scale: float | None = None,
    dropout_p: float = 0.0,
    context: SequenceContext | None = None,
    label: str = "attention",
) -> Tensor:
    """Attention of this rank's queries to the keys of the whole sequence: ``softmax(scale * Q K^T) V``.

    Without a context, or on one rank, torch's ``scaled_dot_product_attention``. On several ranks the result is that of
    one rank with the whole sequence.

    Args:
        query: [B, H, L, E].
        key, value: [B, K, L, E] and [B, K, L, F]; K divides H (grouped queries).
        is_causal: a position attends to itself and to earlier ones. Positions are those of the whole sequence.
        mask: as torch's ``attn_mask``, of the whole sequence: [.., L of all ranks, L of all ranks]. Not over ``cp``.
        documents: packed in the rows. As a tensor, [B, L], this rank's number of a document for each position, which
            each call gathers: give a ``Documents`` where there is more than one layer.
        scale: None: 1 / sqrt(E).
        dropout_p: on one rank without documents only.
        context: None: the one that is set.

    Returns: [B, H, L, F].
    Raises: UsageError: shapes that do not fit, a mask over ``cp``, dropout over several ranks; before any collective.
    Communicates: over ``sp`` two all-to-alls, two in backward; over ``cp`` P - 1 sends of keys and values, in backward
        P - 1 of these and P - 1 of their gradients (or all-gathers and a reduce-scatter: ``context.exchange``).
    """
    context = context or current_sequence_context() or _ALONE
    query, key, value = _same_dtype(query, key, value)
    check_heads(query.shape[1], key.shape[1])
    if context.size == 1 and documents is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
        )
    _check(query, key, value, is_causal, mask, documents, dropout_p, context)
    length = context.whole_length(query.shape[2], "attention's query")
    heads = None if context.sp_size == 1 else split_heads(query.shape[1], key.shape[1], context.sp_size)
    if isinstance(documents, Tensor):
        documents = context.documents(documents)
    if documents is not None:
        _check_documents(documents, query.shape[0], length)
    if context.sp is None or heads is None:
        return _inner(query, key, value, is_causal, mask, documents, scale, context, length, label)
    exchange = HeadExchange(context.sp, context.sp_lengths(length))
    query, key, value = exchange.to_heads(
        (query, key, value), (heads.queries, heads.keys, heads.keys), f"{label}: heads"
    )
    of_query = heads.key_of_query(context.sp.rank)
    num_keys = key.shape[1]
    if of_query != [head * num_keys // len(of_query) for head in range(len(of_query))] or len(of_query) % num_keys:
        index = torch.tensor(of_query, device=key.device)
        key, value = key.index_select(1, index), value.index_select(1, index)
    if mask is not None and mask.dim() > 3 and mask.shape[-3] > 1:
        own = heads.queries[context.sp.rank]
        mask = mask.narrow(-3, own.start, len(own))
    out = _inner(query, key, value, is_causal, mask, documents, scale, context, length, label)
    return exchange.to_positions(out, heads.queries, f"{label}: positions")


def _inner(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    documents: Documents | None,
    scale: float | None,
    context: SequenceContext,
    length: int,
    label: str,
) -> Tensor:
    """Attention of what a coordinate of ``cp`` holds."""
    if context.cp_size == 1 and documents is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
        )
    plan = RingPlan(
        comm=context.cp,
        chunks=chunks_of(length, context.cp_size, context.order),
        is_causal=is_causal,
        documents=None if documents is None else documents.begins,
        scale=1 / math.sqrt(query.shape[3]) if scale is None else scale,
        exchange=context.exchange,
        label=f"{label}: keys and values",
    )
    return ring_attention(query, key, value, plan)


def _same_dtype(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast in its dtype, as torch's function does it."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tensors = tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
    query, key, value = tensors
    return query, key, value


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    documents: Documents | Tensor | None,
    dropout_p: float,
    context: SequenceContext,
) -> None:
    """What holds on every rank or on none, so that all raise."""
    over = f"over sp={context.sp_size}, cp={context.cp_size}"
    shape, keys, values = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    if not (shape[0] == keys[0] and shape[2:] == keys[2:] and keys[:3] == values[:3]):
        raise UsageError(
            f"attention {over} was given a query of shape {shape}, keys of {keys} and values of {values}",
            do="give all three the same rows and positions, [B, heads, L, E]: a cache of keys works on one rank only.",
            code="sequence-shape",
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise UsageError(
            f"attention {over} was given {query.dtype}, {key.dtype} and {value.dtype}",
            do="cast query, key and value to one dtype.",
            code="sequence-shape",
        )
    if dropout_p:
        raise UsageError(
            f"attention {over} was asked for dropout of {dropout_p}: ranks do not draw what one rank would draw",
            do="set the model's attention dropout to 0; dropout after the output projection works.",
            code="sequence-dropout",
        )
    if mask is None:
        return
    if context.cp_size > 1 or documents is not None:
        raise UsageError(
            f"attention {over} was given a mask of shape {tuple(mask.shape)}"
            + (" beside documents" if documents is not None else ": ring attention keeps no scores of all keys"),
            do="use is_causal=True, and documents for packed or padded rows; any mask works over sp alone.",
            code="sequence-mask",
        )
    length = context.whole_length(shape[2], "attention's query")
    if is_causal or mask.shape[-2:] != (length, length):
        raise UsageError(
            f"attention {over} was given a mask of shape {tuple(mask.shape)}" + (" and is_causal" if is_causal else ""),
            do=f"give a mask of the whole sequence, [.., {length}, {length}], which says all, or is_causal alone.",
            code="sequence-mask",
        )


def _check_documents(documents: Documents, rows: int, length: int) -> None:
    if documents.length != length or len(documents.begins) not in (1, rows):
        raise UsageError(
            f"documents of {len(documents.begins)} rows of {documents.length} positions, for {rows} rows of {length}",
            do="make the documents of the whole batch's rows, not of this rank's positions.",
            code="sequence-documents",
        )
