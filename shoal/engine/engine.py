"""The engine: a model, an optimizer and a config, put together; forward, backward, step."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from shoal.device import in_backward, in_transform
from shoal.engine.accumulation import Accumulation, NumTokens, check_for_backward, check_for_scale
from shoal.engine.checkpointing import Checkpointing
from shoal.engine.compiled import CompiledModel
from shoal.engine.inputs import cast, explain_mismatch, explain_mixed_formats
from shoal.engine.nonfinite import NonFinite
from shoal.engine.offload_states import Offloaded, OffloadStates
from shoal.engine.parts.part import Part, PartCalls
from shoal.engine.parts.save_on_signal import SaveOnSignal
from shoal.engine.progress import Progress, StepNumbers
from shoal.engine.properties import Properties
from shoal.engine.run_state import RunState
from shoal.engine.sharding import Sharding
from shoal.engine.weights import Weights
from shoal.errors import NoOptimizerError, NotBuiltError, OutOfMemoryError, ShoalError, UsageError
from shoal.observe.ledger import Ledger
from shoal.observe.timers import StepTimers
from shoal.running.optimizer import ShardedOptimizer
from shoal.running.parameter_owner import OWNERS
from shoal.running.status import GlobalStatus
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import Tier
from shoal.text import did_you_mean

AnyPart = TypeVar("AnyPart", bound=Part)


@cache
def _hint(engine: type, name: str) -> str:
    """The public names of the engine that are like ``name``, as a clause."""
    return did_you_mean(name, [known for known in dir(engine) if not known.startswith("_")], limit=1)


class Engine(nn.Module):
    """A model that trains under one plan.

    Made by ``shoal.initialize``. ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``; or
    ``loss.backward()`` and ``engine.step()``. Attributes that the engine does not have are the model's.

    It has

        properties       config, plan, ranks, device                            fixed
        accumulation     micro-batches, losses, counters
        sharding         parameters, gradients, optimizer state
        run_state        schedule, data loader, curriculum                      what a checkpoint saves beside tensors
        checkpointing, weights, offloaded                                       what moves the state elsewhere
        parts            what joins its steps: techniques, checks, the script's own
    """

    optimizer_class: type[ShardedOptimizer] = ShardedOptimizer  # of what ``initialize`` returns
    weights_filename = "model.safetensors"  # of ``save_16bit_model``, where the call names none

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
                sharding.model.offload if properties.stage == 3 else None,
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
            self.sharded.reducer.timed = partial(timers.phase, "reduce")
        self._norm: float | None = None
        self._was_step_applied = self._has_stepped = False
        self._is_destroyed = False
        for parameter in self.module.parameters():
            OWNERS.put(parameter, self.access)

    if not TYPE_CHECKING:  # a type checker would take every misspelt name for an attribute of the model

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
        """The model's forward; its output is returned unchanged.

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
        autocast = (
            torch.autocast(self.device.type, dtype=self.plan.autocast_dtype)
            if self.plan.autocast_dtype is not None
            else nullcontext()
        )
        if is_transformed:
            with autocast:
                args, kwargs = self._before_forward(args, kwargs)
                return self.module(*args, **kwargs)
        with self._failing("forward", (args, kwargs)), self.timers.phase("forward"), autocast:
            args, kwargs = self._before_forward(args, kwargs)
            with self.sharded.searching():
                output = self.module(*args, **kwargs)
            for call in self._calls.after_forward:
                call(output)
        self.sharding.check.after_forward()
        return output

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

        Returns: the loss as it was given; under ``import deepspeed`` divided by the accumulation
            steps, as in DeepSpeed.
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

        Raises: AssertedUsageError: under ``import deepspeed``, where DeepSpeed asserts: stages 2 and 3, and one block
        inside another.
        Memory: at stages 2 and 3 each rank holds its unsharded gradients until the next backward outside of the block.
        """
        reducer = self.sharded.reducer
        was_syncing, reducer.is_syncing = reducer.is_syncing, False
        try:
            yield
        finally:
            reducer.is_syncing = was_syncing

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
        self.sharded.watch_reads()
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
        accumulation.mean_loss = self._mean_loss(status)
        self._norm = status.norm * accumulation.gradient_scale()
        for call in self._calls.before_step:
            call()
        sharding.refuse_unused(status, self.global_steps)
        sharding.warn_without_gradients(status, self.global_steps)
        self._was_step_applied = False
        try:
            self._was_step_applied = self._nonfinite.judge(
                status, self.global_steps, is_loss_known=accumulation.is_loss_known
            )
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
        if self._save_on_signal is not None:
            self._save_on_signal.agreed = status.signal
        accumulation.set_step_tokens(status.num_tokens)
        return status

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Let the next ``step()`` clip to ``max_norm``, beside the config's ``gradient_clipping``. Every rank calls.

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
        return torch.tensor(status.norm * self.accumulation.gradient_scale(), device=self.device)

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

        Raises: NotBuiltError: a schedule of DeepCompile's, or compiled autograd. ModelError: CUDA graphs at stage 3.
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

    # properties

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

    @property
    def is_watched(self) -> bool:
        """True if changes that ``GatheredParameters`` would lose raise an error."""
        return bool(self.properties.config.zero_optimization.enable_sanity_checks)

    @property
    def trained_groups(self) -> list[ParameterGroup]:
        """Every trainable bucket, in unit order."""
        return self.sharding.groups

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

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch; the accumulation steps stay."""
        self.accumulation.micro_batch = micro_batch_size

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
        return self.checkpointing.load(
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
        found = self.weights.module_state_dict(exclude_frozen=exclude_frozen_parameters, prefix=prefix)
        if destination is None:
            return found
        destination.update(found)
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
            self.sharding.recover()
            self.accumulation.reset()
            self._explain_out_of_memory(error, phase)
            explain_mismatch(error, self.sharded.sharded)
            if phase == "forward":
                explain_mixed_formats(error, self.module, self.plan.precision.parameter, inputs)
                for explain in self._calls.explain:
                    explain(error)
            raise

    def _explain_out_of_memory(self, error: Exception, phase: str) -> None:
        """Raises: OutOfMemoryError: with the ledger, where ``error`` is the allocator's."""
        if isinstance(error, OutOfMemoryError) or not self.properties.device.is_out_of_memory(error):
            return
        ledger = self.memory_report()
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OutOfMemoryError(
            f"no memory left in {phase}: {first_line}\n{ledger}",
            where=f"{self.properties.where(self.global_steps)}, micro-step {self.micro_steps}",
            do=ledger.advice(self.properties.stage, self.dp_world_size, self.accumulation.micro_batch),
        ) from error

    # the end

    def destroy(self) -> None:
        """Remove all hooks, free buckets, gradients and optimizer state; the model keeps its parameters.

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
            self.sharded_optimizer.let_go()
        self.sharding.free()
        for parameter in self.module.parameters():
            OWNERS.pop(parameter, self.access)
        self.on_step.clear()
        if not self.properties.device.is_cuda:
            self.properties.device.give_cache_back()
