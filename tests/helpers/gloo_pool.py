"""Real Gloo processes for tests, started once and kept: a call costs milliseconds, not the seconds of a new process.

One pool per world size. Each worker is a forked process with one thread whose process group stays initialised between
calls. A function travels by its name (``module:qualname``), arguments and results as tensors and plain values. A worker
that hangs, or that fails while its peers wait for it, ends its whole pool; the next call starts a new one.
"""

from __future__ import annotations

import importlib
import io
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests.helpers.forking import forking, stop_server

GRACE_SECONDS = 5.0  # what a rank's peers get to finish after it has failed


class GlooRankError(AssertionError):
    """A rank raised or hung; ``tracebacks`` maps rank to what it raised."""

    def __init__(self, what: str, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        super().__init__("\n".join([what, *(f"--- rank {rank}\n{text}" for rank, text in sorted(tracebacks.items()))]))


class GlooPool:
    """``size`` processes joined over Gloo."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-pool-")
        context = forking()
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            here, there = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(
                target=_worker, args=(there, rank, size, store, port), name=f"gloo-{size}-rank-{rank}", daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._processes if process.pid is not None}

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 45.0) -> list[Any]:
        """Run ``function(rank, size, *args)`` on every rank.

        Returns: the results in rank order.
        Raises: GlooRankError: a rank raised, died, or did not answer within ``timeout`` seconds. The pool is gone then.
        """
        name = _name(function)
        request = _encode({"function": name, "args": list(args)})
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        tracebacks: dict[int, str] = {}
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(request)
            except OSError:
                tracebacks[rank] = "the process has ended"
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in tracebacks}
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answer = _decode(pipe.recv_bytes())
                except (EOFError, OSError):
                    tracebacks[rank] = "the process died before it answered"
                else:
                    if "traceback" in answer:
                        tracebacks[rank] = answer["traceback"]
                    else:
                        results[rank] = answer["result"]
                if rank in tracebacks:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if tracebacks or waiting:
            self.close(kill=True)
            late = sorted(waiting.values())
            what = f"{name} on {self.size} ranks"
            if tracebacks:
                what += f": rank {min(tracebacks)} failed"
            if late:
                what += f": no answer from ranks {late}"
            raise GlooRankError(what, tracebacks)
        return [results[rank] for rank in range(self.size)]

    def close(self, kill: bool = False) -> None:
        """End the workers: at once with ``kill``, else after their process groups are closed."""
        for pipe in self._pipes:
            pipe.close()  # a worker that waits for its next call reads this as the end
        for process in self._processes:
            if not kill:
                process.join(timeout=5)
            if process.is_alive():
                process.kill()
            process.join(timeout=5)
        self._folder.cleanup()

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes) and not any(pipe.closed for pipe in self._pipes)


class GlooPools:
    """Pools by world size, made when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, GlooPool] = {}

    def call(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 45.0) -> list[Any]:
        _name(function)  # refused before any process is started
        pool = self._pools.get(size)
        if pool is None or not pool.is_alive:
            if pool is not None:
                pool.close(kill=True)
            pool = self._pools[size] = GlooPool(size)
        return pool.call(function, *args, timeout=timeout)

    @property
    def pids(self) -> set[int]:
        return set().union(*(pool.pids for pool in self._pools.values()))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        stop_server()


def _worker(pipe: Connection, rank: int, size: int, store: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            request = _decode(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            torch.manual_seed(0)
            module, _, qualname = request["function"].partition(":")
            function: Any = importlib.import_module(module)
            for part in qualname.split("."):
                function = getattr(function, part)
            answer = _encode({"result": function(rank, size, *request["args"])})
        except BaseException:
            answer = _encode({"traceback": traceback.format_exc()})
        try:
            pipe.send_bytes(answer)
        except OSError:
            break
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()


def _name(function: Callable[..., Any]) -> str:
    name = f"{function.__module__}:{function.__qualname__}"
    if "<locals>" in name or "<lambda>" in name:
        raise ValueError(f"{name} cannot be found by name in another process; move it to the top of its module")
    return name


def _encode(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _decode(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
