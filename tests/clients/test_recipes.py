"""Two published recipes run as they stand: their configuration files under Accelerate, the models scaled down."""

from __future__ import annotations

import pytest

from tests.clients.running import BOUNDS, ClientRun, differences, golden, run_script

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


SCRIPT = "recipes"
RANKS = {"zero2": 2, "zero3-offload": 1}


@pytest.fixture(scope="module", params=sorted(RANKS))
def run(request: pytest.FixtureRequest) -> tuple[str, ClientRun]:
    return request.param, run_script(f"{SCRIPT}.py", ranks=RANKS[request.param], timeout=250)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_recipe_gives_what_it_gives_with_deepspeed(run: tuple[str, ClientRun], precision: str) -> None:
    recipe, ran = run
    case = f"{recipe}-{precision}"
    assert differences(ran.case(case), golden(SCRIPT)["cases"][case], BOUNDS[precision]) == []


def test_a_recipe_runs_as_it_stands_in_fp16(run: tuple[str, ClientRun]) -> None:
    recipe, ran = run
    case = f"{recipe}-fp16"
    assert "error" in golden(SCRIPT)["cases"][case]  # DeepSpeed: no fp16 on a CPU, no batch size in the second file
    in_fp32 = golden(SCRIPT)["cases"][f"{recipe}-fp32"]["curves"]
    result = ran.case(case)
    assert differences(result, {"curves": in_fp32}, BOUNDS["bf16"]) == []
    assert result["facts"]["skipped"] == 0
    assert result["facts"]["last_scale"] in (2.0**15, 2.0**16)  # what each file starts from, and holds
