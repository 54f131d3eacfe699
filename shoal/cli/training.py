"""One rank of ``shoal train``: through Shoal's public API, as a user's own script would.

Started once per rank, ``python -m shoal.cli.training JOB.json``, or called in this process for a single rank.
"""

from __future__ import annotations

import math
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch

import shoal
from shoal.cli.job import (
    JOB_FILE,
    TOKENIZER,
    Budget,
    TrainJob,
    checkpoint_folder,
    describe_shape,
    effective_config,
    read_config,
    run_folder,
)
from shoal.cli.progress import Reading, TrainingProgress
from shoal.cli.usage import exit_code_of
from shoal.comm.world import World, current_world
from shoal.data import (
    RepeatingLoader,
    Tokenizer,
    default_texts,
    load_tokenizer,
    read_texts,
    split,
    tokenize,
)
from shoal.data.stream import PackedBatch
from shoal.device import Device
from shoal.engine.engine import Engine
from shoal.engine.parts.save_on_signal import StopSignal
from shoal.engine.pipeline import PipelineEngine
from shoal.errors import NonFiniteError, ShoalError, UsageError
from shoal.models import GPT, GPTConfig
from shoal.observe.expert_load import load_events
from shoal.observe.goodput import GOODPUT_FILE
from shoal.observe.monitor import CsvWriter, JsonLinesWriter, Monitor, TensorBoardWriter
from shoal.observe.placement_table import HEADERS, Table
from shoal.observe.report import METRICS_FILE, RunRecord, write_report
from shoal.parallel.expert.stacked import ExpertFeedForward
from shoal.parallel.loss import count_tokens
from shoal.pipeline.simulate import simulate
from shoal.pipeline.timeline import svg
from shoal.processor import num_cores
from shoal.text import format_bytes, format_count, format_duration

_VALIDATION_FRACTION = 0.05
_VALIDATION_SEQUENCES = 64
_VALIDATIONS = 10  # about so many, spread over the run
_PROMPT_TOKENS = 48  # of the validation text, where the user gives text and no prompt
_DEFAULT_PROMPT = "The function returns"
_SAMPLE_TOP_K = 40
_DEFAULT_SAMPLE_TOKENS = 400
_DEFAULT_TEMPERATURE = 0.8


def train(job: TrainJob) -> None:
    """Train, validate, sample, report."""
    world = current_world()
    with ExitStack() as stack:
        _Run(job, world, stack).run()


class _Run:
    """The state of one run."""

    def __init__(self, job: TrainJob, world: World, stack: ExitStack) -> None:
        self.job = job
        self.world = world
        self.started = datetime.now(UTC)
        self.folder = Path(str(job.out))
        self.is_writer = world.rank == 0
        self.seed = job.seed or 0
        self.sample_tokens = _DEFAULT_SAMPLE_TOKENS if job.sample_tokens is None else job.sample_tokens
        self.tokenizer: Tokenizer = load_tokenizer(job.tokenizer)
        self.shape = job.shape(self.tokenizer.vocab_size)
        self.progress = TrainingProgress(enabled=self.is_writer)
        self.progress.say(f"reading {'Python documentation' if not job.text else ', '.join(job.text)} ...")
        sources, specs = job.open_sources(self.shape)
        self.masks = bool(sources) if job.reset_attention_mask is None else job.reset_attention_mask
        if self.masks and not sources:
            raise UsageError(
                "plain text is one run of tokens, without documents.",
                where="--reset-attention-mask",
                do="make documents of it: shoal data build, or .jsonl.",
            )
        if job.text:
            self.progress.say(f"attention: {'within each document' if self.masks else 'across documents'}")
        self.training, self.validation = split(
            sources or tokenize(read_texts(job.text) if job.text else default_texts(), self.tokenizer),
            _VALIDATION_FRACTION,
            self.shape.sequence_length,
            seed=self.seed,
            weights=[spec.weight for spec in specs if spec.weight is not None] or None,
            epochs=[spec.epochs for spec in specs] or None,
            with_documents=self.masks,
        )
        self.config, self.messages = effective_config(
            job, read_config(job), self.shape.num_active_parameters(), has_accelerator=world.device.type != "cpu"
        )
        for message in self.messages:
            self.progress.say(message)
        if self.masks:
            self.config.setdefault("loss_reduction", "token")  # micro-batches have unequal numbers of targets
        self.budget = Budget(job.steps, job.seconds, job.schedule or "cosine")
        self.engine, self.batches = self._make_engine()
        stack.callback(self.engine.destroy)
        num_samples = (job.steps or 0) * self.engine.train_batch_size()
        if any(spec.epochs for spec in specs) and num_samples > len(self.training):
            raise UsageError(
                f"{job.steps:,} steps read {num_samples:,} sequences; the epochs of the sources allow"
                f" {len(self.training):,}.",
                do="allow more epochs, or take fewer steps.",
            )
        self.counts_tokens = self.config.get("loss_reduction") == "token"
        self.context = self.engine.sequence_context
        if self.context is not None:
            if self.counts_tokens:  # then ranks may have unequal parts
                self.context = self.context.of_length(self.shape.sequence_length)
            stack.enter_context(shoal.sequence_parallel(self.context))
        self.device = Device(self.engine.device)
        self.comm = self.engine.axes.world
        self.monitor = stack.enter_context(self._open_monitor())
        self.ledger = self.engine.memory_report()
        self.first_validation = self.last_validation = math.nan
        self.validated_step, self.validated_fraction = 0, 0.0
        self.seconds = 0.0
        self.tokens = 0  # of all ranks, up to the last step that was logged
        self.num_tokens = 0  # of this rank, since then
        self.saved_step = -1
        if job.resume is not None:
            self._resume(run_folder(job.resume))

    def run(self) -> None:
        job = self.job
        title = _title(self.shape, self.config, self.world.size)
        tokens = format_count(len(self.training) * self.shape.sequence_length)
        self.progress.say(f"training {title}: {tokens} tokens of text, logs in {self.folder}")
        if self.job.resume is None:
            self.first_validation = self._validate(0)
        self._save()  # a run that dies can be reported too
        stop = StopSignal((signal.SIGINT, signal.SIGTERM))
        try:
            with self.progress:
                number = self._train(stop)
        finally:
            stop.restore()
        if number:
            self._stop(number)
        self.last_validation = self._validate(self.engine.global_steps)
        if job.save_every != 0:
            self._save_checkpoint()
        if self.engine.skipped_steps:
            self.messages.append(f"{self.engine.skipped_steps} steps were skipped: their gradients were not finite.")
        is_whole = not isinstance(self.engine, PipelineEngine)
        if self.sample_tokens and not is_whole:
            self.messages.append("No sample: with pipeline stages no rank has the whole model.")
        prompt, sample = self._sample() if self.sample_tokens and is_whole else ("", "")
        self.ledger = self.engine.memory_report()
        self.monitor.close()
        if self.is_writer:
            self._save(prompt, sample)
            self._conclude(prompt, sample, write_report(self.folder))

    def _make_engine(self) -> tuple[Engine, Iterator[Any]]:
        torch.manual_seed(self.seed)
        parallel, pipeline = self.config.get("parallel", {}), self.config.get("pipeline", {})
        if max(*(parallel.get(axis, 1) for axis in ("tp", "pp", "ep")), pipeline.get("stages", 1)) > 1:
            with torch.device("meta"):  # each rank makes its layers, or its part of each, only
                model = GPT(self.shape, experts=ExpertFeedForward)
        else:
            is_sharded = self.config["zero_optimization"]["stage"] == 3
            with shoal.zero.Init(config_dict_or_path=self.config, enabled=is_sharded):
                model = GPT(self.shape, experts=ExpertFeedForward)
        model.attend_by(shoal.attention)
        model.pipeline_sample = cast(Any, self.training.batch([0]))  # what "partition": "time" runs blocks on
        own_schedule = None
        if "scheduler" not in self.config:

            def own_schedule(optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.LambdaLR(optimizer, self.budget.multiplier)

        config = {"goodput": {"file": str(self.folder / GOODPUT_FILE)}} | self.config
        engine, _, loader, _ = shoal.initialize(
            model=model, config=config, training_data=self.training, lr_scheduler=own_schedule
        )
        return engine, RepeatingLoader(loader)

    def _open_monitor(self) -> Monitor:
        if not self.is_writer:
            return Monitor()
        self.folder.mkdir(parents=True, exist_ok=True)
        replace(self.job, ranks=self.world.size).save(self.folder / JOB_FILE)
        return Monitor(
            [
                JsonLinesWriter(self.folder / METRICS_FILE),
                CsvWriter(self.folder / "csv"),
                TensorBoardWriter(self.folder / "tensorboard"),
            ]
        )

    def _stop(self, number: int) -> None:
        """Save the step that a signal has ended the training at, write the report, and end the process."""
        if self.job.save_every != 0:
            self._save_checkpoint()
        self.messages.append(f"Stopped by {signal.Signals(number).name} after {self.engine.global_steps} steps.")
        if self.is_writer:
            self._save()
            write_report(self.folder)
        how = f" Continue with: shoal train --resume {self.folder}" if self.job.save_every != 0 else ""
        self.progress.say(f"{self.messages[-1]}{how}")
        sys.exit(128 + number)

    def _train(self, stop: StopSignal) -> int:
        """Steps until the budget is used up, or some rank gets a signal. Every rank takes the same number of steps:
        rank 0's clock decides. Returns: the signal; 0: there was none.
        """
        log_every = 1 if self.engine.device.type == "cpu" else 10
        last = time.perf_counter()
        began = last - self.budget.elapsed
        losses = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        num_steps = 0
        step = self.engine.global_steps
        number = 0
        while not number and self.budget.fraction(step) < 1.0:
            losses += self._step()
            step = self.engine.global_steps  # a loss spike may take it back
            num_steps += 1
            if self.job.save_every and step % self.job.save_every == 0:
                self._save_checkpoint()
            if step % log_every and step != self.budget.steps:
                continue
            now = time.perf_counter()
            loss, self.budget.elapsed, num_tokens, number = self._agree(
                losses / num_steps, now - began, self.num_tokens, stop.number
            )
            if not math.isfinite(loss) and not self.engine.skipped_steps:
                raise NonFiniteError(
                    f"the loss of step {step} is {loss}.",
                    where="shoal train",
                    do="lower --learning-rate, or set --clip.",
                )
            reading = self._read(step, loss, num_tokens / (now - last))
            self.tokens += num_tokens
            self.monitor.write_events([*reading.events(), *load_events(self.engine.expert_load(), step)])
            self.progress.show(reading, self.budget.fraction(step))
            losses.zero_()
            num_steps, self.num_tokens, last = 0, 0, now
            if not number and self._is_validation_due(step):
                self._validate(step)
                last = time.perf_counter()
                began += last - now  # validation is not training time
        self.seconds = self.budget.elapsed
        return number

    def _save_checkpoint(self) -> None:
        """A checkpoint of this step, once."""
        if self.saved_step == self.engine.global_steps:
            return
        self.saved_step = self.engine.global_steps
        state = {
            "elapsed": self.budget.elapsed,
            "first_validation": self.first_validation,
            "tokens": self.tokens,
            "tokenizer": self.tokenizer.fingerprint,
        }
        tokenizer = checkpoint_folder(self.folder) / TOKENIZER
        if self.is_writer and not tokenizer.exists():
            self.tokenizer.save(tokenizer)
        self.engine.save_checkpoint(checkpoint_folder(self.folder), client_state=state)
        self.progress.say(f"saved {checkpoint_folder(self.folder)}/global_step{self.saved_step}")

    def _resume(self, run: Path) -> None:
        groups = self.engine.optimizer.param_groups
        given = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        path, state = self.engine.load_checkpoint(checkpoint_folder(run))
        if state.get("tokenizer", self.tokenizer.fingerprint) != self.tokenizer.fingerprint:
            raise UsageError(
                f"the checkpoint {path} is of another tokenizer than {self.tokenizer.name}.",
                where="shoal train --resume",
                do=f"pass the saved one, --tokenizer {checkpoint_folder(run) / TOKENIZER}, or bytes if there is none.",
            )
        self.budget.elapsed = float(state.get("elapsed", 0.0))
        self.first_validation = float(state.get("first_validation", math.nan))
        self.tokens = int(state.get("tokens", 0))
        self.saved_step = self.engine.global_steps
        for group, values in zip(groups, given, strict=True):
            group.update(values)
        self._set_rates()
        self.progress.say(f"resuming from {path}, step {self.engine.global_steps}; learning rate {self._schedule()}")

    def _set_rates(self) -> None:
        """To those of this run's options at its step: a checkpoint has set the rates that it was saved with."""
        schedule, groups = self.engine.lr_scheduler, self.engine.optimizer.param_groups
        if isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            schedule.base_lrs = [group["initial_lr"] for group in groups]
            for group in groups:
                group["lr"] = group["initial_lr"] * self.budget.multiplier(schedule.last_epoch)
        elif schedule is not None:
            schedule.load_state_dict(schedule.state_dict())

    def _is_validation_due(self, step: int) -> bool:
        """By steps if the user has said so, else by tenths of the run; its end is validated in any case."""
        fraction = self.budget.fraction(step)
        if fraction >= 1.0:
            return False
        if self.job.validate_every is not None:
            return step - self.validated_step >= self.job.validate_every
        return math.floor(fraction * _VALIDATIONS) > math.floor(self.validated_fraction * _VALIDATIONS)

    def _step(self) -> torch.Tensor:
        """One optimizer step; the mean loss of its targets on all ranks, [], on the device."""
        if isinstance(self.engine, PipelineEngine):
            return self.engine.train_batch(self._inputs(self._next_batch()) for _ in count()).double()
        self.engine.train()
        for _ in range(self.engine.gradient_accumulation_steps()):
            loss, num_targets, _ = self._loss(self._next_batch())
            self.engine.backward(loss, num_tokens=num_targets if self.counts_tokens else None)
            self.engine.step()
        loss_of_step = cast(float, self.engine.accumulation.step_loss)
        return torch.full((), loss_of_step, dtype=torch.float64, device=self.engine.device)

    def _next_batch(self) -> tuple[Any, ...]:
        """The next micro-batch: whole sequences, [B, L]."""
        batch: tuple[Any, ...] = next(self.batches)
        self.num_tokens += batch[0].numel()
        return batch

    def _loss(self, batch: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
        """The mean loss, [], of this rank's targets; their number; and it over the mean of all ranks' numbers.

        Of a pipeline, which only validates here, the mean loss of all ranks.
        """
        inputs = self._inputs(batch)
        num_targets = count_tokens(inputs[1])
        if isinstance(self.engine, PipelineEngine):
            return self.engine.eval_batch(iter([inputs]), num_micro_batches=1), num_targets, 1.0
        whole = count_tokens(batch[1]).to(self.engine.device, non_blocking=True)
        share = 1.0 if self.context is None else num_targets * self.context.size / whole.clamp(min=1)
        return self.engine(*inputs), num_targets, share

    def _inputs(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """The model's arguments: this rank's positions of a batch. What a pipeline stage has not read stays on meta."""
        device, context = self.engine.device, self.context
        parts: list[Any] = [
            part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) and not part.is_meta else part
            for part in batch
        ]
        if isinstance(batch, PackedBatch):
            return PackedBatch(*parts).shard(context)
        tokens, targets = parts
        if context is None:
            return tokens, targets
        return context.shard(tokens), context.shard(targets), context.positions(tokens.shape[1], device)

    def _agree(
        self, loss: torch.Tensor, elapsed: float, num_tokens: int = 0, signal_number: int = 0
    ) -> tuple[float, float, int, int]:
        """The mean loss, rank 0's clock in seconds, the tokens of all data-parallel ranks, the signal that one has got.

        Communicates: one exchange of four numbers.
        """
        mine = torch.stack([loss, *(torch.full_like(loss, value) for value in (elapsed, num_tokens, signal_number))])
        of_all = self.comm.exchange(mine, label="log").wait().tolist()
        num_copies = len(of_all) // self.engine.axes.batch.size  # ranks with the same samples
        return (
            sum(row[0] for row in of_all) / len(of_all),
            of_all[0][1],
            int(sum(row[2] for row in of_all)) // num_copies,
            int(max(row[3] for row in of_all)),
        )

    def _read(self, step: int, loss: float, tokens_per_second: float) -> Reading:
        memory = self.device.memory()
        norm = self.engine.get_global_grad_norm()
        return Reading(
            step=step,
            loss=loss,
            validation_loss=self.last_validation,
            tokens_per_second=tokens_per_second,
            gradient_norm=math.nan if norm is None else float(norm),
            learning_rate=float(self.engine.get_lr()[0]),
            allocated_bytes=memory.allocated,
            peak_bytes=memory.peak,
            elapsed=self.budget.elapsed,
        )

    def _validate(self, step: int) -> float:
        """The mean loss over the same validation sequences whatever the number of ranks, up to a remainder."""
        self.engine.eval()
        indices, batch = self._validation_indices(), self.engine.train_micro_batch_size_per_gpu()
        total = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        num_targets = torch.zeros_like(total)
        with torch.no_grad():
            for start in range(0, len(indices), batch):
                together = self.validation.batch(indices[start : start + batch])
                loss, _, share = self._loss(together)
                count = count_tokens(together[1]).to(total)
                total += loss.double() * count * share
                num_targets += count
        self.engine.train()
        self.validated_step, self.validated_fraction = step, self.budget.fraction(step)
        of_ranks = self.comm.exchange(torch.stack([total, num_targets]), label="log").wait().tolist()
        losses, counts = (sum(column) / len(column) for column in zip(*of_ranks, strict=True))
        self.last_validation = losses / counts
        self.monitor.write_events([("validation/loss", self.last_validation, step)])
        self.progress.show_validation(step, self.last_validation)
        return self.last_validation

    def _validation_indices(self) -> list[int]:
        """This rank's part; parts are of equal size, so that all ranks take part in every forward pass."""
        rank, size = self.engine.axes.batch.rank, self.engine.axes.batch.size
        count = min(len(self.validation), _VALIDATION_SEQUENCES)
        spread = [index * len(self.validation) // count for index in range(count)]
        per_rank = count // size
        return spread[rank * per_rank : (rank + 1) * per_rank] if per_rank else spread

    def _sample(self) -> tuple[str, str]:
        """A prompt and how the model goes on. All ranks take part and write the same."""
        prompt = self.job.prompt or ("" if self.job.text else _DEFAULT_PROMPT)
        if prompt:
            given = torch.tensor(list(self.tokenizer.encode(prompt)), dtype=torch.int64)
        else:
            given = self.validation.batch([0])[0][0, :_PROMPT_TOKENS]
        self.progress.say(f"generating a sample of {self.sample_tokens} tokens ...")
        generator = torch.Generator(self.engine.device).manual_seed(self.seed)
        model = cast(GPT, self.engine.module)
        temperature = _DEFAULT_TEMPERATURE if self.job.temperature is None else self.job.temperature
        tokens = given.to(self.engine.device)[None]
        with shoal.sequence_parallel(None):  # every rank has the whole text
            for _ in self.progress.track(self.sample_tokens, "sample"):
                tokens = model.generate(tokens, 1, temperature=temperature, top_k=_SAMPLE_TOP_K, generator=generator)
        written = tokens[0].tolist()
        written = [min(token, self.tokenizer.vocab_size - 1) for token in written]  # --vocab may be larger
        return self.tokenizer.decode(written[: len(given)]), self.tokenizer.decode(written[len(given) :])

    def _save(self, prompt: str = "", sample: str = "") -> None:
        if self.is_writer:
            self._record(prompt, sample).save(self.folder)

    def _record(self, prompt: str, sample: str) -> RunRecord:
        reading = self.ledger.reading
        return RunRecord(
            title=_title(self.shape, self.config, self.world.size),
            facts=self._facts(),
            run={
                "started": f"{self.started:%Y-%m-%d %H:%M:%S} UTC",
                "command": self.job.command,
                "length": self.budget.length(),
                "learning rate": self._schedule(),
                "text": ", ".join(self.job.text or ()) or "Python's documentation",
                "seed": self.seed,
            },
            model={
                **asdict(self.shape),
                "parameters": self.shape.num_parameters(),
                "active_parameters": self.shape.num_active_parameters(),
            },
            config=self.config,
            environment={
                "device": str(self.engine.device),
                "device name": self.device.name,
                "device memory": self.device.total_nbytes if self.device.is_cuda else 0,
                "ranks": self.world.size,
                "backend": self.world.backend,
                "threads per rank": torch.get_num_threads(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "shoal": shoal.__version__,
                "system": f"{platform.system()} {platform.machine()}, {num_cores()} cores",
            },
            ledger=self.ledger.rows(),
            allocator=f"{reading.source}: {format_bytes(reading.allocated)} now, {format_bytes(reading.peak)} at most",
            placement=[HEADERS, *Table.of(group.row for group in self.engine.sharded.groups).merged()],
            pipeline=svg(simulate(self.engine.schedule())) if isinstance(self.engine, PipelineEngine) else "",
            prompt=prompt,
            sample=sample,
            messages=self.messages,
        )

    def _schedule(self) -> str:
        """In words."""
        peak = self.config["optimizer"]["params"]["lr"]
        if "scheduler" in self.config:
            return f"{peak}, scheduler {self.config['scheduler'].get('type')}"
        return self.budget.rates(peak)

    def _facts(self) -> list[tuple[str, str]]:
        steps = self.engine.global_steps
        if not steps:
            return [("validation loss", f"{self.first_validation:.3f}")]
        rate = self.tokens / self.seconds if self.seconds else math.nan
        return [
            ("validation loss", f"{self.first_validation:.3f} → {self.last_validation:.3f}"),
            ("tokens seen", format_count(self.tokens)),
            ("tokens a second", format_count(rate)),
            ("steps", f"{steps:,}"),
            ("training time", format_duration(self.seconds)),
            ("in use on rank 0", format_bytes(self.ledger.held)),
        ]

    def _conclude(self, prompt: str, sample: str, report: Path) -> None:
        lines = [f"{label:16} {value}" for label, value in self._facts()]
        say = self.progress.say
        if sample:
            say(f"\nsample\n------\n{prompt}|{sample}")
        say(f"\nmemory on rank 0\n----------------\n{self.ledger}")
        say("\n" + "\n".join(lines))
        say(f"{'report':16} {report}")


def _title(shape: GPTConfig, config: dict[str, Any], num_ranks: int) -> str:
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    stage = config["zero_optimization"]["stage"]
    count = f"{format_count(shape.num_parameters())} parameters"
    if shape.num_experts:
        count += f", {format_count(shape.num_active_parameters())} active"
    names = ("pp", "tp", "sp", "cp", "ep")
    axes = "".join(f", {axis} {degree}" for axis, degree in config.get("parallel", {}).items() if axis in names)
    return f"GPT {describe_shape(shape)} ({count}), ZeRO-{stage} on {ranks}{axes}"


def main() -> None:
    """Run one rank of the job in the file that is named on the command line."""
    try:
        train(TrainJob.load(Path(sys.argv[1])))
    except ShoalError as error:
        current_world().report_failure(error)
        traceback.print_exc()  # of which the launcher prints the message
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
