"""Recompute modules of a model without editing it: their ``forward`` runs again in the backward pass.

recomputed = recompute_blocks(model, ["Block"], every=2, recompute=Recompute())
recomputed.remove()

Hooks on the modules run once, around the recomputed part. A deep copy of the model recomputes its own modules.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any, Protocol

from torch import nn

from shoal.errors import ModelError, UsageError
from shoal.text import did_you_mean


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
        every: of the modules found, in order, the first of each ``every``. Fewer recomputed ones cost memory and save
            time.

    Raises: ModelError: no module matches. UsageError: ``every`` is below 1.
    """
    if every < 1:
        raise UsageError(f"every = {every}: it must be at least 1.", do="use 1 or more.")
    modules = {name: module for name, module in model.named_modules() if name}
    if classes is None:
        found = _blocks(modules, model, blocks)
        if not found:
            raise ModelError(
                f"{type(model).__name__} has no list of modules of one class that could be recomputed one by one.",
                do="name what is to be recomputed: a class, or modules as model.named_modules() does.",
                code="recompute-no-match",
            )
    else:
        wanted = [classes] if isinstance(classes, str | type) else list(classes)
        found = set(find_modules(model, wanted, where="activation_checkpointing.modules", purpose="recomputed"))
    ordered = [name for name in modules if name in found]
    return RecomputedBlocks({name: modules[name] for name in ordered[::every]}, recompute)


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
    found = {name for each in wanted for name in _matching(each, modules, where, purpose)}
    return {name: module for name, module in modules.items() if name in found}


def matches_a_module(model: nn.Module, wanted: str) -> bool:
    """True if ``wanted``, as ``recompute_blocks`` takes it, names a module of the model."""
    modules = {name: module for name, module in model.named_modules() if name}
    return any(type(module).__name__ == wanted for module in modules.values()) or bool(fnmatch.filter(modules, wanted))


def _matching(wanted: str | type[nn.Module], modules: dict[str, nn.Module], where: str, purpose: str) -> list[str]:
    if isinstance(wanted, type):
        found = [name for name, module in modules.items() if isinstance(module, wanted)]
    else:
        found = [name for name, module in modules.items() if type(module).__name__ == wanted]
        if not found:
            matching = set(fnmatch.filter(modules, wanted))
            found = [name for name in matching if not any(outer in matching for outer in _around(name))]
    if not found:
        text = wanted if isinstance(wanted, str) else wanted.__name__
        names = [type(module).__name__ for module in modules.values()]
        raise ModelError(
            f"no module of the model is called {text!r}, or of a class of that name, but it was to be {purpose}"
            f"{did_you_mean(text, [*names, *modules]) or '.'}",
            where=where,
            do="name a class of the model, or modules as model.named_modules() does: " + ", ".join(sorted(set(names))),
            code="recompute-no-match",
        )
    return found


def _around(name: str) -> Iterator[str]:
    """Names of the modules that contain a module.

    >>> list(_around("blocks.0.up"))
    ['blocks.0', 'blocks']
    """
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that the model names (``_no_split_modules``), else the children of its largest list of alike modules.

    Empty where there are none.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    found = _blocks(modules, model)
    return [module for name, module in modules.items() if name in found]


def _blocks(modules: dict[str, nn.Module], model: nn.Module, known: Sequence[str] = ()) -> set[str]:
    hinted = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    found = {name for name, module in modules.items() if type(module).__name__ in hinted}
    found = found or set(known)
    if not found:
        lists = {
            name: sum(parameter.numel() for parameter in module.parameters())
            for name, module in modules.items()
            if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1
        }
        largest = max(lists, key=lists.__getitem__, default=None)
        found = {name for name in modules if largest and name.rpartition(".")[0] == largest}
    return found
