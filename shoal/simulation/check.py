"""Checks on the CPU that the streams of an accelerator would wait for each other where they must."""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from shoal.errors import StreamError, UsageError
from shoal.simulation.accelerator import SimulatedAccelerator
from shoal.simulation.accesses import StreamFinding
from shoal.simulation.modes import watching
from shoal.streams import simulated, simulation

_MAX_SHOWN = 8

logger = logging.getLogger("shoal")


class StreamCheck:
    """What a check has found so far, on this rank."""

    def __init__(self, accelerator: SimulatedAccelerator) -> None:
        self._accelerator = accelerator

    @property
    def findings(self) -> list[StreamFinding]:
        """In the order in which they were first found."""
        return list(self._accelerator.findings.values())

    @property
    def num_operations(self) -> int:
        """Operations that were checked: if there are none, the block has done nothing."""
        return self._accelerator.num_operations

    @property
    def host_reads(self) -> Counter[str]:
        """By line of Python, how often this rank's thread waited for values of the device, so far."""
        return self._accelerator.host_reads.copy()

    def report(self) -> str:
        """All findings as text."""
        shown = "\n\n".join(str(finding) for finding in self.findings)
        return f"{self.num_operations} operations, {len(self.findings)} faults" + (f":\n\n{shown}" if shown else ".")


@contextmanager
def check_streams(*, raises: bool = True) -> Iterator[StreamCheck]:
    """Simulate an accelerator on the CPU inside the block, and check every order between its streams.

    Initialize, train a few steps and destroy the engine in the block, with a small model, on one rank or on several.
    Values are computed on the CPU; only the orders are the accelerator's.

    Args:
        raises: raise at the end of the block if there is a finding; else read ``findings``.

    Raises: StreamError: an access is not ordered after the last conflicting one, or cannot be checked. UsageError: in a
        block of its own, or with an accelerator.
    """
    if simulation() is not None or torch.accelerator.is_available():
        raise UsageError(
            "check_streams simulates an accelerator on the CPU, and there already is one.",
            do="do not nest blocks; on a machine with a GPU set CUDA_VISIBLE_DEVICES to nothing.",
            code="stream-check",
        )
    accelerator = SimulatedAccelerator()
    check = StreamCheck(accelerator)
    with simulated(accelerator), watching(accelerator):
        yield check
        accelerator.notice_deaths()
        accelerator.check_order()
    findings = check.findings
    if findings and raises:
        shown = "\n\n".join(str(finding) for finding in findings[:_MAX_SHOWN])
        more = f"\n\n... and {len(findings) - _MAX_SHOWN} more" if len(findings) > _MAX_SHOWN else ""
        raise StreamError(
            f"the streams do not wait for each other where they must ({len(findings)} faults):\n\n{shown}{more}",
            do="add the wait that each entry names. If the lines are Shoal's own, please report it.",
            code="stream-race",
        )


class LastingCheck:
    """``check_streams`` for the life of an engine, begun and ended by the same thread.

    A process that ends before ``end()`` logs what was found.
    """

    def __init__(self) -> None:
        self._block = check_streams()
        self._check = self._block.__enter__()
        atexit.register(self._say)

    @property
    def num_operations(self) -> int:
        return self._check.num_operations

    def end(self) -> None:
        """Raises: StreamError: as at the end of a block of ``check_streams``."""
        atexit.unregister(self._say)
        self._say()
        self._block.__exit__(None, None, None)

    def give_up(self, error: BaseException) -> None:
        """End it because of an error, which is the one to be raised."""
        atexit.unregister(self._say)
        with suppress(type(error)):
            self._block.__exit__(type(error), error, error.__traceback__)

    def _say(self) -> None:
        level = logging.ERROR if self._check.findings else logging.INFO
        logger.log(level, "debug.check_streams: %s", self._check.report())
