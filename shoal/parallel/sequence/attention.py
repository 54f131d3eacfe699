"""``shoal.attention``: one call for attention on one rank, over ``sp`` (Ulysses), over ``cp`` (ring), and over both.

    context = SequenceContext(sp=world.communicator("sp", mesh))
    with sequence_parallel(context):
        out = shoal.attention(query, key, value, is_causal=True)  # [B, H, L / P, E]: this rank's positions

What torch's function does not compute on one rank, a plain path does: all scores of a rank's heads, with autograd. It
computes ``score_mod`` and ``block_mask`` too on a CPU, where torch's ``flex_attention`` has no backward pass; on an
accelerator it is ``torch.compile(flex_attention)``. The functions see the numbers that heads have in the whole model.

Letters: B rows, H heads, K heads of keys and values, L positions of this rank, E head size, F head size of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.compiler import eager_operator, untraced
from shoal.errors import UsageError
from shoal.parallel import kept_graph
from shoal.parallel.sequence.chunks import Documents
from shoal.parallel.sequence.context import SequenceContext, current_sequence_context, may_be_spread
from shoal.parallel.sequence.kernels import (
    EfficientKernel,
    HeadGroups,
    PlainKernel,
    accumulated,
    as_given,
    grouped,
    heads,
    kernel_for,
    ungrouped,
)
from shoal.parallel.sequence.ring import RingPlan, ring_attention
from shoal.parallel.sequence.ulysses import HeadExchange, check_heads, split_heads

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of row, head, query and key: True where it may attend
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of a score, row, head, query and key

_ALONE = SequenceContext()


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
            is gathered once for calls with the same tensor.
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
    options = AttentionOptions(
        is_causal, mask, documents, window, softcap, score_mod, block_mask, scale, dropout_p, sinks
    )
    draws = dropout_p > 0 and may_be_spread()  # a compiler restores no random state for an operator that it recomputes
    if not torch.compiler.is_dynamo_compiling() or context is not None or options.has_objects or draws:
        return _attention(query, key, value, options, context, label)
    if options.are_torchs and not may_be_spread():
        return _torchs(query, key, value, options)
    return in_graph(query, key, value, options, label)


def in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    label: str,
    *,
    positions: Tensor | None = None,
    padding: Tensor | None = None,
    finds_window: bool = False,
) -> Tensor:
    """Attention as one operator of the graph that a compiler traces, over the ranks of the context that is set then.

    Args:
        positions, padding: as ``documents_of`` takes them.
        finds_window: the window is that of the model's last masks.
    """
    query, key, value = _cast_for_autocast(query, key, value)  # compilers turn autocast off around their operators
    tensors = [query, key, value, *([] if options.sinks is None else [options.sinks])]
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    window = -1 if finds_window else options.window
    out, _ = torch.ops.shoal.attention(
        tensors, options.mask, options.documents, positions, padding, options.is_causal, window, options.softcap,
        options.scale, options.dropout_p, label, keeps, torch.empty(0, dtype=torch.float32, device="cpu"),
    )  # fmt: skip
    return out  # type: ignore[no-any-return]


@eager_operator("shoal::attention")
def _attention_operator(
    tensors: list[Tensor],
    mask: Tensor | None,
    documents: Tensor | None,
    positions: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    dropout_p: float,
    label: str,
    keeps: bool,
    apart: Tensor,
) -> tuple[Tensor, Tensor]:
    """
    Args:
        apart: of no use but that no two calls have the same: a compiler would merge equal ones, and their graphs.
    """
    context = current_sequence_context() or _ALONE
    found: Documents | Tensor | None = documents
    if context.comms and (positions is not None or padding is not None):
        found = context.documents_of(positions, padding)
    window = context.masks.only() if window == -1 else window

    def compute(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        options = AttentionOptions(is_causal, mask, found, window, softcap, None, None, scale, dropout_p, sinks)
        return _attention(query, key, value, options, context, label)

    if keeps and mask is not None:
        mask = mask.clone()  # as kept_graph copies the others
    return kept_graph.run(compute, tensors, out=_empty_output(tensors), keeps=keeps)


@_attention_operator.register_fake
def _(tensors: list[Tensor], *_others: Any) -> tuple[Tensor, Tensor]:
    return _empty_output(tensors), torch.empty(1, dtype=torch.int64, device="cpu")


def _empty_output(tensors: Sequence[Tensor]) -> Tensor:
    query, value = tensors[0], tensors[2]
    if query.shape[3] == value.shape[3]:
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:3], value.shape[3]))


_attention_operator.register_autograd(kept_graph.backward, setup_context=kept_graph.setup_context)


@untraced
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    context: SequenceContext | None,
    label: str,
) -> Tensor:
    """``attention``, uncompiled."""
    context = context or current_sequence_context() or _ALONE
    documents, window = options.documents, options.window
    query, key, value = _cast_for_autocast(query, key, value)
    check_heads(query.shape[1], key.shape[1])
    if context.is_alone:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
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
    assert not isinstance(options.documents, Tensor)
    context.check_documents(options.documents)
    if isinstance(options.documents, Documents) and context.cp_size == 1 and options.documents.are_whole_rows:
        options = replace(options, documents=None)
    if options.window is not None and options.window >= length:
        options = replace(options, window=None)
    if context.sp is None or split is None:
        return _inner(query, key, value, options, context, length, label)
    exchange = HeadExchange(context.sp, context.sp_lengths(length), wire=context.wire)
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
        comm=context.cp if context.cp_size > 1 else None,
        chunks=context.chunks(length, options.documents),
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


@dataclass(frozen=True)
class AttentionOptions:
    """The options of ``shoal.attention``, of the heads that are computed here."""

    is_causal: bool
    mask: Tensor | None
    documents: Documents | Tensor | None
    window: int | None
    softcap: float | None
    score_mod: ScoreMod | None
    block_mask: BlockMask | MaskMod | None
    scale: float | None
    dropout_p: float
    sinks: Tensor | None = None

    @property
    def is_flexible(self) -> bool:
        """True if scores or masks are given by functions, as torch's flex attention takes them."""
        return self.score_mod is not None or self.block_mask is not None

    @property
    def has_objects(self) -> bool:
        """True if an option is an object of Python: an operator of a compiled graph takes tensors and numbers."""
        return self.is_flexible or not isinstance(self.documents, Tensor | None)

    @property
    def are_torchs(self) -> bool:
        """True if torch's ``scaled_dot_product_attention`` has all of them."""
        others = (self.documents, self.window, self.softcap, self.sinks)
        return not self.is_flexible and all(value is None for value in others)

    def named(self) -> list[str]:
        """The names of those that say which scores count, and how."""
        given = {
            "is_causal": self.is_causal or None,
            "mask": self.mask,
            "documents": self.documents,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
        return [name for name, value in given.items() if value is not None]


def check_options(options: AttentionOptions, context: SequenceContext) -> None:
    """Raises: UsageError: what holds on every rank or on none, so that all raise, and before memory is taken."""
    over = f"over sp={context.sp_size}, cp={context.cp_size}"
    if options.dropout_p:
        where = over if context.size > 1 else f"with {', '.join(options.named()) or 'score_mod or block_mask'}"
        raise UsageError(
            f"attention {where} was asked for dropout of {options.dropout_p}"
            + (": ranks do not draw what one rank would draw" if context.size > 1 else ""),
            do="set the model's attention dropout to 0; dropout after the output projection works.",
            code="sequence-dropout",
        )
    if options.is_flexible:
        name = "score_mod" if options.score_mod is not None else "block_mask"
        if context.cp_size > 1:
            raise UsageError(
                f"attention {over} was given a {name}: ring attention merges tiles that its kernels compute without",
                do="use sp alone for it (as many ranks as heads); over cp, is_causal, documents, window and softcap.",
                code="sequence-flex",
            )
        if options.named():
            raise UsageError(
                f"attention was given a {name} beside {', '.join(options.named())}",
                do="express everything in score_mod and block_mask, as for torch's flex_attention.",
                code="sequence-flex",
            )
    for name, value in (("window", options.window), ("softcap", options.softcap)):
        if value is not None and value <= 0:
            raise UsageError(
                f"attention was given {name}={value}",
                do=f"give a {name} above 0, or None for none.",
                code="sequence-shape",
            )
    others = [name for name in options.named() if name in ("is_causal", "documents", "window")]
    if options.mask is not None and (context.cp_size > 1 or others):
        raise UsageError(
            f"attention {over} was given a mask of shape {tuple(options.mask.shape)}"
            + (f" beside {', '.join(others)}" if others else ": ring attention keeps no scores of all keys"),
            do="use is_causal=True, documents for packed or padded rows, and window; or, over sp alone, a mask of the"
            " whole sequence which says all.",
            code="sequence-mask",
        )


def check_shapes(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, context: SequenceContext
) -> None:
    """Raises: UsageError: as :func:`check_options`."""
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
    if options.sinks is not None and options.sinks.shape != shape[1:2]:
        raise UsageError(
            f"attention {over} was given sinks of shape {tuple(options.sinks.shape)} for {shape[1]} heads",
            do="give one value for each head of the query.",
            code="sequence-shape",
        )
    length = context.whole_length(shape[2], "attention's query")
    if options.mask is not None and options.mask.shape[-2:] != (length, length):
        raise UsageError(
            f"attention {over} was given a mask of shape {tuple(options.mask.shape)}",
            do=f"give a mask of the whole sequence, [.., {length}, {length}], which says all, or is_causal alone.",
            code="sequence-mask",
        )
    block_mask = options.block_mask
    if block_mask is not None and not callable(block_mask) and tuple(block_mask.shape[-2:]) != (length, length):
        raise UsageError(
            f"attention {over} was given a BlockMask of shape {tuple(block_mask.shape)}",
            do=f"make it for the whole sequence: create_block_mask(mask_mod, B, H, {length}, {length}).",
            code="sequence-flex",
        )


def check_documents(options: AttentionOptions, rows: int, length: int) -> None:
    """Raises: UsageError: documents of other rows or positions."""
    documents = options.documents
    if isinstance(documents, Documents) and (documents.length != length or len(documents.begins) not in (1, rows)):
        raise UsageError(
            f"documents of {len(documents.begins)} rows of {documents.length} positions, for {rows} rows of {length}",
            do="make the documents of the whole batch's rows, not of this rank's positions.",
            code="sequence-documents",
        )


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


@as_given
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
