"""``shoal doctor RUN``: each change and each finding appears where its cause is, and only there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.app import doctor
from shoal.errors import UsageError
from shoal.models import GPTConfig
from shoal.observe.report import RunRecord
from shoal.planner.doctor import Change, Diagnosis, diagnose
from shoal.planner.dry_model import PlannedStep
from shoal.simulation.dry_run import StepTime
from shoal.simulation.machines import machine_of
from shoal.simulation.memory import MemoryPeak
from shoal.simulation.times import COMMUNICATION, KINDS

SHAPE = GPTConfig(vocab_size=512, sequence_length=128, num_layers=3, hidden_size=1024, num_heads=8)
NUMEL = SHAPE.num_parameters()


def a_run(folder: Path, config: Mapping[str, Any], ranks: int, *lines: Mapping[str, Any], device: str = "cpu") -> Path:
    base = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "goodput": {"file": "elsewhere"}}
    base["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
    environment = {"ranks": ranks, "device name": device, "device memory": 80 << 30 if device != "cpu" else 0}
    model = {**asdict(SHAPE), "parameters": NUMEL}
    RunRecord("run", model=model, config={**base, **config}, environment=environment).save(folder)
    if lines:
        (folder / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def started(at: float, step: int = 0) -> dict[str, Any]:
    return {"time": at + 2, "event": "start", "began": at, "init": 2.0, "step": step, "ranks": 4}


def sections(time: float, steps: int, /, **seconds: float) -> dict[str, Any]:
    return {"time": time, "event": "sections", "step": steps, "seconds": seconds}


def ranks(step: int, /, **milliseconds: list[float]) -> dict[str, Any]:
    waits = [milliseconds[phase] for phase in ("gather", "reduce") if phase in milliseconds]
    backward = [whole - sum(inside) for whole, *inside in zip(milliseconds["backward"], *waits, strict=True)]
    own = {"forward": milliseconds["forward"], "backward": backward}
    return {"time": 1.0, "event": "ranks", "step": step, "ms": milliseconds, "own": own}


def keys(found: Diagnosis) -> list[str]:
    return [next(iter(change.keys)).removeprefix("zero_optimization.") for change in found.changes]


CAUSES: dict[str, tuple[set[str], dict[str, Any], int, str]] = {
    "small buckets that do not overlap": (
        {"reduce_bucket_size", "overlap_comm"},
        {
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 200_000, "overlap_comm": False},
            "train_micro_batch_size_per_gpu": 16,
        },
        16,
        "h100@200g",
    ),
    "sharded without need": (
        {"stage", "stage3_max_reuse_distance"},
        {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 16},
        16,
        "h100@200g",
    ),
    "small micro-batches": ({"train_micro_batch_size_per_gpu"}, {"gradient_accumulation_steps": 2}, 8, "h100"),
    "offload without need": (
        {"offload_optimizer.device", "offload_optimizer.pin_memory"},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
        2,
        "h100",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_setting_that_costs_time_in_the_dry_run_is_to_be_changed(cause: str, tmp_path: Path) -> None:
    expected, config, num_ranks, machine = CAUSES[cause]
    found = diagnose(a_run(tmp_path, config, num_ranks), machine)
    assert expected <= set(keys(found))
    gains = [change.gain for change in found.changes]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 0.02
    assert found.predicted is not None
    assert json.loads((tmp_path / "doctor.json").read_text())["changes"][0]["text"] == str(found.changes[0])


PERSISTENT = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1000}
TRIED: list[tuple[str, dict[str, Any], Any]] = [
    ("zero_optimization.stage", {"zero_optimization": {"stage": 2}}, 1),
    ("zero_optimization.reduce_bucket_size", {"zero_optimization": {"stage": 1, "reduce_bucket_size": 10}}, 40),
    ("zero_optimization.reduce_bucket_size", {"zero_optimization": {"stage": 1}}, NUMEL // 16),
    ("zero_optimization.overlap_comm", {"zero_optimization": {"stage": 1, "overlap_comm": False}}, True),
    (
        "zero_optimization.overlap_param_gather",
        {"zero_optimization": {"stage": 1, "overlap_param_gather": False}},
        True,
    ),
    (
        "zero_optimization.stage3_prefetch_bucket_size",
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": NUMEL // 8}},
        NUMEL // 8 * 4,
    ),
    ("zero_optimization.stage3_max_live_parameters", {"zero_optimization": PERSISTENT}, NUMEL // 16),
    ("zero_optimization.stage3_max_reuse_distance", {"zero_optimization": PERSISTENT}, 2 * NUMEL),
    ("zero_optimization.stage3_param_persistence_threshold", {"zero_optimization": PERSISTENT}, 100_000),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": 8}, 4),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": 8}, 1),
    (
        "zero_optimization.offload_param.device",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "none",
    ),
    ("activation_checkpointing.modules", {"activation_checkpointing": {"modules": ["Block"]}}, None),
]


@pytest.mark.parametrize(("path", "config", "value"), TRIED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_tried_is_proposed_if_it_is_faster(
    path: str, config: dict[str, Any], value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a dry run by which this change alone is faster, by a tenth."""
    asked: list[dict[str, Any]] = []

    def dry(model: object, config: dict[str, Any], num_ranks: int, **_: object) -> PlannedStep:
        asked.append(config)
        at: Any = config
        for name in path.split("."):
            at = at.get(name) if at is not None else None
        seconds = 0.9 if at == value and len(asked) > 1 else 1.0
        by_kind = dict.fromkeys(KINDS, 0.0) | {COMMUNICATION: 0.5 * seconds}
        step = StepTime(0.0, seconds, by_kind, 0.0, {}, {}, {}, MemoryPeak(0, 0, {}, "", ""), {})
        return PlannedStep(num_ranks, machine_of("h100"), seconds, (step,))

    monkeypatch.setattr("shoal.planner.doctor.dry_run_model", dry)
    (change,) = diagnose(a_run(tmp_path, config, 8), "h100").changes
    assert change.gain == pytest.approx(0.1)
    first = "activation_checkpointing" if value is None else path
    assert change.keys[first][1] == value
    assert all("goodput" not in config for config in asked)


def test_where_nothing_gains_nothing_is_to_be_changed(tmp_path: Path) -> None:
    found = diagnose(a_run(tmp_path, {}, 1), "h100")
    assert [*found.changes, *found.findings] == []
    assert "Nothing is to be changed." in str(found)


@pytest.mark.parametrize(("size", "fits"), [(60, True), (75, False)])  # GiB, of 79.2: 0.92 of them can be used
def test_a_change_is_proposed_if_it_fits(
    size: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dry(model: object, config: dict[str, Any], num_ranks: int, **_: object) -> PlannedStep:
        is_stage_0 = not config["zero_optimization"]["stage"]
        memory = MemoryPeak(0, 0, {"gradient": size << 30 if is_stage_0 else 1 << 30}, "", "")
        by_kind = dict.fromkeys(KINDS, 0.0) | {COMMUNICATION: 0.5}
        step = StepTime(0.0, 0.5 if is_stage_0 else 1.0, by_kind, 0.0, {}, {}, {}, memory, {})
        return PlannedStep(num_ranks, machine_of("h100"), step.seconds, (step,))

    monkeypatch.setattr("shoal.planner.doctor.dry_run_model", dry)
    found = diagnose(a_run(tmp_path, {"zero_optimization": {"stage": 1}}, 8), "h100")
    assert keys(found) == ["stage"] * fits
    assert ("a rank would need 60 GiB of 79.2 GiB" in str(found)) is fits
    assert found.nbytes == 1 << 30


def test_a_wait_that_was_measured_is_the_figure(tmp_path: Path) -> None:
    times = {"forward": [10.0] * 2, "backward": [30.0] * 2, "reduce": [25.0] * 2, "step": [8.0] * 2, "data": [0.1] * 2}
    log = [started(0.0), sections(10.0, 100, step=5.0), ranks(3, **times)]
    _, config, num_ranks, machine = CAUSES["small buckets that do not overlap"]
    found = diagnose(a_run(tmp_path, config, num_ranks, *log), machine)
    assert found.seconds == 0.05
    assert found.shares["reduce"] == pytest.approx(25 / 48.1)
    (change,) = [each for each in found.changes if "zero_optimization.reduce_bucket_size" in each.keys]
    assert change.why.startswith("52 % of the step waits for gradients")
    assert "raise zero_optimization.reduce_bucket_size from 200,000 to " in str(change)
    assert any("times what was measured" in note for note in found.notes)


def test_a_change_reads_as_a_sentence() -> None:
    change = Change(0.25, {"a.b": (4, 2), "c": (False, True), "d": (None, None)}, "why")
    assert str(change) == "why: lower a.b from 4 to 2 and set c to true and leave d out, -25.0 %"


GOOD = {"forward": [9.0] * 4, "backward": [21.0] * 4, "reduce": [2.0] * 4, "step": [3.0] * 4}


def test_a_good_run_has_no_findings(tmp_path: Path) -> None:
    log = [started(0.0), ranks(3, **GOOD), sections(1e5, 10_000, step=9.9e4, data=10.0), sections(1e5, 1, checkpoint=1)]
    found = diagnose(a_run(tmp_path, {}, 4, *log))
    assert found.findings == []
    assert found.notes == ["no change was predicted: give --machine; `shoal calibrate` measures a machine."]


def test_a_slow_data_source_is_found(tmp_path: Path) -> None:
    log = [started(0.0), sections(100.0, 100, step=97.0, data=3.0)]
    (finding,) = diagnose(a_run(tmp_path, {}, 4, *log)).findings
    assert finding.startswith("3.0 % of the time is the script's own work between steps")
    assert finding.endswith("at most -3.0 %")
    log.append({"time": 100.0, "event": "sources", "step": 53, "seconds": {"notes": 0.5, "s3://books": 1.5}})
    (finding,) = diagnose(a_run(tmp_path, {}, 4, *log)).findings
    assert "between steps (of reading, 75% is 's3://books'): let" in finding
    log.append(ranks(53, **GOOD, data=[0.1] * 4))  # of steps alone: without evaluations and checkpoints
    assert diagnose(a_run(tmp_path, {}, 4, *log)).findings == []


def test_a_slow_rank_is_named_and_one_that_waits_is_not(tmp_path: Path) -> None:
    slow = {"backward": [21.0, 21.0, 28.0, 21.0], "reduce": [9.0, 9.0, 2.0, 9.0]}
    log = [started(0.0), *(ranks(step, **{**GOOD, **slow}) for step in (3, 53, 103))]
    (finding,) = diagnose(a_run(tmp_path, {}, 4, *log)).findings
    assert finding.startswith("rank 2 works 35.0 ms of a step, the others 21.0 ms")
    assert finding.endswith("at most -40 %")
    waits = {**GOOD, "backward": [30.0, 21.0, 21.0, 21.0], "reduce": [11.0, 2.0, 2.0, 2.0]}
    log = [started(0.0), *(ranks(step, **waits) for step in (3, 53, 103))]
    assert diagnose(a_run(tmp_path, {}, 4, *log)).findings == []


def test_a_rank_of_a_pipeline_is_compared_with_its_stage_and_a_stage_with_the_others(tmp_path: Path) -> None:
    def findings(forward: list[float], stages: list[int]) -> Any:
        rows = [{**ranks(step, **{**GOOD, "forward": forward}), "stages": stages} for step in (3, 53, 103)]
        return diagnose(a_run(tmp_path, {}, 4, started(0.0), *rows)).findings

    (finding,) = findings([9.0, 9.0, 29.0, 9.0], [0, 1, 0, 1])
    assert finding.startswith("rank 2 works ")
    (finding,) = findings([9.0, 29.0, 9.0, 29.0], [0, 1, 0, 1])
    assert finding.startswith("pipeline stage 1 (ranks 1, 3) works ") and "change pipeline.partition" in finding
    assert findings([9.0, 9.0, 9.0, 9.0], [0, 1, 0, 1]) == []


def test_a_rank_that_is_slow_once_is_no_finding(tmp_path: Path) -> None:
    rows = [{**GOOD, "forward": [9.0 + 20 * (rank == at) for rank in range(4)]} for at in range(4)]
    log = [started(0.0), *(ranks(50 * at + 3, **row) for at, row in enumerate(rows))]
    assert diagnose(a_run(tmp_path, {}, 4, *log)).findings == []


def test_checkpoints_too_often_are_found_with_the_interval_of_young_and_daly(tmp_path: Path) -> None:
    saves = [line for at in range(10) for line in
             (sections(110.0 * at + 100, 100 * at + 100, step=100.0),
              sections(110.0 * at + 110, 100 * at + 100, checkpoint=10.0))]  # fmt: skip
    (finding,) = diagnose(a_run(tmp_path, {}, 4, started(0.0), *saves)).findings
    assert finding.startswith("a checkpoint of 10.0 s every 100 s, with 0 failures: save every 29,99")  # sqrt(2 C M)
    assert "about 29,99" in finding  # a step takes a second
    assert finding.endswith("-9.0 %")


def test_restarts_are_found_with_what_they_cost(tmp_path: Path) -> None:
    first = [started(0.0), sections(103.0, 100, step=100.0)]
    second = [started(150.0), sections(153.0, 0, data=0.1), sections(1153.0, 1000, step=1000.0)]
    findings = diagnose(a_run(tmp_path, {}, 4, *first, *second)).findings
    assert len(findings) == 1
    assert findings[0].startswith("1 restart, after steps 100, took lost progress 8.7 %, recovery 4.1 %")


def test_the_machine_is_the_runs_gpu(tmp_path: Path) -> None:
    found = diagnose(a_run(tmp_path, {}, 1, device="NVIDIA A100-SXM4-80GB"))
    assert found.machine == "a100-80g"
    with pytest.raises(UsageError, match="no figures of a machine 'abacus'"):
        diagnose(tmp_path, "abacus")


def test_a_run_that_does_not_say_its_model_is_read_all_the_same(tmp_path: Path) -> None:
    RunRecord("mine", environment={"ranks": 2}).save(tmp_path)
    assert "no change was predicted: the run does not say its model." in diagnose(tmp_path, "h100").notes


def test_the_command_prints_it_as_text_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path, {}, 4, started(0.0), sections(100.0, 100, step=97.0, data=3.0))
    doctor(tmp_path)
    assert capsys.readouterr().out.startswith("measured: 970.0 ms a step\n3.0 % of the time")
    doctor(tmp_path, json=True)
    assert json.loads(capsys.readouterr().out)["seconds"] == 0.97
