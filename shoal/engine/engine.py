"""The engine: a model, an optimizer and a config, put together; forward, backward, step."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from shoal.comm.world import World
from shoal.config import Config
from shoal.device import Device, in_backward, read_scalar
from shoal.engine.checkpoints import Checkpoints
from shoal.engine.deepspeed_face import DeepSpeedFace
from shoal.engine.guard import ModelGuard
from shoal.engine.log import say_on_rank_0
from shoal.engine.moving import Moving
from shoal.engine.nonfinite import NonFinite
from shoal.engine.progress import Progress
from shoal.engine.settings import Plan
from shoal.engine.weights import Weights
from shoal.errors import ConfigError, OutOfMemoryError, TierError, UsageError
from shoal.observe.ledger import Ledger, account
from shoal.observe.timers import StepTimers
from shoal.optim.loss_scale import LossScale
from shoal.parallel.activations import HostActivations
from shoal.parallel.recompute import Recompute, RecomputedBlocks, uninstall
from shoal.zero.access import Access
from shoal.zero.agree import Agreement, agree, refuse_unused
from shoal.zero.build import Axes
from shoal.zero.gradient import GradientState
from shoal.zero.optimizer import ShardedOptimizer
from shoal.zero.reducer import UnitGradient
from shoal.zero.registry import OWNERS
from shoal.zero.runtime import ShardedModel
from shoal.zero.step import BucketState, ShardedStep


class Engine(DeepSpeedFace):
    """A model that trains under one plan.

    Made by ``shoal.initialize``. ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``; or
    ``loss.backward()`` and
    ``engine.step()``. Attributes that are not the engine's own are the model's.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded: ShardedModel,
        states: Sequence[BucketState],
        optimizer_step: ShardedStep | None,
        plan: Plan,
        config: Config,
        world: World,
        axes: Axes,
        device: Device,
        loss_scale: LossScale | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.sharded = sharded
        self.plan = plan
        self.world = world
        self.axes = axes
        self._device = device
        self._config_object = config
        self._states = list(states)
        self._optimizer_step = optimizer_step
        self._loss_scale = loss_scale
        self._guard = ModelGuard(module, sharded)
        if optimizer_step is not None and optimizer_step.lane is not None:
            sharded.reducer.on_reduced = self._on_reduced
        self._accumulation_steps = config.gradient_accumulation_steps
        self._micro_batch = config.train_micro_batch_size_per_gpu
        self._forced_boundary: bool | None = None
        self._is_managed = config.managed_gradient_accumulation
        self._styles: set[str] = set()  # how this step's losses were scaled: "engine" or "scaled"
        self._has_backward = False
        self._losses: list[torch.Tensor] = []
        self._norm: float | None = None
        self._mean_loss: float | None = None  # of this rank's micro-batches in the last step
        self._nonfinite = NonFinite(plan, self._states, axes, loss_scale)
        self._is_destroyed = False
        self._failure: Exception | None = None  # after which its state is of no use
        self._was_step_applied = False
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self._micro_in_step = 0  # micro-batches since the last boundary
        self.skipped_steps = 0
        self.sharded_optimizer: ShardedOptimizer | None = (
            ShardedOptimizer(
                optimizer_step, self._step_now, self.zero_grad, sharded.offload if plan.zero.stage == 3 else None
            )
            if optimizer_step is not None
            else None
        )
        if self.sharded_optimizer is not None and loss_scale is not None:
            self.sharded_optimizer.loss_scale = loss_scale.scale
            self.sharded_optimizer._status.is_dynamic = loss_scale.settings.is_dynamic
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.client_optimizer: Any = None
        self.follows_deepspeed = False  # where DeepSpeed answers otherwise than Shoal would by itself, as DeepSpeed
        self.on_step: list[Callable[[Engine], None]] = []
        self.timers = StepTimers(device, is_on=bool(config.wall_clock_breakdown))
        self.progress: Progress | None = None
        self.recompute: Recompute | None = None
        self.owns_recompute = False  # made from the config, not by the script's ``configure``
        self.recomputed: RecomputedBlocks | None = None  # modules that the config has recomputed
        self.activations: HostActivations | None = None  # where the config has activations rest on the host
        self.checkpoints = Checkpoints(self)
        self.weights = Weights(self)
        self.moving = Moving(self)
        self.access = Access(sharded, self._states, optimizer_step, self._unscale)
        for parameter in module.parameters():
            OWNERS.put(parameter, self)

    # what it is

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given."""
        return self._config_object.raw

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
        """Data-parallel ranks."""
        return self.axes.all.size

    @property
    def device(self) -> torch.device:
        """Where this rank computes: inputs go there."""
        return self._device.torch_device

    def train_batch_size(self) -> int:
        """Samples of one step, over all ranks."""
        return self._micro_batch * self._accumulation_steps * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch of one rank."""
        return self._micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step."""
        return self._accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps.

        Raises: ConfigError: it does not divide by micro-batch x data-parallel ranks. UsageError: in the middle of a
        step.
        """
        per_micro = self._micro_batch * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % per_micro:
            low = max(train_batch_size // per_micro, 1) * per_micro
            raise ConfigError(
                f"train_batch_size {train_batch_size} does not divide by micro-batch {self._micro_batch}"
                f" x data-parallel {self.dp_world_size} = {per_micro}.",
                do=f"take {low} or {low + per_micro}.",
                code="batch-size",
            )
        if self._has_backward:
            raise UsageError(
                "set_train_batch_size() was called between backward() and step().",
                do="call it right after a step.",
                code="batch-size-mid-step",
            )
        self._accumulation_steps = train_batch_size // per_micro

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch; the accumulation steps stay."""
        self._micro_batch = micro_batch_size

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.plan.zero.stage

    def gradient_clipping(self) -> float:
        """The largest norm that gradients keep; 0: any."""
        return self.plan.clip_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [] if self.sharded_optimizer is None else [group["lr"] for group in self.sharded_optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm over all axes of the last step's gradients, before clipping; None before the first step."""
        return self._norm

    def was_step_applied(self) -> bool:
        """Did the last ``step()`` change the parameters?"""
        return self._was_step_applied

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by under fp16; 1 otherwise."""
        return self._loss_scale.scale if self._loss_scale is not None else 1.0

    # forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, its output untouched.

        Raises: UsageError: it was destroyed. ModelError: the model was changed. OutOfMemoryError: with the ledger.
        Communicates: stage 3: an all_gather per unit, Psi bytes in all (Psi: the parameters' bytes).
        """
        self._check_alive()
        self.moving.require("forward()")
        self._guard.check()
        if self.plan.input_dtype is not None:
            args, kwargs = _cast(args, self.plan.input_dtype), _cast(kwargs, self.plan.input_dtype)
        autocast = (
            torch.autocast(self.device.type, dtype=self.plan.autocast_dtype)
            if self.plan.autocast_dtype is not None
            else nullcontext()
        )
        with self._failing("forward"), self.timers.phase("forward"), autocast, self.sharded.searching():
            return self.module(*args, **kwargs)

    @contextmanager
    def _failing(self, phase: str) -> Iterator[None]:
        """Bring the units to rest when something raises.

        An error that nobody catches is told to the other ranks by ``comm``.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, TierError):
                self._failure = error
            if in_backward():
                raise  # recomputed activations: the backward pass that asked for them reports it
            self._after_failure()
            if self._device.is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
                raise self._out_of_memory(error, phase) from error
            raise

    def _after_failure(self) -> None:
        if self._optimizer_step is not None:
            with suppress(Exception):  # the first error counts; an update that failed fails the next step too
                self._optimizer_step.forget()
        self.sharded.recover()
        self._has_backward = False
        self._forget_losses()

    def _out_of_memory(self, error: BaseException, phase: str) -> OutOfMemoryError:
        ledger = self.memory_report()
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return OutOfMemoryError(
            f"no memory left in {phase}: {first_line}\n{ledger}",
            where=f"rank {self.global_rank}, step {self.global_steps}, micro-step {self.micro_steps}",
            do=ledger.advice(self.plan.zero.stage, self.dp_world_size, self._micro_batch),
        )

    # backward

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as ``loss.backward()`` needs it: divided by the accumulation steps, multiplied by the loss scale."""
        self._styles.add("scaled")
        return self._scaled(loss, by_accumulation=True)

    def _scaled(self, loss: torch.Tensor, *, by_accumulation: bool) -> torch.Tensor:
        self._losses.append(loss.detach())
        scaled = loss
        if by_accumulation and self._accumulation_steps > 1:
            scaled = scaled / self._accumulation_steps
        if self._loss_scale is not None:
            scaled = scaled.float() * self._loss_scale.scale
        return scaled

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """Back-propagate.

        Args:
            loss: shape [] or [1].
            scale_wrt_gas: divide by the accumulation steps.

        Returns: the loss as it was given.
        Raises: UsageError: no optimizer, or a loss that is not one differentiable number.
        Communicates: at most 2 Psi bytes per rank (stages 0 to 2, at the boundary) or the gathers and reduce-scatters
        of stage 3.
        """
        self._check_alive()
        self.moving.require("backward()")
        if self.sharded_optimizer is None:
            raise UsageError(
                "backward() needs an optimizer, and this engine was made without one.", code="no-optimizer"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(
                f"the loss must be one number, got {shape}.", do="reduce it, e.g. loss.mean().", code="loss-shape"
            )
        if not loss.requires_grad:
            raise UsageError(
                "the loss does not depend on any parameter that is trained.",
                do="check torch.no_grad(), detach(), and requires_grad of the parameters.",
                code="loss-detached",
            )
        with self._failing("backward"), self.timers.phase("backward"):
            scaled = self._scaled(loss, by_accumulation=scale_wrt_gas)
            self._styles.add("engine")
            self.sharded.begin_backward(creates_graph=bool(kwargs.get("create_graph")))
            scaled.backward(retain_graph=retain_graph, **kwargs)
            self.sharded.finish_backward()
        return loss

    def _on_backward(self) -> None:
        """A backward pass begins, by ``backward()``, by ``loss.backward()`` or by ``torch.autograd.grad``."""
        self.moving.require("backward()")
        self._has_backward = True
        self.sharded.reducer.at_step = self._is_managed and self.is_gradient_accumulation_boundary()

    def _on_reduced(self, entry: UnitGradient) -> None:
        """A unit's gradient was reduced: what is updated on the host goes there while backward goes on."""
        if self._optimizer_step is not None:
            self._optimizer_step.reduced(entry.unit, self._unscale(), at_step=self.sharded.reducer.at_step)

    def _settle(self) -> None:
        """Have everything as the last step leaves it, also where updates on the host are still under way."""
        if self._optimizer_step is not None:
            self._optimizer_step.settle()

    def _forget_losses(self) -> None:
        self._losses.clear()
        self._styles.clear()
        self.sharded.num_plain_passes = 0

    def is_gradient_accumulation_boundary(self) -> bool:
        """Does the optimizer step after the micro-batch that is under way?"""
        if self._forced_boundary is not None:
            return self._forced_boundary
        if not self._is_managed:
            return True
        return self._micro_in_step + 1 >= self._accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say it from outside, before ``backward()``; from then on the engine does not count by itself."""
        self._forced_boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication, at every stage.

        Memory: at stages 2 and 3 the gradients are whole on each rank until the next backward outside of it.
        """
        reducer = self.sharded.reducer
        was_syncing, reducer.is_syncing = reducer.is_syncing, False
        try:
            yield
        finally:
            reducer.is_syncing = was_syncing

    # step

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary: reduce what is open, clip, update, schedule; otherwise count the micro-batch.

        Raises: NonFiniteError: the loss is NaN or infinite, or gradients were so too often in a row.
        Communicates: stages 1 and 2: an all_gather of every parameter (Psi bytes); norm and flags: 32 bytes.
        """
        self._check_alive()
        self.moving.require("step()")
        self.sharded.finish_backward()
        is_boundary = self.is_gradient_accumulation_boundary()
        is_forced, num_losses = self._forced_boundary is not None, len(self._losses)
        if is_boundary:
            with self._failing("step"), self.timers.phase("step"):
                self._step_boundary(lr_kwargs)
        self.micro_steps += 1
        self._micro_in_step = 0 if is_boundary else self._micro_in_step + 1
        # Told from outside where a step ends, a client calls once for all the micro-batches of it.
        num_micro = max(1, num_losses) if is_forced else 1
        self.global_samples += num_micro * self._micro_batch * self.dp_world_size

    def _step_now(self) -> None:
        """``optimizer.step()``: a step whatever the count says."""
        if self._forced_boundary is None and not self.is_gradient_accumulation_boundary():
            self._forced_boundary = True
            try:
                self.step()
            finally:
                self._forced_boundary = None
            return
        self.step()

    def _step_boundary(self, lr_kwargs: dict[str, Any] | None) -> None:
        step = self._optimizer_step
        if step is None:
            raise UsageError("step() needs an optimizer, and this engine was made without one.", code="no-optimizer")
        if not self._has_backward:
            raise UsageError(
                "step() was called without a backward() since the last step.",
                where=f"rank {self.global_rank}, step {self.global_steps}",
                do="call engine.backward(loss) first.",
                code="step-without-backward",
            )
        if self.sharded.num_plain_passes and self._styles == {"engine"}:
            raise UsageError(
                "one step mixed engine.backward(loss) and loss.backward(): they are scaled differently.",
                do="use one of them, or loss.backward() on engine.scale(loss).",
                code="mixed-backward",
            )
        for entry in reversed(self.sharded.reducer.entries):
            for gradient in entry.gradients:
                if gradient.state is not GradientState.REDUCED:
                    gradient.complete()
        view = agree(
            self._states, self.sharded.reducer, self.axes, self.device, is_loss_finite=self._are_losses_finite()
        )
        unscale = self._unscale()
        self._norm = view.norm * unscale
        if not self.plan.ignores_unused:
            refuse_unused(self._states, view, self.global_steps)
        is_applied = False
        try:
            is_applied = self._nonfinite.judge(view, self.global_steps, is_loss_known=bool(self._losses))
        finally:
            self._was_step_applied = is_applied
            self.skipped_steps += not is_applied
            if self.sharded_optimizer is not None:
                self.sharded_optimizer.overflow = not is_applied
        if is_applied:
            self._update(view, unscale)
        if self._loss_scale is not None and not view.bad_loss_ranks:  # a bad loss is no overflow
            self._nonfinite.report_scale(self._loss_scale.update(not view.is_finite), self.global_steps)
            if self.sharded_optimizer is not None:
                self.sharded_optimizer.loss_scale = self._loss_scale.scale
        if is_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        loss = self._mean_loss
        self._finish_step()
        self.checkpoints.poll()
        if self.recompute is not None and self.global_steps == 1:
            unused = self.recompute.unused_note()
            if unused is not None:
                say_on_rank_0(self.global_rank, unused)
        for callback in self.on_step:
            callback(self)
        if self.progress is not None:
            self.progress.after_step(self, loss)

    def _unscale(self) -> float:
        """What the gradients in memory must be multiplied by to be the step's gradients."""
        factor = 1.0
        if not self._styles:  # loss.backward()
            factor /= self._accumulation_steps if self._is_managed else 1
        elif self._loss_scale is not None:
            factor /= self._loss_scale.scale
        return factor

    def _update(self, view: Agreement, unscale: float) -> None:
        step = self._optimizer_step
        assert step is not None and self._norm is not None
        coefficient = unscale
        clip = self.plan.clip_norm
        if clip > 0 and math.isfinite(self._norm) and self._norm > clip:
            coefficient *= clip / (self._norm + 1e-6)
        if step.lane is not None:
            step.lane.is_likely = coefficient == unscale
        # Peers may still be reading the shards that are about to change.
        self.axes.all.drain()
        self.axes.inner.drain()
        works = []
        step.begin()
        try:
            with torch.no_grad():
                for unit in self.sharded.units:
                    works += step.step_unit(unit, coefficient, view.touched)
                for unit in self.sharded.units:
                    works += step.finish_unit(unit)
        except Exception as error:
            self._failure = error  # some units are a step ahead of the others
            raise
        finally:
            step.end()
        for work in works:
            work.wait()

    def _are_losses_finite(self) -> bool:
        """Are this step's losses finite? On an accelerator the answer waits for the gradients anyway."""
        if not self._losses:
            self._mean_loss = None
            return True
        mean = torch.stack([loss.reshape(()).float() for loss in self._losses]).mean()
        self._mean_loss = read_scalar(mean, when_fake=0.0)
        return math.isfinite(self._mean_loss)

    def _forget_gradients(self) -> None:
        if self._optimizer_step is not None:
            self._optimizer_step.forget()
        for state in self._states:
            state.gradient.reset()

    def _finish_step(self) -> None:
        self._forget_gradients()
        self._forget_losses()
        self._has_backward = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step under way. After ``step()`` there are none."""
        if self.sharded.in_pass:
            return
        self._forget_gradients()
        for parameter in self.module.parameters():
            parameter.grad = None
        self._forget_losses()
        self._has_backward = False

    # checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that a run needs to go on. Every rank calls.

        Args:
            save_dir: a folder that all ranks see, or an fsspec URL.
            tag: the checkpoint's name; None: ``global_step`` and the number of steps. A checkpoint of that name is
                replaced once the new one is whole.
            client_state: what ``load_checkpoint`` will give back: numbers, text, lists, dicts and tensors.
            save_latest: ``load_checkpoint`` without a tag may choose this one.

        Returns: was it saved? (With ``checkpoint.async_save``: was it begun?)
        Raises: CheckpointError: on every rank; older checkpoints and the running state are as they were.
        Communicates: what each rank wrote, as JSON; no parameter.
        Memory: one block of 4 MiB on the host; with ``checkpoint.async_save`` this rank's share of the state.
        """
        self._check_alive()
        self._settle()
        return self.checkpoints.save(
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
        """Load a checkpoint that any layout saved. Every rank calls.

        Args:
            tag: its name; None: the newest that is whole.
            load_module_strict: False: parameters that only one side has are left out, and named.
            load_module_only: the weights alone; counters, optimizer and schedule stay as they are.
            custom_load_fn: called as ``custom_load_fn(src=values by name, dst=module)`` while the module is whole.

        Returns: the checkpoint's path, and the client state. (Both None where DeepSpeed's name is lent and none lies
        there.)
        Raises: CheckpointError: on every rank; nothing was changed.
        Communicates: one all_gather of the parameters where they rest whole; short messages.
        Memory: one block of 4 MiB on the host.
        """
        self._check_alive()
        self._settle()
        self.moving.require("loading")
        load = self.checkpoints.load_if_there if self.follows_deepspeed else self.checkpoints.load
        return load(
            load_dir,
            tag,
            is_strict=load_module_strict,
            has_optimizer=load_optimizer_states,
            has_schedule=load_lr_scheduler_states,
            is_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights alone, in the parameters' own dtype. Every rank calls.

        Args:
            save_filename: safetensors, or with ``.bin``, ``.pt`` or ``.pth`` what ``torch.save`` of a state_dict gives.

        Communicates: at stage 3 an all_gather of each unit. Memory: the whole model on the host.
        """
        self._check_alive()
        self._settle()
        return self.weights.save(save_dir, save_filename, exclude_frozen=exclude_frozen_parameters)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's whole values by name, on the host, on every rank. Every rank calls.

        Args:
            destination: a dict to put them in, which is then returned.
            prefix: goes before each name.
            keep_vars: DeepSpeed's; what comes out are copies always.

        Communicates: at stage 3 an all_gather of each unit. Memory: the whole model on the host.
        """
        self._check_alive()
        self._settle()
        found = self.weights.module_state_dict(exclude_frozen=exclude_frozen_parameters)
        named = {f"{prefix}{name}": value for name, value in found.items()}
        if destination is None:
            return named
        destination.update(named)
        return destination

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Set the model's values, and the master weights, from whole ones. Every rank calls with the same.

        Args:
            state_dict: values by name, or a dict that has them under ``"module"``, as DeepSpeed's model files do.
            fetch_z3_params: DeepSpeed's; sharded parameters are set at any stage without it.

        Raises: CheckpointError: missing, unexpected or of another shape; all of them.
        """
        self._check_alive()
        self._settle()
        self.moving.require("loading")
        inner = state_dict.get("module")
        if isinstance(inner, Mapping):
            state_dict = inner
        self.weights.load_module_state_dict(state_dict, is_strict=strict, custom_load_fn=custom_load_fn)

    # the rest

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
            data_sampler: decides what this rank reads; None: samples are dealt out over the data-parallel ranks.
        """
        from shoal.engine.data import make_loader

        return make_loader(
            dataset,
            batch_size or self._micro_batch,
            self.axes.all,
            self._config_object,
            route=route,
            pin_memory=pin_memory,
            data_sampler=data_sampler,
            collate_fn=collate_fn,
            num_local_io_workers=num_local_io_workers,
        )

    @property
    def bucket_states(self) -> list[BucketState]:
        """Every trainable bucket, in unit order."""
        return self._states

    def memory_report(self) -> Ledger:
        """Bytes by kind, tier and unit, beside what the allocator says."""
        saved = Counter({} if self.recompute is None else self.recompute.saved_bytes_by_tier())
        saved.update({} if self.activations is None else self.activations.saved_bytes_by_tier())
        moved = self.moving.ledger_kinds
        return account(self.sharded, self._states, self._optimizer_step, self._device, saved, moved)

    # states that leave the device for a while

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from the device to host memory until ``reload_states()``. Every rank calls, between two passes.

        Meanwhile ``save_checkpoint``, ``module_state_dict`` and the safe accessors work, those of gradients excepted;
        what needs a state that is away raises.

        Args:
            include: of ``optim_states``, ``hp_params`` (master weights), ``lp_params`` (the model's parameters),
                ``lp_grads``, ``contiguous_grad_buffer`` (buffers of communication and casts, given back, not copied):
                strings, or members of DeepSpeed's enum; None: all. What rests on host or disk already stays. Master
                weights that are the parameters' own memory move with ``lp_params``.
            device: ``cpu``.
            pin_memory: page-lock that memory, where the system allows it.
            non_blocking: no effect: copies are queued together, and the call returns when the device's memory is free.

        Raises: UsageError: inside a pass, while a unit is gathered, or names that there are not. OutOfMemoryError: the
            host has too little memory; nothing was moved.
        Communicates: nothing; waits until no peer reads what leaves.
        """
        self._check_alive()
        self._settle()
        self.moving.offload(include, device, is_pinned=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo ``offload_states``: every bit is as it was. Nothing where nothing is away.

        Args:
            non_blocking: return while copies are under way; the device's later work waits for them.

        Raises: OutOfMemoryError: the device has too little memory; call it again when it has.
        """
        self._check_alive()
        self.moving.reload(is_blocking=not non_blocking)

    def empty_partition_cache(self) -> None:
        """Between two passes: release gathered parameters that nobody holds, and the allocator's unused memory."""
        self._check_alive()
        self.moving.empty_cache()

    def _check_alive(self) -> None:
        if self._is_destroyed:
            raise UsageError("this engine was destroyed.", do="call shoal.initialize() again.", code="engine-destroyed")
        if self._failure is not None:
            raise UsageError(
                f"this engine failed before and cannot go on: {str(self._failure).splitlines()[0]}",
                where=f"rank {self.global_rank}, step {self.global_steps}",
                do="destroy() it, mend the cause, call shoal.initialize() again and load the last checkpoint.",
                code="engine-failed",
            ) from self._failure

    def destroy(self) -> None:
        """Take all hooks off, free buckets, gradients and optimizer state; the model keeps its parameters.

        A checkpoint that is being written is waited for.

        They are whole, unless they were built under ``zero.Init`` or on the meta device: then they are sharded as
        they were
        then. Every rank calls. After a failed step, or a disk that failed, nothing is gathered: what was sharded reads
        as NaN.

        Idempotent.
        """
        if self._is_destroyed:
            return
        try:
            self.checkpoints.close()
            self._settle()
        finally:
            self._tear_down()

    def _tear_down(self) -> None:
        if self._optimizer_step is not None and self._optimizer_step.lane is not None:
            self._optimizer_step.lane.close()
        if self.activations is not None:
            self.activations.remove()
        if self.recomputed is not None:
            self.recomputed.remove()
        if self.recompute is not None and self.owns_recompute:
            uninstall(self.recompute, self.world)
        self._is_destroyed = True
        try:
            self.sharded.recover()
            self.sharded.detach(is_failed=self._failure is not None)
        finally:
            self.sharded.disks.close()
        if self._optimizer_step is not None:
            self._optimizer_step.free()
        for state in self._states:
            state.gradient.free()
            state.pieces = []
        for parameter in self.module.parameters():
            OWNERS.pop(parameter)
        self._states.clear()
        self.on_step.clear()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
