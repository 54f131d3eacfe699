"""The output of local ranks on this terminal: whole lines, each with its rank, and tracebacks kept for the report.

    rank --> stdout.log --> StreamTail --> "[rank 0] step 50  loss 0.0173"
    rank --> stderr.log --> StreamTail --> the same; from a traceback on: kept, since the rank is about to end

A progress bar, text that is redrawn after a carriage return, is redrawn on a terminal. In a file or a pipe, its newest
state is one line, every ten seconds and at its end.
"""

from __future__ import annotations

import codecs
import contextlib
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

from shoal.comm.environment import wants_tracebacks

_INTERVAL_SECONDS = 0.05  # between two looks at the files
_BAR_SECONDS = 10.0  # between two states of a progress bar where the output is no terminal
# A traceback is kept for so long. A rank that still runs then has caught the exception, or hangs.
_KEPT_SECONDS = 5.0
_CLEAR_LINE = "\r\x1b[K"
TRACEBACK = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\)")
# Of torch's C++ parts, which follow a message such as that of a store whose connection is closed.
CPP_FRAME = re.compile(r"(\[rank\d+\]: ?)?(frame #\d+: |<omitting python frames>|Exception raised from \w+ at /)")


@dataclass
class LastLine:
    """The last line of a terminal, to which both streams may write."""

    owner: object = None  # whose bar is there


class Terminal:
    """A stream of this process, on which several ranks write whole lines and at most one draws a progress bar."""

    def __init__(self, stream: TextIO, last_line: LastLine | None = None) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        self._last_line = last_line or LastLine()

    def line(self, text: str) -> None:
        """Write a whole line, above a bar if there is one."""
        if self.is_terminal and self._last_line.owner is not None:
            self._last_line.owner, text = None, _CLEAR_LINE + text
        self._write(f"{text}\n")

    def bar(self, text: str, owner: object) -> None:
        """Redraw the bar of ``owner``; the bar of another stays until a line is written."""
        if self._last_line.owner in (None, owner):
            self._write(f"{_CLEAR_LINE}{text}")
            self._last_line.owner = owner

    def _write(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # as of `| head`: the ranks run on
            self._stream.write(text)
            self._stream.flush()


class StreamTail:
    """The tail of one file that a rank writes.

    Args:
        prefix: of each line.
        keeps_tracebacks: keep a traceback, and what follows it, for :data:`_KEPT_SECONDS`; without
            SHOAL_TRACEBACK in the environment, leave C++ frames out.
    """

    def __init__(self, path: Path, terminal: Terminal, prefix: str, *, keeps_tracebacks: bool) -> None:
        self._path = path
        self._terminal = terminal
        self._prefix = prefix
        self._keeps_tracebacks = keeps_tracebacks
        self._hides_frames = keeps_tracebacks and not wants_tracebacks()
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._file: BinaryIO | None = None
        self._open = ""  # a line that has not ended
        self._bar_is_new = False
        self._bar_at = -_BAR_SECONDS
        self._kept: list[str] = []
        self._kept_at = 0.0
        self.has_shown_traceback = False

    def read(self, now: float) -> None:
        """Write the lines that the file has gained."""
        if self._file is None:
            if not self._path.exists():
                return  # the rank has not been started yet
            self._file = self._path.open("rb")
        new = self._file.read()
        if new:
            *lines, self._open = (self._open + self._decode(new)).split("\n")
            self._bar_is_new = "\r" in self._open
            for line in lines:
                self._take(line, now)
        if self._bar_is_new and (self._terminal.is_terminal or now - self._bar_at >= _BAR_SECONDS):
            text, self._bar_is_new, self._bar_at = _visible(self._open), False, now
            if self._terminal.is_terminal:
                self._terminal.bar(self._prefix + text, self)
            elif text:
                self._terminal.line(self._prefix + text)
        if self._kept and now - self._kept_at > _KEPT_SECONDS:
            self.release()

    def _take(self, line: str, now: float) -> None:
        if self._hides_frames and CPP_FRAME.match(line):
            return
        if self._kept or (self._keeps_tracebacks and TRACEBACK.match(line)):
            self._kept_at = self._kept_at if self._kept else now
            self._kept.append(line)
        else:
            self._terminal.line(self._prefix + _visible(line))

    def release(self) -> None:
        """Write what is kept."""
        self.has_shown_traceback |= bool(self._kept)
        for line in self._kept:
            self._terminal.line(self._prefix + _visible(line))
        self._kept.clear()

    def end(self) -> None:
        """Read to the end of the file. A last line may have no end. Idempotent."""
        if self._file is not None and self._file.closed:
            return
        self.read(time.monotonic())
        if self._open:
            self._take(self._open, time.monotonic())
            self._open = ""
        if self._file is not None:
            self._file.close()


def _visible(line: str) -> str:
    """What a terminal shows of a line that is redrawn.

    >>> _visible("10%|#   |\\r50%|##  |\\r"), _visible("no bar")
    ('50%|##  |', 'no bar')
    """
    states = [state for state in line.split("\r") if state.strip()]
    return states[-1] if states else line.replace("\r", "")


class RankOutput:
    """A thread that writes what the ranks write. A context manager."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        last_line = LastLine()
        self._stdout, self._stderr = Terminal(stdout, last_line), Terminal(stderr, last_line)
        self._tails: list[StreamTail] = []
        self._errors: dict[int, StreamTail] = {}
        self._lock = threading.Lock()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-rank-output", daemon=True)

    def follow(self, local_rank: int, prefix: str, *, stdout: str, stderr: str) -> None:
        """Follow the files of a rank that is about to start; an empty path: that stream is not followed."""
        with self._lock:
            for path, terminal in ((stderr, self._stderr), (stdout, self._stdout)):  # start-up messages first
                if path:
                    is_error = terminal is self._stderr
                    tail = StreamTail(Path(path), terminal, prefix, keeps_tracebacks=is_error)
                    self._tails.append(tail)
                    if is_error:
                        self._errors[local_rank] = tail

    def begin_attempt(self, why: str, withheld: Sequence[int] = ()) -> None:
        """All ranks are started anew: write the rest of what the former ones wrote, but for tracebacks of ``withheld``,
        and ``why``.
        """
        with self._lock:
            self._end([self._errors[rank] for rank in withheld if rank in self._errors])
            self._stderr.line(why)
            self._tails.clear()
            self._errors.clear()

    def cut(self) -> None:
        """Write what the ranks have written until now, and follow their files no longer."""
        with self._lock:
            self._end()
            self._tails.clear()

    def shown(self, local_rank: int) -> Literal["nothing", "lines", "lines and traceback"]:
        """What of a rank's stderr is on the terminal."""
        if local_rank not in self._errors:
            return "nothing"
        return "lines and traceback" if self._errors[local_rank].has_shown_traceback else "lines"

    def _end(self, withheld: Sequence[StreamTail] = ()) -> None:
        for tail in self._tails:
            tail.end()
            if tail not in withheld:
                tail.release()

    def end(self, withheld: Sequence[int] = ()) -> None:
        """Write the rest, without the tracebacks of the local ranks ``withheld``, and stop."""
        self._is_ended.set()
        self._thread.join()
        with self._lock:
            self._end([self._errors[rank] for rank in withheld if rank in self._errors])

    def _run(self) -> None:
        while not self._is_ended.wait(_INTERVAL_SECONDS):
            with self._lock:
                now = time.monotonic()
                for tail in self._tails:
                    tail.read(now)

    def __enter__(self) -> RankOutput:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_ended.is_set():
            self.end()
