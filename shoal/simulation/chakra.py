"""A rank's operations as a Chakra execution trace, the input of ASTRA-sim: PREFIX.RANK.et.

The file is GlobalMetadata, then a Node for each operation, each with its length before it. Nodes depend on the
operation before them on their stream and on what their stream has waited for since. ASTRA-sim times communication
itself and takes computation from ``duration_micros``; with its roofline, from ``num_ops`` and ``tensor_size``. The
groups of ranks are in PREFIX.groups.json, by number.

Source: schema/protobuf/et_def.proto of mlcommons/chakra; the encoding of Protocol Buffers; what ASTRA-sim reads:
astra-sim/workload/Workload.cc and feeder_v3/et_feeder_node_attr.h of astra-sim/astra-sim.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.simulation.clocks import SimulatedStream, TimedOperation
from shoal.simulation.times import COMMUNICATION, HOST, UPDATE

_VERSION = "0.0.4"
_COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = 4, 5, 6, 7  # NodeType
_COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7, "exchange": 2}
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29  # fields of AttributeProto


def write_chakra(prefix: str | Path, operations: Sequence[TimedOperation], rank: int) -> Path:
    """Write operations, in the order in which they were queued. Returns: the path of the trace."""
    path, groups = Path(f"{prefix}.{rank}.et"), Path(f"{prefix}.groups.json")
    known = json.loads(groups.read_text()) if groups.exists() else {}
    known |= {str(_group(each.ranks)): list(each.ranks) for each in operations if len(each.ranks) > 1}
    groups.write_text(json.dumps(known))
    numbers = {id(operation): number for number, operation in enumerate(operations)}
    last: dict[SimulatedStream, int] = {}
    with path.open("wb") as file:
        file.write(_delimited(_text(1, _VERSION)))
        for number, operation in enumerate(operations):
            waits = {numbers[id(each)] for each in operation.waits if id(each) in numbers}
            waits |= {last[operation.stream]} if operation.stream in last else set()
            last[operation.stream] = number
            file.write(_delimited(b"".join(_node(number, operation, sorted(waits), rank))))
    return path


def _group(ranks: tuple[int, ...]) -> int:
    return _positive_hash(",".join(map(str, ranks)))


def _positive_hash(text: str) -> int:
    """The same int32 on all ranks; 0 is ASTRA-sim's group of all ranks."""
    return (zlib.crc32(text.encode()) >> 1) or 1


def _node(number: int, operation: TimedOperation, waits: Sequence[int], rank: int) -> Iterator[bytes]:
    verb = operation.name.partition(" ")[0]
    is_sent = operation.kind == COMMUNICATION and len(operation.ranks) > 1
    types = {"send": _SEND, "recv": _RECEIVE}
    kind = types.get(verb, _COLLECTIVE if verb in _COLLECTIVES else _COMPUTE) if is_sent else _COMPUTE
    yield _number(1, number) + _text(2, operation.name) + _number(3, kind)
    if waits:
        yield _bytes(5, b"".join(map(_varint, waits)))
    yield _number(6, round(1e6 * operation.start))
    yield _number(7, round(1e6 * (operation.end - operation.start)))
    yield _attribute("is_cpu_op", _number(_BOOL, operation.kind in (HOST, UPDATE)))
    if kind == _COLLECTIVE:
        yield _attribute("comm_type", _number(_INT64, _COLLECTIVES[verb]))
        yield _attribute("comm_size", _number(_INT64, operation.nbytes))
        yield _attribute("pg_name", _text(_STRING, str(_group(operation.ranks))))
    elif kind == _COMPUTE:
        yield _attribute("num_ops", _number(_INT64, operation.flops))
        yield _attribute("tensor_size", _number(_UINT64, operation.nbytes))
    else:
        peer = next(each for each in operation.ranks if each != rank)
        source, target = (rank, peer) if kind == _SEND else (peer, rank)
        yield _attribute("comm_size", _number(_INT64, operation.nbytes))
        yield _attribute("comm_src", _number(_INT32, source)) + _attribute("comm_dst", _number(_INT32, target))
        yield _attribute("comm_tag", _number(_INT32, _positive_hash(operation.name.partition(" ")[2])))


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes((*made, value))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _delimited(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _attribute(name: str, value: bytes) -> bytes:
    return _bytes(10, _text(1, name) + value)


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message
