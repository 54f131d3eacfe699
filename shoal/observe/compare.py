"""``compare.html``: two runs side by side. Loss curves over one another, figures with ratios, settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from shoal.observe.chart import Chart, card, short, table
from shoal.observe.goodput import RunTime
from shoal.observe.rank_page import ranks_section
from shoal.observe.report import RunRecord, Series, charts, draw_card, flatten, page, read_run
from shoal.text import format_bytes

COMPARISON_FILE = "compare.html"
_COLORS = ("series-1", "series-2")  # the second is dashed


@dataclass(frozen=True)
class _ComparedRun:
    name: str
    record: RunRecord
    series: Series
    goodput: RunTime | None


def write_comparison(first: Path, second: Path) -> Path:
    """Write ``compare.html`` into the folder of the first run; return its path.

    Raises: UsageError: one of the folders is not a run's.
    """
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    one, two = (_ComparedRun(name, *read_run(folder)) for name, folder in zip(names, (first, second), strict=True))
    sections = [
        card("Figures", _scrolling("figures", ("", *names, "ratio"), list(_figures(one, two)))),
        *(draw_card(chart) for chart in _overlaid(one, two)),
        *(ranks_section(run.goodput.ranks, f"Ranks of {run.name}") for run in (one, two) if run.goodput is not None),
        card("Settings that differ", _scrolling("cells", ("setting", *names), list(_differing(one, two)))),
    ]
    path = first / COMPARISON_FILE
    path.write_text(page(f"{names[0]} and {names[1]}", sections), encoding="utf-8")
    return path


def _scrolling(kind: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return '<p class="empty">none</p>'
    return f'<div class="scroll">{table(kind, headers, rows)}</div>'


def _figures(one: _ComparedRun, two: _ComparedRun) -> Iterator[tuple[str, str, str, str]]:
    """Label, both values, and the second over the first."""
    kinds: list[tuple[str, Callable[[_ComparedRun], float | None], Callable[[float], str]]] = [
        ("training loss, last", lambda run: _of(run, "train/loss", lambda values: values[-1]), short),
        ("validation loss, last", lambda run: _of(run, "validation/loss", lambda values: values[-1]), short),
        ("steps", lambda run: max((at[-1][0] for at in run.series.values() if at), default=None), "{:,.0f}".format),
        ("tokens a second, median", lambda run: _of(run, "train/tokens_per_second", median), short),
        ("milliseconds a step", _step_milliseconds, short),
        ("goodput", lambda run: None if run.goodput is None else run.goodput.share, "{:.1%}".format),
        ("peak memory of rank 0", lambda run: _of(run, "memory/peak_bytes", max), format_bytes),
    ]
    for label, read, write in kinds:
        values = read(one), read(two)
        shown = ["" if value is None else write(value) for value in values]
        ratio = f"{values[1] / values[0]:.3g}" if values[0] and values[1] is not None else ""
        if any(shown):
            yield label, shown[0], shown[1], ratio


def _of(run: _ComparedRun, name: str, what: Callable[[list[float]], float]) -> float | None:
    values = [value for _, value in run.series.get(name, ())]
    return what(values) if values else None


def _step_milliseconds(run: _ComparedRun) -> float | None:
    time = run.goodput
    return 1e3 * time.seconds["productive"] / time.num_steps if time is not None and time.num_steps else None


def _overlaid(one: _ComparedRun, two: _ComparedRun) -> Iterator[Chart]:
    """The charts that a run has, with the lines of both."""
    both = [{chart.title: chart for chart in charts(run.series)} for run in (one, two)]
    for title in dict.fromkeys([*both[0], *both[1]]):
        lines = [
            replace(line, name=f"{run.name}: {line.name}", color=color)
            for run, of_run, color in zip((one, two), both, _COLORS, strict=True)
            for line in (of_run[title].lines if title in of_run else ())
        ]
        yield replace(both[title not in both[0]][title], lines=lines)


def _differing(one: _ComparedRun, two: _ComparedRun) -> Iterator[tuple[str, str, str]]:
    def settings(record: RunRecord) -> Mapping[str, str]:
        parts: dict[str, Any] = {"": record.config, "model.": record.model, "run.": record.run}
        parts["environment."] = record.environment
        return {f"{prefix}{key}": text for prefix, values in parts.items() for key, text in flatten(values)}

    left, right = settings(one.record), settings(two.record)
    for key in dict.fromkeys([*left, *right]):
        if left.get(key) != right.get(key):
            yield key, left.get(key, "not set"), right.get(key, "not set")
