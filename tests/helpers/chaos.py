"""Jobs of the launcher whose ranks fail at random, forked from a process that has imported everything.

forkserver  torch, shoal and the models are imported, once for all jobs
  launcher  the launcher's own function, ``run_local``; it adopts the ranks
    nursery forks a rank for each command that the launcher would execute
      rank  trains, has the faults of its list, and goes on from the last checkpoint when it is started again
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import shoal
from shoal.comm import torch_dist
from shoal.engine.parts.replicas import _holders
from shoal.sharding.placement import Tier
from tests.helpers.composition import settings_of
from tests.helpers.forking import forking, stop_server
from tests.helpers.links import drop_links
from tests.helpers.replicas import Decoder

STEPS = 6
_PRELOADED = [
    "torch._dynamo", "torch.distributed.launcher.api", "shoal.engine.entry", "shoal.optim.build",
    "shoal.checkpoint.save", "shoal.checkpoint.load", "shoal.launch.torchelastic", "tests.helpers.composition_runs",
    __name__,
]  # fmt: skip
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_BYTES = 16000  # of a file, once the disk is full

ACTIONS = (
    "kill", "stop", "abort", "raise", "leave", "exit 1", "terminate", "slow", "not finite", "link", "full", "flip",
)  # fmt: skip
PLACES = (
    "start", "load", "before_forward", "before_backward", "reduce", "before_step", "at_step", "after_step", "save",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens once: to a rank, at a place of a step (0 at the start)."""

    rank: int
    place: str
    action: str
    step: int


@dataclass(frozen=True)
class Layout:
    """A job.

    Args:
        axes: of the composition matrix.
        config: more sections.
        is_gloo: ranks exchange messages over TCP, not in memory that they share.
    """

    axes: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    is_gloo: bool = False


# processes


class _Adopted(subprocess.Popen):  # type: ignore[type-arg]  # of no text: it has no pipes
    """A child that another process has forked."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid, self.args, self.returncode = pid, args, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._communication_started, self._input = True, False, None
        self._waitpid_lock, self._sigint_wait_secs = threading.Lock(), 0.25


class _Nursery:
    """The process, without threads, that forks ranks. Each is then a child of the launcher."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _serve(theirs)
        theirs.close()

    def popen(self, handler: Any, args: Sequence[str], environment: dict[str, str]) -> _Adopted:
        """In the place of ``SubprocessHandler._popen``."""
        at = args.index("--")
        assigned = dict(arg.split("=", 1) for arg in args[5:at])  # as child.py does
        message = json.dumps([{**environment, **assigned}, list(args[at + 1 :])]).encode()
        files = [os.dup(file.fileno()) for file in (handler._stdout, handler._stderr)]
        socket.send_fds(self._socket, [message], files)
        for file in files:
            os.close(file)
        (pid,) = struct.unpack("i", self._socket.recv(4))
        return _Adopted(pid, args)

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self.pid, 0)


def _serve(requests: socket.socket) -> None:
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        message, files, *_ = socket.recv_fds(requests, 1 << 17, 2)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            _become(launcher, requests, *json.loads(message), files)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def _become(
    launcher: int, requests: socket.socket, environment: dict[str, str], program: list[str], files: list[int]
) -> None:
    """This process becomes a rank, as far as the program can see."""
    while os.getppid() != launcher:
        time.sleep(0.001)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    requests.send(struct.pack("i", os.getpid()))
    requests.close()
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    _reopen_streams()
    faulthandler.enable(2)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    _end(lambda: rank_main(*program))


def _reopen_streams() -> None:
    """Let Python write to what descriptors 1 and 2 are now, as long as the process lives."""
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


def _end(main: Callable[[], None]) -> None:
    """Run, and end as a Python program does."""
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter calls it at its end
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Jobs:
    """Runs jobs, in processes that are ended with it."""

    def __init__(self) -> None:
        self._context = forking(_PRELOADED)
        first = self._context.Process(target=int)  # starts the process that forks, for all tests of a module
        first.start()
        first.join()

    def run(
        self,
        folder: Path,
        layout: Layout,
        num_ranks: int,
        faults: Sequence[Fault],
        timeout: float,
        max_restarts: int = 12,
    ) -> tuple[int, str]:
        """Returns: the exit code of the launcher, and what it has printed."""
        (folder / "tmp").mkdir(parents=True)
        arguments = str(folder), asdict(layout), num_ranks, [asdict(fault) for fault in faults], max_restarts
        process = self._context.Process(target=_launch, args=arguments)
        process.start()
        process.join(timeout)
        text = (folder / "out").read_text(errors="replace") if (folder / "out").exists() else ""
        if process.is_alive():
            text += f"\nthe launcher has not ended in {timeout} s"
            process.kill()
            process.join()
            return -1, text
        assert process.exitcode is not None
        return process.exitcode, text

    def close(self) -> None:
        stop_server()


def _launch(
    folder: str, layout: dict[str, Any], num_ranks: int, faults: list[dict[str, Any]], max_restarts: int
) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    from shoal.launch import Elastic, LocalJob, run_local

    os.setsid()
    out = os.open(f"{folder}/out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    _reopen_streams()
    os.environ.update(TMPDIR=f"{folder}/tmp", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    tempfile.tempdir = None
    nursery = _Nursery()
    SubprocessHandler._popen = lambda self, args, environment: nursery.popen(self, args, environment)  # type: ignore[method-assign]
    job = LocalJob(
        (folder, json.dumps(layout), json.dumps(faults)),
        num_ranks,
        elastic=Elastic(max_restarts=max_restarts),
        stop_seconds=1,
    )
    outcome = run_local(job)
    print(outcome.report, file=sys.stderr, flush=True)
    nursery.close()
    os._exit(outcome.exit_code)


# a rank


class Faults(shoal.Part):
    """The faults of one rank."""

    def __init__(self, folder: Path, faults: Sequence[Fault]) -> None:
        self._folder = folder
        self._rank = int(os.environ["RANK"])
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault.rank == self._rank]
        self._engine: Any = None

    def happen(self, place: str) -> float:
        """Returns: what is added to a loss."""
        step = 0 if self._engine is None else self._engine.global_steps
        added = 0.0
        for number, fault in self._faults:
            if (fault.place, fault.step) != (place, step):
                continue
            try:
                (self._folder / f"fault-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue  # it has happened
            print(f"fault {number} now: {fault}", file=sys.stderr)
            added += self._do(fault.action, number)
        return added

    def _do(self, action: str, number: int) -> float:
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "abort":
                os.abort()
            case "leave":
                os._exit(0)
            case "exit 1":
                os._exit(1)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "slow":
                time.sleep(0.5)
            case "not finite":
                return float("nan")
            case "link":
                drop_links()
            case "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_BYTES, resource.RLIM_INFINITY))
            case "flip":
                self._flip(number)
            case "hang":
                time.sleep(600)
            case "raise":
                raise RuntimeError(f"fault {number}")
        return 0.0

    def _flip(self, seed: int) -> None:
        """One bit of a parameter that several ranks hold, where there is one."""
        groups = [
            group
            for group in self._engine.sharding.groups
            if group.buffer.storage.tier is Tier.DEVICE
            and any(comm.size > 1 for comm in _holders(group, is_sharded=group.buffer.is_sharded))
        ]
        if groups:
            draw = random.Random(seed)
            buffer = draw.choice(groups).buffer
            begin, end = (buffer.begin, buffer.end) if buffer.is_sharded else (0, buffer.layout.numel)
            segment = draw.choice(buffer.layout.segments_in(begin, end))
            at = draw.randrange(segment.start, segment.stop) * buffer.dtype.itemsize
            buffer.stored_values.view(torch.uint8)[at] ^= 1 << draw.randrange(8)

    # of Part

    def prepare(self, engine: Any) -> None:
        self._engine = engine
        engine.checkpointing.on_phase = self._on_phase
        reducer = engine.sharded.reducer
        issue = reducer._issue

        def issue_and_fail(unit: Any) -> None:
            issue(unit)
            self.happen("reduce")  # other ranks wait in it

        reducer._issue = issue_and_fail

    def _on_phase(self, phase: str) -> None:
        self.happen("save")

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.happen("before_forward")

    def before_step(self) -> None:
        self.happen("before_step")

    def at_step(self, was_applied: bool) -> None:
        self.happen("at_step")

    def after_step(self) -> None:
        self.happen("after_step")


def rank_main(folder_name: str, layout_text: str, faults_text: str) -> None:
    """Train to the last step from what is saved; rank 0 leaves the parameters in ``final.safetensors``."""
    folder, layout = Path(folder_name), Layout(**json.loads(layout_text))
    with open(folder / "pids", "a") as file:
        file.write(f"{os.getpid()}\n")
    torch.set_num_threads(1)
    if layout.is_gloo:
        torch_dist.is_supported = lambda: False
    faults = Faults(folder, [Fault(**fault) for fault in json.loads(faults_text)])
    faults.happen("start")
    config, run = settings_of(layout.axes)
    if layout.axes.get("state") == "disk":
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder / "tmp")
    task = Decoder(run)
    config = {
        **config,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "timeouts": {"init": 20, "data": 20, "step": 4, "checkpoint": 4},
        "debug": {"replica_check_steps": 1},
        "log_level": "warning",
        **layout.config,
    }
    engine, _, loader, _ = shoal.initialize(
        model=task.model(0), config=config, training_data=task.data(), parts=[faults]
    )
    faults.happen("load")
    saved = folder / "saved"
    if saved.exists():
        engine.allows_missing = True
        try:
            engine.load_checkpoint(saved)
        except shoal.errors.CheckpointError as error:
            if error.code != "checkpoint-missing":
                raise
    backward = engine.backward
    engine.backward = lambda loss, **more: backward(loss + faults.happen("before_backward"), **more)
    batches = iter(shoal.data.RepeatingLoader(loader))
    while engine.global_steps < STEPS:
        is_last = False
        while not is_last:
            faults.happen("data")
            inputs, _ = next(batches)
            is_last = task.backward(engine, inputs)
            task.step(engine, is_last=is_last)
        if engine.global_steps % 2 == 0:
            engine.save_checkpoint(saved)
    state = engine.module_state_dict()
    save_file({name: value.clone() for name, value in state.items()}, folder / f"final-{faults._rank}.safetensors")
    engine.destroy()
