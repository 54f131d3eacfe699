"""``initialize``: from a model, an optimizer and a config to an engine. Reads top to bottom, in the order it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from shoal.build.build import build
from shoal.build.plan import ModuleAsBuilt
from shoal.comm.formats import WireFormat
from shoal.comm.protocol import Communicator
from shoal.comm.world import World
from shoal.compiler import with_cuda_graphs
from shoal.config import Config, load
from shoal.config.elastic import check_scheduler
from shoal.config.ranks import batch_ranks, model_degrees
from shoal.device import Device
from shoal.engine.accumulation import Accumulation
from shoal.engine.client_optimizer import (
    keep_parameters,
    make_optimizer,
    make_schedule,
    make_step,
    refuse_untrained,
    schedule_notes,
    with_own_sums,
)
from shoal.engine.compiled import CompiledSteps, refuse_cuda_graphs
from shoal.engine.engine import Engine
from shoal.engine.log import logger, make_audible
from shoal.engine.model_parts import axes_of, check_split, levels_of, parts_of, with_experts
from shoal.engine.offload import Offload
from shoal.engine.offload_states import Offloaded
from shoal.engine.over_stages import from_stages
from shoal.engine.parts.activations import SavedActivations
from shoal.engine.parts.clipping import CheckClipping
from shoal.engine.parts.curriculum import Curriculum
from shoal.engine.parts.device_check import DeviceCheck
from shoal.engine.parts.error_feedback import ErrorFeedback
from shoal.engine.parts.experiment import ExperimentSteps
from shoal.engine.parts.experts import ExpertBalance
from shoal.engine.parts.fault_tolerance import FaultTolerance
from shoal.engine.parts.inputs import FirstInputs
from shoal.engine.parts.local_steps import LocalSteps
from shoal.engine.parts.loss_spike import LossSpike
from shoal.engine.parts.low_precision import LowPrecision
from shoal.engine.parts.part import Part
from shoal.engine.parts.random_ltd import RandomLayerTokenDrop
from shoal.engine.parts.rank_times import RankTimes
from shoal.engine.parts.replicas import ReplicaCheck
from shoal.engine.parts.save_on_signal import SaveOnSignal
from shoal.engine.parts.sections import Sections
from shoal.engine.parts.sequence import AttentionCheck, SequenceRanks
from shoal.engine.parts.stream_check import checking_streams
from shoal.engine.parts.tensor import TensorParallelChecks
from shoal.engine.parts.type_check import checking_types
from shoal.engine.pipeline_parts import of_own_units, recomputed_blocks, stages_of
from shoal.engine.profiling import ProfilingTimers, format_notes
from shoal.engine.progress import Progress
from shoal.engine.run_state import RunState
from shoal.engine.settings import (
    Properties,
    flat,
    loss_scale_of,
    lower_precision_parameters,
    plan_of,
)
from shoal.engine.sharding import Sharding
from shoal.errors import ConfigError, ModelError
from shoal.host_heap import HostHeap
from shoal.launch.environment import heap_is_set, schedulers_elasticity
from shoal.mesh import Mesh
from shoal.observe.collectives import TimedCommunicator, collective_log
from shoal.observe.goodput import GoodputLog
from shoal.observe.monitor import Monitor, make_monitor
from shoal.observe.placement_table import Table
from shoal.observe.timers import StepTimers
from shoal.optim.host_rules import host_note
from shoal.parallel.expert.apply import prepare_experts
from shoal.parallel.expert.held import built_for, experts_if_used, let_trace
from shoal.parallel.expert.huggingface import is_stack
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.stage import StageModule
from shoal.processor import emulation_notes
from shoal.sharding.axes import Axes
from shoal.text import counted, listed

AnyEngine = TypeVar("AnyEngine", bound=Engine)

_NO_EFFECT = ": accepted, no effect: "  # in a note of the config
_HEAP_NOTE = (
    "host memory that a step frees stays with the process for the next one, so that the kernel need not clear it again;"
    " to return it to the kernel immediately, set MALLOC_TRIM_THRESHOLD_ (bytes) in the environment."
)


def initialize(
    engine_class: type[AnyEngine],
    model: nn.Module,
    config: str | pathlib.Path | dict[str, Any] | None,
    world: World,
    *,
    args: Any = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    degrees: Mapping[str, int] | None = None,
    pipeline_class: Callable[..., AnyEngine],
    parts: Sequence[Part] = (),
) -> AnyEngine:
    """Shard a model that ``shoal.initialize`` has checked. The arguments are those of ``shoal.initialize``.

    Args:
        degrees: by axis, what the script gives in addition to the config.
        pipeline_class: of the engine of a model in pipeline stages.
        parts: the script's own, called after the others.
    """
    given = {"optimizer": optimizer, "scheduler": lr_scheduler}
    replaced = [section for section, value in given.items() if value is not None]
    if isinstance(model, PipelineModule):
        degrees = {**(degrees or {}), **model.degrees}
    ep_size, is_split = _experts_of(model, world)
    if ep_size:
        degrees = {**(degrees or {}), "ep": ep_size}
    is_first = world.rank == 0
    settings = load(config, args=args, world_size=world.size, replaced=replaced, degrees=degrees, warns=is_first)
    if is_split and settings.expert_parallel.expert_tensor_parallel_size == 1:
        split = {"expert_tensor_parallel_size": model_degrees(settings).get("tp", 1)}
        settings = settings.model_copy(update={"expert_parallel": settings.expert_parallel.model_copy(update=split)})
    world.heartbeat.end_log()
    if settings.goodput.file is not None and world.reports:
        world.heartbeat.log = GoodputLog(pathlib.Path(settings.goodput.file), world.size)
    world.heartbeat.enter("init", settings.timeouts.init)
    try:
        with checking_streams(settings) as checks:
            return _start(
                engine_class,
                pipeline_class,
                model,
                settings,
                world,
                optimizer,
                model_parameters,
                lr_scheduler,
                checks,
                parts,
            )
    except Exception:
        world.heartbeat.enter("data", None)  # the script may handle it
        raise


def _start(
    engine_class: type[AnyEngine],
    pipeline_class: Callable[..., AnyEngine],
    model: nn.Module,
    settings: Config,
    world: World,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    lr_scheduler: Any,
    checks: Sequence[Part],
    given_parts: Sequence[Part],
) -> AnyEngine:
    """
    Args:
        checks: what lasts until everything else has ended.
        given_parts: the script's own.
    """
    if settings.elasticity.enabled and (planned := schedulers_elasticity()) is not None:
        check_scheduler(settings.elasticity, planned)
    plan = plan_of(settings, world.size)
    refuse_cuda_graphs(with_cuda_graphs(model, world.device), settings, plan)
    world.mesh = plan.mesh
    world.trace_into(settings.debug.flight_recorder_folder)
    world.compares_calls = settings.debug.collective_check
    is_apart = plan.zero.num_outer_states > 0

    def open_axis(axis: str, max_ctas: int | None = None, number: int = 0) -> Communicator:
        groups = plan.mesh.groups
        bounds = [most for name, most in settings.parallel.max_ctas.items() if groups(name) == groups(axis)]
        most = min(bounds, default=None) if max_ctas is None else max_ctas
        return world.communicator(axis, plan.mesh, most, number=number)

    axes = axes_of(plan.mesh, open_axis, plan.secondary_size, are_replicas_apart=is_apart)
    axes = _timed(axes, world, settings)
    _check_start(axes, settings, model, plan.activations.tensor)
    whole = list(model.parameters())
    section = settings.expert_parallel
    if settings.fp8.recipe is not None and any(map(is_stack, model.modules())):  # whose own products are not ours
        section = section.model_copy(update={"enabled": True})
    if section.enabled or section.load_balance_coeff is not None or axes.get("ep") is not None:
        prepare_experts(model, axes.get("ep"), section, is_part=isinstance(model, StageModule))
    specs = parts_of(model, axes, settings, world.device, plan.activations.tensor)
    pp = axes.get("pp")
    whole_model: Sequence[ModuleAsBuilt] = ()
    if is_cut := pp is not None or isinstance(model, StageModule):
        model, specs, axes, whole_model = stages_of(model, specs, settings, world, axes)
        plan = of_own_units(plan, model, pp)
    here = {id(parameter) for parameter in model.parameters()}
    of_others = {id(parameter) for parameter in whole} - here
    del whole
    if is_cut or of_others:
        optimizer, model_parameters = keep_parameters(
            optimizer, model_parameters, lambda p: id(p) in here if is_cut else id(p) not in of_others
        )
    hosts = world.hosts(axes.world, range(world.size), socket.gethostname(), label="hosts")
    specs, axes = with_experts(model, specs, axes, settings, hosts, plan.activations.experts)
    is_part = pp is not None
    has_parts = any(spec.is_divided for spec in specs.values())
    made = make_optimizer(
        model, optimizer, model_parameters, settings, world.size, is_part=is_part, has_parts=has_parts
    )
    plan, more_notes = with_own_sums(plan, made.optimizer, settings)
    if is_part and made.optimizer is not None:
        refuse_untrained(has_trained=any(from_stages(pp, any(made.groups), "trained parameters")))
    sparse = made.sparse(model)
    schedule = make_schedule(lr_scheduler, settings, made.optimizer)
    notes = made.notes + more_notes + schedule_notes(lr_scheduler, settings, made.optimizer)
    if world.size > 1:
        sent_dtypes = lower_precision_parameters(model, settings, plan)
        plan = dataclasses.replace(plan, precision=dataclasses.replace(plan.precision, sent_dtypes=sent_dtypes))
    device = Device(world.device)
    if not device.is_cuda and not heap_is_set():
        device.heap = HostHeap.begin()
    properties = Properties(settings, plan, world, axes, device)
    accumulation = Accumulation(
        micro_batch=settings.train_micro_batch_size_per_gpu,
        num_micro=settings.gradient_accumulation_steps,
        num_ranks=batch_ranks(settings, world.size)[0],
        loss_scale=loss_scale_of(settings) if made.optimizer is not None else None,
        is_managed=settings.managed_gradient_accumulation,
        counts_tokens=settings.loss_reduction == "token",
        # With tokens, the mean over replicas that take steps of their own is that over all tokens.
        gradient_divisor=(plan.mesh.dp_replicate if is_apart else 1.0)
        / (plan.precision.gradient.pre_scale * plan.precision.gradient.post_scale),
    )
    offloaded = Offloaded(properties, accumulation.counters)
    offload = Offload(model, properties, hosts.count(hosts[world.rank]))
    with device.use():
        sharded = build(
            model,
            made.groups,
            plan.zero,
            plan.precision,
            axes,
            device.torch_device,
            partial(_begin_backward, offloaded, accumulation),
            decide=offload.decide,
            open_disks=offload.open_disks,
            sparse=sparse,
            specs=specs,
            whole=whole_model,
            if_used=experts_if_used(model) if plan.zero.gathers_if_used else None,
            levels=levels_of(axes, plan.zero.wire, hosts, is_sharded=plan.zero.stage > 0 or is_apart),
        )
        let_trace(model, [unit.name for unit in sharded.units])
        try:
            step = make_step(
                made, sharded, properties, offload.num_ranks_here, lambda: accumulation.counters.global_steps
            )
            sharding = Sharding(sharded, step, properties, accumulation)
            more = recomputed_blocks(model, settings) if isinstance(model, StageModule) else []
            blocks = model.own_blocks if isinstance(model, StageModule) else []
            products = [LowPrecision(model, properties, accumulation.counters)] if settings.fp8.recipe else []
            activations = SavedActivations(model, settings, world, axes, more, blocks)
            is_dropping = settings.data_efficiency.random_ltd is not None
            dropping = [RandomLayerTokenDrop(model, properties, accumulation)] if is_dropping else []
            curriculum = Curriculum(sharding, properties, accumulation.counters)
            monitor = None if world.is_dry else make_monitor(settings, world.rank)
            own = _parts(sharding, properties, accumulation, curriculum, monitor, hosts)
            joining = [*checks, *checking_types(), *products, activations, *dropping, *own, *given_parts]
            run = RunState(sharding, properties, accumulation, curriculum, schedule, parts=joining)
            if settings.flops_profiler.enabled and not world.is_dry:
                timers: StepTimers = ProfilingTimers(model, properties, accumulation, activations.num_recomputed)
            else:
                clocks, memory = bool(settings.wall_clock_breakdown), bool(settings.memory_breakdown)
                timers = StepTimers(device, is_on=clocks, reads_memory=memory)
            progress = Progress(settings, world.reports, timers, monitor, activations.recompute)
            make_engine = pipeline_class if isinstance(model, StageModule) else engine_class
            engine = make_engine(sharding, properties, accumulation, offloaded, run, joining, timers, progress)
            for part in joining:
                part.prepare(engine)
        except BaseException:
            sharded.disks.close()
            raise
    if settings.compile.enabled:
        notes.append(engine.compiled.compile_as_configured())
    if step is not None and step.cpu_optimizer is not None:
        notes += [note for note in [host_note(step.optimizer)] if note is not None]
    if not device.is_cuda:
        notes += emulation_notes(settings.low_precision_formats)
        if settings.debug.collective_check:
            notes.append(f"debug.collective_check{_NO_EFFECT}ranks that are CPUs compare every call anyway.")
    notes += offload.notes()
    notes += format_notes(sharded, device)
    notes += [
        f"wire.{key} = {sent.name}{_NO_EFFECT}there is one rank along {axis}."
        for key, axis, sent in plan.activations.by_axis()
        if axes.get(axis) is None
    ]
    if collective_log(world).is_on:
        notes.append(
            "comms_logger: to time collectives, each is waited for at once, so none overlaps with computation."
            if world.size > 1
            else "comms_logger: with one rank there are no collectives to time."
        )
    notes += [note for part in products for note in part.notes] + activations.notes
    notes += [note for part in dropping for note in part.notes]
    if is_apart:
        replicas, every = counted(plan.mesh.dp_replicate, "replica"), settings.local_steps.every
        notes.append(f"local_steps: {replicas}, synchronised every {every} steps.")
    if device.heap is not None:
        engine.on_step.append(device.heap.after_step)
    _report(engine, notes)
    return engine


def _parts(
    sharding: Sharding,
    properties: Properties,
    accumulation: Accumulation,
    curriculum: Curriculum,
    monitor: Monitor | None,
    hosts: Sequence[str],
) -> Iterator[Part]:
    """What joins the steps of an engine, as the config and the mesh ask for it."""
    axes = properties.axes
    heartbeat = properties.world.heartbeat
    if heartbeat.is_read or heartbeat.log is not None:
        yield Sections(heartbeat, properties.config.timeouts)
    if properties.config.goodput.file is not None:
        yield RankTimes(properties, accumulation.counters, hosts)
    if curriculum:
        yield curriculum
    yield FirstInputs(sharding, properties, accumulation, 2 if isinstance(sharding.module, StageModule) else None)
    yield SequenceRanks(sharding, properties)
    if axes.get("sp") is not None or axes.get("cp") is not None:
        yield AttentionCheck(sharding, properties)
    if axes.get("tp") is not None:
        yield TensorParallelChecks(sharding, properties)
    balance = ExpertBalance(sharding, properties, accumulation.counters, monitor)
    if balance.is_needed:
        yield balance
    yield CheckClipping(sharding, accumulation)
    yield CompiledSteps()
    wire = properties.plan.zero.wire
    if wire.has_error and not wire.is_by_optimizer:
        yield ErrorFeedback(sharding, accumulation, wire.error_reset)
    has_replicas = properties.config.fault_tolerance.quorum is not None and not properties.world.is_dry
    if has_replicas and sharding.step is not None:
        yield FaultTolerance(sharding, properties, accumulation)
    if axes.apart is not None and sharding.step is not None:
        yield LocalSteps(sharding, properties)
    if properties.config.loss_spike.action is not None:
        yield LossSpike(properties.config.loss_spike, accumulation, properties.rank)
    if properties.config.debug.replica_check_steps is not None:
        steps = properties.config.debug.replica_check_steps
        yield ReplicaCheck(sharding, properties, accumulation.counters, steps)
    if properties.config.device_check.every is not None and not properties.world.is_dry:
        yield DeviceCheck(axes.world, properties, accumulation.counters, hosts)
    if properties.config.checkpoint.save_on_signal:
        yield SaveOnSignal()
    if properties.config.autotuning.enabled:
        yield ExperimentSteps(properties.config.autotuning)


def _experts_of(model: nn.Module, world: World) -> tuple[int, bool]:
    """What layers with experts were built for, the same on every rank, since the mesh follows from it.

    Returns: the expert-parallel ranks, 0: they leave it open; True if experts are to be split over tensor-parallel
        ranks.
    Communicates: for a model of which ranks may have built their pipeline stages only, both numbers.
    """
    ep_size, is_split = built_for(model)
    if isinstance(model, StageModule):
        every = world.communicator("world", Mesh.of(world.size), max_ctas=0).gather_objects(
            [ep_size, is_split], label="experts of pipeline stages"
        )
        ep_size, is_split = (max(of_ranks) for of_ranks in zip(*every, strict=True))
    return ep_size, is_split


def _timed(axes: Axes, world: World, settings: Config) -> Axes:
    """The communicators as they are, or such as note their times where the config or the script asks for it."""
    log, section = collective_log(world), settings.comms_logger
    if section.enabled:
        log.is_on, log.takes_all, log.kinds = True, bool(section.prof_all), section.prof_ops
        log.is_verbose, log.names_callers = bool(section.verbose), bool(section.debug)
    if not log.is_on:
        return axes
    device = Device(world.device)
    return axes.map(lambda comm: comm if comm.size == 1 else TimedCommunicator(comm, log, device))


def _check_start(axes: Axes, settings: Config, model: nn.Module, wire: WireFormat | None) -> None:
    """Raises: ConfigError, ModelError: ranks disagree on the config or on the model's parameters, or an engine that had
    the model before has split it in another way.

    Communicates: digests; where those differ, what they are of.
    """
    check_split(model, axes, settings, wire)
    comm = axes.world
    mine = {
        "config": {key: repr(value) for key, value in sorted(flat(settings.effective()).items())},
        "model": {
            name: f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}{'' if p.requires_grad else ' frozen'}"
            for name, p in model.named_parameters()
        },
    }
    digests = comm.gather_objects(
        {key: hashlib.sha256(repr(list(items.items())).encode()).hexdigest() for key, items in mine.items()},
        label="start-up check",
    )
    # Tensor-parallel ranks may have been given other parts of a model.
    same_part = axes.mesh.ranks_along("loss", comm.rank)
    for key, error, ranks in (("config", ConfigError, range(comm.size)), ("model", ModelError, same_part)):
        if len({digest[key] for digest in digests}) == 1:
            continue
        items = comm.gather_objects(mine[key], label="start-up check: what differs")
        values = {rank: digests[rank][key] for rank in ranks}
        common = Counter(values.values()).most_common(1)[0][0]
        odd = [rank for rank, value in values.items() if value != common]
        if odd:
            usual = next(items[rank] for rank, value in values.items() if value == common)
            raise error(
                f"rank {', '.join(map(str, odd))} has another {key} than the others:"
                f" {_differing(items[odd[0]], usual)}.",
                where=f"{comm.size} data-parallel ranks",
                do=f"give every rank the same {key}"
                + ("; the same names, shapes, dtypes and requires_grad." if key == "model" else "."),
                code=f"ranks-differ-{key}",
            )


def _differing(odd: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """The first names whose values differ, and how many more there are."""
    names = [name for name in {**usual, **odd} if odd.get(name) != usual.get(name)]
    each = [f"{name} is {odd.get(name, 'missing')}, not {usual.get(name, 'missing')}" for name in names]
    return listed(each, 3) or "the same names in another order"


def _begin_backward(offloaded: Offloaded, accumulation: Accumulation) -> bool:
    """A backward pass begins, by ``backward()``, by ``loss.backward()`` or by ``torch.autograd.grad``.

    Returns: True if it is the last one before the step. Raises: UsageError: a state that it needs is offloaded.
    """
    offloaded.require("backward()")
    return accumulation.begin_pass()


def _ranks_text(mesh: Mesh) -> str:
    """The mesh in words: "8 ranks: 4 data-parallel x 2 tp"."""
    others = {"pp": mesh.pp, "cp": mesh.cp, "sp": mesh.sp, "tp": mesh.tp}
    named = "".join(f" x {degree} {axis}" for axis, degree in others.items() if degree > 1)
    if named:
        text = f"{mesh.world_size} ranks: {mesh.dp} data-parallel{named}"
    else:
        text = f"{mesh.dp} data-parallel ranks" if mesh.dp > 1 else "1 rank"
    return text if mesh.ep == 1 else f"{text}, experts over ep {mesh.ep} x expert_dp {mesh.size('expert_dp')}"


def _report(engine: Engine, notes: list[str]) -> None:
    rank, settings = engine.global_rank, engine.properties.config
    make_audible(settings.log_level)
    if rank:
        return
    if settings.dump_state:
        logger.info(f"effective config:\n{json.dumps(settings.effective(), indent=2, default=str)}")
    ledger, plan = engine.memory_report(), engine.properties.plan
    table = Table.of(group.row for group in engine.sharded.groups)
    logger.info("ZeRO-%d on %s; %s", plan.zero.stage, _ranks_text(plan.mesh), table.summary())
    logger.info("memory of rank 0: %s", ledger.summary())
    unused = [note for note in settings.notes() if _NO_EFFECT in note]
    used = [note for note in settings.notes() if _NO_EFFECT not in note]
    if len(unused) > 2:
        names = ", ".join(note.partition(" = ")[0] for note in unused)
        logger.info("%d keys of the config have no effect (`shoal doctor FILE` shows why): %s", len(unused), names)
        unused = []
    if plan.zero.gathers_if_used and plan.mesh.pp == 1 and all(unit.if_used is None for unit in engine.sharded.units):
        notes = [*notes, f"expert_parallel.gather_if_used = true{_NO_EFFECT}the model has no such experts."]
    if plan.zero.registers_memory and plan.zero.stage > 1 and not engine.sharded.pools:
        notes = [*notes, f"zero_optimization.nccl_ub = true{_NO_EFFECT}no parameters are gathered over NCCL."]
    for note in (*used, *unused, *notes):
        logger.info(note)
    logger.debug("placement\n%s", table)
    logger.debug("memory of rank 0\n%s", ledger)
    if engine.properties.device.heap is not None:
        logger.debug(_HEAP_NOTE)
    named = engine.module.named_parameters() if engine.client_optimizer is not None else ()
    untrained = [name for name, p in named if p.requires_grad and not engine.access.knows(p)]
    if untrained:
        logger.warning(
            "%s with requires_grad in no optimizer group, so not trained: %s",
            counted(len(untrained), "parameter"),
            listed(untrained),
        )
