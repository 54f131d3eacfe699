"""``report.html``: one page that says how a run went. It needs nothing but itself: no network, no server, no script to
be read or printed.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.observe.chart import Chart, Line, card, draw, short, table
from shoal.observe.expert_load import PREFIX, load_section
from shoal.observe.monitor import read_json_lines
from shoal.text import format_bytes, format_count

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
REPORT_FILE = "report.html"

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
    record = RunRecord.load(folder)
    metrics = folder / METRICS_FILE
    series = read_json_lines(metrics) if metrics.is_file() else {}
    path = folder / REPORT_FILE
    path.write_text(render(record, series), encoding="utf-8")
    return path


def render(record: RunRecord, series: Series) -> str:
    """The whole page."""
    sections = [
        _facts(record.facts),
        _pairs("Run", record.run, is_wide=True),
        _messages(record.messages),
        *(_chart(chart) for chart in _charts(series)),
        load_section(series),
        card("Pipeline", f'<div class="scroll">{record.pipeline}</div>') if record.pipeline else "",
        _sample(record.prompt, record.sample),
        _ledger(record.ledger, record.allocator),
        _placement(record.placement),
        _pairs("Model", record.model),
        _pairs("Environment", record.environment),
        _pairs("Config", record.config, is_wide=True),
    ]
    body = "\n".join(section for section in sections if section)
    title = html.escape(record.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><p class="mark-word">shoal</p><h1>{title}</h1></header>\n{body}\n</main>\n'
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _charts(series: Series) -> list[Chart]:
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
    others = [Chart(name, "", line(name, name, 1)) for name in unknown]
    return [chart for chart in known + others if chart.lines]


def _chart(chart: Chart) -> str:
    legend = "".join(
        f'<li><i style="background:var(--{line.color})"></i>{html.escape(line.name)}'
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
    rows = "".join(f"<tr><th>{_breakable(key)}</th><td>{html.escape(text)}</td></tr>" for key, text in _flatten(values))
    return card(title, f'<table class="pairs"><tbody>{rows}</tbody></table>', is_wide=is_wide) if rows else ""


def _breakable(key: str) -> str:
    """A long key may go on in the next line after a dot or an underscore."""
    return re.sub(r"([._])", r"\1<wbr>", html.escape(key))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            pairs += _flatten(value, path + ".")
        elif isinstance(value, str):
            pairs.append((path, value))
        elif isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**6:
            pairs.append((path, f"{value:,} ({format_count(value)})"))
        else:
            pairs.append((path, json.dumps(value)))
    return pairs


STYLE = """
:root{--page:#f6f7f9;--card:#fff;--ink:#16202c;--soft:#5b6878;--rule:#e3e7ec;--tint:#eef5f6;--accent:#0b7285;
--series-1:#0b7285;--series-2:#d9480f;--series-3:#2f6fce;--series-4:#7048a8;--series-5:#3a7d33;
--load-0:#b9c0c9;--load-1:#1f5fae;--load-2:#6b9bd6;--load-3:#b5cfec;--load-4:#eef1f4;--load-5:#fbc99b;--load-6:#ee8336;
--load-7:#b33a06;
--mono:ui-monospace,"SF Mono","Cascadia Mono","DejaVu Sans Mono",Menlo,Consolas,monospace}
@media (prefers-color-scheme:dark){:root{--page:#10151b;--card:#181f27;--ink:#e4eaf0;--soft:#93a1b0;--rule:#29323c;
--tint:#17303a;--accent:#4fc3d6;--series-1:#4fc3d6;--series-2:#ff9457;--series-3:#74a9ff;--series-4:#bf9bf0;
--series-5:#7fcf74;--load-0:#4a5562;--load-1:#7fb4ff;--load-2:#4a83cf;--load-3:#2c4f7c;--load-4:#232c36;
--load-5:#6e4526;--load-6:#c96a22;--load-7:#ff9f5c}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:32px 20px 56px;display:grid;gap:16px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
header,.wide{grid-column:1/-1}
.mark-word{margin:0;color:var(--accent);font-weight:650;letter-spacing:.02em}
h1{margin:0;font-size:26px;line-height:1.25;font-weight:650;letter-spacing:-.01em;text-wrap:balance}
h2{margin:0;font-size:15px;font-weight:600}
h2 small{font-weight:400;font-size:13px;color:var(--soft);margin-left:4px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;min-width:0}
.head{display:flex;flex-wrap:wrap;justify-content:space-between;gap:4px 16px;margin-bottom:8px}
.facts{display:flex;flex-wrap:wrap;gap:1px;margin:0;background:var(--rule);
border:1px solid var(--rule);border-radius:10px;overflow:hidden}
.facts div{flex:1 1 165px;background:var(--card);padding:12px 16px}
.facts dt{font-size:13px;color:var(--soft)}
.facts dd{margin:0;font-size:18px;white-space:nowrap;font-weight:600;
font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.messages{margin:0;padding:10px 16px 10px 34px;border:1px solid var(--rule);border-left:3px solid var(--series-2);
border-radius:6px;background:var(--card)}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;list-style:none;margin:0;padding:0;font-size:13px;color:var(--soft)}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.legend b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
.chart{display:block;width:100%;height:auto;overflow:visible}
.loads{display:block;width:100%;height:auto}
.load-0{fill:var(--load-0);background:var(--load-0)}
.load-1{fill:var(--load-1);background:var(--load-1)}
.load-2{fill:var(--load-2);background:var(--load-2)}
.load-3{fill:var(--load-3);background:var(--load-3)}
.load-4{fill:var(--load-4);background:var(--load-4)}
.load-5{fill:var(--load-5);background:var(--load-5)}
.load-6{fill:var(--load-6);background:var(--load-6)}
.load-7{fill:var(--load-7);background:var(--load-7)}
.legend i[class]{height:10px}
.grid{stroke:var(--rule);stroke-width:1}
.tick{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.raw{fill:none;stroke-width:1;opacity:.28}
.mark{stroke:var(--card);stroke-width:1.5}
.pointer line{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3}
.pointer rect{fill:var(--card);stroke:var(--rule)}
.pointer text{fill:var(--ink);font-size:12px;font-variant-numeric:tabular-nums}
pre{margin:0;overflow-x:auto;font:12.5px/1.5 var(--mono)}
.sample{white-space:pre-wrap;overflow-wrap:anywhere;max-height:26em;overflow-y:auto}
mark{background:var(--tint);color:inherit;border-radius:3px;padding:1px 0}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:400;color:var(--soft)}
td,th{padding:5px 0;border-top:1px solid var(--rule);vertical-align:top}
thead th,.pairs tr:first-child>*{border-top:0}
.ledger td:nth-child(n+3),.ledger th:nth-child(n+3){text-align:right}
.total td{font-weight:600}
.pairs th{padding-right:16px;width:45%}
.pairs td{overflow-wrap:anywhere}
.scroll{overflow-x:auto}
.cells td,.cells th{padding-right:12px;vertical-align:bottom}
.cells td{vertical-align:top}
.note,.empty{margin:8px 0 0;font-size:13px;color:var(--soft)}
@media screen and (max-width:600px){main{padding:20px 12px 40px}h1{font-size:21px}
.chart .tick{font-size:16px}.wide .chart .tick{font-size:27px}.pointer text{font-size:14px}.scroll>*{min-width:640px}
.scroll td+td,.scroll th+th{padding-left:10px}}
@media print{:root{--page:#fff}body{font-size:11px}main{max-width:none;padding:0;grid-template-columns:1fr 1fr}
.card,.facts{break-inside:avoid}table{font-size:11px}.facts div{flex-basis:110px}
.sample{max-height:none}.pointer{display:none}h1{font-size:20px}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""

SCRIPT = """
for (const chart of document.querySelectorAll('svg.chart')) {
  const series = JSON.parse(chart.dataset.series), pointer = chart.querySelector('.pointer');
  const make = (tag, attributes, text) => {
    const node = document.createElementNS(chart.namespaceURI, tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    if (text !== undefined) node.textContent = text;
    pointer.append(node);
    return node;
  };
  chart.addEventListener('pointerleave', () => pointer.replaceChildren());
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect(), view = chart.viewBox.baseVal;
    const x = (event.clientX - box.left) * view.width / box.width;
    pointer.replaceChildren();
    const near = series.filter(line => line.points.length).map(line => ({
      line, point: line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)}));
    if (!near.length) return;
    const lead = near[0].point;
    make('line', {x1: lead[0], x2: lead[0], y1: 12, y2: view.height - 28});
    const rows = ['step ' + lead[2].toLocaleString('en')].concat(
      near.map(n => n.line.name + ' ' + n.point[3] + (n.point[2] === lead[2] ? '' : ' at ' + n.point[2])));
    const left = lead[0] > view.width / 2, panel = make('rect', {y: 14, rx: 5, height: rows.length * 17 + 10});
    const texts = rows.map((row, i) => make('text', {y: 31 + 17 * i}, row));
    const width = Math.max(...texts.map(t => t.getComputedTextLength())) + 18;
    const start = left ? lead[0] - width - 8 : lead[0] + 8;
    panel.setAttribute('x', start); panel.setAttribute('width', width);
    texts.forEach(t => t.setAttribute('x', start + 9));
    for (const n of near) make('circle', {cx: n.point[0], cy: n.point[1], r: 4, fill: `var(--${n.line.color})`});
  });
}
"""
