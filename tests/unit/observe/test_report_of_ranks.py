"""The report of a long run on 8 ranks, with failures, and of two runs side by side."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.app import report
from shoal.errors import UsageError
from shoal.observe.chart import MAX_POINTS
from shoal.observe.compare import write_comparison
from shoal.observe.goodput import RankTimesRow, RunTime, Start, read_goodput
from shoal.observe.rank_page import ranks_section, starts_section
from shoal.observe.report import RunRecord, render, write_report

PHASES = {"forward": 80.0, "backward": 190.0, "reduce": 30.0, "step": 20.0, "data": 3.0}


def a_run(folder: Path, num_steps: int, *, stage: int = 2, loss: float = 3.0, peak: int = 4 << 30) -> Path:
    """A run with a failure in its middle, of 8 ranks, with 4 layers of 8 experts; rank 5 is slow until then."""
    folder.mkdir(exist_ok=True)
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 8}
    RunRecord("run", config=config, environment={"device": "cuda:0", "ranks": 8}).save(folder)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            values = {"train/loss": loss + math.sin(step) / 10, "train/tokens_per_second": 1e5 + step}
            values |= {"train/gradient_norm": 1.0, "train/learning_rate": 1e-3, "memory/peak_bytes": peak}
            for layer in range(4):
                values |= {f"experts/layers.{layer}/load/{expert}": 1.0 + expert / 8 for expert in range(8)}
            file.write(json.dumps({"step": step, "time": 0.1 * step, **values}) + "\n")
    half = num_steps // 2
    with (folder / "goodput.jsonl").open("w") as file:
        at = 1000.0
        for first, last, is_slow in ((0, half, True), (half - 10, num_steps, False)):
            lines: list[dict[str, Any]] = [{"event": "start", "began": at, "init": 5.0, "step": first, "ranks": 8}]
            lines.append({"event": "sections", "step": first, "seconds": {"data": 1.0}})
            for step in range(first + 3, last, 50):
                slow = 1.4 if is_slow else 1.0
                ranks = {phase: [ms] * 5 + [ms * slow] + [ms] * 2 for phase, ms in PHASES.items()}
                lines.append({"event": "ranks", "step": step, "ms": ranks})
            lines.append({"event": "sections", "step": last, "seconds": {"step": 100.0}})
            for line in lines:
                file.write(json.dumps({"time": at + (106.0 if line is lines[-1] else 6.0), **line}) + "\n")
            at += 200.0
    return folder


def rows_of(page: str, title: str) -> list[list[str]]:
    """The cells of the first table in the card with this title."""
    match = re.search(rf"<h2>{title}.*?<table.*?</table>", page, flags=re.DOTALL)
    assert match is not None
    lines = re.findall(r"<tr.*?</tr>", match[0])
    return [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[dh]>.*?</t[dh]>", line)] for line in lines]


def test_the_report_of_10_000_steps_on_8_ranks_is_small(tmp_path: Path) -> None:
    run = a_run(tmp_path / "long", 10_000)
    sizes = {path.name: path.stat().st_size for path in (write_report(run), write_comparison(run, run))}
    assert max(sizes.values()) < 1_000_000, sizes  # bytes; the goal is 3 MB
    page = (run / "report.html").read_text()
    assert all(len(each) <= MAX_POINTS + 2 for each in points_of(page))
    assert page.count("<path") + page.count("<tr") < 500  # elements that a browser lays out


def points_of(page: str) -> list[list[Any]]:
    series = [json.loads(text.replace("&quot;", '"')) for text in re.findall(r'data-series="([^"]*)"', page)]
    return [line["points"] for chart in series for line in chart]


def test_a_slow_rank_is_seen_in_the_map_and_in_the_table(tmp_path: Path) -> None:
    page = render(RunRecord("run"), {}, read_goodput(a_run(tmp_path, 1000) / "goodput.jsonl"))
    table = rows_of(page, "Ranks")
    assert table[0] == ["phase", "mean, ms", "slowest", "fastest"]
    assert table[1] == ["forward", "81.9", "95.2 (rank 5)", "80.0 (rank 0)"]
    assert [row[0] for row in table[1:]] == list(PHASES)
    maps = re.findall(r'<svg class="loads"[^>]*times of the ranks.*?</svg>', page, flags=re.DOTALL)
    cells: Counter[str] = Counter()
    for level, path in re.findall(r'<path class="load-(\d)" d="([^"]*)"', maps[0]):
        cells[level] += path.count("M")
    slow = 2 * len(PHASES)  # rank 5, in two of four parts of the run
    assert cells == {"4": 4 * 8 * len(PHASES) - slow, "6": slow}


def test_ranks_of_starts_with_another_number_of_ranks_are_left_out() -> None:
    rows = [RankTimesRow(3, {"forward": [1.0] * 4}), RankTimesRow(53, {"forward": [1.0, 3.0]})]
    page = ranks_section(rows)
    assert rows_of(page, "Ranks")[1] == ["forward", "2.0", "3.0 (rank 1)", "1.0 (rank 0)"]
    assert "1 step" in page
    assert ranks_section([]) == ""


def test_failures_and_restarts_are_on_the_time_line(tmp_path: Path) -> None:
    page = render(RunRecord("run"), {}, read_goodput(a_run(tmp_path, 1000) / "goodput.jsonl"))
    assert rows_of(page, "Starts") == [
        ["start", "began", "ended", "steps", "steps lost", "ranks"],
        ["1", "0 s", "106 s", "0 to 500", "10", "8"],
        ["2", "200 s", "306 s", "490 to 1,000", "", "8"],
    ]
    bars = [
        (float(x), float(width)) for x, width in re.findall(r'class="start" x="([\d.]+)" y="4" width="([\d.]+)"', page)
    ]
    assert len(bars) == 2
    assert bars[0][0] + bars[0][1] < bars[1][0]  # the gap is the recovery
    assert bars[1][0] + bars[1][1] == pytest.approx(1052, abs=0.2)


def test_a_run_of_one_start_has_no_time_line_and_one_of_many_has_a_short_one() -> None:
    def starts(num: int) -> Sequence[Start]:
        return [Start(10.0 * at, 10.0 * at + 9, 1.0, 8, at) for at in range(num)]

    assert starts_section(None) == starts_section(RunTime({}, starts(1), 1, 0)) == ""
    page = starts_section(RunTime({}, starts(5000), 1, 0))
    assert page.count('class="start"') == 200
    assert len(rows_of(page, "Starts")) == 201
    assert rows_of(page, "Starts")[-1][0] == "5000"


def test_two_runs_are_compared(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", 200)
    two = a_run(tmp_path / "two", 100, stage=3, loss=1.5, peak=2 << 30)
    page = write_comparison(one, two).read_text()
    assert (one / "compare.html").is_file()
    assert rows_of(page, "Figures") == [
        ["", "one", "two", "ratio"],
        ["training loss, last", "2.91", "1.45", "0.498"],
        ["steps", "200", "100", "0.5"],
        ["tokens a second, median", "100k", "100k", "1"],
        ["milliseconds a step", "950", "1.8k", "1.89"],
        ["goodput", "62.1%", "58.8%", "0.947"],
        ["peak memory of rank 0", "4 GiB", "2 GiB", "0.5"],
    ]
    assert [rows_of(page, f"Ranks of {name}")[1][0] for name in ("one", "two")] == ["forward", "forward"]
    assert rows_of(page, "Settings that differ") == [
        ["setting", "one", "two"],
        ["zero_optimization.stage", "2", "3"],
    ]
    (loss,) = [
        json.loads(text.replace("&quot;", '"')) for text in re.findall(r'Loss[^"]*" data-series="([^"]*)"', page)
    ]
    assert [(line["name"], line["color"], len(line["points"])) for line in loss] == [
        ("one: training", "series-1", 200),
        ("two: training", "series-2", 100),
    ]


def test_lines_are_told_apart_without_colours(tmp_path: Path) -> None:
    page = write_comparison(a_run(tmp_path / "one", 20), a_run(tmp_path / "two", 20)).read_text()
    assert '.line[stroke="var(--series-2)"]{stroke-dasharray' in page
    assert '.legend i[style*="series-2"]{border-top-style:dashed}' in page
    assert re.search(r'class="line" d="[^"]*" stroke="var\(--series-2\)"', page)
    assert 'style="border-color:var(--series-2)"' in page


def test_equal_runs_have_no_setting_that_differs_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    one, two = a_run(tmp_path / "run", 20), a_run(tmp_path / "x" / "run", 20)
    page = write_comparison(one, two).read_text()
    assert '<p class="empty">none</p>' in page
    assert f"<th>{one}</th><th>{two}</th>" in page


def test_what_doctor_found_is_in_the_report_next_to_what_was_measured(tmp_path: Path) -> None:
    run = a_run(tmp_path, 20)
    found: dict[str, Any] = {
        "seconds": 0.5,
        "predicted": 0.4,
        "nbytes": 3 << 30,
        "machine": "h100",
        "notes": ["a note"],
    }
    found |= {"changes": [{"text": "14 % of the step waits: raise <it>, -9.0 %"}], "findings": ["rank 5 is slow"]}
    (run / "doctor.json").write_text(json.dumps(found))
    page = write_report(run).read_text()
    assert rows_of(page, "What to change") == [
        ["", "measured", "predicted", "ratio"],
        ["seconds of a step", "0.5", "0.4", "0.80"],
        ["peak memory of a rank", "4 GiB", "3 GiB", "0.75"],
    ]
    for text in ("14 % of the step waits: raise &lt;it&gt;, -9.0 %", "rank 5 is slow", "note: a note"):
        assert f"<li>{text}</li>" in page
    (run / "doctor.json").write_text(json.dumps({"changes": [], "findings": []}))
    assert "<li>Nothing is to be changed.</li>" in write_report(run).read_text()


def test_the_command_writes_one_page_or_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = a_run(tmp_path / "one", 20), a_run(tmp_path / "two", 20)
    report(one)
    report(one, two)
    assert capsys.readouterr().out.split() == [str(one / "report.html"), str(one / "compare.html")]
    with pytest.raises(UsageError, match=r"holds no run\.json"):
        report(one, tmp_path)
