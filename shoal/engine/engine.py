"""The engine: a model, an optimizer and a config, put together; forward, backward, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from shoal.device import in_backward, in_transform
from shoal.engine.accumulation import Accumulation, NumTokens, check_for_backward, check_for_scale
from shoal.engine.checkpointing import Checkpointing
from shoal.engine.compiled import CompiledModel
from shoal.engine.inputs import autocast, cast, explain_mismatch, explain_mixed_formats
from shoal.engine.nonfinite import NonFinite
from shoal.engine.offload_states import Offloaded, OffloadStates
from shoal.engine.parts.part import Part, PartCalls
from shoal.engine.parts.save_on_signal import SaveOnSignal
from shoal.engine.progress import Progress, StepNumbers
from shoal.engine.run_state import RunState
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.engine.shortcuts import PartShortcuts
from shoal.engine.weights import Weights
from shoal.errors import NoOptimizerError, NotBuiltError, ShoalError, UsageError
from shoal.observe.timers import StepTimers
from shoal.running.foreign_names import AbsentError, refuse_foreign_name
from shoal.running.optimizer import ShardedOptimizer
from shoal.running.parameter_owner import OWNERS
from shoal.running.status import GlobalStatus
from shoal.text import did_you_mean

_PIPELINE_CALLS = ("train_batch", "eval_batch", "set_dataloader", "set_dataiterator", "set_batch_fn")


@cache
def _hint(engine: type, name: str) -> str:
    """The public names of the engine that are like ``name``, as a clause."""
    return did_you_mean(name, [known for known in dir(engine) if not known.startswith("_")], limit=1)


class Engine(PartShortcuts):
    """A model that trains under one plan.

    Made by ``shoal.initialize``. ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``; or
    ``loss.backward()`` and ``engine.step()``. Attributes that the engine does not have are the model's.

    It has

        properties       config, plan, ranks, device                            fixed
        accumulation     micro-batches, losses, counters
        sharding         parameters, gradients, optimizer state
        run_state        schedule, data loader, curriculum                      what a checkpoint saves with tensors
        checkpointing, weights, offloaded                                       what moves the state elsewhere
        parts            what joins its steps: techniques, checks, the script's own
    """

    optimizer_class: type[ShardedOptimizer] = ShardedOptimizer  # of what ``initialize`` returns

    def __init__(
        self,
        sharding: Sharding,
        properties: Properties,
        accumulation: Accumulation,
        offloaded: Offloaded,
        run: RunState,
        parts: Sequence[Part],
        timers: StepTimers,
        progress: Progress,
    ) -> None:
        super().__init__()
        self.module = sharding.module
        self.properties = properties
        self.accumulation = accumulation
        self.sharding = sharding
        self.run_state = run
        self.offloaded = offloaded
        self.world = properties.world
        self.plan = properties.plan
        self.axes = properties.axes
        self.sharded = sharding.model
        self.access = sharding.access
        self.access.engine = self
        self.parts = tuple(parts)
        self.timers = timers
        self.on_step: list[Callable[[Any], None]] = []  # called with this engine
        self.client_optimizer: Any = None if sharding.step is None else sharding.step.optimizer
        self.sharded_optimizer: ShardedOptimizer | None = None
        if sharding.step is not None:
            self.sharded_optimizer = self.optimizer_class(
                sharding.step,
                self._step_now,
                self.zero_grad,
                loss_scale=accumulation.loss_scale,
                local_gradient=sharding.local_gradient,
            )
        self.weights = Weights(sharding, properties)
        self.checkpointing = Checkpointing(
            sharding, properties, accumulation, run, self.weights, self.sharded_optimizer
        )
        self.client_state_on_signal: Callable[[], Mapping[str, Any]] | None = None  # for ``checkpoint.save_on_signal``
        self.compiled = CompiledModel(sharding.module, properties)
        self._calls = PartCalls(self.parts)
        self._save_on_signal = self.part(SaveOnSignal)
        self._offload_states = OffloadStates(sharding, properties, offloaded)
        self._nonfinite = NonFinite(properties, sharding, accumulation.loss_scale)
        self._progress = progress
        if timers.is_on:
            self.sharded.reducer.timed = timers.phase
        self._norm: float | None = None
        self._was_step_applied = self._has_stepped = False
        self._is_destroyed = False
        for parameter in self.module.parameters():
            OWNERS.put(parameter, self.access)

    if TYPE_CHECKING:
        # The class of a model in pipeline stages has them: ``initialize`` decides that by the config.
        def train_batch(self, *args: Any, **kwargs: Any) -> Any: ...

        def eval_batch(self, *args: Any, **kwargs: Any) -> Any: ...

    else:  # a type checker would take every misspelt name for an attribute of the model

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                module = self.__dict__.get("_modules", {}).get("module")
                if module is None or name.startswith("__"):
                    raise
            try:
                return getattr(module, name)
            except AttributeError as error:
                if hasattr(type(module), name):  # a property of the model raised it
                    raise
                if name in _PIPELINE_CALLS:
                    raise AbsentError(
                        f"engine.{name}() needs a model in pipeline stages.",
                        do="call loss = engine(batch); engine.backward(loss); engine.step(), or make pipeline stages: a"
                        ' shoal.PipelineModule, or "pipeline": {"stages": n} in the config.',
                        code="engine-absent",
                    ) from None
                refuse_foreign_name(type(self), name)
                hint = _hint(type(self), name)
                text = f"the engine and its model ({type(module).__name__}) have no attribute {name!r}{hint}"
                raise AttributeError(text, name=name, obj=self) from error

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Raises: UsageError: an engine holds communicators and hooks, and cannot be copied or pickled."""
        raise UsageError(
            "an engine cannot be copied or pickled: it holds a part of the model, and is connected to the other ranks.",
            do="save it with save_checkpoint(), take whole parameters with module_state_dict(), or copy the model"
            " before initialize().",
            code="engine-copy",
        )

    # forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; its output is returned unchanged, but for ``precision.output_dtype``.

        Raises: UsageError: it was destroyed. ModelError: the model was changed. OutOfMemoryError: with the ledger.
        Communicates: stage 3: an all_gather per unit, Psi bytes in all (Psi: the parameters' bytes).
        """
        self._check_alive()
        self.sharded.reads.stop()
        self.offloaded.require("forward()")
        is_transformed = in_transform()  # by torch.func: the engine gets no gradient, and parameters may be replaced
        if not is_transformed:
            self._check_model()
        if self.plan.input_dtype is not None:
            args, kwargs = cast(args, self.plan.input_dtype), cast(kwargs, self.plan.input_dtype)
        if is_transformed:
            with self._autocast(is_transformed=True):
                args, kwargs = self._before_forward(args, kwargs)
                return self._cast_output(self.module(*args, **kwargs))
        with self._failing("forward", (args, kwargs)), self.timers.phase("forward"), self._autocast():
            args, kwargs = self._before_forward(args, kwargs)
            with self.sharded.outside_reads.searching(self.sharded.model):
                output = self.module(*args, **kwargs)
            for call in self._calls.after_forward:
                call(output)
        self.sharding.check.after_forward()
        return self._cast_output(output)

    def _autocast(self, *, is_transformed: bool = False) -> AbstractContextManager[object]:
        dtype, kind = self.plan.autocast_dtype, self.device.type
        is_sharded = not is_transformed and bool(self.sharded.sharded)
        if dtype is None and is_sharded and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)  # of the script
        return nullcontext() if dtype is None else autocast(self.device, dtype, is_sharded=is_sharded)

    def _cast_output(self, output: Any) -> Any:
        return output if self.plan.output_dtype is None else cast(output, self.plan.output_dtype)

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for call in self._calls.before_forward:
            changed = call(args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return args, kwargs

    def _check_model(self) -> None:
        """Raises: ModelError: the model was changed."""
        self.sharding.check.check()

    # backward

    def scale(self, loss: torch.Tensor, num_tokens: NumTokens | None = None) -> torch.Tensor:
        """The loss as ``loss.backward()`` needs it: divided by the accumulation steps, multiplied by the loss scale.

        Args:
            num_tokens: as ``backward`` takes it.

        Raises: AssertedUsageError: the loss is not one number with a graph behind it.
        """
        check_for_scale(loss)
        self._before_backward(loss)
        return self.accumulation.scaled(loss, "scaled", num_tokens=num_tokens)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        num_tokens: NumTokens | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Back-propagate.

        Args:
            loss: shape [] or [1].
            scale_wrt_gas: divide by the accumulation steps.
            num_tokens: with ``loss_reduction: "token"``: the tokens of which ``loss`` is the mean; an int, or a tensor
                of one number. The step divides by those of all its micro-batches, over all ranks. Without it, and with
                ``scale_wrt_gas=False``, the script has divided by them, as Transformers' Trainer does.

        Returns: the loss as it was given; of ``deepspeed.initialize``'s engine divided by the accumulation steps.
        Raises: UsageError: no optimizer, a loss that is not one differentiable number, or ``num_tokens`` that does not
            fit ``loss_reduction``.
        Communicates: at most 2 Psi bytes per rank (stages 0 to 2, at the boundary) or the gathers and reduce-scatters
        of stage 3.
        """
        self._check_alive()
        self.offloaded.require("backward()")
        if self.sharded_optimizer is None:
            raise NoOptimizerError("backward() needs an optimizer, and this engine was made without one.")
        check_for_backward(loss)
        self._before_backward(loss)
        with self._failing("backward"), self.timers.phase("backward"):
            scaled = self.accumulation.scaled(loss, "engine", is_averaged=scale_wrt_gas, num_tokens=num_tokens)
            self.sharded.begin_backward(creates_graph=bool(kwargs.get("create_graph")))
            scaled.backward(retain_graph=retain_graph, **kwargs)
            self.sharded.finish_backward()
        return loss

    def _before_backward(self, loss: torch.Tensor) -> None:
        for call in self._calls.before_backward:
            call(loss)

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the optimizer steps after the current micro-batch."""
        return self.accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set the boundary before ``backward()``; from then on the engine does not count micro-batches."""
        self.accumulation.boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication, at every stage.

        Raises: AssertedUsageError: of ``deepspeed.initialize``'s engine, where DeepSpeed asserts: stages 2 and 3, and
        one block inside another.
        Memory: at stages 2 and 3 each rank holds its unsharded gradients until the next backward outside of the block.
        """
        reducer = self.sharded.reducer
        was_syncing, reducer.is_syncing = reducer.is_syncing, False
        try:
            yield
        finally:
            reducer.is_syncing = was_syncing

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the backward passes of the block once, when it ends. One block for each step, at every stage.

        Raises: AssertedUsageError: of ``deepspeed.initialize``'s engine, where DeepSpeed asserts: with
        ``managed_gradient_accumulation: false``, and inside another block or ``no_sync()``.
        Communicates: at the end of the block what one backward pass does.
        Memory: as ``no_sync``.
        """
        with Engine.no_sync(self):
            yield
        if self.sharded.reducer.is_syncing and self.accumulation.has_backward:
            self.sharded.finish_backward()
            self.sharded.reducer.reduce_unsynced(at_step=self.accumulation.begin_pass())

    # step

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary: reduce what is not reduced, clip, update, schedule; otherwise count the micro-batch.

        Raises: NonFiniteError: the loss is NaN or infinite, or gradients were so too often in a row.
        Communicates: stages 1 and 2: an all_gather of every parameter (Psi bytes); norm and flags: 32 bytes.
        """
        self._check_alive()
        self.offloaded.require("step()")
        self.sharded.finish_backward()
        is_boundary = self.accumulation.is_boundary()
        num_micro = self.accumulation.num_micro_passed()
        if is_boundary:
            with self._failing("step"), self.timers.phase("step"):
                self._step_boundary(lr_kwargs)
        else:
            self._was_step_applied = False
        self.accumulation.end_micro_batch(is_boundary=is_boundary, num_micro=num_micro)
        if is_boundary:
            self.run_state.begin_step()
            self._report_step()

    def _report_step(self) -> None:
        """Log the step and write its events, once its samples are counted and its times are known."""
        numbers = StepNumbers(self.get_lr(), self.accumulation.mean_loss, self._norm, self.loss_scale)
        self._progress.after_step(self.accumulation.counters, numbers)
        self.sharded.reads.watch()
        for call in self._calls.after_step:
            call()

    def _step_now(self) -> None:
        """``optimizer.step()``: a step even between two boundaries."""
        with self.accumulation.boundary_now():
            self.step()

    def _step_boundary(self, lr_kwargs: dict[str, Any] | None) -> None:
        accumulation, counters, sharding = self.accumulation, self.accumulation.counters, self.sharding
        if sharding.step is None:
            raise NoOptimizerError("step() needs an optimizer, and this engine was made without one.")
        status = self._reduce_for_step("step()")
        accumulation.mean_loss, accumulation.step_loss = self._mean_loss(status), self._step_loss(status)
        self._norm = status.norm * accumulation.gradient_scale()
        is_wanted = False not in [call() for call in self._calls.before_step]
        sharding.refuse_unused(status, self.global_steps)
        sharding.warn_without_gradients(status, self.global_steps)
        self._was_step_applied = False
        try:
            is_finite = self._nonfinite.judge(status, self.global_steps, is_loss_known=accumulation.is_loss_known)
            self._was_step_applied = is_finite and is_wanted
        finally:
            counters.skipped_steps += not self._was_step_applied
            if self.sharded_optimizer is not None:
                self.sharded_optimizer.overflow = not self._was_step_applied
        if self._was_step_applied:
            self._update(status, self._norm)
        self._nonfinite.adapt_scale(status, self.global_steps)
        if self.sharded_optimizer is not None and accumulation.loss_scale is not None:
            self.sharded_optimizer.loss_scale = accumulation.loss_scale.scale
        if self._was_step_applied:
            self.run_state.step_schedule(lr_kwargs or {}, self.global_rank)
        counters.global_steps += 1
        self._end_step()
        for at_step in self._calls.at_step:
            at_step(self._was_step_applied)
        self.checkpointing.poll()
        if not self._has_stepped:
            self._has_stepped = True
            if self.sharded_optimizer is not None:
                # Torch's schedules warn if they are stepped before optimizer.step(), which engine.step() replaces.
                self.sharded_optimizer.__dict__["_opt_called"] = True
        for callback in self.on_step:
            callback(self)

    def _mean_loss(self, status: GlobalStatus) -> float | None:
        """The loss of the step that is logged."""
        return status.mean_loss

    def _step_loss(self, status: GlobalStatus) -> float | None:
        """The loss of the step over all ranks, by tokens where they are counted: the same on every rank."""
        if status.mean_loss is None:
            return None
        total = math.fsum(loss * tokens for loss, tokens in zip(status.losses, status.tokens, strict=True))
        return total / max(math.fsum(status.tokens), 1.0)

    def _reduce_for_step(self, call: str) -> GlobalStatus:
        if not self.accumulation.has_backward:
            raise UsageError(
                f"{call} was called without a backward() since the last step.",
                where=self.properties.where(self.global_steps),
                do="call engine.backward(loss) first.",
                code="step-without-backward",
            )
        accumulation, sharding = self.accumulation, self.sharding
        accumulation.refuse_mixed(self.sharded.num_plain_passes)
        sharding.reduce_all()
        status = sharding.synchronize_status(
            accumulation.compute_mean_loss(),
            accumulation.count_tokens(self.device),
            None if self._save_on_signal is None else self._save_on_signal.number,
        )
        for at_reduction in self._calls.at_reduction:
            status = at_reduction(status)
        if self._save_on_signal is not None:
            self._save_on_signal.agreed = status.signal
        accumulation.set_step_tokens(status.num_tokens)
        return status

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Let the next ``step()`` clip to ``max_norm`` too, not only to ``gradient_clipping``. Every rank calls.

        Returns: the global norm before clipping. Shape: []. With ``max_norm=math.inf`` that is all it does.
        Raises: UsageError: no backward yet, or more micro-batches follow before the step.
        Communicates: what is not reduced yet; 32 bytes.
        """
        self._check_alive()
        self.offloaded.require("clip_grad_norm_()")
        self.sharded.finish_backward()
        if not self.accumulation.is_boundary():
            raise UsageError(
                f"clip_grad_norm_() was called in micro-batch {self.accumulation.micro_in_step + 1} of"
                f" {self.accumulation.num_micro}: the norm of the step's gradients is not known yet.",
                where=self.properties.where(self.global_steps),
                do="call it after the last backward(): if engine.is_gradient_accumulation_boundary().",
                code="clip-mid-step",
            )
        with self._failing("clip_grad_norm_"):
            status = self._reduce_for_step("clip_grad_norm_()")
        self.accumulation.clip_norm = min(self.accumulation.clip_norm, float(max_norm))
        return torch.tensor(status.norm * self.accumulation.gradient_scale(), dtype=torch.float32, device=self.device)

    def _update(self, status: GlobalStatus, norm: float) -> None:
        gradient_scale = self.accumulation.gradient_scale()
        clip = min(self.plan.clip_norm or math.inf, self.accumulation.clip_norm)
        is_clipped = math.isfinite(norm) and norm > clip
        if is_clipped:
            gradient_scale *= clip / (norm + 1e-6)
        with nullcontext() if self.sharded_optimizer is None else self.sharded_optimizer.updating():
            self.sharding.update(status, gradient_scale, is_clipped=is_clipped)

    def _end_step(self) -> None:
        self.sharding.reset_gradients()
        self.accumulation.reset()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the current step. After ``step()`` there are none."""
        if self.sharded.in_pass:
            return
        self.accumulation.set_step_tokens(None)
        self._end_step()
        for parameter in self.module.parameters():
            parameter.grad = None

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
            compile_kwargs: passed to ``torch.compile``.

        Raises: NotBuiltError: a schedule of DeepCompile's, or compiled autograd. ModelError: CUDA graphs that this
            configuration cannot have.
        """
        self._check_alive()
        if schedule is not None or compiled_autograd_enabled:
            raise NotBuiltError(
                "engine.compile() supports neither DeepCompile's schedules nor compiled autograd.",
                do="leave schedule and compiled_autograd_enabled out.",
            )
        self.compiled.compile_module(backend, compile_kwargs or {})

    @property
    def is_compiled(self) -> bool:
        """True if the model's forward was compiled, as a whole or by blocks."""
        return bool(self.compiled)

    # failures

    @contextmanager
    def _failing(self, phase: str, inputs: Any = None) -> Iterator[None]:
        """When something raises: release the units, discard the gradients, and explain the error.

        Args:
            inputs: of a forward.

        An error that nothing catches is reported to the other ranks by ``comm``.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, ShoalError) and error.code.startswith("tier"):  # a disk that is too full included
                self.sharding.failure = error
            if in_backward():
                raise  # recomputed activations: the backward pass that asked for them reports it
            snapshot = self._write_memory_snapshot(error, phase)
            self.sharding.recover()
            self.accumulation.reset()
            self._explain_out_of_memory(error, phase, snapshot)
            explain_mismatch(error, self.sharded.sharded)
            if phase == "forward":
                explain_mixed_formats(error, self.module, self.plan.precision.parameter, inputs)
                for explain in self._calls.explain:
                    explain(error)
            raise

    # the end

    def destroy(self) -> None:
        """Remove all hooks, free buffers, gradients and optimizer state; the model keeps its parameters.

        Waits for a checkpoint that is being written.

        The parameters are unsharded, unless they were built under ``zero.Init`` or on the meta device: then they are
        sharded again. Every rank calls. After a failed step, or a failed disk, nothing is gathered: what was sharded
        reads as NaN.

        Idempotent. Raises: StreamError: ``debug.check_streams`` has found something; the engine is destroyed. What a
        part raises when it ends: the engine is destroyed, too.
        """
        if self._is_destroyed:
            return
        try:
            self.run_state.close()
            self.checkpointing.close()
            self.sharding.wait()
        finally:
            with ExitStack() as ending:  # the last one first, each of them also when another one raises
                for call in self._calls.after_destroy:
                    ending.callback(call)
                ending.callback(self._tear_down)
                for call in self._calls.before_destroy:
                    ending.callback(call)

    def _tear_down(self) -> None:
        self._is_destroyed = True
        self.sharding.stop_host_updates()
        self.compiled.undo()
        if self._progress.monitor is not None:
            self._progress.monitor.close()
        self.sharding.detach()
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.release_wrapped()
        self.sharding.free()
        for parameter in self.module.parameters():
            OWNERS.pop(parameter, self.access)
        self.on_step.clear()
        if not self.properties.device.is_cuda:
            self.properties.device.give_cache_back()
