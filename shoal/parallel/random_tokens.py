"""A layer that runs on a random part of the tokens: the others pass it by (random layer-token drop).

    hidden [B, S, D]  --kept positions, in order-->  [B, R, D]  -> layer ->  [B, R, D]  --put back-->  [B, S, D]

What the layer gets besides the hidden states and belongs to positions (rotary tables, position ids, attention masks) is
reduced to the same positions. Which are kept is a function of (seed, step, layer, sample in the step): it does not
depend on the number of ranks, and a recomputed layer keeps the same.

Source: Yao et al. 2022, random-LTD (arXiv:2211.11586), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from shoal.compiler import untraced
from shoal.errors import ModelError, UsageError
from shoal.parallel.sequence.chunks import Documents

_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, which spreads numbers that follow each other


@dataclass(frozen=True)
class Draw:
    """What the positions of one micro-batch are drawn from.

    Args:
        kept: positions that a layer keeps, R.
        micro_batch: number of this rank's micro-batch among those of all ranks in the step.
    """

    seed: int
    step: int
    kept: int
    micro_batch: int

    def positions(self, layer: int, rows: int, batch: int, length: int, device: torch.device) -> Tensor:
        """Kept positions of the first ``rows`` of ``batch`` samples, [rows, kept], int64, ascending."""
        numbers = []
        generator = torch.Generator(device)
        for sample in range(self.micro_batch * batch, self.micro_batch * batch + rows):
            generator.manual_seed(_mixed(self.seed, self.step, layer, sample))
            numbers.append(torch.rand(length, generator=generator, dtype=torch.float32, device=device))
        return torch.stack(numbers).topk(self.kept, dim=1, sorted=False).indices.sort(dim=1).values


class RandomTokens:
    """Runs layers on the positions that ``draw`` gives; as they are while it is None. A ``Runner``.

    Args:
        layers: names of the layers, in order.
        mask_name: their argument that is an attention mask.
        is_sequence_first: hidden states are [S, B, D].
    """

    def __init__(
        self, layers: Sequence[str], mask_name: str = "attention_mask", is_sequence_first: bool = False
    ) -> None:
        self.draw: Draw | None = None
        self._numbers = {name: number for number, name in enumerate(layers)}
        self._arguments: dict[str, list[str]] = {}  # names of what each layer gets without a name
        self._mask_name = mask_name
        self._is_sequence_first = is_sequence_first

    @partial(untraced, recursive=False)  # the layer itself is compiled
    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function`` on the kept positions; its first output is put back into the hidden states.

        Raises: ModelError: the layer takes or returns something else than hidden states of three dimensions.
            UsageError: it gets packed documents.
        """
        if self.draw is None:
            return function(*args, **kwargs)
        is_positional = bool(args)
        hidden = args[0] if is_positional else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            got = f"a tensor of shape {list(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ModelError(
                f"random-LTD: layer {name} takes {got}, and not hidden states of 3 dimensions as its first argument.",
                do="list other layers in data_efficiency.data_routing.random_ltd.random_ltd_layer_id.",
                code="random-ltd-layer",
            )
        rows_first = hidden.transpose(0, 1) if self._is_sequence_first else hidden
        rows, length = rows_first.shape[:2]
        if self.draw.kept >= length:
            return function(*args, **kwargs)
        rest = (args[1:], {key: value for key, value in kwargs.items() if is_positional or key != "hidden_states"})
        is_same = _has_shared_positions(rest, rows, length)
        drawn = self.draw.positions(self._numbers[name], 1 if is_same else rows, rows, length, hidden.device)
        kept = _Kept(drawn.expand(rows, -1), length, self._mask_name)
        index = kept.positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        part = rows_first.gather(1, index)
        part = part.transpose(0, 1) if self._is_sequence_first else part
        if name not in self._arguments:
            self._arguments[name] = [*signature(function).parameters, *[""] * len(args)]  # more with *args
        more = [replace(kept, name=key).of(each) for key, each in zip(self._arguments[name][1:], rest[0], strict=False)]
        named = kept.of(rest[1])
        out = function(part, *more, **named) if is_positional else function(hidden_states=part, **named)
        first = out[0] if isinstance(out, tuple) else out
        if not isinstance(first, Tensor) or first.shape != part.shape:
            raise ModelError(
                f"random-LTD: layer {name} returns {type(out).__name__}, and not hidden states, or a tuple that begins"
                " with them.",
                do="list other layers in data_efficiency.data_routing.random_ltd.random_ltd_layer_id.",
                code="random-ltd-layer",
            )
        first = first.transpose(0, 1) if self._is_sequence_first else first
        whole = rows_first.scatter(1, index, first.to(hidden.dtype))
        whole = whole.transpose(0, 1) if self._is_sequence_first else whole
        return (whole, *out[1:]) if isinstance(out, tuple) else whole


@dataclass(frozen=True)
class _Kept:
    positions: Tensor  # [B, R]
    length: int
    mask_name: str
    name: str = ""  # of the argument that is looked at

    def of(self, value: Any) -> Any:
        """The same value of the kept positions."""
        if isinstance(value, Documents):
            raise UsageError(
                "random-LTD keeps a part of the positions, and the model gets packed documents, whose bounds it would"
                " move.",
                do="train on one document in each sample, or disable data_efficiency.data_routing.random_ltd.",
                code="random-ltd-documents",
            )
        if isinstance(value, tuple | list):
            return type(value)(self.of(each) for each in value)
        if isinstance(value, dict):
            return {key: replace(self, name=key).of(each) for key, each in value.items()}
        if not isinstance(value, Tensor):
            return value
        if self.name == self.mask_name and value.dim() >= 2:
            return self._of_mask(value)
        rows = len(self.positions)
        if _is_by_row(value, rows, self.length):
            index = self.positions.view(rows, -1, *[1] * (value.dim() - 2)).expand(-1, -1, *value.shape[2:])
            return value.expand(rows, *value.shape[1:]).gather(1, index)
        return value[self.positions[0]] if _is_shared(value, self.length) else value

    def _of_mask(self, mask: Tensor) -> Tensor:
        """Of [B, S]; or of [B, H, S or 1, S], whose rows are queries and whose columns are keys."""
        rows = len(self.positions)
        mask = mask.expand(rows, *mask.shape[1:])
        if mask.dim() == 2:
            return mask.gather(1, self.positions)
        between = [1] * (mask.dim() - 3)
        if mask.shape[-2] == self.length:
            queries = self.positions.view(rows, *between, -1, 1).expand(*mask.shape[:-2], -1, mask.shape[-1])
            mask = mask.gather(-2, queries)
        keys = self.positions.view(rows, *between, 1, -1).expand(*mask.shape[:-1], -1)
        return mask.gather(-1, keys) if mask.shape[-1] == self.length else mask


def _is_by_row(value: Tensor, rows: int, length: int) -> bool:
    """[B or 1, S, ...]."""
    return value.dim() >= 2 and value.shape[1] == length and value.shape[0] in (1, rows)


def _is_shared(value: Tensor, length: int) -> bool:
    """[S, ...]: the same for all rows."""
    return value.dim() >= 1 and value.shape[0] == length


def _has_shared_positions(value: Any, rows: int, length: int) -> bool:
    if isinstance(value, tuple | list):
        return any(_has_shared_positions(each, rows, length) for each in value)
    if isinstance(value, dict):
        return any(_has_shared_positions(each, rows, length) for each in value.values())
    return isinstance(value, Tensor) and not _is_by_row(value, rows, length) and _is_shared(value, length)


def _mixed(*numbers: int) -> int:
    """One number of several, below 2^63; others for each order and value."""
    mixed = 0
    for number in numbers:
        mixed = (mixed ^ (number + 1)) * _ODD % 2**64
        mixed ^= mixed >> 32
    return mixed >> 1
