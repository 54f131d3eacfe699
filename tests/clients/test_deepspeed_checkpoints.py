"""Checkpoints that the real DeepSpeed writes now, at other sizes than the fixtures', read and gone on with in Shoal.

DeepSpeed is looked for in this Python, in ``.venv-bench``, and in the one that SHOAL_DEEPSPEED_PYTHON names.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.formats.deepspeed import DeepSpeedSource
from shoal.checkpoint.native import write_shoal
from shoal.comm.threads import run_ranks
from tests.ranks.test_checkpoint_from_deepspeed import go_on

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parent.parent.parent
FP32 = "stage2-fp32"
CASES = [
    FP32,
    "stage0-fp32",
    "stage1-bf16",
    "stage2-fp16",
    "stage2-bf16-round-robin",
    "stage3-bf16",
    "stage3-bf16-sub-groups",
]


@pytest.fixture(scope="module")
def python() -> str:
    """A Python with DeepSpeed in it."""
    named = os.environ.get("SHOAL_DEEPSPEED_PYTHON")
    for candidate in [named] if named else [sys.executable, str(ROOT / ".venv-bench" / "bin" / "python")]:
        if not Path(candidate).exists():
            continue
        asked = subprocess.run(
            [candidate, "-c", "import importlib.util as u; print(u.find_spec('deepspeed') is not None)"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if asked.stdout.strip() == "True":
            return candidate
    pytest.skip("DeepSpeed is not installed here; make bench installs it into .venv-bench")


def train(python: str, size: int, out: Path, cases: list[str], what: str = "make") -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-port", str(port)]
    done = subprocess.run(
        [*command, "-m", f"tests.fixtures.deepspeed.{what}", str(out), *cases],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("size", [1, 3])
def test_deepspeeds_files_equal_the_values_of_its_processes(size: int, python: str, tmp_path: Path) -> None:
    train(python, size, tmp_path, CASES)
    for case in CASES:
        source = DeepSpeedSource(tmp_path / case / "checkpoint")
        held = load_file(tmp_path / case / "held.safetensors")
        names = {f"{kind}/{name}": (kind, name) for kind in source.kinds() for name in source.tensors(kind)}
        assert set(names) - set(held) == {"model/shift"}, case
        assert len(held) == 29, case
        for key, tensor in held.items():
            assert torch.equal(source.read(*names[key]).view(-1), tensor.view(-1)), (case, key)
        assert source.about.counters["global_samples"] == 3 * 3 * size, case
        assert source.about.aliases == {"embed.weight": ("head.weight",)}, case
        assert source.about.notes == [], case
    run = json.loads((tmp_path / FP32 / "run.json").read_text())
    write_shoal(DeepSpeedSource(tmp_path / FP32 / "checkpoint"), tmp_path / "converted")
    for rank, found in enumerate(run_ranks(size, go_on, tmp_path / "converted", "fp32", 3, 3, {}, size)):
        expected = [losses[rank] for losses in run["losses"][3:]]
        assert found["losses"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_a_universal_checkpoint_that_deepspeed_makes_now_goes_on(size: int, python: str, tmp_path: Path) -> None:
    cases = ["stage1-fp32", "stage3-fp32", "stage3-bf16-sub-groups"]
    train(python, size, tmp_path, cases)
    train(python, size, tmp_path, cases, "make_universal")
    for case in cases:
        folder = tmp_path / "unpacked" / case
        with zipfile.ZipFile(tmp_path / case / "universal.zip") as archive:
            archive.extractall(folder)
        held = load_file(tmp_path / case / "held.safetensors")
        source = DeepSpeedSource(folder)
        names = {f"{kind}/{name}": (kind, name) for kind in source.kinds() for name in source.tensors(kind)}
        assert set(names) - set(held) == {"model/shift"}, case
        for key, tensor in held.items():
            assert torch.equal(source.read(*names[key]).view(-1), tensor.view(-1)), (case, key)
    for case in cases[:2]:
        expected = json.loads((tmp_path / case / "run.json").read_text())["losses"][3:]
        found = run_ranks(size, go_on, tmp_path / "unpacked" / case, "fp32", 2, 3, {}, size)
        for rank in range(size):
            assert found[rank]["losses"] == pytest.approx([losses[rank] for losses in expected], abs=1e-5), case
    theirs = json.loads((tmp_path / "stage1-fp32" / "universal.json").read_text())["losses"]
    ours = json.loads((tmp_path / "stage1-fp32" / "run.json").read_text())["losses"][3:]
    assert theirs == [pytest.approx(losses, abs=1e-6) for losses in ours]
