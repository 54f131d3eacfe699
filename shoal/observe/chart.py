"""Parts of a page: a line chart as inline SVG (colours from the style sheet, no script needed), a card, a table."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 28
MAX_POINTS = 700  # about one per pixel; more would only make the page heavy


@dataclass(frozen=True)
class Line:
    """One series.

    Args:
        color: the name of a custom property of the page, such as ``series-1``.
        is_smoothed: draw the values thin and their moving average thick.
        has_marks: a dot at each point; for series of few points.
    """

    name: str
    points: Sequence[Point]
    color: str
    is_smoothed: bool = False
    has_marks: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines that share their axes; x is the step."""

    title: str
    unit: str
    lines: Sequence[Line]
    from_zero: bool = False
    write: Callable[[float], str] | None = None  # how a value of y reads; three significant digits where None
    is_in_bytes: bool = False  # ticks are round in powers of 1,024
    width: int = 510  # in the units of the view box, about one pixel
    height: int = 210


def draw(chart: Chart) -> str:
    """The chart as ``<svg>``, with its values as JSON in ``data-series`` for a script that shows them at the pointer.

    Values that are not finite are left out, as gaps.
    """
    write = chart.write or short
    finite = [(x, y) for line in chart.lines for x, y in line.points if math.isfinite(y)]
    if not finite:
        return '<p class="empty">no values</p>'
    x_low, x_high = min(x for x, _ in finite), max(x for x, _ in finite)
    y_low, y_high = _y_range([y for _, y in finite], chart.from_zero)
    unit = 1024.0 ** math.floor(math.log(max(y_high, 1.0), 1024)) if chart.is_in_bytes else 1.0
    y_ticks = [tick * unit for tick in ticks(y_low / unit, y_high / unit, 5)]
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])
    scale_x = (chart.width - _LEFT - _RIGHT) / ((x_high - x_low) or 1.0)
    scale_y = (chart.height - _TOP - _BOTTOM) / ((y_high - y_low) or 1.0)

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - x_low) * scale_x, chart.height - _BOTTOM - (y - y_low) * scale_y

    parts: list[str] = []
    for tick in y_ticks:
        _, y = at(x_low, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{chart.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{write(tick)}</text>')
    for tick in ticks(x_low, x_high, 7):
        if x_low <= tick <= x_high and tick == int(tick):
            x, _ = at(tick, y_low)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{chart.height - 8}" text-anchor="middle">{tick:,.0f}</text>'
            )
    shown: list[dict[str, object]] = []
    for line in chart.lines:
        points = thin(line.points)
        bold = smooth(points) if line.is_smoothed else points
        if line.is_smoothed:
            parts.append(_path([at(*p) if math.isfinite(p[1]) else None for p in points], line.color, "raw"))
        parts.append(_path([at(*p) if math.isfinite(p[1]) else None for p in bold], line.color, "line"))
        if line.has_marks or len(points) == 1:
            for x, y in (at(*p) for p in points if math.isfinite(p[1])):
                parts.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="var(--{line.color})"/>')
        shown.append(
            {
                "name": line.name,
                "color": line.color,
                "points": [
                    [round(c, 1) for c in at(*p)] + [int(p[0]), write(p[1])] for p in points if math.isfinite(p[1])
                ],
            }
        )
    data = html.escape(json.dumps(shown, separators=(",", ":")), quote=True)
    title = html.escape(f"{chart.title}, {chart.unit}" if chart.unit else chart.title)
    return (
        f'<svg class="chart" viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{title}" '
        f'data-series="{data}">'
        f'{"".join(parts)}<g class="pointer"></g></svg>'
    )


def card(title: str, body: str, subtitle: str = "", *, legend: str = "", is_wide: bool = True) -> str:
    """A section with its heading. ``body`` and ``legend`` are HTML, the others text."""
    small = f" <small>{html.escape(subtitle)}</small>" if subtitle else ""
    return (
        f'<section class="card{" wide" if is_wide else ""}"><div class="head"><h2>{html.escape(title)}{small}</h2>'
        f"{legend}</div>{body}</section>"
    )


def table(
    kind: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    write: Callable[[str], str] = html.escape,
    kind_of: Callable[[Sequence[str]], str] = lambda row: "",
) -> str:
    """A table of texts.

    Args:
        write: the HTML of a text.
        kind_of: the attributes of a row's element.
    """
    head = "".join(f"<th>{write(text)}</th>" for text in headers)
    lines = (f"<tr{kind_of(row)}>{''.join(f'<td>{write(text)}</td>' for text in row)}</tr>" for row in rows)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that cover the range, about so many.

    >>> ticks(0.13, 2.9, 5)
    [0.0, 1.0, 2.0, 3.0]
    """
    span = high - low
    if span <= 0:
        return [low]
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def smooth(points: Sequence[Point]) -> list[Point]:
    """An exponential moving average that starts unbiased; its half-life, in points, is a hundredth of the series."""
    decay = 0.5 ** (1.0 / max(0.3, len(points) / 100))
    result: list[Point] = []
    total = weight = 0.0
    for x, y in points:
        if math.isfinite(y):
            total, weight = total * decay + y, weight * decay + 1.0
            result.append((x, total / weight))
        else:
            result.append((x, y))
    return result


def thin(points: Sequence[Point]) -> list[Point]:
    """At most ``MAX_POINTS`` points: means of neighbours, the first and the last kept as they are."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points)
    middle = points[1:-1]
    groups = [middle[start : start + size] for start in range(0, len(middle), size)]
    means = [(group[len(group) // 2][0], sum(y for _, y in group) / len(group)) for group in groups]
    return [points[0], *means, points[-1]]


def short(value: float) -> str:
    """Three significant digits, with k, M, G where large.

    >>> short(0.0), short(0.00031), short(2.345), short(15300)
    ('0', '3.1e-4', '2.35', '15.3k')
    """
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-2:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    for limit, factor, suffix in ((999.5, 1.0, ""), (999.5e3, 1e3, "k"), (999.5e6, 1e6, "M"), (math.inf, 1e9, "G")):
        if size < limit:
            return f"{value / factor:.3g}{suffix}"
    return str(value)


def _y_range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if from_zero:
        low = min(0.0, low)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return (low, high + pad) if from_zero else (low - pad, high + pad)
    return low, high


def _path(places: Sequence[tuple[float, float] | None], color: str, kind: str) -> str:
    commands: list[str] = []
    pen_is_down = False
    for place in places:
        if place is not None:
            commands.append(f"{'L' if pen_is_down else 'M'}{place[0]:.1f} {place[1]:.1f}")
        pen_is_down = place is not None
    return f'<path class="{kind}" d="{"".join(commands)}" stroke="var(--{color})"/>'
