"""What a block leaves behind besides its output: tensors that the loss may read on a later pipeline stage.

    place                          path, from the block's name on               left there by
    attribute of a module          "module", "moe", "aux"                       the module's forward
    list, dict or object in one    "module", "moe", "losses", 0                 the same
    what a forward hook uses       "module", "moe", "_forward_hooks[0]", ...    the hook: closure, object or global
    list among the arguments       "arguments", "1", 0                          the block
    value of a context variable    "context", "output_collector", ...           Transformers, which collects outputs

A stage searches these places before and after it calls a block, and sends what is new. The stages behind put it into
the same places when the model calls the block there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.pipeline.blocks import cut_error

Path = tuple[Any, ...]

OF_MODULES = frozenset(vars(nn.Module())) | {"forward"}  # recomputation wraps a module's forward on its own stage
_WITHOUT_PLACES = ("torch", "shoal", "builtins", "numpy")  # packages whose objects hold nothing for a model's loss
_MAX_DEPTH = 4  # of lists, dicts and objects below a module, a hook or an argument


@dataclass(frozen=True, eq=False)
class LeftTensors:
    """Where a tensor, or a tuple of tensors, was left.

    Args:
        owner: the object that holds it; None: it is an output of the block.
        stamp: of each tensor, its id and version.
    """

    path: Path
    owner: Any
    value: Any
    stamp: Sequence[tuple[int, int]] = ()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(self.value) if isinstance(leaf, torch.Tensor)]

    @property
    def named(self) -> Path:
        """The place in any block, without positions in lists."""
        return tuple(key for key in self.path[1:] if isinstance(key, str))

    def is_there(self) -> bool:
        """True if the owner still has the value: no later block has replaced it or taken it out."""
        is_list, key = isinstance(self.owner, list), self.path[-1]
        return self.owner is None or any(v is self.value for k, v in _members(self.owner) if is_list or k == key)

    def take_out(self) -> None:
        """Remove the value from a list, which only the loss would empty."""
        if isinstance(self.owner, list):
            self.owner[:] = [value for value in self.owner if value is not self.value]


def roots(module: nn.Module | None, args: Any, kwargs: Any) -> dict[str, Any]:
    """Where places are searched for a block that is called with these arguments.

    Args:
        module: None: only in lists and dicts of the arguments and of context variables.
    """
    given = {**{str(at): value for at, value in enumerate(args)}, **kwargs}
    context = {variable.name: value for variable, value in copy_context().items()}
    containers = [{key: x for key, x in of.items() if type(x) in (list, dict)} for of in (given, context)]
    return {"module": module or {}, "arguments": containers[0], "context": containers[1]}


def kept(of: Mapping[str, dict[str, Any]]) -> dict[Path, LeftTensors]:
    """The tensors in all places, each place once.

    Args:
        of: the roots of each block, by its name.
    """
    result: dict[Path, LeftTensors] = {}
    seen: set[int] = set()
    for name, root in of.items():
        for kind, depth in (("module", 0), ("arguments", _MAX_DEPTH - 1), ("context", _MAX_DEPTH - 2)):
            _search(root[kind], (name, kind), depth, seen, result)
    return result


class Learnt:
    """What earlier forwards of a stage have shown, so that each message has the same structure."""

    def __init__(self) -> None:
        # Places where blocks left tensors with a gradient; () from the first forward with gradients on.
        self._paths: set[Path] = set()
        self._collected: dict[bool, list[str]] = {}  # with and without gradients
        self._num_forwards = {False: 0, True: 0}

    def begin_forward(self) -> bool:
        """True if the blocks' modules must be searched: in the first two passes, then if they leave something."""
        self._num_forwards[torch.is_grad_enabled()] += 1
        return self._num_forwards[torch.is_grad_enabled()] <= 2 or len(self._paths) > 1

    def left(self, places: Sequence[LeftTensors]) -> list[LeftTensors]:
        """Those of the places with new values that a loss may read.

        Of attributes and hooks: what has a gradient, and what is new next to it. Without gradients: what had one in an
        earlier pass, and numbers; before the first such pass, what is in lists.
        """

        def is_left(place: LeftTensors) -> bool:
            if place.path[1] != "module" or place.named in self._paths:
                return True
            if torch.is_grad_enabled():
                return any(tensor.requires_grad for tensor in place.tensors)
            is_likely = isinstance(place.owner, list) and not self._paths
            return all(t.is_floating_point() and (is_likely or t.numel() == 1) for t in place.tensors)

        owners = {id(place.owner) for place in places if is_left(place)}
        left = [place for place in places if id(place.owner) in owners]
        if torch.is_grad_enabled():
            self._paths.update(((), *(place.named for place in left if place.path[1] == "module")))
        return left

    def collected(
        self, outputs: dict[str, torch.Tensor], sent: Sequence[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]]:
        """The outputs that the model keeps in a list, tuple or dict, from which a later stage may read them.

        Args:
            outputs: of blocks, by name.
            sent: tensors that are sent already.
        """
        is_training = torch.is_grad_enabled()
        if is_training not in self._collected:
            holders = [h for h in gc.get_referrers(*outputs.values()) if type(h) in (list, tuple, dict)]
            holders = [holder for holder in holders if holder is not outputs]
            known = {id(tensor) for tensor in sent}
            self._collected[is_training] = [
                name for name, t in outputs.items() if id(t) not in known and any(_collects(h, t) for h in holders)
            ]
        return [(name, outputs[name]) for name in self._collected[is_training] if name in outputs]


def _collects(holder: Any, tensor: torch.Tensor) -> bool:
    """True if a container collects a tensor. Other tuples and dicts are arguments, or attributes of an object."""
    values = list(holder.values()) if isinstance(holder, dict) else holder
    are_alike = len(values) > 1 and all(getattr(value, "shape", None) == tensor.shape for value in values)
    return (type(holder) is list or are_alike) and any(value is tensor for value in values)


def put(root: dict[str, Any], path: Path, value: Any) -> LeftTensors:
    """Leave a value in the place that it was left in on another stage.

    Raises: ModelError: there is no such place.
    """
    if path[1] == "output":
        return LeftTensors(path, None, value)
    owner: Any = root
    for key, after in pairwise(path[1:]):
        member = dict(_members(owner)).get(key)
        if member is None and (not isinstance(owner, nn.Module) or key.startswith("_forward")):
            raise cut_error(
                f"the model cannot be cut between its blocks: block {path[0]!r} leaves a tensor with a gradient in "
                f"{'.'.join(map(str, path[2:]))!r}, and a pipeline stage behind it has no such place.",
                "register hooks before initialize(); detach what no loss reads; or return it from the block.",
            )
        if member is None:  # the block's forward makes it
            member = [] if isinstance(after, int) else {}
            setattr(owner, key, member)
        owner = member
    key = path[-1]
    if isinstance(owner, list):
        owner[key:] = [value]  # nothing here removes what an earlier micro-batch left there
    elif isinstance(owner, dict):
        owner[key] = value
    elif isinstance(owner, FunctionType):
        (owner.__closure__ or ())[owner.__code__.co_freevars.index(key)].cell_contents = value
    else:
        setattr(owner, key, value)
    return LeftTensors(path, owner, value)


def _search(owner: Any, path: Path, depth: int, seen: set[int], result: dict[Path, LeftTensors]) -> None:
    for key, value in _members(owner):
        is_part = isinstance(owner, nn.Module) and isinstance(value, nn.Module)  # of a hook's module: attributes alone
        if isinstance(value, torch.Tensor) or (type(value) is tuple and isinstance(next(iter(value), 0), torch.Tensor)):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            stamp = [(id(t), 0 if t.is_inference() else t._version) for t in tensors]
            result[*path, key] = LeftTensors((*path, key), owner, value, stamp)
        elif id(value) not in seen and (depth == 0 if is_part else depth < _MAX_DEPTH and _has_places(value)):
            seen.add(id(value))
            _search(value, (*path, key), 0 if is_part else depth + 1, seen, result)


def _members(owner: Any) -> Iterable[tuple[Any, Any]]:
    """What an object holds, by key."""
    if isinstance(owner, nn.Module):
        # A weight that weight_norm or spectral_norm computes is an attribute that no loss reads.
        computed = {key.rpartition("_")[0] for key in owner._parameters} | OF_MODULES
        yield from [(key, value) for key, value in vars(owner).items() if key not in computed]
        yield from (*owner._buffers.items(), *owner._modules.items())
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = [hook for hook in vars(owner)[kind].values() if _has_places(hook)]  # those of Shoal differ
            yield from ((f"{kind}[{at}]", hook) for at, hook in enumerate(hooks))
    elif isinstance(owner, dict):
        yield from [(key, value) for key, value in owner.items() if isinstance(key, str | int)]
    elif isinstance(owner, list):
        yield from enumerate(owner)
    elif isinstance(owner, FunctionType):
        yield from zip(
            owner.__code__.co_freevars, (cell.cell_contents for cell in owner.__closure__ or ()), strict=True
        )
        used = ((name, owner.__globals__.get(name)) for name in owner.__code__.co_names)
        yield from (item for item in used if type(item[1]) in (list, dict))
    elif isinstance(owner, MethodType):
        yield "__self__", owner.__self__
    elif isinstance(owner, partial):
        yield from (("func", owner.func), ("args", list(owner.args)), ("keywords", owner.keywords))
    else:
        yield from vars(owner).items()


def _has_places(value: Any) -> bool:
    kind = type(value)
    if kind in (partial, MethodType):
        return _has_places(value.func if kind is partial else value.__self__)
    package = str((value if kind is FunctionType else kind).__module__).partition(".")[0]
    return kind in (list, dict) or (hasattr(value, "__dict__") and kind is not type and package not in _WITHOUT_PLACES)
