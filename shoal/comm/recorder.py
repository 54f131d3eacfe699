"""The flight recorder: what this rank issued, on which axis, in which order, and how many bytes it received.

It is always on. The last calls are kept in a ring; ``with recorder.recording() as entries`` keeps all of them:

    with world.recorder.recording() as entries:
        engine.step()
    assert sum(entry.nbytes for entry in entries if entry.kind == "data") == 3 * parameter_bytes * (n - 1) // n
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from shoal.heartbeat import Heartbeat

RING = 1024  # calls: the last few steps of a large model
_TRACE_VERSION = "2.10"  # of torch's format
# Verbs that the analyzer does not know: it has a second all-gather, of which it compares no sizes.
_VERBS = {verb: f"_all_gather_base {verb}" for verb in ("exchange", "gather_objects")}


class Entry(NamedTuple):
    """One collective, send or receive as this rank issued it."""

    seq: int
    axis: str
    op: str
    label: str
    nbytes: int  # received by this rank, by the formula of the protocol, rounded down
    dtype: torch.dtype | None
    kind: Literal["data", "control"]  # parameters and gradients, or everything else


class Group(NamedTuple):
    """Ranks whose calls match one another in the order of their issue: those along an axis, or a sender and a receiver.

    Attributes:
        name: the same on all its ranks, and of no other group of theirs.
        ranks: by coordinate on the axis; or the sender and the receiver.
    """

    name: str
    ranks: tuple[int, ...]


class Recorder:
    """The calls of one rank over all its axes.

    Args:
        heartbeat: gets the last call.
    """

    def __init__(self, ring: int = RING, heartbeat: Heartbeat | None = None) -> None:
        self.num_issued = 0
        # the fields of entries, which are made when asked for; group, number in it, elements
        self._ring: deque[tuple[tuple[Any, ...], Any, int, tuple[int, int]]] = deque(maxlen=ring)
        self._num_in_group: dict[str, int] = {}
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
        group: Group | None = None,
        numels: tuple[int, int] = (0, 0),
    ) -> None:
        number = 0
        if group is not None:
            number = self._num_in_group[group.name] = self._num_in_group.get(group.name, 0) + 1
        fields = self.num_issued, axis, op, label, nbytes, dtype, kind
        self.num_issued += 1
        self._ring.append((fields, group, number, numels))
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
        return [Entry(*fields) for fields, *_ in self._ring]

    def write_trace(self, folder: Path, rank: int) -> None:
        """Write the calls in the ring that involve other ranks into ``rank_<N>.json``, as torch's analyzer reads them.

        It (``torchfrtrace``) compares the calls of a group by their number. It reads pickles, which Shoal does not
        write: docs/how-to/debugging.md converts the files. Any thread may call. Raises: OSError.
        """
        calls = [call for call in list(self._ring) if call[1] is not None]
        groups = {
            group.name: {"name": group.name, "desc": fields[1], "ranks": str(sorted(group.ranks))}
            for fields, group, *_ in calls
        }
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"rank_{rank}.tmp"
        trace = {"version": _TRACE_VERSION, "pg_config": groups, "entries": [_traced(*call) for call in calls]}
        unfinished.write_text(json.dumps(trace), encoding="utf-8")
        unfinished.replace(folder / f"rank_{rank}.json")

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


def _traced(fields: tuple[Any, ...], group: Group, number: int, numels: tuple[int, int]) -> dict[str, Any]:
    """A call in the fields of torch's flight recorder. The sender of two ranks is named by its place in their order."""
    entry = Entry(*fields)
    sender = int(group.ranks[0] > group.ranks[1])
    names = {"send": f"send {sender}->{1 - sender}", "recv": f"recv {1 - sender}<-{sender}"}
    label = entry.label.replace(":", ";")  # the analyzer splits the name at colons
    name = names.get(entry.op, f"{_VERBS.get(entry.op, entry.op)} of '{label}'")
    dtypes = [] if entry.dtype is None else [str(entry.dtype).removeprefix("torch.")]
    return {
        "record_id": entry.seq,
        "process_group": [group.name, entry.axis],
        "collective_seq_id": number,
        "p2p_seq_id": number if entry.op in names else 0,
        "is_p2p": entry.op in names,
        "profiling_name": f"gloo:{name}",
        "input_sizes": [[numels[0]]],
        "output_sizes": [[numels[1]]],
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,  # a sum may be stored in another dtype, which the analyzer takes for an error
        "state": "scheduled",  # all that the recorder knows
        "time_created_ns": 0,
    }
