"""``shoal.initialize``: from what a script gives to an engine, an optimizer, a loader and a schedule."""

from __future__ import annotations

import pathlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset

from shoal.access.engine_parameters import EngineParameters
from shoal.access.init import suspended
from shoal.comm.world import World, current_world, init_distributed
from shoal.config.config import keys_to_plan
from shoal.config.source import open_source
from shoal.data.by_tokens import (
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as by_tokens_of_engine,
)
from shoal.data.curriculum_loader import CurriculumLoader
from shoal.data.difficulty import DifficultySampler
from shoal.data.lengths import longest_sequences
from shoal.data.loading import Loader
from shoal.data.stream import TokenStream
from shoal.engine.engine import Engine
from shoal.engine.initialize import initialize as initialize_engine
from shoal.engine.parts.fault_tolerance import FaultTolerance
from shoal.engine.parts.loss_spike import LossSpike
from shoal.engine.parts.part import Part, check_parts
from shoal.engine.pipeline import PipelineEngine
from shoal.errors import ConfigError, ModelError, UsageError
from shoal.pipeline.stage import StageModule
from shoal.running.optimizer import ShardedOptimizer
from shoal.running.parameter_owner import OWNERS
from shoal.text import counted, listed

MaybeNone: TypeAlias = Any  # not checked for None, as typeshed does: the config decides whether there is one
Initialized: TypeAlias = tuple[Engine, ShardedOptimizer | MaybeNone, Loader | MaybeNone, Any]


@dataclass
class EngineClasses:
    """The classes that ``initialize`` makes an engine of."""

    engine: type[Engine] = Engine
    pipeline: type[PipelineEngine] = PipelineEngine


USED = EngineClasses()  # by ``initialize``; ``import deepspeed`` sets those of ``shoal.compat``
TP_SIZES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # by ``deepspeed.tp_model_init``

# By name: importing FSDP takes half a second.
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}

# By axis, the names of Megatron's parallel_state, of DeepSpeed's grids and of its sequence parallelism; the first that
# there is counts. The ``model_parallel`` ranks of a grid are those of all its pipeline stages.
_MPU_NAMES: Mapping[str, tuple[str, ...]] = {
    "tp": ("slice_parallel", "tensor_model_parallel", "model_parallel"),
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
    "sp": ("sequence_parallel",),
    "cp": ("context_parallel",),
}
# The names of a DeviceMesh's dims, in the order in which they may stand.
_DIM_NAMES: Mapping[str, tuple[str, ...]] = {
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "dp_shard": ("dp_shard", "dp", "data_parallel", "fsdp"),
    "cp": ("cp",),
    "sp": ("sp", "sequence_parallel"),
    "tp": ("tp",),
}


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
    *,
    parts: Sequence[Part] = (),
) -> Initialized:
    """Shard a model for training. DeepSpeed's signature, and ``parts``; DeepSpeed's return values.

    Args:
        model: any module; on the device, on CPU, on the meta device or built under ``zero.Init``.
        optimizer: any elementwise torch optimizer over the model's parameters, or a callable that takes them; None:
            from the config.
        model_parameters: parameters or groups for the config's optimizer; None: all that require a gradient.
        training_data: a dataset; a loader of this rank's micro-batches is returned.
        lr_scheduler: a torch schedule, or a callable that takes the optimizer; None: from the config.
        mpu: an object with Megatron's ``get_tensor_model_parallel_world_size()`` and the like: the degrees of the mesh.
        mesh_param: a torch DeviceMesh, or (data-parallel ranks, sequence-parallel ranks).
        config: a path, a dict, JSON text or base64; ``config_params`` and ``args.deepspeed_config`` are other places
            for it.
        parts: what joins the steps of the engine: objects of classes derived from ``shoal.Part``, the same on every
            rank.

    Returns: engine, optimizer (None without one), data loader, schedule.
    Raises: ConfigError, ModelError, OptimizerError, UsageError: before anything is sharded.
    Communicates: the model's values are broadcast from rank 0.
    """
    return start(
        USED,
        model,
        config if config is not None else config_params,
        args=args,
        port=distributed_port if dist_init_required else None,
        mpu=mpu,
        mesh_param=mesh_param,
        training_data=training_data,
        collate_fn=collate_fn,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        parts=parts,
    )


def start(
    classes: EngineClasses,
    model: nn.Module | None,
    config: str | pathlib.Path | dict[str, Any] | None,
    *,
    args: Any,
    port: int | None,
    mpu: Any,
    mesh_param: Any,
    training_data: Any,
    collate_fn: Callable[..., Any] | None,
    parts: Sequence[Part] = (),
    **given: Any,
) -> Initialized:
    """``initialize``, with an engine of these classes.

    Args:
        port: of the process group that is created; None: the process group is left as it is.
        given: optimizer, parameters and schedule.
    """
    with suspended():  # ``zero.Init`` contexts in which the script builds its model
        _check_model(model)
        assert model is not None
        if isinstance(training_data, TokenStream):
            _check_length(model, training_data.sequence_length)
        check_parts(parts)
        if port is not None:
            init_distributed(distributed_port=port, config=config)
        world = current_world(config)
        if config is None and not any(getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")):
            raise ConfigError(
                "no config was given.",
                do="pass config= (a path or a dict), or --deepspeed_config with shoal.add_config_arguments(parser).",
                code="config-missing",
            )
        engine = initialize_engine(
            classes.engine,
            model,
            _planned(config, args, model, world),
            world,
            args=args,
            degrees=given_degrees(model, mpu, mesh_param, world.size),
            pipeline_class=classes.pipeline,
            parts=parts,
            **given,
        )
        if mpu is not None:
            vars(engine)["mpu"] = mpu  # where clients look for it
        try:
            if training_data is not None:
                _give_loader(engine, training_data, collate_fn)
            if (spikes := engine.part(LossSpike)) is not None:
                spikes.check_data()
        except BaseException:
            engine.destroy()
            raise
        return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _check_length(model: nn.Module, length: int) -> None:
    """Raises: UsageError: samples are longer than the model's configuration says that it takes."""
    for name, longest in longest_sequences(model).items():
        if length > longest:
            raise UsageError(
                f"samples of {length} tokens, and the model takes {longest} ({type(model.config).__name__}.{name}).",
                where="training_data",
                do=f"shorten the samples of the TokenStream, or build the model with a larger {name}.",
                code="data-length",
            )


def _give_loader(engine: Engine, training_data: Any, collate_fn: Any) -> None:
    """Set the engine's loader of its training data, and the schedule that belongs to it."""
    if engine.properties.config.data_efficiency.data_sampling.dynamic_batching.enabled:
        engine.training_dataloader, engine.lr_scheduler, _ = by_tokens_of_engine(
            training_data, engine, dataloader_collate_fn=collate_fn
        )
    else:
        micro_batch = engine.train_micro_batch_size_per_gpu()
        engine.training_dataloader = loader_of(engine, training_data, micro_batch, collate_fn=collate_fn)
    if (replicas := engine.part(FaultTolerance)) is not None:
        replicas.divide_samples()


def _planned(config: Any, args: Any, model: nn.Module, world: World) -> Any:
    """The configuration; where it asks for a plan, with the planned values.

    Communicates: where it asks, rank 0's plan.
    """
    values = open_source(config, args)[0].value
    if not (keys := keys_to_plan(values)):
        return config
    # The planner runs this function dry, so it is above this package; only its name is known here.
    made: dict[str, Any] = pkgutil.resolve_name("shoal.planner.auto:planned_config")(values, keys, model, world)
    return made


def _check_model(model: Any) -> None:
    """Raises: ModelError: it is no module, or it cannot be sharded as it is."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model must be a torch.nn.Module, got {type(model).__name__}.", do="pass model=...", code="model-type"
        )
    for name, module in model.named_modules():
        bases = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.")}
        if wrappers := sorted(bases & _WRAPPERS):
            raise ModelError(
                f"{repr(name) if name else 'the model'} is wrapped in torch's {wrappers[0]},"
                " which reduces gradients too.",
                do="pass the module as it was before it was wrapped (that of DistributedDataParallel is .module).",
                code="model-wrapped",
            )
    if next(model.parameters(), None) is None and not isinstance(model, StageModule):
        raise ModelError(
            f"{type(model).__name__} has no parameters, so there is nothing to train.",
            do="pass the module that holds the parameters, after they were created.",
            code="model-empty",
        )
    lazy = [name for name, parameter in model.named_parameters() if torch.nn.parameter.is_lazy(parameter)]
    if lazy:
        raise ModelError(
            f"{counted(len(lazy), 'parameter')} without a shape yet: {listed(lazy)}.",
            do="run the model on one batch first, so that its lazy modules know their sizes.",
            code="model-lazy",
        )
    taken = [
        name for name, parameter in model.named_parameters() if isinstance(OWNERS.get(parameter), EngineParameters)
    ]
    if taken:
        raise ModelError(
            f"a live engine has {counted(len(taken), 'parameter')} of {type(model).__name__} already: {listed(taken)}.",
            do="destroy() that engine first; or hand over a copy.deepcopy() of the model that was made before it was"
            " initialized.",
            code="model-held",
        )


def loader_of(
    engine: Engine, dataset: Any, batch_size: int, *, shuffle: bool = True, **options: Any
) -> Loader | CurriculumLoader:
    """A loader whose batches are this rank's part of the data, from a position at which any number of ranks can resume.

    Args:
        shuffle: of a training loader, whose samples a curriculum by measures may choose.
        options: of torch's ``DataLoader``.
    """
    settings, ranks = engine.properties.config, engine.axes.batch
    sampling = settings.data_efficiency.data_sampling
    curriculum = settings.data_efficiency.curriculum if shuffle else None
    has_forms = callable(getattr(dataset, "form", None)) and options.get("collate_fn") is None and curriculum is None
    reads = not isinstance(engine, PipelineEngine) or engine.reads(has_forms=has_forms)
    if curriculum is not None:
        num_micro = engine.gradient_accumulation_steps()
        sampler = DifficultySampler(
            curriculum, settings.data_efficiency.seed, len(dataset), batch_size * ranks.size * num_micro
        )
        return CurriculumLoader(
            dataset,
            batch_size,
            sampler,
            rank=ranks.rank,
            world_size=ranks.size,
            num_epochs=sampling.num_epochs,
            reads=reads,
            **{**options, "num_workers": sampling.num_workers, "pin_memory": sampling.pin_memory},
        )
    options = {"num_workers": settings.data.num_workers, **options}
    if options["num_workers"] and isinstance(dataset, IterableDataset):
        raise UsageError(
            f"{options['num_workers']} workers, and an IterableDataset, whose stream each rank reads by itself.",
            where="data.num_workers",
            do="set it to 0, or pass a data set with a length and indices.",
            code="data-workers",
        )
    return Loader(
        dataset,
        batch_size,
        reads=reads,
        rank=ranks.rank,
        world_size=ranks.size,
        seed=settings.data.seed or 0,
        shuffle=shuffle,
        drop_last=settings.dataloader_drop_last,
        fills_last=settings.elasticity.enabled,
        num_micro=engine.gradient_accumulation_steps,
        device=engine.device if isinstance(dataset, TokenStream) else None,
        **options,
    )


def given_degrees(model: nn.Module, mpu: Any, mesh_param: Any, num_ranks: int) -> dict[str, int]:
    """The degree of each axis above 1 that ``initialize`` was given in code. ``mpu`` and ``mesh_param`` go first.

    Args:
        mesh_param: DeepSpeed's (data-parallel ranks, sequence-parallel ranks), or a DeviceMesh.

    Raises: ConfigError: they do not multiply to the number of ranks, or order ranks otherwise than Shoal does.
    """
    tp = TP_SIZES.get(model, 1)
    return {**({"tp": tp} if tp > 1 else {}), **_of_mesh(mpu, mesh_param, num_ranks)}


def _of_mesh(mpu: Any, mesh_param: Any, num_ranks: int) -> dict[str, int]:
    if mpu is not None:
        return _of_mpu(mpu, num_ranks)
    if isinstance(mesh_param, DeviceMesh):
        return _of_device_mesh(mesh_param, num_ranks)
    if mesh_param is None:
        return {}
    data, sequence = (int(degree) for degree in mesh_param)
    if data * sequence != num_ranks:
        raise _misfit(f"mesh_param = {tuple(mesh_param)!r}", data * sequence, num_ranks)
    return {"sp": sequence} if sequence > 1 else {}


def _of_mpu(mpu: Any, num_ranks: int) -> dict[str, int]:
    degrees: dict[str, int] = {}
    for axis, names in _MPU_NAMES.items():
        readers = [getattr(mpu, f"get_{name}_world_size", None) for name in names]
        sizes = [int(read()) for read in readers if read is not None]
        if sizes and sizes[0] > 1:
            degrees[axis] = sizes[0]
    product = 1
    for degree in degrees.values():
        product *= degree
    read_data = getattr(mpu, "get_data_parallel_world_size", None)
    data = num_ranks // product if read_data is None else int(read_data())
    if product * data != num_ranks:
        parts = " x ".join(f"{axis} {degree}" for axis, degree in {**degrees, "data-parallel": data}.items())
        raise _misfit(f"the mpu's {parts}", product * data, num_ranks)
    return degrees


def _of_device_mesh(mesh: DeviceMesh, num_ranks: int) -> dict[str, int]:
    names = mesh.mesh_dim_names or ()
    axes = [next((axis for axis, known in _DIM_NAMES.items() if name in known), name) for name in names]
    order = list(_DIM_NAMES)
    unknown = [axis for axis in axes if axis not in order]
    if unknown or not axes or axes != sorted(axes, key=order.index):
        raise ConfigError(
            f"a DeviceMesh with the dims {names!r}.",
            do=f"name its dims from these, in this order: {', '.join(order)}.",
            code="mesh",
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(num_ranks)):
        raise ConfigError(
            f"a DeviceMesh of {len(ranks)} ranks, {ranks[:8]}{' ...' if len(ranks) > 8 else ''}, in {num_ranks} ranks.",
            do=f"make it with init_device_mesh, over all {num_ranks} ranks in order.",
            code="mesh",
        )
    return {axis: size for axis, size in zip(axes, mesh.mesh.shape, strict=True) if size > 1 or axis == "dp_replicate"}


def _misfit(what: str, product: int, num_ranks: int) -> ConfigError:
    return ConfigError(
        f"{what} = {product} ranks, and there are {num_ranks}.",
        do=f"start {product} ranks, or make the degrees multiply to {num_ranks}.",
        code="mesh",
    )
