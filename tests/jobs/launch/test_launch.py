"""Local ranks as real processes: their output, their failures, their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.comm.world import init_distributed
from shoal.errors import CommError, UsageError
from shoal.launch.local import LocalJob, Place, run_local

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
    try:
        raise ValueError('the cause')
    except ValueError:
        sys.excepthook(*sys.exc_info())
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
    """Rank 1 has written its error and has not ended yet."""
    text = f"""
import atexit
from pathlib import Path
reported = Path({str(tmp_path / "reported")!r})
if rank == 0:
    while not reported.exists():
        time.sleep(0.05)
    raise RuntimeError('Connection closed by peer')
atexit.register(time.sleep, 2)
atexit.register(reported.touch)
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


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_a_rank_ended_by_a_signal_gives_128_and_its_number(number: signal.Signals, tmp_path: Path) -> None:
    job = start(1, write(tmp_path, f"os.kill(os.getpid(), {number:d})"))
    _, err = job.communicate(timeout=50)
    assert job.returncode == 128 + number
    assert f"it was ended by {number.name}" in err


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


def test_a_port_in_use_is_said_before_a_rank_starts() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            UsageError, match=f"port {port} of this machine, where rank 0 is to listen: Address already"
        ):
            run_local(LocalJob(("true",), 1, environment={"MASTER_PORT": str(port)}))
        with pytest.raises(UsageError, match=f"port {port}"):
            run_local(LocalJob(("true",), 1, place=Place(0, 2, "127.0.0.1", port)))


def test_a_rank_that_is_started_alone_says_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.comm.interface._SILENT_SECONDS", 0.05)

    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, others in ((2, "rank 0"), (0, "ranks 1 to 3")):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(CommError, match=rf"\[init-timeout\] rank {rank} of 4 has waited 0.3 s for {others} at"):
            init_distributed(verbose=False, config={"timeouts": {"init": 0.3}})
        source = "(RANK and WORLD_SIZE in the environment)"
        assert f"rank {rank} of 4 waits for {others} at 127.0.0.1:{port} {source}" in caplog.text


def test_ranks_that_have_come_name_the_one_that_is_missing(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
import shoal, torch
if rank == 2:
    time.sleep(60)
config = {"train_micro_batch_size_per_gpu": 1, "timeouts": {"init": 2}}
shoal.initialize(model=torch.nn.Linear(1, 1), config=config, optimizer=None)
""",
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables, "RANK": rank},
        )
        for rank in "012"
    ]
    try:
        errors = [job.communicate(timeout=50)[1] for job in jobs[:2]]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    for rank, error in enumerate(errors):
        assert f"[init-timeout] rank {rank} of 3 has waited 2 s for rank 2 at" in error, error
        assert "look at the output of rank 2" in error
        assert len(error.splitlines()) < 25, error


def test_no_ranks_and_more_ranks_than_visible_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="0 ranks"):
        run_local(LocalJob(("true",), 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(UsageError, match=r"4 ranks.*CUDA_VISIBLE_DEVICES=2,3 shows 2"):
        run_local(LocalJob(("true",), 4))


MODEL = """
import torch, shoal
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
"""


def test_a_mistake_in_the_config_is_one_short_message_without_a_traceback(tmp_path: Path) -> None:
    text = (
        MODEL
        + """
config["zero_optimization"]["stgae"] = 2
shoal.initialize(model=torch.nn.Linear(4, 2), config=config)
"""
    )
    script = write(tmp_path, text)
    out, err = start(2, script).communicate(timeout=90)
    lines = (out + err).splitlines()
    assert len(lines) <= 12
    assert "Traceback" not in err
    assert lines.count("[config] zero_optimization.stgae: no such key in zero_optimization.") == 1
    assert f"  at: {script}:9, in <module>: shoal.initialize(model=torch.nn.Linear(4, 2), config=config)" in lines


def test_a_start_is_quiet_and_a_rank_that_an_exception_ends_gives_1_and_not_the_launchers_signal(
    tmp_path: Path,
) -> None:
    text = (
        MODEL
        + """
engine, *_ = shoal.initialize(model=torch.nn.Linear(4, 2), config=config)
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
print("trained", flush=True)
if rank == 1:
    raise KeyError("a bad sample")
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
time.sleep(30)
"""
    )
    job = start(2, write(tmp_path, text))
    out, err = job.communicate(timeout=90)
    assert sorted(out.split()[-3:]) == ["1]", "[rank", "trained"]
    start_up, _, report = err.partition("shoal: rank 1 failed first")
    assert len(start_up.splitlines()) <= 6
    assert "[rank 0] shoal: ZeRO-3 on 2 data-parallel ranks; persistent: parameters Replicate" in start_up
    assert report.count("KeyError: 'a bad sample'") == 1
    assert "rank-failed" not in err
    assert job.returncode == 1
