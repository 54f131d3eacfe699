"""The report: all in one file, all series in it, whatever was logged."""

from __future__ import annotations

import html
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.observe.chart import Chart, Line, draw, short, smooth, thin, ticks
from shoal.observe.monitor import JsonLinesWriter, Monitor
from shoal.observe.report import RunRecord, render, write_report

SERIES = {
    "train/loss": [(1, 5.5), (2, 4.0), (3, 3.0)],
    "validation/loss": [(0, 5.6), (3, 3.2)],
    "train/tokens_per_second": [(1, 100.0), (2, 120.0), (3, 110.0)],
    "train/gradient_norm": [(1, 2.0), (2, math.nan), (3, 1.0)],
    "train/learning_rate": [(1, 1e-4), (2, 1e-3), (3, 5e-4)],
    "memory/allocated_bytes": [(1, 2.0**29), (3, 2.0**29)],
    "my/own": [(1, 0.0), (3, 1.0)],
}
RECORD = RunRecord(
    title="GPT tiny, ZeRO-3",
    facts=[("steps", "3")],
    config={"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    ledger=[["parameter", "device", "1 MiB", "2.00"], ["total", "", "1 MiB", "2.00"]],
    run={"started": "2026-11-23 00:33:10 UTC", "command": "shoal train --steps 3"},
    placement=[["unit", "parameter, stored"], ["blocks.0 .. blocks.<3>", "Shard"]],
    prompt="if a <",
    sample=" b & c:",
    messages=["--stage 3 overrides zero_optimization.stage = 2 of ds.json."],
)


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]


def test_every_series_is_a_line_of_a_chart() -> None:
    names = [line["name"] for svg in svgs(render(RECORD, SERIES)) for line in json.loads(svg.attrib["data-series"])]
    assert names == ["training", "validation", "tokens/s", "norm", "learning rate", "allocated", "my/own"]


def test_the_page_asks_for_nothing_outside_of_itself() -> None:
    page = render(RECORD, SERIES)
    assert not re.search(r"(https?:)?//[\w.]+", page)
    assert not re.search(r"\b(src|href)=|@import|url\(", page)


def test_what_was_recorded_is_on_the_page_and_escaped() -> None:
    page = render(RECORD, SERIES).replace("<wbr>", "")
    for text in (
        "GPT tiny, ZeRO-3",
        "zero_optimization.stage",
        "bf16.enabled",
        "2026-11-23 00:33:10 UTC",
        "shoal train --steps 3",
        "<tr><th>unit</th><th>parameter, stored</th></tr>",
        "<tr><td>blocks.0 .. blocks.&lt;3&gt;</td><td>Shard</td></tr>",
        "1 MiB",
        "overrides",
    ):
        assert text in page
    assert f"<mark>{html.escape('if a <')}</mark>{html.escape(' b & c:')}" in page


def test_a_value_that_is_not_finite_is_a_gap_in_the_line() -> None:
    page = draw(Chart("norm", "", [Line("norm", SERIES["train/gradient_norm"], "series-1")]))
    path = re.search(r'class="line" d="([^"]*)"', page)
    assert path is not None
    assert re.sub(r"[-\d. ]+", "", path[1]) == "MM"
    assert "nan" not in page.lower()


def test_a_record_and_a_log_make_the_report_and_come_back(tmp_path: Path) -> None:
    RECORD.save(tmp_path)
    with Monitor([JsonLinesWriter(tmp_path / "metrics.jsonl")]) as monitor:
        monitor.write_events([("train/loss", 1.25, 4)])
    page = write_report(tmp_path).read_text()
    assert "1.25" in page
    assert RunRecord.load(tmp_path).title == RECORD.title
    assert page.startswith("<!doctype html>")


def test_a_run_without_a_log_yet_has_a_report(tmp_path: Path) -> None:
    RECORD.save(tmp_path)
    assert "<svg" not in write_report(tmp_path).read_text()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no run\.json"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text('{"no": 1}')
    with pytest.raises(UsageError, match="not a run's record"):
        write_report(tmp_path)


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(0, 0.0), (5, 0.0)]])
def test_a_single_point_and_a_flat_line_can_be_drawn(points: list[tuple[float, float]]) -> None:
    (svg,) = svgs(draw(Chart("flat", "", [Line("x", points, "series-1")])))
    assert svg.attrib["viewBox"] == "0 0 510 210"


def test_nothing_finite_is_said_in_words() -> None:
    assert "no values" in draw(Chart("x", "", [Line("x", [(1, math.nan)], "series-1")]))


def test_long_series_are_thinned_and_keep_their_ends() -> None:
    points = [(float(step), float(step % 7)) for step in range(10_000)]
    thinned = thin(points)
    assert len(thinned) <= 702
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    assert smooth([(0, 5.0), (1, 5.0), (2, 5.0)]) == [(0, 5.0), (1, 5.0), (2, 5.0)]
    assert smooth([(0, 4.0), (1, 2.0)])[0] == (0, 4.0)


def test_ticks_are_round_and_cover_the_range() -> None:
    assert ticks(0.13, 2.9, 5) == [0.0, 1.0, 2.0, 3.0]
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(3, 3, 5) == [3]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.00031, "3.1e-4"), (2.345, "2.35"), (15_300.0, "15.3k"), (2.5e6, "2.5M"), (-0.5, "-0.5")],
)
def test_numbers_read_short(value: float, text: str) -> None:
    assert short(value) == text


def test_what_is_preformatted_or_laid_out_on_the_page_can_wrap() -> None:
    page = render(RECORD, {})
    assert re.findall(r"<pre[^>]*>", page) == ['<pre class="sample">']  # the sheet lets that one wrap
    assert "white-space:pre-wrap" in page
    facts = re.search(r"\.facts\{([^}]*)\}", page)
    assert facts is not None
    assert "flex-wrap:wrap" in facts[1]  # cells fill each row, so that none is left empty
