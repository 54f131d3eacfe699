"""Traces of a dry run: counters and arrows of Perfetto's, and Chakra's, which is parsed by its schema."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.simulation.dry_run import DryRun
from tests.helpers.training import config
from tests.unit.running.test_fake_step import Tower


@pytest.fixture(scope="module")
def run() -> DryRun:
    with shoal.dry_run(8) as run:
        optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
        engine = shoal.initialize(model=Tower(), config=config(3, optimizer=optimizer))[0]
        batch = torch.zeros(2, 64, dtype=torch.long)
        with run.step():
            engine.backward(engine(batch, batch))
            engine.step()
        engine.destroy()
    return run


def step_of(run: DryRun) -> tuple[float, float]:
    """Begin and end of the step, in microseconds; ``destroy`` comes after it."""
    step = run.steps[0]
    return 1e6 * step.begin, 1e6 * (step.begin + step.seconds)


def test_the_trace_has_counters_of_memory_and_arrows(run: DryRun, tmp_path: Path) -> None:
    events = json.loads(run.write_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    begin, end = step_of(run)
    peak = max(event["args"]["allocated"] for event in counters if begin < event["ts"] <= end)
    assert peak == run.steps[0].memory.allocated
    assert all(event["args"]["reserved"] >= event["args"]["allocated"] >= 0 for event in counters)
    times = [event["ts"] for event in counters]
    assert times == sorted(times)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts and starts.keys() == ends.keys()
    rows = {(event["tid"], event["ts"]): event for event in events if event["ph"] == "X"}
    sources = {rows[start["tid"], start["ts"]]["name"].split()[0] for start in starts.values()}
    assert "all_gather" in sources
    assert all(ends[key]["ts"] >= start["ts"] and ends[key]["tid"] != start["tid"] for key, start in starts.items())


# Chakra. The numbers of fields and types are those of et_def.proto, read again here.


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        if tag & 7 == 0:
            value, at = varint(message, at)
        elif tag & 7 == 2:
            length, at = varint(message, at)
            value, at = message[at : at + length], at + length
        else:
            raise struct.error(f"wire type {tag & 7}")
        yield tag >> 3, value


def messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        length, at = varint(data, at)
        yield data[at : at + length]
        at += length


def parsed(message: bytes) -> dict[str, Any]:
    names = {1: "id", 2: "name", 3: "type", 6: "start", 7: "duration"}
    node: dict[str, Any] = {"deps": [], "attr": {}}
    for field, value in fields(message):
        if field == 5:
            at = 0
            while at < len(value):
                number, at = varint(value, at)
                node["deps"].append(number)
        elif field == 10:
            (_, name), (kind, content) = fields(value)
            node["attr"][name.decode()] = (kind, content)
        else:
            node[names[field]] = value
    return node


def test_chakras_trace_has_the_collectives_and_what_waits_for_them(run: DryRun, tmp_path: Path) -> None:
    path = run.write_chakra(tmp_path / "trace")
    assert path.name == "trace.0.et"
    first, *rest = messages(path.read_bytes())
    assert dict(fields(first))[1]  # a version
    nodes = [parsed(message) for message in rest]
    assert [node["id"] for node in nodes] == list(range(len(nodes)))
    assert all(dep < node["id"] for node in nodes for dep in node["deps"])
    gathers = [node for node in nodes if node["name"].startswith(b"all_gather ")]
    assert all(node["type"] == 7 and node["attr"]["comm_type"] == (9, 2) for node in gathers)
    begin, end = step_of(run)
    in_step = [node for node in gathers if int(begin) <= node["start"] < end]
    assert sum(node["attr"]["comm_size"][1] * 7 // 8 for node in in_step) == run.steps[0].received["all_gather"]
    ids = {node["id"] for node in gathers}
    waiting = [node for node in nodes if node["type"] == 4 and ids & set(node["deps"])]
    assert len(waiting) >= len(gathers) / 2  # those of units that come next may be waited for together
    assert any(node["attr"]["is_cpu_op"] == (27, 1) for node in nodes)
    groups = json.loads((tmp_path / "trace.groups.json").read_text())
    assert groups[gathers[0]["attr"]["pg_name"][1].decode()] == list(range(8))
    starts = [node["start"] for node in gathers]
    assert starts == sorted(starts)
