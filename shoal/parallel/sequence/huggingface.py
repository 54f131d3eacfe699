"""``shoal.attention`` under ``attn_implementation="shoal"`` of transformers.

    register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="shoal")
    with sequence_parallel(context):
        model(input_ids=context.shard(tokens), position_ids=context.shard(positions)).logits

Without a context the model computes with transformers' own SDPA. With one, ``position_ids`` are those of the whole
sequence, cut like the tokens; where they do not go on, a packed document begins. ``attention_mask`` is cut like the
tokens too, and may have padding before or after them. Sliding windows and soft caps are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.device import numbers_on
from shoal.errors import UsageError
from shoal.parallel.sequence.attention import AttentionOptions, attention, in_graph
from shoal.parallel.sequence.context import SequenceContext, current_sequence_context, may_be_spread
from shoal.parallel.sequence.ulysses import HeadExchange, split_heads

# Arguments of transformers' attention functions that attention over ranks does not have.
_REFUSED = ("position_bias", "cache")
# The functions of transformers' masks that is_causal, window and documents say too. Others are refused.
_KNOWN_MASKS = {
    "and_masks",
    "bidirectional_mask_function",
    "causal_mask_function",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "sliding_window_bidirectional_overlay",
    "sliding_window_overlay",
}

Forward = Callable[..., tuple[Tensor, Tensor | None]]


def register(name: str = "shoal", *, core: str | None = None, only_training: bool = False) -> None:
    """Make ``attn_implementation=name`` of transformers attention over the ranks of the context that is set.

    Args:
        name: may be one of transformers' own, which is replaced.
        core: another of transformers' names, which computes attention between two exchanges of heads (``sp`` alone);
            None: ``shoal.attention``.
        only_training: modules in eval mode compute on one rank, with what they are given.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inner = _original(ALL_ATTENTION_FUNCTIONS.get(core or "sdpa"))
    alone = _original(ALL_ATTENTION_FUNCTIONS.get(name) or inner)
    mask = _original(ALL_MASK_ATTENTION_FUNCTIONS.get(name) or ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    takes_window = core is not None and "flash" in core
    AttentionInterface.register(name, _AttentionFunction(alone, inner if core else None, only_training, takes_window))
    AttentionMaskInterface.register(name, _MaskFunction(mask))


def _original(function: Any) -> Any:
    """Transformers' function, also where Shoal's was registered before under its name."""
    return function.alone if isinstance(function, _AttentionFunction | _MaskFunction) else function


def _active() -> SequenceContext | None:
    context = current_sequence_context()
    return context if context is not None and (context.size > 1 or context.is_alone) else None


class _MaskFunction:
    """Transformers' function that makes masks; under a context the padding alone: [B, L of this rank], or None."""

    def __init__(self, alone: Callable[..., Any]) -> None:
        self.alone = alone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = _active()
        if context is None:
            return self.alone(*args, **kwargs)
        if context.is_alone:
            return None
        functions = _mask_functions(kwargs.get("mask_function"))
        unknown = functions - _KNOWN_MASKS
        chunk = kwargs.get("local_size")
        if chunk is not None and chunk >= context.whole_length(kwargs["q_length"], "a mask"):
            unknown -= {"chunked_overlay"}
        if kwargs.get("use_vmap") or unknown:
            raise UsageError(
                f"the model's mask has functions ({', '.join(sorted(unknown)) or 'of its own'}) that attention over"
                " ranks does not know",
                do="use a model with a causal or a bidirectional mask, with or without a sliding window, or one rank.",
                code="sequence-mask",
            )
        has_window = any(name.startswith("sliding_window") for name in functions)
        if not has_window or kwargs.get("local_size") != 0:  # 0: of a model that makes a mask which no layer uses
            context.masks.add(kwargs.get("local_size") if has_window else None)
        return kwargs.get("attention_mask")


def _mask_functions(function: Any) -> set[str]:
    """The names of the functions of transformers that a mask function is made of."""
    if isinstance(function, tuple):
        return {name for each in function for name in _mask_functions(each)}
    if not callable(function):
        return set()
    inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    name = getattr(function, "__qualname__", type(function).__name__).split(".")[0]
    return {name}.union(*(_mask_functions(each) for each in inner))


class _AttentionFunction:
    """An attention function as transformers calls it.

    Args:
        alone: used without a context.
        core: used between two exchanges of heads; None: ``shoal.attention``.
        takes_window: True if ``core`` computes a sliding window and a soft cap itself.
    """

    def __init__(self, alone: Forward, core: Forward | None, only_training: bool, takes_window: bool) -> None:
        self.alone = alone
        self._core = core
        self._only_training = only_training
        self._takes_window = takes_window

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """
        Args:
            query, key, value: [B, heads, L of this rank, head size].

        Returns: [B, L of this rank, heads, head size], and no weights.
        """
        given = kwargs.get("is_causal")
        is_causal = bool(getattr(module, "is_causal", True) if given is None else given)
        if torch.compiler.is_dynamo_compiling() and may_be_spread() and self._is_traceable(module, kwargs):
            return _in_graph(query, key, value, attention_mask, is_causal, kwargs)
        return self._run(module, query, key, value, attention_mask, is_causal, kwargs)

    def _is_traceable(self, module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
        is_of_ranks = self._core is None and not (self._only_training and not module.training)
        return is_of_ranks and not any(kwargs.get(name) for name in (*_REFUSED, "output_attentions"))

    def _run(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        is_causal: bool, kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        context = _active()
        if context is None:
            is_plain = kwargs.get("softcap") is None and kwargs.get("s_aux") is None
            if is_plain or self._core is not None or not isinstance(attention_mask, Tensor | None):
                return self.alone(module, query, key, value, attention_mask, **kwargs)
            # Transformers' SDPA has no soft cap and no sinks, and would leave them out.
            return _on_one_rank(query, key, value, attention_mask, is_causal, kwargs)
        if context.is_alone:
            return _attended(query, key, value, {}, context)
        if "sliding_window" not in kwargs:
            kwargs["sliding_window"] = context.masks.only()
        window = kwargs["sliding_window"]
        if self._only_training and not module.training:
            mask = _mask_of_one_rank(attention_mask, query, key, is_causal, kwargs.get("position_ids"), window)
            return _on_one_rank(query, key, value, mask, is_causal, kwargs)
        self._refuse(kwargs, context.whole_length(query.shape[2], "attention's query"))
        if self._core is not None:
            return self._with_core(self._core, context, module, query, key, value, attention_mask, kwargs)
        positions = _positions_of(kwargs)
        mask = attention_mask if attention_mask is not None and attention_mask.dim() == 4 else None
        padding = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        if mask is not None:
            return _attended(query, key, value, kwargs, context, mask=mask)
        documents = context.documents_of(positions, padding)
        return _attended(query, key, value, kwargs, context, is_causal=is_causal, documents=documents, window=window)

    def _refuse(self, kwargs: dict[str, Any], length: int) -> None:
        """Raises: UsageError: the model asks for what attention over ranks, or ``core``, does not have."""
        refused = [name for name in _REFUSED if kwargs.get(name) is not None]
        window = kwargs.get("sliding_window")
        if self._core is not None and kwargs.get("s_aux") is not None:
            refused.append("s_aux (attention sinks)")
        if self._core is not None and not self._takes_window:
            if window is not None and window < length:
                refused.append(f"sliding_window={window}")
            if kwargs.get("softcap") is not None:
                refused.append("softcap")
        if kwargs.get("output_attentions"):
            refused.append("output_attentions")
        if refused:
            raise UsageError(
                f"the model's attention asks for {', '.join(refused)}, which attention over ranks does not have, for a"
                f" sequence of {length} positions",
                do="use a model with plain causal attention, or one rank; for windows, soft caps and sinks,"
                " attn_implementation='shoal' or core_attn_implementation='sdpa'.",
                code="sequence-attention",
            )

    def _with_core(
        self, core: Forward, context: SequenceContext, module: torch.nn.Module, query: Tensor, key: Tensor,
        value: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if context.sp is None or context.cp_size > 1:
            raise UsageError(
                f"an attention function of transformers was asked to run over cp={context.cp_size}",
                do="use sp alone, or attn_implementation='shoal'.",
                code="sequence-core",
            )
        lengths = context.sp_lengths(context.whole_length(query.shape[2]))
        heads = split_heads(query.shape[1], key.shape[1], context.sp_size)
        of_query = heads.key_of_query(context.sp.rank)
        exchange = HeadExchange(context.sp, lengths, wire=context.wire)
        query, key, value = exchange.to_heads(
            (query, key, value), (heads.queries, heads.keys, heads.keys), "attention: heads"
        )
        groups = len(of_query) // key.shape[1]
        if len(heads.groups(context.sp.rank)) > 1:  # the function knows one size of groups
            index = numbers_on(key.device, of_query)
            key, value, groups = key.index_select(1, index), value.index_select(1, index), 1
        positions = kwargs.get("position_ids")
        if positions is not None:
            kwargs = {**kwargs, "position_ids": context.unshard(positions, -1)}
        whole_mask = None if attention_mask is None else context.unshard(attention_mask.to(torch.uint8)).bool()
        out, _ = core(_WithGroups(module, groups), query, key, value, whole_mask, **kwargs)
        return exchange.to_positions(out.transpose(1, 2), heads.queries, "attention: positions").transpose(1, 2), None


class _WithGroups:
    """An attention module, as a function sees it that is given other heads than the module has."""

    def __init__(self, module: torch.nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any], context: SequenceContext, **options: Any
) -> tuple[Tensor, None]:
    """``shoal.attention`` with the scale, soft cap, sinks and dropout that transformers gives."""
    out = attention(
        query, key, value, context=context, softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"),
        scale=kwargs.get("scaling"), dropout_p=kwargs.get("dropout", 0.0), **options,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _positions_of(kwargs: dict[str, Any]) -> Tensor | None:
    positions: Tensor | None = kwargs.get("position_ids")
    # Those of text and images do not tell documents apart.
    return positions if positions is not None and positions.dim() == 2 else None


def _in_graph(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Attention over the ranks of the context that is set when compiled code runs."""
    is_padding = mask is not None and mask.dim() == 2
    whole_mask, padding = (None, mask) if is_padding else (mask, None)
    options = AttentionOptions(
        is_causal and whole_mask is None, whole_mask, None, kwargs.get("sliding_window"), kwargs.get("softcap"),
        None, None, kwargs.get("scaling"), kwargs.get("dropout", 0.0), kwargs.get("s_aux"),
    )  # fmt: skip
    positions = _positions_of(kwargs) if whole_mask is None else None
    out = in_graph(
        query, key, value, options, "attention", positions=positions, padding=padding,
        finds_window="sliding_window" not in kwargs,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _on_one_rank(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Attention of whole rows with a mask of transformers' SDPA: [B, 1, L, S], or None."""
    is_causal = is_causal and mask is None and query.shape[2] > 1
    return _attended(query, key, value, kwargs, SequenceContext(), mask=mask, is_causal=is_causal)


def _mask_of_one_rank(
    mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool, positions: Tensor | None, window: int | None
) -> Tensor | None:
    """The mask of whole rows, [B, 1, L, S], from their padding, [B, S]; None: the function's own causal mask."""
    if mask is not None and mask.dim() == 4:
        return mask
    length, keys = query.shape[2], key.shape[2]
    allowed = torch.ones(length, keys, dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril(keys - length)
    window = None if window is None or window >= keys else window
    if window is not None:
        allowed = allowed.triu(keys - length - window + 1).tril(keys - length + window - 1)
    allowed = allowed.expand(query.shape[0], 1, length, keys)
    if mask is not None:
        itself = torch.eye(keys, dtype=torch.bool, device=query.device)[keys - length :]  # so that padding has a key
        return (allowed & mask[:, None, None, :keys].bool()) | itself
    if positions is not None and positions.dim() == 2 and length == keys and length > 1:
        ids = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
        if ids[:, -1].any():
            return allowed & (ids[:, None, :, None] == ids[:, None, None, :])
    return None if window is None else allowed
