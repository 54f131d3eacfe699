"""The load of experts as events of a monitor, and as a picture and a table of the report.

experts/<layer>/imbalance   the most loaded expert's tokens over the mean of the layer
experts/<layer>/load/<i>    expert i's tokens over that mean: 1 where the layer is balanced
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shoal.observe.chart import card, short, table
from shoal.observe.monitor import Event

Row = TypeVar("Row")
PREFIX = "experts/"
_LOAD = re.compile(rf"{PREFIX}(.*)/load/(\d+)")
_MAX_SPANS = 4
_LABELS, _GAP, _WIDTH, _TOP, _BOTTOM = 150, 14, 1060, 20, 18
_LEVELS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # bounds of the colours, in loads over the mean
_LEGEND = ("no token", "below 1/4", "1/4 to 1/2", "1/2 to 0.8", "0.8 to 1.25", "1.25 to 2", "2 to 4", "4 and more")


def load_events(tokens: Mapping[str, Sequence[float]], step: int) -> list[Event]:
    """The events of one step.

    Args:
        tokens: by layer, the tokens of each expert.
    """
    events: list[Event] = []
    for layer, counts in tokens.items():
        mean = sum(counts) / len(counts)
        loads = [count / mean if mean else 1.0 for count in counts]
        events.append((f"{PREFIX}{layer}/imbalance", max(loads), step))
        events += [(f"{PREFIX}{layer}/load/{expert}", load, step) for expert, load in enumerate(loads)]
    return events


@dataclass(frozen=True)
class LoadSpan:
    """The mean loads over the mean, by layer and expert, of some of the steps."""

    first: int
    last: int
    loads: Mapping[str, Sequence[float]]


def spans(series: Mapping[str, Sequence[tuple[int, float]]]) -> list[LoadSpan]:
    """The run cut into at most ``_MAX_SPANS`` spans with equally many of the steps that have loads."""
    loads: dict[str, dict[int, dict[int, float]]] = {}
    for name, points in series.items():
        match = _LOAD.fullmatch(name)
        if match is not None:
            loads.setdefault(match[1], {})[int(match[2])] = dict(points)
    steps = sorted({step for experts in loads.values() for points in experts.values() for step in points})
    return [
        LoadSpan(
            part[0],
            part[-1],
            {
                layer: [
                    _mean([experts[i][s] for s in part if s in experts.get(i, ())]) for i in range(max(experts) + 1)
                ]
                for layer, experts in sorted(loads.items(), key=lambda item: _by_numbers(item[0]))
            },
        )
        for part in cut(steps)
    ]


def cut(rows: Sequence[Row]) -> list[Sequence[Row]]:
    """At most ``_MAX_SPANS`` parts of as many rows each."""
    num = min(_MAX_SPANS, len(rows))
    return [rows[index * len(rows) // num : (index + 1) * len(rows) // num] for index in range(num)]


def draw_load(
    load_spans: Sequence[LoadSpan],
    *,
    bounds: Sequence[float] = _LEVELS,
    label: str = "load of the experts, by layer and expert",
) -> str:
    """A heat map of layers (rows) and experts (columns) for each span, side by side, as ``<svg>``.

    Args:
        bounds: of the colours.
        label: what it shows, in words.
    """
    layers = list(load_spans[0].loads)
    columns = max(len(loads) for loads in load_spans[0].loads.values())
    width = (_WIDTH - _LABELS - _GAP * len(load_spans)) / len(load_spans)
    cell, row = width / columns, max(3.0, min(18.0, 480 / len(layers)))
    height = _TOP + row * len(layers) + _BOTTOM
    parts: list[str] = []
    if row >= 9:
        parts += [
            f'<text class="tick" x="{_LABELS - 8}" y="{_TOP + row * (index + 0.5) + 4:.1f}" text-anchor="end">'
            f"{html.escape(layer if len(layer) <= 22 else '…' + layer[-21:])}</text>"
            for index, layer in enumerate(layers)
        ]
    for index, span in enumerate(load_spans):
        left = _LABELS + index * (width + _GAP)
        steps = f"step {span.first:,}" if span.first == span.last else f"steps {span.first:,} to {span.last:,}"
        parts.append(f'<text class="tick" x="{left:.1f}" y="{_TOP - 7}">{steps}</text>')
        paths: dict[int, list[str]] = {}
        for line, layer in enumerate(layers):
            for expert, load in enumerate(span.loads[layer]):
                at = f"M{left + cell * expert:.1f} {_TOP + row * line:.1f}h{cell:.2f}v{row:.1f}h-{cell:.2f}z"
                paths.setdefault(level(load, bounds), []).append(at)
        parts += [f'<path class="load-{number}" d="{"".join(at)}"/>' for number, at in sorted(paths.items())]
        parts += [
            f'<text class="tick" x="{left + cell * (expert + 0.5):.1f}" y="{height - 4:.1f}" text-anchor="middle">'
            f"{expert}</text>"
            for expert in (0, columns - 1)[: min(2, columns)]
        ]
    return (
        f'<svg class="loads" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )


def load_section(series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """The report's section; empty where no load was logged."""
    load_spans = spans(series)
    if not load_spans:
        return ""
    headers = ("layer", "experts", "most loaded, first", "most loaded, last", "least loaded, last", "no token, last")
    rows = table("ledger", headers, [_row(layer, load_spans) for layer in load_spans[0].loads])
    return card(
        "Load of the experts",
        f'<div class="scroll">{draw_load(load_spans)}{rows}</div>',
        "tokens over the mean of the layer; a row is a layer, a column an expert",
        legend=heat_legend(_LEGEND),
    )


def heat_legend(texts: Sequence[str]) -> str:
    """What each colour of a heat map means."""
    items = "".join(f'<li><i class="load-{number}"></i>{text}</li>' for number, text in enumerate(texts))
    return f'<ul class="legend">{items}</ul>'


def level(load: float, bounds: Sequence[float] = _LEVELS) -> int:
    """Which of the colours a load over the mean has.

    >>> [level(load) for load in (0, 0.1, 0.7, 1, 1.3, 9)]
    [0, 1, 3, 4, 5, 7]
    """
    return 0 if load <= 0 else 1 + sum(load >= bound for bound in bounds)


def _row(layer: str, load_spans: Sequence[LoadSpan]) -> list[str]:
    first, last = load_spans[0].loads[layer], load_spans[-1].loads[layer]

    def one(loads: Sequence[float], expert: int) -> str:
        return f"{short(loads[expert])} (expert {expert})"

    return [
        layer,
        str(len(last)),
        one(first, max(range(len(first)), key=first.__getitem__)),
        one(last, max(range(len(last)), key=last.__getitem__)),
        one(last, min(range(len(last)), key=last.__getitem__)),
        str(sum(load == 0 for load in last)),
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
