"""The engine with all of DeepSpeed's names: what its clients ask for in addition to ``forward`` and ``step``.

``deepspeed.initialize`` makes it, which also has it behave as DeepSpeed does where the two differ
(``follows_deepspeed``). After ``import deepspeed`` ``shoal.initialize`` makes it too, without that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from shoal.comm.world import process_group
from shoal.compat.engine_names import ATTRIBUTES, DERIVED, PATHS, model_dtype, refuse, value_at
from shoal.compat.hook_switch import ParameterOffload
from shoal.compat.optimizer import DeepSpeedShardedOptimizer
from shoal.config import Config
from shoal.engine.accumulation import NumTokens
from shoal.engine.engine import Engine
from shoal.engine.entry import loader_of
from shoal.engine.pipeline import PipelineEngine
from shoal.engine.settings import dtype_of
from shoal.errors import AssertedUsageError
from shoal.parallel.expert.held import modules_with_experts
from shoal.parallel.expert.layer import MOELayer, TopKGate
from shoal.pipeline.topology import PipelineParallelGrid
from shoal.running.optimizer import ShardedOptimizer


class DeepSpeedEngine(Engine):
    """An engine with all of DeepSpeed's names: ``deepspeed.DeepSpeedEngine``.

    ``deepspeed.initialize`` makes it; after ``import deepspeed`` ``shoal.initialize`` too. It has the names of
    ``shoal.Engine``, these, and getters of the config, which are in ``engine_names``.
    """

    optimizer_class = DeepSpeedShardedOptimizer
    follows_deepspeed = False  # as after deepspeed.initialize
    _is_averaging = True

    # Of parts that Shoal does not have: the values of a DeepSpeed engine without them.
    mpu: Any = None
    mesh_device = None
    pipeline_parallelism = False
    loaded_checkpoint_mp_world_size = None
    use_ds_comm = False

    if TYPE_CHECKING:
        # Of the methods that are set below this class, those in common use.
        def _reads_config(self) -> Any: ...

        fp16_enabled = bfloat16_enabled = wall_clock_breakdown = steps_per_print = zero_optimization = _reads_config
        zero_offload_param = zero_offload_optimizer = zero_cpu_offload = dynamic_loss_scale = _reads_config
        zero_gather_16bit_weights_on_model_save = scheduler_name = scheduler_params = _reads_config

    else:

        def __getattr__(self, name: str) -> Any:
            refuse(name)
            return super().__getattr__(name)

    @property
    def optimizer(self) -> Any:
        """What ``initialize`` returned as the optimizer; None without one.

        After ``deepspeed.initialize``, at stage 3 without an optimizer: ``parameter_offload``.
        """
        if self.sharded_optimizer is None and self.follows_deepspeed and self.zero_optimization_stage() == 3:
            return self.parameter_offload
        return self.sharded_optimizer

    # the optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, so that Fabric takes the engine for an optimizer and calls its ``step()``.

        Raises: AttributeError: there is no optimizer.
        """
        return self._wrapped().param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's defaults. Raises: AttributeError: there is no optimizer."""
        return self._wrapped().defaults

    @property
    def state(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        """The optimizer's state by parameter. Raises: AttributeError: there is no optimizer."""
        return self._wrapped().state

    def _wrapped(self) -> ShardedOptimizer:
        if self.sharded_optimizer is None:
            raise AttributeError("this engine has no optimizer")
        return self.sharded_optimizer

    def optimizer_name(self) -> str | None:
        """The class of the client's optimizer, or the type in the config."""
        if self.sharded_optimizer is not None:
            return type(self.sharded_optimizer.optimizer).__name__
        section = self._config.optimizer
        return section.type if section is not None else None

    def get_mom(self) -> list[Any]:
        """Momentum, or the pair of betas, of each parameter group; 0 where it has none."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """The entry ``type`` of each parameter group; 0 without one."""
        return [group.get("type", 0.0) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.sharded_optimizer is None else self.sharded_optimizer.param_groups

    @cached_property
    def parameter_offload(self) -> ParameterOffload:
        """The switch of the hooks that gather and release parameters (DeepSpeed's ``DeepSpeedZeRoOffload``)."""
        return ParameterOffload(self.sharded.model, self.sharded.switch, self.sharded.order)

    # properties

    @property
    def _config(self) -> Config:
        return self.properties.config

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch; the accumulation steps stay."""
        self.accumulation.micro_batch = micro_batch_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """Global batch, micro-batch, accumulation steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those that hold different parts of the layers."""
        return self.axes.mesh.index("tp", self.axes.world.rank)

    get_tensor_parallel_rank = get_model_parallel_rank

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that have different parts of the same sequences."""
        return self.axes.mesh.size("sequence")

    def _group_along(self, axis: str) -> Any:
        """Torch's process group; None without torch.distributed. The first time, every rank calls in the same order."""
        return None if process_group() is None else self.world.process_group(axis, self.axes.mesh)

    def get_sequence_parallel_group(self) -> Any:
        """Torch's process group of the ranks that have different parts of the same sequences; None with one rank."""
        return self._group_along("sequence") if self.sequence_parallel_size > 1 else None

    @property
    def seq_parallel_group(self) -> Any:
        """As ``get_sequence_parallel_group``."""
        return self.get_sequence_parallel_group()

    @property
    def data_parallel_group(self) -> Any:
        """Torch's process group of all data-parallel ranks; None without one."""
        return self._group_along("dp")

    @property
    def seq_data_parallel_group(self) -> Any:
        """Torch's process group of the ranks that hold the same part of the model; None without one."""
        return self._group_along("loss")

    @property
    def communication_data_type(self) -> torch.dtype:
        """The reduce dtype of gradients in the config; without one, the parameters' dtype."""
        wanted = dtype_of(self._config.communication_data_type)
        return wanted or model_dtype(self._config)

    @property
    def losses(self) -> float:
        """The mean of this rank's losses in the last step; 0 before the first."""
        return self.accumulation.mean_loss or 0.0

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last step by phase, under DeepSpeed's names, with ``wall_clock_breakdown``."""
        names = {"fwd": "forward", "bwd": "backward", "bwd_allreduce": "reduce", "step": "step"}
        last = self.timers.last_step
        return {name: last[phase] for name, phase in names.items() if phase in last}

    # experts

    @property
    def has_moe_layers(self) -> bool:
        """True if the model has layers of experts."""
        return bool(self.num_experts)

    @property
    def num_experts(self) -> list[int]:
        """The experts of each layer that has some, in the model's order."""
        return [experts.num_experts for _, _, experts in modules_with_experts(self.module)]

    @property
    def moe_layers(self) -> list[MOELayer]:
        """The ``MOELayer`` of each ``moe.layer.MoE``."""
        return [module for module in self.module.modules() if isinstance(module, MOELayer)]

    @property
    def gate_modules(self) -> list[TopKGate]:
        """The ``TopKGate`` of each ``moe.layer.MoE``."""
        return [module for module in self.module.modules() if isinstance(module, TopKGate)]

    @property
    def expert_parallel_group(self) -> dict[str, Any]:
        """Torch's process group of the ranks that hold different experts, by its name; see ``expert_group_name``."""
        return self._groups_of_experts("ep")

    @property
    def expert_data_parallel_group(self) -> dict[str, Any]:
        """Torch's process group of the ranks that hold the same experts, by the name of the others' group."""
        return self._groups_of_experts("expert_data")

    def _groups_of_experts(self, axis: str) -> dict[str, Any]:
        """The first time, every rank calls."""
        mesh, is_alone = self.axes.mesh, self.world.backend == "none"
        sizes = sorted({experts.ep_size for _, _, experts in modules_with_experts(self.module)})
        return {
            f"ep_size_{size}": None if is_alone else self.world.process_group(axis, replace(mesh, ep=size))
            for size in sizes
        }

    # data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader whose batches are this rank's part of the data.

        Args:
            batch_size: samples of one batch of this rank; None: the micro-batch.
            route: "train" shuffles; anything else keeps the order.
            data_sampler: chooses what this rank reads; None: samples are divided over the data-parallel ranks, at a
                position from which any number of ranks can resume.
        """
        batch_size = batch_size or self.accumulation.micro_batch
        workers = self._config.data.num_workers if num_local_io_workers is None else num_local_io_workers
        common: dict[str, Any] = {"collate_fn": collate_fn, "num_workers": workers, "pin_memory": pin_memory}
        if data_sampler is None:
            return loader_of(self, dataset, batch_size, shuffle=route == "train", **common)
        is_last_dropped = self._config.dataloader_drop_last
        return DataLoader(dataset, batch_size=batch_size, sampler=data_sampler, drop_last=is_last_dropped, **common)

    def random_ltd_initialize(self) -> None:
        """Nothing: the config names the layers, and their modules stay as they are."""

    # weights

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Whole values by name on rank 0, None on the others. Every rank calls."""
        self._check_alive()
        is_first = self.axes.world.rank == 0
        values = self.weights.module_state_dict(exclude_frozen=exclude_frozen_parameters, is_kept=is_first)
        return values if is_first else None

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """The old name of ``save_16bit_model``, with the file name of its time."""
        return self.save_16bit_model(save_dir, save_filename, False)

    # how gradients are accumulated and reduced

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        num_tokens: NumTokens | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        loss = super().backward(loss, retain_graph, scale_wrt_gas, num_tokens, **kwargs)
        is_averaged = self.follows_deepspeed and scale_wrt_gas and num_tokens is None
        num_micro = self.gradient_accumulation_steps()
        return loss / num_micro if is_averaged and num_micro > 1 else loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        stage = self.zero_optimization_stage()
        if stage > 1:
            self._refuse_as_deepspeed(
                f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}",
                "use coalesce_grad_reduction(), or import shoal: under its own name no_sync() works at every stage.",
            )
        if self._is_in_block:
            self._refuse_as_deepspeed("no_sync context manager reentry is unsupported", "enter it once.")
        with super().no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        if not self.accumulation.is_managed:
            self._refuse_as_deepspeed(
                "coalesce_grad_reduction is not supported with managed_gradient_accumulation=False",
                "leave the block out: step() reduces what no backward pass has reduced.",
            )
        if self._is_in_block:
            self._refuse_as_deepspeed(
                "coalesce_grad_reduction cannot be nested inside another no_sync context", "enter one block."
            )
        with super().coalesce_grad_reduction():
            yield

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        if self._is_in_block:
            self._refuse_as_deepspeed(
                "It is illegal to call Engine.step() inside no_sync context manager", "step after the block."
            )
        super().step(lr_kwargs)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        if not self.accumulation.is_managed:
            self._refuse_as_deepspeed(
                "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation=False",
                "leave the call out: every step() is a boundary.",
            )
        super().set_gradient_accumulation_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the optimizer steps after the current micro-batch.

        False under DeepSpeed's name with ``managed_gradient_accumulation: false``: only ``step()`` is a boundary.
        """
        is_unmanaged = self.follows_deepspeed and not self.accumulation.is_managed
        return not is_unmanaged and super().is_gradient_accumulation_boundary()

    @property
    def _is_in_block(self) -> bool:
        """True if the script calls from inside ``no_sync()`` or ``coalesce_grad_reduction()``."""
        return not self.sharded.reducer.is_syncing

    def _refuse_as_deepspeed(self, problem: str, do: str) -> None:
        """Raises: AssertedUsageError: after ``deepspeed.initialize``."""
        if self.follows_deepspeed:
            raise AssertedUsageError(f"{problem}, as DeepSpeed says.", do=do, code="no-sync-deepspeed")

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """End a backward pass that is open. Gradients are reduced during backward, or by ``step()``."""
        self._check_alive()
        self.sharded.finish_backward()

    @property
    def gradient_average(self) -> bool:
        """True if gradients are the mean over the ranks, as the configuration has it. Set to false: their sum, from
        the next backward pass on. Set it on every rank alike.
        """
        return self._is_averaging

    @gradient_average.setter
    def gradient_average(self, value: bool) -> None:
        self._is_averaging = bool(value)
        plan = self.plan.precision.gradient
        pre, post = (plan.pre_scale, plan.post_scale) if value else (1.0, 1.0)
        for group in self.sharding.groups:
            group.gradient.policy = replace(group.gradient.policy, pre_scale=pre, post_scale=post)

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Names of the weights whose gradients are reduced as sparse gradients."""
        return set(self.sharded.sparse_names)


class DeepSpeedPipelineEngine(PipelineEngine, DeepSpeedEngine):
    """``deepspeed.PipelineEngine``: ``train_batch`` and ``eval_batch`` in addition to the names of an engine."""

    pipeline_parallelism = True

    @cached_property
    def grid(self) -> PipelineParallelGrid:
        """This rank's coordinates among stages, data-parallel and tensor-parallel ranks."""
        return PipelineParallelGrid()

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step."""
        return self.gradient_accumulation_steps()

    @property
    def num_stages(self) -> int:
        """Ranks along the pipeline."""
        return self._num_pipeline_ranks

    @property
    def stage_id(self) -> int:
        """This rank's coordinate along ``pp``."""
        return self._pipeline_rank

    @property
    def is_pipe_parallel(self) -> bool:
        """True if there are several pipeline stages."""
        return self._num_pipeline_ranks > 1

    @property
    def is_data_parallel(self) -> bool:
        """True if several ranks have different samples."""
        return self.axes.batch.size > 1

    @property
    def is_model_parallel(self) -> bool:
        """True if each layer is split over ranks."""
        return self.axes.get("tp") is not None

    def reset_activation_shape(self) -> None:
        """Shapes of activations are sent anew with the next batch."""
        self._runner.forget()

    def get_additional_losses(self) -> Any:
        """None: a model has one loss."""
        return None

    def set_has_attention_mask(self, value: bool) -> None:
        """No effect: any tensors cross a boundary."""

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's coordinate along ``pp``."""
        return self._pipeline_rank


def _from_path(path: str) -> Callable[[DeepSpeedEngine], Any]:
    return lambda engine: value_at(engine.properties.config, path)


def _from_config(value: Callable[[Config], Any]) -> Callable[[DeepSpeedEngine], Any]:
    return lambda engine: value(engine.properties.config)


for _name, _path in ATTRIBUTES.items():
    setattr(DeepSpeedEngine, _name, property(attrgetter(_path)))
for _name, _path in PATHS.items():
    setattr(DeepSpeedEngine, _name, _from_path(_path))
for _name, _value in DERIVED.items():
    setattr(DeepSpeedEngine, _name, _from_config(_value))
