"""Whole jobs on local ranks: the examples, and ``shoal train`` on two."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.places import EXAMPLES

# The others are for clients' packages: tests/clients.
SCRIPTS = [EXAMPLES / name for name in ("minimal.py", "text.py")]


def shoal(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *args], capture_output=True, text=True, timeout=110, cwd=folder, check=False
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("example", SCRIPTS, ids=lambda path: path.stem)
def test_each_example_learns_on_two_ranks(example: Path, tmp_path: Path) -> None:
    done = shoal("run", "--ranks", "2", str(example), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"\d+\.\d+", done.stdout)]
    assert losses[-1] < 0.7 * losses[0]
    assert "[rank 0]" in done.stdout
    assert "parameters Shard" in done.stderr


@pytest.mark.timeout(120)
def test_the_script_of_the_readme_prints_its_loss_and_shards_both_weights(tmp_path: Path) -> None:
    readme = (SCRIPTS[0].parent.parent / "README.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(# train\.py.*?)```", readme, re.DOTALL)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    done = shoal("run", "--ranks", "2", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step (\d+): loss \d\.\d+", done.stdout) == ["0", "50", "100"]
    assert "2 units: parameters Shard, gradients Shard, optimizer state Shard" in done.stderr


@pytest.mark.timeout(120)
def test_a_failing_script_gives_its_exit_code_and_its_traceback_last(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['--flag', '-n', '3']\nraise KeyError('gone')\n")
    done = shoal("run", "--ranks", "1", str(script), "--flag", "-n", "3", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'gone'")


@pytest.mark.timeout(120)
def test_training_on_two_ranks_with_zero_3_learns_and_reports(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    done = shoal(
        *("train", "--ranks", "2", "--stage", "3", "--model", "nano", "--sequence", "32", "--text", "text.txt"),
        *("--steps", "15", "--micro-batch", "4", "--learning-rate", "0.005", "--sample-tokens", "10", "--out", "out"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    before, after = map(float, dict(record["facts"])["validation loss"].split(" → "))
    assert after < before - 1.5
    assert record["environment"]["ranks"] == 2
    assert "report" in done.stdout
    # Parameters, gradients and two moments in fp32, each half on this rank, and what is gathered for a moment.
    held = {row[0]: float(row[3]) for row in record["ledger"]}
    assert held["optimizer state"] == 4.0
    assert (tmp_path / "out" / "report.html").exists()


def interrupted(*args: str, folder: Path, is_ready: Callable[[], bool]) -> tuple[int, str]:
    """The exit code and the output of a command at whose terminal Ctrl-C is pressed."""
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", *args], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        deadline = time.monotonic() + 90
        while not is_ready() and time.monotonic() < deadline and job.poll() is None:
            time.sleep(0.05)
        os.killpg(job.pid, signal.SIGINT)
        output, _ = job.communicate(timeout=30)
    return job.returncode, output


@pytest.mark.timeout(120)
def test_ctrl_c_says_in_a_few_lines_where_each_rank_was(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, time\nopen(os.environ['RANK'], 'w').close()\n\ndef wait():\n    time.sleep(60)\n\nwait()\n"
    )
    ready = [tmp_path / "0", tmp_path / "1"]
    code, output = interrupted(
        "run", "--ranks", "2", "waits.py", folder=tmp_path, is_ready=lambda: all(path.exists() for path in ready)
    )
    assert code == 130
    assert output.strip().splitlines() == [
        "shoal: stopped by SIGINT; all 2 ranks have ended.",
        "  rank 0 was at waits.py:5, in wait: time.sleep(60)",
        "  rank 1 was at waits.py:5, in wait: time.sleep(60)",
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_training_saves_its_last_step_at_ctrl_c(ranks: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    metrics = tmp_path / "out" / "metrics.jsonl"
    code, output = interrupted(
        *("train", "--ranks", ranks, "--model", "nano", "--sequence", "32", "--text", "text.txt", "--minutes", "2"),
        *("--out", "out"),
        folder=tmp_path,
        is_ready=lambda: metrics.exists() and "train/loss" in metrics.read_text(),
    )
    assert code == 130, output
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("global*")] == [f"global_step{last}"]
    assert f"Stopped by SIGINT after {last} steps. Continue with: shoal train --resume out" in output
    assert (tmp_path / "out" / "report.html").exists()
    assert "Traceback" not in output
