"""Ray Train's TorchTrainer: its workers, processes of Ray's own, train with Shoal under DeepSpeed's name."""

from __future__ import annotations

import pytest

from tests.clients.running import BOUNDS, ClientRun, differences, golden, run_script

pytest.importorskip("ray")
pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def trained() -> ClientRun:
    return run_script("ray_cases.py", ranks=1, timeout=400)


@pytest.mark.timeout(180)  # Ray's own processes start in the fixture
@pytest.mark.parametrize("name", ["stage2", "stage3"])
def test_two_workers_train_as_with_deepspeed(trained: ClientRun, name: str) -> None:
    found = trained.case(name)
    assert found["is Shoal"]
    assert differences(found, golden("ray_cases")["cases"][name], BOUNDS["fp32"]) == []
