"""Transformers' Trainer runs on Shoal as it runs on DeepSpeed 0.19.8."""

from __future__ import annotations

import pytest

from tests.clients.running import BOUNDS, ClientRun, differences, golden, run_script

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

SCRIPT = "trainer_cases"
ALONE = "pretrained"  # measures memory, in processes of its own
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves the process at once


@pytest.fixture(scope="module")
def run() -> ClientRun:
    return run_script(f"{SCRIPT}.py", *sorted(set(golden(SCRIPT)["cases"]) - {ALONE}))


@pytest.mark.parametrize("name", sorted(set(golden(SCRIPT)["cases"]) - {ALONE}))
def test_trainer_gives_what_it_gives_with_deepspeed(run: ClientRun, name: str) -> None:
    theirs = golden(SCRIPT)["cases"][name]
    curves = dict(theirs["curves"])
    if name == "stage0":  # DeepSpeed knows no norm at stage 0
        assert curves.pop("norm") == []
    bound = BOUNDS["bf16" if "bf16" in name else "fp32"]
    assert differences(run.case(name), {**theirs, "curves": curves}, bound) == []


@pytest.mark.parametrize("name", ["resumed-stage1", "resumed-stage2", "resumed-stage3", "resumed-own-offload"])
def test_a_resumed_run_goes_on_with_the_same_losses_and_rates(run: ClientRun, name: str) -> None:
    result = run.case(name)
    assert result["curves"]["resumed_loss"] == pytest.approx(result["curves"]["loss"][6:], abs=1e-6)
    assert result["curves"]["resumed_lr"][-3:] == result["curves"]["lr"][3:]
    assert result["weights"]["resumed"] == pytest.approx(result["weights"]["norm"], abs=1e-4)


def test_recompute_that_is_not_reentrant_gives_the_losses_of_the_run_without(run: ClientRun) -> None:
    plain = run.case("small-stage3")["curves"]["loss"]
    assert run.case("recomputed-stage3-non-reentrant")["curves"]["loss"] == pytest.approx(plain, abs=1e-6)


def test_no_rank_stores_the_whole_model_while_from_pretrained_loads_it_at_stage_3() -> None:
    result = run_script(f"{SCRIPT}.py", ALONE, env=EXACT_MEMORY, timeout=300).case(ALONE)
    assert differences(result, golden(SCRIPT)["cases"][ALONE], BOUNDS["fp32"]) == []
    peaks = result["memory"]["peak_of_model"]
    assert len(peaks) == 2
    assert all(0.5 < peak < 0.75 for peak in peaks), peaks  # its half, one tensor, and a file's worth of reading
    assert result["memory"]["visible_of_model"] < 0.001
