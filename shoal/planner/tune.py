"""``shoal tune``: the best plans train for real, a few steps each, and the fastest is kept.

    plan     the closed formulas of ``shoal plan``, for this machine
    measure  one after the other, each time the one that may be fastest; what fails is a result, too
    correct  the plans of all that are left, by what those have shown that share values with them (``corrected.py``)
    stop     when none that is left can win
    keep     FOLDER/config.json

Each result is in FOLDER/NAME/result.json: a tune that was interrupted goes on where it was.
``python -m shoal.planner.tune JOB.json`` is one rank of one measurement.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shoal.comm.world import current_world
from shoal.device import Device
from shoal.engine.entry import initialize
from shoal.launch.local import LocalJob, run_local
from shoal.planner.corrected import corrected
from shoal.planner.model_of import attend_by_ranks, build_model
from shoal.planner.search import Progress, impossible, prepare, search
from shoal.planner.short_training import take_steps
from shoal.planner.space import Candidate, refused
from shoal.text import format_bytes, table

_WARM_UP = 2  # steps that are not measured: the order of the units is learnt, state is made
_HOPEFUL, _CERTAIN = 0.25, 2.0  # deviations below a corrected time: the next one to run, and one that cannot win
_RESULT, _CONFIG, _JOB = "result.json", "config.json", "job.json"


@dataclass(frozen=True)
class Measured:
    """One configuration. ``planned``, ``seconds``: of a step; the latter measured, None if ``error`` says why not.

    ``peak``: bytes of the rank that has most. ``is_kept``: the result is of an earlier tune.
    """

    candidate: Candidate
    config: Mapping[str, Any]
    planned: float
    seconds: float | None = None
    peak: int = 0
    error: str = ""
    is_kept: bool = False

    @property
    def name(self) -> str:
        return str(self.candidate)


@dataclass(frozen=True)
class Tuned:
    """Attributes: ``measured``: in the order of the runs. ``num_left``: how many were not run, and ``why``."""

    measured: tuple[Measured, ...]
    num_left: int
    why: str

    @property
    def best(self) -> Measured | None:
        """The fastest; None: every run failed."""
        ran = [each for each in self.measured if each.seconds is not None]
        return min(ran, key=lambda each: each.seconds or 0.0, default=None)

    def report(self) -> str:
        rows = [
            [
                ("* " if each is self.best else "  ") + each.name,
                f"{each.planned:.4g}",
                "failed" if each.seconds is None else f"{each.seconds:.4g}",
                format_bytes(each.peak) if each.peak else "",
                each.error[:80],
            ]
            for each in self.measured
        ]
        text = table(rows, ["configuration", "planned s / step", "measured", "peak memory", ""])
        return f"{text}\n{self.num_left} others were not run: {self.why}."


def tune(
    model: str,
    num_ranks: int,
    folder: str | Path,
    *,
    machine: str | Path = "h100",
    sequence: int,
    global_batch: int,
    config: Mapping[str, Any] | None = None,
    space: Mapping[str, tuple[Any, ...]] | None = None,
    num_trials: int = 6,
    steps: int = 6,
    counts_cpu: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Find the fastest configuration of a model on the ranks of this machine, by measuring the best plans.

    Args: as of ``shoal.plan``. ``machine``: this one, such as the file that ``shoal calibrate`` writes.
        folder: for the results, and for ``config.json``.
        num_trials: configurations that are run at most. ``steps``: that are measured of each, after two others.
        counts_cpu: measure the processor's time of a rank, for CPU ranks on a computer that others use, too.
        say: called with a line for each run.

    Raises: UsageError: no configuration is possible.
    """
    tell = progress or (lambda what, done, total: None)
    tell("measuring a block", 0, num_trials)
    _, request, facts = prepare(model, num_ranks, machine, sequence, global_batch, config, space)
    ranked, rejected, tightest = search(request, facts, saves_always=True)
    if tightest is None:
        raise impossible(request, rejected)
    folder = Path(folder)
    left = {one: guess.seconds for guess, one in ranked}
    measured: list[Measured] = []
    while left and len(measured) < num_trials and (one := next_to_run(left, measured)) is not None:
        planned, made = left.pop(one), one.config(request, facts)
        if refused(made, num_ranks):
            continue
        tell(f"running {one}", len(measured), num_trials)
        measured.append(_measure(one, planned, made, folder, model, num_ranks, sequence, steps, counts_cpu))
        last = measured[-1]
        took = f"{last.seconds:.4g} s a step, planned {last.planned:.4g}" if last.seconds else f"failed: {last.error}"
        say(f"{last.name}: {took}{', measured before' if last.is_kept else ''}")
        if last.seconds is None:  # nor will it run with larger micro-batches
            left = {each: at for each, at in left.items() if replace(each, micro=min(each.micro, one.micro)) != one}
    why = f"{len(measured)} runs were allowed" if len(measured) == num_trials else "by what was measured none can win"
    tuned = Tuned(tuple(measured), len(left), why)
    if tuned.best is not None:
        (folder / _CONFIG).write_text(json.dumps(tuned.best.config, indent=2) + "\n")
    return tuned


def next_to_run(left: Mapping[Candidate, float], measured: Sequence[Measured]) -> Candidate | None:
    """Of those that are left, by planned seconds, the one that may be fastest; None: none can win any more."""
    ran = [(asdict(each.candidate), each.planned, each.seconds) for each in measured if each.seconds is not None]
    guesses = dict(zip(left, corrected([(asdict(one), planned) for one, planned in left.items()], ran), strict=True))
    least = min(guess.at_best(_CERTAIN) for guess in guesses.values())
    if len(ran) > 1 and least > min(seconds for *_, seconds in ran):
        return None
    return min(guesses, key=lambda one: guesses[one].at_best(_HOPEFUL))


def _measure(
    one: Candidate,
    planned: float,
    config: Mapping[str, Any],
    folder: Path,
    model: str,
    num_ranks: int,
    sequence: int,
    steps: int,
    counts_cpu: bool,
) -> Measured:
    name = str(one)
    here = folder / name.replace(" ", "_")
    job = {"model": model, "ranks": num_ranks, "sequence": sequence, "steps": steps, "config": config}
    job["counts_cpu"] = counts_cpu
    job["has_parts"] = one.sp * one.cp > 1
    found = Measured(one, config, planned)
    if (here / _RESULT).is_file() and json.loads((here / _JOB).read_text()) == job:
        return replace(found, **json.loads((here / _RESULT).read_text()), is_kept=True)
    here.mkdir(parents=True, exist_ok=True)
    (here / _RESULT).unlink(missing_ok=True)
    (here / _JOB).write_text(json.dumps(job, indent=2))
    program = (sys.executable, "-m", "shoal.planner.tune", str(here / _JOB))
    outcome = run_local(LocalJob(program, num_ranks, environment={"SHOAL_LOG_LEVEL": "WARNING"}))
    if outcome.exit_code:
        (here / _RESULT).write_text(json.dumps({"error": outcome.brief}))
    return replace(found, **json.loads((here / _RESULT).read_text()))


def step_times(
    model: str,
    config: Mapping[str, Any],
    sequence: int,
    steps: int,
    *,
    has_parts: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], int]:
    """On each of the ranks: seconds of some steps, after two others, and the memory of the rank that has most."""
    torch.manual_seed(0)
    built = build_model(model, sequence)
    if has_parts:
        attend_by_ranks(built)
    engine: Any = initialize(model=built, config=dict(config))[0]
    device = Device(engine.device)
    times = [clock()]

    def note() -> None:
        device.synchronize()
        engine.axes.world.barrier(label="tune: step")
        times.append(clock())

    take_steps(engine, built, steps + _WARM_UP, sequence=sequence, after_step=note)
    peaks = engine.axes.world.gather_objects(device.memory().peak, label="tune: memory")
    engine.destroy()
    return [end - begin for begin, end in pairwise(times)][_WARM_UP:], max(peaks)


def _train(path: Path) -> None:
    """One rank of one measurement; rank 0 writes the result."""
    job = json.loads(path.read_text())
    taken, peak = step_times(
        job["model"],
        job["config"],
        job["sequence"],
        job["steps"],
        has_parts=job["has_parts"],
        clock=time.process_time if job["counts_cpu"] else time.perf_counter,
    )
    if current_world().rank == 0:
        path.with_name(_RESULT).write_text(json.dumps({"seconds": median(taken), "peak": peak}))


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
