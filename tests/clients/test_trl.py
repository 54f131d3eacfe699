"""TRL's SFT, DPO and GRPO trainers, with and without PEFT's LoRA, give what they give with DeepSpeed 0.19.8."""

from __future__ import annotations

import pytest

from tests.clients.running import BOUNDS, ClientRun, differences, golden, run_script

pytest.importorskip("trl")
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def trained() -> ClientRun:
    return run_script("trl_cases.py", timeout=1100)


@pytest.mark.parametrize("name", sorted(golden("trl_cases")["cases"]))
def test_the_trainer_logs_what_it_logs_with_deepspeed(trained: ClientRun, name: str) -> None:
    bound = BOUNDS["bf16" if "bf16" in name else "fp32"]
    assert differences(trained.case(name), golden("trl_cases")["cases"][name], bound) == []
