"""The load of experts in monitors and in the report, and its counters."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.observe.expert_load import draw_load, load_events, load_section, spans
from shoal.observe.monitor import JsonLinesWriter, Monitor
from shoal.observe.report import RunRecord, write_report
from shoal.parallel.expert.bias import ExpertLoad


def logged(num_steps: int) -> dict[str, list[tuple[int, float]]]:
    series: dict[str, list[tuple[int, float]]] = {}
    for step in range(1, num_steps + 1):
        tokens = {"layers.10.mlp": [step, 1, 0, 1], "layers.2.mlp": [1, 1, 1, 1]}
        for name, value, at in load_events(tokens, step):
            series.setdefault(name, []).append((at, value))
    return series


def test_events_are_loads_over_the_mean_and_the_largest_of_them() -> None:
    assert load_events({"mlp": [6, 2, 0, 0]}, 5) == [
        ("experts/mlp/imbalance", 3.0, 5),
        ("experts/mlp/load/0", 3.0, 5),
        ("experts/mlp/load/1", 1.0, 5),
        ("experts/mlp/load/2", 0.0, 5),
        ("experts/mlp/load/3", 0.0, 5),
    ]
    assert load_events({"mlp": [0, 0]}, 1)[0] == ("experts/mlp/imbalance", 1.0, 1)


def test_a_run_is_cut_into_spans_whose_loads_are_means() -> None:
    found = spans(logged(8))
    assert [(span.first, span.last) for span in found] == [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert list(found[0].loads) == ["layers.2.mlp", "layers.10.mlp"]
    assert found[0].loads["layers.10.mlp"][0] == pytest.approx((4 * 1 / 3 + 4 * 2 / 4) / 2)
    assert len(spans(logged(1))) == 1
    assert spans({"train/loss": [(1, 2.0)]}) == []


def test_the_picture_has_a_cell_for_each_span_layer_and_expert() -> None:
    picture = ElementTree.fromstring(draw_load(spans(logged(8))))
    cells = {path.attrib["class"]: path.attrib["d"].count("M") for path in picture.iter("path")}
    assert sum(path.attrib["d"].count("M") for path in picture.iter("path")) == 4 * 2 * 4
    assert cells["load-0"] == 1
    labels = [text.text for text in picture.iter("text")]
    assert labels[:3] == ["layers.2.mlp", "layers.10.mlp", "steps 1 to 2"]


def test_the_report_shows_the_load_once_and_no_chart_of_each_expert(tmp_path: Path) -> None:
    RunRecord("GPT, 4 experts").save(tmp_path)
    with Monitor([JsonLinesWriter(tmp_path / "metrics.jsonl")]) as monitor:
        for step in range(1, 5):
            monitor.write_events(load_events({"layers.0.mlp": [step, 1, 0, 1]}, step))
    page = write_report(tmp_path).read_text()
    assert page.count("<svg") == 1
    table = re.search(r'<table class="ledger">.*?</table>', page, flags=re.DOTALL)
    assert table is not None
    cells = re.findall(r"<td>(.*?)</td>", table[0])
    assert cells == ["layers.0.mlp", "4", "1.33 (expert 0)", "2.67 (expert 0)", "0 (expert 2)", "1"]
    assert load_section({"train/loss": [(1, 2.0)]}) == ""


class Counting(nn.Module):
    """Sends each row to the expert of its largest element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
        self.load = ExpertLoad(self, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.load.add(torch.bincount(rows.argmax(-1), minlength=3))
        return rows @ self.weight


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_and_an_evaluation_are_not_counted(use_reentrant: bool) -> None:
    layer, rows = Counting(), torch.eye(3)[[0, 0, 2]].requires_grad_()
    checkpoint(layer, rows, use_reentrant=use_reentrant).sum().backward()
    assert layer.weight.grad is not None
    layer.eval()(rows)
    layer.train()(rows[:1])
    assert layer.load.take(torch.device("cpu")).tolist() == [3, 0, 1]
    assert layer.load.take(torch.device("cpu")).tolist() == [0, 0, 0]
