"""``shoal train`` as data: the options, and the model, the config and the learning rates that follow."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.config.batch import MICRO, STEPS, TRAIN
from shoal.errors import UsageError
from shoal.text import counted, format_duration

if TYPE_CHECKING:
    from shoal.data.sources.opening import SourceSpec
    from shoal.data.sources.token_file import TokenFile
    from shoal.models import GPTConfig

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"  # in the folder of checkpoints
JOB_FILE = "job.json"
_DEFAULT_SHAPE = "tiny"
_DEFAULT_STAGE = 3
_DEFAULT_MICRO_BATCH = 8
_DEFAULT_TOP_K = 2
_DEFAULT_CLIP = 1.0
_DEFAULT_MINUTES = 3.0
_WARMUP = 0.03  # of the run
_LOWEST = 0.1  # of the peak learning rate, at the end

VERBOSE = typer.Option("--verbose", "-v", help="Also print the placement and memory tables (SHOAL_LOG_LEVEL=debug).")
PrecisionOption = StrEnum("PrecisionOption", "fp32 bf16 fp16")
ScheduleOption = StrEnum("ScheduleOption", "cosine linear constant")


def option(help: str, names: tuple[str, ...] = (), **limits: Any) -> Any:
    """A field (RUF009 does not see that it is one) that is an option of the command; None where it is not given."""
    return field(default=None, metadata={"option": typer.Option(*names, help=help, **limits)})


@dataclass(frozen=True)
class TrainJob:
    """The options of ``shoal train``; None where the user gives none."""

    model: str | None = option("A shape by name: nano, tiny, mini, small-34m, 124m ... 175b.")
    parameters: str | None = option("A shape by its number of parameters, such as 10M.")
    layers: int | None = option("Number of blocks.", min=1)
    hidden: int | None = option("Width of the model.", min=1)
    heads: int | None = option("Attention heads per block.", min=1)
    vocab: int | None = option("Vocabulary size, at least the tokenizer's. Default: the tokenizer's.", min=1)
    sequence: int | None = option("Tokens per sequence.", min=1)
    experts: int | None = option("Experts (feed-forward networks) in each block. Default: none.", min=1)
    top_k: int | None = option("Experts that each token uses. Default: 2.", min=1)
    text: tuple[str, ...] | None = option(
        "Text (file, folder, pattern), .jsonl, .parquet, .tar, hf:NAME, tokens of shoal data build, or a blend (.yaml)"
        " to train on, also as PATH@WEIGHT; may be given several times. Default: Python's docs."
    )
    tokenizer: str | None = option(
        "A tokenizer.json, a folder that Transformers reads, or hf:NAME. Default: text is read as bytes.",
        metavar="PATH",
    )
    reset_attention_mask: bool | None = option(
        "Attend within each document, with positions from 0 and no target of the next one; or across documents."
        " Default: within, where --text names documents. Plain text is one run of tokens.",
        names=("--reset-attention-mask/--no-reset-attention-mask",),
    )
    ranks: int | None = option("Local ranks. Default: one per visible GPU, else 1.", names=("--ranks", "-n"), min=1)
    stage: int | None = option("ZeRO stage. Default: 3.", min=0, max=3)
    pp: int | None = option("Pipeline-parallel ranks: each holds different layers. Default: 1.", min=1)
    pipeline_schedule: str | None = option("gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv, ..., or a file. Default: 1f1b.")
    virtual_stages: int | None = option("Pipeline stages of one rank. Default: 1.", min=1)
    tp: int | None = option("Tensor-parallel ranks: each holds a part of each layer. Default: 1.", min=1)
    sp: int | None = option("Sequence-parallel ranks (Ulysses). Default: 1.", min=1)
    cp: int | None = option("Context-parallel ranks (ring attention). Default: 1.", min=1)
    ep: int | None = option("Expert-parallel ranks: each holds different experts. Default: 1.", min=1)
    precision: PrecisionOption | None = option("Default: bf16 on a GPU, fp32 on CPU.")  # noqa: RUF009
    micro_batch: int | None = option("Sequences per rank and forward pass. Default: 8.", min=1)
    accumulation: int | None = option("Forward passes per step. Default: 1.", min=1)
    steps: int | None = option("Stop after this many steps.", min=1)
    minutes: float | None = option("Stop after this many minutes. Default: 3, without --steps.", min=0.01)
    learning_rate: float | None = option("Peak learning rate. Default: by the model's size.", min=0)
    schedule: ScheduleOption | None = option("Learning-rate schedule after a warm-up. Default: cosine.")  # noqa: RUF009
    clip: float | None = option("Largest gradient norm; 0: no clipping. Default: 1.0.", min=0)
    config: str | None = option("A DeepSpeed-style JSON file; options given here override it.", metavar="PATH")
    out: str | None = option("Folder of the run. Default: runs/DATE-TIME.", metavar="PATH")
    seed: int | None = option("Seed of the weights, the order of data, and sampling. Default: 0.", min=0)
    validate_every: int | None = option("Steps between validations.", min=1)
    prompt: str | None = option("Prompt of the sample that is generated at the end.")
    sample_tokens: int | None = option("Number of tokens to generate at the end; 0: none. Default: 400.", min=0)
    temperature: float | None = option("Sampling temperature. Default: 0.8.", min=0)
    save_every: int | None = option("Steps between checkpoints; 0: no checkpoints. Default: one at the end.", min=0)
    resume: str | None = option("Resume the run in this folder with its options; those given here replace them.")
    verbose: bool = field(default=False, metadata={"option": VERBOSE})
    command: str = ""  # the command line, for the report

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)  # other ranks may be reading the file

    @classmethod
    def load(cls, path: Path) -> TrainJob:
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "text": tuple(values["text"] or ()) or None})

    @property
    def seconds(self) -> float | None:
        """The limit on training time; None where only steps count."""
        if self.minutes is not None:
            return self.minutes * 60
        return _DEFAULT_MINUTES * 60 if self.steps is None else None

    def shape(self, vocab_size: int) -> GPTConfig:
        """The model for a tokenizer of ``vocab_size`` tokens.

        Raises: UsageError: two ways to choose a shape at once, a vocabulary smaller than the tokenizer's, or options of
            experts that do not fit each other.
            ModelError: a shape that does not exist.
        """
        from shoal.models import named_config, nearest_config, parse_count

        if self.model is not None and self.parameters is not None:
            raise UsageError(
                f"--model {self.model} and --parameters {self.parameters} both choose the shape.",
                do="give one of them.",
            )
        if self.vocab is not None and self.vocab < vocab_size:
            raise UsageError(f"--vocab {self.vocab} is smaller than the tokenizer's {vocab_size}.", do="leave it out.")
        vocab = vocab_size if self.vocab is None else self.vocab
        if self.parameters is not None:
            length = 256 if self.sequence is None else self.sequence
            shape = nearest_config(parse_count(self.parameters), vocab_size=vocab, sequence_length=length)
        else:
            shape = named_config(self.model or _DEFAULT_SHAPE, vocab_size=vocab, sequence_length=self.sequence)
        hidden = shape.hidden_size if self.hidden is None else self.hidden
        heads = self.heads
        if heads is None:
            heads = shape.num_heads if self.hidden is None else _heads_for(hidden)
        layers = shape.num_layers if self.layers is None else self.layers
        shape = dataclasses.replace(shape, num_layers=layers, hidden_size=hidden, num_heads=heads)
        return self._with_experts(shape)

    def open_sources(self, shape: GPTConfig) -> tuple[list[TokenFile], list[SourceSpec]]:
        """The sources that ``--text`` names; none where all of it is plain text, which needs no file of tokens.

        Raises: UsageError: all problems of all sources.
        """
        from shoal.data.sources.opening import is_plain_text, open_sources

        names = self.text or ()
        if all(map(is_plain_text, names)):
            return [], []
        tokenizer, least = self.tokenizer or "bytes", 2 * (shape.sequence_length + 1)  # to train and to validate
        return open_sources(names, vocab_size=shape.vocab_size, min_tokens=least, tokenizer=tokenizer)

    def _with_experts(self, shape: GPTConfig) -> GPTConfig:
        if self.experts is None:
            for option, value in (("--top-k", self.top_k), ("--ep", self.ep)):
                if value is not None and (value, option) != (1, "--ep"):
                    raise UsageError(f"{option} {value} is for experts, but the model has none.", do="give --experts.")
            return shape
        if self.ep is not None and self.experts % self.ep:
            raise UsageError(
                f"--ep {self.ep} does not divide --experts {self.experts}.",
                do="give each rank the same number of experts.",
            )
        per_token = min(_DEFAULT_TOP_K, self.experts) if self.top_k is None else self.top_k
        return dataclasses.replace(shape, num_experts=self.experts, experts_per_token=per_token)


def default_ranks() -> int:
    """One rank per visible GPU, or a single one without."""
    import torch

    return max(1, torch.accelerator.device_count() if torch.accelerator.is_available() else 1)


def checkpoint_folder(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / CHECKPOINTS


def run_folder(path: str) -> Path:
    """The run that ``--resume`` names, by its folder or by its folder of checkpoints."""
    folder = Path(path)
    return folder.parent if folder.name == CHECKPOINTS else folder


def effective_config(
    job: TrainJob, file: Mapping[str, Any], num_parameters: int, *, has_accelerator: bool
) -> tuple[dict[str, Any], list[str]]:
    """The config of the engine: defaults, overridden by the file, overridden by the command line.

    Args:
        file: the JSON of ``--config``, or nothing. "auto" in it stands for the default, as for other trainers.

    Returns: the config, and a sentence for every key of the file that the command line has overridden.
    """
    config = _without_auto(file)
    notes: list[str] = []

    def override(flag: str, value: object, *path: str) -> None:
        """Set a key to the option's value, and note it if the file has another value."""
        section = config
        for key in path[:-1]:
            section = section.setdefault(key, {})
        old = section.get(path[-1], value)
        if old != value:
            notes.append(f"{flag} {value} overrides {'.'.join(path)} = {json.dumps(old)} of {job.config}.")
        section[path[-1]] = value

    if job.stage is not None:
        override("--stage", job.stage, "zero_optimization", "stage")
    # A file without the stage means 0, as everywhere else; without a file the default is stage 3.
    zero = config.setdefault("zero_optimization", {})
    zero.setdefault("stage", _DEFAULT_STAGE if job.config is None else 0)
    if job.config is None and zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0  # small models are sharded too: here that is what is to be seen
    for axis in ("pp", "tp", "sp", "cp", "ep"):
        degree = getattr(job, axis)
        if degree is not None:
            override(f"--{axis}", degree, "parallel", axis)
    if job.pipeline_schedule is not None:
        override("--pipeline-schedule", job.pipeline_schedule, "pipeline", "schedule")
    if job.virtual_stages is not None:
        override("--virtual-stages", job.virtual_stages, "pipeline", "virtual_stages")
    if any(config.get("parallel", {}).get(axis, 1) != 1 for axis in ("sp", "cp")):
        config.setdefault("loss_reduction", "token")  # a sequence that does not divide makes unequal parts
    _fill_batch(job, config, notes, override)
    _fill_precision(job, config, notes, has_accelerator)
    if job.clip is not None:
        override("--clip", job.clip, "gradient_clipping")
    config.setdefault("gradient_clipping", _DEFAULT_CLIP)
    optimizer = config.setdefault("optimizer", {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1}})
    if job.learning_rate is not None:
        override("--learning-rate", job.learning_rate, "optimizer", "params", "lr")
    optimizer.setdefault("params", {}).setdefault("lr", usual_learning_rate(num_parameters))
    if job.schedule is not None and "scheduler" in config:
        notes.append(f"--schedule {job.schedule} overrides the scheduler of {job.config}.")
        del config["scheduler"]
    if job.verbose:
        config["log_level"] = "debug"
    return config, notes


@dataclass
class Budget:
    """The progress of a run, by steps or by time, whichever is nearer to the end. The same on every rank.

    ``elapsed`` is rank 0's clock, sent to all ranks after each step that is logged.
    """

    steps: int | None
    seconds: float | None
    schedule: str
    elapsed: float = 0.0

    def fraction(self, step: int) -> float:
        by_steps = step / self.steps if self.steps is not None else 0.0
        by_time = self.elapsed / self.seconds if self.seconds is not None else 0.0
        return min(1.0, max(by_steps, by_time))

    def length(self) -> str:
        """Steps, time, or both."""
        limits = [f"{self.steps:,} steps"] if self.steps is not None else []
        limits += [format_duration(self.seconds)] if self.seconds is not None else []
        return " or ".join(limits)

    def multiplier(self, step: int) -> float:
        """Of the learning rate: a short warm-up, then as ``schedule`` says down to a tenth."""
        at = self.fraction(step)
        if at < _WARMUP:
            return max(0.02, at / _WARMUP)
        left = (1 - at) / (1 - _WARMUP)
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "linear":
            return _LOWEST + (1 - _LOWEST) * left
        return _LOWEST + (1 - _LOWEST) * 0.5 * (1 - math.cos(math.pi * left))

    def rates(self, peak: float) -> str:
        """The rates in words: the peak, and how it is reached and left."""
        end = "" if self.schedule == "constant" else f" to {peak * _LOWEST:.2g}"
        return f"{peak}, {self.schedule}{end} after a warm-up over {_WARMUP:.0%} of the run"


def usual_learning_rate(num_parameters: int) -> float:
    """A peak learning rate for Adam that suits the model's size.

    Source: Kaplan et al. 2020 (arXiv:2001.08361), equation D.1, at least 6e-5.
    """
    return float(f"{max(6e-5, 0.003239 - 0.0001395 * math.log(num_parameters)):.2g}")


def read_config(job: TrainJob) -> dict[str, Any]:
    """The JSON object of ``--config``; empty without one. Raises: UsageError: no such file, or no JSON object in it."""
    if job.config is None:
        return {}
    path = Path(job.config)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {str(path)!r} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"--config {str(path)!r} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise UsageError(f"--config {str(path)!r} holds no JSON object, but a {type(values).__name__}.")
    return values


def _fill_batch(job: TrainJob, config: dict[str, Any], notes: list[str], override: Any) -> None:
    has_flag = job.micro_batch is not None or job.accumulation is not None
    if has_flag and TRAIN in config:
        notes.append(f"--micro-batch and --accumulation override {TRAIN} of {job.config}.")
        del config[TRAIN]
    if job.micro_batch is not None:
        override("--micro-batch", job.micro_batch, MICRO)
    if job.accumulation is not None:
        override("--accumulation", job.accumulation, STEPS)
    if TRAIN not in config:
        num_stages = config.get("parallel", {}).get("pp") or config.get("pipeline", {}).get("stages") or 1
        if num_stages > 1:  # fewer micro-batches leave ranks idle
            config.setdefault(MICRO, max(1, _DEFAULT_MICRO_BATCH // (2 * num_stages)))
            config.setdefault(STEPS, 2 * num_stages)
        config.setdefault(MICRO, _DEFAULT_MICRO_BATCH)


def _fill_precision(job: TrainJob, config: dict[str, Any], notes: list[str], has_accelerator: bool) -> None:
    named = [key for key in ("bf16", "fp16") if config.get(key, {}).get("enabled")]
    if job.precision is not None:
        if named and job.precision not in named:
            notes.append(f"--precision {job.precision} overrides {named[0]}.enabled = true of {job.config}.")
        for key in ("bf16", "fp16"):
            if key in config or key == job.precision:
                config.setdefault(key, {})["enabled"] = key == job.precision
    elif not named and "bf16" not in config and "fp16" not in config and has_accelerator:
        config["bf16"] = {"enabled": True}


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the keys whose value is "auto"."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value != "auto"
    }


def _heads_for(hidden: int) -> int:
    """As the named shapes have it: heads of 64 elements, or smaller ones where that does not divide."""
    sizes = (size for size in (64, 32, 16, 8, 4, 2) if hidden % size == 0)
    return hidden // next(sizes, 1)


def describe_shape(shape: GPTConfig) -> str:
    """The shape's name, or its layers and width; and its experts."""
    from shoal.models import NAMED_SHAPES

    same = (
        name
        for name, other in NAMED_SHAPES.items()
        if (other.num_layers, other.hidden_size, other.num_heads)
        == (shape.num_layers, shape.hidden_size, shape.num_heads)
    )
    name = next(same, f"{counted(shape.num_layers, 'layer')} of {shape.hidden_size}")
    return (
        f"{name} with {shape.num_experts} experts, {shape.experts_per_token} per token" if shape.num_experts else name
    )
