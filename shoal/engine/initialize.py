"""``initialize``: from a model, an optimizer and a config to an engine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.comm.world import World, current_world, init_distributed
from shoal.config import Config, load
from shoal.config.elastic import check_scheduler
from shoal.device import Device
from shoal.engine.client_optimizer import check_mpu, make_optimizer, make_schedule, schedule_notes
from shoal.engine.engine import Engine
from shoal.engine.log import logger, make_audible, say_on_rank_0
from shoal.engine.low_precision import lower_precision_parameters
from shoal.engine.offload import Offload
from shoal.engine.profiling import ProfilingTimers
from shoal.engine.progress import Progress, make_monitor
from shoal.engine.settings import Plan, loss_scale_of, plan_of
from shoal.errors import ConfigError, ModelError
from shoal.host_heap import HostHeap
from shoal.launch.environment import heap_is_set, schedulers_elasticity
from shoal.memory.placement import Tier
from shoal.mesh import Mesh
from shoal.observe.collectives import collective_log
from shoal.observe.flops_profiler import FlopsProfiler
from shoal.observe.timed import TimedCommunicator
from shoal.optim.whole import WholeTensorOptimizer
from shoal.parallel.activations import HostActivations
from shoal.parallel.recompute import (
    Recompute,
    RecomputeSettings,
    current_recompute,
    install,
    is_configured,
    recompute_blocks,
)
from shoal.zero.adopted_state import adopt_state
from shoal.zero.build import build
from shoal.zero.direct import DirectStep
from shoal.zero.init import suspended
from shoal.zero.registry import OWNERS
from shoal.zero.settings import Axes
from shoal.zero.step import ShardedStep

Initialized = tuple[Engine, Any, Any, Any]

_HEAP_NOTE = (
    "host memory that a step frees stays with the process for the next one, so that the kernel need not clear it again;"
    " to have it given back at once, set MALLOC_TRIM_THRESHOLD_ (bytes) in the environment."
)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | pathlib.Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | pathlib.Path | dict[str, Any] | None = None,
) -> Initialized:
    """Shard a model for training. DeepSpeed's signature and return values.

    Args:
        model: any module; on the device, on CPU, on the meta device or built under ``zero.Init``.
        optimizer: any elementwise torch optimizer over the model's parameters, or a callable that takes them; None:
            from the config.
        model_parameters: parameters or groups for the config's optimizer; None: all that require a gradient.
        training_data: a dataset; a loader of this rank's micro-batches is returned.
        lr_scheduler: a torch schedule, or a callable that takes the optimizer; None: from the config.
        config: a path, a dict, JSON text or base64; ``config_params`` and ``args.deepspeed_config`` are other places
            for it.

    Returns: engine, optimizer (None without one), data loader, schedule.
    Raises: ConfigError, ModelError, OptimizerError: before anything is sharded.
    Communicates: the model's values are broadcast from rank 0.
    """
    with suspended():  # ``zero.Init`` contexts in which the script builds its model
        return _initialize(
            args,
            model,
            optimizer,
            model_parameters,
            training_data,
            lr_scheduler,
            distributed_port,
            mpu,
            dist_init_required,
            collate_fn,
            config if config is not None else config_params,
            mesh_param,
        )


def _initialize(
    args: Any,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    lr_scheduler: Any,
    distributed_port: int,
    mpu: Any,
    dist_init_required: bool | None,
    collate_fn: Callable[..., Any] | None,
    source: str | pathlib.Path | dict[str, Any] | None,
    mesh_param: Any,
) -> Initialized:
    if model is None or not isinstance(model, nn.Module):
        raise ModelError(
            f"model must be a torch.nn.Module, got {type(model).__name__}.", do="pass model=...", code="model-type"
        )
    if next(model.parameters(), None) is None:
        raise ModelError(
            f"{type(model).__name__} has no parameters, so there is nothing to train.",
            do="hand over the module that holds the parameters (after they were made).",
            code="model-empty",
        )
    lazy = [name for name, parameter in model.named_parameters() if torch.nn.parameter.is_lazy(parameter)]
    if lazy:
        raise ModelError(
            f"{len(lazy)} parameters have no shape yet: {', '.join(lazy[:5])}{' ...' if len(lazy) > 5 else ''}.",
            do="run the model on one batch first, so that its lazy modules know their sizes.",
            code="model-lazy",
        )
    _check_free(model)
    world = _world(dist_init_required, distributed_port)
    if source is None and not any(getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")):
        raise ConfigError(
            "no config was given.",
            do="pass config= (a path or a dict), or --deepspeed_config with shoal.add_config_arguments(parser).",
            code="config-missing",
        )
    if mpu is not None:
        check_mpu(mpu, world.size)
    if mesh_param is not None:
        raise ConfigError(
            f"mesh_param = {mesh_param!r}: meshes are made from the config.",
            do='use "parallel": {"dp_shard": ..., "sp": ...} in the config.',
            code="mesh",
        )
    settings = load(source, args=args, world_size=world.size)
    if settings.elasticity.enabled and (planned := schedulers_elasticity()) is not None:
        check_scheduler(settings.elasticity, planned)
    plan = plan_of(settings, world.size)
    axes = _timed(make_axes(world, plan), world, settings)
    _check_same_everywhere(axes, settings, model)
    made = make_optimizer(model, optimizer, model_parameters, settings, world.size)
    client_optimizer, notes = made.optimizer, made.notes
    schedule = make_schedule(lr_scheduler, settings, client_optimizer)
    notes += schedule_notes(lr_scheduler, settings, client_optimizer)
    wires = lower_precision_parameters(model, settings, plan) if world.size > 1 else {}
    device = Device(world.device)
    if not device.is_cuda and not heap_is_set():
        device.heap = HostHeap.begin()
    engine_box: list[Engine] = []
    offload = Offload(settings, plan, model, axes.all, device, world.rank)
    with device.use():
        sharded, states = build(
            model,
            made.groups,
            plan.zero if not isinstance(client_optimizer, WholeTensorOptimizer) else _without_native(plan),
            dataclasses.replace(plan.precision, wires=wires),
            axes,
            device.torch_device,
            lambda: engine_box[0]._on_backward(),
            decide=offload.decide,
            open_disks=offload.open_disks,
            sparse=made.sparse(model),
        )
        try:
            step: ShardedStep | None = None
            if client_optimizer is not None and made.is_direct:
                step = DirectStep(client_optimizer, states, axes.inner)
                adopt_state(step)
            elif client_optimizer is not None:
                section = settings.zero_optimization.offload_optimizer
                step = ShardedStep(
                    client_optimizer,
                    states,
                    axes.inner,
                    block_numel=device.step_block_numel,
                    chunk_numel=int(settings.zero_optimization.sub_group_size) or None,
                    device=device,
                    is_ahead=section.super_offload,
                    num_host_threads=_host_threads(section.cpuadam_cores_perc, offload.num_ranks_here),
                    pins_host=plan.zero.pins_state,
                )
                adopt_state(step)
                if sharded.disks.state is not None:
                    sharded.disks.state.bind(step, [s for s in states if s.unit.row.state_tier is Tier.DISK])
            scale = loss_scale_of(settings) if step else None
            engine = Engine(model, sharded, states, step, plan, settings, world, axes, device, scale)
        except BaseException:
            sharded.disks.close()
            raise
    notes += offload.notes()
    if collective_log(world).is_on:
        notes.append(
            "comms_logger: each collective is waited for at once to be timed, so it overlaps with nothing."
            if world.size > 1
            else "comms_logger: one rank alone sends nothing, so there is nothing to time."
        )
    engine_box.append(engine)
    engine.client_optimizer = client_optimizer
    engine.lr_scheduler = schedule
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    wished = RecomputeSettings.of(settings.activation_checkpointing)
    if is_configured() and wished == RecomputeSettings():
        engine.recompute = current_recompute()  # what the script has configured stays
    else:
        engine.recompute, engine.owns_recompute = Recompute(wished), True
        install(engine.recompute, world)
        notes += engine.recompute.notes()
    if settings.activation_checkpointing.modules:
        engine.recomputed = recompute_blocks(
            model, settings.activation_checkpointing.modules, recompute=engine.recompute
        )
    if settings.offload_activation.device == "cpu":
        engine.activations = HostActivations(model, max_nbytes=settings.offload_activation.bytes)
    if device.heap is not None:
        notes.append(_HEAP_NOTE)
        engine.on_step.append(device.heap.after_step)
    if settings.flops_profiler.enabled:
        engine.flops_profiler = FlopsProfiler(model, engine, float(settings.flops_profiler.recompute_fwd_factor))
        engine.timers = ProfilingTimers(engine, device, settings)
    engine.progress = Progress(settings, engine.timers, make_monitor(settings, world.rank))
    _report(engine, settings, notes)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _host_threads(share: float, num_ranks_here: int) -> int:
    """This rank's part of the host's cores for updates.

    Not torch's own number: launchers set that to 1 where a process has a GPU.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(share * cores / num_ranks_here))


def _check_free(model: nn.Module) -> None:
    """Raises: ModelError: another engine holds a parameter. Each engine would move it into buckets of its own."""
    held = [name for name, parameter in model.named_parameters() if OWNERS.get(parameter) is not None]
    if held:
        raise ModelError(
            f"{len(held)} parameters of {type(model).__name__} belong to a live engine already: {', '.join(held[:4])}"
            f"{' ...' if len(held) > 4 else ''}.",
            do="destroy() that engine first; or hand over a copy.deepcopy() of the model that was made before it was"
            " initialized.",
            code="model-held",
        )


def _world(dist_init_required: bool | None, port: int) -> World:
    if dist_init_required:
        init_distributed(distributed_port=port)
    return current_world()


def make_axes(world: World, plan: Plan) -> Axes:
    """The communicators that a plan needs."""
    mesh = Mesh.of(
        world.size, dp_shard=plan.shard_size or world.size, dp_replicate=world.size // (plan.shard_size or world.size)
    )
    mesh.refuse_unbuilt()
    everyone = world.communicator("dp", mesh)
    secondary = None
    if plan.secondary_size is not None:
        inner_mesh = Mesh.of(world.size, dp_shard=plan.secondary_size, dp_replicate=world.size // plan.secondary_size)
        secondary = world.communicator("dp_shard", inner_mesh)
    if plan.shard_size is None:
        return Axes(everyone, everyone, None, secondary)
    return Axes(everyone, world.communicator("dp_shard", mesh), world.communicator("dp_replicate", mesh))


def _timed(axes: Axes, world: World, settings: Config) -> Axes:
    """The communicators as they are, or such as note their times where the config or the script asks for it."""
    log, section = collective_log(world), settings.comms_logger
    if section.enabled:
        log.is_on, log.takes_all, log.kinds = True, bool(section.prof_all), section.prof_ops
        log.is_verbose, log.names_callers = bool(section.verbose), bool(section.debug)
    if not log.is_on:
        return axes
    made: dict[int, TimedCommunicator] = {}

    def timed(comm: Communicator) -> Communicator:
        if comm.size == 1:
            return comm  # nothing is sent
        return made.setdefault(id(comm), TimedCommunicator(comm, log, Device(world.device)))

    outer, secondary = axes.outer, axes.secondary
    return Axes(
        timed(axes.all),
        timed(axes.inner),
        timed(outer) if outer is not None else None,
        timed(secondary) if secondary is not None else None,
    )


def _without_native(plan: Plan) -> Any:
    return dataclasses.replace(plan.zero, can_be_native=False)


def _check_same_everywhere(axes: Axes, settings: Config, model: nn.Module) -> None:
    """Raises: ConfigError, ModelError: ranks disagree on the config or on the model's parameters."""
    comm = axes.all
    if comm.size == 1:
        return
    mine = {
        "config": repr(sorted(_flat(settings.effective()))),
        "model": repr([(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]),
    }
    digests = comm.gather_objects({key: _digest(text) for key, text in mine.items()}, label="start-up check")
    for key, error in (("config", ConfigError), ("model", ModelError)):
        values = [digest[key] for digest in digests]
        if len(set(values)) > 1:
            common = max(set(values), key=values.count)
            odd = [rank for rank, value in enumerate(values) if value != common]
            raise error(
                f"rank {', '.join(map(str, odd))} has another {key} than the others.",
                where=f"{comm.size} data-parallel ranks",
                do=f"give every rank the same {key}"
                + ("; the same names, shapes, dtypes and requires_grad." if key == "model" else "."),
                code=f"ranks-differ-{key}",
            )


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [item for key, inner in value.items() for item in _flat(inner, f"{path}.{key}")]
    return [(path, repr(value))]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _report(engine: Engine, settings: Config, notes: list[str]) -> None:
    rank = engine.global_rank
    make_audible(settings.log_level)
    if settings.dump_state:
        say_on_rank_0(rank, f"effective config:\n{json.dumps(settings.effective(), indent=2, default=str)}")
    say_on_rank_0(rank, f"placement of {engine.dp_world_size} data-parallel ranks\n{engine.sharded.table}")
    say_on_rank_0(rank, f"memory of rank 0\n{engine.memory_report()}")
    for note in (*settings.notes(), *notes):
        say_on_rank_0(rank, note)
    untrained = [
        name
        for name, p in engine.module.named_parameters()
        if p.requires_grad and engine.client_optimizer is not None and not engine.access.knows(p)
    ]
    if untrained and rank == 0:
        logger.warning(
            "%d parameters require a gradient but are in no optimizer group and will not be trained: %s%s",
            len(untrained),
            ", ".join(untrained[:5]),
            " ..." if len(untrained) > 5 else "",
        )
