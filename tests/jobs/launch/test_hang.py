"""Hangs of real processes: found, explained and ended by the launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.launch.test_launch import START, is_alive

SCRIPT = """
import os, signal, time
from pathlib import Path
import torch
import shoal

rank = int(os.environ["RANK"])
Path({folder!r}, f"{{rank}}.pid").write_text(str(os.getpid()))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.count = 0

    def forward(self, batch):
        self.count += torch.is_grad_enabled()
        if self.count == 2 and rank == 1:
            stuck()
        return self.inner(batch).square().mean()

def stuck():
    {stuck}

model = Model()
config = {{"train_micro_batch_size_per_gpu": 1, "timeouts": {{"step": {limit}, "evaluation": 60}},
          "debug": {{"flight_recorder_folder": {folder!r}}}}}
engine, *_ = shoal.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
with torch.no_grad():
    engine(torch.ones(1, 8))
    {in_evaluation}
for step in range(3):
    engine.backward(engine(torch.ones(1, 8)))
    engine.step()
engine.destroy()
print("over")
"""


def run(
    folder: Path, stuck: str, in_evaluation: str = "pass", start: str = START, limit: float = 1.5
) -> tuple[int, str, float]:
    """Returns: the exit code, stderr, and the seconds from the start of the hang to the end of the job."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(folder=str(folder), stuck=stuck, in_evaluation=in_evaluation, limit=limit))
    command = [sys.executable, "-c", start, "2", str(script)]
    variables = os.environ | {"TMPDIR": str(folder)}
    job = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    ended = time.time()
    mark = folder / "stuck"
    return job.returncode, job.stderr, ended - mark.stat().st_mtime if mark.exists() else 0.0


def calls_of(folder: Path, rank: int) -> list[str]:
    """The collectives that a rank wrote at the hang."""
    return [entry["profiling_name"] for entry in json.loads((folder / f"rank_{rank}.json").read_text())["entries"]]


@pytest.mark.parametrize(
    ("stuck", "doing"),
    [
        ("time.sleep(50)", r"rank 1: runs .*script\.py:\d+, in stuck; collective \d+: "),
        ("sum(range(10 ** 13))", r"rank 1: runs .*script\.py:\d+, in stuck; "),  # holds the GIL
        (
            "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(50)",
            r"rank 1: is stopped, by a signal or a debugger; collective \d+: ",
        ),
    ],
)
def test_the_rank_that_hangs_is_named_with_its_stack_and_all_ranks_are_gone(
    stuck: str, doing: str, tmp_path: Path
) -> None:
    mark = f"Path({str(tmp_path)!r}, 'stuck').touch(); "
    code, err, seconds = run(tmp_path, mark + stuck)
    assert code == 128 + signal.SIGABRT, err
    assert "[hang] step 1: rank 1 hangs; section 'step'" in err
    assert re.search(doing, err), err
    assert re.search(r"rank 0: waits in a collective, called at .*script\.py:\d+, in ", err), err
    assert re.search(r'the stack of rank 1:\n +File ".*script\.py", line \d+ in stuck', err), err
    kept = Path(re.search(r"the stacks of all threads of all ranks: (\S+)", err)[1])  # type: ignore[index]
    text = kept.read_text()
    kept.unlink()
    assert "rank 0\n" in text and "rank 1\n" in text and text.count("most recent call first") >= 2
    assert "Fatal Python error" not in err  # the dumps are in the file
    written = calls_of(tmp_path, 0)
    assert len(written) == 7 and written[-1] == "gloo:all_reduce of 'root'"  # of the backward pass, as rank 1 has not
    if stuck.startswith("time.sleep"):  # the others cannot write theirs
        assert calls_of(tmp_path, 1) == written[:-1]
    assert len(err.splitlines()) < 40
    assert not any(is_alive(int(path.read_text())) for path in tmp_path.glob("*.pid"))
    assert seconds < 1.5 + 12  # the machine is shared; idle it takes under 4


def test_a_section_that_is_given_more_time_is_no_hang(tmp_path: Path) -> None:
    code, err, _ = run(tmp_path, "pass", "time.sleep(4)")
    assert code == 0, err
    assert "[hang]" not in err


@pytest.mark.timeout(110)  # it starts its ranks twice
def test_a_job_that_fails_alike_in_the_same_step_is_not_started_a_third_time(tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"
    elastic = START.replace("int(sys.argv[1])", "int(sys.argv[1]), elastic=Elastic(max_restarts=9)")
    fails = f"open({str(attempts)!r}, 'a').write('.'); raise ValueError('always')"
    code, err, _ = run(tmp_path, fails, start=elastic, limit=60)  # else a busy machine may take the error for a hang
    assert code == 1, err
    assert attempts.read_text() == "..", err
    assert "shoal: all ranks are started anew: rank 1 failed: ValueError: always" in err
    assert err.rstrip().endswith("the attempt before failed alike, also in step 1, so the job is not started again.")


BEFORE = """
import os, signal
if os.environ["RANK"] == "0":
    {stuck}
import torch, shoal
config = {{"train_micro_batch_size_per_gpu": 1, "timeouts": {{"init": 2}}}}
shoal.initialize(model=torch.nn.Linear(1, 1), config=config, optimizer=None)
"""


def run_before(folder: Path, stuck: str, **variables: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(BEFORE.format(stuck=stuck))
    command = [sys.executable, "-c", START, "2", str(script)]
    environment = os.environ | {"TMPDIR": str(folder)} | variables
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=55, check=False)
    return job.returncode, job.stderr


@pytest.mark.parametrize("stuck", ["os.kill(os.getpid(), signal.SIGSTOP)", "sum(range(10 ** 13))"])
def test_a_rank_that_does_not_come_to_initialize_is_named_with_its_stack_and_ended(stuck: str, tmp_path: Path) -> None:
    code, err = run_before(tmp_path, stuck)
    assert code == 128 + signal.SIGABRT, err
    head = "shoal: [hang] step 0: rank 0 hangs; section 'init' of rank 1 took longer than its 2 s (timeouts.init)."
    assert head in err
    script = f"{tmp_path}/script.py"
    doing = "is stopped, by a signal or a debugger" if "SIGSTOP" in stuck else f"runs {script}:4, in <module>"
    assert f"  rank 0: {doing}; no collective yet\n  rank 1: waits in a collective, called at {script}:" in err, err
    assert f'  the stack of rank 0:\n    File "{script}", line 4 in <module>\n' in err


def test_where_no_rank_comes_to_initialize_all_are_ended_with_their_stacks(tmp_path: Path) -> None:
    code, err = run_before(tmp_path, "pass\nimport time; time.sleep(50)", SHOAL_INIT_SECONDS="3")
    assert code == 128 + signal.SIGABRT, err
    assert "[hang] step 0: no rank has come to initialize; section 'init' of rank 0 took longer than its 3 s" in err
    assert f"  rank 1: runs {tmp_path}/script.py:5, in <module>; no collective yet\n" in err
    assert "  do: if nothing is wrong, raise SHOAL_INIT_SECONDS in the environment (0: no limit).\n" in err
