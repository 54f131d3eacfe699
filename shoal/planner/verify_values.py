"""Where a configuration's values part from those of one process with the same model and data.

    values    the configuration on its ranks            \\
    one       one process, the same arithmetic            difference <= 8 * expected rounding, of everything compared
    rounded   one process, other rounding               /

Expected rounding is how far ``rounded`` is from ``one``: of a 16-bit or fp8 configuration its fp32 version, of an fp32
one a run whose first parameters are changed in their last bit. It is measured for each value, so that what amplifies
rounding is not mistaken for an error. Adam amplifies it in few elements, those with a gradient near 0, which may be any
parameter's: of updated parameters, and of all values of the next step, as much is expected as of the parameter that the
step has changed most.

``python -m shoal.planner.verify_values JOB.json`` is one rank of one of the runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.config import load
from shoal.config.ranks import model_degrees
from shoal.engine.entry import initialize
from shoal.errors import UsageError
from shoal.launch.local import LocalJob, run_local
from shoal.planner.model_of import attend_by_ranks, build_model
from shoal.planner.short_training import take_steps
from shoal.planner.value_trace import Value, ValueTrace, read_values
from shoal.text import counted, table

_TIMES_ROUNDING = 8.0
_FLOOR = 1e-7  # of a value's norm: a difference that is never reported
# Sections that say how work is divided, stored and sent. One process has none of them.
_DIVIDED = (
    "parallel",
    "pipeline",
    "tensor_parallel",
    "expert_parallel",
    "sequence_parallel_size",
    "wire",
    "communication_data_type",
    "local_steps",
    "offload",
    "activation_checkpointing",
    "train_batch_size",
    "elasticity",
)
_NARROW = ("bf16", "fp16", "fp8", "torch_autocast", "amp", "precision")


@dataclass(frozen=True)
class Difference:
    """A value that two runs have computed. ``relative``: norm of the difference by that of the value.

    ``rounding``: the same of what is expected.
    """

    value: Value
    relative: float
    rounding: float

    @property
    def times(self) -> float:
        return self.relative / max(self.rounding, _FLOOR)

    @property
    def is_beyond(self) -> bool:
        return not self.times <= _TIMES_ROUNDING  # NaN is

    @property
    def place(self) -> str:
        value = self.value
        micro = "" if value.micro is None else f", micro-batch {value.micro}"
        what = {"forward": "output of", "loss": "", "gradient": "gradient of", "parameter": "updated"}[value.phase]
        return f"step {value.step}{micro}: {what} {value.name}".replace(":  ", ": ")


@dataclass(frozen=True)
class Comparison:
    """Attributes: ``differences``: in the order of one process. ``missing``: parameters that no rank has recorded.

    ``split``: outputs of layers that ranks have only in parts, which are not compared.
    """

    differences: tuple[Difference, ...]
    missing: tuple[str, ...]
    split: tuple[str, ...]

    @property
    def first(self) -> Difference | None:
        """The first that is more than rounding."""
        return next((each for each in self.differences if each.is_beyond), None)

    @property
    def is_equal(self) -> bool:
        return self.first is None and not self.missing

    def report(self) -> str:
        lines = []
        if self.missing:
            lines.append(f"no rank has a gradient or value of: {', '.join(self.missing[:10])}.")
        if self.first is not None:
            lines.append(
                f"The runs part at {self.first.place}, by {self.first.relative:.1e} of its norm,"
                f" {self.first.times:,.0f} times the expected rounding ({self.first.rounding:.1e})."
            )
        rows = []
        for phase in ("forward", "loss", "gradient", "parameter"):
            of_phase = [each for each in self.differences if each.value.phase == phase]
            if of_phase:
                worst = max(of_phase, key=lambda each: (math.isnan(each.times), each.times))
                number = sum(each.is_beyond for each in of_phase)
                shown = [f"{len(of_phase):,}", f"{number:,}", f"{worst.relative:.1e}", f"{worst.times:.1f}"]
                rows.append([phase, *shown, worst.place])
        heads = ["phase", "compared", "beyond rounding", "largest difference", "times rounding", "there"]
        lines.append(table(rows, heads))
        if self.split:
            names = sorted({name.rpartition(".")[2] for name in self.split})
            lines.append(f"Not compared, since ranks have parts of them: outputs of {', '.join(names)}.")
        return "\n".join(lines)


def compare(run: Sequence[Value], one: Sequence[Value], rounded: Sequence[Value]) -> Comparison:
    """Compare the values of all ranks with those of one process."""
    ours: dict[Any, list[Value]] = {}
    for value in run:
        ours.setdefault(value.key, []).append(value)
    other = {value.key: value for value in rounded}
    updated: dict[int, float] = {}  # by step, the most that the update of a parameter differs by rounding
    for value in one:
        if value.phase == "parameter" and value.key in other:
            updated[value.step] = max(updated.get(value.step, 0.0), _relative(other[value.key].sketch, value))
    differences, missing, split = [], [], []
    for value in one:
        same = [each for each in ours.get(value.key, ()) if each.shape == value.shape]
        if same and value.key in other:
            sketches: list[Sequence[float]] = [each.sketch for each in same]
            if value.phase == "loss":  # each rank has the mean of its own positions
                sketches = [[sum(column) / len(same) for column in zip(*sketches, strict=True)]]
            of_update = updated.get(value.step if value.phase == "parameter" else value.step - 1, 0.0)
            rounding = max(_relative(other[value.key].sketch, value), of_update)
            differences.append(Difference(value, max(_relative(each, value) for each in sketches), rounding))
        elif value.phase == "forward":
            split.append(value.name)
        else:
            missing.append(value.name)
    return Comparison(tuple(differences), tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(split)))


def _relative(sketch: Sequence[float], value: Value) -> float:
    return math.dist(sketch, value.sketch) / (math.hypot(*value.sketch) or 1.0)


@dataclass(frozen=True)
class _ValueJob:
    """What one rank does. ``name``: of the run, and of the files of its values."""

    name: str
    folder: str
    model: str
    config: dict[str, Any]
    steps: int
    sequence: int | None
    batch: str | None
    seed: int
    has_parts: bool = False  # ranks of ``sp`` or ``cp`` have parts of rows
    is_last_bit_changed: bool = False


def one_process(config: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """The configuration without everything that divides work, with all micro-batches of a step on one rank."""
    settings = load(dict(config), world_size=num_ranks, warns=False)
    made = {key: value for key, value in config.items() if key not in _DIVIDED}
    made["train_micro_batch_size_per_gpu"] = int(settings.train_micro_batch_size_per_gpu)
    num_batches = num_ranks // math.prod(model_degrees(settings).values())
    made["gradient_accumulation_steps"] = int(settings.gradient_accumulation_steps) * num_batches
    made["zero_optimization"] = {"stage": 0}
    return made


def verify_values(
    model: str,
    config: Mapping[str, Any],
    num_ranks: int,
    *,
    steps: int = 2,
    sequence: int | None = None,
    batch: str | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Train for some steps on ``num_ranks`` local ranks and on one, and compare what they compute. Dropout is off.

    Args:
        model: as of ``build_model``.
        batch: "module:function": gets the rows of a micro-batch, returns the model's arguments, from torch's RNG. None:
            random tokens for a language model.
        say: called with a line before each run.

    Raises: UsageError: a run failed; its error is in the message.
    Memory: on one rank the whole model with its optimizer state.
    """
    given = dict(config)
    given.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-3}})
    given.setdefault("train_micro_batch_size_per_gpu", 1)
    alone = one_process(given, num_ranks)
    is_narrow = any(_is_on(given.get(key)) for key in _NARROW)
    wide = {key: value for key, value in alone.items() if key not in _NARROW} if is_narrow else alone
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        degrees = model_degrees(load(given, world_size=num_ranks, warns=False))
        has_parts = not degrees.keys().isdisjoint(("sp", "cp"))
        job = _ValueJob("run", folder, model, given, steps, sequence, batch, seed, has_parts)
        one = dataclasses.replace(job, name="one", config=alone, has_parts=False)
        rounded = dataclasses.replace(job, name="rounded", config=wide, is_last_bit_changed=not is_narrow)
        for each, ranks in ((job, num_ranks), (one, 1), (rounded, 1)):
            say(f"{each.name}: {counted(steps, 'step')} on {counted(ranks, 'rank')}")
            _run(each, ranks)
        values = {name: _values(Path(folder), name) for name in ("run", "one", "rounded")}
    return compare(values["run"], values["one"], values["rounded"])


def _is_on(section: Any) -> bool:
    return section is not None and not (isinstance(section, dict) and section.get("enabled") is False)


def _values(folder: Path, name: str) -> list[Value]:
    return [value for path in sorted(folder.glob(f"{name}-*.jsonl")) for value in read_values(path)]


def _run(job: _ValueJob, num_ranks: int) -> None:
    path = Path(job.folder) / f"{job.name}.json"
    path.write_text(json.dumps(dataclasses.asdict(job)))
    program = (sys.executable, "-m", "shoal.planner.verify_values", str(path))
    environment = {"SHOAL_LOG_LEVEL": "WARNING"}
    outcome = run_local(LocalJob(program, num_ranks, rank_0_keeps_terminal=True, environment=environment))
    if outcome.exit_code:
        raise UsageError(
            f"the run {job.name!r} failed on {counted(num_ranks, 'rank')}: {outcome.report}",
            do="fix the configuration, or the model, so that it trains.",
            code="verify-run",
        )


def _train(job: _ValueJob) -> None:
    """One rank of one run."""
    torch.manual_seed(job.seed)
    model = build_model(job.model, job.sequence)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    if job.has_parts:
        attend_by_ranks(model)
    if job.is_last_bit_changed:
        _change_last_bit(model)
    trace = ValueTrace()
    engine: Any = initialize(model=model, config=job.config, parts=[trace])[0]
    take_steps(engine, model, job.steps, sequence=job.sequence, batch=job.batch, seed=job.seed)
    trace.write(Path(job.folder) / f"{job.name}-{engine.global_rank:05d}.jsonl")
    engine.destroy()


@torch.no_grad()
def _change_last_bit(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        parameter.mul_(1 + torch.finfo(torch.float32).eps * signs.to(parameter))


if __name__ == "__main__":
    _train(_ValueJob(**json.loads(Path(sys.argv[1]).read_text())))
