"""Puts a model into units: cuts it, fills in the table, moves every parameter into its bucket, one unit at a time.

Peak memory while it runs: what rests on this rank, and one unit whole. The model's own copy goes as each unit is
filled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.device import host_empty
from shoal.errors import ModelError, OptimizerError
from shoal.memory.bucket import ParameterBucket
from shoal.memory.layout import BucketLayout, lay_out
from shoal.memory.placement import Kind, Tier
from shoal.memory.pool import Pool
from shoal.zero.bucket_state import BucketState
from shoal.zero.buffer_formats import buffer_formats
from shoal.zero.gradient import BucketGradient, Sums
from shoal.zero.materialize import Materializer
from shoal.zero.native import NativeGradient
from shoal.zero.partition import UnitSpec, cut
from shoal.zero.prefetch import UnitOrder
from shoal.zero.reducer import UnitGradient
from shoal.zero.row_gradient import RowGradient
from shoal.zero.rows import RowSum
from shoal.zero.runtime import ShardedModel
from shoal.zero.settings import Axes, Precision, ZeroSettings
from shoal.zero.shelf import Disks
from shoal.zero.shown import ShownGradient
from shoal.zero.sparse import row_names
from shoal.zero.table import Row, Table, row_of_stage
from shoal.zero.tiers import Decide, UnitSize
from shoal.zero.unit import Unit


def group_index(model: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> dict[int, int]:
    """The optimizer group of each parameter, by ``id``.

    Raises: OptimizerError: a parameter in two groups, or one that is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, int] = {}
    problems = []
    for index, group in enumerate(groups):
        for position, parameter in enumerate(group):
            name = names.get(id(parameter))
            if name is None:
                problems.append(
                    f"group {index} holds a parameter (position {position}, shape {tuple(parameter.shape)})"
                    " that is not in the model"
                )
            elif id(parameter) in found:
                problems.append(f"parameter {name!r} is in group {found[id(parameter)]} and again in group {index}")
            else:
                found[id(parameter)] = index
    if problems:
        raise OptimizerError(
            "; ".join(problems) + ".",
            do="hand each parameter of the model to exactly one group.",
            code="optimizer-groups",
        )
    return found


def _check_real(model: nn.Module, group_of: Mapping[int, int]) -> None:
    """Raises: ModelError: a parameter that is to be trained is complex."""
    numbers = [
        name for name, p in model.named_parameters() if id(p) in group_of and p.requires_grad and p.dtype.is_complex
    ]
    if numbers:
        raise ModelError(
            f"{len(numbers)} parameters that are to be trained are complex: {', '.join(numbers[:4])}"
            f"{' ...' if len(numbers) > 4 else ''}.",
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
) -> tuple[ShardedModel, list[BucketState]]:
    """Shard ``model`` in place.

    Args:
        groups: the optimizer's parameter groups; a parameter in none of them is not trained.
        sparse: None: the optimizer steps pieces of flat weights. Else it steps the model's own parameters (stage 0
            only), and sees the gradients of those with these ``id`` as sparse tensors.
        decide: the tier of each unit; None: as the settings ask.
        open_disks: given the bytes of this rank's parameters and state that rest on disks, finds room for them.

    Raises: OutOfMemoryError, TierError: a tier cannot hold what rests there. The disks that were opened are closed.
        ModelError: the model cannot be cut into units, or a trained parameter is complex.
    Communicates: rank 0's values of every parameter and buffer are broadcast, unit by unit; parameters that are
        sharded already are all-gathered in place of that.
    """
    group_of = group_index(model, groups)
    _check_real(model, group_of)
    specs = cut(model, settings.rules)
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    hybrid = axes.outer is not None and axes.outer.size > 1
    rows_of = row_names(model, takes_all=settings.sends_rows)
    kept = frozenset(name for name, p in parameters.items() if p.dim() == 2 and id(p) in (sparse or ()))
    tables = Tables(rows_of | kept, kept, has_direct_step=sparse is not None)
    drafts = [_Draft.of(spec, parameters, group_of, settings, precision, axes, tables, hybrid=hybrid) for spec in specs]
    sizes = [draft.size(precision) for draft in drafts]
    tiers = (decide or settings.as_asked)(sizes)
    for draft, found in zip(drafts, tiers, strict=True):
        draft.row = draft.row.on(found.parameter, found.state, is_gradient_apart=settings.is_apart(found.state, device))
    rows = [draft.row for draft in drafts]
    disks = _open(sizes, rows, open_disks)
    is_sharded = any(row.parameter.inner is Kind.SHARD for row in rows)
    materializer = Materializer(model, device, axes.all, is_sharded=is_sharded)
    pool = Pool(axes.inner, device)
    built: dict[str, tuple[Unit, list[BucketState]]] = {}
    filled_last = materializer.module_positions()
    order = sorted(range(len(specs)), key=lambda i: (max(filled_last[n] for n in specs[i].parameters), i))
    try:
        for index in order:
            built[specs[index].name] = _build_unit(
                drafts[index], index, parameters, settings, precision, axes, device, pool, materializer, disks, tables
            )
    except BaseException:
        disks.close()
        raise
    materializer.finish(buffer_formats(model, precision.parameter, precision.buffer, precision.wide_buffers))
    units = [built[spec.name][0] for spec in specs]
    states = [state for spec in specs for state in built[spec.name][1]]
    entries = [
        UnitGradient(unit, [state.gradient for state in built[unit.name][1]]) for unit in units if built[unit.name][1]
    ]
    sharded = ShardedModel(
        model,
        Table(tuple(rows)),
        units,
        entries,
        {spec.name: [modules[name] for name in spec.modules] for spec in specs},
        axes.all,
        pool,
        UnitOrder(prefetch_numel=settings.prefetch_numel, max_live_numel=settings.max_live_numel),
        max_reuse_numel=settings.max_reuse_numel,
        max_live_numel=settings.max_live_numel,
        has_overlap=settings.has_overlap,
        device=device,
        on_backward=on_backward,
        disks=disks,
    )
    sharded.sent_as_rows = tables.sent
    sharded.born_sharded = frozenset(materializer.born_sharded)
    return sharded, states


def _open(sizes: Sequence[UnitSize], rows: Sequence[Row], open_disks: Callable[[int, int], Disks] | None) -> Disks:
    both = list(zip(sizes, rows, strict=True))
    parameter_nbytes = sum(size.parameter_nbytes for size, row in both if row.parameter_tier is Tier.DISK)
    state_nbytes = sum(size.state_away_nbytes for size, row in both if row.state_tier is Tier.DISK)
    if open_disks is None or not (parameter_nbytes or state_nbytes):
        return Disks()
    return open_disks(parameter_nbytes, state_nbytes)


@dataclass(frozen=True)
class Tables:
    """Names of parameters whose gradients are zero but in a few rows."""

    sent: frozenset[str]  # as rows
    kept: frozenset[str]  # as rows, too, until the optimizer has seen them
    has_direct_step: bool  # does the optimizer step the model's own parameters?


@dataclass(frozen=True)
class _DraftBucket:
    members: list[str]
    layout: BucketLayout
    dtype: torch.dtype
    is_trained: bool
    sends_rows: bool  # its one parameter is a table of which few rows have a gradient
    keeps_rows: bool  # and its optimizer takes that as a sparse tensor


@dataclass
class _Draft:
    """A unit before it has memory."""

    spec: UnitSpec
    row: Row
    buckets: list[_DraftBucket]
    comm: Communicator  # that shards
    outer: Communicator | None

    @classmethod
    def of(
        cls,
        spec: UnitSpec,
        parameters: dict[str, nn.Parameter],
        group_of: dict[int, int],
        settings: ZeroSettings,
        precision: Precision,
        axes: Axes,
        tables: Tables,
        *,
        hybrid: bool,
    ) -> _Draft:
        row = row_of_stage(
            settings.stage,
            spec.name,
            hybrid=hybrid,
            secondary=settings.has_secondary,
            persistent=spec.is_persistent,
        )
        is_state_sharded = row.state.inner is Kind.SHARD
        comm = axes.inner if is_state_sharded else axes.all
        buckets = []
        for members in _split(spec, parameters, group_of, settings, precision, tables.sent):
            first = parameters[members[0]]
            is_trained = id(first) in group_of and first.requires_grad
            layout = lay_out(
                [
                    (n, tuple(parameters[n].shape), group_of.get(id(parameters[n]), -1) if is_trained else -1)
                    for n in members
                ],
                num_shards=comm.size,
            )
            sends_rows, keeps_rows = (is_trained and members[0] in names for names in (tables.sent, tables.kept))
            dtype = _target_dtype(first, precision)
            buckets.append(_DraftBucket(members, layout, dtype, is_trained, sends_rows, keeps_rows))
        return cls(spec, row, buckets, comm, axes.outer if is_state_sharded else None)

    def size(self, precision: Precision) -> UnitSize:
        """What it will need on one rank."""
        row = self.row
        is_sharded, is_state_sharded = row.parameter.inner is Kind.SHARD, row.state.inner is Kind.SHARD
        shard = trained = at_rest = gathered = gradient = reduced = state = away = travel = 0
        for bucket in self.buckets:
            numel, itemsize = bucket.layout.numel, bucket.dtype.itemsize
            owned = numel // self.comm.size if is_state_sharded else numel
            at_rest += (owned if is_sharded else numel) * itemsize
            shard += owned if is_sharded else numel
            gathered += numel * itemsize * is_sharded
            if not bucket.is_trained:
                continue
            is_wider = _is_wider(bucket.dtype, precision)
            master = ((is_wider and precision.master) or bucket.dtype).itemsize
            sums = (precision.gradient.accumulate_dtype or bucket.dtype).itemsize
            trained += owned
            gradient += (owned if row.gradient_between.inner is Kind.SHARD else numel) * sums
            reduced += numel * itemsize * (row.gradient_between.inner is Kind.SHARD)
            state += owned * master * (2 + is_wider)
            away += owned * master * 3
            travel += owned * (sums + itemsize)
        return UnitSize(
            self.spec.name,
            shard,
            trained,
            at_rest,
            gathered,
            gradient,
            reduced,
            state,
            away,
            travel,
            can_move_parameters=is_sharded,
            can_move_state=is_state_sharded,
        )


def _is_wider(dtype: torch.dtype, precision: Precision) -> bool:
    """Do master weights have more digits than parameters of ``dtype``?"""
    return dtype in (torch.float16, torch.bfloat16) and precision.master not in (None, dtype)


def _build_unit(
    draft: _Draft,
    index: int,
    parameters: dict[str, nn.Parameter],
    settings: ZeroSettings,
    precision: Precision,
    axes: Axes,
    device: torch.device,
    pool: Pool,
    materializer: Materializer,
    disks: Disks,
    tables: Tables,
) -> tuple[Unit, list[BucketState]]:
    spec, row, comm = draft.spec, draft.row, draft.comm
    is_state_apart = settings.is_apart(row.state_tier, device)
    is_on_disk = row.parameter_tier is Tier.DISK
    is_shard_apart = is_on_disk or settings.is_apart(row.parameter_tier, device)
    is_native = settings.can_be_native and axes.all.size == 1 and not (is_state_apart or is_shard_apart)
    buckets: list[ParameterBucket] = []
    trained: list[tuple[ParameterBucket, BucketGradient, torch.Tensor, bool]] = []
    for number, drafted in enumerate(draft.buckets):
        dtype, layout = drafted.dtype, drafted.layout
        bucket = ParameterBucket(
            spec.name if number == 0 else f"{spec.name}#{number}",
            layout,
            dtype,
            device,
            comm,
            [parameters[slot.name] for slot in layout.slots],
            is_sharded=row.parameter.inner is Kind.SHARD and (comm.size > 1 or is_shard_apart),
            is_state_sharded=row.state.inner is Kind.SHARD,
            secondary=axes.secondary if row.secondary else None,
            host=partial(host_empty, device=device, is_pinned=settings.pins_parameters)
            if is_shard_apart and not is_on_disk
            else None,
            shelf=disks.parameters if is_on_disk else None,
        )
        wide = _fill(bucket, materializer, axes.all)
        buckets.append(bucket)
        if not drafted.is_trained:
            bucket.store_shard()
            continue
        is_wider = _is_wider(dtype, precision)
        has_own_master = is_wider or is_on_disk or is_state_apart != is_shard_apart
        if has_own_master:
            source = wide[bucket.begin : bucket.end]
            master_dtype = (is_wider and precision.master) or dtype
            if row.state_tier is Tier.DISK and disks.state is not None:
                master = disks.state.admit(bucket, source, master_dtype)
            else:
                master = _master_like(source, master_dtype, is_state_apart)
        else:
            master = bucket.shard if bucket.is_sharded else bucket.full[bucket.begin : bucket.end]
        bucket.store_shard()
        sum_dtype = precision.master if is_wider and precision.gradient.accumulate_dtype is None else None
        policy = precision.policy_of(drafted.members[0])
        sums: Sums = comm
        if drafted.sends_rows and comm.size > 1:
            sums = RowSum(comm, *layout.slots[0].shape)
        gradient: BucketGradient
        if drafted.keeps_rows:
            gradient = RowGradient(bucket, row, policy, comm, pool, sum_dtype)
        elif tables.has_direct_step:
            gradient = ShownGradient(bucket, row, policy, sums, None, pool, sum_dtype)
        elif is_native and precision.gradient.accumulate_dtype in (None, dtype):
            gradient = NativeGradient(bucket, row, policy, sums, draft.outer, pool, sum_dtype)
        else:
            gradient = BucketGradient(bucket, row, policy, sums, draft.outer, pool, sum_dtype)
        trained.append((bucket, gradient, master, has_own_master))
    unit = Unit(spec.name, index, row, buckets)
    states = [BucketState(unit, *parts, is_apart=is_state_apart) for parts in trained]
    if unit.is_sharded:
        unit.release()
    return unit, states


def _master_like(source: torch.Tensor, dtype: torch.dtype, is_apart: bool) -> torch.Tensor:
    """A copy of the owned range, in the master's dtype, where masters rest.

    On the host it is ordinary memory: it does not travel, and page-locked memory comes in powers of two.
    """
    if not is_apart:
        return source.to(dtype, copy=True)
    return host_empty(source.numel(), dtype, source.device, is_pinned=False).copy_(source)


def _target_dtype(parameter: nn.Parameter, precision: Precision) -> torch.dtype:
    if precision.parameter is not None and parameter.is_floating_point():
        return precision.parameter
    return parameter.dtype


def _split(
    spec: UnitSpec,
    parameters: dict[str, nn.Parameter],
    group_of: dict[int, int],
    settings: ZeroSettings,
    precision: Precision,
    rows_of: Collection[str],
) -> list[list[str]]:
    """The unit's parameters by dtype, trainability and dtype on the wire, in pieces of at most ``max_bucket_numel``
    elements (but at least one parameter). One whose gradient is sent as rows has a piece of its own.
    """
    kinds: dict[tuple[torch.dtype, bool, torch.dtype | None, str | None], list[list[str]]] = {}
    for name in spec.parameters:
        parameter = parameters[name]
        is_trained = parameter.requires_grad and id(parameter) in group_of
        wire = precision.wires.get(name) if is_trained else None
        own = name if is_trained and name in rows_of else None
        key = (_target_dtype(parameter, precision), is_trained, wire, own)
        parts = kinds.setdefault(key, [[]])
        held = sum(parameters[n].numel() for n in parts[-1])
        limit = settings.max_bucket_numel
        if parts[-1] and limit is not None and held + parameter.numel() > limit:
            parts.append([])
        parts[-1].append(name)
    return [part for parts in kinds.values() for part in parts]


def _fill(bucket: ParameterBucket, materializer: Materializer, comm: Communicator) -> torch.Tensor:
    """Move the parameters' values into the bucket.

    Communicates: a broadcast of rank 0's values; none where all of them were put together from the ranks' shards.
    Returns: the whole bucket in the widest dtype that a parameter came in, for the master weights.
    """
    dtypes = {parameter.dtype for parameter in bucket.parameters}
    widest = bucket.dtype
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype) if dtype.is_floating_point else widest
    wide = (
        bucket.full
        if widest == bucket.dtype
        else torch.zeros(bucket.layout.numel, dtype=widest, device=bucket.full.device)
    )
    are_alike = True  # on all ranks
    for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
        target = wide[slot.offset : slot.offset + slot.numel].view(slot.shape)
        are_alike &= materializer.copy_value(slot.name, parameter, target)
    if comm.size > 1 and not are_alike:
        comm.broadcast(wide, 0, label=bucket.label).drain()
    if wide is not bucket.full:
        bucket.full.copy_(wide)
    if bucket.is_sharded:
        bucket.shard.copy_(bucket.full[bucket.begin : bucket.end])
    bucket.adopt()
    return wide


def check_unchanged(model: nn.Module, sharded: ShardedModel) -> None:
    """Raises: ModelError: parameters were added to, or taken from, the model after it was sharded."""
    now = {id(parameter): name for name, parameter in model.named_parameters()}
    added = [name for key, name in now.items() if key not in sharded.unit_of]
    known = {
        id(p): slot.name
        for u in sharded.units
        for b in u.buckets
        for slot, p in zip(b.layout.slots, b.parameters, strict=True)
    }
    removed = [name for key, name in known.items() if key not in now]
    if added or removed:
        changes = [f"added {name!r}" for name in added] + [f"removed {name!r}" for name in removed]
        raise ModelError(
            f"the model was changed after initialize(): {', '.join(changes[:8])}{' ...' if len(changes) > 8 else ''}.",
            do="change the model first, then call shoal.initialize(); or destroy() this engine and initialize again.",
            code="model-changed",
        )
