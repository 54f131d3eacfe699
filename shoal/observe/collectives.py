"""A log of each rank's collectives with their times, by kind and size. It is off until it is enabled.

    log = collective_log(world)
    log.is_on = True
    ...
    print(log.table())

``TimedCommunicator`` writes Shoal's own collectives into it, ``deepspeed.comm`` those of a script.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from shoal.comm.protocol import Call, Communicator, Work
from shoal.comm.world import World, current_world
from shoal.device import Device
from shoal.text import format_bytes
from shoal.text import table as text_table

Result = TypeVar("Result")

logger = logging.getLogger("shoal")

TRIMMED = 0.1  # a mean leaves out this share of the values at each end

# Other names of the kinds, as torch has them.
_SAME = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce_coalesced": "all_reduce",
    "inference_all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}

Records = dict[str, dict[int, list[Any]]]  # name: bytes: [count, milliseconds, algorithm's and bus's Gbit/s]


class CollectiveLog:
    """The collectives of one rank, with their times.

    Args:
        speaks: log each collective as a line, if ``is_verbose``; on rank 0.

    Attributes:
        is_on: record collectives.
        takes_all: record every kind; else ``kinds`` only.
        kinds: names of kinds, or of labels.
        is_verbose: log each collective as a line.
        names_callers: record each caller's collectives under a name of their own.
        records: the recorded times.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self._speaks = speaks
        self.is_on = False
        self.takes_all = True
        self.kinds: Collection[str] = ()
        self.is_verbose = False
        self.names_callers = False
        self.records: Records = {}

    def wants(self, kind: str, label: str = "") -> bool:
        """True if a collective of this kind is recorded."""
        names = {kind, _SAME.get(kind, kind), label}
        return self.is_on and (self.takes_all or not names.isdisjoint({_SAME.get(n, n) for n in self.kinds}))

    def add(
        self, kind: str, nbytes: int, milliseconds: float, *, size: int, name: str | None = None, caller: str = ""
    ) -> None:
        """Record a collective.

        Args:
            nbytes: this rank's input.
            size: ranks that took part.
            name: what it is recorded under; None: its kind.
            caller: where it was called.
        """
        name = name or kind
        if self.names_callers and caller:
            name = f"{name} | [Caller Func: {caller}]"
        algorithm, bus = bandwidths(kind, nbytes, milliseconds, size)
        record = self.records.setdefault(name, {}).setdefault(nbytes, [0, [], [], []])
        record[0] += 1
        for values, value in zip(record[1:], (milliseconds, algorithm, bus), strict=True):
            values.append(value)
        if self.is_verbose and self._speaks:
            logger.info(
                "%s of %s: %.2f ms, %.2f Gbit/s, on the bus %.2f Gbit/s",
                name, format_bytes(nbytes), milliseconds, algorithm, bus,
            )  # fmt: skip

    def clear(self) -> None:
        """Delete the records."""
        self.records.clear()

    def summary(self) -> dict[str, dict[int, dict[str, Any]]]:
        """By name and bytes: count, times and rates; means without the tenth at each end."""
        return {name: summary_of(sizes) for name, sizes in self.records.items()}

    def table(self) -> str:
        """The same as text."""
        rows = [
            [
                name, each["msg_size_str"], each["count"], f"{each['total_latency_ms']:.2f}",
                f"{each['avg_latency_ms']:.3f}", f"{each['tput_avg_gbps']:.2f}", f"{each['busbw_avg_gbps']:.2f}",
            ]
            for name, sizes in self.summary().items()
            for each in sizes.values()
        ]  # fmt: skip
        return text_table(rows, ["collective", "size", "count", "total ms", "mean ms", "Gbit/s", "bus Gbit/s"])


def summary_of(sizes: Mapping[int, Sequence[Any]]) -> dict[int, dict[str, Any]]:
    """The figures of one name, by bytes, in ascending order."""
    return {
        nbytes: {
            "count": count,
            "total_latency_ms": sum(milliseconds),
            "avg_latency_ms": trimmed_mean(milliseconds),
            "tput_avg_gbps": trimmed_mean(algorithm),
            "busbw_avg_gbps": trimmed_mean(bus),
            "msg_size_bytes": nbytes,
            "msg_size_str": format_bytes(nbytes),
        }
        for nbytes, (count, milliseconds, algorithm, bus) in sorted(sizes.items())
    }


def stragglers(log: CollectiveLog, comm: Communicator) -> dict[str, dict[int, dict[str, Any]]]:
    """How long each collective waited for late ranks: its time minus that of the rank that waited least.

    Only names and sizes that every rank recorded equally often are included.

    Communicates: every rank's times, as JSON. Every rank calls.
    """
    mine = {name: {str(nbytes): record[1] for nbytes, record in sizes.items()} for name, sizes in log.records.items()}
    everyone = comm.gather_objects(mine, label="times of collectives")
    waits: dict[str, dict[int, dict[str, Any]]] = {}
    for name, sizes in mine.items():
        for nbytes, times in sizes.items():
            rows = [theirs.get(name, {}).get(nbytes, []) for theirs in everyone]
            if any(len(row) != len(times) for row in rows):
                continue
            least = [min(column) for column in zip(*rows, strict=True)]
            waited = [time - low for time, low in zip(times, least, strict=True)]
            waits.setdefault(name, {})[int(nbytes)] = {
                "count": len(times),
                "total_comm_lat_ms": sum(least),
                "total_straggler_ms": sum(waited),
                "avg_comm_lat_ms": trimmed_mean(least),
                "avg_straggler_ms": trimmed_mean(waited),
                "msg_size_bytes": int(nbytes),
                "msg_size_str": format_bytes(int(nbytes)),
            }
    return waits


def straggler_table(waits: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """The result of ``stragglers`` as a table."""
    keys = ("total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms", "avg_straggler_ms")
    rows = [
        [name, each["msg_size_str"], each["count"], *(f"{each[key]:.3f}" for key in keys)]
        for name, sizes in waits.items()
        for each in sizes.values()
    ]
    headers = ["collective", "size", "count", "total ms", "total waiting ms", "mean ms", "mean waiting ms"]
    return text_table(rows, headers)


def bandwidths(kind: str, nbytes: float, milliseconds: float, size: int) -> tuple[float, float]:
    """Gbit/s of a collective: bytes by time, and what that means for the slowest link.

    Args:
        nbytes: what one rank puts in.

    Source: NCCL's tests, doc/PERFORMANCE.md; of an all_reduce the first figure is twice theirs, as DeepSpeed has it.

    >>> bandwidths("all_gather", 1_000_000, 1.0, 4)
    (32.0, 24.0)
    >>> bandwidths("all_reduce", 1_000_000, 1.0, 4)
    (16.0, 12.0)
    """
    if milliseconds <= 0:
        return 0.0, 0.0
    kind = _SAME.get(kind, kind)
    rate = nbytes * 8 / milliseconds / 1e6
    if kind in ("all_gather", "reduce_scatter", "exchange"):
        return rate * size, rate * (size - 1)
    if kind == "all_reduce":
        return 2 * rate, rate * 2 * (size - 1) / size
    if kind == "all_to_all":
        return rate, rate * (size - 1) / size
    return rate, rate


def trimmed_mean(values: Iterable[float], share: float = TRIMMED) -> float:
    """The mean without the largest and the smallest, a share at each end; 0 of nothing.

    >>> trimmed_mean([3.0, 1.0, 2.0]), trimmed_mean([*[2.0] * 8, 100.0, 0.0])
    (2.0, 2.0)
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0
    num_outliers = round(len(ordered) * share)
    middle = ordered[num_outliers : len(ordered) - num_outliers] or ordered
    return math.fsum(middle) / len(middle)


_LOGS: weakref.WeakKeyDictionary[World, CollectiveLog] = weakref.WeakKeyDictionary()  # while each world lives


def collective_log(world: World) -> CollectiveLog:
    """The one log of this rank of a world."""
    return _LOGS.setdefault(world, CollectiveLog(speaks=world.reports))


def current_log() -> CollectiveLog | None:
    """The log of the current world; None, without creating a world, if no log was created before."""
    return _LOGS.get(current_world()) if _LOGS else None


class TimedCommunicator(Communicator):
    """The ranks of another communicator, with a clock for its collectives.

    Sends and receives are not timed: to wait for one receive at a time could block ranks that send to each other in a
    ring.

    Order: for a recorded collective the host waits for the device before it and for its end, so it overlaps with
    nothing; ranks issue the same calls in the same order.
    """

    def __init__(self, inner: Communicator, log: CollectiveLog, device: Device) -> None:
        super().__init__(inner.backend, inner.recorder)
        self._inner = inner
        self._log = log
        self._device = device

    def issue(self, call: Call) -> Work:
        if call.verb in ("send", "recv", "batch"):
            return self._inner.issue(call)
        nbytes = call.sent.nbytes // (self.size if call.verb == "reduce_scatter" else 1)
        return self._timed(call.verb, call.label, nbytes, partial(self._inner.issue, call), lambda work: work.wait())

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        return self._timed("gather_objects", label, 0, partial(super().gather_objects, value, label=label))

    def barrier(self, *, label: str) -> None:
        self._timed("barrier", label, 0, partial(super().barrier, label=label))

    def _timed(
        self,
        op: str,
        label: str,
        nbytes: int,
        run: Callable[[], Result],
        finish: Callable[[Result], object] = lambda _: None,
    ) -> Result:
        """Run a call and log it, where the log wants it. Args: ``nbytes``: this rank's input."""
        if not self._log.wants(op, label):
            return run()
        result, milliseconds = timed(self._device, run, finish)
        self._log.add(op, nbytes, milliseconds, size=self.size, caller=label)
        return result


def timed(device: Device, call: Callable[[], Result], finish: Callable[[Result], object]) -> tuple[Result, float]:
    """The result of ``call``, and the milliseconds until ``finish(result)`` and the device are done."""
    device.synchronize()
    began = time.perf_counter()
    result = call()
    finish(result)
    device.synchronize()
    return result, (time.perf_counter() - began) * 1e3
