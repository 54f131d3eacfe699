"""Sections of the report that the log of ``goodput`` fills: starts on the time line, times of ranks by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from shoal.observe.chart import card, table
from shoal.observe.expert_load import LoadSpan, cut, draw_load, heat_legend
from shoal.observe.goodput import RankTimesRow, RunTime, Start
from shoal.text import counted

_BOUNDS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)  # of the colours, in a rank's time over the ranks' mean
_LEGEND = ("none", "below 0.5", "0.5 to 0.8", "0.8 to 0.95", "0.95 to 1.05", "1.05 to 1.25", "1.25 to 2", "2 and more")
_WIDTH, _LEFT, _BAR, _MOST_BARS = 1060, 8, 26, 200


def ranks_section(rows: Sequence[RankTimesRow], title: str = "Ranks") -> str:
    """A heat map of phases and ranks over the run, and a table of milliseconds; empty without rows."""
    if not rows:
        return ""
    rows = [row for row in rows if len(_ranks(row)) == len(_ranks(rows[-1]))]  # of the ranks that there are at the end
    means = _means(rows)
    parts = [LoadSpan(part[0].step, part[-1].step, _over_mean(_means(part))) for part in cut(rows)]
    lines = [
        (phase, f"{fmean(each):.1f}", _one(each, max(each)), _one(each, min(each))) for phase, each in means.items()
    ]
    drawn = draw_load(parts, bounds=_BOUNDS, label="times of the ranks, by phase and rank")
    cells = table("figures", ("phase", "mean, ms", "slowest", "fastest"), lines)
    return card(
        title,
        f'<div class="scroll">{drawn}{cells}</div>',
        f"milliseconds over the mean of the ranks; a row is a phase, a column a rank; {counted(len(rows), 'step')}",
        legend=heat_legend(_LEGEND),
    )


def _ranks(row: RankTimesRow) -> Sequence[float]:
    return next(iter(row.milliseconds.values()), ())


def _means(rows: Sequence[RankTimesRow]) -> dict[str, list[float]]:
    """By phase, the mean of each rank."""
    phases = dict.fromkeys(phase for row in rows for phase in row.milliseconds)
    zeros = [0.0] * len(_ranks(rows[0]))
    return {
        phase: [fmean(column) for column in zip(*(row.milliseconds.get(phase, zeros) for row in rows), strict=True)]
        for phase in phases
    }


def _over_mean(phases: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {phase: [value / (fmean(ranks) or 1.0) for value in ranks] for phase, ranks in phases.items()}


def _one(ranks: Sequence[float], value: float) -> str:
    return f"{value:.1f} (rank {list(ranks).index(value)})"


def starts_section(time: RunTime | None) -> str:
    """The starts of a run on a line of time, with the gaps between them; empty for a run of one start."""
    if time is None or time.num_starts < 2:
        return ""
    starts = time.starts
    began, whole = starts[0].began, max(starts[-1].ended - starts[0].began, 1e-9)
    scale = (_WIDTH - 2 * _LEFT) / whole
    bars = "".join(_bar(number, start, began, scale) for number, start in enumerate(starts[:_MOST_BARS], 1))
    ends = "".join(
        f'<text class="tick" x="{x}" y="{_BAR + 22}" text-anchor="{anchor}">{text}</text>'
        for x, anchor, text in ((_LEFT, "start", "0 s"), (_WIDTH - _LEFT, "end", f"{whole:,.0f} s"))
    )
    drawn = (
        f'<svg class="loads" viewBox="0 0 {_WIDTH} {_BAR + 28}" role="img" aria-label="starts of the run over time">'
        f"{bars}{ends}</svg>"
    )
    rows = [
        (
            str(number),
            f"{start.began - began:,.0f} s",
            f"{start.ended - began:,.0f} s",
            f"{start.restored:,} to {start.last_step:,}",
            f"{max(start.last_step - following.restored, 0):,}" if following is not None else "",
            str(start.num_ranks),
        )
        for number, (start, following) in enumerate(zip(starts, [*starts[1:], None], strict=True), 1)
    ]
    cells = table("figures", ("start", "began", "ended", "steps", "steps lost", "ranks"), rows[-_MOST_BARS:])
    return card("Starts", f'<div class="scroll">{drawn}{cells}</div>', "a bar is a start; between two nothing ran")


def _bar(number: int, start: Start, began: float, scale: float) -> str:
    left, width = _LEFT + (start.began - began) * scale, max((start.ended - start.began) * scale, 1.0)
    text = f'<text class="tick" x="{left + 5:.1f}" y="{_BAR - 6}">{number}</text>' if width > 16 else ""
    return f'<rect class="start" x="{left:.1f}" y="4" width="{width:.1f}" height="{_BAR - 4}" rx="3"/>{text}'
