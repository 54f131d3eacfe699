"""The names of DeepSpeed's engine beside those that train: what its clients ask, in DeepSpeed's words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.comm.world import process_group
from shoal.data.curriculum import CurriculumScheduler
from shoal.engine.getters import getter, refuse
from shoal.engine.settings import dtype_of
from shoal.engine.sparse_face import SparseFace
from shoal.errors import AssertedUsageError, NotBuiltError
from shoal.models.layer_drop import ProgressiveLayerDrop
from shoal.observe.monitor import Monitor
from shoal.observe.timers import StepTimers
from shoal.zero.hook_switch import ParameterOffload
from shoal.zero.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from shoal.comm.world import World
    from shoal.config import Config
    from shoal.engine.checkpointing import Checkpointing
    from shoal.engine.curriculum import Curriculum
    from shoal.engine.losses import Losses
    from shoal.engine.progress import Progress
    from shoal.engine.weights import Weights
    from shoal.zero.runtime import ShardedModel
    from shoal.zero.settings import Axes

# Of parts that are not built, as a script without them finds them in DeepSpeed.
_PLAIN: Mapping[str, Any] = {
    "mpu": None,
    "mesh_device": None,
    "has_moe_layers": False,
    "num_experts": (),
    "moe_layers": (),
    "gate_modules": (),
    "mp_world_size": 1,
    "sequence_parallel_size": 1,
    "pipeline_parallelism": False,
    "loaded_checkpoint_mp_world_size": None,
    "seq_parallel_group": None,
    "use_ds_comm": False,
}


class DeepSpeedFace(SparseFace):
    """What ``Engine`` has for DeepSpeed's sake."""

    if TYPE_CHECKING:
        module: nn.Module
        sharded: ShardedModel
        sharded_optimizer: ShardedOptimizer | None
        follows_deepspeed: bool
        weights: Weights
        checkpointing: Checkpointing
        axes: Axes
        curriculum: Curriculum
        world: World
        progress: Progress | None
        timers: StepTimers
        _config_object: Config
        _losses: Losses

        def _check_alive(self) -> None: ...
        def no_sync(self) -> AbstractContextManager[None]: ...
        def train_batch_size(self) -> int: ...
        def train_micro_batch_size_per_gpu(self) -> int: ...
        def gradient_accumulation_steps(self) -> int: ...
        def zero_optimization_stage(self) -> int: ...
        def save_16bit_model(self, save_dir: Any, save_filename: str, exclude_frozen_parameters: bool) -> bool: ...

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
        found = getter(name, self._config_object)
        if found is not None:
            return found
        if name in _PLAIN:
            value = _PLAIN[name]
            return list(value) if isinstance(value, tuple) else value
        refuse(name)
        return getattr(module, name)

    # the optimizer

    @property
    def optimizer(self) -> Any:
        """What ``initialize`` returned as the optimizer; None without one.

        Where the engine follows DeepSpeed, at stage 3 without an optimizer: ``parameter_offload``.
        """
        if self.sharded_optimizer is None and self.follows_deepspeed and self.zero_optimization_stage() == 3:
            return self.parameter_offload
        return self.sharded_optimizer

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer that ``optimizer`` wraps; None without one."""
        return None if self.sharded_optimizer is None else self.sharded_optimizer.optimizer

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
        """The class of the optimizer that was handed in, or the type in the config."""
        if self.sharded_optimizer is not None:
            return type(self.sharded_optimizer.optimizer).__name__
        section = self._config_object.optimizer
        return section.type if section is not None else None

    def get_mom(self) -> list[Any]:
        """Momentum, or the pair of betas, of each parameter group; 0 where it has none."""
        groups = [] if self.sharded_optimizer is None else self.sharded_optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        """The entry ``type`` of each parameter group; 0 where it has none."""
        return (
            []
            if self.sharded_optimizer is None
            else [group.get("type", 0.0) for group in self.sharded_optimizer.param_groups]
        )

    @property
    def parameter_offload(self) -> ParameterOffload:
        """The switch of the hooks that gather and release parameters (DeepSpeed's ``DeepSpeedZeRoOffload``)."""
        return self.sharded.offload

    # what it is

    @property
    def _config(self) -> Config:
        return self._config_object

    def get_batch_info(self) -> tuple[int, int, int]:
        """Global batch, micro-batch, accumulation steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_data_parallel_rank(self) -> int:
        """This rank's number among the data-parallel ones."""
        return self.axes.all.rank

    def get_model_parallel_rank(self) -> int:
        """0: there is no model parallelism."""
        return 0

    def get_tensor_parallel_rank(self) -> int:
        """0: there is no tensor parallelism."""
        return 0

    def get_sequence_parallel_group(self) -> None:
        """None: there is no sequence parallelism."""

    @property
    def seq_dp_world_size(self) -> int:
        """Data-parallel times sequence-parallel ranks."""
        return self.axes.all.size

    @property
    def data_parallel_group(self) -> Any:
        """Torch's process group of all data-parallel ranks; None without one."""
        return process_group()

    @property
    def seq_data_parallel_group(self) -> Any:
        """As ``data_parallel_group``."""
        return self.data_parallel_group

    @property
    def dist_backend(self) -> str:
        """``gloo``, ``nccl``, or another name of how the ranks speak."""
        return self.world.backend

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """What gradients are sent in; None: their own dtype."""
        return dtype_of(self._config_object.communication_data_type, "communication_data_type")

    @property
    def loaded_checkpoint_dp_world_size(self) -> int | None:
        """Data-parallel ranks of the run that saved the checkpoint loaded last; None before one is."""
        return self.checkpointing.loaded_size

    @property
    def losses(self) -> float:
        """The mean of this rank's losses in the last step; 0 before the first."""
        return self._losses.mean or 0.0

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter."""
        return {parameter: name for name, parameter in self.module.named_parameters()}

    @property
    def monitor(self) -> Monitor:
        """Where values over steps go; ``monitor.write_events([(name, value, samples)])``. Rank 0 writes."""
        held = self.progress.monitor if self.progress is not None else None
        return held if held is not None else Monitor()

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of ``fwd``, ``bwd`` and ``step``, with ``wall_clock_breakdown``; reading them resets nothing."""
        names = ("fwd", "bwd", "step") if self.timers.is_on else ()
        return {name: self.timers(name).elapsed(reset=False) for name in names}

    # gradients

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backward passes inside the block are reduced once, by the next one outside of it or by ``step()``.

        Memory: as ``no_sync``.
        """
        with self.no_sync():
            yield

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """End a backward pass that is open. Gradients are reduced as it goes on, or by ``step()``."""
        self._check_alive()
        self.sharded.finish_backward()

    def _local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part, without elements where it owns none; None without a gradient."""
        if not self.access.has_gradient(parameter):
            return None
        part = self.access.local_gradient(parameter)
        return torch.empty(0, device=parameter.device) if part is None else part

    def _refuse_no_sync(self) -> None:
        stage = self.zero_optimization_stage()
        if stage > 1:
            raise AssertedUsageError(
                "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage"
                f" {stage}, as DeepSpeed says.",
                do="leave it out, or import shoal: under its own name no_sync() works at every stage.",
                code="no-sync-deepspeed",
            )
        if not self.sharded.reducer.is_syncing:
            raise AssertedUsageError(
                "no_sync context manager reentry is unsupported, as DeepSpeed says.",
                do="enter it once.",
                code="no-sync-deepspeed",
            )

    def _refuse_step_in_no_sync(self) -> None:
        if not self.sharded.reducer.is_syncing:
            raise AssertedUsageError(
                "It is illegal to call Engine.step() inside no_sync context manager, as DeepSpeed says.",
                do="step after the block.",
                code="no-sync-deepspeed",
            )

    # weights

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Whole values by name on rank 0, None on the others. Every rank calls."""
        self._check_alive()
        is_first = self.axes.all.rank == 0
        found = self.weights.module_state_dict(exclude_frozen=exclude_frozen_parameters, is_kept=is_first)
        return found if is_first else None

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """The old name of ``save_16bit_model``, with the file name of its time."""
        return self.save_16bit_model(save_dir, save_filename, False)

    # what a forward gets by the step

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """The schedule of ``progressive_layer_drop`` in the config; None without it."""
        return self.curriculum.layer_drop

    def get_pld_theta(self) -> float | None:
        """The share of layers that the next training forward is told to keep; None without the section."""
        return None if self.curriculum.layer_drop is None else self.curriculum.layer_drop.get_theta()

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """The schedule of ``curriculum_learning`` in the config; None without it."""
        return self.curriculum.scheduler

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], int]] | Callable[[int], int]
    ) -> None:
        """The function of a curriculum whose ``schedule_type`` is ``custom``; before the first forward.

        Args:
            schedule_func_dict: by ``curriculum_type``, or the function alone: from a step, counted from 1, to a length.

        Raises: UsageError: the config has no such curriculum, or its function is not among them.
        """
        self.curriculum.set_custom_schedule(schedule_func_dict)

    # compiling

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model's forward in place, as ``torch.nn.Module.compile`` does.

        Args:
            compile_kwargs: handed on to ``torch.compile``.

        Raises: NotBuiltError: a schedule of DeepCompile's, or compiled autograd.
        """
        self._check_alive()
        if schedule is not None or compiled_autograd_enabled:
            raise NotBuiltError(
                "engine.compile() takes no schedule of DeepCompile's and no compiled autograd.",
                do="leave schedule and compiled_autograd_enabled out.",
            )
        self.module.compile(**{"backend": backend, **(compile_kwargs or {})})

    @property
    def is_compiled(self) -> bool:
        """Was the model's forward compiled?"""
        return self.module._compiled_call_impl is not None
