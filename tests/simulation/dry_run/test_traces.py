"""Traces of a dry run: counters and arrows of Perfetto's, and Chakra's, which is parsed by its schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.simulation.dry_run import DryRun
from shoal.simulation.machines import machine_of
from tests.helpers.dry_runs import take_steps
from tests.helpers.training import config
from tests.simulation.dry_run.test_dry_run_pipeline import config as pipeline_config
from tests.simulation.dry_run.test_dry_run_pipeline import trains
from tests.unit.running.test_fake_step import Tower


@pytest.fixture(scope="module")
def run() -> DryRun:
    with shoal.dry_run(8, machine=machine_of("h100").compiled()) as run:  # kernels wait for collectives
        optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
        engine = shoal.initialize(model=Tower(), config=config(3, optimizer=optimizer))[0]
        batch = torch.zeros(2, 64, dtype=torch.long)
        take_steps(run, engine, batch, 1)
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
    peak = max(event["args"]["allocated"] for event in counters if begin < event["ts"] < end - 1e-3)
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


# Chakra. Read by Google's decoder, with the messages of schema/protobuf/et_def.proto of mlcommons/chakra.

UINT64, INT64, INT32, STRING, BOOL, MESSAGE, ENUM = 4, 3, 5, 9, 8, 11, 14
SCHEMA: dict[str, list[tuple[str, int, int, bool]]] = {  # name, number, type, is repeated
    "AttributeProto": [
        ("name", 1, STRING, False),
        ("int32_val", 7, INT32, False),
        ("int64_val", 9, INT64, False),
        ("uint64_val", 13, UINT64, False),
        ("bool_val", 27, BOOL, False),
        ("string_val", 29, STRING, False),
    ],
    "GlobalMetadata": [("version", 1, STRING, False), ("attr", 2, MESSAGE, True)],
    "Node": [
        ("id", 1, UINT64, False),
        ("name", 2, STRING, False),
        ("type", 3, ENUM, False),
        ("ctrl_deps", 4, UINT64, True),
        ("data_deps", 5, UINT64, True),
        ("start_time_micros", 6, UINT64, False),
        ("duration_micros", 7, UINT64, False),
        ("attr", 10, MESSAGE, True),
    ],
}
NODE_TYPES = ["INVALID", "METADATA", "MEM_LOAD", "MEM_STORE", "COMP", "COMM_SEND", "COMM_RECV", "COMM_COLL"]
# What ASTRA-sim reads and has no default for: astra-sim/workload/feeder_v3/et_feeder_node_attr.h.
READ = {
    "COMP": {"is_cpu_op", "num_ops", "tensor_size"},
    "COMM_SEND": {"is_cpu_op", "comm_size", "comm_src", "comm_dst", "comm_tag"},
    "COMM_RECV": {"is_cpu_op", "comm_size", "comm_src", "comm_dst", "comm_tag"},
    "COMM_COLL": {"is_cpu_op", "comm_type", "comm_size", "pg_name"},
}


def schema() -> dict[str, Any]:
    """The classes of the messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    types = file.enum_type.add(name="NodeType")
    for number, name in enumerate(NODE_TYPES):
        types.value.add(name=f"{name}_NODE", number=number)
    for message, members in SCHEMA.items():
        made = file.message_type.add(name=message)
        is_of = {MESSAGE: ".ChakraProtoMsg.AttributeProto", ENUM: ".ChakraProtoMsg.NodeType"}
        if message == "AttributeProto":
            made.oneof_decl.add(name="value")
        for name, number, kind, is_repeated in members:
            field = made.field.add(name=name, number=number, type=kind, label=3 if is_repeated else 1)
            if kind in is_of:
                field.type_name = is_of[kind]
            if message == "AttributeProto" and name != "name":
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    by_name = {name: pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}") for name in SCHEMA}
    return {name: message_factory.GetMessageClass(each) for name, each in by_name.items()}


def read_chakra(path: Path) -> list[dict[str, Any]]:
    """The nodes, each with its attributes by name; nothing of the file is unknown to the schema."""
    from google.protobuf import proto
    from google.protobuf.unknown_fields import UnknownFieldSet

    classes, nodes = schema(), []
    with path.open("rb") as file:
        assert proto.parse_length_prefixed(classes["GlobalMetadata"], file).version
        while (node := proto.parse_length_prefixed(classes["Node"], file)) is not None:
            assert not len(UnknownFieldSet(node))
            attributes = {each.name: getattr(each, each.WhichOneof("value")) for each in node.attr}
            kind = NODE_TYPES[node.type]
            assert attributes.keys() == READ[kind], node.name
            assert set(node.data_deps) <= {each["id"] for each in nodes}  # no circle
            begin, seconds = node.start_time_micros, node.duration_micros
            made = {"id": node.id, "name": node.name, "type": kind, "deps": set(node.data_deps), **attributes}
            nodes.append({**made, "start": begin, "duration": seconds})
    return nodes


def test_chakras_trace_has_the_collectives_and_what_waits_for_them(run: DryRun, tmp_path: Path) -> None:
    path = run.write_chakra(tmp_path / "trace")
    assert path.name == "trace.0.et"
    nodes = read_chakra(path)
    assert [node["id"] for node in nodes] == list(range(len(nodes)))
    gathers = [node for node in nodes if node["name"].startswith("all_gather ")]
    assert {(node["type"], node["comm_type"], node["is_cpu_op"]) for node in gathers} == {("COMM_COLL", 2, False)}
    begin, end = step_of(run)
    in_step = [node for node in gathers if int(begin) <= node["start"] < end]
    assert sum(node["comm_size"] * 7 // 8 for node in in_step) == run.steps[0].received["all_gather"]
    ids = {node["id"] for node in gathers}
    waiting = [node for node in nodes if node["type"] == "COMP" and ids & node["deps"]]
    assert len(waiting) >= len(gathers) / 2  # those of units that come next may be waited for together
    assert any(node["is_cpu_op"] for node in nodes)
    groups = json.loads((tmp_path / "trace.groups.json").read_text())
    assert groups[gathers[0]["pg_name"]] == list(range(8))
    starts = [node["start"] for node in gathers]
    assert starts == sorted(starts)
    products = [node for node in nodes if node["name"] == "aten.mm.default"]
    assert products
    assert all(node["num_ops"] > 0 and node["tensor_size"] > 0 for node in products)


def test_messages_of_pipeline_stages_have_the_tags_of_their_peers(tmp_path: Path) -> None:
    run = shoal.dry_run_pipeline(trains(pipeline_config(2)), 2, 2)
    first, second = run.write_chakra(tmp_path / "stages")
    sent, received = read_chakra(first), read_chakra(second)

    def messages(nodes: list[dict[str, Any]], kind: str) -> list[tuple[int, ...]]:
        keys = ("comm_src", "comm_dst", "comm_size", "comm_tag")
        return sorted(tuple(node[key] for key in keys) for node in nodes if node["type"] == kind)

    assert messages(sent, "COMM_SEND") == messages(received, "COMM_RECV")
    assert messages(sent, "COMM_RECV") == messages(received, "COMM_SEND")
    assert {each[:2] for each in messages(sent, "COMM_SEND")} == {(0, 1)}
