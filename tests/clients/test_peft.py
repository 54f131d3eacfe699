"""Adapters in fp32 on a base in bf16 train, save and resume as without an engine, at stages 2 and 3.

The measure is the same script in one process without an engine, every rank's rows in one batch.
"""

from __future__ import annotations

import pytest

from tests.clients.running import ClientRun, differences, run_script

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")


SCRIPT = "peft_cases.py"
# Any two of: the client; "mixed", which the engine keeps, or "bf16", which it casts to, with master weights; the kind.
CASES = [
    "trainer-stage{}-mixed-lora",
    "trainer-stage{}-bf16-dora",
    "trainer-stage{}-mixed-saved",
    "accelerate-stage{}-bf16-lora",
    "accelerate-stage{}-mixed-dora",
    "accelerate-stage{}-bf16-saved",
]
NORM = 2e-2  # of a norm, relative: at the first steps it is small, and bf16 rounds each batch's shape in another way


@pytest.fixture(scope="module")
def plain() -> ClientRun:
    names = [case.format(2) for case in CASES]
    return run_script(SCRIPT, *names, ranks=1, runner=(), env={"SHOAL_PLAIN": "1"})


@pytest.fixture(scope="module")
def run() -> ClientRun:
    return run_script(SCRIPT, *[case.format(stage) for case in CASES for stage in (2, 3)])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_fp32_adapters_on_a_bf16_base_train_and_save_as_without_an_engine(
    run: ClientRun, plain: ClientRun, case: str, stage: int
) -> None:
    ours, theirs = run.case(case.format(stage)), plain.case(case.format(2))
    losses = {**theirs, "curves": {key: value for key, value in theirs["curves"].items() if key != "norm"}}
    assert differences(ours, {**losses, "weights": {}}, 1e-3) == []
    assert ours["curves"]["norm"] == pytest.approx(theirs["curves"]["norm"], rel=NORM)
    assert ours["weights"]["adapter"] == pytest.approx(theirs["weights"]["adapter"], rel=NORM)
    losses = theirs["curves"]["loss"]
    assert max(losses) - min(losses) > 0.01  # more than the bound: steps that did nothing would show


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_run_with_adapters_resumes_to_the_last_digit(run: ClientRun, case: str, stage: int) -> None:
    curves = run.case(case.format(stage))["curves"]
    assert curves["resumed_loss"] == curves["loss"][3:]


@pytest.mark.parametrize("case", CASES)
def test_stages_2_and_3_give_the_same_numbers(run: ClientRun, case: str) -> None:
    assert run.case(case.format(3))["curves"] == run.case(case.format(2))["curves"]
