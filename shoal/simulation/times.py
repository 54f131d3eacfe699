"""How long operations take on a machine, and when each starts: after what its stream waits for, on a free way."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shoal.errors import UsageError
from shoal.flop_formulas import MATRIX
from shoal.simulation.clocks import SimulatedStream, TimedOperation

COMPUTE, COMMUNICATION, STAGES, COPY, HOST, UPDATE, DISK = (
    "compute",
    "communication",
    "other stages",
    "copies",
    "host",
    "host updates",
    "disk",
)
KINDS = (COMPUTE, COMMUNICATION, STAGES, COPY, UPDATE, DISK, HOST)
_TO_DEVICE, _TO_HOST = "bus to the device", "bus to the host"


@dataclass(frozen=True)
class Cost:
    """Of one operation. ``way``: what only one operation at a time can use; empty: its stream alone."""

    kind: str
    seconds: float
    way: str = ""


class StreamTimes:
    """The operations of one rank with their times."""

    def __init__(self, machine: GpuNode, num_ranks: int) -> None:
        self.machine = machine
        self.operations: list[TimedOperation] = []
        self.host_nbytes = machine.host_nbytes * -(-num_ranks // machine.gpus_per_node)
        self._ranks_per_node = min(num_ranks, machine.gpus_per_node)
        self._busy: dict[str, list[tuple[float, float]]] = {}

    def add(self, stream: SimulatedStream, name: str, cost: Cost) -> None:
        """An operation is queued on ``stream``, whose clock knows everything that it waits for."""
        before = stream.clock.last
        start = stream.clock.seconds
        if cost.way:
            start = self._occupy(cost.way, start, cost.seconds)
        made = TimedOperation(stream, name, cost.kind, start, start + cost.seconds, before)
        stream.clock.last = made
        self.operations.append(made)

    def add_received(self, stream: SimulatedStream, name: str, sent: float, cost: Cost) -> None:
        """A message arrives on ``stream``, which waits until another stage has sent it.

        Args:
            sent: when that stage began to send, in seconds.
        """
        if sent > stream.clock.seconds:
            stream.tick()
            self.add(stream, f"waiting for {name}", Cost(STAGES, sent - stream.clock.seconds))
        stream.tick()
        self.add(stream, name, cost)

    def _occupy(self, way: str, start: float, seconds: float) -> float:
        """The first time from ``start`` on at which ``way`` is free for so long."""
        busy = self._busy.setdefault(way, [])
        index = max(bisect_left(busy, (start, start)) - 1, 0)
        while index < len(busy) and start + seconds > busy[index][0]:
            start = max(start, busy[index][1])
            index += 1
        busy.insert(index, (start, start + seconds))
        return start

    # costs

    def launch(self) -> Cost:
        return Cost(HOST, self.machine.launch_seconds)

    def kernel(self, operator: Any, args: Sequence[Any], kwargs: Any, result: Any, nbytes: int) -> Cost:
        """An operator on the device that reads and writes ``nbytes`` in all."""
        machine = self.machine
        seconds = max(machine.kernel_seconds, nbytes / machine.memory_bandwidth)
        flops = _flops(operator, args, kwargs, result) if nbytes else 0
        if flops:
            rate = machine.flops(next(value.dtype for value in args if isinstance(value, torch.Tensor)))
            if "attention" in str(operator):
                rate *= machine.attention_fraction * (2.0 if _is_causal(operator, args, kwargs) else 1.0)
            seconds = max(seconds, flops / rate)
        return Cost(COMPUTE, seconds)

    def copy(self, nbytes: int, *, is_to_host: bool, is_pinned: bool) -> Cost:
        rate = self.machine.bus_bandwidth if is_pinned else self.machine.pageable_bandwidth
        return Cost(COPY, self.machine.kernel_seconds + nbytes / rate, _TO_HOST if is_to_host else _TO_DEVICE)

    def collective(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> Cost:
        is_in_node = len({rank // self.machine.gpus_per_node for rank in ranks}) == 1
        seconds = self.machine.collective_seconds(op, nbytes, ranks)
        return Cost(COMMUNICATION, seconds, "NVLink" if is_in_node else "the network")

    def on_host(self, nbytes: int, *, is_main: bool) -> Cost:
        """Work of the host that reads and writes ``nbytes`` of its memory, which all ranks of the node share."""
        return Cost(HOST if is_main else UPDATE, nbytes * self._ranks_per_node / self.machine.host_bandwidth)

    def disk(self, nbytes: int) -> Cost:
        return Cost(DISK, nbytes * self._ranks_per_node / self.machine.disk_bandwidth, "the disks")


def _flops(operator: Any, args: Sequence[Any], kwargs: Any, result: Any) -> int:
    """Of the products of one call, masked ones included."""
    packet = operator.overloadpacket
    if (formula := flop_registry.get(packet)) is not None:
        return int(formula(*args, out_val=result, **kwargs))
    ours = MATRIX.get(packet)
    return 0 if ours is None else ours(tuple(args), kwargs, result)


def _is_causal(operator: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """True if attention leaves out each query's later keys: kernels compute half of the products."""
    place = next((at for at, each in enumerate(operator._schema.arguments) if each.name == "is_causal"), len(args))
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def exposed(
    operations: Sequence[TimedOperation], stream: SimulatedStream, begin: float, end: float
) -> dict[str, float]:
    """What ``stream`` did between two times, in seconds by kind.

    While it waits, the time belongs to the operation that it waits for, and before that one started, to the one that
    this waited for in turn.

    Args:
        end: not before the end of the last operation of ``stream``; when its clock's last operation ended.
    """
    seconds = dict.fromkeys(KINDS, 0.0)
    reached = begin
    for operation in operations:
        if operation.stream is stream and operation.end > begin:
            _attribute(seconds, reached, operation.start, operation.before, operation.kind)
            seconds[operation.kind] += operation.end - max(operation.start, reached)
            reached = operation.end
    _attribute(seconds, reached, end, stream.clock.last, HOST)
    return seconds


def _attribute(seconds: dict[str, float], begin: float, end: float, waited: TimedOperation | None, kind: str) -> None:
    """Give the time from ``begin`` to ``end`` to what something of ``kind`` waited for, and what that waited for."""
    while waited is not None and end > begin:
        if waited.end < end:  # another operation was in the way
            seconds[kind] += end - max(waited.end, begin)
            end = max(waited.end, begin)
        seconds[waited.kind] += end - min(max(waited.start, begin), end)
        end = min(max(waited.start, begin), end)
        kind, waited = waited.kind, waited.before


# What GPUs, host memory, buses and networks reach. Peaks are the manufacturers' (NVIDIA H100 and H200 Tensor Core GPU
# data sheets, DGX H100 and H200 data sheets), without sparsity. What is reached of them differs with sizes and power;
# the fractions are one for all.

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True)
class GpuNode:
    """A node with GPUs. Rates are what is reached, per second and per GPU; bytes in one direction.

    Attributes: ``host_bandwidth``: of all host memory of the node. ``launch_seconds``: that the host needs to queue one
    kernel, copy or collective. ``kernel_seconds``: that the shortest kernel takes. ``latency``, ``network_latency``: of
    a collective inside a node, and over several.
    """

    name: str
    matrix_flops: Mapping[torch.dtype, float]
    memory_bandwidth: float
    gpu_nbytes: int | None = None  # of memory that tensors may have; None: no limit
    vector_flops: float = 0.7 * 67 * _TERA
    attention_fraction: float = 0.6  # of what plain matrix products reach; FlashAttention-3, arXiv:2407.08608, fig. 5
    nvlink_bandwidth: float = 0.8 * 450 * _GIGA  # nccl-tests' bus bandwidth over NVLink 4 is 340 to 370 GB/s
    network_bandwidth: float = 0.9 * 50 * _GIGA  # one 400 Gb/s port for each GPU
    bus_bandwidth: float = 0.86 * 64 * _GIGA  # PCIe 5.0 x16, page-locked memory
    pageable_bandwidth: float = 10 * _GIGA  # copies of ordinary host memory
    host_bandwidth: float = 0.75 * 614 * _GIGA  # two sockets of eight DDR5-4800 channels
    disk_bandwidth: float = 25 * _GIGA  # eight PCIe 4.0 drives, each 3.2 GB/s written
    host_nbytes: int = 2 * 1024**4  # of a node
    gpus_per_node: int = 8
    launch_seconds: float = 5 * _MICRO
    kernel_seconds: float = 2 * _MICRO
    latency: float = 15 * _MICRO
    network_latency: float = 30 * _MICRO

    def flops(self, dtype: torch.dtype) -> float:
        """Floating-point operations of matrix products per second."""
        return self.matrix_flops.get(dtype, self.vector_flops)

    def collective_seconds(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """How long a collective takes that all of ``ranks`` call at the same time.

        Args:
            nbytes: of the whole tensor: all ranks' parts of an all-gather, what each rank brings to the others.

        Source: the ring algorithms' traffic per rank, (p - 1) / p of the tensor, twice for an all-reduce. Over several
        nodes each rank of a node carries its part through its own port.
        """
        size = len(ranks)
        nodes: dict[int, int] = {}
        for rank in ranks:
            nodes[rank // self.gpus_per_node] = nodes.get(rank // self.gpus_per_node, 0) + 1
        traffic = nbytes * (size - 1) / size * {"all_reduce": 2.0}.get(op, 1.0)
        if op in ("send", "recv", "broadcast"):
            traffic = float(nbytes)
        if len(nodes) == 1:
            return self.latency + traffic / self.nvlink_bandwidth
        per_node = min(nodes.values())
        if op == "all_to_all":  # what leaves the node goes through this rank's own port
            return self.network_latency + nbytes * (size - per_node) / size / self.network_bandwidth
        return self.network_latency + traffic / min(self.nvlink_bandwidth, per_node * self.network_bandwidth)


def _hopper(name: str, memory_bandwidth: float, gpu_nbytes: int) -> GpuNode:
    matrix = {
        torch.bfloat16: 0.7 * 989 * _TERA,
        torch.float16: 0.7 * 989 * _TERA,
        torch.float8_e4m3fn: 0.6 * 1979 * _TERA,
        torch.float8_e5m2: 0.6 * 1979 * _TERA,
        torch.float32: 0.7 * 67 * _TERA,  # PyTorch's default: no TF32
        torch.float64: 0.7 * 67 * _TERA,
    }
    return GpuNode(name, matrix, 0.85 * memory_bandwidth, gpu_nbytes)


# Memory as ``torch.cuda.get_device_properties`` gives it.
MACHINES = {
    "h100": _hopper("h100", 3.35 * _TERA, 85_028_896_768),
    "h200": _hopper("h200", 4.8 * _TERA, 150_110_011_392),
}


def machine_of(name: str | GpuNode) -> GpuNode:
    """A machine by its name, or itself. Raises: UsageError: an unknown name."""
    if isinstance(name, GpuNode):
        return name
    if name not in MACHINES:
        raise UsageError(
            f"there are no figures of a machine {name!r}.",
            do=f"use one of {', '.join(map(repr, MACHINES))}, or give a shoal.simulation.times.GpuNode.",
            code="dry-run-machine",
        )
    return MACHINES[name]
