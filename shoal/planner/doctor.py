"""``shoal doctor RUN``: what to change in a run of ``shoal train``, each with its figure and its gain.

changes     another value of a key: both configurations are run dry, and the gain is the part of the step that it saves
findings    what the log of ``goodput`` shows: a slow data source, a slow rank, checkpoints too often, restarts
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from torch import nn

from shoal.config import Config, load
from shoal.config.ranks import model_degrees
from shoal.engine.log import quiet
from shoal.errors import ShoalError
from shoal.models import GPT, GPTConfig
from shoal.observe.goodput import GOODPUT_FILE, OwnWork, RankTimesRow, RunTime, read_goodput
from shoal.observe.report import DOCTOR_FILE, RunRecord
from shoal.parallel.expert.stacked import ExpertFeedForward
from shoal.planner.closed_forms import USABLE
from shoal.planner.dry_model import PlannedStep, dry_run_model
from shoal.planner.goodput import GPU_MTBF, checkpoint_interval, waste
from shoal.planner.model_of import attend_by_ranks
from shoal.simulation.machines import GpuNode, machine_of, nearest_machine
from shoal.simulation.times import COPY, UPDATE
from shoal.text import counted, format_bytes, listed

_WORTH = 0.02  # of the time, that a change has to gain
_MOST = 5  # changes
_DATA = 0.005  # of the time, that a script may take between steps
_SLOW = 1.1  # times the other ranks' median, from which on a rank is slow
_OFTEN = 0.7  # of the measured steps, in which it is
_DOUBTED = 2.0  # between a prediction and what was measured, from which on the machine's figures are doubted
_WHOLE = ("forward", "backward", "pipeline", "step", "data")  # phases that are no part of another one
_LOGS = {"comet", "comms_logger", "csv_monitor", "flops_profiler", "goodput", "mlflow", "prometheus"} | {
    "tensorboard",
    "wandb",
}

Keys = Mapping[str, Any]  # by dotted path; None: the key is left out


@dataclass(frozen=True)
class Change:
    """One change of the configuration. ``gain``: the part of the step that it saves. ``why``: figures.

    >>> print(Change(0.09, {"zero_optimization.reduce_bucket_size": (1000, 4000)}, "14 % of the step waits"))
    14 % of the step waits: raise zero_optimization.reduce_bucket_size from 1,000 to 4,000, -9.0 %
    """

    gain: float
    keys: Mapping[str, tuple[Any, Any]]  # old and new value
    why: str

    def __str__(self) -> str:
        parts = [_changed(path, old, new) for path, (old, new) in self.keys.items()]
        return f"{self.why}: {' and '.join(parts)}, -{100 * self.gain:.1f} %"


@dataclass(frozen=True)
class Diagnosis:
    """What was found in a run.

    Attributes: ``seconds``: of a step, measured; ``predicted``: by the dry run; None: unknown. ``nbytes``: predicted,
    of a rank at the peak. ``shares``: of a measured step, by phase. ``changes``: the largest gain first. ``notes``:
    what was not looked at.
    """

    seconds: float | None
    predicted: float | None
    nbytes: int | None
    machine: str
    shares: Mapping[str, float]
    changes: Sequence[Change]
    findings: Sequence[str]
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """For programs, and for the report."""
        return {**asdict(self), "changes": [{**asdict(each), "text": str(each)} for each in self.changes]}

    def __str__(self) -> str:
        lines = []
        if self.seconds is not None:
            shown = "".join(f", {phase} {100 * share:.1f} %" for phase, share in self.shares.items())
            lines.append(f"measured: {1e3 * self.seconds:.1f} ms a step{shown}")
        if self.predicted is not None:
            lines.append(f"predicted: {1e3 * self.predicted:.1f} ms a step, on {self.machine}")
        lines += [*map(str, self.changes), *self.findings]
        if not self.changes and not self.findings:
            lines.append("Nothing is to be changed.")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def diagnose(run: Path, machine: str | Path | GpuNode | None = None) -> Diagnosis:
    """Read a run's folder, run changes of its configuration dry, and write ``doctor.json`` into the folder.

    Args:
        machine: as of ``shoal.dry_run``; None: by the name of the run's GPU.

    Raises: UsageError: the folder is not a run's; an unknown machine.
    """
    record, log = RunRecord.load(run), run / GOODPUT_FILE
    time = read_goodput(log) if log.is_file() else None
    rows = [] if time is None else time.ranks
    shares, notes = _shares(rows), []
    seconds = time.seconds["productive"] / time.num_steps if time is not None and time.num_steps else None
    if not rows:
        notes.append("the log has no times of ranks by phase: their waits are those of the dry run.")
    named = str(record.environment.get("device name", "")), int(record.environment.get("device memory", 0))
    node = machine or nearest_machine(*named)
    step: PlannedStep | None = None
    changes: Sequence[Change] = ()
    if node is None:
        notes.append("no change was predicted: give --machine; `shoal calibrate` measures a machine.")
    elif not {each.name for each in fields(GPTConfig)} <= set(record.model):
        notes.append("no change was predicted: the run does not say its model.")
    else:
        step, changes = _predict(record, machine_of(node), shares)
        if seconds is not None and not 1 / _DOUBTED < step.seconds / seconds < _DOUBTED:
            notes.append(
                f"the prediction is {step.seconds / seconds:.2g} times what was measured, so gains may be off too:"
                " `shoal calibrate` measures a machine for --machine."
            )
    findings: list[str] = []
    if time is not None:
        ranks = int(record.environment.get("ranks", 1))
        findings = [*_data(time, shares), *_slow_rank(rows), *_checkpoints(time, ranks), *_restarts(time)]
    found = Diagnosis(
        seconds,
        None if step is None else step.seconds,
        None if step is None else sum(step.memory.by_kind.values()),
        "" if node is None else machine_of(node).name,
        shares,
        changes,
        findings,
        notes,
    )
    (run / DOCTOR_FILE).write_text(json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8")
    return found


# changes


def _predict(record: RunRecord, node: GpuNode, shares: Mapping[str, float]) -> tuple[PlannedStep, Sequence[Change]]:
    """The step as it is, and what would make it faster.

    Raises: what loading the configuration and its dry run do.
    """
    shape = GPTConfig(**{each.name: record.model[each.name] for each in fields(GPTConfig)})
    num_ranks = int(record.environment["ranks"])
    config = {key: value for key, value in record.config.items() if key not in _LOGS}
    settings = load(copy.deepcopy(config), world_size=num_ranks, warns=False)
    degrees = model_degrees(settings)

    def build() -> nn.Module:
        model = GPT(shape, experts=ExpertFeedForward)
        if degrees.get("sp", 1) * degrees.get("cp", 1) > 1:
            attend_by_ranks(model)
        return model

    def run(keys: Keys) -> PlannedStep:
        with quiet():
            return dry_run_model(build, _with(config, keys), num_ranks, machine=node, sequence=shape.sequence_length)

    step = run({})
    best: dict[str, Change] = {}
    for keys, why in _trials(settings, int(record.model["parameters"]), step, shares):
        try:
            changed = run(keys)
        except ShoalError:
            continue  # the engine refuses the combination
        nbytes, first = sum(changed.memory.by_kind.values()), next(iter(keys))
        gain = 1 - changed.seconds / step.seconds
        if node.gpu_nbytes is not None and nbytes > sum(step.memory.by_kind.values()):
            why += f", and a rank would need {format_bytes(nbytes)} of {format_bytes(node.gpu_nbytes)}"
        fits = node.gpu_nbytes is None or nbytes <= USABLE * node.gpu_nbytes
        if fits and gain > max(_WORTH, best[first].gain if first in best else 0.0):
            old_and_new = {
                path: (None if value is None else attrgetter(path)(settings), value) for path, value in keys.items()
            }
            best[first] = Change(gain, old_and_new, why)
    return step, sorted(best.values(), key=lambda change: -change.gain)[:_MOST]


def _trials(settings: Config, numel: int, step: PlannedStep, shares: Mapping[str, float]) -> Iterator[tuple[Keys, str]]:
    """Changes that may help, by where the step waits; with the figure that each is based on."""
    zero, checkpointing = settings.zero_optimization, settings.activation_checkpointing
    waited = step.exposed_communication / step.seconds
    for phase, what in (("reduce", "gradients"), ("gather", "parameters")):
        share = shares.get(phase, waited)
        why = f"{100 * share:.0f} % of the step waits for {what if phase in shares else 'communication'}"
        if share > _WORTH:
            yield from ((keys, why) for keys in _waiting(settings, numel, phase))
    num_micro, micro = settings.gradient_accumulation_steps, settings.train_micro_batch_size_per_gpu
    for factor in {2, num_micro} if num_micro % 2 == 0 else ():
        keys = {"train_micro_batch_size_per_gpu": factor * micro, "gradient_accumulation_steps": num_micro // factor}
        yield keys, f"the step has {num_micro} micro-batches of {micro}"
    copies = sum(step.stages[step.worst].share(kind) for kind in (COPY, UPDATE))
    for section in ("offload_optimizer", "offload_param"):
        offload, path = getattr(zero, section), f"zero_optimization.{section}"
        if offload.device != "none":
            why = f"{100 * copies:.0f} % of the step waits for copies and updates of offloaded state"
            yield {f"{path}.device": "none"}, why
            if not offload.pin_memory:
                yield {f"{path}.pin_memory": True}, why
    if checkpointing.modules is not None:
        yield {"activation_checkpointing": None}, "blocks are computed twice"


def _waiting(settings: Config, numel: int, phase: str) -> Iterator[Keys]:
    """Changes against waits for gradients or parameters. Args: ``numel``: of the model."""
    zero, at = settings.zero_optimization, "zero_optimization."
    if zero.stage and phase == ("gather" if zero.stage == 3 else "reduce"):
        yield from ({f"{at}stage": stage} for stage in range(zero.stage))
    if phase == "reduce":
        sizes = {4 * zero.reduce_bucket_size, numel // 4, numel // 16} - {zero.reduce_bucket_size}
        yield from ({f"{at}reduce_bucket_size": size} for size in sorted(sizes) if 0 < size <= numel)
        if zero.overlap_comm is False:
            yield {f"{at}overlap_comm": True}
    elif zero.stage == 3:
        for name in ("stage3_prefetch_bucket_size", "stage3_max_live_parameters"):
            if getattr(zero, name) < numel:
                yield {f"{at}{name}": min(max(4 * getattr(zero, name), numel // 16), numel)}
        if zero.stage3_max_reuse_distance < 2 * numel:
            live = {f"{at}stage3_max_live_parameters": numel} if zero.stage3_max_live_parameters < numel else {}
            yield {f"{at}stage3_max_reuse_distance": 2 * numel, **live}
        if zero.stage3_param_persistence_threshold < 100_000:
            yield {f"{at}stage3_param_persistence_threshold": 100_000}
    elif zero.overlap_param_gather is False:
        yield {f"{at}overlap_param_gather": True}


def _with(config: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    made = copy.deepcopy(dict(config))
    if "gradient_accumulation_steps" in keys:
        made.pop("train_batch_size", None)
    for path, value in keys.items():
        *sections, name = path.split(".")
        section = made
        for each in sections:
            section = section.setdefault(each, {})
        if value is None:
            section.pop(name, None)
        else:
            section[name] = value
    return made


def _changed(path: str, old: Any, new: Any) -> str:
    if new is None:
        return f"leave {path} out"
    if isinstance(new, bool) or not isinstance(new, int):
        return f"set {path} to {json.dumps(new)}"
    return f"{'raise' if new > old else 'lower'} {path} from {old:,} to {new:,}"


# findings


def _shares(rows: Sequence[RankTimesRow]) -> dict[str, float]:
    """Of a step by phase: the median of the measured steps, of the mean of the ranks."""
    found: dict[str, list[float]] = {}
    for row in rows:
        means = {phase: fmean(ranks) for phase, ranks in row.milliseconds.items()}
        pipelined = {"forward", "backward", "step"} if "pipeline" in means else set()
        whole = sum(means.get(phase, 0.0) for phase in _WHOLE if phase not in pipelined)
        for phase, value in means.items():
            found.setdefault(phase, []).append(value / whole)
    return {phase: median(values) for phase, values in found.items()}


def _data(time: RunTime, shares: Mapping[str, float]) -> Iterator[str]:
    share = shares.get("data", time.seconds["data"] / max(time.seconds["productive"] + time.seconds["data"], 1e-9))
    if share > _DATA:
        sources = time.starts[-1].sources if len(time.starts[-1].sources) > 1 else {}
        slowest = max(sources, key=sources.__getitem__, default="")
        part = f" (of reading, {sources[slowest] / sum(sources.values()):.0%} is {slowest!r})" if slowest else ""
        yield (
            f"{100 * share:.1f} % of the time is the script's own work between steps{part}: let workers of the data"
            f" loader read ahead (data.num_workers), at most -{100 * share:.1f} %"
        )


def _slow_rank(rows: Sequence[RankTimesRow]) -> Iterator[str]:
    steps: dict[tuple[tuple[int, ...], int | None], list[OwnWork]] = defaultdict(list)
    for row in rows:
        for each in row.compared():
            steps[each.ranks, each.stage].append(each)
    factors = {key: median(each.factor for each in of_one) for key, of_one in steps.items()}
    key = max(factors, key=factors.__getitem__, default=((), None))
    num_slow = sum(each.factor > _SLOW for each in steps.get(key, ()))
    if key in factors and factors[key] > _SLOW and num_slow > _OFTEN * len(steps[key]):
        ranks, stage = key
        own, usual = (median(getattr(each, name) for each in steps[key]) for name in ("total", "usual_total"))
        who = f"rank {ranks[0]}" if stage is None else f"pipeline stage {stage} (ranks {listed(ranks)})"
        do = "look" if stage is None else "change pipeline.partition, or look"
        yield (
            f"{who} works {own:.1f} ms of a step, the others {usual:.1f} ms: {do} for other programs, heat or a slow"
            f" GPU there, at most -{100 * (1 - usual / own):.0f} %"
        )


def _checkpoints(time: RunTime, num_ranks: int) -> Iterator[str]:
    """The interval of Young and Daly, against what the run did."""
    if time.num_saves < 2 or not time.num_steps:
        return
    stop = time.seconds["checkpoint save"] / time.num_saves
    interval = (time.seconds["productive"] + time.seconds["data"] + time.seconds["lost progress"]) / time.num_saves
    failures = time.num_starts - 1
    mtbf = time.total / failures if failures else GPU_MTBF / num_ranks
    restart = sum(time.seconds[each] for each in ("start-up", "initialization", "checkpoint restore")) / time.num_starts
    best = checkpoint_interval(stop, restart, mtbf) if stop > 0 else interval
    gain = waste(interval, stop, restart, mtbf) - waste(best, stop, restart, mtbf)
    if gain > _WORTH:
        steps = max(round(best / (interval * time.num_saves) * time.num_steps), 1)
        yield (
            f"a checkpoint of {stop:.1f} s every {interval:,.0f} s, with {counted(failures, 'failure')}: save every"
            f" {best:,.0f} s, about {steps:,} steps (Young, Daly), -{100 * gain:.1f} %"
        )


def _restarts(time: RunTime) -> Iterator[str]:
    lost = {each: time.seconds[each] / time.total for each in ("lost progress", "recovery", "elastic change")}
    if time.num_starts > 1 and sum(lost.values()) > _WORTH:
        shown = ", ".join(f"{name} {100 * share:.1f} %" for name, share in lost.items() if share)
        ends = ", ".join(f"{start.last_step:,}" for start in time.starts[:-1])
        yield f"{counted(time.num_starts - 1, 'restart')}, after steps {ends}, took {shown}: see why those starts ended"
