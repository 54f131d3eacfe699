"""Where a model can be cut: its blocks, and on which stage each module outside them is."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from torch import nn

from shoal.errors import ModelError
from shoal.parallel.tensor.plan import join
from shoal.source import syntax_tree

Side = Literal["first", "last", "both", "every"]  # the stages that run it: stage 0, the last one, these two, all


@dataclass(frozen=True)
class ModelBlocks:
    """The blocks of a model.

    Args:
        container: name of the module that holds them; "" is the model itself.
        names: of the blocks in it, in the order in which they run.
    """

    container: str
    names: tuple[str, ...]

    def name(self, block: int) -> str:
        return join(self.container, self.names[block])

    @property
    def ancestors(self) -> list[tuple[str, str]]:
        """The modules above the container, from the model down, each with the name of its child on the way."""
        parts = self.container.split(".") if self.container else []
        return [(".".join(parts[:depth]), parts[depth]) for depth in range(len(parts))]


@dataclass(frozen=True)
class OutsideBlocks:
    """What a model has outside its blocks: modules and parameters, by full name."""

    modules: Mapping[str, Side] = field(default_factory=dict)
    parameters: Mapping[str, Side] = field(default_factory=dict)


def cut_error(what: str, do: str, *, where: str = "pipeline") -> ModelError:
    """The error of a model that cannot be cut, or not so."""
    return ModelError(what, where=where, do=do, code="pipeline-cut")


def find_blocks(model: nn.Module) -> ModelBlocks:
    """The longest list of modules that holds most parameters, embeddings not counted. Experts are no blocks.

    Raises: ModelError: the model has no list of modules with parameters.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    total = _numel(model, embeddings)
    lists = {
        name: (len(module), _numel(module, embeddings))
        for name, module in model.named_modules()
        if is_list(module) and _has_parameters(module) and "expert" not in name.rpartition(".")[2].lower()
    }
    if not lists:
        raise cut_error(
            f"{type(model).__name__} has no list of blocks, an nn.ModuleList or nn.Sequential, where it can be cut.",
            "name the modules at which a stage begins in pipeline.split_points, or write a PipelineModule.",
        )
    most = [name for name, (_, numel) in lists.items() if 2 * numel > total]
    name = max(most, key=lambda name: lists[name][0]) if most else max(lists, key=lambda name: lists[name][1])
    return ModelBlocks(name, tuple(model.get_submodule(name)._modules))


def split_at(model: nn.Module, split_points: Sequence[str]) -> tuple[ModelBlocks, tuple[int, ...]]:
    """The blocks that the names of a split are among, and the first block of each stage.

    They are the modules of one list; or the children of a module, in the order in which its forward calls them.

    Raises: ModelError: a name is not in the model, the names are not of one module, or not in its order.
    """

    def error(what: str) -> ModelError:
        return cut_error(
            what,
            "name the first block of the second and of each later stage, in the order in which they are called: "
            "modules of one list, or children of one module.",
            where="pipeline.split_points",
        )

    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in split_points if not name or name not in modules]
    containers = sorted({name.rpartition(".")[0] for name in split_points})
    if unknown or len(containers) != 1:
        raise error(f"{unknown} are not modules of the model." if unknown else f"{containers} are no single module.")
    container = modules[containers[0]]
    names = [name for name, child in container._modules.items() if child is not None]
    if not is_list(container):
        uses = _uses(type(container), "forward", frozenset())
        names = [name for name in names if _has_parameters(modules[join(containers[0], name)])]
        names.sort(key=lambda name: min(uses.get(name, [(0, 0)])))
        if any(_is_uncalled(modules[join(containers[0], name)]) for name in names):
            raise error(f"{containers[0]!r} has lists of modules beside {list(split_points)}.")
    points = [name.rpartition(".")[2] for name in split_points]
    starts = (0, *(names.index(point) if point in names else 0 for point in points))
    if any(start >= after for start, after in pairwise(starts)):
        raise error(f"{list(split_points)} begin at {list(starts[1:])} of the {len(names)} blocks {names}.")
    return ModelBlocks(containers[0], tuple(names)), starts


def find_outside(
    model: nn.Module, blocks: ModelBlocks, first: Collection[str], last: Collection[str], every: Collection[str]
) -> OutsideBlocks:
    """On which stage each module and parameter outside the blocks is.

    In this order: what the caller says; Transformers' pipeline plan; where the parent's ``forward`` calls it; where it
    is registered.

    Args:
        first, last, every: full names of modules and parameters that the first, the last, every stage calls; one of
            the first and the last stage is in both.

    Raises: ModelError: a name is not outside the blocks.
    """
    modules: dict[str, Side] = {}
    parameters: dict[str, Side] = {}
    known: set[str] = set()

    def add(parent: nn.Module, parent_name: str, side_of: Callable[[str], Side]) -> None:
        members: dict[str, Any] = {**parent._parameters, **parent._modules}
        for name, member in members.items():
            full = join(parent_name, name)
            if member is None or not _has_parameters(member) or full in path:
                continue
            known.add(full)
            side = side_of(name)
            if full in every or (full in first and full in last):
                side = "every" if full in every else "both"
            elif full in first or full in last:
                side = "first" if full in first else "last"
            if isinstance(member, nn.Parameter):
                parameters[full] = side
            elif _is_uncalled(member):
                add(member, full, partial(_always, side))
            else:
                modules[full] = side

    path = {join(parent_name, name) for parent_name, name in blocks.ancestors}
    path |= {blocks.name(at) for at in range(len(blocks.names))}
    add(model.get_submodule(blocks.container), blocks.container, partial(_always, "first"))
    for parent_name, on_path in blocks.ancestors:
        parent = model.get_submodule(parent_name)
        add(parent, parent_name, partial(_side, parent, on_path))
    unknown = sorted({*first, *last, *every} - known)
    if unknown:
        raise cut_error(
            f"{unknown} are no modules with parameters beside the blocks {blocks.container!r}.",
            f"name some of {sorted(known)}.",
            where="pipeline.first_stage, pipeline.last_stage, pipeline.every_stage",
        )
    return OutsideBlocks(modules, parameters)


def _always(side: Side, name: str) -> Side:
    return side


def _side(parent: nn.Module, on_path: str, name: str) -> Side:
    """The side of a member: a module calls it before or after its child ``on_path``, or in both places."""
    plan = list(getattr(parent, "_pp_plan", None) or {})
    if name in plan and on_path in plan:
        return "first" if plan.index(name) < plan.index(on_path) else "last"
    uses = _uses(type(parent), "forward", frozenset())
    if name in uses and on_path in uses:
        blocks = min(uses[on_path])
        if min(uses[name]) < blocks < max(uses[name]):
            return "both"
        return "first" if min(uses[name]) < blocks else "last"
    order = [*parent._parameters, *parent._modules]
    return "first" if order.index(name) < order.index(on_path) else "last"


def _uses(kind: type, method: str, callers: frozenset[str]) -> dict[str, list[tuple[int, int]]]:
    """Where a method calls children, iterates over them or passes their parameters: line and column, by child's name.

    A child without such a place: where its name is. What a method that it calls does counts at the place of the call.
    """
    tree = syntax_tree(inspect.unwrap(getattr(kind, method)))
    if tree is None:
        return {}
    callers |= {method}
    named: dict[str, list[tuple[int, int]]] = {}
    used: dict[str, list[tuple[int, int]]] = {}
    for node in ast.walk(tree):
        for places, values in ((named, [node]), (used, _used_by(node))):
            for value in values:
                if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
                    # a call comes after those in its arguments, so its end is its place
                    name, place = value.attr, (_end(node) if isinstance(node, ast.Call) else _end(value))
                    is_method = inspect.isfunction(getattr(kind, name, None)) and name not in callers
                    for of in _uses(kind, name, callers) if is_method else (name,):
                        places.setdefault(of, []).append(place)
    return {**named, **used}


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _used_by(node: ast.AST) -> list[ast.AST]:
    """The expressions that a node of the syntax tree calls, iterates over, or gets as arguments."""
    if isinstance(node, ast.Call):
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        owners = [value.value for value in (node.func, *values) if isinstance(value, ast.Subscript)]
        return [node.func, *values, *owners, *(value.value for value in values if isinstance(value, ast.Attribute))]
    if isinstance(node, ast.For | ast.comprehension):
        return list(ast.walk(node.iter))
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    return []


def is_cache(value: Any) -> bool:
    """True for a cache of keys and values of Transformers', to which a second run of a block would append once more."""
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__)


def is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _is_uncalled(module: nn.Module) -> bool:
    """True for a list or dict of modules: the model calls what is in it."""
    return type(module).forward is nn.Module.forward


def _has_parameters(member: nn.Module | nn.Parameter) -> bool:
    return isinstance(member, nn.Parameter) or any(True for _ in member.parameters())


def _numel(module: nn.Module, embeddings: set[int]) -> int:
    return sum(p.numel() for p in module.parameters() if id(p) not in embeddings)
