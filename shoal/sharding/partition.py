"""Partitions a model into units: groups of parameters that are needed together.

The units of a model are its transformer blocks (named by the user, by Hugging Face's ``_no_split_modules``, or found as
repeated siblings in a list, a sequence or a module with numbered children), each large module outside the blocks (an
embedding, a head), and the root, which takes what is left. A parameter that several of these share belongs to the root.
A container of experts is cut only where the caller says that each of them is gathered if it is used: which expert runs
depends on the data, and ranks must agree on what to gather.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import ModelError
from shoal.text import did_you_mean

ROOT = "root"
PERSISTENT = "persistent"
MIN_BLOCK_NUMEL = 1 << 15  # smaller repeated siblings cost more in hooks than they save in memory
MIN_MODULE_NUMEL = 1 << 17


@dataclass(frozen=True)
class UnitSpec:
    """One unit, by names."""

    name: str
    modules: tuple[str, ...]  # their forward needs the unit; "" is the model itself
    parameters: tuple[str, ...]
    is_persistent: bool = False
    is_gathered_if_used: bool = False


@dataclass(frozen=True)
class UnitRules:
    """How to partition. ``classes`` and ``names`` are the user's; without them the model is searched.

    Leaf modules (DeepSpeed's ``leaf_module``) are never cut inside, whatever else is found; what is not in the model
    is passed over.
    """

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()  # patterns
    min_block_numel: int = MIN_BLOCK_NUMEL
    min_module_numel: int = MIN_MODULE_NUMEL
    persistence_threshold: int = 0  # parameters below this many elements stay whole
    max_persistent_numel: int | None = None


def partition(
    model: nn.Module,
    rules: UnitRules,
    sizes: Mapping[int, int] | None = None,
    of_root: Collection[str] = (),
    if_used: Mapping[str, str] | None = None,
) -> list[UnitSpec]:
    """Partition ``model`` into units, in the order in which their parameters are registered; the root comes first.

    Args:
        sizes: the elements that the rules count for a parameter, by its ``id``; without one, the elements that it has.
        of_root: names of parameters that the root takes in any case.
        if_used: names of modules that become units which are gathered if they are used; but not small ones, and none
            inside a leaf module. With each, the module whose forward needs the unit.

    Raises: ModelError: the model has no parameters, or a name or class of the rules is not in it.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(
            f"{type(model).__name__} has no parameters, so there is nothing to train.",
            do="pass the module that holds the parameters, after they were created.",
            code="model-empty",
        )
    modules = dict(model.named_modules())
    if_used = if_used or {}
    numel = {id(parameter): parameter.numel() for parameter in parameters.values()} | dict(sizes or {})
    leaves = _leaves(modules, rules)
    blocks = _find_blocks(model, modules, rules, numel, leaves)
    cut = [
        name
        for name in if_used
        if sum(numel[id(parameter)] for parameter in modules[name].parameters()) >= rules.min_block_numel
        and not any(f"{name}.".startswith(f"{leaf}.") for leaf in leaves)
    ]
    blocks = list(dict.fromkeys((*blocks, *cut)))

    owner_of = {id(modules[name]): name for name in blocks}
    homes: dict[int, set[str]] = {}  # id of a parameter -> the candidates whose modules hold it
    numel_of_home: Counter[str] = Counter()

    def visit(module: nn.Module, name: str, block: str | None, seen: frozenset[int]) -> None:
        if id(module) in seen:
            return
        block = owner_of.get(id(module), block)
        home = block if block is not None else f"module:{name}"
        for parameter in module._parameters.values():
            if parameter is not None:
                homes.setdefault(id(parameter), set()).add(home)
        for child_name, child in module._modules.items():
            if child is not None:
                visit(child, f"{name}.{child_name}" if name else child_name, block, seen | {id(module)})

    visit(model, "", None, frozenset())
    canonical = {id(module): name for name, module in modules.items()}
    for parameter in parameters.values():
        for home in homes[id(parameter)]:
            numel_of_home[home] += numel[id(parameter)]

    ancestors = {".".join(name.split(".")[:depth]) for name in blocks for depth in range(name.count(".") + 1)}

    def unit_of(name: str, parameter: nn.Parameter) -> str:
        candidates = homes[id(parameter)]
        if len(candidates) > 1 or name in of_root:
            return ROOT
        home = next(iter(candidates))
        if not home.startswith("module:"):
            return home
        module_name = home.removeprefix("module:")
        is_own = module_name and module_name not in ancestors and numel_of_home[home] >= rules.min_module_numel
        return module_name if is_own and canonical.get(id(modules.get(module_name))) == module_name else ROOT

    persistent = _persistent(parameters, rules, numel) - set(of_root)
    members: dict[str, list[str]] = {ROOT: []}
    kept: list[str] = []
    for name, parameter in parameters.items():
        if name in persistent:
            kept.append(name)
        else:
            members.setdefault(unit_of(name, parameter), []).append(name)
    specs = [
        UnitSpec(
            unit, ("" if unit == ROOT else if_used.get(unit, unit),), tuple(names), is_gathered_if_used=unit in cut
        )
        for unit, names in members.items()
        if names
    ]
    if kept:
        specs.insert(0, UnitSpec(PERSISTENT, (), tuple(kept), is_persistent=True))
    return specs


def names_a_unit(model: nn.Module, rules: UnitRules) -> bool:
    """True if all classes and names of the rules occur in the model."""
    try:
        _named_by_user(dict(model.named_modules()), rules)
    except ModelError:
        return False
    return True


def _persistent(parameters: dict[str, nn.Parameter], rules: UnitRules, numel: Mapping[int, int]) -> set[str]:
    chosen, total = set(), 0
    for name, count in sorted(((name, numel[id(p)]) for name, p in parameters.items()), key=lambda item: item[1]):
        if count >= rules.persistence_threshold:
            break
        if rules.max_persistent_numel is not None and total + count > rules.max_persistent_numel:
            break
        chosen.add(name)
        total += count
    return chosen


def _leaves(modules: dict[str, nn.Module], rules: UnitRules) -> set[str]:
    return {
        name
        for name, module in modules.items()
        if name
        and (
            type(module).__name__ in {path.rsplit(".", 1)[-1] for path in rules.leaf_classes}
            or any(fnmatch.fnmatchcase(name, pattern) for pattern in rules.leaf_names)
            or getattr(module, "_z3_leaf", False)  # the mark that set_z3_leaf_modules leaves
        )
    }


def _find_blocks(
    model: nn.Module,
    modules: dict[str, nn.Module],
    rules: UnitRules,
    numel: Mapping[int, int],
    leaves: Collection[str],
) -> list[str]:
    """The names of the outermost blocks, in module order."""
    names = {*_blocks_without_leaves(model, modules, rules, numel), *leaves}
    return outermost(name for name in modules if name in names)


def _blocks_without_leaves(
    model: nn.Module, modules: dict[str, nn.Module], rules: UnitRules, numel: Mapping[int, int]
) -> list[str]:
    if rules.classes or rules.names:
        return outermost(_named_by_user(modules, rules))
    return outermost(hinted_blocks(modules)) or _repeated_siblings(model, rules.min_block_numel, numel)


def hinted_blocks(modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules, by name, whose classes the model itself calls its blocks (``_no_split_modules``)."""
    classes = {name for module in modules.values() for name in (getattr(module, "_no_split_modules", None) or ())}
    return [name for name, module in modules.items() if name and type(module).__name__ in classes]


def _named_by_user(modules: dict[str, nn.Module], rules: UnitRules) -> list[str]:
    classes = {type(module).__name__ for module in modules.values()}
    qualified = {f"{type(m).__module__}.{type(m).__qualname__}": type(m).__name__ for m in modules.values()}
    wanted = set()
    for name in rules.classes:
        short = qualified.get(name, name)
        if short not in classes:
            raise ModelError(
                f"no module of class {name!r} in the model, but the config names it as a unit"
                f"{did_you_mean(name, classes) or '.'}",
                where="units.classes",
                do="name a class of the model: " + ", ".join(sorted(classes)),
                code="unit-class-unknown",
            )
        wanted.add(short)
    chosen = [name for name, module in modules.items() if type(module).__name__ in wanted]
    for pattern in rules.names:
        matching = fnmatch.filter(modules, pattern)
        if not matching:
            raise ModelError(
                f"no module is called {pattern!r}, but the config names it as a unit"
                f"{did_you_mean(pattern, modules) or '.'}",
                where="units.names",
                do="name a module as model.named_modules() does, or a pattern such as 'layers.*'.",
                code="unit-name-unknown",
            )
        chosen += matching
    return [name for name in modules if name in set(chosen) and name]


def outermost(names: Iterable[str]) -> list[str]:
    """The names of modules, given in the model's order, that are inside of no other."""
    outermost_names: list[str] = []
    for name in names:
        if not any(name.startswith(outer + ".") for outer in outermost_names):
            outermost_names.append(name)
    return outermost_names


def _repeated_siblings(model: nn.Module, min_numel: int, numel: Mapping[int, int]) -> list[str]:
    """Children of one container that are of one class, from the outside in."""
    paths: list[str] = []
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        children = [(child_name, child) for child_name, child in module._modules.items() if child is not None]
        # A PipelineModule numbers its layers.
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        listed = [child for child_name, child in children if is_list or child_name.isdigit()]
        repeated: set[type[nn.Module]] = set()
        if not _is_expert_container(name):
            repeated = _repeated_classes(listed, min_numel, numel)
        for child_name, child in children:
            path = f"{name}.{child_name}" if name else child_name
            if (is_list or child_name.isdigit()) and _plain_class(child) in repeated:
                if id(child) not in seen:
                    paths.append(path)
                    seen.add(id(child))
            elif not _is_expert_container(path):
                visit(child, path)

    visit(model, "")
    return paths


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, or of what ``torch.compile`` wrapped."""
    inner = getattr(module, "_orig_mod", None)
    return type(inner) if isinstance(inner, nn.Module) else type(module)


def _repeated_classes(children: Sequence[nn.Module], min_numel: int, numel: Mapping[int, int]) -> set[type[nn.Module]]:
    distinct = {id(child): child for child in children}.values()
    counts: Counter[type[nn.Module]] = Counter()
    totals: Counter[type[nn.Module]] = Counter()
    for child in distinct:
        counts[_plain_class(child)] += 1
        totals[_plain_class(child)] += sum(numel[id(parameter)] for parameter in child.parameters())
    return {cls for cls, count in counts.items() if count > 1 and totals[cls] >= count * max(min_numel, 1)}


def _is_expert_container(name: str) -> bool:
    return "expert" in name.rsplit(".", 1)[-1].lower()
