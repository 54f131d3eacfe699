"""Lightning's Trainer and Fabric with DeepSpeedStrategy give what they give with DeepSpeed 0.19.8."""

from __future__ import annotations

import pytest

from tests.clients.running import BOUNDS, ClientRun, differences, golden, run_script

pytest.importorskip("lightning")


@pytest.fixture(scope="module")
def trained() -> ClientRun:
    return run_script("lightning_cases.py")


@pytest.fixture(scope="module")
def looped() -> ClientRun:
    return run_script("fabric_cases.py")


@pytest.mark.parametrize("name", sorted(golden("lightning_cases")["cases"]))
def test_the_trainer_fits_tests_saves_and_resumes_as_with_deepspeed(trained: ClientRun, name: str) -> None:
    bound = BOUNDS["bf16" if "bf16" in name else "fp32"]
    assert differences(trained.case(name), golden("lightning_cases")["cases"][name], bound) == []


@pytest.mark.parametrize("name", sorted(golden("fabric_cases")["cases"]))
def test_a_loop_with_fabric_trains_saves_and_resumes_as_with_deepspeed(looped: ClientRun, name: str) -> None:
    bound = BOUNDS["bf16" if "bf16" in name else "fp32"]
    assert differences(looped.case(name), golden("fabric_cases")["cases"][name], bound) == []
