"""Eight processes without a launcher: how soon a rank that was killed, or that hangs, is named."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.launch.test_guard import SLACK_SECONDS, STEP_SECONDS, stacks_in, torchrun, write
from tests.jobs.launch.test_launch import wait_until

pytestmark = pytest.mark.timeout(300)
NUM_RANKS = 8
GLOO = "import shoal.comm.torch_dist\nshoal.comm.torch_dist.is_supported = lambda: False\n"


def run(folder: Path, fault: str, before: str, named: str, num_naming: int, victim: int = 5) -> tuple[list[str], float]:
    """Returns: each rank's stderr, and the seconds from the victim's fault until so many have written ``named``."""
    script = write(folder, {victim: fault})
    text = script.read_text().replace('"step": 1.5', '"step": 60') if "KILL" in fault else script.read_text()
    script.write_text(before + text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {**os.environ, "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables["TMPDIR"] = str(folder)
    jobs = []
    for rank in range(NUM_RANKS):
        with (folder / f"{rank}.err").open("w") as err:
            environment = {**variables, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            jobs.append(subprocess.Popen([sys.executable, str(script)], stderr=err, env=environment))
    try:
        files = [folder / f"{rank}.err" for rank in range(NUM_RANKS)]
        assert wait_until(lambda: sum(named in file.read_text() for file in files) >= num_naming, 100)
        seconds = time.time() - (folder / "stuck").stat().st_mtime
        for job in jobs:
            job.wait(timeout=60)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert all(job.returncode for job in jobs)
    return [(folder / f"{rank}.err").read_text() for rank in range(NUM_RANKS)], seconds


@pytest.mark.parametrize("before", ["", GLOO], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("victim", [5, 0], ids=["rank 5", "the rank with the store"])
def test_a_killed_rank_of_eight_is_named_by_all_others_within_five_seconds(
    victim: int, before: str, tmp_path: Path
) -> None:
    fault, named = "os.kill(os.getpid(), signal.SIGKILL)", f"[rank-failed] rank {victim} failed"
    _, seconds = run(tmp_path, fault, before, named, NUM_RANKS - 1, victim)
    assert not list(tmp_path.glob("shoal-*"))
    print(f"{seconds:.1f} s")
    assert seconds < 5


@pytest.mark.parametrize("before", ["", GLOO], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("fault", ["time.sleep(100)", "sum(range(10 ** 13))", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_stuck_rank_of_eight_is_named_within_its_time_out_and_three_seconds(
    fault: str, before: str, tmp_path: Path
) -> None:
    errors, seconds = run(tmp_path, fault, before, "do: if nothing is wrong, raise timeouts.step", 1)
    report = "".join(errors)
    assert "shoal: [hang] step 1: rank 5 hangs; section 'step' of rank " in report, report
    assert report.count("[hang]") == 1
    assert len(re.findall(r"rank \d: waits in a collective, called at ", report)) == NUM_RANKS - 1
    stacks_in(report, tmp_path)
    print(f"{seconds:.1f} s")
    assert seconds < STEP_SECONDS + 3


def test_a_rank_that_issues_a_collective_more_than_the_others_is_named_under_torchrun(tmp_path: Path) -> None:
    _, err, seconds = torchrun(tmp_path, 3, {2: "torch.distributed.all_reduce(torch.ones(1))"})
    assert "shoal: [hang] step 1: rank 2 hangs; section 'step' of rank " in err
    assert re.search(r"rank 2: waits in a collective, called at .*script\.py:\d+, in stuck; collective \d+: ", err), err
    assert err.count("[hang]") == 1
    stacks_in(err, tmp_path)
    assert seconds < STEP_SECONDS + SLACK_SECONDS
