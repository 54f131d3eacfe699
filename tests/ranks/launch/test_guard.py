"""Hangs of real processes that no launcher of Shoal's has started: found, explained and ended by the ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.ranks.launch.test_hang import SCRIPT
from tests.ranks.launch.test_launch import is_alive, wait_until

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node")
STEP_SECONDS = 1.5  # timeouts.step of the script
SLACK_SECONDS = 12.0  # the machine is shared; idle 1.5 s are enough


def write(folder: Path, stuck: Mapping[int, str]) -> Path:
    """Args: ``stuck``: what ranks run in their second forward of a step."""
    code = f"Path({str(folder)!r}, 'stuck').touch(); eval({dict(stuck)!r}[rank])"
    text = SCRIPT.format(folder=str(folder), stuck=code, in_evaluation="pass")
    script = folder / "script.py"
    script.write_text(text.replace("rank == 1:", f"rank in {list(stuck)}:"))
    return script


def torchrun(folder: Path, num_ranks: int, stuck: Mapping[int, str]) -> tuple[int, str, float]:
    """Returns: the exit code, stderr, and the seconds from the start of the hang until no rank is left."""
    command = [*TORCHRUN, str(num_ranks), sys.executable, str(write(folder, stuck))]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
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


def stacks_in(err: str) -> str:
    """The file of a report, which is removed."""
    kept = Path(re.search(r"the stacks of all threads of all ranks: (\S+)", err)[1])  # type: ignore[index]
    text = kept.read_text()
    kept.unlink()
    return text


def test_a_rank_that_sleeps_under_torchrun_is_named_with_its_stack_and_all_ranks_are_gone(tmp_path: Path) -> None:
    code, err, seconds = torchrun(tmp_path, 2, {1: "time.sleep(50)"})
    assert code != 0 and "exitcode  : 134" in err
    assert err.count("[hang]") == 1
    assert "shoal: [hang] step 1: rank 1 hangs; section 'step' of rank " in err
    assert re.search(r"rank 1: runs .*script\.py:\d+, in stuck; collective \d+: ", err), err
    assert re.search(r"rank 0: waits in a collective, called at .*script\.py:\d+, in ", err), err
    assert re.search(r'the stack of rank 1:\n +File "<string>".*\n +File ".*script\.py", line \d+ in stuck', err), err
    text = stacks_in(err)
    assert "rank 0\n" in text and "rank 1\n" in text and text.count("most recent call first") >= 4
    assert seconds < STEP_SECONDS + SLACK_SECONDS


def test_a_rank_that_issues_a_collective_more_than_the_others_is_named_under_torchrun(tmp_path: Path) -> None:
    _, err, seconds = torchrun(tmp_path, 3, {2: "torch.distributed.all_reduce(torch.ones(1))"})
    assert "shoal: [hang] step 1: rank 2 hangs; section 'step' of rank " in err
    assert re.search(r"rank 2: waits in a collective, called at .*script\.py:\d+, in stuck; collective \d+: ", err), err
    assert err.count("[hang]") == 1
    stacks_in(err)
    assert seconds < STEP_SECONDS + SLACK_SECONDS


def test_ranks_that_cannot_run_a_thread_are_named_by_the_others_also_one_that_has_the_store(tmp_path: Path) -> None:
    stuck = {0: "os.kill(os.getpid(), signal.SIGSTOP)", 2: "sum(range(10 ** 13))"}  # which holds the GIL
    script = write(tmp_path, stuck)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(script)]
    jobs = [
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=variables | {"RANK": str(rank)}
        )
        for rank in range(4)
    ]
    try:
        err = "".join(job.communicate(timeout=50)[1] for job in jobs)
        seconds = time.time() - (tmp_path / "stuck").stat().st_mtime
    finally:
        for job in jobs:
            job.kill()
    assert "shoal: [hang] step 1: rank 0 hangs; section 'step' of rank " in err
    assert re.search("rank 0: is stopped, by a signal or a debugger; collective 6", err), err
    assert re.search(r"rank 2: runs .*script\.py:\d+, in ", err), err
    assert err.count("[hang]") == 1
    assert 134 in [job.returncode for job in jobs] and all(job.returncode for job in jobs)
    stacks_in(err)
    assert seconds < STEP_SECONDS + SLACK_SECONDS
