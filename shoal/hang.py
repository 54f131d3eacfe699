"""A hang: what its report says, and how ranks that no launcher of Shoal's watches find and end one themselves.

1  each rank     a thread reads the rank's heartbeat. A section that is older than its time-out in two readings is a
                 hang: the rank calls all ranks, by a key of the store.
2  each rank     writes its heartbeat and the stacks of its threads to the store
3  each machine  one rank looks at the processes of its machine that have written nothing. A signal makes faulthandler,
                 which needs no help of the stuck thread, write their stacks. A stopped process is continued for that.
4  one rank      the lowest that answers, prints the report
5  each rank     ends its process with exit code 134, and the processes of step 3 by SIGKILL

No thread of Python's runs while another one holds the global lock. Once one has held it for longer than a section may
take, faulthandler writes the stacks to stderr: where a machine has one rank, no other process reads them.

The threads use connections to the store of their own. Where the store does not answer, since the process that has it
is stopped, a rank prints what it knows of itself and of that process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from shoal.heartbeat import NBYTES, Beat, Heartbeat, read_beat
from shoal.process import boot, is_stopped, started
from shoal.source import is_users_file, place_of
from shoal.text import clip, listed_ranks

EXIT_CODE = 134  # 128 + SIGABRT
_STACK_LINES = 12
_RANKS_SHOWN = 16

_INTERVAL_SECONDS = 0.25
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 1.2  # for the other ranks to write what they do
_STACK_SECONDS = 0.5  # for a silent process to write its stacks
_STORE_SECONDS = 1.5  # for the store to answer
_REPORT_SECONDS = 10.0  # for all that follows
_STOP_SECONDS = 2.0
_RAS_SECONDS = 2.0
_LOCK_SECONDS = 5.0  # after the time-out, for a thread of Python's to report
_CALL = "call"
_NUM_REPORTS = "reports"
_OVER = "over"
_DUMP_NBYTES = 1 << 20

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<number>[0-9a-f]+).*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_COLLECTIVES = re.compile(r"[/\\](?:shoal[/\\]comm|torch[/\\]distributed)[/\\]")


@dataclass(frozen=True)
class Stuck:
    """A rank at the hang.

    Args:
        stack: of the thread that runs the program, the innermost frame first; empty where none was written.
        is_stopped: by a signal, or a debugger.
        is_late: its section was older than its time-out.
        is_silent: it wrote no report, and no process of its machine could read what it was doing.
    """

    beat: Beat
    stack: tuple[str, ...]
    is_stopped: bool = False
    is_late: bool = False
    is_silent: bool = False

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


def describe_hang(stuck: Sequence[Stuck], kept: str) -> str:
    """The report of a hang.

    Args:
        stuck: all ranks of this machine; of one at least the section is older than its time-out.
        kept: the file with the stacks of all threads.
    """
    causes = causes_of(stuck)
    shown = [*causes, *(each for each in stuck if each not in causes)]
    late = next((each.beat for each in shown if each.is_late), shown[0].beat)
    key = "SHOAL_INIT_SECONDS" if late.is_before_init else f"timeouts.{late.section}"
    match causes:
        case []:
            who = "no rank has come to initialize" if late.is_before_init else "all ranks wait"
        case [one]:
            who = f"rank {one.beat.rank} hangs"
        case _:
            who = f"ranks {listed_ranks([each.beat.rank for each in causes])} hang"
    lines = [
        f"shoal: [hang] step {late.step}: {who}; section '{late.section}' of rank {late.rank} took longer than its"
        f" {late.seconds:g} s ({key}). All ranks were ended."
    ]
    lines += [f"  rank {each.beat.rank}: {_doing(each)}" for each in shown[:_RANKS_SHOWN]]
    if len(shown) > _RANKS_SHOWN:
        lines.append(f"  and {len(shown) - _RANKS_SHOWN} more ranks")
    if stack := shown[0].stack[:_STACK_LINES]:
        lines += [f"  the stack of rank {shown[0].beat.rank}:", *(f"  {frame}" for frame in stack)]
    if kept:
        lines.append(f"  the stacks of all threads of all ranks: {kept}")
    compare = "" if causes or late.is_before_init else " compare the ranks' last collectives;"
    place = "in the environment (0: no limit)" if late.is_before_init else "in the config (null: no limit)"
    lines.append(f"  do:{compare} if nothing is wrong, raise {key} {place}.")
    return "\n".join(lines)


def causes_of(stuck: Sequence[Stuck]) -> list[Stuck]:
    """The ranks for which the others wait: those that are stopped or silent; else those that are in no collective while
    others are; else those that have issued fewer. None where all are alike.
    """
    for is_cause in (
        lambda each: each.is_stopped or each.is_silent,
        lambda each: bool(each.stack) and not each.is_waiting,
        lambda each: each.beat.num_issued == min(other.beat.num_issued for other in stuck),
    ):
        causes = [each for each in stuck if is_cause(each)]
        if causes and (len(causes) < len(stuck) or len(stuck) == 1):
            return causes
    return []


def _doing(each: Stuck) -> str:
    beat = each.beat
    if each.is_silent:
        return "does not answer: its process or its machine is lost, or holds Python's global lock"
    if each.is_stopped:
        text = "is stopped, by a signal or a debugger"
    elif each.is_waiting:
        text = f"waits in a collective, called at {each.place}"
    else:
        text = f"runs {each.place}" if each.place else "wrote no stack"
    if not beat.num_issued:
        return f"{text}; no collective yet"
    return f"{text}; collective {beat.num_issued}: {beat.last_issued}"


def main_stack(dump: str, thread: int = 0) -> tuple[str, ...]:
    """The frames of the thread that runs the program: ``thread`` (Ray's workers run it in another than the main one),
    or the main one, which faulthandler writes last. Where backward runs in a thread of autograd's, that one.
    """
    threads: list[list[str]] = []
    numbers: list[int] = []
    for line in dump.splitlines():
        if match := _THREAD.match(line):
            threads.append([])
            numbers.append(int(match["number"], 16))
        elif threads and _FRAME.match(line):
            threads[-1].append(line)
    if not threads:
        return ()
    main = threads[numbers.index(thread)] if thread in numbers else threads[-1]
    if main and "_engine_run_backward" in main[0]:
        main = next((each for each in threads if any("shoal/running" in frame for frame in each)), main)
    return tuple(main)


def nccl_status(port: int = 28028) -> str:
    """What NCCL says of its communicators, with each rank's count of collectives; empty: no rank here uses NCCL.

    Source: NCCL, "RAS": its threads answer on this port of the loopback address since 2.24, also in a hang.
    """
    answer, deadline = b"", time.monotonic() + _RAS_SECONDS
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), _RAS_SECONDS) as connection:
        connection.sendall(b"timeout 1\nverbose status\n")  # the seconds for processes that do not answer
        while (left := deadline - time.monotonic()) > 0 and len(answer) < _DUMP_NBYTES:
            connection.settimeout(left)
            if not (data := connection.recv(1 << 16)):
                break
            answer += data
    return _text(answer)


def kept_dumps(dumps: Mapping[int, str], nccl: str) -> str:
    """Write the dumps of the ranks and NCCL's status to a file. Returns: its path; empty if it could not be written."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="shoal-hang-", suffix=".txt")
        with os.fdopen(descriptor, "w") as file:
            for rank, dump in sorted(dumps.items()):
                file.write(f"rank {rank}\n{dump}\n")
            if nccl:
                file.write(f"NCCL\n{nccl}\n")
    except OSError:
        return ""
    return path


class Store(Protocol):
    """What a guard needs of torch's stores."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...


@dataclass(frozen=True)
class RankProcess:
    """Where another process of the machine finds a rank's heartbeat."""

    boot: str
    pid: int
    started: int | None
    file: int

    @property
    def is_here(self) -> bool:
        return self.boot == boot() and self.started is not None and started(self.pid) == self.started


class RankProcesses:
    """Which ranks' processes have ended, as the kernel of this machine says.

    Args:
        store: of the guards, which have written where their processes are.
    """

    def __init__(self, store: Store, size: int) -> None:
        self.size = size
        self._store = store
        self._processes: dict[int, RankProcess] = {}

    def look_up(self, ranks: Iterable[int]) -> None:
        """Read where the processes of ``ranks`` are: up to two requests to the store for each that is not known yet.

        Raises: RuntimeError: the store has ended.
        """
        for rank in ranks:
            if rank not in self._processes and self._store.check([key := f"process/{rank}"]):
                self._processes[rank] = _process_of(self._store.get(key))

    def have_ended(self) -> dict[int, bool]:
        """Whether it has, for each known process of this machine, by its rank."""
        here = boot()
        known = self._processes.items()
        return {rank: not each.is_here for rank, each in known if each.boot == here and each.started is not None}


@dataclass(frozen=True)
class RankReport:
    """What a rank was doing. ``beat``: the bytes of its heartbeat, in hex. ``dump``: of faulthandler."""

    beat: str
    dump: str
    is_stopped: bool
    is_late: bool

    def of(self, rank: int) -> Stuck:
        beat = read_beat(bytes.fromhex(self.beat), rank)
        return Stuck(beat, main_stack(self.dump, beat.thread), self.is_stopped, self.is_late)


class HangGuard:
    """The threads of one rank.

    Args:
        calls, reports: the store of this world's guards alone, over two connections. (Opening one holds the GIL, which
            would block this process if the store did not answer any more.)
        on_hang: called before this process is ended, in a thread that is not waited for longer than 2 seconds.
        heartbeat: this process's, with a file.

    Communicates: one key at the start; after that one request to the store each half second, or for each 1,000 ranks
        each second.
    """

    def __init__(
        self, calls: Store, reports: Store, rank: int, size: int, heartbeat: Heartbeat, on_hang: Callable[[], None]
    ) -> None:
        assert heartbeat.file is not None
        self._calls = calls
        self._reports = reports
        self._rank = rank
        self._size = size
        self._file = heartbeat.file
        self._on_hang = on_hang
        self._silent: list[RankProcess] = []
        self._is_over = threading.Event()
        self._wake = threading.Event()
        self._has_answered = threading.Event()
        self._is_told = threading.Event()
        heartbeat.set_rank(rank)
        os.lseek(self._file, NBYTES, os.SEEK_SET)  # behind the heartbeat
        faulthandler.register(_stacks_signal(), file=self._file, all_threads=True, chain=False)
        process = RankProcess(boot(), os.getpid(), started(os.getpid()), self._file)
        self._reports.set(f"process/{rank}", json.dumps(asdict(process)))
        self._first = _process_of(self._reports.get("process/0"))  # it may have the store
        self._threads = [
            threading.Thread(target=run, name=f"shoal-hang-guard-{name}", daemon=True)
            for name, run in (("clock", self._watch), ("call", self._listen))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads. Idempotent."""
        self._is_over.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(_STOP_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(_stacks_signal())

    def _watch(self) -> None:
        began: float | None = None
        armed = 0.0, 0.0  # a limit, and when
        while not self._wake.wait(_INTERVAL_SECONDS):
            beat = self._beat()
            limit, now = beat.seconds or armed[0], time.monotonic()
            if limit and (limit != armed[0] or now - armed[1] > 1.0):
                faulthandler.dump_traceback_later(limit + _LOCK_SECONDS, file=2)
                armed = limit, now
            if beat.is_late and beat.began == began:
                break
            began = beat.began if beat.is_late else None
        if not self._is_over.is_set():
            self._end()

    def _listen(self) -> None:
        """Wait for another rank's call."""
        with suppress(RuntimeError):  # the store has ended
            store = self._calls
            while not self._is_over.wait(max(_POLL_SECONDS, self._size / 1000)):
                if store.check([_CALL]):
                    self._wake.set()
                    return

    def _beat(self) -> Beat:
        return read_beat(os.pread(self._file, NBYTES, 0), self._rank)

    def _end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        own = self._own_report()
        self._continue_first()
        exchange = threading.Thread(target=self._exchange, args=[own], name="shoal-hang-report", daemon=True)
        exchange.start()
        notes = threading.Thread(target=self._on_hang, name="shoal-hang-notes", daemon=True)
        notes.start()
        if not (self._has_answered.wait(_STORE_SECONDS) and self._is_told.wait(_REPORT_SECONDS)):
            self._print({self._rank: own})
        exchange.join(_INTERVAL_SECONDS)
        notes.join(_STOP_SECONDS)
        for process in self._silent:
            if process.is_here:
                with suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
        os._exit(EXIT_CODE)

    def _continue_first(self) -> None:
        """Continue a stopped process of this machine that may have the store, so that it answers, and report on it."""
        if not self._first.is_here or not is_stopped(self._first.pid):
            return
        with suppress(OSError, RuntimeError):
            for report in self._look_at({0: self._first}).values():
                self._reports.set("seen/0", json.dumps(asdict(report)))

    def _own_report(self) -> RankReport:
        begin = os.lseek(self._file, 0, os.SEEK_END)
        faulthandler.dump_traceback(self._file, all_threads=True)
        data, dump = os.pread(self._file, NBYTES, 0), os.pread(self._file, _DUMP_NBYTES, begin)
        return RankReport(data.hex(), _text(dump), False, read_beat(data).is_late)

    def _exchange(self, own: RankReport) -> None:
        """Steps 1 to 4."""
        with suppress(RuntimeError):  # the store has ended, with a rank that has read the report
            store = self._reports
            store.set(_CALL, "")
            store.set(f"report/{self._rank}", json.dumps(asdict(own)))
            store.add(_NUM_REPORTS, 1)
            self._has_answered.set()
            if not self._await_reports(store, _ANSWER_SECONDS):
                self._look_at_neighbours(store)
                self._await_reports(store, _STACK_SECONDS)
            _wait(lambda: store.check([_OVER]), min(self._rank * 0.1, 1.0))  # so that the lowest is the first
            if not store.check([f"seen/{self._rank}"]) and self._is_first(store, "printer"):
                ranks = range(self._size)
                self._print({rank: report for rank in ranks if (report := _report_of(store, rank)) is not None})
                store.set(_OVER, "")
                time.sleep(_INTERVAL_SECONDS)  # this process may have the store
            else:
                _wait(lambda: store.check([_OVER]), _REPORT_SECONDS)
        if self._has_answered.is_set():
            self._is_told.set()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()  # what the script has printed; the stuck thread may have the stream's lock

    def _is_first(self, store: Store, key: str) -> bool:
        name = str(self._rank)
        return bool(store.compare_set(key, "", name).decode() == name)

    def _await_reports(self, store: Store, seconds: float) -> bool:
        return _wait(lambda: store.add(_NUM_REPORTS, 0) >= self._size, seconds)

    def _look_at_neighbours(self, store: Store) -> None:
        """Write the reports of this machine's processes that wrote none, if no other rank of it does.

        Not in a process that was continued: another rank ends it, maybe before it has ended those.
        """
        if store.check([f"seen/{self._rank}"]) or not self._is_first(store, f"neighbours/{boot()}"):
            return
        silent = [rank for rank in range(self._size) if not store.check([f"report/{rank}"])]
        processes = {rank: _process_of(store.get(key)) for rank in silent if store.check([key := f"process/{rank}"])}
        here = {rank: process for rank, process in processes.items() if process.is_here}
        for rank, report in self._look_at(here).items():
            store.set(f"seen/{rank}", json.dumps(asdict(report)))
            store.add(_NUM_REPORTS, 1)

    def _look_at(self, processes: Mapping[int, RankProcess]) -> dict[int, RankReport]:
        """The reports of silent processes of this machine."""
        opened = {}
        self._silent += processes.values()
        for rank, process in processes.items():
            with suppress(OSError):
                file = os.open(f"/proc/{process.pid}/fd/{process.file}", os.O_RDONLY)
                opened[rank] = file, os.fstat(file).st_size, os.pread(file, NBYTES, 0), is_stopped(process.pid)
                for number in (_stacks_signal(), signal.SIGCONT):
                    os.kill(process.pid, number)
        for rank in opened:
            self._reports.set(f"seen/{rank}", "")  # so that one that is continued does not print the report
        time.sleep(_STACK_SECONDS)
        reports = {}
        for rank, (file, begin, data, was_stopped) in opened.items():
            dump = os.pread(file, _DUMP_NBYTES, begin)
            os.close(file)
            reports[rank] = RankReport(data.hex(), _text(dump), was_stopped, read_beat(data).is_late)
        return reports

    def _print(self, reports: dict[int, RankReport]) -> None:
        nothing = Beat(0, 0, 0, 0, "data", 0.0, 0.0, 0, 0, "")
        stuck = [
            reports[rank].of(rank) if rank in reports else Stuck(replace(nothing, rank=rank), (), is_silent=True)
            for rank in range(self._size)
        ]
        kept = kept_dumps({rank: report.dump for rank, report in reports.items()}, nccl_status())
        os.write(2, (describe_hang(stuck, kept) + "\n").encode())


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result


def _process_of(text: bytes) -> RankProcess:
    return RankProcess(**json.loads(text))


def _report_of(store: Store, rank: int) -> RankReport | None:
    for key in (f"seen/{rank}", f"report/{rank}"):
        if store.check([key]) and (text := store.get(key)):
            return RankReport(**json.loads(text))
    return None


def _text(dump: bytes) -> str:
    return clip(dump.decode(errors="replace"))


def _stacks_signal() -> int:
    """One that no program uses, so that no handler of the script's is replaced."""
    return signal.SIGRTMIN + 8
