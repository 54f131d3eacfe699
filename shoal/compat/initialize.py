"""``shoal.initialize``: DeepSpeed's signature, translated for the engine's own ``initialize``."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from shoal.access.init import suspended
from shoal.comm.world import current_world, init_distributed
from shoal.compat.engine import DeepSpeedEngine, DeepSpeedPipelineEngine
from shoal.compat.given_mesh import given_degrees
from shoal.compat.optimizer import DeepSpeedShardedOptimizer
from shoal.data import Loader
from shoal.engine.initialize import check_model
from shoal.engine.initialize import initialize as initialize_engine
from shoal.engine.parts.part import Part, check_parts
from shoal.errors import ConfigError

MaybeNone: TypeAlias = Any  # not checked for None, as typeshed does: the config decides whether there is one
Initialized: TypeAlias = tuple[DeepSpeedEngine, DeepSpeedShardedOptimizer | MaybeNone, Loader | MaybeNone, Any]


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
    with suspended():  # ``zero.Init`` contexts in which the script builds its model
        check_model(model)
        assert model is not None
        check_parts(parts)
        if dist_init_required:
            init_distributed(distributed_port=distributed_port)
        world = current_world()
        source = config if config is not None else config_params
        if source is None and not any(getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")):
            raise ConfigError(
                "no config was given.",
                do="pass config= (a path or a dict), or --deepspeed_config with shoal.add_config_arguments(parser).",
                code="config-missing",
            )
        degrees = given_degrees(model, mpu, mesh_param, world.size)
        engine = initialize_engine(
            DeepSpeedEngine,
            model,
            source,
            world,
            args=args,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            degrees=degrees,
            pipeline_class=DeepSpeedPipelineEngine,
            parts=parts,
        )
        engine.mpu = mpu
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
        return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler
