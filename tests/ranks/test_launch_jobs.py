"""Whole jobs on local ranks: the examples, and ``shoal train`` on two."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

# The others are for clients' packages: tests/clients.
EXAMPLES = [Path(__file__).resolve().parent.parent.parent / "examples" / name for name in ("minimal.py", "text.py")]


def shoal(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *args], capture_output=True, text=True, timeout=110, cwd=folder, check=False
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_learns_on_two_ranks(example: Path, tmp_path: Path) -> None:
    done = shoal("run", "--ranks", "2", str(example), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"\d+\.\d+", done.stdout)]
    assert losses[-1] < 0.7 * losses[0]
    assert "[rank 0]" in done.stdout


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
