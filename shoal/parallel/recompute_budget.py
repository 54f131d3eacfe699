"""``activation_checkpointing.memory_budget``: recompute as few blocks as a number of bytes needs.

    first step      one block of each class runs as it is, and what it saves is counted; the others are recomputed
    after it        the last blocks whose activations fit run as they are from now on, on all ranks alike

What is saved at the end of forward is then: the activations of blocks that run as they are, the inputs of the others,
and, while one of these is recomputed, its activations. What lies outside of blocks is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.parallel.recompute_blocks import RecomputedBlocks, Runner, recompute_blocks
from shoal.text import format_bytes


class BudgetedRecompute:
    """Runs blocks: recomputed, or as they are where the budget allows it.

    Args:
        recompute: recomputes a block.
        nbytes: the budget of one micro-batch on this rank.
    """

    def __init__(self, recompute: Runner, nbytes: int) -> None:
        self._recompute = recompute
        self._nbytes = nbytes
        self._blocks: dict[str, nn.Module] = {}
        self._inputs: dict[str, int] = {}  # bytes that a recomputed block saves
        self._of_kind: dict[type[nn.Module], int] = {}  # bytes that a block saves that is not recomputed
        self.kept: frozenset[str] | None = None  # blocks that run as they are; None: not decided yet

    def install(self, model: nn.Module, names: Sequence[str] | None) -> RecomputedBlocks:
        """Run blocks of the model through this object, until ``remove()`` of the result.

        Args:
            names: as ``recompute_blocks`` takes classes; None: the model's blocks.
        """
        blocks = recompute_blocks(model, names, recompute=self)
        self._blocks = {name: model.get_submodule(name) for name in blocks.names}
        return blocks

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As ``Recompute.run``."""
        if self.kept is None and torch.is_grad_enabled():
            kind = type(self._blocks[name])
            self._inputs[name] = max(self._inputs.get(name, 0), _nbytes_of([*args, *kwargs.values()]))
            if kind not in self._of_kind:
                return self._measured(name, function, args, kwargs)
        elif self.kept is None or name in self.kept:
            return function(*args, **kwargs)
        return self._recompute.run(name, function, args, kwargs)

    def _measured(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = self._blocks[name]
        weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = function(*args, **kwargs)
        self._of_kind[type(block)] = sum(saved.values())
        return result

    def decide(self, comm: Communicator) -> str | None:
        """After the first step: choose the blocks. Every rank calls. Returns: a line for rank 0; None: it was done.

        Communicates: once, the measured bytes, of which the ranks' largest count.
        """
        if self.kept is not None:
            return None
        own = {name: (self._inputs.get(name, 0), self._of_kind.get(type(b), 0)) for name, b in self._blocks.items()}
        found = comm.gather_objects(own, label="activation budget")
        inputs = {name: max(each[name][0] for each in found) for name in own}
        whole = {name: max(each[name][1] for each in found) for name in own}
        self.kept = choose(inputs, whole, self._nbytes)
        num, left = len(own), [name for name in own if name not in self.kept]
        saved = sum(inputs[name] for name in left) + sum(whole[name] for name in self.kept)
        saved += max((whole[name] for name in left), default=0)
        fits = "within" if saved <= self._nbytes else "more than"
        return (
            f"activation_checkpointing.memory_budget: {len(left)} of {num} blocks are recomputed; activations take"
            f" {format_bytes(saved)}, {fits} the {format_bytes(self._nbytes)} allowed."
        )


def choose(inputs: Mapping[str, int], whole: Mapping[str, int], nbytes: int) -> frozenset[str]:
    """The blocks that need not be recomputed: as many of the last ones as fit.

    Args:
        inputs: bytes of each block's inputs; ``whole``: of all that it saves.

    >>> sorted(choose({"a": 1, "b": 1, "c": 1}, {"a": 10, "b": 10, "c": 10}, 25))
    ['c']
    """
    if sum(whole.values()) <= nbytes:
        return frozenset(whole)
    kept: set[str] = set()
    taken = sum(inputs.values()) + max(whole.values(), default=0)
    for name in reversed(list(whole)):
        if taken - inputs[name] + whole[name] > nbytes:
            break
        taken += whole[name] - inputs[name]
        kept.add(name)
    return frozenset(kept)


def _nbytes_of(values: Sequence[Any]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(values)}
    return sum(storages.values())


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
