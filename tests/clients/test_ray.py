"""Ray Train's TorchTrainer: its workers, processes of Ray's own, train with Shoal under DeepSpeed's name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.running import BOUNDS, ClientRun, differences, golden, run_script
from tests.jobs.launch.test_clusters import HANG

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def trained() -> ClientRun:
    return run_script("ray_cases.py", ranks=1, timeout=400)


@pytest.mark.timeout(180)  # Ray's own processes start in the fixture
@pytest.mark.parametrize("name", ["stage2", "stage3"])
def test_two_workers_train_as_with_deepspeed(trained: ClientRun, name: str) -> None:
    found = trained.case(name)
    assert found["is Shoal"]
    assert differences(found, golden("ray_cases")["cases"][name], BOUNDS["fp32"]) == []


@pytest.mark.timeout(400)
def test_a_worker_that_sleeps_is_named_with_its_stack_and_the_job_ends(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(HANG)
    shoal = [sys.executable, "-m", "shoal", "run", "--print", "ray", "--ranks", "2", "--gpus", "0"]
    words = [*shoal, "--max-restarts", "0", "hang.py"]
    printed = subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    (tmp_path / "job.py").write_text(printed)
    job = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, env=os.environ | {"RAY_DEDUP_LOGS": "0"}, timeout=380,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    said = job.stdout
    assert job.returncode != 0
    assert "[hang] step 0: rank 1 hangs; section 'step' of rank" in said, said
    assert re.search(r"rank 1: runs .*hang\.py:\d+, in forward; ", said), said
