"""The best plans are measured; failures, corrections and interrupted tunes are taken into account."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.config.batch import MICRO
from shoal.launch.local import LocalJob, Outcome
from shoal.planner import tune as tuning
from shoal.planner.space import Candidate, PlanRequest
from shoal.planner.tune import Tuned, tune
from shoal.simulation.machines import machine_of

ONE = Candidate(pp=1, tp=1, stage=1)
RANKED = {8: 1.0, 4: 1.1, 2: 1.2, 16: 1.3, 1: 3.0}  # planned seconds by micro-batch


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

    def planned(request: Any, facts: Any, *, saves_always: bool) -> tuple[list[Any], dict[str, int], Any]:
        ranked = [(SimpleNamespace(seconds=at), replace(ONE, micro=micro)) for micro, at in RANKED.items()]
        return ranked, {}, ranked[0]

    monkeypatch.setattr(tuning, "run_local", ranks)
    monkeypatch.setattr(tuning, "search", planned)
    monkeypatch.setattr(tuning, "prepare", lambda *args: (None, PlanRequest(2, machine_of("h100"), 128, 32), None))
    monkeypatch.setattr(tuning, "refused", lambda config, ranks: "no" if config[MICRO] == 16 else "")
    return tune("tiny", 2, folder, sequence=128, global_batch=32, steps=steps), started


def test_the_fastest_is_kept_and_what_cannot_win_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, started = run(tmp_path, monkeypatch, {8: 2.0, 4: 1.8, 2: 2.6})
    assert started == [8, 4, 2]  # 16 is refused when it is loaded, and 3.0 planned is far slower
    assert tuned.best is not None and tuned.best.seconds == 1.8
    assert json.loads((tmp_path / "config.json").read_text())[MICRO] == 4
    assert tuned.num_left == 1
    assert "1 others were not run: by what was measured none can win." in tuned.report() and "* " in tuned.report()


def test_a_run_that_fails_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, started = run(tmp_path, monkeypatch, {4: 1.8, 2: 2.6})
    assert started == [8, 4, 2]
    assert tuned.measured[0].seconds is None
    assert tuned.measured[0].error == "shoal: rank 0 failed. [cuda-memory] out of memory"
    assert tuned.best is not None and tuned.best.config[MICRO] == 4
    nothing, started = run(tmp_path / "other", monkeypatch, {})
    assert nothing.best is None and not (tmp_path / "other" / "config.json").exists()
    assert started == [8, 4, 2, 1]  # and not 16, which is larger than one that fails


def test_a_tune_goes_on_with_the_results_of_the_same_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = run(tmp_path, monkeypatch, {8: 2.0, 4: 1.8, 2: 2.6})
    (tmp_path / "pp=1_tp=1_stage=1_micro=2" / "result.json").unlink()
    again, started = run(tmp_path, monkeypatch, {2: 2.5})
    assert started == [2]
    assert [each.is_kept for each in again.measured] == [True, True, False]
    assert again.measured[1].seconds == first.measured[1].seconds
    _, started = run(tmp_path, monkeypatch, {8: 2.0, 4: 1.8, 2: 2.6}, steps=7)
    assert started == [8, 4, 2]  # other runs
