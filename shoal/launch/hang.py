"""A hang of this machine's ranks: found by their heartbeats, explained by their stacks, and ended.

1  watch     each second: is a rank's section older than its time-out, in two readings?
2  ranks     SIGABRT to all: faulthandler, which needs no help of the stuck thread, writes the Python stack of every
             thread to stderr, and the process ends. A rank that a signal has stopped is continued for that.
3  watch     SIGKILL for those that are still there after some seconds
4  launcher  prints one report: what each rank was doing, and the stack of the one that the others wait for
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.heartbeat import Beat, clear_heartbeats, read_heartbeats
from shoal.launch.failure import is_users_file, listed_ranks, place_of, stderr_of
from shoal.launch.output import RankOutput
from shoal.process import is_stopped, started

_INTERVAL_SECONDS = 1.0
_ABORT_SECONDS = 5.0  # for the stacks to be written
_STACK_LINES = 12
_RANKS_SHOWN = 16

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_COLLECTIVES = re.compile(r"[/\\](?:shoal[/\\]comm|torch[/\\]distributed)[/\\]")


@dataclass(frozen=True)
class Stuck:
    """A rank at the hang.

    Args:
        stack: of the thread that runs the program, the innermost frame first; empty where none was written.
        is_stopped: by a signal, or a debugger.
        is_late: its section was older than its time-out.
    """

    beat: Beat
    stack: tuple[str, ...]
    is_stopped: bool = False
    is_late: bool = False

    @property
    def is_waiting(self) -> bool:
        """True if it was inside a collective."""
        return not self.is_stopped and any(_COLLECTIVES.search(frame) for frame in self.stack)

    @property
    def place(self) -> str:
        """The innermost frame in the user's code, or else the innermost of all: ``train.py:12, in main``."""
        frames = [match for line in self.stack if (match := _FRAME.match(line))]
        chosen = next((frame for frame in frames if is_users_file(frame["path"])), frames[0] if frames else None)
        return "" if chosen is None else place_of(chosen)


class HangWatch:
    """A thread that ends this machine's ranks when one of them hangs. A context manager.

    Args:
        folder: the heartbeats; empty.
        log_dir: where the ranks' stderr is, as ``stderr_of`` finds it.

    Attributes:
        report: on the hang of this attempt, for the terminal; empty: there was none.
    """

    def __init__(self, folder: Path, log_dir: Path, output: RankOutput) -> None:
        self.report = ""
        self._folder = folder
        self._log_dir = log_dir
        self._output = output
        self._is_ended = threading.Event()
        self._is_handled = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="shoal-hang-watch", daemon=True)

    def __enter__(self) -> HangWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        self._thread.join()

    def finish(self) -> str:
        """Wait until a hang that was found is explained. Returns: the report."""
        with self._is_handled:
            return self.report

    def begin_attempt(self) -> None:
        """All ranks are started anew."""
        with self._is_handled:
            self.report = ""
            clear_heartbeats(self._folder)

    @property
    def step(self) -> int | None:
        """Steps that this machine's ranks of this attempt have taken; None: they have said nothing."""
        return max((beat.step for beat in read_heartbeats(self._folder, has_ended=True)), default=None)

    def _run(self) -> None:
        late: list[Beat] = []
        while not self._is_ended.wait(_INTERVAL_SECONDS):
            with self._is_handled, suppress(OSError):  # a file goes with its process's attempt
                before = {(beat.pid, beat.began) for beat in late}
                beats = read_heartbeats(self._folder)
                late = [beat for beat in beats if beat.is_late]
                if not self.report and any((beat.pid, beat.began) in before for beat in late):
                    self._end(beats)

    def _end(self, beats: Sequence[Beat]) -> None:
        self._output.cut()  # what ranks write from here on is in the report
        files = {beat.local_rank: stderr_of(beat.local_rank, self._log_dir) for beat in beats}
        sizes = {rank: file.stat().st_size for rank, file in files.items() if file is not None}
        stopped = {beat.pid for beat in beats if is_stopped(beat.pid)}
        late = {beat.pid for beat in beats if beat.is_late}
        for number in (signal.SIGABRT, signal.SIGCONT):
            _signal(beats, number)
        deadline = time.monotonic() + _ABORT_SECONDS
        while any(map(_is_there, beats)) and time.monotonic() < deadline:
            time.sleep(0.05)
        _signal(beats, signal.SIGKILL)
        dumps = {
            beat.rank: _read_from(file, sizes[beat.local_rank])
            for beat in beats
            if (file := files[beat.local_rank]) is not None
        }
        stuck = [
            Stuck(beat, main_stack(dumps.get(beat.rank, "")), beat.pid in stopped, beat.pid in late) for beat in beats
        ]
        self.report = describe_hang(stuck, _kept(dumps))


def describe_hang(stuck: Sequence[Stuck], kept: str) -> str:
    """The report of a hang.

    Args:
        stuck: all ranks of this machine; of one at least the section is older than its time-out.
        kept: the file with the stacks of all threads.
    """
    causes = causes_of(stuck)
    shown = [*causes, *(each for each in stuck if each not in causes)]
    late = next((each.beat for each in shown if each.is_late), shown[0].beat)
    match causes:
        case []:
            who = "all ranks wait"
        case [one]:
            who = f"rank {one.beat.rank} hangs"
        case _:
            who = f"ranks {listed_ranks([each.beat.rank for each in causes])} hang"
    lines = [
        f"shoal: [hang] step {late.step}: {who}; section '{late.section}' of rank {late.rank} took longer than its"
        f" {late.seconds:g} s (timeouts.{late.section}). All ranks were ended."
    ]
    lines += [f"  rank {each.beat.rank}: {_doing(each)}" for each in shown[:_RANKS_SHOWN]]
    if len(shown) > _RANKS_SHOWN:
        lines.append(f"  and {len(shown) - _RANKS_SHOWN} more ranks")
    if stack := shown[0].stack[:_STACK_LINES]:
        lines += [f"  the stack of rank {shown[0].beat.rank}:", *(f"  {frame}" for frame in stack)]
    if kept:
        lines.append(f"  the stacks of all threads of all ranks: {kept}")
    compare = "" if causes else " compare the ranks' last collectives;"
    lines.append(f"  do:{compare} if nothing is wrong, raise timeouts.{late.section} in the config (null: no limit).")
    return "\n".join(lines)


def causes_of(stuck: Sequence[Stuck]) -> list[Stuck]:
    """The ranks for which the others wait: those that are stopped; else those that are in no collective while others
    are; else those that have issued fewer. None where all are alike.
    """
    for is_cause in (
        lambda each: each.is_stopped,
        lambda each: bool(each.stack) and not each.is_waiting,
        lambda each: each.beat.num_issued == min(other.beat.num_issued for other in stuck),
    ):
        causes = [each for each in stuck if is_cause(each)]
        if causes and (len(causes) < len(stuck) or len(stuck) == 1):
            return causes
    return []


def _doing(each: Stuck) -> str:
    beat = each.beat
    if each.is_stopped:
        text = "is stopped, by a signal or a debugger"
    elif each.is_waiting:
        text = f"waits in a collective, called at {each.place}"
    else:
        text = f"runs {each.place}" if each.place else "wrote no stack"
    if not beat.num_issued:
        return f"{text}; no collective yet"
    return f"{text}; collective {beat.num_issued}: {beat.last_issued}"


def main_stack(dump: str) -> tuple[str, ...]:
    """The frames of the thread that runs the program: the main one, which faulthandler writes last. Where backward runs
    in a thread of autograd's, that one.
    """
    threads: list[list[str]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and _FRAME.match(line):
            threads[-1].append(line)
    if not threads:
        return ()
    main = threads[-1]
    if main and "_engine_run_backward" in main[0]:
        main = next((each for each in threads if any("shoal/running" in frame for frame in each)), main)
    return tuple(main)


def _kept(dumps: Mapping[int, str]) -> str:
    """Writes the dumps to a file. Returns: its path; empty if it could not be written."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="shoal-hang-", suffix=".txt")
        with os.fdopen(descriptor, "w") as file:
            for rank, dump in sorted(dumps.items()):
                file.write(f"rank {rank}\n{dump}\n")
    except OSError:
        return ""
    return path


def _read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def _is_there(beat: Beat) -> bool:
    return started(beat.pid) == beat.started


def _signal(beats: Sequence[Beat], number: int) -> None:
    for beat in filter(_is_there, beats):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(beat.pid, number)
