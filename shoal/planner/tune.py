"""``shoal tune``: the best plans train for real, a few steps each, and the fastest is kept.

    plan     the closed formulas and dry runs of ``shoal plan``, for this machine
    measure  one after the other, the fastest by plan first; what fails or runs out of memory is a result too
    correct  measured seconds by planned seconds, the median of those so far, for all that are left
    stop     when the next one cannot win, even if it takes 25 % less than its corrected figure
    keep     FOLDER/config.json

Each result is in FOLDER/NAME/result.json: a tune that was interrupted goes on where it was.
``python -m shoal.planner.tune JOB.json`` is one rank of one measurement.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shoal.device import Device
from shoal.engine.entry import initialize
from shoal.launch.local import LocalJob, run_local
from shoal.planner.model_of import build_model
from shoal.planner.search import Progress, plan
from shoal.planner.short_training import take_steps
from shoal.planner.trial import Trial, attend_by_ranks
from shoal.text import format_bytes, table

_WARM_UP = 2  # steps that are not measured: the order of the units is learnt, state is made
_MARGIN = 0.75  # of its corrected figure, that a configuration may take at least
_RESULT, _CONFIG, _JOB = "result.json", "config.json", "job.json"


@dataclass(frozen=True)
class Measured:
    """One configuration. ``planned``, ``seconds``: of a step; the latter measured, None if ``error`` says why not.

    ``peak``: bytes of the rank that has most. ``is_kept``: the result is of an earlier tune.
    """

    name: str
    config: Mapping[str, Any]
    planned: float
    seconds: float | None = None
    peak: int = 0
    error: str = ""
    is_kept: bool = False


@dataclass(frozen=True)
class Tuned:
    """Attributes: ``measured``: in the order of the runs. ``left``: those that could not win, and were not run."""

    measured: tuple[Measured, ...]
    left: tuple[str, ...]

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
        rows += [[f"  {name}", "", "not run", "", "cannot win"] for name in self.left]
        return table(rows, ["configuration", "planned s / step", "measured", "peak memory", ""])


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
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Find the fastest configuration of a model on the ranks of this machine, by measuring the best plans.

    Args: as of ``shoal.plan``. ``machine``: this one, such as the file that ``shoal calibrate`` writes.
        folder: for the results, and for ``config.json``.
        num_trials: plans that are run at most. ``steps``: that are measured of each, after two others.
        say: called with a line for each run.

    Raises: UsageError: no configuration is possible.
    """
    made = plan(
        model,
        num_ranks,
        machine=machine,
        sequence=sequence,
        global_batch=global_batch,
        config=config,
        space=space,
        num_trials=num_trials,
        progress=progress,
    )
    folder = Path(folder)
    trials = [trial for trial in made.trials if not trial.error]
    measured: list[Measured] = []
    for number, trial in enumerate(trials):
        if cannot_win(trial.seconds, measured):
            break
        measured.append(_measure(trial, folder, model, num_ranks, sequence, steps))
        last = measured[-1]
        took = f"{last.seconds:.4g} s a step, planned {last.planned:.4g}" if last.seconds else f"failed: {last.error}"
        say(f"{number + 1} of {len(trials)}: {last.name}: {took}{', measured before' if last.is_kept else ''}")
    tuned = Tuned(tuple(measured), tuple(str(trial.candidate) for trial in trials[len(measured) :]))
    if tuned.best is not None:
        (folder / _CONFIG).write_text(json.dumps(tuned.best.config, indent=2) + "\n")
    return tuned


def cannot_win(planned: float, measured: list[Measured]) -> bool:
    """True if a configuration with this planned time would be slower than the best so far, by what was measured."""
    ran = [(each.seconds, each.planned) for each in measured if each.seconds is not None]
    if len(ran) < 2:
        return False
    ratio = median(seconds / plan for seconds, plan in ran)
    return _MARGIN * ratio * planned > min(seconds for seconds, _ in ran)


def _measure(trial: Trial, folder: Path, model: str, num_ranks: int, sequence: int, steps: int) -> Measured:
    name = str(trial.candidate)
    here = folder / name.replace(" ", "_")
    job = {"model": model, "ranks": num_ranks, "sequence": sequence, "steps": steps, "config": trial.config}
    job["has_parts"] = trial.candidate.sp * trial.candidate.cp > 1
    found = Measured(name, trial.config, trial.seconds)
    if (here / _RESULT).is_file() and json.loads((here / _JOB).read_text()) == job:
        return Measured(**{**asdict(found), **json.loads((here / _RESULT).read_text()), "is_kept": True})
    here.mkdir(parents=True, exist_ok=True)
    (here / _RESULT).unlink(missing_ok=True)
    (here / _JOB).write_text(json.dumps(job, indent=2))
    program = (sys.executable, "-m", "shoal.planner.tune", str(here / _JOB))
    outcome = run_local(LocalJob(program, num_ranks, environment={"SHOAL_LOG_LEVEL": "WARNING"}))
    if outcome.exit_code:
        lines = [line for line in outcome.report.splitlines() if line.strip()]
        (here / _RESULT).write_text(json.dumps({"error": " ".join(lines[:2])}))
    return Measured(**{**asdict(found), **json.loads((here / _RESULT).read_text())})


def _train(path: Path) -> None:
    """One rank of one measurement; rank 0 writes the result."""
    job = json.loads(path.read_text())
    torch.manual_seed(0)
    model = build_model(job["model"], job["sequence"])
    if job["has_parts"]:
        attend_by_ranks(model)
    engine: Any = initialize(model=model, config=job["config"])[0]
    device = Device(engine.device)
    times = [time.perf_counter()]

    def note() -> None:
        device.synchronize()
        engine.axes.world.barrier(label="tune: step")
        times.append(time.perf_counter())

    take_steps(engine, model, job["steps"] + _WARM_UP, sequence=job["sequence"], after_step=note)
    taken = [end - begin for begin, end in pairwise(times)][_WARM_UP:]
    peaks = engine.axes.world.gather_objects(device.memory().peak, label="tune: memory")
    if engine.global_rank == 0:
        result = {"seconds": median(taken), "peak": max(peaks)}
        path.with_name(_RESULT).write_text(json.dumps(result))
    engine.destroy()


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
