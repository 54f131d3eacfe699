"""What a rank is doing, in a file that its launcher maps too: it can be read while the rank is stopped or stuck.

    launcher    SHOAL_HEARTBEATS=<private folder>, in the environment of the ranks
    rank        start-<local rank>: which process it is, before its program begins
    rank        heartbeat().enter("step", seconds=60, step=7)            at the start of each section
                heartbeat().issued(812, "dp", "all_gather", "layers.3")  for each collective
    launcher    read_heartbeats(folder): is a section older than its time-out?

A program that no such launcher has started has a heartbeat in memory with a descriptor, which its own threads read, and
other processes of its machine as ``/proc/PID/fd/N``. Where the system has no such memory, the heartbeat does nothing.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.process import started

SECTIONS = ("init", "data", "compile", "step", "evaluation", "checkpoint")

NBYTES = 512
_OWNER = struct.Struct("=qqq")  # rank, process number, its start
# Number in SECTIONS, monotonic seconds at its start, time-out (0: none), step, thread that has entered it.
_SECTION = struct.Struct("=dddqQ")
_NUMBER = struct.Struct("=q")  # collectives issued
_SECTION_AT = _OWNER.size
_NUMBER_AT = _SECTION_AT + _SECTION.size
_LABEL_AT = _NUMBER_AT + _NUMBER.size
_LABEL_NBYTES = NBYTES - _LABEL_AT
_CALL = "hang"  # an empty file in the launcher's folder
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class HeartbeatPlace:
    """The launcher's folder, and this process's ranks."""

    folder: str
    local_rank: int
    rank: int


@dataclass(frozen=True)
class Beat:
    """What one rank was doing when it was read. ``seconds``: 0 where the section has no time-out."""

    local_rank: int
    rank: int
    pid: int
    started: int  # ticks since boot
    section: str
    began: float  # monotonic seconds, the same clock in all processes of a machine
    seconds: float
    step: int
    num_issued: int
    last_issued: str
    thread: int = 0  # that runs the program, as ``threading.get_ident`` numbers it; 0: not known

    @property
    def is_before_init(self) -> bool:
        """True if it has entered no section: its program has not come to ``initialize``."""
        return not self.thread

    @property
    def is_late(self) -> bool:
        """True if the section takes longer than its time-out."""
        return 0.0 < self.seconds < time.monotonic() - self.began


class SectionLog(Protocol):
    """What is told of each section that begins."""

    def enter(self, section: str, step: int) -> None: ...

    def close(self) -> None: ...


class Heartbeat:
    """This rank's.

    Args:
        memory: ``NBYTES``; None: nothing is written.
        file: the descriptor of the memory; None: it is a file of the launcher's, which reads it.
    """

    def __init__(self, memory: mmap.mmap | None = None, file: int | None = None) -> None:
        self.file = file
        self._memory = memory
        self._labels: dict[tuple[str, str, str], bytes] = {}
        self.log: SectionLog | None = None
        self.is_read = memory is not None

    def enter(self, section: str, seconds: float | None, step: int = 0) -> None:
        """A section begins now, and the one before has ended.

        Args:
            section: one of ``SECTIONS``.
            seconds: its time-out; None: none.
            step: steps taken.
        """
        if self._memory is not None:
            number = SECTIONS.index(section)
            began, thread = time.monotonic(), threading.get_ident()
            _SECTION.pack_into(self._memory, _SECTION_AT, number, began, seconds or 0.0, step, thread)
        if self.log is not None:
            self.log.enter(section, step)

    def set_rank(self, rank: int) -> None:
        """The rank is known once the ranks have met."""
        if self._memory is not None:
            _OWNER.pack_into(self._memory, 0, rank, os.getpid(), started(os.getpid()) or 0)

    def end_log(self) -> None:
        """Close the log. Idempotent."""
        if self.log is not None:
            self.log.close()
            self.log = None

    def issued(self, number: int, axis: str, op: str, label: str) -> None:
        """This rank issues its collective ``number``, counted from 1 over all axes."""
        memory = self._memory
        if memory is None:
            return
        key = axis, op, label
        text = self._labels.get(key)
        if text is None:
            text = f"{op} {label!r} on axis {axis!r}".encode()[:_LABEL_NBYTES].ljust(_LABEL_NBYTES, b"\0")
            if len(self._labels) < 4096:
                self._labels[key] = text
        memory[_LABEL_AT:NBYTES] = text
        _NUMBER.pack_into(memory, _NUMBER_AT, number)


def await_call(place: HeartbeatPlace, on_hang: Callable[[], None], is_over: threading.Event) -> None:
    """Wait until the launcher has found a hang, or ``is_over``. It ends the rank once ``on_hang`` has returned."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGABRT})  # the main thread gets it, before it runs on
    answer = Path(place.folder, f"answer-{place.local_rank}")  # empty: the launcher waits for this rank
    with suppress(OSError):  # the launcher has ended
        answer.write_text("")
        while not is_over.wait(_POLL_SECONDS) and not Path(place.folder, _CALL).exists():
            pass
        if not is_over.is_set():
            on_hang()
        answer.write_text("over")


def call_ranks(folder: Path, seconds: float) -> None:
    """Tell the ranks of a hang, and wait for those that listen, for ``seconds`` at most."""
    answers = list(folder.glob("answer-*"))
    Path(folder, _CALL).touch()
    deadline = time.monotonic() + seconds
    while not all(answer.stat().st_size for answer in answers) and time.monotonic() < deadline:
        time.sleep(0.05)


_heartbeat: Heartbeat | None = None


def heartbeat(place: HeartbeatPlace | None) -> Heartbeat:
    """This process's: made at the first call. ``place``: None: no launcher has named one."""
    global _heartbeat
    if _heartbeat is None:
        _heartbeat = _in_memory() if place is None else open_heartbeat(place)
    return _heartbeat


def _in_memory() -> Heartbeat:
    if not hasattr(os, "memfd_create"):
        return Heartbeat()
    file = os.memfd_create("shoal-heartbeat")
    os.ftruncate(file, NBYTES)
    return Heartbeat(mmap.mmap(file, NBYTES), file)


def open_heartbeat(place: HeartbeatPlace) -> Heartbeat:
    """One with a file, unless another process of the same local rank has one."""
    start = started(os.getpid())
    if start is None:
        return Heartbeat()
    try:
        file = os.open(
            Path(place.folder, str(place.local_rank)), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
        )
    except OSError:
        return Heartbeat()  # a process that this rank has started; or the launcher has ended
    try:
        os.ftruncate(file, NBYTES)
        memory = mmap.mmap(file, NBYTES)
    finally:
        os.close(file)
    memory[:] = bytes(NBYTES)
    _OWNER.pack_into(memory, 0, place.rank, os.getpid(), start)
    return Heartbeat(memory)


def _in_forked_child() -> None:
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat = Heartbeat()


os.register_at_fork(after_in_child=_in_forked_child)


def clear_heartbeats(folder: Path) -> None:
    """Before the ranks of another attempt start: their processes are others."""
    for path in folder.iterdir():
        path.unlink()


def read_heartbeats(folder: Path, *, has_ended: bool = False) -> list[Beat]:
    """Those of the ranks that have begun, by local rank.

    Args:
        has_ended: also of processes that are there no longer.
    """
    beats = []
    for path in folder.iterdir():
        data = path.read_bytes()
        if len(data) != NBYTES:
            continue
        beat = read_beat(data, int(path.name))
        if beat.pid and (has_ended or started(beat.pid) == beat.started):
            beats.append(beat)
    return sorted(beats, key=lambda beat: beat.local_rank)


def read_starts(folder: Path) -> list[Beat]:
    """The ranks whose program is there and has not come to ``initialize``, by local rank."""
    beats = []
    for path in folder.glob("start-*"):
        local_rank = path.name.removeprefix("start-")
        values = path.read_text().split()
        if len(values) == 5 and not Path(folder, local_rank).exists() and started(int(values[1])) == int(values[2]):
            (rank, pid, start), (began, seconds) = map(int, values[:3]), map(float, values[3:])
            beats.append(Beat(int(local_rank), rank, pid, start, "init", began, seconds, 0, 0, ""))
    return sorted(beats, key=lambda beat: beat.local_rank)


def read_beat(data: bytes, local_rank: int = 0) -> Beat:
    """Of the ``NBYTES`` of a heartbeat."""
    rank, pid, start = _OWNER.unpack_from(data)
    number, began, seconds, step, thread = _SECTION.unpack_from(data, _SECTION_AT)
    label = data[_LABEL_AT:NBYTES].rstrip(b"\0").decode(errors="replace")
    num_issued = _NUMBER.unpack_from(data, _NUMBER_AT)[0]
    section = SECTIONS[int(number)]
    return Beat(local_rank, rank, pid, start, section, began, seconds, step, num_issued, label, thread)
