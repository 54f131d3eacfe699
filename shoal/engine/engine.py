"""The engine: a model, an optimizer and a config, put together; forward, backward, step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from shoal.comm.world import World
from shoal.config import Config
from shoal.device import Device, in_backward, read_scalar
from shoal.engine.batch import Batch
from shoal.engine.checkpoints import Checkpoints
from shoal.engine.guard import ModelGuard
from shoal.engine.log import say_on_rank_0
from shoal.engine.moving import Moving
from shoal.engine.nonfinite import NonFinite
from shoal.engine.progress import Progress
from shoal.engine.settings import Plan
from shoal.engine.stored import StoredEngine
from shoal.engine.weights import Weights
from shoal.errors import AssertedUsageError, NoOptimizerError, OutOfMemoryError, ShoalError, UsageError
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


class Engine(StoredEngine):
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
        self._batch = Batch(
            micro=config.train_micro_batch_size_per_gpu,
            num_micro=config.gradient_accumulation_steps,
            num_ranks=axes.all.size,
        )
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
                optimizer_step,
                self._step_now,
                self.zero_grad,
                sharded.offload if plan.zero.stage == 3 else None,
                is_scaled=loss_scale is not None,
                local_gradient=self._local_gradient,
            )
            if optimizer_step is not None
            else None
        )
        if self.sharded_optimizer is not None and loss_scale is not None:
            self.sharded_optimizer.loss_scale = loss_scale.scale
            self.sharded_optimizer._status.is_dynamic = loss_scale.settings.is_dynamic
            self.sharded_optimizer._status.scaler = loss_scale
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
        return self._batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch of one rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step."""
        return self._batch.num_micro

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps.

        Raises: ConfigError: it does not divide by micro-batch x data-parallel ranks. UsageError: in the middle of a
        step.
        """
        if self._has_backward:
            raise UsageError(
                "set_train_batch_size() was called between backward() and step().",
                do="call it right after a step.",
                code="batch-size-mid-step",
            )
        self._batch.set_total(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch; the accumulation steps stay."""
        self._batch.micro = micro_batch_size

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
            if isinstance(error, ShoalError) and error.code.startswith("tier"):  # a disk that is too full included
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
            do=ledger.advice(self.plan.zero.stage, self.dp_world_size, self._batch.micro),
        )

    # backward

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as ``loss.backward()`` needs it: divided by the accumulation steps, multiplied by the loss scale.

        Raises: AssertedUsageError: it is not one number with a graph behind it.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise AssertedUsageError(
                f"scale() takes a loss that is a scalar tensor with a graph behind it, got {shape}.",
                do="reduce it first, e.g. loss.mean(); for other tensors call tensor.backward(gradient).",
                code="loss-shape",
            )
        self._styles.add("scaled")
        return self._scaled(loss, by_accumulation=True)

    def _scaled(self, loss: torch.Tensor, *, by_accumulation: bool) -> torch.Tensor:
        self._losses.append(loss.detach())
        scaled = loss
        if by_accumulation and self._batch.num_micro > 1:
            scaled = scaled / self._batch.num_micro
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

        Returns: the loss as it was given; where DeepSpeed's name is lent, divided by the accumulation steps, as it is
        there.
        Raises: UsageError: no optimizer, or a loss that is not one differentiable number.
        Communicates: at most 2 Psi bytes per rank (stages 0 to 2, at the boundary) or the gathers and reduce-scatters
        of stage 3.
        """
        self._check_alive()
        self.moving.require("backward()")
        if self.sharded_optimizer is None:
            raise NoOptimizerError("backward() needs an optimizer, and this engine was made without one.")
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
        if self.follows_deepspeed and scale_wrt_gas and self.gradient_accumulation_steps() > 1:
            loss = loss / self.gradient_accumulation_steps()
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
        return self._micro_in_step + 1 >= self._batch.num_micro

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say it from outside, before ``backward()``; from then on the engine does not count by itself."""
        self._forced_boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication, at every stage.

        Raises: AssertedUsageError: where DeepSpeed's name is lent, what it asserts: stages 2 and 3, and one inside
        another.
        Memory: at stages 2 and 3 the gradients are whole on each rank until the next backward outside of it.
        """
        if self.follows_deepspeed:
            self._refuse_no_sync()
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
        if self.follows_deepspeed:
            self._refuse_step_in_no_sync()
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
        self.global_samples += self._batch.samples_of(num_micro)

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
            raise NoOptimizerError("step() needs an optimizer, and this engine was made without one.")
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
            factor /= self._batch.num_micro if self._is_managed else 1
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
            work.drain()  # from here on the script may change parameters in place

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

    # the rest

    @property
    def is_watched(self) -> bool:
        """Are changes an error that ``GatheredParameters`` would lose?"""
        return bool(self._config_object.zero_optimization.enable_sanity_checks)

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
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.let_go()
        if self._optimizer_step is not None:
            self._optimizer_step.free()
        for state in self._states:
            state.gradient.free()
            state.pieces = []
        for parameter in self.module.parameters():
            OWNERS.pop(parameter)
        self._states.clear()
        self.on_step.clear()
        if not self._device.is_cuda:
            self._device.give_cache_back()


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
