"""The engine: a model, an optimizer and a config, put together; forward, backward, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from shoal.comm.world import World
from shoal.config import Config
from shoal.device import Device, in_backward
from shoal.engine.batch import Batch
from shoal.engine.boundary import Boundary
from shoal.engine.by_step import ByStep
from shoal.engine.checkpoints import Checkpoints
from shoal.engine.facts import EngineFacts
from shoal.engine.guard import ModelGuard
from shoal.engine.inputs import cast, explain_mixed_formats
from shoal.engine.log import say_on_rank_0
from shoal.engine.losses import Losses, check_for_backward, check_for_scale
from shoal.engine.moving import Moving
from shoal.engine.nonfinite import NonFinite
from shoal.engine.progress import Progress
from shoal.engine.schedule_watch import ScheduleWatch
from shoal.engine.settings import Plan
from shoal.engine.weights import Weights
from shoal.errors import NoOptimizerError, OutOfMemoryError, ShoalError, UsageError
from shoal.observe.flops_profiler import FlopsProfiler
from shoal.observe.timers import StepTimers
from shoal.optim.loss_scale import LossScale
from shoal.parallel.activations import HostActivations
from shoal.parallel.recompute import Recompute, RecomputedBlocks, uninstall
from shoal.zero.engine_parameters import EngineParameters
from shoal.zero.optimizer import ShardedOptimizer
from shoal.zero.parameter_owner import OWNERS
from shoal.zero.runtime import ShardedModel
from shoal.zero.settings import Axes
from shoal.zero.step import ShardedStep
from shoal.zero.step_status import GlobalStatus, refuse_unused, synchronize_status


class Engine(EngineFacts):
    """A model that trains under one plan.

    Made by ``shoal.initialize``. ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``; or
    ``loss.backward()`` and ``engine.step()``. Attributes that are not the engine's own are the model's.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded: ShardedModel,
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
        self._groups = sharded.trained_groups
        self._optimizer_step = optimizer_step
        self._loss_scale = loss_scale
        self._guard = ModelGuard(module, sharded, self._groups)
        self._batch = Batch(
            micro=config.train_micro_batch_size_per_gpu,
            num_micro=config.gradient_accumulation_steps,
            num_ranks=axes.batch.size,
        )
        self._boundary = Boundary(self._batch, is_managed=config.managed_gradient_accumulation)
        self._losses = Losses(self._batch, loss_scale, is_managed=config.managed_gradient_accumulation)
        self._has_backward = False
        self._norm: float | None = None
        self._nonfinite = NonFinite(plan, self._groups, axes, loss_scale)
        self._is_destroyed = False
        self._failure: Exception | None = None  # after which its state is of no use
        self._was_step_applied = False
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.sharded_optimizer: ShardedOptimizer | None = (
            ShardedOptimizer(
                optimizer_step,
                self._step_now,
                self.zero_grad,
                sharded.offload if plan.zero.stage == 3 else None,
                loss_scale=loss_scale,
                local_gradient=self._local_gradient,
            )
            if optimizer_step is not None
            else None
        )
        self.by_step = ByStep(config)
        self.lr_scheduler: Any = None
        self._schedule_watch = ScheduleWatch()
        self.training_dataloader: Any = None
        self.client_optimizer: Any = None
        self.follows_deepspeed = False  # where DeepSpeed answers otherwise than Shoal would by itself, as DeepSpeed
        self.on_step: list[Callable[[Engine], None]] = []
        self.timers = StepTimers(device, is_on=bool(config.wall_clock_breakdown))
        self.flops_profiler: FlopsProfiler | None = None
        self.progress: Progress | None = None
        self.recompute: Recompute | None = None
        self.owns_recompute = False  # made from the config, not by the script's ``configure``
        self.recomputed: RecomputedBlocks | None = None  # modules that the config has recomputed
        self.activations: HostActivations | None = None  # where the config has activations rest on the host
        self.checkpoints = Checkpoints(self)
        self.weights = Weights(self)
        self.moving = Moving(self)
        self.access = EngineParameters(
            self,
            sharded,
            self._groups,
            optimizer_step,
            self._losses.unscale,
            self._guard.follow,
            stage=plan.zero.stage,
            checks_changes=bool(config.zero_optimization.enable_sanity_checks),
        )
        for parameter in module.parameters():
            OWNERS.put(parameter, self.access)

    # forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, its output untouched.

        Raises: UsageError: it was destroyed. ModelError: the model was changed. OutOfMemoryError: with the ledger.
        Communicates: stage 3: an all_gather per unit, Psi bytes in all (Psi: the parameters' bytes).
        """
        self._check_alive()
        self.moving.require("forward()")
        self._guard.check()
        if self.module.training:
            kwargs = self.by_step.into(kwargs, self.global_steps)
        if self.plan.input_dtype is not None:
            args, kwargs = cast(args, self.plan.input_dtype), cast(kwargs, self.plan.input_dtype)
        autocast = (
            torch.autocast(self.device.type, dtype=self.plan.autocast_dtype)
            if self.plan.autocast_dtype is not None
            else nullcontext()
        )
        with self._failing("forward"), self.timers.phase("forward"), autocast, self.sharded.searching():
            output = self.module(*args, **kwargs)
        self._guard.after_forward()
        return output

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
            if phase == "forward":
                explain_mixed_formats(error, self.module, self.plan.precision.parameter)
                self.by_step.explain(error)
            raise

    def _after_failure(self) -> None:
        if self._optimizer_step is not None:
            with suppress(Exception):  # the first error counts; an update that failed fails the next step too
                self._optimizer_step.drop_gradients()
        self.sharded.recover()
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
        check_for_scale(loss)
        return self._losses.scaled(loss, "scaled")

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
        check_for_backward(loss)
        with self._failing("backward"), self.timers.phase("backward"):
            scaled = self._losses.scaled(loss, "engine", by_accumulation=scale_wrt_gas)
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
        self.sharded.reducer.at_step = self._boundary.is_managed and self.is_gradient_accumulation_boundary()
        if self._optimizer_step is not None and self._optimizer_step.cpu_optimizer is not None:
            self._optimizer_step.cpu_optimizer.gradient_scale = self._losses.unscale()

    def _settle(self) -> None:
        """Have everything as the last step leaves it, also where updates on the host are still under way."""
        if self._optimizer_step is not None:
            self._optimizer_step.synchronize()
            if self._failure is None:
                self._guard.follow()

    def _forget_losses(self) -> None:
        self._has_backward = False
        self._losses.forget()
        self.sharded.num_plain_passes = 0

    def is_gradient_accumulation_boundary(self) -> bool:
        """Does the optimizer step after the micro-batch that is under way?"""
        return self._boundary.is_here()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say it from outside, before ``backward()``; from then on the engine does not count by itself."""
        self._boundary.said = is_boundary

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
        num_micro = self._boundary.num_passed(len(self._losses.values))
        if is_boundary:
            with self._failing("step"), self.timers.phase("step"):
                self._step_boundary(lr_kwargs)
        self.micro_steps += 1
        self._boundary.pass_by(is_end=is_boundary)
        self.global_samples += self._batch.samples_of(num_micro)

    def _step_now(self) -> None:
        """``optimizer.step()``: a step whatever the count says."""
        with self._boundary.at_once():
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
        self._losses.refuse_mixed(self.sharded.num_plain_passes)
        self._guard.follow()  # before the update overwrites what the script has changed
        self.sharded.reducer.complete_step()
        mean_loss = self._losses.compute_mean()
        status = synchronize_status(self._groups, self.sharded.reducer, self.axes, self.device, mean_loss)
        self._losses.mean = status.mean_loss
        unscale = self._losses.unscale()
        self._norm = status.norm * unscale
        if not self.plan.ignores_unused:
            refuse_unused(status, self.global_steps)
        is_applied = False
        try:
            is_applied = self._nonfinite.judge(status, self.global_steps, is_loss_known=bool(self._losses.values))
        finally:
            self._was_step_applied = is_applied
            self.skipped_steps += not is_applied
            if self.sharded_optimizer is not None:
                self.sharded_optimizer.overflow = not is_applied
        if is_applied:
            self._update(status, unscale)
        self._nonfinite.adapt_scale(status, self.global_steps)
        if self.sharded_optimizer is not None and self._loss_scale is not None:
            self.sharded_optimizer.loss_scale = self._loss_scale.scale
        if is_applied and self.lr_scheduler is not None:
            self._schedule_watch.step(self.lr_scheduler, lr_kwargs or {}, self.global_rank)
        self.global_steps += 1
        self.by_step.go_to(self.global_steps)
        self._finish_step()
        self.checkpoints.poll()
        if self.recompute is not None and self.global_steps == 1:
            unused = self.recompute.unused_note()
            if unused is not None:
                say_on_rank_0(self.global_rank, unused)
        for callback in self.on_step:
            callback(self)
        if self.progress is not None:
            self.progress.after_step(self, self._losses.mean)

    def _update(self, status: GlobalStatus, unscale: float) -> None:
        step = self._optimizer_step
        assert step is not None and self._norm is not None
        gradient_scale = unscale
        clip = self.plan.clip_norm
        if clip > 0 and math.isfinite(self._norm) and self._norm > clip:
            gradient_scale *= clip / (self._norm + 1e-6)
        if step.cpu_optimizer is not None:
            step.cpu_optimizer.is_likely = gradient_scale == unscale
        self.axes.drain()  # peers may still be reading the shards that are about to change
        step.begin()
        try:
            with torch.no_grad():
                works = step.update(self.sharded.units, gradient_scale, status.has_grad)
        except Exception as error:
            self._failure = error  # some units are a step ahead of the others
            raise
        finally:
            step.end()
        for work in works:
            work.drain()  # from here on the script may change parameters in place

    def _finish_step(self) -> None:
        if self._optimizer_step is not None:
            self._optimizer_step.drop_gradients()
        for group in self._groups:
            group.gradient.reset()
        self._forget_losses()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step under way. After ``step()`` there are none."""
        if self.sharded.in_pass:
            return
        self._finish_step()
        for parameter in self.module.parameters():
            parameter.grad = None

    # its end

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

        They are whole, unless they were built under ``zero.Init`` or on the meta device: then they are sharded as they
        were then. Every rank calls. After a failed step, or a disk that failed, nothing is gathered: what was sharded
        reads as NaN.

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
        if self._optimizer_step is not None and self._optimizer_step.cpu_optimizer is not None:
            self._optimizer_step.cpu_optimizer.close()
        if self.activations is not None:
            self.activations.remove()
        if self.recomputed is not None:
            self.recomputed.remove()
        if self.recompute is not None and self.owns_recompute:
            uninstall(self.recompute, self.world)
        self._is_destroyed = True
        if self.progress is not None and self.progress.monitor is not None:
            self.progress.monitor.close()
        try:
            self.sharded.recover()
            self.sharded.detach(is_failed=self._failure is not None)
        finally:
            self.sharded.disks.close()
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.let_go()
        if self._optimizer_step is not None:
            self._optimizer_step.free()
        for group in self._groups:
            group.gradient.free()
            group.ranges = []
        for parameter in self.module.parameters():
            OWNERS.pop(parameter, self.access)
        self._guard.forget()
        self._groups.clear()
        self.on_step.clear()
        if not self._device.is_cuda:
            self._device.give_cache_back()
