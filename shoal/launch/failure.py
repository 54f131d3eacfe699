"""The report on ranks that failed: one error, said once, and the exit code of the rank that failed first.

Each rank's stderr is read from its file. Of an uncaught exception it gives the traceback and the error, the lines after
the last frame:

    Traceback (most recent call last):
      File "train.py", line 9, in main
        engine, *_ = shoal.initialize(model=model, config=config)
    shoal.errors.ConfigError: [config] optimizer.tpye: no such key in optimizer.      <- error[0]
      do: did you mean 'type'?                                                        <- error[1]

An error of Shoal's own says what is wrong and what to do, so its traceback is left out, but for the frame in the user's
code. Ranks with the same error are one report. An error that only says that another rank ended is not reported where
that rank's own error is there.
"""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.launch.output import CPP_FRAME, TRACEBACK
from shoal.source import is_users_file, place_of
from shoal.text import listed_ranks

_TAIL_LINES = 20
_SCREEN_LINES = 22  # of a traceback; its head and an empty line come before it
# Errors of a rank whose peer ended; it is not the rank that failed first.
_MARKS_OF_A_LOST_PEER = (
    "[rank-failed]",
    "[rank-left]",
    "Connection closed by peer",
    "Connection reset by peer",
    "ncclRemoteError",
)
# Messages of CUDA, NVML and the kernel on a device that has failed, and Shoal's own.
_MARKS_OF_HARDWARE = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "GPU is lost",
    "fallen off the bus",
    "[device-failed]",
)
HARDWARE_EXIT_CODE = 74  # EX_IOERR
_LINKS = ("The above exception was the direct cause", "During handling of the above exception")
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_OWN_ERROR = re.compile(r"^shoal\.[\w.]+: (?=\[[\w-]+\] )")
_LOG_OF_TORCH = re.compile(r"^(\[rank\d+\]:)?\[[IWEF]\d{4} ")  # from its C++ parts, on the way out


@dataclass(frozen=True)
class EndedRank:
    """A local rank that ended with an error.

    Args:
        exit_code: -n where signal n ended it.
        stderr: the file with what it wrote there; None: it wrote nothing.
        shown: what of it is on the terminal already.
    """

    rank: int
    local_rank: int
    exit_code: int
    stderr: Path | None
    shown: Literal["nothing", "lines", "lines and traceback"]


@dataclass(frozen=True)
class RankError:
    """What a rank's stderr says. ``lines`` is all of it; the others are empty where no exception ended the rank."""

    lines: tuple[str, ...] = ()
    traceback: tuple[str, ...] = ()  # with those of its causes
    error: tuple[str, ...] = ()  # type and message
    place: str = ""  # the last frame in the user's code

    @property
    def is_own(self) -> bool:
        """True for an error of Shoal's own."""
        return bool(self.error) and _OWN_ERROR.match(self.error[0]) is not None

    @property
    def is_of_a_lost_peer(self) -> bool:
        return any(mark in line for line in self.lines for mark in _MARKS_OF_A_LOST_PEER)

    @property
    def is_of_hardware(self) -> bool:
        """True if a device of this rank's machine has failed."""
        is_named = any(mark in line for line in self.error for mark in _MARKS_OF_HARDWARE)
        return is_named and not self.is_of_a_lost_peer

    @property
    def key(self) -> object:
        """Equal for errors that differ only in where they were raised."""
        return tuple(line for line in self.error if not line.startswith("  where: "))


def read_error(text: str) -> RankError:
    """Take the error out of what a rank wrote to stderr."""
    lines = tuple(
        _PREFIX.sub("", line) for line in text.splitlines() if not (_LOG_OF_TORCH.match(line) or CPP_FRAME.match(line))
    )
    starts = [index for index, line in enumerate(lines) if TRACEBACK.match(line)]
    # The message of a rank-failed error has a traceback of its own: that of the rank that failed.
    first_own = next((at for at, line in enumerate(lines) if _OWN_ERROR.match(line)), len(lines))
    starts = [start for start in starts if start < first_own] or starts
    if not starts:
        return RankError(lines)
    first = last = starts[-1]
    for earlier in reversed(starts[:-1]):
        if not any(line.startswith(_LINKS) for line in lines[earlier:first]):
            break
        first = earlier
    begin = next((at for at in range(last + 1, len(lines)) if lines[at] and not lines[at].startswith(" ")), len(lines))
    return RankError(lines, lines[first:], _without_inner_frames(lines[begin:]), _users_frame(lines[last:begin]))


def _without_inner_frames(error: Sequence[str]) -> tuple[str, ...]:
    """A message without the frames of the traceback in it."""
    kept: list[str] = []
    is_in_frames = False
    for line in error:
        if TRACEBACK.match(line):
            is_in_frames = True
        elif not line.startswith(" "):
            is_in_frames = False
        if not is_in_frames:
            kept.append(line)
    return tuple(kept)


def _users_frame(traceback: Sequence[str]) -> str:
    """The last frame that is in no package and not in Python's library: ``train.py:9, in main: engine.step()``."""
    for at in reversed(range(len(traceback))):
        match = _FRAME.match(traceback[at])
        if match is None or not is_users_file(match["path"]):
            continue
        code = traceback[at + 1].strip() if at + 1 < len(traceback) else ""
        place = place_of(match)
        return f"{place}: {code}" if code and not code.startswith("File ") else place
    return ""


def describe(ended: Sequence[EndedRank], *, whole: bool = False) -> tuple[int, str]:
    """The exit code and the report of a job. The code of an error of the hardware is ``HARDWARE_EXIT_CODE``, by which a
    scheduler knows the node to leave out.

    Args:
        ended: in the order in which they were found to have ended.
        whole: with the tracebacks of Shoal's own errors, and all frames.
    """
    errors = {
        each.rank: read_error(each.stderr.read_text(errors="replace")) if each.stderr is not None else RankError()
        for each in ended
    }
    first = _first_failed(ended, errors)
    error, code = errors[first.rank], first.exit_code
    same = sorted(rank for rank, other in errors.items() if other.error and other.key == error.key) or [first.rank]
    if code == -signal.SIGTERM and error.error:  # it was ending by the exception when the launcher ended it
        code = next((each.exit_code for each in ended if each.rank in same and each.exit_code > 0), 1)
    if len(same) > 1:
        head = f"shoal: ranks {listed_ranks(same)} failed with the same error and exit code {_shell_code(code)}."
    else:
        head = f"shoal: rank {first.rank} failed first: it {_how(code)}."
    if error.is_of_hardware:
        where = f"a device of {socket.gethostname()} has failed; exit code {HARDWARE_EXIT_CODE}"
        return HARDWARE_EXIT_CODE, "\n".join([head, *_details(first, error, whole=whole), f"shoal: {where}."])
    return _shell_code(code), "\n".join([head, *_details(first, error, whole=whole)])


def _details(first: EndedRank, error: RankError, *, whole: bool) -> Sequence[str]:
    if not error.error:
        if first.shown != "nothing" and error.lines:
            return []
        return error.lines[-_TAIL_LINES:] or ["It wrote nothing to stderr."]
    place = [f"  at: {error.place}"] if error.place else []
    if error.is_own and not whole:
        message = [_OWN_ERROR.sub("", error.error[0]), *error.error[1:]]
        return [*message, *place, "  SHOAL_TRACEBACK=1 in the environment shows the traceback."]
    if first.shown == "lines and traceback":
        return [*error.error, *place]
    return error.traceback if whole else _on_a_screen(error.traceback)


def _on_a_screen(traceback: Sequence[str]) -> Sequence[str]:
    """A long traceback without the frames in its middle."""
    frames = [at for at, line in enumerate(traceback) if _FRAME.match(line)]
    if len(traceback) <= _SCREEN_LINES or len(frames) < 3:
        return traceback
    first, most = frames[1], _SCREEN_LINES - frames[1] - 1
    last = next((at for at in frames[2:] if len(traceback) - at <= most), frames[-1])
    left_out = f"  ... {frames.index(last) - 1} frames; SHOAL_TRACEBACK=1 in the environment shows them ..."
    return [*traceback[:first], left_out, *traceback[last:]]


def _first_failed(ended: Sequence[EndedRank], errors: dict[int, RankError]) -> EndedRank:
    """The rank that failed first: not because a peer ended, and not ended by the launcher."""

    def key(each: EndedRank) -> tuple[bool, bool, bool, float]:
        error = errors[each.rank]
        has_waited = any("[init-timeout]" in line for line in error.error)  # for those that the launcher ended then
        ended_by_launcher = each.exit_code == -signal.SIGTERM and not error.error
        wrote_last = each.stderr.stat().st_mtime if each.stderr is not None and not ended_by_launcher else float("inf")
        return not has_waited, ended_by_launcher, error.is_of_a_lost_peer, wrote_last

    # Of equals the first: those that had ended before the launcher ended the others come first.
    return min(ended, key=key)


def errors_of(log_dir: Path, num_ranks: int) -> dict[int, RankError]:
    """What the stderr of each local rank says, of the last attempt."""
    files = {rank: stderr_of(rank, log_dir) for rank in range(num_ranks)}
    return {
        rank: RankError() if file is None else read_error(file.read_text(errors="replace"))
        for rank, file in files.items()
    }


def describe_attempt(errors: Mapping[int, RankError], first: tuple[int, int] | None) -> str:
    """Which rank of an attempt failed, with which error, in a line; empty where that is not known.

    Args:
        first: the rank that ended first, and its exit code.
    """
    if first is not None and first[1] and not errors[first[0]].error:
        return f"rank {first[0]} failed: it {_how(first[1])}"
    failed = sorted((error.is_of_a_lost_peer, rank) for rank, error in errors.items() if error.error)
    if not failed:
        return ""
    (is_lost_peer, rank), *_ = failed
    error = errors[rank]
    who = "" if is_lost_peer else f"rank {rank} failed: "  # the message names the rank that failed
    place = f" (at {error.place})" if error.place else ""
    return f"{who}{_OWN_ERROR.sub('', error.error[0])}{place}"


def stderr_of(local_rank: int, log_dir: Path) -> Path | None:
    """The file of the last attempt."""
    attempts = {
        int(path.parts[-3].rpartition("_")[2]): path for path in log_dir.glob(f"*/attempt_*/{local_rank}/stderr.log")
    }
    return attempts[max(attempts)] if attempts else None


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
