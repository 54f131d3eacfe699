"""Cut any model into pipeline stages, without rewriting it.

    stage = cut(model, 4, stages_of_rank=(1,))        # model.layers.3 to .5 stay, the rest frees its memory
    sent = stage(1, received, {"input_ids": ..., "labels": ...})

Each stage runs the model's own forward on the micro-batch: masks, positions and rotations are computed on each stage
and never sent. Modules of other stages are replaced meanwhile (see ``stand_in.py`` and ``one_forward.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.errors import UsageError
from shoal.parallel.sequence.chunks import cuts
from shoal.parallel.tensor.hooks import running_from
from shoal.parallel.tensor.plan import join
from shoal.pipeline.blocks import (
    ModelBlocks,
    OutsideBlocks,
    Side,
    cut_error,
    find_blocks,
    find_outside,
    is_list,
    split_at,
)
from shoal.pipeline.costs import balance
from shoal.pipeline.left_behind import Learnt
from shoal.pipeline.one_forward import EndOfStage, OneForward, RecordedModule, RunningBlocks
from shoal.pipeline.stage import StageModule
from shoal.pipeline.stand_in import AbsentModule, StandIn, meta_copy, to_meta

Partition = Literal["best", "parameters", "uniform"]


def cut(
    model: nn.Module,
    num_stages: int,
    *,
    stages_of_rank: Sequence[int],
    starts: Sequence[int] | None = None,
    split_points: Sequence[str] | None = None,
    partition: Partition | Sequence[float] | Sequence[Sequence[float]] = "best",
    first_stage: Sequence[str] = (),
    last_stage: Sequence[str] = (),
    every_stage: Sequence[str] = (),
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
) -> CutModel:
    """Cut a model between its blocks, and keep this rank's stages.

    Args:
        model: changed in place; parameters may be on the meta device.
        num_stages: of the whole model, virtual ones included.
        stages_of_rank: the stages to keep.
        starts: the first block of each stage, ascending from 0. None: by ``partition``.
        split_points: names of the modules at which the second and later stages begin: of one list, or children of one
            module. None: the longest list of modules that holds most parameters is cut.
        partition: what stages have as equal a share of as possible. "parameters": those of blocks; "best": those of
            the modules outside the blocks, too; "uniform": the number of blocks; or a cost for each block; or
            those for each stage (see ``costs``).
        first_stage, last_stage, every_stage: names of modules and parameters outside the blocks that the first, the
            last, every stage calls, where Shoal takes them for another's; one may be in the first two.
        loss_fn: of the model's output and the labels. The batch is then (inputs, labels). None: the model's output
            holds the loss.

    Raises: ModelError: the model cannot be cut there.
    Memory: modules of other stages move to the meta device.
    """
    if split_points is not None:
        blocks, points = split_at(model, split_points)
        starts = points if starts is None else starts
    else:
        blocks = find_blocks(model)
    outside = find_outside(model, blocks, first_stage, last_stage, every_stage)
    bounds = cut_bounds(model, blocks, outside, num_stages, starts, partition)
    return CutModel(model, blocks, outside, bounds, tuple(sorted(stages_of_rank)), loss_fn)


def cut_bounds(
    model: nn.Module,
    blocks: ModelBlocks,
    outside: OutsideBlocks,
    num_stages: int,
    starts: Sequence[int] | None,
    partition: Partition | Sequence[float] | Sequence[Sequence[float]],
) -> tuple[int, ...]:
    """The first block of each stage, and the number of blocks. Args and Raises: as of ``cut``."""
    count = len(blocks.names)
    if not 1 <= num_stages <= count:
        raise cut_error(
            f"{num_stages} pipeline stages, but {type(model).__name__} has {count} blocks in {blocks.container!r}.",
            f"take 1 to {count} stages (virtual ones counted), or cut another list by pipeline.split_points.",
            where="pipeline.stages",
        )
    if starts is not None:
        bounds = (*starts, count)
        if len(starts) != num_stages or starts[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
            raise cut_error(
                f"{list(starts)} are not the first blocks of {num_stages} stages of {count} blocks.",
                f"give {num_stages} ascending numbers, from 0 to at most {count - 1}.",
            )
        return bounds
    if partition == "uniform":
        return tuple(cuts(count, num_stages))
    costs: list[Any]
    if isinstance(partition, str):
        costs = [float(_numel([model.get_submodule(blocks.name(block))])) for block in range(count)]
        if partition == "best":
            for stage, side in ((0, "first"), (-1, "last")):
                costs[stage] += _numel(_members(model, outside, (side, "both", "every")))
    else:
        costs = list(partition)
        rows = costs if costs and isinstance(costs[0], Sequence) else [costs] * num_stages
        is_finite = all(0 <= cost < float("inf") for row in rows for cost in row)
        if len(rows) != num_stages or any(len(row) != count for row in rows) or not is_finite:
            raise cut_error(
                f"{len(rows[0]) if rows else 0} costs {costs} for the {count} blocks of {blocks.container!r}.",
                f"give {count} numbers that are not negative.",
                where="pipeline.partition",
            )
    return tuple(balance(costs, num_stages))


def _members(model: nn.Module, outside: OutsideBlocks, sides: tuple[str, ...]) -> list[nn.Module | nn.Parameter]:
    modules = [model.get_submodule(name) for name, side in outside.modules.items() if side in sides]
    return [*modules, *(model.get_parameter(name) for name, side in outside.parameters.items() if side in sides)]


def _numel(members: Iterable[nn.Module | nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in _parameters(members).values())


def _parameters(members: Iterable[nn.Module | nn.Parameter]) -> dict[int, nn.Parameter]:
    owned = (member.parameters() if isinstance(member, nn.Module) else (member,) for member in members)
    return {id(parameter): parameter for parameters in owned for parameter in parameters}


@dataclass(frozen=True)
class Member:
    """A module or a parameter outside the blocks.

    Args:
        parent, key: the module that has it, and its name there.
        meta: it on the meta device, for stages that do not have it; None for a module that every stage of the rank has.
    """

    name: str
    side: Side
    parent: nn.Module
    key: str
    meta: Any


CUT_MODELS: WeakSet[nn.Module] = WeakSet()  # what a ``CutModel`` was made of: they hold this rank's stages


class CutModel(StageModule):
    """The stages of a model that this rank keeps. It shares the model's children and parameters, under their names.

    Attributes:
        whole_model: the model that was cut; its forward is the model's.
        starts: the first block of each stage.
        cut_blocks: the names of the blocks, of all stages.
        activation_checkpoint_interval: recompute so many blocks of a stage at a time in backward; 0: none.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: ModelBlocks,
        outside: OutsideBlocks,
        bounds: tuple[int, ...],
        stages: tuple[int, ...],
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    ) -> None:
        super().__init__()
        CUT_MODELS.add(model)
        # Names that no child of a model has. The model is in a tuple, since its children are this module's.
        self._cut_model = (model,)
        self.num_stages = len(bounds) - 1
        self.stages = stages
        self.cut_blocks = blocks
        self.starts = bounds[:-1]
        self._cut_bounds = bounds
        self._cut_loss = loss_fn
        self.activation_checkpoint_interval = 0
        self._cut_learnt = {stage: Learnt() for stage in stages}
        container = model.get_submodule(blocks.container)
        self._cut_modules = [container.get_submodule(name) for name in blocks.names]
        self._running_class: Any = type(f"Running{type(container).__name__}", (RunningBlocks, type(container)), {})

        canonical = {id(parameter): name for name, parameter in model.named_parameters()}
        by_stage = [_parameters(self._members_of(outside, stage)) for stage in range(self.num_stages)]
        self._cut_names = [[canonical[key] for key in owned] for owned in by_stage]
        holders: dict[str, list[int]] = {}
        for stage, names in enumerate(self._cut_names):
            for name in names:
                holders.setdefault(name, []).append(stage)
        self.tied = {name: tuple(held) for name, held in holders.items() if len(held) > 1}
        # A module of every stage may be an embedding of the tokens.
        self.reads_between = "values" if "every" in {**outside.modules, **outside.parameters}.values() else "form"
        self._cut_outside = self._drop(outside, {name for stage in stages for name in self._cut_names[stage]})
        for shared in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[shared] = model.__dict__[shared]
        self.training = model.training

    @property
    def whole_model(self) -> nn.Module:
        return self._cut_model[0]

    @property
    def own_blocks(self) -> list[str]:
        modules = dict(self.named_modules())
        names = (self.cut_blocks.name(block) for block in range(len(self.cut_blocks.names)))
        return [name for name in names if name in modules]

    @property
    def loss_model(self) -> nn.Module | None:
        return self.whole_model if self._cut_loss is None else None

    def train(self, mode: bool = True) -> CutModel:
        self.whole_model.train(mode)
        self.training = mode
        return self

    def cast_absent(self, dtype_of: Callable[[torch.dtype], torch.dtype]) -> None:
        for at, member in enumerate(self._cut_outside):
            if isinstance(member.meta, nn.Module):
                for parameter in member.meta.parameters():
                    if parameter.is_meta:
                        parameter.data = torch.empty_like(parameter, dtype=dtype_of(parameter.dtype))
            elif member.meta is not None:
                meta = torch.empty_like(member.meta, dtype=dtype_of(member.meta.dtype))
                self._cut_outside[at] = replace(member, meta=meta)

    def forward(self, stage: int, received: Any, batch: Any, **arguments: Any) -> Any:
        if batch is None:
            raise UsageError(
                f"pipeline stage {stage} has no micro-batch, but the model computes its masks and positions from it.",
                where="pipeline",
                do="give every rank the data iterator.",
                code="pipeline-batch",
            )
        inputs = batch if self._cut_loss is None else batch[0]
        if isinstance(self.whole_model, nn.Sequential) and isinstance(inputs, tuple | list) and len(inputs) > 1:
            raise UsageError(
                f"an nn.Sequential takes one argument and has no loss, and the micro-batch has {len(inputs)} parts.",
                where="pipeline",
                do="pass PipelineModule(model, loss_fn=...) to initialize(): its micro-batches are (inputs, labels).",
                code="pipeline-batch",
            )
        forward = self._begin(stage, received, inputs)
        begin, end = forward.begin, forward.end
        try:
            with running_from(self._container, begin), self._replaced(stage, forward, self._container) as model:
                if isinstance(inputs, Mapping):
                    output = model(**{**inputs, **arguments})
                else:
                    args = inputs if isinstance(inputs, tuple | list) else (inputs,)
                    output = model(*args, **arguments)
        except EndOfStage as ended:
            return ended.message
        finally:
            forward.finish()
        if end < len(self._cut_modules) or not forward.has_begun:
            raise cut_error(
                f"the model's forward ended on pipeline stage {stage} without a call of block "
                f"{self.cut_blocks.name(end if end < len(self._cut_modules) else begin)!r}.",
                "cut a list whose blocks the model calls in each forward, by pipeline.split_points.",
            )
        return output

    @property
    def _container(self) -> nn.Module:
        return self.whole_model.get_submodule(self.cut_blocks.container)

    def _begin(self, stage: int, received: Any, inputs: Any) -> OneForward:
        tensors = [leaf for leaf in tree_leaves((received, inputs)) if isinstance(leaf, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        begin, end = self._cut_bounds[stage : stage + 2]
        modules = [
            self._container.get_submodule(self.cut_blocks.names[at]) if begin <= at < end else block
            for at, block in enumerate(self._cut_modules)
        ]
        interval = self.activation_checkpoint_interval
        return OneForward(self.cut_blocks, modules, begin, end, received, device, interval, self._cut_learnt[stage])

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        if self._cut_loss is not None:
            stage = self.num_stages - 1
            ended = self._begin(stage, None, output)
            ended.finish()
            with self._replaced(stage, ended, self._container):  # the loss may read what blocks left behind
                return self._cut_loss(output, batch[1])
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            has = f"of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else "without one"
            raise UsageError(
                f"the output of {type(self.whole_model).__name__} is no loss: {type(output).__name__} {has}.",
                where="pipeline",
                do="give the batch labels, or wrap the model in PipelineModule(loss_fn=...).",
                code="pipeline-loss",
            )
        return loss.reshape(())

    def stage_parameters(self, stage: int) -> list[nn.Parameter]:
        parameters = dict(self.named_parameters())
        return [parameters[name] for name in self._cut_names[stage]]

    def _members_of(self, outside: OutsideBlocks, stage: int) -> list[nn.Module | nn.Parameter]:
        sides: tuple[Side, ...] = ("first", "last", "both", "every")
        here = tuple(side for side in sides if _is_on(side, stage, self.num_stages))
        begin, end = self._cut_bounds[stage : stage + 2]
        return [*self._cut_modules[begin:end], *_members(self.whole_model, outside, here)]

    def _drop(self, outside: OutsideBlocks, names: set[str]) -> list[Member]:
        """Keep the modules of this rank's stages, and the parameters with these names; move the rest to meta."""
        model, blocks = self.whole_model, self.cut_blocks
        container = model.get_submodule(blocks.container)
        members = [member for stage in self.stages for member in self._members_of(outside, stage)]
        modules = {name: model.get_submodule(name) for name in outside.modules}
        modules |= {blocks.name(at): block for at, block in enumerate(self._cut_modules)}
        on_this_rank = {id(member) for member in members}
        stay = {
            name: module if id(module) in on_this_rank else _shell(module, name, names)
            for name, module in modules.items()
        }
        kept = {id(part) for module in stay.values() if module is not None for part in module.modules()}

        for at, block in enumerate(self._cut_modules):
            _set(container, blocks.names[at], stay[blocks.name(at)])
            if id(block) not in kept:
                to_meta(block, kept)
        others = []
        for name, side in outside.modules.items():
            module, stays = modules[name], stay[name]
            parent = model.get_submodule(name.rpartition(".")[0])
            key = name.rpartition(".")[2]
            parent._modules[key] = AbsentModule() if stays is None else stays
            meta = None
            if not all(_is_on(side, stage, self.num_stages) for stage in self.stages):
                meta = module
                if any(id(part) in kept for part in module.modules()):
                    meta = meta_copy(module)
                else:
                    to_meta(module, kept)
            others.append(Member(name, side, parent, key, meta))
        for name, side in outside.parameters.items():
            parent, key = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            parameter = model.get_parameter(name)
            others.append(Member(name, side, parent, key, torch.empty_like(parameter, device="meta")))
            if id(parameter) not in on_this_rank and name not in names:
                parent._parameters[key] = None
        return others

    @contextmanager
    def _replaced(self, stage: int, forward: OneForward, container: nn.Module) -> Iterator[nn.Module]:
        """The model as one stage runs it."""
        before: list[tuple[dict[str, Any], str, Any]] = []

        def replace(table: dict[str, Any], key: str, value: Any) -> None:
            before.append((table, key, table.get(key)))
            table[key] = value

        for member in self._cut_outside:
            parent: Any = member.parent
            is_module = not isinstance(member.meta, torch.Tensor)
            if _is_on(member.side, stage, self.num_stages):
                if is_module and stage < self.num_stages - 1:
                    replace(
                        parent._modules, member.key, RecordedModule(parent._modules[member.key], member.name, forward)
                    )
            elif is_module:
                check = partial(forward.check_outside, member.name, member.side)
                receive = partial(forward.receive_outside, member.name)
                stand_in = StandIn(member.meta, repr(member.name), check, receive, forward.guard)
                replace(parent._modules, member.key, stand_in)
            else:
                replace(parent.__dict__, member.key, forward.guard(member.meta, of=repr(member.name)))
        model, name = self.whole_model, self.cut_blocks.container
        if is_list(container):
            view = object.__new__(self._running_class)
            view.__dict__.update(container.__dict__)
            view.__dict__["_forward"] = forward
            if stage == self.num_stages - 1:  # the loss may search all blocks for what they left behind
                view.__dict__["_modules"] = dict(zip(self.cut_blocks.names, forward.modules, strict=True))
            if name:
                replace(model.get_submodule(name.rpartition(".")[0])._modules, name.rpartition(".")[2], view)
            else:
                model = view
        else:
            for at, block in enumerate(self.cut_blocks.names):
                replace(container._modules, block, forward.block(at))
        try:
            yield model
        finally:
            for table, key, value in reversed(before):
                if value is None:
                    del table[key]
                else:
                    table[key] = value


def _is_on(side: Side, stage: int, num_stages: int) -> bool:
    if side == "every":
        return True
    return (stage == 0 and side != "last") or (stage == num_stages - 1 and side != "first")


def _set(container: nn.Module, key: str, module: nn.Module | None) -> None:
    if module is None:
        del container._modules[key]
    else:
        container._modules[key] = module


def _shell(module: nn.Module, name: str, names: set[str]) -> nn.Module | None:
    """A module with those parameters that have one of ``names``, under their names; None without one."""
    owned = {parameter for parameter, _ in module.named_parameters(name)}
    if not owned & names:
        return None
    if owned <= names:
        return module
    shell = nn.Module()
    for key, parameter in module._parameters.items():
        if join(name, key) in names:
            shell.register_parameter(key, parameter)
    for key, child in module._modules.items():
        part = None if child is None else _shell(child, join(name, key), names)
        if part is not None:
            shell.add_module(key, part)
    return shell
