"""Shards a model: partitions it into units, fills in the table, moves every parameter into its buffer, unit by unit.

Peak memory while it runs: what is stored on this rank, and one unit whole. The model's own copy is freed as each unit
is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from shoal.build.materialize import Materializer, buffer_formats
from shoal.build.plan import BuildPlan, GroupPlan, ModuleAsBuilt
from shoal.build.settings import Precision, ZeroSettings
from shoal.comm.protocol import Communicator
from shoal.comm.two_level import TwoLevels
from shoal.device import host_empty
from shoal.errors import ModelError, OptimizerError
from shoal.memory.stream_copies import StreamCopies, copies_of
from shoal.offload.disk_state import Disks, DiskStorage
from shoal.offload.policy import Decide, Tiers
from shoal.running.order import UnitOrder
from shoal.running.runtime import ShardedModel
from shoal.sharding.axes import Axes
from shoal.sharding.buffer import Axis, FlatBuffer
from shoal.sharding.copied_gather import HostStorage
from shoal.sharding.gradient import Gradient
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.memory_model import UnitMemory
from shoal.sharding.offloaded_gradient import MAX_SHARDS, OffloadedGradient, ShardBuffers
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import SHARD, Placement, Tier
from shoal.sharding.second_shard import SecondShard
from shoal.sharding.shown_gradient import ShownGradient
from shoal.sharding.sparse_gradient import SparseGradient
from shoal.sharding.sparse_sum import SparseSum
from shoal.sharding.staging import StagingBuffers
from shoal.sharding.storage import DeviceStorage, ShardStorage
from shoal.sharding.unit import IfUsed, LiveNumel, Unit
from shoal.streams import MemoryPool, name_memory
from shoal.text import counted, listed


def group_index(model: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> dict[int, int]:
    """The optimizer group of each parameter, by ``id``.

    Raises: OptimizerError: a parameter in two groups, or one that is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    index_of: dict[int, int] = {}
    problems = []
    for index, group in enumerate(groups):
        for position, parameter in enumerate(group):
            name = names.get(id(parameter))
            if name is None:
                problems.append(
                    f"group {index} holds a parameter (position {position}, shape {tuple(parameter.shape)})"
                    " that is not in the model"
                )
            elif id(parameter) in index_of:
                problems.append(f"parameter {name!r} is in group {index_of[id(parameter)]} and again in group {index}")
            else:
                index_of[id(parameter)] = index
    if problems:
        raise OptimizerError(
            f"{listed(problems)}.",
            do="put each parameter of the model into exactly one group.",
            code="optimizer-groups",
        )
    return index_of


def _check_real(model: nn.Module, group_of: Mapping[int, int]) -> None:
    """Raises: ModelError: a parameter that is to be trained is complex."""
    numbers = [
        name for name, p in model.named_parameters() if id(p) in group_of and p.requires_grad and p.dtype.is_complex
    ]
    if numbers:
        raise ModelError(
            f"{counted(len(numbers), 'complex parameter')} to be trained: {listed(numbers)}.",
            do="keep them real, with one more dimension of 2, and take torch.view_as_complex() in the forward.",
            code="model-complex",
        )


def build(
    model: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    settings: ZeroSettings,
    precision: Precision,
    axes: Axes,
    device: torch.device,
    on_backward: Callable[[], bool],
    *,
    decide: Decide | None = None,
    open_disks: Callable[[int, int], Disks] | None = None,
    sparse: Collection[int] | None = None,
    specs: Mapping[str, ParameterSpec] | None = None,
    whole: Sequence[ModuleAsBuilt] = (),
    if_used: Mapping[str, IfUsed] | None = None,
    levels: Mapping[str, TwoLevels] | None = None,
) -> ShardedModel:
    """Shard ``model`` in place.

    Args:
        groups: the optimizer's parameter groups; a parameter in none of them is not trained.
        sparse: None: the optimizer steps ranges of flat main parameters. Else it steps the model's own parameters
            (stage 0 only), and sees the gradients of those with these ``id`` as sparse tensors.
        decide: the tiers of each unit; None: as the settings say.
        specs: by name, the parameters along whose axes ranks hold other than data-parallel copies. Of others the
            whole.
        whole: the modules of the whole model, the model first, where ``model`` is a part of it whose parameters came on
            the meta device.
        if_used: by name, modules that become units which are gathered if they are used.
        levels: by the name in the rows, axes along which parameters and gradients move in two levels.
        open_disks: given the bytes of this rank's parameters and state that are stored on disks, opens the disks.

    Raises: OutOfMemoryError, TierError: a tier cannot hold what is stored there. The disks that were opened are closed.
        ModelError: the model cannot be partitioned into units, or a trained parameter is complex.
    Communicates: rank 0's values of every parameter and buffer are broadcast, unit by unit; parameters that are
        sharded already are all-gathered in place of that.
    """
    group_of = group_index(model, groups)
    _check_real(model, group_of)
    modules = dict(model.named_modules())
    plan = BuildPlan.of(model, group_of, settings, precision, axes, specs or {}, if_used=if_used, sparse=sparse)
    units = plan.units(model)
    sizes = [unit.memory for unit in units]
    tiers = (decide or settings.tiers)(sizes)
    units = [
        unit.on(on, is_gradient_offloaded=settings.is_offloaded(on.state, device))
        for unit, on in zip(units, tiers, strict=True)
    ]
    groups_planned = [group for unit in units for group in unit.groups]
    disks = _open(sizes, tiers, open_disks)
    is_sharded = any(group.row.parameter.is_sharded for group in groups_planned)
    materializer = Materializer(model, device, axes, plan.spec_of, is_sharded=is_sharded, whole=whole)
    copies = copies_of(device) if any(on.parameter is not Tier.DEVICE for on in tiers) else None
    shard_comms = {group.axes.shard: group.axes.comms[group.axes.shard] for group in groups_planned}
    pools = _pools(shard_comms.values(), device, settings)
    staging = {name: StagingBuffers(comm, device, pool=pools.get(comm)) for name, comm in shard_comms.items()}
    builder = _Builder(plan, device, staging, materializer, disks, {}, copies, sparse is not None, levels or {})
    filled_last = [max(materializer.positions[name] for name in unit.spec.parameters) for unit in units]
    built: dict[int, Unit] = {}
    live = LiveNumel()
    try:
        for index in sorted(range(len(units)), key=filled_last.__getitem__):
            spec = units[index].spec
            parameter_groups = [builder.group(group) for group in units[index].groups]
            used = plan.if_used[spec.name] if spec.is_gathered_if_used else None
            if used is not None:
                used.start(parameter_groups[0].buffer.comm)
            built[index] = Unit(spec.name, index, parameter_groups, if_used=used, live=live)
            built[index].release()
    except BaseException:
        disks.close()
        raise
    materializer.finish(buffer_formats(model, precision.parameter, precision.buffer, precision.fp32_buffers))
    return ShardedModel(
        model,
        [built[index] for index in range(len(units))],
        {unit.spec.name: [modules[name] for name in unit.spec.modules] for unit in units},
        axes,
        (*staging.values(), *builder.shards.values()),
        UnitOrder(
            live,
            prefetch_numel=settings.prefetch_numel,
            max_live_numel=_max_live_numel(settings, built.values()),
            max_reuse_numel=settings.max_reuse_numel,
        ),
        has_overlap=settings.has_overlap,
        device=device,
        on_backward=on_backward,
        disks=disks,
        sparse_names=plan.sends_rows,
        sharded_at_init=frozenset(materializer.sharded_at_init),
    )


def _pools(
    comms: Iterable[Communicator], device: torch.device, settings: ZeroSettings
) -> dict[Communicator, MemoryPool | None]:
    """For each communicator, where the buffers that it gathers and reduces are allocated; None: with all other memory.

    One for each: a segment is registered with one communicator alone, so that ranks register in the same order.
    """
    if not settings.registers_memory:
        return {}
    is_symmetric = settings.registers_memory == "symmetric"
    return {comm: comm.backend.new_pool(device, is_symmetric=is_symmetric) for comm in comms}


def _max_live_numel(settings: ZeroSettings, units: Iterable[Unit]) -> int:
    if settings.max_live_numel is not None:
        return settings.max_live_numel
    return max([_MAX_LIVE_NUMEL, *(unit.numel for unit in units)])


def _open(sizes: Sequence[UnitMemory], tiers: Sequence[Tiers], open_disks: Callable[[int, int], Disks] | None) -> Disks:
    both = list(zip(sizes, tiers, strict=True))
    parameter_nbytes = sum(size.parameter_nbytes for size, on in both if on.parameter is Tier.DISK)
    state_nbytes = sum(size.offloaded_state_nbytes for size, on in both if on.state is Tier.DISK)
    return Disks() if open_disks is None else open_disks(parameter_nbytes, state_nbytes)


_MAX_LIVE_NUMEL = 1_000_000_000  # DeepSpeed's default


@dataclass(frozen=True)
class _Builder:
    """Gives parameter groups their memory, and fills it."""

    plan: BuildPlan
    device: torch.device
    staging: Mapping[str, StagingBuffers]  # by the axis that shards
    materializer: Materializer
    disks: Disks
    shards: dict[str, ShardBuffers]  # of offloaded gradients, by the axis that shards
    copies: StreamCopies | None  # of offloaded parameters, to the device
    has_direct_step: bool  # the optimizer steps the model's own parameters
    levels: Mapping[str, TwoLevels]  # axes in two levels, by name

    def _axes(self, comms: Mapping[str, Communicator]) -> dict[str, Axis]:
        """What moves a buffer along each axis."""
        levels = {name: axis for name, axis in self.levels.items() if name in comms and axis.comm is comms[name]}
        return {**comms, **levels}

    def group(self, planned: GroupPlan) -> ParameterGroup:
        settings, precision, axes, row = self.plan.settings, self.plan.precision, planned.axes, planned.row
        is_state_offloaded = settings.is_offloaded(row.state.tier, self.device)
        parameters = [self.plan.parameters[name] for name in planned.names]
        buffer = self._buffer(planned)
        values = self._fill(buffer, planned, parameters)
        group = partial(ParameterGroup, row, axes, buffer, parameters, second=self._second(planned, buffer))
        if not planned.is_trained:
            buffer.storage.unpin()
            return group()
        is_wider = precision.has_wider_main(planned.dtype) or row.needs_main
        main_buffer = buffer
        if is_wider or row.parameter.tier is Tier.DISK or is_state_offloaded != buffer.is_offloaded:
            main_buffer = self._main_buffer(planned, buffer, values, is_offloaded=is_state_offloaded)
        buffer.storage.unpin()
        gradient = self._gradient(planned, buffer, parameters, is_state_offloaded=is_state_offloaded)
        return group(gradient, main_buffer, is_state_offloaded=is_state_offloaded)

    def _buffer(self, planned: GroupPlan) -> FlatBuffer:
        """The parameters' buffer: whole and zero, in the placement that is stored."""
        settings, axes, row = self.plan.settings, planned.axes, planned.row
        comm, layout, dtype, label = axes.comms[axes.shard], planned.layout, planned.dtype, planned.label
        is_offloaded = row.parameter.tier is Tier.DISK or settings.is_offloaded(row.parameter.tier, self.device)
        is_sharded = row.parameter.is_sharded and (comm.size > 1 or is_offloaded)
        if is_sharded:
            full = torch.empty(layout.numel, dtype=dtype, device=self.device)
        else:
            full = comm.empty(layout.numel, dtype, self.device)
        full = name_memory(full, f"the parameters of unit {label!r}", "parameter").zero_()
        buffer = FlatBuffer(
            label,
            layout,
            dtype,
            self.device,
            comm,
            self._axes({axes.shard: comm}),
            row.parameter if is_sharded else Placement(),
            owned=Placement.of(**{axes.shard: SHARD}) if row.state.is_sharded else Placement(),
            full=full,
            pool=self.staging[axes.shard].pool,
        )
        buffer.assume(Placement())
        if is_sharded:
            buffer.storage = self._storage(planned, buffer.owned_numel, is_offloaded=is_offloaded)
            name_memory(buffer.shard, f"the stored shard of unit {label!r}", "parameter")
        return buffer

    def _storage(self, planned: GroupPlan, numel: int, *, is_offloaded: bool) -> ShardStorage:
        dtype, comm = planned.dtype, planned.axes.comms[planned.axes.shard]
        if planned.row.parameter.tier is Tier.DISK and self.disks.parameters is not None:
            return DiskStorage(self.disks.parameters, planned.label, numel, dtype, self.copies)
        if is_offloaded:
            values = host_empty(numel, dtype, self.device, is_pinned=self.plan.settings.pins_parameters)
            return HostStorage(values, self.copies)
        return DeviceStorage(comm.empty(numel, dtype, self.device))

    def _main_buffer(
        self, planned: GroupPlan, buffer: FlatBuffer, values: torch.Tensor, *, is_offloaded: bool
    ) -> FlatBuffer:
        """The buffer of main parameters that have memory of their own.

        On the host it is pageable memory: it is not copied to the device.
        """
        source, dtype = values[buffer.begin : buffer.end], self.plan.precision.main_of(planned.dtype)
        storage: ShardStorage
        if planned.row.state.tier is Tier.DISK and self.disks.state is not None:
            storage = self.disks.state.add(buffer, source, dtype)
        elif is_offloaded:
            storage = HostStorage(host_empty(source.numel(), dtype, source.device, is_pinned=False).copy_(source))
        else:
            main = name_memory(source.to(dtype, copy=True), f"the main parameters of unit {buffer.label!r}", "master")
            storage = DeviceStorage(main)
        placed = planned.row.state
        return FlatBuffer(
            buffer.label, buffer.layout, dtype, self.device, buffer.comm, buffer.axes, placed, storage=storage
        )

    def _second(self, planned: GroupPlan, buffer: FlatBuffer) -> SecondShard | None:
        comm = self.plan.axes.get("second")
        if comm is None or not planned.row.has_second:
            return None
        layout = replace(planned.layout, num_shards=comm.size)
        stored = Placement.of(second=SHARD)
        return SecondShard(buffer, planned.label, layout, planned.dtype, self.device, comm, {"second": comm}, stored)

    def _gradient(
        self, planned: GroupPlan, buffer: FlatBuffer, parameters: Sequence[nn.Parameter], *, is_state_offloaded: bool
    ) -> Gradient:
        precision, layout = self.plan.precision, planned.layout
        sum_dtype = None
        if precision.has_wider_main(planned.dtype) and precision.gradient.accumulate_dtype is None:
            sum_dtype = precision.main
        policy = precision.policy_of(planned.names[0])
        axes = self._axes(planned.axes.comms)
        staging = self.staging[planned.axes.shard]
        if planned.sends_rows and not planned.keeps_rows and buffer.comm.size > 1:
            axes[planned.axes.shard] = SparseSum(buffer.comm, *layout.specs[0].shape)
        is_alone = buffer.comm.size == 1 and len(axes) == 1
        is_offloaded = is_state_offloaded or buffer.is_offloaded
        kind: Callable[..., Gradient] = Gradient
        if planned.keeps_rows:
            kind = SparseGradient
        elif self.has_direct_step or (is_alone and planned.axes.data is self.plan.axes.data and not is_offloaded):
            kind = ShownGradient
        elif is_state_offloaded and planned.row.is_gradient_sharded:
            comm = buffer.comm
            shards = self.shards.setdefault(planned.axes.shard, ShardBuffers(self.device, MAX_SHARDS + (comm.size > 1)))
            kind = partial(OffloadedGradient, shards=shards)
        return kind(buffer, parameters, planned.row, policy, axes, staging, sum_dtype)

    def _fill(self, buffer: FlatBuffer, planned: GroupPlan, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Move the parameters' values into the buffer.

        The ranks along ``axes.copies`` have the same values, except of parameters that came from the meta device, which
        each rank has initialized.

        Communicates: a broadcast of the first rank's values over ``axes.data``; none where all of them were put
            together from the ranks' shards. Over ``axes.copies``, one of parameters that came from the meta device.
        Returns: the whole buffer in the widest dtype that a parameter came in, for the main parameters.
        """
        widest, axes = buffer.dtype, planned.axes
        for dtype in {parameter.dtype for parameter in parameters}:
            widest = torch.promote_types(widest, dtype) if dtype.is_floating_point else widest
        values = buffer.full
        if widest != buffer.dtype:
            values = torch.zeros(buffer.layout.numel, dtype=widest, device=buffer.full.device)
        are_alike = True  # on all ranks
        for spec, name, parameter in zip(buffer.layout.specs, planned.names, parameters, strict=True):
            target = values[spec.offset : spec.offset + spec.numel].view(spec.shape)
            are_alike &= self.materializer.copy_value(name, parameter, target)
        for parameter, view in zip(parameters, buffer.views, strict=True):
            parameter.data = view  # frees the model's own copy
        if not are_alike:
            self.materializer.transfer_over(axes.data).broadcast(values, buffer.label)
        came_as_meta = any(id(parameter) in self.materializer.came_as_meta for parameter in parameters)
        for comm in axes.copies if came_as_meta else ():
            comm.blocking.broadcast(values, 0, label=buffer.label)
        if values is not buffer.full:
            buffer.full.copy_(values)
        if buffer.is_sharded:
            buffer.shard.copy_(buffer.full[buffer.begin : buffer.end])
        return values
