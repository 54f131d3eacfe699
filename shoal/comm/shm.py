"""Ranks as processes of one host, which map each other's memory.

Every rank writes its own words and reads the others'. On x86-64 stores become visible in the order they were made, so a
number that is written last shows that all words before it are written; other machines reorder stores and use Gloo.

    a rank's words for one axis: one area for collectives, then two for each peer p (sends to p, receives from p)
        header   0 secret   1 calls posted   2 closed
        slot     0 reduced  1 done  2 signature  3 file  4 fd  5 its bytes  6 offset  7 numel  8 text bytes  9 text
                 call n is in slot n % slots; "reduced" and "done" hold n + 1
    a rank's words for all axes
        header   0 secret   1 failed   2 text bytes   3 asleep (``WakeWord``)   4.. the traceback
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import secrets
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from shoal.comm.allocator import SharedAllocator, make_file, map_file
from shoal.comm.failure import FailureReports
from shoal.comm.memory_group import GroupCall, Mark
from shoal.comm.waiting import LongWait
from shoal.errors import CommError, RankFailedError, RankLeftError
from shoal.process import started
from shoal.text import MAX_TRACEBACK_CHARACTERS, clip

_FUTEX = 202  # the number of the system call on x86-64, the only machine where ranks read each other's memory
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class WakeWord:
    """A word of shared memory on which one process sleeps until another wakes it: Linux's futex(2).

        sleeper   prepare()    sets the word, then looks once more for what it waits for, then sleep()
        waker     wake()       after it has written what the sleeper waits for; a system call where the word is set

    A processor may delay a store past a later load, so a wake-up can be lost in theory: every sleep has an end.

    Args:
        words: shared memory, of 64-bit words.
        index: of the word.
    """

    def __init__(self, words: memoryview, index: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(words, 8 * index)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))

    def prepare(self) -> None:
        """From now on ``wake`` ends, or prevents, the next ``sleep``."""
        self._word.value = 1

    def sleep(self, seconds: float) -> None:
        """Block until ``wake``, a signal, or for less than a second. Other threads of the process run."""
        limit = _Timespec(0, int(seconds * 1e9))
        _syscall()(_FUTEX, self._address, _WAIT, 1, ctypes.byref(limit), None, 0)

    def wake(self) -> None:
        if self._word.value:
            self._word.value = 0
            _syscall()(_FUTEX, self._address, _WAKE, _ALL, None, None, 0)


@cache
def _syscall() -> Any:
    return ctypes.CDLL(None).syscall


_SLOTS = 256
_CHANNEL_SLOTS = 64
_HEADER_WORDS = 64
_SLOT_WORDS = 32
_TEXT_WORD = 9
_TEXT_BYTES = 8 * (_SLOT_WORDS - _TEXT_WORD)
_AREA_WORDS = _HEADER_WORDS + _SLOTS * _SLOT_WORDS
_CHANNEL_WORDS = _HEADER_WORDS + _CHANNEL_SLOTS * _SLOT_WORDS
_ASLEEP_WORD, _REPORT_BYTE = 3, 8 * 4
_PROCESS_BYTES = _REPORT_BYTE + 4 * MAX_TRACEBACK_CHARACTERS + 64
_SPINS = 2  # ranks may share a core, which a rank that only looks takes from those that compute
_SLEEP_SECONDS = 0.01  # at most; peers wake a rank that sleeps
_LIVENESS_SECONDS = 0.25


@dataclass(frozen=True)
class FileHandle:
    """The address by which peers map a file of this process."""

    pid: int
    started: int  # clock ticks after boot: detects a reused pid
    fd: int
    nbytes: int
    secret: int  # word 0 of the file: detects a process of another pid namespace or host with the same pid


class LocalPeers:
    """The other ranks of this host, for all axes: the allocator, maps of the peers' memory, failures, liveness.

    Args:
        store: this world's; ranks publish their file handles there.
    """

    def __init__(self, store: Store, rank: int, failures: FailureReports) -> None:
        self.rank = rank
        self.allocator = SharedAllocator()
        self._store = store
        self._failures = failures
        fd, self._map = make_file("shoal-process", _PROCESS_BYTES)
        self._words = memoryview(self._map).cast("q")
        self._words[0] = secrets.randbits(62)
        self._handle = FileHandle(os.getpid(), started(os.getpid()) or 0, fd, _PROCESS_BYTES, self._words[0])
        self._store.set(f"process/{rank}", json.dumps(asdict(self._handle)))
        self._handles: dict[int, FileHandle] = {rank: self._handle}
        self._processes: dict[int, memoryview] = {}  # rank -> its words
        self.asleep = WakeWord(self._words, _ASLEEP_WORD)  # on which this rank waits until a peer has posted
        self.wake_words: dict[int, WakeWord] = {}  # by rank, of the others
        self._maps: dict[tuple[int, int], mmap.mmap] = {}
        self._dead: set[int] = set()
        self._looked: dict[int, float] = {}
        self._is_closed = False

    def meet(self, rank: int, timeout: float) -> bool:
        """Map ``rank``'s words. Returns: False if this process cannot."""
        if rank not in self._processes and rank != self.rank:
            handle = FileHandle(**json.loads(self.read_store(f"process/{rank}", timeout)))
            mapped = open_words(handle)
            if mapped is None:
                return False
            self._handles[rank] = handle
            self._processes[rank] = mapped
            self.wake_words[rank] = WakeWord(mapped, _ASLEEP_WORD)
        return True

    def read_store(self, key: str, timeout: float) -> str:
        """The value of ``key``, once some rank has set it.

        Raises: RankFailedError: a rank failed meanwhile; CommError: no rank set it within ``timeout`` seconds.
        """
        wait = LongWait()
        pause = 0.0005
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if pause == 0.05 and (failure := self._failures.find()) is not None:
                raise failure
            wait.report(lambda waits: f"rank {self.rank} {waits} at start-up for {key!r}, which another rank sets")
            if wait.seconds > timeout:
                raise CommError(
                    f"rank {self.rank} waited {timeout:g} s at start-up for {key!r}",
                    do="check that every rank was started and creates the same axes in the same order.",
                    code="comm-timeout",
                )
        return self._store.get(key).decode()

    def file(self, rank: int, serial: int, fd: int, nbytes: int) -> mmap.mmap:
        """The map of a file of ``rank``'s allocator."""
        result = self._maps.get((rank, serial))
        if result is None:
            try:
                result = map_file(self._handles[rank].pid, fd, nbytes)
            except OSError as error:
                self.raise_failure()
                raise RankFailedError(
                    rank, f"its process {self._handles[rank].pid} has ended and took its memory with it ({error})"
                ) from error
            self._maps[rank, serial] = result
        return result

    def raise_failure(self) -> None:
        """Raises: RankFailedError: a rank of this host has reported one."""
        for words in self._processes.values():
            if words[1]:
                encoded = words.cast("B")[_REPORT_BYTE : _REPORT_BYTE + words[2]]
                text = encoded.tobytes().decode(errors="replace")
                failed, _, traceback = text.partition("\n")
                raise RankFailedError(int(failed), traceback)

    def is_dead(self, rank: int) -> bool:
        """True if the process of ``rank`` has ended. Looked up at most every quarter of a second."""
        now = time.monotonic()
        if rank in self._dead:
            return True
        if now - self._looked.get(rank, 0.0) > _LIVENESS_SECONDS:
            self._looked[rank] = now
            if started(self._handles[rank].pid) != self._handles[rank].started:
                self._dead.add(rank)
        return rank in self._dead

    def report(self, rank: int, text: str) -> None:
        """Report to all peers that ``rank`` failed."""
        if not self._words[1]:
            encoded = f"{rank}\n{clip(text)}".encode(errors="replace")[: _PROCESS_BYTES - _REPORT_BYTE]
            self._words.cast("B")[_REPORT_BYTE : _REPORT_BYTE + len(encoded)] = encoded
            self._words[2] = len(encoded)
            self._words[1] = 1
            for word in self.wake_words.values():
                word.wake()

    def pid(self, rank: int) -> int:
        return self._handles[rank].pid

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self._handle.fd)
            self.allocator.close()
            self._processes.clear()
            self.wake_words.clear()
            self._maps.clear()


class SharedMemoryGroup:
    """One rank's view of the words of its group.

    Args:
        words: by rank of the group: one area of its file.
        files: by rank of the group: its whole file, with the areas of its channels; None for a channel.
    """

    must_drain_to_close = True  # a peer may not have mapped this rank's memory yet

    def __init__(
        self,
        local_peers: LocalPeers,
        ranks: tuple[int, ...],
        words: Sequence[memoryview],
        timeout: float,
        files: Sequence[memoryview] | None = None,
    ) -> None:
        self.rank = ranks.index(local_peers.rank)
        self.size = len(ranks)
        self.capacity = (len(words[0]) - _HEADER_WORDS) // _SLOT_WORDS
        self.timeout = timeout
        self._local_peers = local_peers
        self._allocator = local_peers.allocator
        self._ranks = ranks
        self._words = words
        self._files = files
        self._own = words[self.rank]
        self._own_bytes = self._own.cast("B")
        self._wake_words = [local_peers.wake_words[rank] for rank in ranks if rank != local_peers.rank]
        self._sources: dict[int, torch.Tensor] = {}
        self._texts: dict[GroupCall, tuple[int, bytes]] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._allocator.empty(numel, dtype)

    def readable(self, source: torch.Tensor) -> torch.Tensor:
        if source.numel() == 0 or self._allocator.locate(source) is not None:
            return source
        return self._allocator.empty(source.numel(), source.dtype).copy_(source)

    def channel(self, source: int, target: int) -> SharedMemoryGroup:
        assert self._files is not None
        words = [self._files[source][_sends_to(target)], self._files[target][_receives_from(source)]]
        ranks = self._ranks[source], self._ranks[target]
        return SharedMemoryGroup(self._local_peers, ranks, words, self.timeout)

    def post(self, number: int, call: GroupCall, source: torch.Tensor) -> None:
        at = self._slot(number)
        own = self._own
        signature, text = self._describe(call)
        numel = source.numel()
        place = self._allocator.locate(source) if numel else None
        if place is not None:
            file, offset = place
            own[at + 3] = file.serial
            own[at + 4] = file.fd
            own[at + 5] = file.nbytes
            own[at + 6] = offset
        own[at + 2] = signature
        own[at + 7] = numel
        own[at + 8] = len(text)
        start = 8 * (at + _TEXT_WORD)
        self._own_bytes[start : start + len(text)] = text
        self._sources[number] = source
        self._sources.pop(number - self.capacity, None)
        own[1] = number + 1
        self._wake()

    def has_posted(self, peer: int, number: int) -> bool:
        return bool(self._words[peer][1] > number)

    def mismatch(self, peer: int, number: int, call: GroupCall) -> str | None:
        words = self._words[peer]
        if words[self._slot(number) + 2] == self._describe(call)[0]:
            return None
        return self._text(peer, number)

    def source(self, peer: int, number: int, dtype: torch.dtype) -> torch.Tensor:
        if peer == self.rank:
            return self._sources[number]
        at = self._slot(number)
        words = self._words[peer]
        numel = words[at + 7]
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        file = self._local_peers.file(self._ranks[peer], words[at + 3], words[at + 4], words[at + 5])
        return torch.frombuffer(file, dtype=dtype, count=numel, offset=words[at + 6])

    def mark(self, number: int, mark: Mark) -> None:
        self._own[self._slot(number) + mark] = number + 1
        self._wake()
        if mark is Mark.DONE:
            self._sources.pop(number, None)  # kept by the communicator until the peers are done

    def has_marked(self, peer: int, number: int, mark: Mark) -> bool:
        at = _HEADER_WORDS + (number % self.capacity) * _SLOT_WORDS  # called most often
        return bool(self._words[peer][at + mark] > number)

    def ticket(self) -> int:
        self._local_peers.asleep.prepare()
        return 0

    def pause(self, ticket: int, attempt: int) -> None:
        if attempt < _SPINS:
            os.sched_yield()
        else:
            self._local_peers.asleep.sleep(_SLEEP_SECONDS)

    def check(self, missing: Sequence[int]) -> None:
        self._local_peers.raise_failure()
        for peer in missing:
            rank = self._ranks[peer]
            if self._words[peer][2] or self._local_peers.is_dead(rank):
                self._local_peers.raise_failure()  # it may have reported between the two checks
                calls = self.last_calls()
                if self._words[peer][2]:
                    me = self._ranks[self.rank]
                    raise RankLeftError(
                        rank, f"rank {me} waits in {calls[self.rank]}; rank {rank} left the world after {calls[peer]}."
                    )
                raise RankFailedError(
                    rank,
                    f"its process {self._local_peers.pid(rank)} has ended without a report: killed, or out of memory."
                    f" Last issued by it on this axis: {calls[peer]}",
                )

    def has_left(self, peer: int) -> bool:
        return bool(self._words[peer][2]) or self._local_peers.is_dead(self._ranks[peer])

    def last_calls(self) -> list[str]:
        texts = []
        for peer in range(self.size):
            number = self._words[peer][1]
            texts.append(f"{self._text(peer, number - 1)} (call {number - 1})" if number else "nothing")
        return texts

    def close(self) -> None:
        self._own[2] = 1
        if self._files is not None:  # channels that only the peer has opened, too
            for peer in range(self.size):
                for area in (_sends_to(peer), _receives_from(peer)):
                    self._files[self.rank][area][2] = 1
        self._wake()
        self._sources.clear()

    def _wake(self) -> None:
        for word in self._wake_words:
            word.wake()

    def _describe(self, call: GroupCall) -> tuple[int, bytes]:
        result = self._texts.get(call)
        if result is None:
            if len(self._texts) >= 4096:
                self._texts.clear()
            text = str(call).encode()
            result = self._texts[call] = (zlib.crc32(text), text[:_TEXT_BYTES])
        return result

    def _slot(self, number: int) -> int:
        return _HEADER_WORDS + (number % self.capacity) * _SLOT_WORDS

    def _text(self, peer: int, number: int) -> str:
        at = self._slot(number)
        start = 8 * (at + _TEXT_WORD)
        return self._words[peer].cast("B")[start : start + self._words[peer][at + 8]].tobytes().decode(errors="replace")


def join_group(
    local_peers: LocalPeers, store: Store, name: str, ranks: tuple[int, ...], num_ranks: int, timeout: float
) -> SharedMemoryGroup | None:
    """This rank's group over shared memory; None if some rank of the axis cannot map some peer of its group.

    All ``num_ranks`` ranks that open the axis come to the same decision.

    Communicates: through ``store`` only, 3 values a rank.
    """
    nbytes = 8 * (_AREA_WORDS + 2 * len(ranks) * _CHANNEL_WORDS)
    fd, own_map = make_file("shoal-group", nbytes)
    own = memoryview(own_map).cast("q")
    own[0] = secrets.randbits(62)
    handle = FileHandle(os.getpid(), 0, fd, nbytes, own[0])
    store.set(f"group/{name}/{local_peers.rank}", json.dumps(asdict(handle)))
    files: list[memoryview] = []
    for rank in ranks:
        if rank == local_peers.rank:
            files.append(own)
            continue
        theirs = FileHandle(**json.loads(local_peers.read_store(f"group/{name}/{rank}", timeout)))
        mapped = open_words(theirs) if local_peers.meet(rank, timeout) else None
        if mapped is None:
            break
        files.append(mapped)
    vote(store, name, num_ranks, is_fit=len(files) == len(ranks))
    decision = local_peers.read_store(f"decision/{_opening(name)}", timeout)
    os.close(fd)  # every peer that will ever map it has done so
    if decision != "shm":
        return None
    return SharedMemoryGroup(local_peers, ranks, [file[:_AREA_WORDS] for file in files], timeout, files)


def _sends_to(peer: int) -> slice:
    """The area, in a rank's file, of its sends to ``peer``."""
    start = _AREA_WORDS + 2 * peer * _CHANNEL_WORDS
    return slice(start, start + _CHANNEL_WORDS)


def _receives_from(peer: int) -> slice:
    start = _sends_to(peer).stop
    return slice(start, start + _CHANNEL_WORDS)


def vote(store: Store, name: str, num_ranks: int, *, is_fit: bool) -> None:
    """Report whether this rank can use shared memory; the last of ``num_ranks`` writes the decision."""
    opening = _opening(name)
    if not is_fit:
        store.add(f"unfit/{opening}", 1)
    if store.add(f"ready/{opening}", 1) == num_ranks:
        store.set(f"decision/{opening}", "gloo" if store.add(f"unfit/{opening}", 0) else "shm")


def is_supported() -> bool:
    """True if this machine keeps stores in order and has anonymous files."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()


def open_words(handle: FileHandle) -> memoryview | None:
    """The words of another process's file, or None where it cannot be reached."""
    try:
        words = memoryview(map_file(handle.pid, handle.fd, handle.nbytes)).cast("q")
    except (OSError, ValueError):
        return None
    return words if words[0] == handle.secret else None


def _opening(name: str) -> str:
    """The part of a group's name that all groups of the axis share."""
    return name.partition("/")[0]
