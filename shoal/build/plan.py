"""What each unit of a model will consist of, before it has memory: groups of parameters, their rows and layouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from shoal.comm.protocol import Communicator
from shoal.mesh import Mesh
from shoal.parallel.expert.held import ExpertsHeld, modules_with_experts
from shoal.sharding.layout import BufferLayout, ParameterSpec, lay_out
from shoal.sharding.memory_model import GroupMemory
from shoal.sharding.layout import Used
from shoal.sharding.partition import UnitSpec, partition
from shoal.sharding.sparse_sum import sparse_names
from shoal.sharding.table import Row, row_of_stage
from shoal.build.settings import Precision, ZeroSettings
from shoal.sharding.axes import Axes, ExpertAxis, GroupAxes


@dataclass(frozen=True)
class ModuleAsBuilt:
    """A module of a model before it was cut into stages, with its children and its parameters of the meta device."""

    name: str
    module: nn.Module
    children: Mapping[str, nn.Module | None]
    parameters: Mapping[str, nn.Parameter]

    @classmethod
    def of(cls, name: str, module: nn.Module) -> ModuleAsBuilt:
        parameters = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
        return cls(name, module, dict(module._modules), parameters)


@dataclass(frozen=True)
class ModelParts:
    """What a rank of a tensor-parallel, expert-parallel or pipeline axis holds of the model.

    Args:
        local: by name, the parameters of which each rank along ``tp`` (of experts: along ``ep``) holds another part, or
            that have another name in the whole model.
        experts: by name, the parameters of experts, and the axis along which ranks hold parts of one tensor: each
            rank along ``ep`` holds other experts.
        folded: names of parameters of experts that are split over ``etp``, a part of ``tp``: of those that are not
            divided, ranks along ``tp_fold`` hold the same.
        partial: names of parameters that all of them hold, and of whose gradient each has a summand.
        tied: by name, the pipeline stages that hold copies of a parameter, each with a summand of its gradient.
        whole: the modules of the whole model, of which this is a pipeline stage, the model first; none where no
            parameter came on the meta device.
    """

    local: Mapping[str, ParameterSpec] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    experts: Mapping[str, ExpertAxis] = field(default_factory=dict)
    folded: frozenset[str] = frozenset()
    tied: Mapping[str, Communicator] = field(default_factory=dict)
    whole: Sequence[ModuleAsBuilt] = ()

    def sizes(self, parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> dict[int, int]:
        """The elements of each parameter by ``id``; of a part, the mean over the ranks, which is the same on all.

        Ranks whose parts differ in size so get the same units and groups: groups of whole parameters communicate over
        the axis.
        """
        split = {name: spec for name, spec in self.local.items() if self.experts.get(name, "etp") == "etp"}
        of_experts = self.folded | self.experts.keys()
        ranks = {name: mesh.etp if name in of_experts else mesh.tp for name in split}
        means = {name: -(-spec.global_numel // ranks[name]) for name, spec in split.items()}
        return {id(parameter): means.get(name, parameter.numel()) for name, parameter in parameters.items()}


@dataclass(frozen=True)
class GroupPlan:
    """A parameter group before it has memory."""

    label: str
    row: Row
    axes: GroupAxes
    names: tuple[str, ...]  # of its parameters in this rank's model, in the layout's order
    layout: BufferLayout
    dtype: torch.dtype
    is_trained: bool
    sends_rows: bool  # its one parameter is an embedding whose gradient is sent as rows
    keeps_rows: bool  # and whose optimizer takes that as a sparse tensor

    def memory(self, precision: Precision) -> GroupMemory:
        return GroupMemory(
            self.layout,
            self.row,
            self.dtype,
            is_trained=self.is_trained,
            main_dtype=precision.main_of(self.dtype),
            gradient_dtype=precision.gradient.accumulate_dtype or self.dtype,
            has_own_main=precision.has_wider_main(self.dtype),
            state_dtype=precision.state,
        )


@dataclass(frozen=True)
class BuildPlan:
    """What each unit consists of, on which ranks, in which dtypes."""

    parameters: Mapping[str, nn.Parameter]
    group_of: Mapping[int, int]  # the optimizer's group by ``id`` of a parameter
    settings: ZeroSettings
    precision: Precision
    axes: Axes
    parts: ModelParts
    sizes: Mapping[int, int]  # elements by ``id`` of a parameter, the same on all ranks
    sends_rows: frozenset[str]  # names of parameters
    keeps_rows: frozenset[str]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        group_of: Mapping[int, int],
        settings: ZeroSettings,
        precision: Precision,
        axes: Axes,
        parts: ModelParts,
        sparse: Collection[int] | None = None,
    ) -> BuildPlan:
        """The plan of a model. Args: as of ``build``; ``group_of``: the optimizer's group by ``id`` of a parameter."""
        parameters = dict(model.named_parameters())
        sizes = parts.sizes(parameters, axes.mesh)
        keeps_rows = frozenset(name for name, p in parameters.items() if p.dim() == 2 and id(p) in (sparse or ()))
        sends_rows = sparse_names(model, takes_all=settings.sparse_gradients) | keeps_rows
        return cls(parameters, group_of, settings, precision, axes, parts, sizes, sends_rows, keeps_rows)

    def specs(self, model: nn.Module) -> list[UnitSpec]:
        """The units of the model. A pipeline stage may be a function only: then there are none."""
        if not self.parameters:
            return []
        if_used = {}
        if self.settings.gathers_if_used:
            if_used = {name: experts.module for name, experts in experts_if_used(model).items()}
        return partition(model, self.settings.rules, self.sizes, of_root=self.parts.tied, if_used=if_used)

    def is_trained(self, name: str) -> bool:
        parameter = self.parameters[name]
        return parameter.requires_grad and id(parameter) in self.group_of

    def groups_of(self, spec: UnitSpec) -> list[GroupPlan]:
        """The unit's parameters by axes, dtype, trainability and reduce dtype, in buffers of at most
        ``max_bucket_numel`` elements (but at least one parameter). One whose gradient is sent as rows, or that is tied
        over pipeline stages, has a group of its own: the tied ones come last, in one order on all stages.
        """
        found = []
        for number, members in enumerate(self._split(spec)):
            first, is_trained = members[0], self.is_trained(members[0])
            axes = self.axes.of_group(
                is_split=first in self.parts.local,
                is_partial=first in self.parts.partial,
                is_state_sharded=self.settings.stage > 0,
                tied=self.parts.tied.get(first),
                expert=self.parts.experts.get(first),
                is_folded=first in self.parts.folded,
            )
            row = row_of_stage(
                self.settings.stage,
                spec.name,
                shard=axes.shard,
                replicate=axes.partial,
                has_hpz=self.settings.has_hpz and first not in self.parts.experts and not spec.is_gathered_if_used,
                is_persistent=spec.is_persistent,
            )
            entries = {
                name: self._spec(name, self.group_of.get(id(self.parameters[name]), -1) if is_trained else -1)
                for name in members
            }
            name_of = {spec.name: name for name, spec in entries.items()}
            layout = lay_out(list(entries.values()), num_shards=axes.comms[axes.shard].size)
            found.append(
                GroupPlan(
                    first if first in self.parts.tied else spec.name if number == 0 else f"{spec.name}#{number}",
                    row,
                    axes,
                    tuple(name_of[spec.name] for spec in layout.specs),
                    layout,
                    self.precision.of(self.parameters[first]),
                    is_trained,
                    sends_rows=is_trained and first in self.sends_rows,
                    keeps_rows=is_trained and first in self.keeps_rows,
                )
            )
        return found

    def _spec(self, name: str, group: int) -> ParameterSpec:
        spec = self.parts.local.get(name) or ParameterSpec.whole(name, tuple(self.parameters[name].shape))
        return replace(spec, group=group)

    def _split(self, spec: UnitSpec) -> list[list[str]]:
        kinds: dict[object, list[list[str]]] = {}
        limit = self.settings.max_bucket_numel
        for name in sorted(spec.parameters, key=lambda name: name if name in self.parts.tied else ""):
            parameter, is_trained = self.parameters[name], self.is_trained(name)
            sent = self.precision.reduce_dtypes.get(name) if is_trained else None
            own = name if name in self.parts.tied or (is_trained and name in self.sends_rows) else None
            names = self.parts.local, self.parts.partial, self.parts.folded
            axes = self.parts.experts.get(name), *(name in each for each in names)
            parts = kinds.setdefault((self.precision.of(parameter), is_trained, sent, own, axes), [[]])
            numel = sum(self.sizes[id(self.parameters[member])] for member in parts[-1])
            if parts[-1] and limit is not None and numel + self.sizes[id(parameter)] > limit:
                parts.append([])
            parts[-1].append(name)
        return [part for parts in kinds.values() for part in parts]


@dataclass(frozen=True)
class ExpertsIfUsed:
    """Experts whose parameters can be gathered if a token uses them.

    Args:
        module: the name of the module whose forward needs them.
        place: of one expert of a list; None: they are stacked.
    """

    held: ExpertsHeld
    module: str
    place: int | None = None

    def used(self) -> Used | None:
        """For each of them, True if the forward that runs uses it. None: they do not run."""
        return None if self.held.usage is None else self.held.usage.used(self.place)


def experts_if_used(model: nn.Module) -> dict[str, ExpertsIfUsed]:
    """By name, each expert of a list, and all experts of a stack, that need no parameters for an input without rows.

    Those that compute parameters from others before their forward (weight norm) need them.
    """
    found: dict[str, ExpertsIfUsed] = {}
    for name, module, held in modules_with_experts(model):
        if held.stack is None and isinstance(module, nn.ModuleList):
            for place, expert in enumerate(module):
                if _needs_no_parameters(expert):
                    found[f"{name}.{place}"] = ExpertsIfUsed(held, f"{name}.{place}", place)
        elif held.stack and held.stack.compute_name is not None and _needs_no_parameters(module):
            num_rows = held.num_local * held.stack.rows
            if all(parameter.shape[:1] == (num_rows,) for parameter in module.parameters()):
                found[name] = ExpertsIfUsed(held, ".".join(filter(None, (name, held.stack.compute_name))))
    return found


def _needs_no_parameters(experts: nn.Module) -> bool:
    return not any(is_parametrized(part) or part._forward_pre_hooks for part in experts.modules())
