"""What clients saved with DeepSpeed 0.19.8 goes on in Shoal: the folder is resumed from as it is."""

from __future__ import annotations

import pytest

from tests.clients.running import BOUNDS, ClientRun, differences, golden, run_script

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")


SCRIPT = "continued_cases"


@pytest.fixture(scope="module")
def run() -> ClientRun:
    return run_script(f"{SCRIPT}.py")


@pytest.mark.parametrize("name", sorted(golden(SCRIPT)["cases"]))
def test_a_run_that_deepspeed_began_has_deepspeeds_curves_after_its_checkpoint(run: ClientRun, name: str) -> None:
    assert differences(run.case(name), golden(SCRIPT)["cases"][name], BOUNDS["fp32"]) == []


def test_curves_are_not_empty() -> None:
    """What the comparison is worth."""
    for name, case in golden(SCRIPT)["cases"].items():
        assert len(case["curves"]["loss"]) >= 3 and max(case["curves"]["loss"]) > 0.1, name
