"""A hang of this machine's ranks: found by their heartbeats, explained by their stacks, and ended.

1  watch     each second: is a rank's section older than its time-out, in two readings? A rank that has not come to
             ``initialize`` is in the section ``init`` since its process began.
             where the config says so, the ranks write their last collectives
2  ranks     SIGABRT to all: faulthandler, which needs no help of the stuck thread, writes the Python stack of every
             thread to stderr, and the process ends. A rank that a signal has stopped is continued for that.
3  watch     SIGKILL for those that are still there after some seconds
4  launcher  prints one report: what each rank was doing, and the stack of the one that the others wait for
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoal.hang import Stuck, describe_hang, kept_dumps, main_stack, nccl_status
from shoal.heartbeat import Beat, call_ranks, clear_heartbeats, read_heartbeats, read_starts
from shoal.launch.failure import stderr_of
from shoal.launch.output import RankOutput
from shoal.process import has_pending, is_stopped, started

_INTERVAL_SECONDS = 1.0
_CALL_SECONDS = 1.5  # for ranks that run to write their last collectives
_ABORT_SECONDS = 5.0  # for the stacks to be written


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
            _continue_terminated()
            with self._is_handled, suppress(OSError):  # a file goes with its process's attempt
                before = {(beat.pid, beat.began) for beat in late}
                beats = sorted(
                    read_heartbeats(self._folder) + read_starts(self._folder), key=lambda beat: beat.local_rank
                )
                late = [beat for beat in beats if beat.is_late]
                if all(beat.section == "init" for beat in late) and not any(beat.is_before_init for beat in beats):
                    late = []  # its own error says which ranks of other machines it waits for
                if not self.report and any((beat.pid, beat.began) in before for beat in late):
                    self._end(beats)

    def _end(self, beats: Sequence[Beat]) -> None:
        self._output.cut()  # what ranks write from here on is in the report
        files = {beat.local_rank: stderr_of(beat.local_rank, self._log_dir) for beat in beats}
        sizes = {rank: file.stat().st_size for rank, file in files.items() if file is not None}
        stopped = {beat.pid for beat in beats if is_stopped(beat.pid)}
        late = {beat.pid for beat in beats if beat.is_late}
        call_ranks(self._folder, _CALL_SECONDS)
        nccl = nccl_status()
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
            Stuck(beat, main_stack(dumps.get(beat.rank, ""), beat.thread), beat.pid in stopped, beat.pid in late)
            for beat in beats
        ]
        self.report = describe_hang(stuck, kept_dumps(dumps, nccl))


def _continue_terminated() -> None:
    """Continue child processes that a signal has stopped and the launcher has terminated: before that none ends."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread has ended
            for pid in map(int, children.read_text().split()):
                if is_stopped(pid) and has_pending(pid, signal.SIGTERM):
                    os.kill(pid, signal.SIGCONT)


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
