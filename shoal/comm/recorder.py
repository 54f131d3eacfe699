"""The flight recorder: what this rank issued, on which axis, in which order, and how many bytes it received.

It is always on. The last calls are kept in a ring; ``with recorder.recording() as entries`` keeps all of them:

    with world.recorder.recording() as entries:
        engine.step()
    assert sum(entry.nbytes for entry in entries if entry.kind == "data") == 3 * parameter_bytes * (n - 1) // n
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from shoal.heartbeat import Heartbeat

RING = 1024  # calls: the last few steps of a large model


class Entry(NamedTuple):
    """One collective, send or receive as this rank issued it."""

    seq: int
    axis: str
    op: str
    label: str
    nbytes: int  # received by this rank, by the formula of the protocol, rounded down
    dtype: torch.dtype | None
    kind: Literal["data", "control"]  # parameters and gradients, or everything else


class Recorder:
    """The calls of one rank over all its axes.

    Args:
        heartbeat: gets the last call.
    """

    def __init__(self, ring: int = RING, heartbeat: Heartbeat | None = None) -> None:
        self.num_issued = 0
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=ring)  # the fields of entries, which are made when asked for
        self._recordings: list[list[Entry]] = []
        self._heartbeat = heartbeat if heartbeat is not None and heartbeat.is_read else None

    def add(
        self,
        axis: str,
        op: str,
        label: str,
        nbytes: int,
        dtype: torch.dtype | None,
        kind: Literal["data", "control"],
    ) -> None:
        fields = self.num_issued, axis, op, label, nbytes, dtype, kind
        self.num_issued += 1
        self._ring.append(fields)
        if self._heartbeat is not None:
            self._heartbeat.issued(self.num_issued, axis, op, label)
        for entries in self._recordings:
            entries.append(Entry(*fields))

    @contextmanager
    def recording(self) -> Iterator[list[Entry]]:
        """Collect every call that is issued inside the block."""
        entries: list[Entry] = []
        self._recordings.append(entries)
        try:
            yield entries
        finally:
            self._recordings = [kept for kept in self._recordings if kept is not entries]

    @property
    def last(self) -> list[Entry]:
        """The calls still in the ring, oldest first."""
        return [Entry(*fields) for fields in self._ring]

    def table(self, entries: Sequence[Entry] | None = None) -> str:
        """``entries`` (by default the ring) as text, a line a call."""
        rows = [("seq", "axis", "op", "label", "bytes", "dtype", "kind")]
        rows += [
            (
                str(entry.seq), entry.axis, entry.op, entry.label, f"{entry.nbytes:,}",
                str(entry.dtype).removeprefix("torch.") if entry.dtype else "-", entry.kind,
            )
            for entry in (self.last if entries is None else entries)
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column in (0, 4) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )
