"""What each rank ran and when, simulated or measured; and pictures of it: a grid of text, SVG, a trace for Perfetto."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from shoal.pipeline.schedule import Action


class TimedAction(NamedTuple):
    """An action with its start and end, in seconds or in the unit of a simulation."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of each rank with their times. Sends, receives and reductions may be among them.

    Args:
        ranks: by rank, in order of time.
    """

    name: str
    ranks: tuple[tuple[TimedAction, ...], ...]

    @property
    def start(self) -> float:
        return min((timed.start for rank in self.ranks for timed in rank), default=0.0)

    @property
    def end(self) -> float:
        return max((timed.end for rank in self.ranks for timed in rank), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """The part of the ranks' time, from the first start to the last end, in which they do not compute."""
        return self._idle(self.end - self.start)

    @cached_property
    def own_bubble(self) -> float:
        """The same, with the longest time of one rank from its own first start to its own last end.

        Papers on zero-bubble schedules measure it so: there a rank begins its next step when it is done with this one.
        Source: Zero Bubble Pipeline Parallelism (arXiv:2401.10241).
        """
        return self._idle(max((rank[-1].end - rank[0].start for rank in self.ranks if rank), default=0.0))

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """By rank, the most micro-batches whose activations it holds at once, counted for each of its pipeline stages.

        They are held from F to the end of B, or of W where the backward is split.
        """
        changes = {"F": 1, "B": -1, "W": -1}
        counts = (accumulate((changes.get(timed.action.kind, 0) for timed in rank), initial=0) for rank in self.ranks)
        return tuple(map(max, counts))

    def _idle(self, duration: float) -> float:
        computing = sum(timed.end - timed.start for rank in self.ranks for timed in rank if timed.action.kind in "FBIW")
        return 1.0 - computing / (duration * len(self.ranks)) if duration else 0.0


_COLORS = {"F": "#4c8fd6", "B": "#3f9c5a", "I": "#2a9d8f", "W": "#e0a32e"}
_MEANING = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
_OTHER = "#9aa3ad"
_ROW, _LEFT, _TOP, _WIDTH = 26, 58, 8, 1040


def grid(timeline: Timeline, marks: Mapping[int, str] | None = None, *, last: int | None = None) -> str:
    """Ranks by time steps, as text. The times of the timeline are whole steps.

    Args:
        marks: by rank, what to write at the end of its line.
        last: draw so many steps at most, those at the end.
    """
    steps = int(timeline.end)
    begin = max(0, steps - last) if last else 0
    cells = [{int(timed.start): timed for timed in rank} for rank in timeline.ranks]
    width = max((len(str(timed.action)) for rank in cells for timed in rank.values()), default=1)
    lines = ["step".ljust(8) + " ".join(str(step).ljust(width) for step in range(begin, steps))]
    for rank, starts in enumerate(cells):
        row = [str(starts[step].action) if step in starts else "." for step in range(begin, steps)]
        mark = f"  <- {marks[rank]}" if marks and rank in marks else ""
        lines.append(f"rank {rank}".ljust(8) + " ".join(cell.ljust(width) for cell in row) + mark)
    return "\n".join(line.rstrip() for line in lines)


def svg(timeline: Timeline) -> str:
    """The timeline as ``<svg>``: a row a rank, a color a kind of action, micro-batches as labels; no style sheet."""
    duration = timeline.end - timeline.start or 1.0
    scale = (_WIDTH - _LEFT - 8) / duration
    height = _TOP + _ROW * len(timeline.ranks) + 26
    kinds = sorted({timed.action.kind for rank in timeline.ranks for timed in rank}, key=_order)
    parts = []
    for rank, row in enumerate(timeline.ranks):
        top = _TOP + _ROW * rank
        parts.append(f'<text x="0" y="{top + 16}">rank {rank}</text>')
        stages = sorted({timed.action.stage for timed in row})
        for action, start, end in row:
            left, wide = _LEFT + (start - timeline.start) * scale, (end - start) * scale
            shade = 1.0 - 0.4 * stages.index(action.stage) / len(stages)  # later stages of the rank are lighter
            parts.append(
                f'<rect x="{left:.2f}" y="{top}" width="{max(wide - 0.6, 0.4):.2f}" height="{_ROW - 4}" rx="1.5" '
                f'fill="{_COLORS.get(action.kind, _OTHER)}" fill-opacity="{shade:.2f}">'
                f"<title>{action}: {start:.6g} to {end:.6g}</title></rect>"
            )
            if action.micro is not None and wide >= 7 * len(str(action.micro)) + 2:
                x = left + wide / 2
                parts.append(f'<text x="{x:.2f}" y="{top + 15}" text-anchor="middle" fill="#fff">{action.micro}</text>')
    x = _LEFT
    for kind in kinds:
        label = _MEANING.get(kind, kind)
        parts.append(f'<rect x="{x}" y="{height - 16}" width="10" height="10" fill="{_COLORS.get(kind, _OTHER)}"/>')
        parts.append(f'<text x="{x + 14}" y="{height - 7}">{label}</text>')
        x += 30 + 7 * len(label)
    title = html.escape(f"pipeline schedule {timeline.name}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="currentColor">{"".join(parts)}</svg>'
    )


def chrome_trace(timeline: Timeline) -> str:
    """The timeline, in seconds, as JSON for chrome://tracing and Perfetto: a process a rank."""
    events: list[dict[str, object]] = []
    for rank, row in enumerate(timeline.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        events += [
            {
                "ph": "X",
                "name": str(timed.action),
                "cat": _MEANING.get(timed.action.kind, timed.action.kind),
                "pid": rank,
                "tid": 0,
                "ts": (timed.start - timeline.start) * 1e6,
                "dur": (timed.end - timed.start) * 1e6,
                "args": {"stage": timed.action.stage, "micro_batch": timed.action.micro},
            }
            for timed in row
        ]
    return json.dumps({"displayTimeUnit": "ms", "otherData": {"schedule": timeline.name}, "traceEvents": events})


def _order(kind: str) -> tuple[int, str]:
    return (list(_COLORS).index(kind) if kind in _COLORS else len(_COLORS), kind)
