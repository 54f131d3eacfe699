"""The best plans are measured; failures, corrections and interrupted tunes are taken into account."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.local import LocalJob, Outcome
from shoal.planner import tune as tuning
from shoal.planner.closed_forms import Guess
from shoal.planner.space import Candidate
from shoal.planner.trial import Trial
from shoal.planner.tune import Measured, Tuned, cannot_win, tune


@dataclass(frozen=True)
class Plan:
    trials: tuple[Trial, ...]


def trial(micro: int, seconds: float, error: str = "") -> Trial:
    one = Candidate(pp=1, tp=1, stage=1, micro=micro)
    guess: Any = object.__new__(Guess)
    return Trial(one, {"train_micro_batch_size_per_gpu": micro}, guess, seconds=seconds, error=error)


TRIALS = (trial(8, 1.0), trial(4, 1.1), trial(2, 1.2), trial(16, 1.3, error="refused"), trial(1, 3.0))


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], *, steps: int = 6
) -> tuple[Tuned, list[int]]:
    """A tune in which ranks take these seconds by micro-batch; others fail. Returns: it, and what was started."""
    started = []

    def ranks(job: LocalJob) -> Outcome:
        path = Path(job.program[-1])
        micro = json.loads(path.read_text())["config"]["train_micro_batch_size_per_gpu"]
        started.append(micro)
        if micro not in seconds:
            return Outcome(1, "shoal: rank 0 failed.\n[cuda-memory] out of memory\n  do: less\n")
        path.with_name("result.json").write_text(json.dumps({"seconds": seconds[micro], "peak": 1 << 20}))
        return Outcome(0)

    def planned(*args: Any, **options: Any) -> Plan:
        return Plan(TRIALS)

    monkeypatch.setattr(tuning, "run_local", ranks)
    monkeypatch.setattr(tuning, "plan", planned)
    return tune("tiny", 2, folder, sequence=128, global_batch=16, steps=steps), started


def test_the_fastest_is_kept_and_what_cannot_win_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, started = run(tmp_path, monkeypatch, {8: 2.0, 4: 1.8, 2: 2.6})
    assert started == [8, 4, 2]  # the plan's error is not run, and 3.0 planned is far slower
    assert tuned.best is not None and tuned.best.seconds == 1.8
    assert json.loads((tmp_path / "config.json").read_text()) == {"train_micro_batch_size_per_gpu": 4}
    assert tuned.left == ("pp=1 tp=1 stage=1 micro=1",)
    assert "cannot win" in tuned.report() and "* " in tuned.report()


def test_a_run_that_fails_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, started = run(tmp_path, monkeypatch, {4: 1.8, 2: 2.6})
    assert started == [8, 4, 2]
    assert tuned.measured[0].seconds is None
    assert tuned.measured[0].error == "shoal: rank 0 failed. [cuda-memory] out of memory"
    assert tuned.best is not None and tuned.best.config == {"train_micro_batch_size_per_gpu": 4}
    nothing, _ = run(tmp_path / "other", monkeypatch, {})
    assert nothing.best is None and not (tmp_path / "other" / "config.json").exists()


def test_a_tune_goes_on_with_the_results_of_the_same_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = run(tmp_path, monkeypatch, {8: 2.0, 4: 1.8, 2: 2.6})
    (tmp_path / "pp=1_tp=1_stage=1_micro=2" / "result.json").unlink()
    again, started = run(tmp_path, monkeypatch, {2: 2.5})
    assert started == [2]
    assert [each.is_kept for each in again.measured] == [True, True, False]
    assert again.measured[1].seconds == first.measured[1].seconds
    _, started = run(tmp_path, monkeypatch, {8: 2.0, 4: 1.8, 2: 2.6}, steps=7)
    assert started == [8, 4, 2]  # other runs


def test_a_plan_is_corrected_by_the_median_of_what_was_measured() -> None:
    def measured(*pairs: tuple[float, float | None]) -> list[Measured]:
        return [Measured(str(number), {}, plan, seconds) for number, (plan, seconds) in enumerate(pairs)]

    check: Callable[[float, list[Measured]], bool] = cannot_win
    assert not check(100.0, measured((1.0, 1.0)))  # one measurement corrects nothing
    assert not check(100.0, measured((1.0, 1.0), (1.0, None)))
    assert check(2.0, measured((1.0, 1.0), (1.0, 1.0)))
    assert not check(1.3, measured((1.0, 1.0), (1.0, 1.0)))  # may take 25 % less
    mixed = measured((1.0, 2.0), (1.0, 1.0), (2.0, 1.0))  # the median is 1
    assert not check(1.3, mixed) and check(1.4, mixed)
    twice = measured((1.0, 2.0), (1.0, 2.0))
    assert not check(1.3, twice) and check(1.4, twice)
