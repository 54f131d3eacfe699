"""A plan as text, as JSON, and as a page with pictures: memory and time as bars, the pipeline, the frontier."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.observe.chart import card
from shoal.observe.chart import table as html_table
from shoal.observe.report import page
from shoal.pipeline.schedule import build_schedule
from shoal.pipeline.simulate import simulate
from shoal.pipeline.timeline import svg
from shoal.planner.closed_forms import USABLE
from shoal.planner.search import ClusterPlan
from shoal.planner.trial import INTERVALS, Trial
from shoal.text import format_bytes, format_count, table

_COLORS = tuple(f"var(--series-{number})" for number in (1, 2, 3, 4)) + ("#8a63d2", "#c2703d", "#6b7785", "#3d8f8f")
_WIDTH, _ROW = 1000, 26
_HEADERS = ("configuration", "s / step", "tokens/s/GPU", "MFU", "memory", "exposed", "bubble", "fits")


def as_dict(plan: ClusterPlan, price: float | None = None) -> dict[str, Any]:
    """The whole plan for programs; the best configuration first."""
    request, facts = plan.request, plan.facts
    return {
        "machine": request.machine.name,
        "gpus": request.num_ranks,
        "sequence": request.sequence,
        "global_batch": request.global_batch,
        "parameters": facts.numel,
        "flops_per_token": facts.flops_per_token,
        "candidates": len(plan.ranked) + sum(plan.rejected.values()),
        "rejected": dict(plan.rejected),
        "fits": plan.best is not None,
        "configurations": [trial.as_dict(request, facts, price) for trial in plan.trials],
        "tightest": None
        if plan.tightest is None
        else {"name": str(plan.tightest[1]), "bytes": plan.tightest[0].nbytes, "memory": plan.tightest[0].memory},
        "raise": list(plan.advice),
    }


def text(plan: ClusterPlan, price: float | None = None) -> str:
    """What a terminal shows."""
    request, facts, best = plan.request, plan.facts, plan.best
    capacity = request.machine.gpu_nbytes
    lines = [
        f"{format_count(facts.numel)} parameters on {request.num_ranks:,} GPUs ({request.machine.name}), rows of"
        f" {request.sequence:,} tokens, {request.global_batch:,} rows a step",
        f"{len(plan.ranked) + sum(plan.rejected.values()):,} candidates; {len(plan.ranked):,} fit by the formulas;"
        f" {len(plan.trials)} were run dry:",
        "",
        table(_rows(plan), _HEADERS),
    ]
    lines += [f"{trial.candidate} did not run: {trial.error}" for trial in plan.trials if trial.error]
    if best is None:
        return "\n".join([*lines, "", *_nothing(plan)])
    figures = best.as_dict(request, facts, price)
    low, high = INTERVALS["memory"]
    lines += ["", f"best: {best.candidate}"]
    lines += [
        f"  {_interval(figures['seconds_interval'], 's')} a step,"
        f" {_interval(figures['tokens_per_second_per_gpu_interval'], 'tokens/s/GPU')},"
        f" MFU {_interval([100 * value for value in figures['mfu_interval']], '%')}",
        f"  memory {format_bytes(best.nbytes)} allocated, {format_bytes(low * best.nbytes)} to"
        f" {format_bytes(high * best.nbytes)} reserved"
        + ("" if capacity is None else f", of {format_bytes(capacity)}")
        + ": "
        + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in _largest(best.memory or {})),
        "  received by a GPU: "
        + (", ".join(f"{op} {format_bytes(size)}" for op, size in _largest(best.received or {})) or "nothing"),
    ]
    lines.append(
        "  of that over each link: " + ", ".join(f"{way} {format_bytes(n)}" for way, n in (best.links or {}).items())
    )
    if price is not None:
        lines.append(f"  {figures['cost_per_billion_tokens']:,.2f} for a billion tokens, at {price} for a GPU hour")
    if best.candidate.sp * best.candidate.cp > 1:
        lines.append('  the model has to attend by shoal.attention (Transformers: attn_implementation="shoal")')
    lines += ["", json.dumps(best.config, indent=2)]
    return "\n".join(lines)


def diff(first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str]) -> str:
    """Two plans of one configuration each, or the best of two, side by side."""
    one, other = first["configurations"][0], second["configurations"][0]
    rows = []
    for label, key, write in (
        ("s / step", "seconds", "{:.4g}".format),
        ("tokens/s/GPU", "tokens_per_second_per_gpu", "{:,.0f}".format),
        ("MFU", "mfu", "{:.1%}".format),
        ("compute, s", "compute_seconds", "{:.4g}".format),
        ("exposed communication, s", "exposed_communication_seconds", "{:.4g}".format),
        ("bubble, s", "bubble_seconds", "{:.4g}".format),
        ("allocated", "allocated", format_bytes),
    ):
        if key in one and key in other:
            rows.append(
                [label, write(one[key]), write(other[key]), f"{other[key] / one[key] - 1:+.0%}" if one[key] else ""]
            )
    for group, label in (("memory", "memory: {}"), ("received", "received: {}"), ("links", "link: {}")):
        kinds = dict.fromkeys([*(one.get(group) or {}), *(other.get(group) or {})])
        for kind in kinds:
            sizes = [(each.get(group) or {}).get(kind, 0) for each in (one, other)]
            if max(sizes):
                change = f"{sizes[1] / sizes[0] - 1:+.0%}" if sizes[0] else "new"
                rows.append([label.format(kind), *map(format_bytes, sizes), change])
    flat = [dict(_flat(each["config"])) for each in (one, other)]
    for key in dict.fromkeys([*flat[0], *flat[1]]):
        values = [each.get(key, "-") for each in flat]
        if values[0] != values[1]:
            rows.append([key, *map(str, values), ""])
    return table(rows, ("", *names, "change"))


def write(plan: ClusterPlan, folder: Path, price: float | None = None) -> list[Path]:
    """Write ``config.json`` (the best, if any fits), ``plan.json`` and ``report.html``; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"plan.json": json.dumps(as_dict(plan, price), indent=2), "report.html": render(plan)}
    if plan.best is not None:
        contents = {"config.json": json.dumps(plan.best.config, indent=2), **contents}
    for name, content in contents.items():
        (folder / name).write_text(content + "\n", encoding="utf-8")
    return [folder / name for name in contents]


def render(plan: ClusterPlan) -> str:
    """The page."""
    capacity = plan.request.machine.gpu_nbytes
    ran = [trial for trial in plan.trials if not trial.error]
    memory = [(str(trial.candidate), trial.memory or {}) for trial in ran]
    times = [(str(trial.candidate), _times(trial)) for trial in ran]
    sections = [
        card("Configurations", html_table("cells", _HEADERS, _rows(plan)), "each run dry"),
        card("Memory at the peak", _bars(memory, capacity and USABLE * capacity, format_bytes), "the line: what fits"),
        card("A step", _bars(times, None, lambda seconds: f"{seconds:.3g} s"), "of the stage that computes longest"),
        card("Frontier", _frontier(plan), "by the formulas (grey) and in dry runs: memory and time of a step"),
    ]
    best = plan.best
    if best is not None and best.candidate.pp > 1:
        one, num_micro = best.candidate, min(best.candidate.num_micro(plan.request), 3 * best.candidate.pp)
        schedule = build_schedule(best.config["pipeline"]["schedule"], one.pp, num_micro, virtual_stages=one.virtual)
        drawn = svg(simulate(schedule, 1.0, 2.0, 1.0, 1.0, 0.0))
        sections.append(
            card("Timeline", f'<div class="scroll">{drawn}</div>', f"{num_micro} micro-batches of the best")
        )
    if best is not None:
        sections.append(card("Configuration", f"<pre>{html.escape(json.dumps(best.config, indent=2))}</pre>"))
    else:
        sections.append(card("Nothing fits", f"<pre>{html.escape(chr(10).join(_nothing(plan)))}</pre>"))
    return page(f"Plan for {plan.request.num_ranks:,} GPUs ({plan.request.machine.name})", sections)


def _rows(plan: ClusterPlan) -> list[list[str]]:
    rows = []
    for trial in plan.trials:
        if trial.error:
            continue
        figures = trial.as_dict(plan.request, plan.facts, None)
        rows.append(
            [
                str(trial.candidate),
                f"{trial.seconds:.4g}",
                f"{figures['tokens_per_second_per_gpu']:,.0f}",
                f"{figures['mfu']:.1%}",
                format_bytes(trial.nbytes),
                f"{trial.exposed / trial.seconds:.0%}",
                f"{trial.bubble / trial.seconds:.0%}",
                "yes" if trial.fits(plan.request) else "no",
            ]
        )
    return rows


def _nothing(plan: ClusterPlan) -> list[str]:
    assert plan.tightest is not None
    guess, one = plan.tightest
    usable = USABLE * (plan.request.machine.gpu_nbytes or 0)
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in _largest(guess.memory))
    lines = [
        f"nothing fits. The tightest is {one}: {format_bytes(guess.nbytes)} of the {format_bytes(usable)} that can be"
        f" used of a GPU, {format_bytes(max(guess.nbytes - usable, 0))} too much ({kinds}).",
    ]
    return [
        *lines,
        *(["one of these would do, by the formulas:"] if plan.advice else []),
        *map("- {}".format, plan.advice),
    ]


def _times(trial: Trial) -> dict[str, float]:
    rest = trial.seconds - trial.compute - trial.exposed - trial.bubble
    return {"compute": trial.compute, "communication": trial.exposed, "bubble": trial.bubble, "other": max(rest, 0.0)}


def _largest(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return [item for item in sorted(sizes.items(), key=lambda item: -item[1]) if item[1] >= 1 << 20] or [*sizes.items()]


def _interval(ends: Sequence[float], unit: str) -> str:
    return f"{ends[0]:,.3g} to {ends[1]:,.3g} {unit}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return pairs


def _bars(rows: Sequence[tuple[str, Mapping[str, float]]], limit: float | None, write: Any) -> str:
    """A bar of parts for each row, and their legend; a line at ``limit``."""
    most = max([sum(parts.values()) for _, parts in rows] + [limit or 0.0, 1e-12])
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    shown = [name for name in names if any(parts.get(name, 0) > most / 500 for _, parts in rows)]
    colors = {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(shown)}
    drawn = []
    for number, (label, parts) in enumerate(rows):
        left, top = 0.0, number * 2 * _ROW
        drawn.append(
            f'<text x="0" y="{top + 16}" fill="currentColor" font-size="13">{html.escape(label)}: '
            f"{html.escape(write(sum(parts.values())))}</text>"
        )
        for name in shown:
            width = _WIDTH * parts.get(name, 0) / most
            title = f"<title>{html.escape(name)}: {html.escape(write(parts.get(name, 0)))}</title>"
            drawn.append(
                f'<rect x="{left:.1f}" y="{top + 22}" width="{width:.1f}" height="{_ROW - 6}" fill="{colors[name]}">'
                f"{title}</rect>"
            )
            left += width
    height = 2 * _ROW * max(len(rows), 1)
    if limit:
        at = _WIDTH * limit / most
        drawn.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}" stroke="currentColor" stroke-dasharray="4"/>'
        )
    legend = "".join(
        f'<li><i style="background:{color}"></i>{html.escape(name)}</li>' for name, color in colors.items()
    )
    svg_text = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" width="100%">{"".join(drawn)}</svg>'
    return f'<ul class="legend">{legend}</ul>{svg_text}'


def _frontier(plan: ClusterPlan) -> str:
    """Memory (to the right) and time (up) of the candidates."""
    ran = [(trial.nbytes, trial.seconds, str(trial.candidate)) for trial in plan.trials if not trial.error]
    guesses = [(guess.nbytes, guess.seconds, str(one)) for guess, one in plan.ranked[:400]]
    if not ran and not guesses:
        return '<p class="empty">nothing fits</p>'
    most = [1.05 * max(size for size, *_ in [*ran, *guesses]), 1.05 * max(each[1] for each in [*ran, *guesses])]
    dots = [
        f'<circle cx="{_WIDTH * size / most[0]:.1f}" cy="{300 - 300 * seconds / most[1]:.1f}" r="{radius}"'
        f' fill="{color}">'
        f"<title>{html.escape(name)}: {format_bytes(size)}, {seconds:.3g} s</title></circle>"
        for points, radius, color in ((guesses, 3, "#9993"), (ran, 5, _COLORS[0]))
        for size, seconds, name in points
    ]
    labels = (
        f'<text x="4" y="14" fill="currentColor" font-size="13">up to {most[1]:.3g} s, {format_bytes(most[0])}</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} 300" role="img" width="100%">{"".join(dots)}{labels}</svg>'
