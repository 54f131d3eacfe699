"""What a Transformers model computes of the whole sequence outside of attention, where ranks hold parts of it.

- Rotary embeddings whose frequencies depend on the longest sequence (``dynamic``, ``longrope``) take the largest of
  their ``position_ids`` for its length. A rank that holds the first positions would compute other frequencies than the
  others, so its module is given the largest position of all ranks, after its own positions.
- Routers have a load balance loss, E x sum over experts of (share of the tokens that chose it) x (mean probability)
  (arXiv:2101.03961, (4)). Both factors are means over the tokens, so the mean of the ranks' losses is not the loss of
  all tokens. The models' modules have a function for it, called with the router logits of all layers; Shoal's takes its
  place, and is the model's own where no sequence is spread over ranks.
- A convolution over positions, a state space or linear attention, and positions that the model counts itself see this
  rank's part only, without an error: ``mixed_positions`` looks for them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.compiler import untraced
from shoal.parallel.sequence.context import (
    SequenceContext,
    current_sequence_context,
    sequence_parallel,
    sum_over_sequence,
)
from shoal.parallel.targets import argument_names, shifts_labels, without_adapters


def follow_longest_sequence(model: nn.Module) -> list[Any]:
    """Hook the rotary embeddings of ``model`` that depend on the length.

    Communicates: in each of their forwards an exchange of 8 bytes over ``sp`` and ``cp``.
    Returns: the hooks.
    """
    hooks: list[Any] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            hooks.append(module.register_forward_pre_hook(_with_longest, with_kwargs=True))
            hooks.append(module.register_forward_hook(_without_longest))
    return hooks


@untraced
def _with_longest(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    context = current_sequence_context()
    if context is None:
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _extended(kwargs["position_ids"], context)}
    return (args[0], _extended(args[1], context), *args[2:]), kwargs


def _without_longest(_module: nn.Module, _args: Any, output: Any) -> Any:
    context = current_sequence_context()
    if context is None:
        return None
    return tree_map_only(torch.Tensor, lambda tensor: tensor[..., :-1, :], output)


def _extended(positions: torch.Tensor, context: SequenceContext) -> torch.Tensor:
    """One more position in each row: the largest of all ranks."""
    largest = context.largest(positions.max().double(), "longest sequence")
    last = largest.to(positions).expand(*positions.shape[:-1], 1)
    return torch.cat((positions, last), -1)


_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def balance_whole_sequences(model: nn.Module) -> None:
    """Let the routers' loss of a model of Transformers be that of whole sequences, in training."""
    for name in {each.__module__ for module in model.modules() for each in type(module).__mro__}:
        source: Any = sys.modules.get(name)
        function: Any = getattr(source, "load_balancing_loss_func", None)
        is_models = callable(function) and not isinstance(function, _WholeBalance)
        if is_models and list(inspect.signature(function).parameters) == _ARGUMENTS:
            source.load_balancing_loss_func = _WholeBalance(function)


class _WholeBalance:
    """Transformers' function; under a context the loss of all ranks' tokens, the same on every rank."""

    def __init__(self, alone: Any) -> None:
        self.alone = alone

    def __call__(
        self, gate_logits: Any, num_experts: int = 0, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        """
        Args:
            gate_logits: of each layer: [tokens of this rank, experts].
            attention_mask: [B, L of this rank]; 0 where a token does not count.

        Communicates: one sum of 2 E + 1 numbers, and in backward one of E.
        """
        context = current_sequence_context()
        is_spread = context is not None and context.size > 1 and not context.is_alone
        if not is_spread or not isinstance(gate_logits, tuple) or not torch.is_grad_enabled():
            return self.alone(gate_logits, num_experts, top_k, attention_mask)
        device = gate_logits[0].device
        # Of each expert's tokens; and of all rows.
        counts = torch.zeros(num_experts + 1, dtype=torch.float32, device=device)
        sums = torch.zeros(num_experts, dtype=torch.float32, device=device)
        for logits in gate_logits:
            probabilities = logits.to(device).softmax(-1)
            chosen = probabilities.topk(top_k, -1).indices
            row = sums.new_ones(len(logits)) if attention_mask is None else attention_mask.reshape(-1).to(sums)
            counts[:-1].scatter_add_(0, chosen.reshape(-1), row.repeat_interleave(top_k))
            counts[-1] += row.sum()
            sums = sums + (probabilities.float() * row[:, None]).sum(0)
        counts, sums = sum_over_sequence(counts, "tokens of experts"), sum_over_sequence(sums, "router probabilities")
        return num_experts * (counts[:-1] / counts[-1] * (sums / counts[-1])).sum()


_LENGTH, _CHANGED = 16, 5  # positions, and the one that has another token in the second row
_ROUNDING = 1e-5  # of the largest output; twice the precision of 16-bit formats
_MIXES = "computes a position from others outside of attention (a convolution or a recurrence over the sequence, or"
_MIXES += " attention of its own), and has only this rank's positions there"
COUNTS = "counts positions itself, as if each rank's part were a sequence of its own"
_POOLS = "returns nothing of each position: each rank pools its own part of the sequence"


def takes_tokens(model: Any) -> bool:
    """True for a model of Transformers that is called with ``input_ids`` alone."""
    return not _is_encoder_decoder(model) and is_of_transformers(model) and "input_ids" in _arguments(model)


def counts_positions(model: Any) -> bool:
    """True for an encoder and decoder of Transformers that takes no position ids (BART, T5)."""
    return is_of_transformers(model) and _is_encoder_decoder(model) and not takes_positions(model)


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def is_of_transformers(model: Any) -> bool:
    """True for a model of Transformers that has token embeddings."""
    has_config = hasattr(getattr(model, "config", None), "get_text_config")
    return has_config and callable(getattr(model, "get_input_embeddings", None))


def given_arguments(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[str]:
    """The names of the arguments of a forward that are not None."""
    named = dict(zip(_arguments(model), args, strict=False))
    return {name for name, value in {**named, **kwargs}.items() if value is not None}


def shifts_labels_here(model: nn.Module, given: Set[str]) -> bool:
    """True if each rank shifts its own part of the labels. The label of its last position is then lost."""
    return "labels" in given and "shift_labels" not in given and shifts_labels(model)


@torch.no_grad()
def mixed_positions(model: Any, given: Set[str]) -> str | None:
    """Run the model on 2 rows of 16 tokens, with attention that returns the position's own value.

    All tokens are equal but one of the second row, and so are ``position_ids``. So all outputs but one must be equal.

    Args:
        model: for which ``takes_tokens`` is true.
        given: the arguments that the script gives it: without ``position_ids`` the check gives none.

    Returns: what else it does, continuing "the model "; None: nothing.
    Communicates: what a forward in eval mode does, and nothing over ``sp`` and ``cp``.
    """
    known = _arguments(model)
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", 0) or 0)
    if vocabulary < 3:
        return None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    tokens = torch.full((2, _LENGTH), vocabulary // 2, dtype=torch.int64, device=device)
    tokens[1, _CHANGED] = vocabulary // 3
    inputs: dict[str, Any] = {"input_ids": tokens}
    if "position_ids" in known and "position_ids" in given:
        inputs["position_ids"] = torch.zeros_like(tokens)
    if "use_cache" in known:
        inputs["use_cache"] = False
    with _evaluating(model), sequence_parallel(SequenceContext(is_alone=True)):
        output = model(**inputs)
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    floating = [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.is_floating_point()]
    by_token = next((leaf for leaf in floating if leaf.shape[:2] == tokens.shape), None)
    if by_token is None:
        return _POOLS if floating else None
    rounding = max(_ROUNDING, *(2 * torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()))
    kept = [index for index in range(_LENGTH) if index != _CHANGED]
    first, second = by_token.float()[:, kept]
    limit = rounding * first.abs().max()
    if bool((second - first).abs().max() > limit):
        return _MIXES
    return COUNTS if bool((first - first[:1]).abs().max() > limit) else None


def takes_positions(model: Any) -> bool:
    """True if its forward has an argument for position ids."""
    return "position_ids" in _arguments(model)


def _arguments(model: Any) -> list[str]:
    return argument_names(without_adapters(model))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside the block; afterwards each module is in the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.train(False)
    try:
        yield
    finally:
        for module in training:
            module.training = True
