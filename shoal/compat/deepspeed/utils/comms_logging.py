"""``deepspeed.utils.comms_logging``: times of collectives, and who called them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.observe.collectives import (
    CollectiveLog,
    Records,
    bandwidths,
    straggler_table,
    stragglers,
    summary_of,
)
from shoal.text import format_bytes


def get_caller_func(frame: int = 3) -> str:
    """The name of the function ``frame`` calls up."""
    return sys._getframe(frame).f_code.co_name


def convert_size(size_bytes: float) -> str:
    """Bytes in powers of 1,024."""
    return format_bytes(size_bytes)


def calc_bw_log(comm_op: str, size: float, duration: float) -> tuple[float, float]:
    """Gbit/s of a collective of all ranks, and of its bus, by bytes of one rank and milliseconds."""
    return bandwidths(comm_op, size, duration, current_world().size)


class CommsLogger:
    """A log of collectives under DeepSpeed's names.

    Args:
        log: Shoal's; None: a new one.
    """

    def __init__(self, log: CollectiveLog | None = None) -> None:
        self.log = log if log is not None else CollectiveLog()

    # the settings

    @property
    def enabled(self) -> bool:
        return self.log.is_on

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.log.is_on = bool(value)

    @property
    def prof_all(self) -> bool:
        return self.log.takes_all

    @prof_all.setter
    def prof_all(self, value: bool) -> None:
        self.log.takes_all = bool(value)

    @property
    def prof_ops(self) -> list[str]:
        return list(self.log.kinds)

    @prof_ops.setter
    def prof_ops(self, value: Iterable[str]) -> None:
        self.log.kinds = tuple(value)

    @property
    def verbose(self) -> bool:
        return self.log.is_verbose

    @verbose.setter
    def verbose(self, value: bool) -> None:
        self.log.is_verbose = bool(value)

    @property
    def debug(self) -> bool:
        return self.log.names_callers

    @debug.setter
    def debug(self, value: bool) -> None:
        self.log.names_callers = bool(value)

    @property
    def comms_dict(self) -> Records:
        return self.log.records

    @comms_dict.setter
    def comms_dict(self, value: Records) -> None:
        self.log.records = value

    def configure(self, comms_config: Any) -> None:
        """Apply the section ``comms_logger``, or the section of a config."""
        section = getattr(comms_config, "comms_logger", comms_config)
        for name in ("enabled", "prof_all", "prof_ops", "verbose", "debug"):
            setattr(self, name, getattr(section, name))

    def start_profiling_comms(self) -> None:
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        self.prof_ops = [*dict.fromkeys([*self.prof_ops, *op_name_list])]

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        stopped = set(op_name_list)
        self.prof_ops = [name for name in self.prof_ops if name not in stopped]

    # what was noted

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Record a collective of all ranks: its kind, the name for the log, milliseconds, bytes of one rank."""
        self.log.add(raw_name, msg_size, latency, size=current_world().size, name=record_name)

    def get_raw_data(self) -> Records:
        return dict(self.log.records)

    def has_data(self) -> bool:
        return bool(self.log.records)

    def reset_data(self) -> None:
        self.log.clear()

    def get_operation_names(self) -> list[str]:
        return list(self.log.records)

    def get_total_operations(self) -> int:
        return sum(record[0] for sizes in self.log.records.values() for record in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """The figures of one name by bytes; None: it was not recorded."""
        sizes = self.log.records.get(operation_name)
        return None if sizes is None else summary_of(sizes)

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the records, or return them.

        Communicates: with ``show_straggler``, every rank's times; every rank calls.
        """
        world = current_world()
        late = None
        if show_straggler:
            late = stragglers(self.log, world.communicator("dp", Mesh.of(world.size)))
        if print_log:
            text = self.log.table()
            if late is not None:
                text += f"\n\nwaiting for late ranks\n{straggler_table(late)}"
            sys.stdout.write(f"{text}\n")
        if not return_dict:
            return None
        return {
            "summary": self.log.summary(),
            "straggler_analysis": late,
            "metadata": {
                "world_size": world.size,
                "rank": world.rank,
                "timestamp": datetime.now(UTC).isoformat(),
            },
        }


__all__ = ["CommsLogger", "calc_bw_log", "convert_size", "get_caller_func"]
