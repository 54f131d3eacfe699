"""Does a Transformers model compute each position alone, except in attention that runs over ranks?

Ranks of ``sp`` and ``cp`` hold parts of sequences. A convolution over positions, a state space or linear attention, and
positions that the model counts itself then see this rank's part only, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.parallel.sequence.context import SequenceContext, sequence_parallel
from shoal.parallel.targets import argument_names, shifts_labels, without_adapters

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
    tokens = torch.full((2, _LENGTH), vocabulary // 2, device=device)
    tokens[1, _CHANGED] = vocabulary // 3
    inputs: dict[str, Any] = {"input_ids": tokens}
    if "position_ids" in known and "position_ids" in given:
        inputs["position_ids"] = torch.zeros_like(tokens)
    if "use_cache" in known:
        inputs["use_cache"] = False
    with _evaluating(model), sequence_parallel(SequenceContext(is_alone=True)):
        output = model(**inputs)
    floating = [leaf for leaf in tree_leaves(_plain(output)) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    found = next((leaf for leaf in floating if leaf.shape[:2] == tokens.shape), None)
    if found is None:
        return _POOLS if floating else None
    rounding = max(_ROUNDING, *(2 * torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()))
    kept = [index for index in range(_LENGTH) if index != _CHANGED]
    first, second = found.float()[:, kept]
    limit = rounding * first.abs().max()
    if bool((second - first).abs().max() > limit):
        return _MIXES
    return COUNTS if bool((first - first[:1]).abs().max() > limit) else None


def takes_positions(model: Any) -> bool:
    """True if its forward has an argument for position ids."""
    return "position_ids" in _arguments(model)


def _arguments(model: Any) -> list[str]:
    return argument_names(without_adapters(model))


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards each module is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.train(False)
    try:
        yield
    finally:
        for module in training:
            module.training = True
