"""The benchmarks' own arithmetic, and that their processes start, answer and end."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import attention, checkpoint, data_wait, experts, monitoring, parallel, parallel_bytes, pipeline
from benchmarks.arena import ROOT, Result, table
from benchmarks.compare_commits import Measured, compare, extract, show, summary
from benchmarks.contenders import Task
from benchmarks.memory import formula_bytes
from benchmarks.offload import TrainingPlan, num_parameters, run

pytestmark = pytest.mark.timeout(120)  # contenders are processes
WITH_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
WITH_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def test_the_memory_formula_is_the_papers() -> None:
    # 7.5 billion parameters on 64 ranks: figure 1 of arXiv:1910.02054, in GB.
    figures = [round(formula_bytes(stage, 7_500_000_000, 64, "bf16") / 1e9, 1) for stage in range(4)]
    assert figures == [120.0, 31.4, 16.6, 1.9]


def test_quiet_steps_count_alone_where_there_are_enough() -> None:
    few = Result("x", quiet=[1.0, 1.0], loud=[3.0, 3.0, 3.0])
    many = Result("x", quiet=[1.0] * 5, loud=[3.0] * 20)
    assert few.as_dict(2.0)["ms"] == 3000.0
    assert many.as_dict(2.0)["ms"] == 1000.0
    assert many.as_dict(2.0)["ratio"] == 0.5


def test_a_table_keeps_names_left_and_numbers_right() -> None:
    assert table([["name", "ms"], ["plain", "7.0"]]) == "name    ms\n-----  ---\nplain  7.0"


@pytest.mark.gloo
def test_experts_agree_with_their_peers() -> None:
    sizes = experts.Sizes(hidden=16, inner=32, tokens=24)
    cases = ["overlap", *(["deepspeed"] if WITH_DEEPSPEED else []), *(["transformers"] if WITH_TRANSFORMERS else [])]
    rows = experts.run(cases, sizes, rounds=2)
    assert [row["case"] for row in rows] == cases
    assert [row for row in rows if "error" in row] == []
    assert all(row["fullest"] >= 1 for row in rows)


@pytest.mark.gloo
def test_every_case_of_the_parallel_benchmark_agrees_with_its_peer() -> None:
    shape = vars(parallel.Shape(layers=1, hidden=32, heads=4, kv_heads=2, vocab=64, batch=2, length=8))
    cases = [case for case in parallel.CASES if WITH_DEEPSPEED or not case.startswith("AutoTP")]
    rows = parallel.run(argparse.Namespace(cases=cases, ranks=2, rounds=2, **shape))
    assert [row["case"] for row in rows] == cases
    assert [row for row in rows if "error" in row] == []
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.gloo
def test_the_contenders_of_the_pipeline_benchmark_agree(tmp_path: Path) -> None:
    out = tmp_path / "pipeline.json"
    sizes = ["--layers", "2", "--hidden", "32", "--length", "4", "--batch", "1", "--micro", "3"]
    pipeline.main(["--ranks", "2", "--rounds", "2", "--contenders", "shoal-1", "torch", *sizes, "--out", str(out)])
    rows = json.loads(out.read_text())["ranks"]["2"]
    assert [row["contender"] for row in rows] == ["shoal-1", "torch"]
    assert [row for row in rows if "error" in row] == []
    assert rows[1]["ratio"] > 0


@pytest.mark.gloo
def test_the_bubble_of_a_sleeping_pipeline_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.main(["--ranks", "2", "--rounds", "1", "--micro", "2", "--bubble", "--seconds", "0", "--schedules", "zbv"])
    assert "zbv (own time)" in capsys.readouterr().out


def test_the_largest_model_fills_both_memories() -> None:
    plan = TrainingPlan("", device=4, state=12, host=16, config={})
    assert plan.best(40e9, 1e15) == (10e9, 1.0)  # the device stores parameters and gradients alone
    numel, ratio = plan.best(140e9, 120e9)
    assert numel * (4 + (1 - ratio) * 12) == pytest.approx(140e9)
    assert numel * ratio * 16 == pytest.approx(120e9)
    from shoal.models.gpt import GPTConfig

    task = Task(num_layers=3, hidden_size=64, num_heads=2, vocab_size=100)
    assert num_parameters(task) == GPTConfig(100, 8, 3, 64, 2, tied=False).num_parameters()


def test_a_phase_for_which_no_time_is_left_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(device="cpu", phases=["disk"], minutes=0.0, folder=tmp_path, out=None)
    assert "no time is left" in run(arguments)["phases"]["disk"]["error"]
    assert "not measured" in capsys.readouterr().out


@pytest.mark.gloo
def test_the_checkpoint_benchmark_saves_and_loads_small(tmp_path: Path) -> None:
    arguments = argparse.Namespace(ranks=2, layers=1, hidden=32, folder=tmp_path)
    written, saved = checkpoint.run("write", arguments), checkpoint.run("shoal-3-async", arguments)
    assert saved.keys() == {"step", "save", "next", "over", "gigabytes"}
    for key in ("save", "gigabytes"):
        assert len(saved[key]) == len(written[key]) == checkpoint.REPEATS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gloo
def test_two_versions_of_shoal_are_compared_in_one_run(tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(ROOT / "shoal", old / "shoal", ignore=shutil.ignore_patterns("__pycache__"))
    task = Task(small_layers=4, more={"gradient_clipping": 1.0})
    roots = {"old": old, "new": ROOT}
    row = compare("fp32-3-disk", task, roots, tmp_path / "case", ranks=1, rounds=2, steps=1, checkpoints=1)
    assert "error" not in row, row["error"]
    assert row["differences"] == []
    assert row["step"] > 0 and row["save"] > 0 and row["load"] > 0
    assert row["peak"] == pytest.approx(1, abs=0.2)
    roots["old"] = tmp_path
    missing = compare("fp32-0", task, roots, tmp_path / "other", ranks=1, rounds=1, steps=1, checkpoints=0)
    assert f"the old version imports shoal from ['{ROOT}']" in missing["error"]


def test_a_bit_that_differs_between_two_versions_is_named() -> None:
    old = Measured([1.0], losses=[["0x1", "0x2"], ["0x5", "0x6"]], parameters={"a": "1", "b": "2"})
    new = Measured([2.0], losses=[["0x1", "0x2"], ["0x5", "0x7"]], parameters={"a": "1", "b": "3"})
    row = summary(old, new)
    assert row["differences"] == ["loss of rank 1 in step 2: 0x6, now 0x7", "parameter b"]
    assert show({"fp32-3": row}).splitlines()[2].split()[:4] == ["fp32-3", "1000.0", "2000.0", "2.000"]
    assert show({"fp32-3": row}).count("differ") == 2


def test_the_package_of_an_old_commit_is_extracted(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / "shoal").mkdir(parents=True)
    source = repository / "shoal" / "__init__.py"
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    for text in ("first", "second"):
        source.write_text(text)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", text], check=True)
    assert (extract("HEAD~1", tmp_path / "old", repository) / "shoal" / "__init__.py").read_text() == "first"
    with pytest.raises(SystemExit, match="no-such-commit"):
        extract("no-such-commit", tmp_path / "none", repository)


def test_the_attention_benchmark_measures_every_contender_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That the contenders' gradients agree is asserted by each rank."""
    out = tmp_path / "attention.json"
    names = [name for name in attention.CONTENDERS if WITH_DEEPSPEED or name != attention.DEEPSPEED]
    shape = ["--positions", "64", "--heads", "2", "--head-size", "8"]
    attention.main([*shape, "--contenders", *names, "--rounds", "2", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["contender"] for row in rows] == names
    assert all(row["least_seconds"] > 0 and row["least_processor_seconds"] > 0 for row in rows)
    assert "torch-all-to-all" in capsys.readouterr().out


def test_the_table_of_tensor_parallel_bytes_has_every_kind_that_fits_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That the formulas are what 4 ranks receive is asserted by the benchmark."""
    out = tmp_path / "bytes.json"
    parallel_bytes.main(["--ranks", "4", "64", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    line = ["1d", "1d-sequence"]
    assert [row["kind"] for row in rows] == [*line, "2d", "2.5d", *line, "2d", "2.5d", "3d"]
    received = {row["kind"]: row["received"] for row in rows if row["ranks"] == 64}
    assert received["3d"] < received["2.5d"] < received["2d"] < received["1d"] < received["1d-sequence"]
    assert "8x8x1" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_what_a_step_waits_for_its_data_is_measured_in_pairs(source: str, tmp_path: Path) -> None:
    found = data_wait.measure(
        tmp_path, source, model="nano", length=32, micro=1, tokens=100_000, workers=0, blocks=3, steps=2
    )
    assert found["pairs"] == 3
    assert 0 < found["wait_percent"] <= found["greatest_wait_percent"] < 100
    assert found["step_ms"] > 0 < found["ratio"]
    assert not list(tmp_path.iterdir())


def test_what_monitoring_costs_is_measured_in_pairs(tmp_path: Path) -> None:
    found = monitoring.measure(tmp_path, model="nano", stage=1, micro=1, seconds=0, steps=2)
    assert found["pairs"] == 3
    assert found["monitoring_us"] > 0 < found["monitoring_percent"]
    assert 0 < found["ring_us"] < 1000 and found["collectives_of_a_step"] > 0
    assert 0 < found["least"] <= found["ratio"] <= found["greatest"]
    assert found["with_ms"] > 0 < found["without_ms"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))  # of one engine: two to warm up, and three times two
    events = [json.loads(line)["event"] for line in (tmp_path / "goodput.jsonl").read_text().splitlines()]
    assert events.count("start") == events.count("ranks") == 1
    assert sum(path.suffix == ".csv" for path in tmp_path.iterdir()) == 5
