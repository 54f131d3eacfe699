"""What each unit of a model will consist of, before it has memory: groups of parameters, their rows and layouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal.build.settings import Precision, ZeroSettings
from shoal.comm.formats import Cast
from shoal.offload.policy import Tiers
from shoal.sharding.axes import Axes, GroupAxes
from shoal.sharding.layout import BufferLayout, ParameterSpec, lay_out
from shoal.sharding.memory_model import GroupMemory, UnitMemory
from shoal.sharding.partition import UnitSpec, partition
from shoal.sharding.table import Row, Sent, row_of_stage
from shoal.sharding.unit import IfUsed


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
            has_own_main=precision.has_wider_main(self.dtype) or self.row.needs_main,
            state_dtype=precision.state,
            is_state_encoded=precision.state_format is not None,
        )


@dataclass(frozen=True)
class UnitPlan:
    """A unit before it has memory."""

    spec: UnitSpec
    groups: Sequence[GroupPlan]
    memory: UnitMemory  # with everything on the device

    def on(self, tiers: Tiers, *, is_gradient_offloaded: bool) -> UnitPlan:
        """The same unit on these tiers."""
        rows = [
            g.row.on(tiers.parameter, tiers.state, is_gradient_offloaded=is_gradient_offloaded) for g in self.groups
        ]
        return replace(self, groups=[replace(group, row=row) for group, row in zip(self.groups, rows, strict=True)])


@dataclass(frozen=True)
class BuildPlan:
    """What each unit consists of, on which ranks, in which dtypes."""

    parameters: Mapping[str, nn.Parameter]
    group_of: Mapping[int, int]  # the optimizer's group by ``id`` of a parameter
    settings: ZeroSettings
    precision: Precision
    axes: Axes
    spec_of: Mapping[str, ParameterSpec]  # by name in this rank's model
    if_used: Mapping[str, IfUsed]  # by name of a module
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
        specs: Mapping[str, ParameterSpec],
        *,
        if_used: Mapping[str, IfUsed] | None = None,
        sparse: Collection[int] | None = None,
    ) -> BuildPlan:
        """The plan of a model. Args: as of ``build``; ``group_of``: the optimizer's group by ``id`` of a parameter."""
        parameters = dict(model.named_parameters())
        spec_of = {n: specs.get(n) or ParameterSpec.whole(n, tuple(p.shape)) for n, p in parameters.items()}
        sizes = {id(parameter): mean_size(spec_of[name], axes) for name, parameter in parameters.items()}
        keeps_rows = frozenset(name for name, p in parameters.items() if p.dim() == 2 and id(p) in (sparse or ()))
        sends_rows = sparse_names(model, takes_all=settings.sparse_gradients) | keeps_rows
        return cls(
            parameters, group_of, settings, precision, axes, spec_of, if_used or {}, sizes, sends_rows, keeps_rows
        )

    def units(self, model: nn.Module) -> list[UnitPlan]:
        """The units of the model. A pipeline stage may be a function only: then there are none."""
        if not self.parameters:
            return []
        if_used = {name: each.module for name, each in self.if_used.items()}
        of_root = [name for name in self.parameters if self._crosses_units(name)]
        planned = []
        for spec in partition(model, self.settings.rules, self.sizes, of_root=of_root, if_used=if_used):
            groups = self._groups_of(spec)
            memory = UnitMemory.of(spec.name, [group.memory(self.precision) for group in groups])
            planned.append(UnitPlan(spec, groups, memory))
        return planned

    def _crosses_units(self, name: str) -> bool:
        return self.axes.crosses_units(self.spec_of[name])

    def is_trained(self, name: str) -> bool:
        parameter = self.parameters[name]
        return parameter.requires_grad and id(parameter) in self.group_of

    def _groups_of(self, spec: UnitSpec) -> list[GroupPlan]:
        """The unit's parameters by axes, dtype, trainability and reduce dtype, in buffers of at most
        ``max_bucket_numel`` elements (but at least one parameter). One whose gradient is sent as rows has a group of
        its own, and so has one with copies on ranks that have other units: these come last, in one order on all ranks.
        """
        groups = []
        for number, members in enumerate(self._split(spec)):
            first, is_trained = members[0], self.is_trained(members[0])
            axes = self.axes.of_group(self.spec_of[first], is_state_sharded=self.settings.stage > 0)
            is_dense = axes.shard == self.axes.dense.shard
            row = row_of_stage(
                self.settings.stage,
                spec.name,
                shard=axes.shard,
                replicate=axes.partial,
                has_second=self.settings.has_second and is_dense and not spec.is_gathered_if_used,
                is_persistent=spec.is_persistent,
            )
            num_outer_states = self.settings.num_outer_states if is_trained else 0
            sent = self._sent(spec, first, axes, is_trained=is_trained)
            row = replace(row, sent=sent, num_outer_states=num_outer_states)
            number_of = {name: self.group_of[id(self.parameters[name])] if is_trained else -1 for name in members}
            entries = {name: replace(self.spec_of[name], group=number_of[name]) for name in members}
            name_of = {spec.name: name for name, spec in entries.items()}
            layout = lay_out(list(entries.values()), num_shards=axes.comms[axes.shard].size)
            groups.append(
                GroupPlan(
                    first if axes.across else spec.name if number == 0 else f"{spec.name}#{number}",
                    row,
                    axes,
                    tuple(name_of[spec.name] for spec in layout.specs),
                    layout,
                    self.precision.of(self.parameters[first].dtype),
                    is_trained,
                    sends_rows=is_trained and first in self.sends_rows,
                    keeps_rows=is_trained and first in self.keeps_rows,
                )
            )
        return groups

    def _sent(self, spec: UnitSpec, first: str, axes: GroupAxes, *, is_trained: bool) -> Sent:
        """In which formats a group is sent. Parameters that stay whole at stage 3, and rows, are sent as they are."""
        wire = self.settings.wire
        gather, reduce = wire.of_unit(spec.name, is_trained=is_trained)
        if gather is None and self.settings.stage == 3 and (dtype := self.precision.sent_dtypes.get(first)) is not None:
            gather = Cast(dtype)
        if spec.is_persistent or not self.precision.of(self.parameters[first].dtype).is_floating_point:
            gather = None
        names = self.axes.data_axes(self.spec_of[first])
        formats = {axes.shard: reduce, names.replicate: wire.between or reduce}
        if not is_trained or first in self.sends_rows:
            formats = {}
        return Sent(
            gather,
            wire.is_difference and gather is not None,
            tuple((name, each) for name, each in formats.items() if each is not None and name in axes.comms),
            wire.between,
            has_error=wire.has_error,
            error_decay=wire.error_decay,
            is_local=wire.is_local and is_trained,
        )

    def _split(self, spec: UnitSpec) -> list[list[str]]:
        kinds: dict[object, list[list[str]]] = {}
        limit = self.settings.max_bucket_numel
        for name in sorted(spec.parameters, key=lambda name: name if self._crosses_units(name) else ""):
            parameter, is_trained = self.parameters[name], self.is_trained(name)
            sent = self.precision.sent_dtypes.get(name)
            own = name if self._crosses_units(name) or (is_trained and name in self.sends_rows) else None
            key = self.precision.of(parameter.dtype), is_trained, sent, own, self.spec_of[name].axes
            parts = kinds.setdefault(key, [[]])
            numel = sum(self.sizes[id(self.parameters[member])] for member in parts[-1])
            if parts[-1] and limit is not None and numel + self.sizes[id(parameter)] > limit:
                parts.append([])
            parts[-1].append(name)
        return [part for parts in kinds.values() for part in parts]


def mean_size(spec: ParameterSpec, axes: Axes) -> int:
    """The elements of a parameter; of a part, the mean over the ranks, which is the same on all.

    Ranks whose parts differ in size so get the same units and groups: groups of whole parameters communicate over the
    axis.
    """
    return next((-(-spec.global_numel // axes.comms[axis].size) for axis in spec.split_over), spec.numel)


def sparse_names(model: nn.Module, *, takes_all: bool) -> frozenset[str]:
    """The names of the trained weights, as ``named_parameters`` has them, whose gradients are sent as rows:
    those of embeddings that were made with ``sparse=True``, or of all.

    Args:
        takes_all: every embedding's; else those of embeddings with ``sparse=True``.
    """
    weights = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and (takes_all or module.sparse)
        and module.weight.requires_grad
    }
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in weights)
