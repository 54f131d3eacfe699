"""Local ranks as real processes: their output, their failures, their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.launch.local import LocalJob, run_local

START = "import sys; from shoal.launch import *; o = run_local(LocalJob((sys.executable, *sys.argv[2:]), \
int(sys.argv[1]))); print(o.report, file=sys.stderr); sys.exit(o.exit_code)"


def start(num_ranks: int, script: Path, *args: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [sys.executable, "-c", START, str(num_ranks), str(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def write(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + text)
    return script


def is_alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition, seconds: float = 20.0) -> bool:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_each_line_bears_its_rank_and_each_rank_its_environment(tmp_path: Path) -> None:
    script = write(tmp_path, "print(os.environ['WORLD_SIZE'], os.environ['MASTER_ADDR'], sys.argv[1:])")
    job = start(2, script, "--size", "a b")
    out, err = job.communicate(timeout=50)
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == [
        "[rank 0] 2 127.0.0.1 ['--size', 'a b']",
        "[rank 1] 2 127.0.0.1 ['--size', 'a b']",
    ]


def test_the_first_failing_rank_gives_the_exit_code_and_the_last_words(tmp_path: Path) -> None:
    text = """
if rank == 1:
    sys.excepthook(ValueError, ValueError('the cause'), None)
    sys.exit(7)
time.sleep(0.2)
raise RuntimeError('Connection closed by peer')
"""
    job = start(2, write(tmp_path, text))
    _, err = job.communicate(timeout=50)
    assert job.returncode == 7
    assert "shoal: rank 1 failed first: it ended with exit code 7." in err
    assert err.rstrip().endswith("ValueError: the cause")


def test_a_rank_that_lost_its_peer_is_not_named_though_it_ended_first(tmp_path: Path) -> None:
    text = """
if rank == 0:
    raise RuntimeError('Connection closed by peer')
raise ValueError('the cause')
"""
    job = start(2, write(tmp_path, text))
    _, err = job.communicate(timeout=50)
    assert job.returncode == 1
    assert err.rstrip().endswith("ValueError: the cause")


def test_an_exceptions_cause_is_part_of_the_traceback(tmp_path: Path) -> None:
    text = """
try:
    1 / 0
except ZeroDivisionError as error:
    raise ValueError('outer') from error
"""
    _, err = start(1, write(tmp_path, text)).communicate(timeout=50)
    report = err[err.index("shoal: rank 0 failed first") :]
    assert "ZeroDivisionError" in report
    assert report.rstrip().endswith("ValueError: outer")


def test_a_rank_ended_by_a_signal_gives_128_and_its_number(tmp_path: Path) -> None:
    job = start(1, write(tmp_path, "os.abort()"))
    _, err = job.communicate(timeout=50)
    assert job.returncode == 128 + signal.SIGABRT
    assert "it was ended by SIGABRT" in err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_terminated_rank_is_distinguished_from_those_that_the_launcher_ends(victim: int, tmp_path: Path) -> None:
    text = f"""
if rank == {victim}:
    time.sleep(0.5)
    os.kill(os.getpid(), 15)
time.sleep(30)
"""
    job = start(2, write(tmp_path, text))
    _, err = job.communicate(timeout=50)
    assert job.returncode == 128 + signal.SIGTERM
    assert f"shoal: rank {victim} failed first: it was ended by SIGTERM." in err


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(tmp_path: Path, signal_number: signal.Signals) -> None:
    text = f"""
import pathlib
name = pathlib.Path({str(tmp_path)!r}, f'{{rank}}.tmp')
name.write_text(str(os.getpid()))
name.rename(name.with_suffix('.pid'))
time.sleep(50)
"""
    job = start(2, write(tmp_path, text))
    assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    ranks = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert all(is_alive(rank) for rank in ranks)
    job.send_signal(signal_number)
    _, err = job.communicate(timeout=20)
    assert wait_until(lambda: not any(is_alive(rank) for rank in ranks), 5)
    if signal_number == signal.SIGINT:
        assert job.returncode == 130
        assert "stopped by SIGINT; all 2 ranks have ended" in err


def test_no_ranks_and_more_ranks_than_visible_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="0 ranks"):
        run_local(LocalJob(("true",), 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(UsageError, match=r"4 ranks.*CUDA_VISIBLE_DEVICES=2,3 shows 2"):
        run_local(LocalJob(("true",), 4))
