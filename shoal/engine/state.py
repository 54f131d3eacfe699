"""What an engine has and tells: its numbers, its settings, and the calls that move its state elsewhere and back."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shoal.comm.world import World
from shoal.engine.accumulation import Accumulation
from shoal.engine.checkpointing import Checkpointing
from shoal.engine.offload_states import Offloaded, OffloadStates
from shoal.engine.parts.part import Part, PartCalls
from shoal.engine.profiling import ProfilingTimers
from shoal.engine.progress import Progress
from shoal.engine.run_state import RunState
from shoal.engine.settings import Plan, Properties
from shoal.engine.sharding import Sharding
from shoal.engine.weights import Weights
from shoal.errors import OutOfMemoryError, UsageError
from shoal.observe.flops_profiler import FlopsProfiler
from shoal.observe.ledger import Ledger, write_snapshot
from shoal.observe.monitor import Monitor
from shoal.observe.timers import StepTimers
from shoal.running.optimizer import ShardedOptimizer
from shoal.sharding.axes import Axes
from shoal.sharding.placement import Tier

AnyPart = TypeVar("AnyPart", bound=Part)


class EngineState(nn.Module):
    """The state of an engine between two passes. ``Engine``, which makes its attributes, runs the passes."""

    weights_filename = "model.safetensors"  # of ``save_16bit_model``, where the call names none

    module: nn.Module
    properties: Properties
    accumulation: Accumulation
    sharding: Sharding
    run_state: RunState
    offloaded: Offloaded
    world: World
    plan: Plan
    axes: Axes
    parts: tuple[Part, ...]
    sharded_optimizer: ShardedOptimizer | None
    timers: StepTimers
    weights: Weights
    checkpointing: Checkpointing
    _calls: PartCalls
    _offload_states: OffloadStates
    _norm: float | None
    _progress: Progress
    _was_step_applied: bool
    _is_destroyed: bool

    def part(self, kind: type[AnyPart]) -> AnyPart | None:
        """The part of this class; None: there is none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as given."""
        return self.properties.config.raw

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self.world.local_rank

    @property
    def global_rank(self) -> int:
        """This rank's number among all."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.world.size

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks, which have different samples."""
        return self.axes.batch.size

    @property
    def mp_world_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.axes.mesh.tp

    def get_data_parallel_rank(self) -> int:
        """This rank's number among the data-parallel ones."""
        return self.axes.batch.rank

    @property
    def device(self) -> torch.device:
        """The device of this rank, where inputs belong."""
        return self.properties.device.torch_device

    @property
    def optimizer(self) -> Any:
        """The optimizer that ``initialize`` returned; None without one."""
        return self.sharded_optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The schedule; stepped by ``step()`` after each step that was applied. Set it to None to step your own."""
        return self.run_state.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self.run_state.lr_scheduler = schedule

    @property
    def data(self) -> Any:
        """``training_dataloader``: ``engine.data.replay(step)``, ``skip_steps``, ``set_weights``."""
        return self.run_state.training_dataloader

    @property
    def training_dataloader(self) -> Any:
        """The loader of ``training_data``; None without it."""
        return self.run_state.training_dataloader

    @training_dataloader.setter
    def training_dataloader(self, loader: Any) -> None:
        self.run_state.training_dataloader = loader
        if not self.accumulation.micro_in_step:
            self.run_state.begin_step()

    @property
    def global_steps(self) -> int:
        """Steps so far, skipped ones included."""
        return self.accumulation.counters.global_steps

    @global_steps.setter
    def global_steps(self, value: int) -> None:
        self.accumulation.counters.global_steps = value

    @property
    def global_samples(self) -> int:
        """Samples so far, over all ranks."""
        return self.accumulation.counters.global_samples

    @global_samples.setter
    def global_samples(self, value: int) -> None:
        self.accumulation.counters.global_samples = value

    @property
    def micro_steps(self) -> int:
        """Calls of ``step()`` so far, one for each micro-batch."""
        return self.accumulation.counters.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.accumulation.counters.micro_steps = value

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a loss or gradient was not finite."""
        return self.accumulation.counters.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self.accumulation.counters.skipped_steps = value

    def train_batch_size(self) -> int:
        """Samples of one step, over all ranks."""
        return self.accumulation.global_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch of one rank."""
        return self.accumulation.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step."""
        return self.accumulation.num_micro

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps.

        Raises: ConfigError: it does not divide by micro-batch x data-parallel ranks. UsageError: in the middle of a
        step.
        """
        self.accumulation.set_global_batch(train_batch_size)

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.properties.stage

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0: no clipping."""
        return self.plan.clip_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [] if self.sharded_optimizer is None else [g.get("lr", 0.0) for g in self.sharded_optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm over all axes of the last step's gradients, before clipping; None before the first step."""
        return self._norm

    def was_step_applied(self) -> bool:
        """True if the last ``step()`` changed the parameters."""
        return self._was_step_applied

    @property
    def loss_scale(self) -> float:
        """The factor of losses under fp16; 1 otherwise."""
        return 1.0 if self.accumulation.loss_scale is None else self.accumulation.loss_scale.scale

    @property
    def monitor(self) -> Monitor:
        """Writes values by step: ``monitor.write_events([(name, value, samples)])``. Rank 0 writes."""
        return self._progress.monitor if self._progress.monitor is not None else Monitor()

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """The ``FlopsProfiler`` of the config's section; None without it."""
        return self.timers.profiler if isinstance(self.timers, ProfilingTimers) else None

    def memory_report(self) -> Ledger:
        """Bytes by kind, tier and unit, and the allocator's figures."""
        saved: Counter[Tier] = Counter()
        for call in self._calls.saved_nbytes:
            saved.update(call())
        return self.sharding.ledger(saved, self.offloaded.ledger_kinds)

    # checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that a run needs to resume. Every rank calls.

        Args:
            save_dir: a folder that all ranks see, or an fsspec URL.
            tag: the checkpoint's name; None: ``global_step`` and the number of steps. A checkpoint of that name is
                replaced when the new one is complete.
            client_state: what ``load_checkpoint`` will return: numbers, text, lists, dicts and tensors.
            save_latest: ``load_checkpoint`` without a tag may choose this one.

        Returns: was it saved? (With ``checkpoint.async_save``: was it begun?)
        Raises: CheckpointError: on every rank; older checkpoints and the running state are unchanged.
        Communicates: what each rank wrote, as JSON; no parameter.
        Memory: one block of 4 MiB on the host; with ``checkpoint.async_save`` this rank's share of the state.
        """
        self._be_ready()
        with self._in_checkpoint():
            return self.checkpointing.save(
                save_dir, tag, client_state, save_latest=save_latest, exclude_frozen=exclude_frozen_parameters
            )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:
        """Load a checkpoint that any layout saved, or one of DeepSpeed's, universal or not. Every rank calls.

        Args:
            load_dir: the folder that was saved to, or an fsspec URL; of DeepSpeed's checkpoints a local one.
            tag: its name; None: the newest complete one, or the one of DeepSpeed's that ``latest`` names. With
                ``checkpoint.load_universal`` the one that ``latest_universal`` names.
            load_module_strict: False: parameters that only one side has are left out, and logged.
            load_module_only: the weights alone; counters, optimizer and schedule stay as they are.
            custom_load_fn: called as ``custom_load_fn(src=values by name, dst=module)`` with all parameters gathered.

        Returns: the checkpoint's path, and the client state. (Both None under ``import deepspeed`` if there is none.)
        Raises: CheckpointError: on every rank; nothing was changed.
        Communicates: below stage 3 one all_gather of the parameters; short messages.
        Memory: one block of 4 MiB on the host; of DeepSpeed's checkpoints one parameter.
        """
        self._be_ready("loading")
        with self._in_checkpoint():
            return self.checkpointing.load(
                load_dir,
                tag,
                is_strict=load_module_strict,
                has_optimizer=load_optimizer_states,
                has_schedule=load_lr_scheduler_states,
                is_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )

    @contextmanager
    def _in_checkpoint(self) -> Iterator[None]:
        heartbeat, timeouts = self.world.heartbeat, self.properties.config.timeouts
        heartbeat.enter("checkpoint", timeouts.checkpoint, self.global_steps)
        try:
            yield
        finally:
            heartbeat.enter("data", timeouts.data, self.global_steps)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights alone, in the parameters' own dtype. Every rank calls.

        Args:
            save_filename: safetensors, or with ``.bin``, ``.pt`` or ``.pth`` what ``torch.save`` of a state_dict gives;
                None: ``model.safetensors``, and after ``deepspeed.initialize`` ``pytorch_model.bin``.
                safetensors has a tied weight once, as ``save_pretrained`` writes it, and its other names in the
                metadata: ``from_pretrained`` and ``safetensors.torch.load_model`` tie it again, a strict
                ``load_state_dict`` misses them. The other formats have every name.

        Communicates: at stage 3 an all_gather of each unit. Memory: the whole model on the host.
        """
        self._be_ready()
        name = save_filename or self.weights_filename
        return self.weights.save(save_dir, name, exclude_frozen=exclude_frozen_parameters)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's unsharded values by name, on the host, on every rank. Every rank calls.

        Args:
            destination: a dict to put them in, which is then returned.
            prefix: goes before each name.
            keep_vars: DeepSpeed's; what comes out are copies always.

        Communicates: at stage 3 an all_gather of each unit. Memory: the whole model on the host.
        """
        self._be_ready()
        values = self.weights.module_state_dict(exclude_frozen=exclude_frozen_parameters, prefix=prefix)
        if destination is None:
            return values
        destination.update(values)
        return destination

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Set the model's values, and the main parameters, from unsharded ones. Every rank passes the same.

        Args:
            state_dict: values by name, or a dict that has them under ``"module"``, as DeepSpeed's model files do.
            fetch_z3_params: DeepSpeed's; sharded parameters are set at any stage without it.

        Raises: CheckpointError: missing, unexpected or of another shape; all of them.
        """
        self._be_ready("loading")
        inner = state_dict.get("module")
        if isinstance(inner, Mapping):
            state_dict = inner
        self.weights.load_module_state_dict(state_dict, is_strict=strict, custom_load_fn=custom_load_fn)

    # states that are offloaded for a while

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from the device to host memory until ``reload_states()``. Every rank calls, between two passes.

        Meanwhile ``save_checkpoint``, ``module_state_dict`` and the safe accessors work, except those of gradients;
        a call that needs an offloaded state raises.

        Args:
            include: of ``optim_states``, ``hp_params`` (main parameters), ``lp_params`` (the model's parameters),
                ``lp_grads``, ``contiguous_grad_buffer`` (buffers of communication and casts: freed, not copied):
                strings, or members of DeepSpeed's enum; None: all. States on the host or a disk stay there. Main
                parameters that share the parameters' memory move with ``lp_params``.
            device: ``cpu``.
            pin_memory: use pinned memory, where the system allows it.
            non_blocking: no effect: copies are queued together, and the call returns when the device's memory is free.

        Raises: UsageError: inside a pass, while a unit is gathered, or an unknown name. OutOfMemoryError: the host has
            too little memory; nothing was moved.
        Communicates: nothing. Order: waits until no peer reads the memory.
        """
        self._be_ready()
        self._offload_states.offload(include, device, is_pinned=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo ``offload_states``, bit for bit. Does nothing if nothing is offloaded.

        Args:
            non_blocking: return before the copies are done; the device's later work waits for them.

        Raises: OutOfMemoryError: the device has too little memory; call it again when it has.
        """
        self._check_alive()
        try:
            self._offload_states.reload(is_blocking=not non_blocking)
        except Exception as error:
            self._explain_out_of_memory(error, "reload_states()")
            raise

    def empty_partition_cache(self) -> None:
        """Between two passes: release gathered parameters that no block holds, and the allocator's unused memory."""
        self._check_alive()
        self._offload_states.empty_cache()

    # failures

    def _check_alive(self) -> None:
        if self._is_destroyed:
            raise UsageError("this engine was destroyed.", do="call shoal.initialize() again.", code="engine-destroyed")
        failure = self.sharding.failure
        if failure is not None:
            raise UsageError(
                f"this engine failed before and cannot continue: {str(failure).splitlines()[0]}",
                where=self.properties.where(self.global_steps),
                do="destroy() it, fix the cause, call shoal.initialize() again and load the last checkpoint.",
                code="engine-failed",
            ) from failure

    def _be_ready(self, call: str | None = None) -> None:
        """Wait until the state is as the last step left it. Raises: UsageError: what ``call`` needs is offloaded."""
        self._check_alive()
        self.sharding.wait()
        if call is not None:
            self.offloaded.require(call)

    def _explain_out_of_memory(self, error: Exception, phase: str, snapshot: str = "") -> None:
        """Raises: OutOfMemoryError: with the ledger, where ``error`` is the allocator's."""
        if isinstance(error, OutOfMemoryError) or not self.properties.device.is_out_of_memory(error):
            return
        ledger = self.memory_report()
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        config = self.properties.config
        recompute = config.activation_checkpointing
        is_recomputing = bool(
            recompute.modules or recompute.memory_budget or config.pipeline.activation_checkpoint_interval
        )
        changes = ledger.changes(self.properties.stage, self.accumulation.micro_batch, is_recomputing=is_recomputing)[
            :3
        ]
        raise OutOfMemoryError(
            f"no memory left in {phase}: {first_line}\n{ledger}{snapshot}",
            where=f"{self.properties.where(self.global_steps)}, micro-step {self.micro_steps}",
            do=" Or ".join(changes),
        ) from error

    def _write_memory_snapshot(self, error: Exception, phase: str) -> str:
        """Write what uses the memory, before what the failed pass uses is freed. Returns: a line that says where; empty
        if nothing was to be written.
        """
        folder = self.properties.config.debug.out_of_memory_folder
        if folder is None or not self.properties.device.is_out_of_memory(error):
            return ""
        notes = {"error": str(error), "phase": phase, "step": self.global_steps, "micro_step": self.micro_steps}
        try:
            path = write_snapshot(Path(folder), self.memory_report(), self.world.rank, self.properties.device, notes)
        except OSError as failure:
            return f"\nwhat used it could not be written into {folder}: {failure}"
        return f"\nwhat used it: {path}"
