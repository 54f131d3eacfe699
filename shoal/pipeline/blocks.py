"""Where a model can be cut: its blocks, and on which stage each module beside them is."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from torch import nn

from shoal.errors import ModelError

Side = Literal["first", "last", "both"]  # the stages that run it: stage 0, the last one


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
        return joined(self.container, self.names[block])

    @property
    def ancestors(self) -> list[tuple[str, str]]:
        """The modules above the container, from the model down, each with the name of its child on the way."""
        parts = self.container.split(".") if self.container else []
        return [(".".join(parts[:depth]), parts[depth]) for depth in range(len(parts))]


@dataclass(frozen=True)
class Beside:
    """What a model has beside its blocks: modules and parameters, by full name."""

    modules: Mapping[str, Side] = field(default_factory=dict)
    parameters: Mapping[str, Side] = field(default_factory=dict)


def joined(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child


def find_blocks(model: nn.Module) -> ModelBlocks:
    """The longest list of modules that holds most parameters, embeddings apart.

    Raises: ModelError: the model has no list of modules with parameters.
    """
    aside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    total = _numel(model, aside)
    lists = {
        name: (len(module), _numel(module, aside))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and _has_parameters(module)
    }
    if not lists:
        raise ModelError(
            f"{type(model).__name__} has no list of blocks, an nn.ModuleList or nn.Sequential, where it can be cut.",
            where="pipeline",
            do="name the modules at which a stage begins in pipeline.split_points, or write a PipelineModule.",
            code="pipeline-cut",
        )
    most = [name for name, (_, numel) in lists.items() if 2 * numel > total]
    name = max(most, key=lambda name: lists[name][0]) if most else max(lists, key=lambda name: lists[name][1])
    return ModelBlocks(name, tuple(model.get_submodule(name)._modules))


def split_at(model: nn.Module, split_points: Sequence[str]) -> tuple[ModelBlocks, tuple[int, ...]]:
    """The blocks that the names of a split are among, and the first block of each stage.

    Raises: ModelError: a name is not in the model, the names are not of one list, or not in its order.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    containers = {name.rpartition(".")[0] for name in split_points}
    for name in split_points:
        container = modules.get(name.rpartition(".")[0])
        if name not in modules or not isinstance(container, nn.ModuleList | nn.Sequential) or len(containers) > 1:
            what = "is no module of the model" if name not in modules else "is not in the one list that is cut"
            raise ModelError(
                f"split point {name!r} {what}.",
                where="pipeline.split_points",
                do="name blocks of one nn.ModuleList or nn.Sequential; the one with most parameters is "
                f"{find_blocks(model).container!r}.",
                code="pipeline-cut",
            )
    container_name = containers.pop()
    blocks = ModelBlocks(container_name, tuple(modules[container_name]._modules))
    starts = (0, *(blocks.names.index(name.rpartition(".")[2]) for name in split_points))
    if any(here >= after for here, after in pairwise(starts)):
        raise ModelError(
            f"split points {list(split_points)} begin at blocks {list(starts[1:])}, which do not ascend from 1.",
            where="pipeline.split_points",
            do="name each first block of the second and of later stages, once, in the order of the list.",
            code="pipeline-cut",
        )
    return blocks, starts


def find_beside(model: nn.Module, blocks: ModelBlocks, first: Iterable[str], last: Iterable[str]) -> Beside:
    """On which stage each module and parameter beside the blocks is.

    In this order: what the caller says; Transformers' pipeline plan; where the parent's ``forward`` calls it; where it
    is registered.

    Args:
        first, last: full names of modules and parameters that the first, the last stage calls; one may be in both.

    Raises: ModelError: a name of ``first`` or ``last`` is not beside the blocks.
    """
    said = {name: ["first"] for name in first}
    for name in last:
        said.setdefault(name, []).append("last")
    modules: dict[str, Side] = {}
    parameters: dict[str, Side] = {}
    for parent_name, on_path in blocks.ancestors:
        parent = model.get_submodule(parent_name)
        members = [(name, True) for name, child in parent._modules.items() if _has_parameters(child)]
        members += [(name, False) for name, value in parent._parameters.items() if value is not None]
        order = [*parent._parameters, *parent._modules]
        calls = _calls(type(parent).forward)
        plan = list(getattr(parent, "_pp_plan", None) or {})
        for name, is_module in members:
            if name == on_path:
                continue
            full = joined(parent_name, name)
            if full in said:
                kinds = said.pop(full)
                side: Side = "both" if len(kinds) > 1 else ("first" if kinds == ["first"] else "last")
            elif name in plan and on_path in plan:
                side = "first" if plan.index(name) < plan.index(on_path) else "last"
            elif name in calls and on_path in calls:
                is_before = min(calls[name]) < min(calls[on_path])
                is_after = max(calls[name]) > min(calls[on_path])
                side = "both" if is_before and is_after else ("first" if is_before else "last")
            else:
                side = "first" if order.index(name) < order.index(on_path) else "last"
            (modules if is_module else parameters)[full] = side
    if said:
        raise ModelError(
            f"{sorted(said)} are no modules with parameters beside the blocks {blocks.container!r}.",
            where="pipeline.first_stage, pipeline.last_stage",
            do=f"name some of {sorted({**modules, **parameters})}.",
            code="pipeline-cut",
        )
    return Beside(modules, parameters)


@cache
def _calls(forward: Callable[..., Any]) -> dict[str, list[tuple[int, int]]]:
    """Where ``forward`` calls its children, iterates over them or passes their parameters, by the child's name."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, list[tuple[int, int]]] = {}
    for node in ast.walk(tree):
        used: Iterator[ast.AST] = iter(())
        if isinstance(node, ast.Call):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            owners = [v.value for v in (node.func, *values) if isinstance(v, ast.Subscript)]
            owners += [v.value for v in values if isinstance(v, ast.Attribute)]
            used = iter([node.func, *values, *owners])
        elif isinstance(node, ast.For):
            used = ast.walk(node.iter)
        elif isinstance(node, ast.BinOp):
            used = iter([node.left, node.right])
        for value in used:
            if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
                found.setdefault(value.attr, []).append((value.lineno, value.col_offset))
    return found


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def _numel(module: nn.Module, aside: set[int]) -> int:
    return sum(p.numel() for p in module.parameters() if id(p) not in aside)


