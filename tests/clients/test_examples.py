"""The examples for clients' packages, run as the guides say, and taken up again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SECTION = str(EXAMPLES / "deepspeed_auto.json")


def run(*args: str, folder: Path, ranks: int = 2) -> list[float]:
    """The losses that it prints. ``ranks``: 0: the command starts them itself."""
    runner = [sys.executable, "-m", "shoal", "run", "--as-deepspeed", *(["--ranks", str(ranks)] if ranks else [])]
    done = subprocess.run(
        [*runner, *args],
        capture_output=True,
        text=True,
        timeout=140,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(number) for number in re.findall(r"'?\bloss'?:? *'?(\d+\.\d+)", done.stdout)]


def test_the_trainer_example_learns_and_goes_on(tmp_path: Path) -> None:
    script = [str(EXAMPLES / "trainer.py"), "--deepspeed", SECTION]
    losses = run(*script, folder=tmp_path)
    assert losses[-1] < 0.8 * losses[0]
    assert run(*script, "--steps", "30", "--resume", folder=tmp_path)[0] < losses[0]


def test_the_accelerate_example_learns_and_goes_on(tmp_path: Path) -> None:
    flags = ["--use_deepspeed", "--zero_stage", "2", "--num_processes", "2"]
    script = ["accelerate", "launch", *flags, str(EXAMPLES / "accelerate_loop.py")]
    losses = run(*script, folder=tmp_path, ranks=0)
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert run(*script, "--resume", folder=tmp_path, ranks=0)[0] < losses[0]


def test_the_fine_tuning_example_learns_and_writes_a_folder_of_hugging_face(tmp_path: Path) -> None:
    make = [sys.executable, str(EXAMPLES / "make_small_llama.py"), "small"]
    subprocess.run(make, check=True, capture_output=True, timeout=100, cwd=tmp_path)
    text, config = EXAMPLES.parent / "docs" / "concepts", EXAMPLES / "fine_tune.json"
    script = [str(EXAMPLES / "fine_tune.py"), "small", "--text", str(text), "--config", str(config), "--steps", "4"]
    command = [sys.executable, "-m", "shoal", "run", "--ranks", "2", *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"sequences: ([0-9.]+) before, ([0-9.]+) after 4 steps", done.stdout)
    assert found is not None
    assert float(found[2]) < 0.95 * float(found[1])
    written = load_file(tmp_path / "tuned" / "model.safetensors")
    assert sum(tensor.numel() for tensor in written.values()) > 3_000_000
    assert "model.layers.3.mlp.down_proj.weight" in written
    assert (tmp_path / "tuned" / "config.json").is_file()
