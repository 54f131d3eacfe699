"""Hangs of real processes that no launcher of Shoal's has started: found, explained and ended by the ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.jobs.launch.test_hang import SCRIPT, calls_of
from tests.jobs.launch.test_launch import is_alive, wait_until

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node")
STEP_SECONDS = 1.5  # timeouts.step of the script
SLACK_SECONDS = 12.0  # the machine is shared; idle 1.5 s are enough
FORK = """
import os, runpy, sys
import torch, shoal.engine.initialize
torch.optim.SGD([torch.ones(1)], lr=0.1)  # imports torch's compiler
script, size = sys.argv[1], int(sys.argv[2])
for rank in range(size):
    if os.fork() == 0:
        os.environ["RANK"] = str(rank)
        runpy.run_path(script, run_name="__main__")
        os._exit(0)
print(*(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(size)))
"""  # ranks without a launcher, which import torch once


def write(folder: Path, stuck: Mapping[int, str], first: str = "") -> Path:
    """
    Args:
        stuck: what ranks run in their second forward of a step.
        first: what the script begins with.
    """
    code = f"Path({str(folder)!r}, 'stuck').touch(); eval({dict(stuck)!r}[rank])"
    text = SCRIPT.format(folder=str(folder), stuck=code, in_evaluation="pass", limit=1.5)
    script = folder / "script.py"
    script.write_text(first + text.replace("rank == 1:", f"rank in {list(stuck)}:"))
    return script


def torchrun(folder: Path, num_ranks: int, stuck: Mapping[int, str]) -> tuple[int, str, float]:
    """Returns: the exit code, stderr, and the seconds from the start of the hang until no rank is left."""
    command = [*TORCHRUN, str(num_ranks), sys.executable, str(write(folder, stuck))]
    job = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(folder)}
    )
    mark = folder / "stuck"
    try:
        assert wait_until(mark.exists, 40)
        ranks = [int(path.read_text()) for path in folder.glob("*.pid")]
        assert wait_until(lambda: not any(map(is_alive, ranks)), 40)
        seconds = time.time() - mark.stat().st_mtime
        _, err = job.communicate(timeout=40)
    finally:
        job.terminate()  # its ranks, too
    assert len(ranks) == num_ranks
    return job.returncode, err, seconds


@contextmanager
def forked(folder: Path, num_ranks: int, stuck: Mapping[int, str], first: str = "") -> Iterator[subprocess.Popen[str]]:
    """Ranks without a launcher, in a process group of their own, of which nothing is left at the end."""
    script = write(folder, stuck, first)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", FORK, str(script), str(num_ranks)]
    env = os.environ | variables | {"TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as job:
        try:
            yield job
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def stacks_in(err: str, folder: Path) -> str:
    """The text of the file that a report names: the only one that is left in ``folder``, where files are temporary."""
    kept = Path(re.search(r"the stacks of all threads of all ranks: (\S+)", err)[1])  # type: ignore[index]
    assert list(folder.glob("shoal-*")) == [kept]
    return kept.read_text()


def test_a_rank_that_sleeps_under_torchrun_is_named_with_its_stack_and_all_ranks_are_gone(tmp_path: Path) -> None:
    code, err, seconds = torchrun(tmp_path, 2, {1: "time.sleep(50)"})
    assert code != 0 and "exitcode  : 134" in err
    assert err.count("[hang]") == 1
    assert "shoal: [hang] step 1: rank 1 hangs; section 'step' of rank " in err
    assert re.search(r"rank 1: runs .*script\.py:\d+, in stuck; collective \d+: ", err), err
    assert re.search(r"rank 0: waits in a collective, called at .*script\.py:\d+, in ", err), err
    assert re.search(r'the stack of rank 1:\n +File "<string>".*\n +File ".*script\.py", line \d+ in stuck', err), err
    written = calls_of(tmp_path, 0)
    assert len(written) == 7 and calls_of(tmp_path, 1) == written[:-1]
    text = stacks_in(err, tmp_path)
    assert "rank 0\n" in text and "rank 1\n" in text and text.count("most recent call first") >= 4
    assert seconds < STEP_SECONDS + SLACK_SECONDS


def test_ranks_that_cannot_run_a_thread_are_named_by_the_others_also_one_that_has_the_store(tmp_path: Path) -> None:
    stuck = {0: "os.kill(os.getpid(), signal.SIGSTOP)", 2: "sum(range(10 ** 13))"}  # which holds the GIL
    with forked(tmp_path, 4, stuck) as job:
        out, err = job.communicate(timeout=50)
    seconds = time.time() - (tmp_path / "stuck").stat().st_mtime
    codes = out.splitlines()[-1].split()
    assert "shoal: [hang] step 1: rank 0 hangs; section 'step' of rank " in err
    assert re.search("rank 0: is stopped, by a signal or a debugger; collective 6", err), err
    assert re.search(r"rank 2: runs .*script\.py:\d+, in ", err), err
    assert err.count("[hang]") == 1
    assert len(codes) == 4 and set(codes) == {"134", "-9"}, codes
    stacks_in(err, tmp_path)
    assert seconds < STEP_SECONDS + SLACK_SECONDS


def test_a_rank_that_holds_the_lock_of_python_alone_on_its_machine_writes_its_stack(tmp_path: Path) -> None:
    alone = "import os\nimport shoal.hang\nshoal.hang.boot = lambda: os.environ['RANK']\n"
    err = ""
    with forked(tmp_path, 2, {1: "time.sleep(0.8) or sum(range(10 ** 13))"}, alone) as job:
        assert wait_until((tmp_path / "stuck").exists, 40)
        for line in job.stderr or ():
            err += line
            if " in stuck" in line and "Timeout (" in err:
                break
    assert "rank 1: does not answer: its process or its machine is lost, or holds Python's global lock" in err
    assert re.search(r'Timeout \(0:00:06.*\)!\n(.*\n)+.*File ".*script\.py", line \d+ in stuck', err), err
