"""Reading batches: in this process, or ahead by processes that are restarted when they die.

    requests   keys of a batch    -->  worker 0, worker 1, worker 0, ...     two each, by a socket of its own
    batches    in the same order  <--

What a dead worker has not handed over is read again by the next one, so no batch is lost and none is repeated.
torch's DataLoader allows no restart: its workers share a queue, to which a killed one leaves a lock or half a message,
and its signal handler raises inside of whatever the main thread computes.
"""

from __future__ import annotations

import io
import itertools
import logging
import multiprocessing
import os
import queue
import random
import signal
import threading
import traceback
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.multiprocessing  # hands large tensors over in shared memory
from torch.utils.data import _utils

from shoal.errors import UsageError

logger = logging.getLogger("shoal")
T = TypeVar("T")

_AHEAD = 2  # batches of each worker
_MOST_DEATHS = 3  # in a row, over one batch
_CHECK_SECONDS = 2.0  # between two looks whether the other process lives, where the system does not report its end
_INLINE_NBYTES = 1 << 18  # of a tensor that is sent as bytes: shared memory costs a connection


class ReadRequest(NamedTuple):
    """A batch to be read."""

    keys: list[Any]
    position: int  # of its first sample: random numbers in a worker follow from it


@dataclass(frozen=True)
class BatchReader:
    """Reads samples and makes a batch of them.

    Args:
        place: where a sample comes from, by its key, for errors.
        source: the name of a sample's source, by its key; None: the data set is one.
        seed: of random numbers in a worker.
        prefetch: starts to read the next batch's samples, without waiting; only in the main process, which has time.
        pins: put batches in page-locked memory where there is an accelerator.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    place: Callable[[Any], str] = "sample {}".format
    source: Callable[[Any], str] | None = None
    prefetch: Callable[[list[Any]], None] | None = None
    seed: int = 0
    pins: bool = False

    def read(self, keys: list[Any]) -> tuple[Any, dict[str, float]]:
        """A batch, and the seconds that each source took to be read.

        Raises: what the data set or ``collate`` raises, with a note that names the samples.
        """
        together = getattr(self.dataset, "__getitems__", None)
        samples: list[Any] = []
        is_read = False
        seconds: dict[str, float] = defaultdict(float)
        name, began = type(self.dataset).__name__, perf_counter()
        try:
            if together is not None:
                samples = together(keys)
                seconds[name] = perf_counter() - began
            else:
                for key in keys:
                    samples.append(self.dataset[key])
                    ended = perf_counter()
                    seconds[name if self.source is None else self.source(key)] += ended - began
                    began = ended
            is_read = True
            return self.collate(samples), seconds
        except Exception as error:
            named = keys if is_read or together is not None else [keys[len(samples)]]
            error.add_note(f"while {'collating' if is_read else 'reading'} {'; '.join(map(self.place, named))}")
            raise

    def pinned(self, batch: Any) -> Any:
        is_useful = self.pins and torch.accelerator.is_available()
        return _utils.pin_memory.pin_memory(batch) if is_useful else batch


class Workers:
    """Reads batches in ``num`` processes, which live until ``close`` or as long as this object; 0: in this process.

    Random numbers of a worker (of torch, NumPy and Python) follow from the reader's seed and each request's position.
    """

    def __init__(self, reader: BatchReader, num: int) -> None:
        self._reader, self._num = reader, num
        self._workers: list[_Worker] = []  # those that have been started
        self.seconds: dict[str, float] = defaultdict(float)  # of reading, by source, in all processes together
        weakref.finalize(self, _end, self._workers).atexit = False  # multiprocessing ends them then

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self._workers]

    def close(self) -> None:
        """End the processes; another iteration starts new ones."""
        _end(self._workers)

    def reseed(self, seed: int) -> None:
        """Begin anew with another seed, if it is another one."""
        if seed != self._reader.seed:
            self.close()
            self._reader = replace(self._reader, seed=seed)

    def batches(self, requests: Iterator[tuple[ReadRequest, T]]) -> Iterator[tuple[Any, T]]:
        """The batch of each request, in order, with what came with it; what was read ahead in an iteration that was
        left is dropped.

        Raises: what the reader raises, with the worker's traceback; UsageError: each worker dies of the same batch.
        """
        if not self._num:
            following = next(requests, None)
            while following is not None:
                (request, about), following = following, None
                result = self._reader.read(request.keys)
                if self._reader.prefetch is not None and (following := next(requests, None)) is not None:
                    self._reader.prefetch(following[0].keys)
                yield self._noted(*result), about
                following = following or next(requests, None)
            return
        while len(self._workers) < self._num:
            self._workers.append(_Worker(self._reader, len(self._workers), self._num))
        for worker in self._workers:
            worker.num_dropped = len(worker.sent)
        turns = itertools.cycle(self._workers)
        waiting: deque[tuple[_Worker, T]] = deque()

        def send(requests: Iterable[tuple[ReadRequest, T]]) -> None:
            for request, about in requests:
                waiting.append((next(turns), about))
                waiting[-1][0].send(request)

        send(itertools.islice(requests, _AHEAD * self._num))
        while waiting:
            worker, about = waiting.popleft()
            batch, seconds = worker.receive()
            send(itertools.islice(requests, 1))
            yield self._noted(batch, seconds), about

    def _noted(self, batch: Any, seconds: dict[str, float]) -> Any:
        for name, value in seconds.items():
            self.seconds[name] += value
        return self._reader.pinned(batch)


class _Worker:
    """One process, and the requests that it has not answered."""

    _starting = threading.Lock()  # a process that is forked here would keep the other end of a socket open

    def __init__(self, reader: BatchReader, number: int, num_workers: int) -> None:
        self._arguments = reader, number, num_workers
        self.number = number
        self.sent: deque[ReadRequest] = deque()
        self.num_dropped = 0  # of the first of ``sent``, whose answers are dropped
        self._num_deaths = 0  # since the last answer
        self._start()

    def _start(self) -> None:
        self._parent = os.getpid()
        with self._starting:
            self._connection, other = multiprocessing.Pipe()
            self.process: BaseProcess = multiprocessing.get_context().Process(
                target=_serve, args=(other, self._parent, *self._arguments), daemon=True
            )
            self.process.start()
            other.close()

    def send(self, request: ReadRequest) -> None:
        self.sent.append(request)
        with suppress(OSError):  # a dead worker is noticed where its answer is missing
            self._connection.send(request)

    def receive(self) -> tuple[Any, dict[str, float]]:
        """The answer to the first request that is not dropped."""
        while True:
            result: tuple[Any, dict[str, float]]
            result, error = self._answer()
            self.sent.popleft()
            self._num_deaths = 0
            if self.num_dropped:
                self.num_dropped -= 1
            elif error is not None:
                raise error
            else:
                return result

    def _answer(self) -> tuple[Any, Exception | None]:
        while True:
            try:
                while not wait([self._connection, self.process.sentinel], _CHECK_SECONDS) and self.process.is_alive():
                    pass
                if self._connection.poll():
                    answer: tuple[Any, Exception | None] = self._connection.recv()
                    return answer
            except (EOFError, OSError):  # also of a tensor in shared memory, which the worker has to hand over
                self.process.join(_CHECK_SECONDS)
                if self.process.is_alive():
                    raise
            self._restart()

    def _restart(self) -> None:
        self.process.join()
        self._num_deaths += 1
        self._connection.close()
        reader, number, _ = self._arguments
        while self.num_dropped:
            self.sent.popleft()
            self.num_dropped -= 1
        request = self.sent[0]
        what = f"worker {number} of the loader (pid {self.process.pid}) {_end_of(self.process.exitcode or 0)}"
        where = f"the batch at position {request.position}"
        if self._num_deaths > _MOST_DEATHS:
            self._num_deaths = 0
            raise UsageError(
                f"{what} while it read {where}, as {_MOST_DEATHS} before it did.",
                where="; ".join(map(reader.place, request.keys)),
                do="look at these samples, and at the memory of the machine; with data.num_workers 0 the error is seen"
                " where it arises.",
                code="data-worker-died",
            )
        logger.warning("%s; a new one reads %s again. Nothing is lost.", what, where)
        self._start()
        for each in self.sent:
            with suppress(OSError):
                self._connection.send(each)

    def end(self) -> None:
        if os.getpid() == self._parent:  # a process forked from it has no part in them
            self.process.kill()
            self.process.join()
        self._connection.close()


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()
    workers.clear()


def _end_of(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    causes = {"SIGKILL": " (often for lack of memory)", "SIGBUS": " (often for lack of shared memory, /dev/shm)"}
    return f"was killed by {name}{causes.get(name, '')}"


# in a worker


def _serve(connection: Connection, parent: int, reader: BatchReader, number: int, num_workers: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a whole job: its main process ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not what a run does to save before it is preempted
    torch.set_num_threads(1)
    _utils.worker._worker_info = _utils.worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=reader.seed, dataset=reader.dataset
    )
    requests: queue.SimpleQueue[ReadRequest] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, parent, requests), daemon=True).start()
    with ThreadPoolExecutor(1) as sender:  # a batch is read while the one before is sent
        while True:
            request = requests.get()
            _seed(reader.seed, request.position)
            try:
                answer = _message((reader.read(request.keys), None))
            except Exception as error:
                error.add_note(f"in worker {number} of the loader (pid {os.getpid()}):\n{traceback.format_exc()}")
                answer = _message((None, _as_sent(error)))
            sender.submit(connection.send_bytes, answer)


def _receive(connection: Connection, parent: int, requests: queue.SimpleQueue[ReadRequest]) -> None:
    """Take requests at once, so that the main process never waits to send one; end with the main process."""
    with suppress(EOFError, OSError):
        while True:
            while not connection.poll(_CHECK_SECONDS):
                if os.getppid() != parent:
                    os._exit(0)
            requests.put(connection.recv())
    os._exit(0)


def _seed(seed: int, position: int) -> None:
    both = ((seed << 32) + position) % 2**63
    random.seed(both)
    np.random.seed([both % 2**32, both >> 32])
    torch.default_generator.manual_seed(both)


def _as_sent(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be pickled."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
        return error
    except Exception:
        other = RuntimeError(f"{type(error).__name__}: {error}")
        for note in error.__notes__:
            other.add_note(note)
        return other


class _Pickler(ForkingPickler):
    """torch's way through shared memory for large tensors, and bytes for small ones."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad
        if not (is_plain and value.device.type == "cpu" and 0 < value.nbytes <= _INLINE_NBYTES):
            return NotImplemented
        content = bytearray(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        return _tensor, (content, value.dtype, tuple(value.shape))


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).reshape(shape)


def _message(value: Any) -> memoryview:
    buffer = io.BytesIO()
    _Pickler(buffer, 5).dump(value)
    return buffer.getbuffer()
