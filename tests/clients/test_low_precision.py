"""The section ``fp8`` under Accelerate and PEFT; and what Accelerate's own ``mixed_precision="fp8"`` needs."""

from __future__ import annotations

import importlib.util

import pytest

from tests.clients.running import ClientRun, run_script

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def run() -> ClientRun:
    return run_script("low_precision_cases.py")


@pytest.mark.parametrize(
    ("name", "plain", "layers"),
    [
        ("section", "plain", ["transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc"]),
        ("section-bf16", "plain", ["transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc"]),
        ("lora-section", "lora", [f"base_model.model.transformer.h.{n}.attn.c_attn.base_layer" for n in (0, 1)]),
    ],
)
def test_the_section_of_the_file_trains_near_the_run_without_it(
    run: ClientRun, name: str, plain: str, layers: list[str]
) -> None:
    ours, theirs = run.case(name), run.case(plain)
    assert ours["layers"] == layers
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=0.02)
    assert ours["losses"] != theirs["losses"]


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="Accelerate uses torchao")
def test_accelerates_own_fp8_says_what_it_needs(run: ClientRun) -> None:
    assert "transformer_engine" in run.case("accelerates-own")["said"]
