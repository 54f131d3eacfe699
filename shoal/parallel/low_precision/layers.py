"""Which linear layers and stacked experts of a model compute in few bits, and how they are made to do so.

A linear layer gets a ``forward`` of its own on the instance; a split layer of tensor parallelism reads the same object
from its ``tensor_split``, stacked experts from their ``experts_held``. All ask it at each call whether the recipe is
on. Weights are quantised when they are used: in forward, and in backward once more, so that nothing of a gathered
weight outlives its use.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.parallel.expert.held import ExpertsHeld
from shoal.parallel.products import LayerProducts
from shoal.parallel.tensor.families import is_conv1d
from shoal.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from shoal.text import did_you_mean, listed

_ALIGNED = 16  # smaller layers are not worth it, and operators of GPUs do not take other lengths


class LowPrecisionLayers:
    """The chosen layers of a model, until ``remove()``.

    Args:
        whole: the products of layers that are not split over tensor-parallel ranks.
        split: those of the others.
    """

    def __init__(self, layers: Mapping[str, nn.Module], whole: LayerProducts, split: LayerProducts) -> None:
        self._before: list[tuple[object, str, Any, Any]] = []  # an attribute: what it was, what it is
        for module in layers.values():
            if (held := stacked_experts(module)) is not None:
                self._set(held, "products", whole if held.tensor.etp is None else split)
            elif (part := getattr(module, "tensor_split", None)) is not None:
                self._set(module, "tensor_split", replace(part, products=split))
            else:
                self._set(module, "forward", MethodType(_forward_with(whole), module))

    def _set(self, owner: Any, name: str, value: object) -> None:
        self._before.append((owner, name, vars(owner).get(name), value))
        setattr(owner, name, value)

    def remove(self) -> None:
        """Restore the layers as they were. Idempotent."""
        for owner, name, before, ours in self._before:
            if vars(owner).get(name) is not ours:
                continue  # other code has wrapped it since
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._before.clear()


def _forward_with(products: LayerProducts) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def forward(self_: Any, input: torch.Tensor) -> torch.Tensor:
        if not products.is_on:
            result: torch.Tensor = type(self_).forward(self_, input)
            return result
        return products.linear(input, self_.weight.t() if is_conv1d(self_) else self_.weight, self_.bias)

    return forward


@dataclass(frozen=True)
class Layers:
    """The linear layers and stacked experts of a model, or of a rank's part of it.

    Args:
        linears: by name, True for one that is taken where the config names none: its weights have dims that are
            multiples of 16, and are neither the head's nor that of an embedding.
        blocks: names, in the model's order.
    """

    linears: dict[str, bool]
    blocks: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[str], vocabulary: int) -> Layers:
        """
        Args:
            vocabulary: the rows of the largest embedding of all ranks.
        """
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}

        def is_taken(module: nn.Module) -> bool:
            if (held := stacked_experts(module)) is not None and held.stack is not None:
                sizes = [p.unflatten(0, (-1, held.stack.rows)).shape[1:] for p in module.parameters()]
                return all(length % _ALIGNED == 0 for size in sizes for length in size if length > 1)
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            is_head = id(weight) in embeddings or vocabulary in (weight.shape[0], getattr(module, "out_features", None))
            return not is_head and all(length % _ALIGNED == 0 for length in weight.shape)

        modules = {n: m for n, m in model.named_modules() if _is_linear(m) or stacked_experts(m) is not None}
        linears = {name: is_taken(module) for name, module in modules.items()}
        return cls(linears, tuple(blocks))

    @classmethod
    def together(cls, parts: Iterable[Layers]) -> Layers:
        """Of all ranks; a layer that several ranks have is taken where all agree."""
        linears: dict[str, bool] = {}
        blocks: dict[str, None] = {}
        for part in parts:
            for name, is_taken in part.linears.items():
                linears[name] = linears.get(name, True) and is_taken
            blocks |= dict.fromkeys(part.blocks)
        lists = list(dict.fromkeys(name.rpartition(".")[0] for name in blocks))

        def place(name: str) -> tuple[int, int]:
            parent, _, number = name.rpartition(".")
            return lists.index(parent), int(number) if number.isdigit() else 0

        return cls(linears, tuple(sorted(blocks, key=place)))

    def chosen(self, modules: Sequence[str] | None, keep: Sequence[str], last_share: float) -> list[str]:
        """The names of the layers that compute in few bits.

        Args:
            modules: patterns of names; None: those that are taken by default.
            keep: patterns of names that are not taken.
            last_share: of the blocks, the last of which stay as they are; a part of a block counts as one.

        Raises: ModelError: a pattern matches no linear layer, there are no blocks, or no layer is left.
        """
        taken = {name for name, is_taken in self.linears.items() if is_taken or modules is not None}
        if modules is not None:
            taken &= self._matching(modules, "fp8.modules")
        left = self._matching(keep, "fp8.keep")
        if last_share and not self.blocks:
            raise _error(
                f"fp8.keep_last_layers = {last_share:g}, but the model has no list of blocks.",
                "name the layers in fp8.keep.",
            )
        for block in self.blocks[len(self.blocks) - math.ceil(last_share * len(self.blocks)) :] if last_share else ():
            left |= {name for name in self.linears if name == block or name.startswith(f"{block}.")}
        chosen = [name for name in self.linears if name in taken - left]
        if not chosen:
            raise _error(
                f"no linear layer of the model is left for fp8: of {len(self.linears)}, {len(taken)} are taken and"
                f" {len(left)} kept.",
                "by default layers are taken whose dims are multiples of 16, without the head: name others in"
                " fp8.modules, keep fewer, or leave the section out.",
            )
        return chosen

    def _matching(self, patterns: Sequence[str], key: str) -> set[str]:
        found: set[str] = set()
        for pattern in patterns:
            matches = fnmatch.filter(self.linears, pattern)
            if not matches:
                raise _error(
                    f"{key} has {pattern!r}, which matches no linear layer of the model"
                    f"{did_you_mean(pattern, list(self.linears)) or '.'}",
                    f"write names as model.named_modules() has them: {listed(list(self.linears), 6)}.",
                )
            found.update(matches)
        return found


def stacked_experts(module: nn.Module) -> ExpertsHeld | None:
    """What stacked experts hold, from which their products are read; None: the module has none."""
    held = getattr(module, "experts_held", None)
    return held if isinstance(held, ExpertsHeld) and held.stack is not None else None


def _is_linear(module: nn.Module) -> bool:
    """True for a layer that computes ``F.linear`` of its weight, and for a split one."""
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return True
    return is_conv1d(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)


def largest_embedding(model: nn.Module) -> int:
    """The rows of the largest embedding of a model; 0: it has none."""
    return max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)


def _error(text: str, do: str) -> ModelError:
    return ModelError(text, do=do, code="fp8-modules")
