"""Recompute modules of a model without editing it: their ``forward`` runs again in the backward pass.

recomputed = recompute_blocks(model, ["Block"], every=2, recompute=Recompute())
recomputed.remove()

Hooks on the modules run once, around the recomputed part. A deep copy of the model recomputes its own modules.

``BudgetedRecompute`` (``activation_checkpointing.memory_budget``) recomputes as few as a number of bytes needs:

    first step      one block of each class runs as it is, and what it saves is counted; the others are recomputed
    after it        the last blocks whose activations fit run as they are from now on, on all ranks alike; of those
                    before them each so-many-th (``offload_every``) has its activations on the host, so that it is
                    copied while the others compute, and the rest is recomputed

``device_nbytes`` says what is then on the device. What lies outside of blocks is not counted.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.errors import ModelError, UsageError
from shoal.parallel.saved_tensors import counting_saved
from shoal.sharding.partition import hinted_blocks, outermost
from shoal.text import did_you_mean, format_bytes


class Runner(Protocol):
    """Calls a module's forward, with recomputation or another policy."""

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns: the result of ``function(*args, **kwargs)``."""
        ...


class RecomputedBlocks:
    """Modules that are recomputed, until ``remove()``.

    Attributes: ``names``: of the modules, as ``named_modules()`` has them.
    """

    def __init__(self, modules: dict[str, nn.Module], recompute: Runner) -> None:
        self.names = tuple(modules)
        self._is_on = True
        self._before = [(module, vars(module).get("forward")) for module in modules.values()]
        self._ours = []
        for name, module in modules.items():
            bound = MethodType(self._forward_of(name, module, recompute), module)
            self._ours.append(bound)
            module.forward = bound

    def _forward_of(self, name: str, module: nn.Module, recompute: Runner) -> Any:
        before = module.forward
        # The unbound method: a copy of the module must call its own.
        method = before.__func__ if isinstance(before, MethodType) and before.__self__ is module else None

        @functools.wraps(method if method is not None else before)
        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(method, self_) if method is not None else before
            return recompute.run(name, run, args, kwargs) if self._is_on else run(*args, **kwargs)

        return forward

    def __len__(self) -> int:
        return len(self.names)

    def remove(self) -> None:
        """Restore the modules' own ``forward``. Idempotent."""
        if not self._is_on:
            return
        self._is_on = False
        for (module, before), ours in zip(self._before, self._ours, strict=True):
            if vars(module).get("forward") is not ours:
                continue  # other code has wrapped it since; the wrapper below it now only passes calls on
            if before is None:
                del module.forward
            else:
                module.forward = before


def recompute_blocks(
    model: nn.Module,
    classes: Iterable[str | type[nn.Module]] | str | type[nn.Module] | None = None,
    *,
    every: int = 1,
    recompute: Runner,
    blocks: Sequence[str] = (),
) -> RecomputedBlocks:
    """Recompute modules of ``model`` in the backward pass.

    Args:
        classes: each a class, the name of one, a module's full name, or a pattern of such names ("layers.*"), which
            means the outermost that fit; None: the blocks that the model names (``_no_split_modules``), else the
            children of its largest list of alike modules.
        blocks: names of blocks, in place of that list's, of a model that is one stage of a pipeline.
        every: of these modules, in order, the first of each ``every``. Fewer recomputed ones cost memory and save
            time.

    Raises: ModelError: no module matches. UsageError: ``every`` is below 1.
    """
    if every < 1:
        raise UsageError(f"every = {every}: it must be at least 1.", do="use 1 or more.")
    if classes is None:
        matches = find_blocks(model, blocks)
        if not matches:
            raise ModelError(
                f"{type(model).__name__} has no list of modules of one class that could be recomputed one by one.",
                do="name what is to be recomputed: a class, or modules as model.named_modules() does.",
                code="recompute-no-match",
            )
    else:
        wanted = [classes] if isinstance(classes, str | type) else list(classes)
        matches = find_modules(model, wanted, where="activation_checkpointing.modules", purpose="recomputed")
    return RecomputedBlocks(dict(list(matches.items())[::every]), recompute)


def find_modules(
    model: nn.Module, wanted: Iterable[str | type[nn.Module]], *, where: str, purpose: str
) -> dict[str, nn.Module]:
    """Modules by name, in the model's order.

    Args:
        wanted: as ``classes`` of ``recompute_blocks``.
        purpose: what happens to them, for the error: "recomputed".

    Raises: ModelError: one of ``wanted`` matches no module.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    names = {name for each in wanted for name in _matching(each, modules, where, purpose)}
    return {name: module for name, module in modules.items() if name in names}


def matches_a_module(model: nn.Module, wanted: str) -> bool:
    """True if ``wanted``, as ``recompute_blocks`` takes it, names a module of the model."""
    modules = {name: module for name, module in model.named_modules() if name}
    return any(type(module).__name__ == wanted for module in modules.values()) or bool(fnmatch.filter(modules, wanted))


def _matching(wanted: str | type[nn.Module], modules: dict[str, nn.Module], where: str, purpose: str) -> list[str]:
    if isinstance(wanted, type):
        matches = [name for name, module in modules.items() if isinstance(module, wanted)]
    else:
        matches = [name for name, module in modules.items() if type(module).__name__ == wanted]
        matches = matches or outermost(fnmatch.filter(modules, wanted))
    if not matches:
        text = wanted if isinstance(wanted, str) else wanted.__name__
        names = [type(module).__name__ for module in modules.values()]
        raise ModelError(
            f"no module of the model is called {text!r}, or of a class of that name, but it was to be {purpose}"
            f"{did_you_mean(text, [*names, *modules]) or '.'}",
            where=where,
            do="name a class of the model, or modules as model.named_modules() does: " + ", ".join(sorted(set(names))),
            code="recompute-no-match",
        )
    return matches


def find_blocks(model: nn.Module, known: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The blocks that the model names (``_no_split_modules``), else the children of its largest list of alike modules.

    Empty where there are none.

    Args:
        known: names of blocks, in place of that list's.
    """
    modules = dict(model.named_modules())
    names = set(hinted_blocks(modules)) or set(known)
    if not names:
        lists = {
            name: sum(parameter.numel() for parameter in module.parameters())
            for name, module in modules.items()
            if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1
        }
        largest = max(lists, key=lists.__getitem__, default=None)
        names = {name for name in modules if largest and name.rpartition(".")[0] == largest}
    return {name: module for name, module in modules.items() if name in names}


Policy = Literal["keep", "recompute", "offload"]


class BudgetedRecompute:
    """Runs blocks: recomputed, with their activations on the host, or as they are where the budget allows it.

    Args:
        recompute: recomputes a block.
        nbytes: the budget of one micro-batch on this rank.
        offload_every: of the blocks that do not fit, the first of each so many is offloaded; 0: none.
    """

    def __init__(self, recompute: Runner, nbytes: int, offload_every: int = 0) -> None:
        self._recompute = recompute
        self._nbytes = nbytes
        self._every = offload_every
        self.offload: Runner | None = None  # stores a block's activations on the host
        self.blocks: dict[str, nn.Module] = {}
        self._inputs: dict[str, int] = {}  # bytes that a recomputed block saves
        self._of_kind: dict[type[nn.Module], int] = {}  # bytes that a block saves that is not recomputed
        self.policies: dict[str, Policy] = {}  # by block; empty: not decided yet
        self.saved: dict[str, tuple[int, int]] = {}  # by block: bytes of its inputs, and of all that it saves

    def install(self, model: nn.Module, names: Sequence[str] | None) -> RecomputedBlocks:
        """Run blocks of the model through this object, until ``remove()`` of the result.

        Args:
            names: as ``recompute_blocks`` takes classes; None: the model's blocks.
        """
        blocks = recompute_blocks(model, names, recompute=self)
        self.blocks = {name: model.get_submodule(name) for name in blocks.names}
        return blocks

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As ``Recompute.run``."""
        policy = self.policies.get(name, "recompute" if torch.is_grad_enabled() else "keep")
        if not self.policies and torch.is_grad_enabled():
            kind = type(self.blocks[name])
            self._inputs[name] = max(self._inputs.get(name, 0), _nbytes_of([*args, *kwargs.values()]))
            if kind not in self._of_kind:
                return self._measured(name, function, args, kwargs)
        elif policy == "keep":
            return function(*args, **kwargs)
        elif policy == "offload" and self.offload is not None:
            return self.offload.run(name, function, args, kwargs)
        return self._recompute.run(name, function, args, kwargs)

    def _measured(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = self.blocks[name]
        with counting_saved(block.parameters()) as num_saved:
            result = function(*args, **kwargs)
        self._of_kind[type(block)] = num_saved()
        return result

    def decide(self, comm: Communicator) -> str | None:
        """After the first step: choose the blocks. Every rank calls. Returns: a line for rank 0; None: it was done.

        Communicates: once, the measured bytes, of which the ranks' largest count.
        """
        if self.policies:
            return None
        mine = {name: (self._inputs.get(name, 0), self._of_kind.get(type(b), 0)) for name, b in self.blocks.items()}
        measured = comm.gather_objects(mine, label="activation budget")
        inputs = {name: max(each[name][0] for each in measured) for name in mine}
        whole = {name: max(each[name][1] for each in measured) for name in mine}
        self.saved = {name: (inputs[name], whole[name]) for name in mine}
        self.policies = choose(inputs, whole, self._nbytes, self._every)
        saved, chosen = device_nbytes(self.policies, inputs, whole), list(self.policies.values())
        fits = "within" if saved <= self._nbytes else "more than"
        return (
            f"activation_checkpointing.memory_budget: {chosen.count('recompute')} of {len(mine)} blocks are recomputed,"
            f" {chosen.count('offload')} offloaded; activations take {format_bytes(saved)}, {fits} the"
            f" {format_bytes(self._nbytes)} allowed."
        )


def choose(inputs: Mapping[str, int], whole: Mapping[str, int], nbytes: int, every: int = 0) -> dict[str, Policy]:
    """What is done with each block so that as few as possible are recomputed: the last ones are kept.

    Args:
        inputs: bytes of each block's inputs; ``whole``: of all that it saves.
        every: as ``offload_every`` of ``BudgetedRecompute``.

    >>> choose({"a": 1, "b": 1, "c": 1}, {"a": 10, "b": 10, "c": 10}, 25)
    {'a': 'recompute', 'b': 'recompute', 'c': 'keep'}
    """
    names = list(whole)
    best: dict[str, Policy] = dict.fromkeys(names, "recompute")
    for step in dict.fromkeys((0, every)):
        for num_left in range(len(names) + 1):
            made: dict[str, Policy] = dict.fromkeys(names, "keep")
            made.update(dict.fromkeys(names[:num_left], "recompute"))
            made.update(dict.fromkeys(names[:num_left:step] if step else (), "offload"))
            if device_nbytes(made, inputs, whole) <= nbytes:
                best = min(best, made, key=lambda each: list(each.values()).count("recompute"))
                break
    return best


def device_nbytes(policies: Mapping[str, Policy], inputs: Mapping[str, int], whole: Mapping[str, int]) -> int:
    """Bytes of activations on the device: of kept blocks, of two offloaded ones that are being copied, inputs of
    recomputed blocks, and the activations of one of these.
    """
    of = {each: [whole[name] for name in policies if policies[name] == each] for each in get_args(Policy)}
    saved = sum(inputs[name] for name in policies if policies[name] == "recompute")
    return sum(of["keep"]) + saved + max(of["recompute"], default=0) + sum(sorted(of["offload"])[-2:])


def _nbytes_of(values: Sequence[Any]) -> int:
    storages = {each._cdata: each for each in (tensor.untyped_storage() for tensor in _tensors(values))}
    return sum(each.nbytes() for each in storages.values())


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
