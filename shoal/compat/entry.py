"""``deepspeed.initialize``: Shoal's, with an engine that has DeepSpeed's names and does as DeepSpeed's does."""

from __future__ import annotations

import pathlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from shoal.access.engine_parameters import EngineParameters
from shoal.comm.environment import read_launch
from shoal.comm.world import current_world, init_distributed, process_group
from shoal.compat.assertions import be_assertion
from shoal.compat.checkpoint_files import prepare
from shoal.compat.engine import DeepSpeedEngine, DeepSpeedPipelineEngine
from shoal.compat.engine_names import value_at
from shoal.compat.leaf_modules import set_z3_leaf_modules, set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix
from shoal.compat.optimizer import DeepSpeedShardedOptimizer, take_class
from shoal.compat.optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, mark
from shoal.compat.timer import ThroughputTimer
from shoal.engine.engine import Engine
from shoal.engine.entry import TP_SIZES, USED, EngineClasses, start
from shoal.engine.log import say_on_rank_0
from shoal.errors import ConfigError, ModelError, OptimizerError, UsageError
from shoal.running.parameter_owner import OWNERS

DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class AssertedConfigError(ConfigError, AssertionError):
    """A ConfigError where DeepSpeed asserts."""


class RefusedFormatsError(ConfigError, NotImplementedError):
    """A ConfigError where DeepSpeed raises NotImplementedError."""


CLASSES = EngineClasses(DeepSpeedEngine, DeepSpeedPipelineEngine)


def use_classes(classes: EngineClasses) -> None:
    """From now on ``shoal.initialize`` makes engines of these classes: ``CLASSES``, or Shoal's own."""
    USED.engine, USED.pipeline = classes.engine, classes.pipeline


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
) -> tuple[Any, Any, Any, Any]:
    """``shoal.initialize``, with torch.distributed initialised even for one rank, since scripts ask it.

    Returns: engine; optimizer (at stage 3 without one: what gathers and releases parameters); data loader; schedule.
    Raises: what shoal.initialize raises; of the config, the model and the optimizer as AssertionErrors too, since
        DeepSpeed asserts.
    """
    if dist_init_required is not False and current_world().backend == "none":
        init_distributed(distributed_port=distributed_port, verbose=False)
    if dist_init_required is False and process_group() is None and read_launch(mpi_and_slurm=False):
        raise UsageError(
            "a launcher started this process, but there is no process group, and dist_init_required=False forbids"
            " creating one.",
            do="call deepspeed.init_distributed() before, or leave dist_init_required out.",
        )
    if isinstance(model, nn.Module):
        _take_over(model)
    try:
        started, _, loader, schedule = start(
            CLASSES,
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
        )
    except (ConfigError, ModelError, OptimizerError) as error:
        be_assertion(error)
        raise
    engine = cast(DeepSpeedEngine, started)
    try:
        _refuse_what_deepspeed_refuses(engine, optimizer)
    except ConfigError:
        engine.destroy()
        raise
    _round_masters(engine)
    _mark_leaves(engine)
    _ignore_order_of_steps(optimizer)
    engine.follows_deepspeed = True
    engine.weights_filename = "pytorch_model.bin"
    resolved = engine.properties.config
    is_managed = resolved.managed_gradient_accumulation
    engine.accumulation.refuses_direct = not is_managed and engine.zero_optimization_stage() == 0
    made = engine.sharded_optimizer
    if made is not None and optimizer is None:
        mark(made, resolved)
    is_wrapped = engine.zero_optimization_stage() > 0 or resolved.fp16.enabled or resolved.bf16.enabled
    if isinstance(made, DeepSpeedShardedOptimizer) and not is_wrapped:
        take_class(made)
    engine.checkpointing.extra_files = partial(prepare, cast(Engine, weakref.proxy(engine)))
    engine.checkpointing.allows_missing = True
    if resolved.checkpoint.async_save and engine.zero_optimization_stage() < 3:
        say_on_rank_0(
            engine.global_rank,
            "checkpoint.async_save: mp_rank_00_model_states.pt holds no module; zero_to_fp32.py gives the weights",
        )
    _time_steps(engine)
    return engine, engine.optimizer, loader, schedule


def _ignore_order_of_steps(optimizer: Any) -> None:
    """Accelerate replaces an optimizer by DeepSpeed's for the host, on the same groups, and steps the schedule that was
    made for the first one, after the engine's step. torch would warn, since the first one is never stepped.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    if any("initial_lr" in group for group in optimizer.param_groups):  # a schedule was made for another optimizer
        order = r"Detected call of `lr_scheduler\.step\(\)` before"
        warnings.filterwarnings("ignore", order, UserWarning, module=r"accelerate\.scheduler$")


def _round_masters(engine: Engine) -> None:
    """Master weights begin as the 16-bit parameters are, as in DeepSpeed, whose losses they then give.

    Shoal by its own name begins with the model's values.
    """
    with torch.no_grad():
        for group in engine.sharding.groups:
            if group.has_own_main:
                with group.resident(), group.buffer.storage.resident():
                    group.main.copy_(group.buffer.shard)


def _refuse_what_deepspeed_refuses(engine: DeepSpeedEngine, optimizer: Any) -> None:
    """Raises: AssertedConfigError, RefusedFormatsError: what works in Shoal and is asked for in vain under DeepSpeed's
    name.
    """
    zero = engine.properties.config.zero_optimization
    stage, size = zero.stage, value_at(engine.properties.config, "zero_optimization.allgather_bucket_size")
    if stage in (1, 2) and size % 2:
        raise AssertedConfigError(
            f"allgather_bucket_size must be a multiple of nccl_start_alignment_factor, which is 2, got {size}.",
            where="zero_optimization.allgather_bucket_size",
            do="make it even, or leave it out: Shoal does not use it.",
            code="deepspeed-refuses",
        )
    settings = engine.properties.config
    if not settings.managed_gradient_accumulation:
        is_pipeline = engine.pipeline_parallelism
        if is_pipeline or (settings.zero_optimization.overlap_comm and stage < 2):
            raise AssertedConfigError(
                "managed_gradient_accumulation=False is not supported with pipeline parallelism."
                if is_pipeline
                else "managed_gradient_accumulation=False supports ZeRO overlap_comm only with ZeRO stage 2.",
                where="managed_gradient_accumulation" if is_pipeline else "zero_optimization.overlap_comm",
                do="leave the key out; or call shoal.initialize, which takes it.",
                code="deepspeed-refuses",
            )
    model_format = "fp16" if settings.fp16.enabled else "bf16" if settings.bf16.enabled else "fp32"
    wanted = settings.data_types.grad_accum_dtype
    if stage == 0 and engine.sharded_optimizer is not None and wanted not in (None, model_format):
        raise RefusedFormatsError(
            f"gradients in {wanted} of a model in {model_format} at stage 0.",
            where="data_types.grad_accum_dtype",
            do="set zero_optimization.stage to 1; or call shoal.initialize, where stage 0 has it too.",
            code="deepspeed-refuses",
        )
    is_asked_for = engine.config.get("zero_force_ds_cpu_optimizer") is True
    is_another = isinstance(optimizer, torch.optim.Optimizer) and not isinstance(
        optimizer, DeepSpeedCPUAdam | DeepSpeedCPUAdagrad | DeepSpeedCPULion
    )
    offload = zero.offload_optimizer
    if is_asked_for and is_another and offload is not None and offload.device != "none":
        raise AssertedConfigError(
            f"an optimizer on the host must be DeepSpeedCPUAdam, as the config asks; got {type(optimizer).__name__}.",
            where="zero_force_ds_cpu_optimizer",
            do="leave the key out: Shoal updates on the host with any optimizer.",
            code="deepspeed-refuses",
        )


def _mark_leaves(engine: Engine) -> None:
    """Put the mark that scripts ask for on the modules that the config says are one unit."""
    leaf = engine.properties.config.zero_optimization.leaf_module
    if engine.zero_optimization_stage() == 3:
        set_z3_leaf_modules(engine.module, leaf.classes, raise_if_not_found=False)
        set_z3_leaf_modules_by_name(engine.module, leaf.names, raise_if_not_found=False)
        set_z3_leaf_modules_by_suffix(engine.module, leaf.name_suffixes, raise_if_not_found=False)


def _time_steps(engine: Engine) -> None:
    """``engine.tput_timer``: seconds from step to step, by the host's clock."""
    timer = ThroughputTimer(SimpleNamespace(enabled=True, synchronized=False), engine.train_batch_size())

    def step(_: Engine) -> None:
        timer.stop(global_step=True)
        timer.start()

    vars(engine)["tput_timer"] = timer
    engine.on_step.append(step)


def _take_over(model: nn.Module) -> None:
    """The engines that hold the model's parameters give them back: the one that is made now has them.

    Lightning hands a model over again to test it after fit. Under DeepSpeed the engine from before stays, with hooks
    that were stripped and weights that no longer follow.

    Communicates: destroy()'s, on all ranks.
    """
    for owner, _ in OWNERS.grouped(list(model.parameters())):
        if isinstance(owner, EngineParameters) and isinstance(owner.engine, Engine):
            say_on_rank_0(
                current_world().rank,
                f"deepspeed.initialize: {type(model).__name__} belonged to another engine, which is destroyed now.",
            )
            owner.engine.destroy()


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """The model, cast to ``dtype``. ``initialize`` splits its layers over ``tp_size`` ranks.

    Args:
        config: accepted; ``initialize`` is given the config itself.

    Raises: ConfigError: ``tp_size`` is below 1.
    """
    if tp_size < 1:
        raise ConfigError(f"tp_size is {tp_size}.", do="give the number of tensor-parallel ranks.", code="mesh")
    TP_SIZES[model] = tp_size
    return model.to(dtype)


def set_autotp_mode(training: bool = False) -> None:
    """No effect: layers are split for training, which serves inference too."""
