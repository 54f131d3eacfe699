"""``deepspeed.utils.z3_leaf_module``: modules that stage 3 gathers as one, with all their submodules.

The mark is an attribute of the module, ``_z3_leaf``, as clients expect; a marked module is one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shoal.errors import ModelError


def z3_leaf_module(model: nn.Module) -> bool:
    """True if it is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: torch.Tensor) -> bool:
    """Always False: only modules are marked, not parameters."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark the module, or remove the mark. Takes effect in ``initialize``."""
    # A module's attributes are typed as tensors and modules; clients look for a plain bool.
    model._z3_leaf = flag  # type: ignore[assignment]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of the classes, given as classes or names (short, or with their module).

    Returns: the modules. Raises: ModelError, a ValueError: none is in the model.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark from modules of the classes; otherwise as ``set_z3_leaf_modules``."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in ``named_modules()``. Returns: the modules, and names that are not there."""
    return _mark_names(model, module_names, flag, raise_if_not_found, lambda name, wanted: name == wanted)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose names end so. Returns: the modules, and suffixes that no name has."""
    return _mark_names(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def _mark_classes(
    model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    kinds = tuple(each for each in classes if isinstance(each, type))
    names = {each for each in classes if isinstance(each, str)}
    modules = []
    for module in model.modules():
        cls = type(module)
        if isinstance(module, kinds) or names & {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}:
            set_z3_leaf_module(module, flag)
            modules.append(module)
    if not modules and raise_if_not_found:
        raise _not_found("of class", [each if isinstance(each, str) else each.__name__ for each in classes], model)
    return modules


def _mark_names(
    model: nn.Module,
    wanted: Sequence[str],
    flag: bool,
    raise_if_not_found: bool,
    is_meant: Callable[[str, str], bool],
) -> tuple[list[nn.Module], list[str]]:
    modules: list[nn.Module] = []
    missing: list[str] = []
    for each in wanted:
        here = [module for name, module in model.named_modules() if name and is_meant(name, each)]
        for module in here:
            set_z3_leaf_module(module, flag)
        modules += here
        if not here:
            missing.append(each)
    if missing and raise_if_not_found:
        raise _not_found("called", missing, model)
    return modules, missing


def _not_found(how: str, names: Sequence[str], model: nn.Module) -> ModelError:
    return ModelError(
        f"no module {how} {', '.join(repr(name) for name in names)} in {type(model).__name__}.",
        do="name it as model.named_modules() does, or pass raise_if_not_found=False.",
        code="leaf-module",
    )
