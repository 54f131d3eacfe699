"""The engine of a pipeline: ``train_batch`` runs a schedule of micro-batches over the pipeline stages, and steps.

Each rank holds the parameters of its stages, sharded over the ranks that hold the same ones as the table says. A
gradient stays Partial from the first micro-batch to the stage's last backward, then it is reduced once; where the
parameters of stage 3 exceed ``stage3_max_live_parameters``, each pass gathers units and reduces their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import nn

from shoal.compiler import is_compiled
from shoal.device import is_fake
from shoal.engine.engine import Engine
from shoal.engine.parts.activations import SavedActivations
from shoal.engine.parts.sequence import AttentionCheck
from shoal.engine.pipeline_data import check_length, endless, exchange_rows, explain_unread, next_batches
from shoal.errors import NoOptimizerError, UsageError
from shoal.parallel.loss import count_tokens
from shoal.parallel.targets import targets_of
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.run import Failure, MicroBatch, PipelineRun
from shoal.pipeline.schedule import Action, PipelineSchedule, build_schedule, forward_schedule
from shoal.pipeline.simulate import lower
from shoal.pipeline.stage import StageModule
from shoal.running.status import GlobalStatus
from shoal.sharding.unit import Unit


class PipelineEngine(Engine):
    """A model in pipeline stages that trains under one plan: ``train_batch(data_iter)``, ``eval_batch(data_iter)``.

    Attributes:
        before_step: ``train_batch`` calls these with this engine, on every rank, when the gradients of all stages are
            reduced and the optimizer has not run: the place for ``clip_grad_norm_`` and for accessors of gradients.
    """

    module: StageModule

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.world.stages is None and any(map(is_fake, self.module.parameters())):
            raise UsageError(
                "a dry run of one rank cannot run a model in pipeline stages: a stage learns from the previous one what"
                " it will receive.",
                do="use shoal.dry_run_pipeline, which runs a rank of each stage.",
                code="dry-run-pipeline",
            )
        mesh = self.axes.mesh
        section = self.properties.config.pipeline
        module = self.module
        module.cast_absent(self.plan.precision.of)
        self._name = str(section.schedule)
        self._num_pipeline_ranks = mesh.pp
        self._pipeline_rank = mesh.index("pp", self.world.rank)
        self._virtual_stages = module.num_stages // mesh.pp
        self._schedules: dict[tuple[bool, int], tuple[PipelineSchedule, tuple[Action, ...]]] = {}
        self._compute = _EngineCompute(self)
        self._attention_check = self.part(AttentionCheck)
        for group in self.sharded.trained_groups:
            group.gradient.adds_in_place = True  # no script sees parameter.grad between micro-batches
        self._stage_ranks = self.schedule().stage_ranks
        has_inner_collectives = any(axis in self.axes.comms for axis in ("tp", "sp", "cp", "ep"))
        comm = self.axes.get("pp") or self.world.communicator("pp", mesh)
        self._runner = PipelineRun(
            comm,
            self.axes.get("pp_gradients") or comm,
            self._compute,
            self.device,
            stages=module.stages,
            num_stages=module.num_stages,
            rank_of=self._stage_ranks.__getitem__,
            is_dynamic=module.is_dynamic,
            goes_on=not has_inner_collectives and (self._compute.keeps_gathered or not self.sharded.sharded),
            fake_stages=self.world.stages,
            wire=self.properties.plan.activations.pipeline,
        )
        interval = getattr(module, "activation_checkpoint_interval", 0)
        activations = self.part(SavedActivations)
        self._is_recomputed = bool(interval or (activations is not None and activations.num_recomputed))
        self._iterator: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None
        self.before_step: list[Callable[[PipelineEngine], None]] = []
        self._is_before_step = False
        self.synchronize_tied()
        module.has_engine = True

    # the model's calls, which a pipeline does not have

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("engine(batch)")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("engine.backward(loss)")

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("engine.step()")

    def scale(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._refuse("engine.scale(loss)")

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As ``Engine.clip_grad_norm_``, over all stages, in a function of ``before_step``."""
        if not self._is_before_step:
            self._refuse(
                "engine.clip_grad_norm_()",
                "set gradient_clipping in the config: train_batch() clips; or call it in a function that train_batch()"
                " calls before the optimizer: engine.before_step.append(lambda engine: engine.clip_grad_norm_(1.0)).",
            )
        return super().clip_grad_norm_(max_norm)

    def no_sync(self) -> NoReturn:
        self._refuse(
            "engine.no_sync()",
            "call engine.train_batch(data_iter): each call steps, for which it needs reduced gradients. It reduces once"
            " a step, whatever the number of micro-batches (gradient_accumulation_steps); at stage 3 where the stages"
            " fit in stage3_max_live_parameters.",
        )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._refuse("engine.set_gradient_accumulation_boundary()")

    def _refuse(self, call: str, do: str | None = None) -> NoReturn:
        raise UsageError(
            f"{call} of a model in {self.module.num_stages} pipeline stages: no rank has all of it.",
            do=do
            or "call engine.train_batch(data_iter), which runs all micro-batches of a step, and"
            " engine.eval_batch(data_iter).",
            code="pipeline-call",
        )

    def _check_model(self) -> None:
        if self._compute.is_first_forward:
            super()._check_model()

    # training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Run one step: ``gradient_accumulation_steps`` micro-batches through all stages, then the optimizer.

        Args:
            data_iter: gives this rank's micro-batches, the same on all stages of one pipeline; a rank that is neither
                first nor last may have None, without ``cp``: it gets them of the first, if its stages need any. None:
                the one that ``set_dataiterator``, ``set_dataloader`` or ``initialize(training_data=...)`` gave.

        Returns: the mean loss over all micro-batches and data-parallel ranks, on every rank. Shape: [].
        Raises: StopIteration: the iterator has ended, on all stages. UsageError: on some of them only. What a stage
            raised: on every rank; nothing was changed, and the next call may follow, except where a stage has
            collectives of its own (tensor and sequence parallelism, stage 3 beyond ``stage3_max_live_parameters``).
        Communicates: one send for each boundary, direction and micro-batch (two more of a few bytes for new shapes);
            the reductions and gathers of the stage; two exchanges of a few bytes between hosts; one broadcast of the
            micro-batches where a rank needs them and has none.
        """
        self._check_alive()
        self.offloaded.require("train_batch()")
        if self.sharded_optimizer is None:
            raise NoOptimizerError(
                "train_batch() needs an optimizer, and this engine was made without one.",
                do="pass optimizer= to initialize(), or use eval_batch().",
            )
        self.module.train()
        accumulation, num_micro = self.accumulation, self.gradient_accumulation_steps()
        _, actions = self._schedule(num_micro, is_training=True)
        batches, failure = self._next_batches(data_iter, num_micro)
        # A split backward would recompute twice, and run the backward of a compiled block twice, which computes all.
        self._runner.splits_backward = not (self._is_recomputed or any(map(is_compiled, self.module.modules())))
        reducer, boundary = self.sharded.reducer, accumulation.boundary
        accumulation.boundary, reducer.is_held = False, self._compute.stays_partial
        self._compute.begin(actions)
        try:
            with self.timers.phase("pipeline"):
                failure = self._runner.train(_possible(actions, failure), batches) or failure
                first_used = self._share(failure, self._first_stage_used())
                if not self.is_last_stage():
                    for _ in range(num_micro):
                        accumulation.loss_is_elsewhere(self.device)
                with self._failing("step"), self.timers.phase("step"):
                    self._compute.reduce_left()
                    self._compute.drop_gradients_before(first_used)
                    accumulation.boundary = True
                    self._call_before_step()
                    self._step_boundary(None)
        finally:
            accumulation.boundary, reducer.is_held = boundary, False
            self._compute.end()
        accumulation.end_micro_batch(is_boundary=True, num_micro=num_micro)
        accumulation.counters.micro_steps += num_micro - 1
        self._report_step()
        return torch.full((), accumulation.mean_loss or 0.0, dtype=torch.float32, device=self.device)

    def _call_before_step(self) -> None:
        """Call the functions of ``before_step``. Raises: what one of them raised, on every rank."""
        if not self.before_step:
            return
        failure: Failure | None = None
        self.sharding.reduce_all()
        self._is_before_step = True
        try:
            for function in self.before_step:
                function(self)
        except Exception as error:
            failure = Failure("before_step", error)
        finally:
            self._is_before_step = False
        self._share(failure)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run the forward of all stages on a step's micro-batches, without gradients.

        Args:
            return_logits: return the last stage's outputs too, a list by micro-batch; None on ranks without it.
            compute_loss: False: the outputs take the place of the loss.
            reduce_output: "avg": the mean over micro-batches and data-parallel ranks; None: this pipeline's losses, a
                list by micro-batch, on the ranks of the last stage.
            bcast_loss: no effect: the mean is on every rank.
            num_micro_batches: None: ``gradient_accumulation_steps``.

        Returns: the loss, or (loss, outputs).
        Communicates: one send a boundary and micro-batch; two exchanges of a few bytes.
        """
        self._check_alive()
        self.offloaded.require("eval_batch()")
        num_micro = num_micro_batches or self.gradient_accumulation_steps()
        _, actions = self._schedule(num_micro, is_training=False)
        was_training = self.module.training
        self.module.eval()
        self._compute.begin(actions)
        try:
            batches, failure = self._next_batches(data_iter, num_micro)
            keeps, possible = return_logits or not compute_loss, _possible(actions, failure)
            ended = self._runner.evaluate(possible, batches, has_loss=compute_loss, keeps_outputs=keeps)
            self._share(ended or failure)
        finally:
            self._compute.end()
            self.module.train(was_training)
        outputs = self._runner.outputs if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        losses = self._runner.losses
        loss: Any = losses or None
        if reduce_output is not None:
            mine = torch.zeros(2, dtype=torch.float64, device=self.device)
            for value, batch in zip(losses, batches, strict=False):
                weight = float(self._compute.count_targets(batch.data) if self.accumulation.counts_tokens else 1.0)
                mine += torch.stack([value.double().reshape(()) * weight, torch.full_like(mine[0], weight)])
            sums = self.axes.world.exchange(mine, label="evaluation").wait().sum(dim=0)
            loss = (sums[0] / sums[1].clamp(min=1.0)).float()
        return (loss, outputs) if return_logits else loss

    def _schedule(self, num_micro: int, *, is_training: bool) -> tuple[PipelineSchedule, tuple[Action, ...]]:
        """A schedule, and this rank's actions of it with those that communicate."""
        lowered = self._schedules.get((is_training, num_micro))
        if lowered is None:
            if is_training:
                schedule = build_schedule(
                    self._name, self._num_pipeline_ranks, num_micro, virtual_stages=self._virtual_stages
                )
            else:  # a file is for one number of micro-batches
                schedule = forward_schedule(self._stage_ranks, num_micro)
            num_gathered = len(self.module.stages) if self._compute.keeps_gathered else None
            orders = lower(schedule, max_active_stages=num_gathered)
            lowered = self._schedules[is_training, num_micro] = schedule, orders[self._pipeline_rank]
        return lowered

    def _mean_loss(self, status: GlobalStatus) -> float | None:
        """Over all ranks that have the last stage, of every replica that is a job of its own, by tokens where they are
        counted.
        """
        size, last = self.world.size, self._ranks_of_last_stage
        ranks = [start + rank for start in range(0, len(status.losses), size) for rank in last]
        weight = sum(status.tokens[rank] for rank in ranks)
        return sum(status.losses[rank] * status.tokens[rank] for rank in ranks) / max(weight, 1.0)

    def _step_loss(self, status: GlobalStatus) -> float | None:
        return self._mean_loss(status)

    @cached_property
    def _ranks_of_last_stage(self) -> tuple[int, ...]:
        index = self.axes.mesh.index
        return tuple(rank for rank in range(self.world.size) if index("pp", rank) == self._stage_ranks[-1])

    # data

    def _next_batches(self, data_iter: Iterator[Any] | None, num_micro: int) -> tuple[list[MicroBatch], Failure | None]:
        """The micro-batches of a step, on which all stages of this pipeline agree."""
        source = data_iter if data_iter is not None else self._data_iterator()
        schedule = f"{self._name} {self._num_pipeline_ranks} {self._virtual_stages} {num_micro}"
        arguments: dict[str, Any] = {}
        if self.module.training:  # before the batches: an iterator may read the curriculum's place
            arguments = self.run_state.curriculum.arguments()
        checked = partial(self._checked, arguments.get("curriculum_seqlen"))
        needs_all = self.module.reads_between != "nothing" and self.world.stages is None
        # A script that divides its batches over ``cp`` does so on each rank, which remembers how.
        needs_all = needs_all and (source is not None or self.axes.get("cp") is None)
        comm, device = self.axes.get("pp"), self.device
        return next_batches(source, checked, num_micro, schedule, arguments, comm, device=device, needs_all=needs_all)

    def _checked(self, longest: int | None, batch: Any) -> Any:
        """A micro-batch as the stages get it; None: this rank reads none. Raises: UsageError: no stage could run it."""
        if batch is None:
            return None
        try:
            batch = batch if self._batch_fn is None else self._batch_fn(batch)
        except Exception as error:
            explain_unread(error, batch)
            raise
        if self._attention_check is not None:
            self._attention_check.of_stages(self.module.loss_model, batch)
        tp = self.axes.get("tp")
        if tp is not None and self.properties.config.parallel.tp_sequence_parallel:
            check_length(batch, tp.size, None if isinstance(self.module, PipelineModule) else longest)
        return batch

    def _data_iterator(self) -> Iterator[Any] | None:
        if self._iterator is None and self.training_dataloader is not None:
            self._iterator = endless(self.training_dataloader)
        return self._iterator

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """``train_batch()`` reads this iterator from now on."""
        self._iterator = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """``train_batch()`` reads this loader from now on, again and again."""
        self._iterator = endless(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """``fn`` changes each micro-batch that an iterator gives."""
        self._batch_fn = fn

    # stages

    def is_first_stage(self) -> bool:
        """True if this rank has the first pipeline stage."""
        return 0 in self.module.stages

    def is_last_stage(self) -> bool:
        """True if this rank has the last pipeline stage."""
        return self._stage_ranks[-1] == self._pipeline_rank

    def reads(self, *, has_forms: bool) -> bool:
        """True if this rank reads micro-batches: the first stage its inputs, the last one its labels. Others get what
        they need of the first.

        Args:
            has_forms: the loader knows shapes, positions and documents without reading.
        """
        if self.is_first_stage() or self.is_last_stage() or self.properties.config.data.read_on_every_stage:
            return True
        needs = self.module.reads_between
        if needs == "nothing":
            return False
        return needs == "values" if has_forms else self.world.stages is not None  # a dry run sends no values

    def schedule(self) -> PipelineSchedule:
        """The schedule of a step, on all ranks."""
        return self._schedule(self.gradient_accumulation_steps(), is_training=True)[0]

    # failures

    def _first_stage_used(self) -> int:
        """The last stage of this rank that gave the stage before no gradient in any micro-batch; 0: each gave one."""
        given = self._runner.with_input_gradient
        return max((stage for stage in self.module.stages if stage not in given), default=0)

    def _share(self, failure: Failure | None, first_used: int = 0) -> int:
        """Returns: the largest ``first_used`` on this pipeline. Raises: on every rank, the first rank's failure."""
        mine = [float(failure is not None), float(first_used)]
        rows = exchange_rows(mine, self.axes.world, label="pipeline status")
        if not any(failed for failed, _ in rows):
            return max(int(rows[rank][1]) for rank in self.axes.mesh.ranks_along("pp", self.world.rank))
        error = None if failure is None else failure.error
        texts = self.axes.world.gather_objects(
            None if error is None or failure is None else [failure.action, type(error).__name__, str(error)],
            label="pipeline failure",
        )
        snapshot = "" if error is None else self._write_memory_snapshot(error, "train_batch()")
        self._runner.forget()
        self.sharding.recover()
        self.accumulation.reset()
        if error is not None:
            self._explain_out_of_memory(error, "train_batch()", snapshot)
            raise error
        first = next((rank for rank, text in enumerate(texts) if text is not None), 0)
        action, kind, message = texts[first] or ("?", "Exception", "")
        if kind == "StopIteration":
            raise StopIteration
        raise UsageError(
            f"rank {first} raised {kind} in {action} of the pipeline: {message}",
            where=self.properties.where(self.global_steps),
            do=f"fix the error of rank {first}; nothing was changed, so the next train_batch() may follow.",
            code="pipeline-failed",
        )

    def synchronize_tied(self) -> None:
        """Give all copies of tied weights the values of the first stage that has one. Communicates: a broadcast."""
        for group in sorted(self.sharded.groups, key=lambda group: group.buffer.layout.specs[0].name):
            self.sharding.synchronize_tied(group)


class _EngineCompute:
    """What a schedule asks of the engine."""

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        module, sharded = engine.module, engine.sharded
        self._parameters = {stage: module.stage_parameters(stage) for stage in module.stages}
        self._units: dict[int, list[Unit]] = {}
        for stage, parameters in self._parameters.items():
            units = {id(unit): unit for unit in (sharded.unit_of[id(p)] for p in parameters)}
            self._units[stage] = list(units.values())
        numel = sum(unit.numel for unit in sharded.sharded)
        self.keeps_gathered = bool(sharded.sharded) and numel <= sharded.order.max_live_numel
        self.stays_partial = not sharded.sharded or self.keeps_gathered
        self._left: dict[int, Unit] = {}  # units that are not reduced yet
        self._pinned: list[Unit] = []
        self.is_first_forward = False  # of the step

    def begin(self, actions: Iterable[Action]) -> None:
        """A step, or an evaluation, begins."""
        self._waiting = {action.stage for action in actions if action.kind == "REDUCE_GRAD"}
        self._left = {id(unit): unit for unit in self._engine.sharded.reducer.units}
        self.is_first_forward = True

    def end(self) -> None:
        """It has ended, or failed."""
        for unit in self._pinned:
            unit.pin_count -= 1
            unit.release()
        self._pinned.clear()

    def forward(self, stage: int, received: Any, batch: Any) -> Any:
        self._engine.sharded.outside_reads.part = stage
        for unit in self._units[stage]:
            if unit.pin_count:
                unit.gather()
        try:
            output = Engine.forward(self._engine, stage, received, batch)
        except Exception as error:
            explain_unread(error, batch)
            raise
        self.is_first_forward = False
        return output

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        engine = self._engine
        loss = engine.module.loss(output, batch)
        if not torch.is_grad_enabled():
            return loss
        engine._before_backward(loss)
        num_tokens = self.count_targets(batch) if engine.accumulation.counts_tokens else None
        return engine.accumulation.scaled(loss, "engine", num_tokens=num_tokens)

    def count_targets(self, batch: Any) -> torch.Tensor:
        return count_tokens(targets_of(batch, self._engine.module.loss_model))

    def backward(self, run: Callable[[], None], stage: int, *, is_weight_pass: bool = False) -> None:
        engine = self._engine
        with engine._failing("backward"), engine.timers.phase("backward"):
            engine.sharded.begin_backward()
            if is_weight_pass:
                with engine.sharded.gathered([unit for unit in self._units[stage] if unit.is_sharded]):
                    run()
            else:
                run()
            engine.sharded.finish_backward()

    def weights(self, stage: int) -> Iterable[nn.Parameter]:
        return [parameter for parameter in self._parameters[stage] if parameter.requires_grad]

    def unshard(self, stage: int) -> None:
        if not self.keeps_gathered:
            return
        for unit in self._units[stage]:
            if unit.is_sharded:
                unit.pin_count += 1
                self._pinned.append(unit)
                unit.start_gather()

    def reshard(self, stage: int) -> None:
        for unit in self._units[stage]:
            if unit in self._pinned:
                self._pinned.remove(unit)
                unit.pin_count -= 1
                unit.release()

    def reduce(self, stage: int) -> None:
        """Reduce units that no other stage of this rank, and no tied copy, still adds to."""
        self._waiting.discard(stage)
        if not self.stays_partial:
            return
        used = {id(unit) for other in self._waiting for unit in self._units[other]}
        ready = [u for u in self._units[stage] if id(u) in self._left and id(u) not in used and not _is_tied(u)]
        for unit in ready:
            del self._left[id(unit)]
        self._engine.sharded.reducer.reduce_now(ready)

    def drop_gradients_before(self, stage: int) -> None:
        """The stages before got zeros for gradients, because the loss does not depend on them: as if there were none.

        The optimizer leaves a parameter alone that no rank has a gradient of.
        """
        if stage:
            used = {id(p) for number, parameters in self._parameters.items() if number >= stage for p in parameters}
            for group in self._engine.sharded.trained_groups:
                for slot, parameter in enumerate(group.parameters):
                    if id(parameter) not in used:
                        group.gradient.has_grad[slot] = 0

    def reduce_left(self) -> None:
        """After the last action: reduce what is left; units with tied weights in the order of their names."""
        if self.stays_partial:
            left = sorted(self._left.values(), key=lambda unit: (_is_tied(unit), _tied_name(unit)))
            self._engine.sharded.reducer.reduce_now(left)
            self._left.clear()
        self._engine.sharded.reducer.wait_reduced()


def _possible(actions: Sequence[Action], failure: Failure | None) -> Sequence[Action]:
    """What is left to do where a pipeline has no micro-batches: what other pipelines' ranks wait for."""
    return actions if failure is None else [action for action in actions if action.micro is None]


def _is_tied(unit: Unit) -> bool:
    return bool(_tied_name(unit))


def _tied_name(unit: Unit) -> str:
    """The first name of a weight that other pipeline stages have too; empty: there is none."""
    return min((group.buffer.layout.specs[0].name for group in unit.trained if group.axes.across), default="")
