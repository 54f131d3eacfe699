"""Pairs of real processes of which one dies: forked, in tenths of seconds, from one that has imported everything."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.forking import forking
from tests.helpers.models import Plain
from tests.helpers.resuming import Run, engine_of, micro_steps
from tests.helpers.training import adamw, config

SIZE = 2
# What every rank calls, and what only rank 0 does.
EVERY_RANKS_PHASES = ("snapshot", "shard_write", "shard_fsync", "exchange")
FIRST_RANKS_PHASES = ("manifest", "rename", "latest", "gc")
BETWEEN_RENAMES = "between the renames"  # of the checkpoint that is replaced, and of the new one
SURVIVED, FAILED = 0, 3  # exit codes


def tiny(stage: int = 1, **sections: Any) -> Run:
    """Two blocks of 16; AdamW; clipped."""
    settings = config(stage, **{"gradient_clipping": 1.0, "log_level": "error", **sections})
    return Run(settings=settings, world=SIZE, factory=lambda: Plain(2, 16), optimizer=adamw)


class Nursery:
    """Forks pairs of ranks."""

    def __init__(self) -> None:
        self._context = forking()
        self._run_all(_nothing, [()], 60.0)

    def run(self, function: Callable[..., Any], out: Path, *args: Any, timeout: float = 30.0) -> list[int]:
        """``function(rank, *args)`` in each process of a pair.

        Args:
            out: a folder of this pair's own; what a rank raised is in its file ``rank-N``.

        Returns: exit codes; ``-signal`` of one that was killed.
        """
        out.mkdir(parents=True)
        port = _free_port()
        return self._run_all(_rank, [(rank, function, str(out), port, args) for rank in range(SIZE)], timeout)

    def _run_all(self, target: Callable[..., Any], arguments: list[Any], timeout: float) -> list[int]:
        processes: list[Any] = [self._context.Process(target=target, args=each) for each in arguments]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join(5)
        assert not late, f"ranks {late} hung for {timeout} s"
        return [process.exitcode for process in processes]


def _nothing() -> None:
    return


def _rank(rank: int, function: Callable[..., Any], out: str, port: int, args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(SIZE), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(SIZE),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=SIZE)
    code = SURVIVED
    try:
        function(rank, *args)
    except BaseException as error:
        Path(out, f"rank-{rank}").write_text(f"{type(error).__name__}: {error}")
        code = FAILED
    os._exit(code)  # the other may be dead: nothing orderly is left to do


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def save_and_die(rank: int, folder: str, is_async: bool, victim: int, phase: str, tag: str | None, step: int) -> None:
    """Load what lies in ``folder`` (after ``step`` steps), train one step more, and save; ``victim`` is killed.

    The rank that calls ``phase`` kills it: itself, or rank 0 the other while it does what only rank 0 does.
    """
    run = tiny(checkpoint={"async_save": is_async})
    engine = engine_of(run)
    engine.load_checkpoint(folder, tag=tag)
    micro_steps(engine, run, step, 1)
    pids = engine.axes.world.gather_objects(os.getpid(), label="test: pids")

    def kill(name: str) -> None:
        if name == phase:
            os.kill(pids[victim], signal.SIGKILL)

    if rank == (victim if phase in EVERY_RANKS_PHASES else 0):
        if phase == BETWEEN_RENAMES:
            rename = os.rename

            def rename_or_die(source: Any, target: Any) -> None:
                if ".tmp-" in str(source):
                    kill(BETWEEN_RENAMES)
                rename(source, target)

            os.rename = rename_or_die  # type: ignore[assignment]
        engine.checkpointing.on_phase = kill
    engine.save_checkpoint(folder, tag=tag)
    engine.checkpointing.finish()
