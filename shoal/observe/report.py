"""``report.html``: one page that says how a run went. It needs nothing but itself: no network, no server, no script to
be read or printed.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.observe.chart import Chart, Line, card, draw, short, table
from shoal.observe.expert_load import PREFIX, load_section
from shoal.observe.goodput import GOODPUT_FILE, RunTime, read_goodput
from shoal.observe.metrics import metric
from shoal.observe.monitor import read_json_lines
from shoal.observe.rank_page import ranks_section, starts_section
from shoal.text import counted, format_bytes, format_count

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
REPORT_FILE = "report.html"
DOCTOR_FILE = "doctor.json"  # what ``shoal doctor`` found

Series = Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class RunRecord:
    """The description of a run without its series; stored as ``run.json`` in its folder.

    Args:
        title: what was trained.
        facts: label and text of the figures at the top, in order.
        run: when and how it was started.
        model, config, environment: plain data, shown as tables of keys and values.
        ledger: a row per kind of state: kind, tier, bytes, bytes per parameter.
        placement: the placement table: a row of headers, then its rows.
        pipeline: the schedule of a pipeline, drawn. SVG.
        prompt, sample: what the model was given, and how it went on.
        messages: what a reader must know: overruled settings, skipped steps, an early end.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    run: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    ledger: Sequence[Sequence[str]] = ()
    allocator: str = ""
    placement: Sequence[Sequence[str]] = ()
    pipeline: str = ""
    prompt: str = ""
    sample: str = ""
    messages: Sequence[str] = ()

    def save(self, folder: Path) -> None:
        (folder / RUN_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """
        Raises: UsageError: the folder has no ``run.json``, or it is not one.
        """
        path = folder / RUN_FILE
        if not path.is_file():
            raise UsageError(
                f"{str(folder)!r} holds no {RUN_FILE}.", do="name the folder of a run, such as runs/2026-01-31-120000."
            )
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, TypeError) as error:
            raise UsageError(f"{str(path)!r} is not a run's record: {error}") from error


def write_report(folder: Path) -> Path:
    """Make ``report.html`` anew of the folder's ``run.json`` and ``metrics.jsonl``; return its path.

    Raises: UsageError: the folder is not a run's.
    """
    path, diagnosis = folder / REPORT_FILE, folder / DOCTOR_FILE
    found = json.loads(diagnosis.read_text(encoding="utf-8")) if diagnosis.is_file() else None
    path.write_text(render(*read_run(folder), found), encoding="utf-8")
    return path


def read_run(folder: Path) -> tuple[RunRecord, Series, RunTime | None]:
    """What a run has written until now. Raises: UsageError: the folder is not a run's."""
    record, metrics, log = RunRecord.load(folder), folder / METRICS_FILE, folder / GOODPUT_FILE
    series = read_json_lines(metrics) if metrics.is_file() else {}
    return record, series, read_goodput(log) if log.is_file() else None


def render(
    record: RunRecord,
    series: Series,
    goodput: RunTime | None = None,
    diagnosis: Mapping[str, Any] | None = None,
) -> str:
    """The whole page. Args: ``diagnosis``: the content of ``doctor.json``."""
    sections = [
        _facts(record.facts),
        _pairs("Run", record.run, is_wide=True),
        _messages(record.messages),
        *(draw_card(chart) for chart in charts(series)),
        _diagnosis(diagnosis or {}, record, series),
        load_section(series),
        card("Pipeline", f'<div class="scroll">{record.pipeline}</div>') if record.pipeline else "",
        _sample(record.prompt, record.sample),
        _goodput(goodput),
        starts_section(goodput),
        ranks_section(() if goodput is None else goodput.ranks),
        _ledger(record.ledger, record.allocator),
        _placement(record.placement),
        _pairs("Model", record.model),
        _pairs("Environment", record.environment),
        _pairs("Config", record.config, is_wide=True),
    ]
    return page(record.title, sections)


def page(title: str, sections: Sequence[str]) -> str:
    """A page of sections, with the style sheet and script inside. Args: ``title``: text; the others HTML."""
    body = "\n".join(section for section in sections if section)
    title = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{_read('report.css')}</style>\n</head>\n<body>\n<main>\n"
        f'<header><p class="mark-word">shoal</p><h1>{title}</h1></header>\n{body}\n</main>\n'
        f"<script>\n{_read('report.js')}</script>\n</body>\n</html>\n"
    )


def charts(series: Series) -> list[Chart]:
    """The charts that the series fill, in reading order; series of names not known here come last, one chart each."""

    named: set[str] = set()

    def line(name: str, label: str, number: int, *, smoothed: bool = False, marks: bool = False) -> list[Line]:
        named.add(name)
        points = series.get(name, ())
        return [Line(label, points, f"series-{number}", smoothed, marks)] if points else []

    known = [
        Chart(
            "Loss",
            "nats per token",
            line("train/loss", "training", 1, smoothed=True) + line("validation/loss", "validation", 2, marks=True),
            width=1060,
            height=290,
        ),
        Chart("Throughput", "tokens a second", line("train/tokens_per_second", "tokens/s", 3), from_zero=True),
        Chart("Gradient norm", "before clipping", line("train/gradient_norm", "norm", 4, smoothed=True), True),
        Chart("Learning rate", "", line("train/learning_rate", "learning rate", 5), from_zero=True),
        Chart(
            "Memory",
            "of rank 0",
            line("memory/allocated_bytes", "allocated", 1) + line("memory/peak_bytes", "peak", 2),
            from_zero=True,
            write=format_bytes,
            is_in_bytes=True,
        ),
    ]
    unknown = [name for name in sorted(series) if name not in named and not name.startswith(PREFIX)]
    others = [Chart(name, (metric(name) or ("",))[0], line(name, name, 1)) for name in unknown]
    return [chart for chart in known + others if chart.lines]


def draw_card(chart: Chart) -> str:
    """A chart with its heading and legend."""
    legend = "".join(
        f'<li><i style="border-color:var(--{line.color})"></i>{html.escape(line.name)}'
        f" <b>{html.escape((chart.write or short)(line.points[-1][1]))}</b></li>"
        for line in chart.lines
    )
    legend = f'<ul class="legend">{legend}</ul>'
    return card(chart.title, draw(chart), chart.unit, legend=legend, is_wide=chart.title == "Loss")


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>" for label, value in facts)
    return f'<dl class="facts wide">{items}</dl>' if items else ""


def _messages(messages: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(message)}</li>" for message in messages)
    return f'<ul class="messages wide">{items}</ul>' if items else ""


def _sample(prompt: str, sample: str) -> str:
    text = f'<pre class="sample"><mark>{html.escape(prompt)}</mark>{html.escape(sample)}</pre>'
    return card("Sample", text, "the prompt, then what the model wrote") if sample else ""


def _goodput(goodput: RunTime | None) -> str:
    if goodput is None:
        return ""
    cells = table("goodput", ("category", "seconds", "share"), [row[:3] for row in goodput.rows()])
    return card(
        "Goodput", cells, f"{goodput.share:.1%} of the time was productive, in {counted(goodput.num_starts, 'start')}"
    )


def _diagnosis(found: Mapping[str, Any], record: RunRecord, series: Series) -> str:
    """What ``shoal doctor`` has predicted next to what was measured, and what it says."""
    is_allocated = str(record.environment.get("device")).startswith("cuda")  # else it is that of the whole process
    peak = max((at for _, at in series.get("memory/peak_bytes", ())), default=0) if is_allocated else 0
    pairs: list[tuple[str, Any, Any, Callable[[float], str]]] = [
        ("seconds of a step", found.get("seconds"), found.get("predicted"), short),
        ("peak memory of a rank", peak, found.get("nbytes"), format_bytes),
    ]
    rows = [
        (label, write(measured), write(predicted), f"{predicted / measured:.2f}")
        for label, measured, predicted, write in pairs
        if measured and predicted
    ]
    cells = table("figures", ("", "measured", "predicted", "ratio"), rows) if rows else ""
    said = [each["text"] for each in found.get("changes", ())] + list(found.get("findings", ()))
    said = [*(said or ["Nothing is to be changed."]), *(f"note: {each}" for each in found.get("notes", ()))]
    items = "".join(f"<li>{html.escape(text)}</li>" for text in said)
    on = f"predicted on {found['machine']}" if found.get("machine") else "from the run's logs"
    return card("What to change", f'{cells}<ul class="advice">{items}</ul>', on) if found else ""


def _ledger(rows: Sequence[Sequence[str]], allocator: str) -> str:
    headers = ("kind", "tier", "bytes on rank 0", "bytes per parameter")
    note = f'<p class="note">{html.escape(allocator)}</p>' if allocator else ""
    cells = table("ledger", headers, rows, kind_of=lambda row: " class=total" if row[0] == "total" else "")
    return card("Memory ledger", cells + note, "held between steps") if rows else ""


def _placement(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    cells = table("cells", rows[0], rows[1:], write=_breakable)
    return card("Placement", f'<div class="scroll">{cells}</div>', "where each unit's state is stored")


def _pairs(title: str, values: Mapping[str, Any], *, is_wide: bool = False) -> str:
    rows = "".join(f"<tr><th>{_breakable(key)}</th><td>{html.escape(text)}</td></tr>" for key, text in flatten(values))
    return card(title, f'<table class="pairs"><tbody>{rows}</tbody></table>', is_wide=is_wide) if rows else ""


def _breakable(key: str) -> str:
    """A long key may go on in the next line after a dot or an underscore."""
    return re.sub(r"([._])", r"\1<wbr>", html.escape(key))


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys and texts of nested values."""
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            pairs += flatten(value, path + ".")
        elif isinstance(value, str):
            pairs.append((path, value))
        elif isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**6:
            pairs.append((path, f"{value:,} ({format_count(value)})"))
        else:
            pairs.append((path, json.dumps(value)))
    return pairs


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
