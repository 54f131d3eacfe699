"""Verify by type on tiny models of Transformers: right ones have no finding, and a wrong ``tp_plan`` is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.planner.verify import verify_model
from shoal.simulation.verify import TypeReport

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = pytest.mark.filterwarnings("default")

_TOKENS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
_SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **_TOKENS}
_LLAMA = {**_SHAPE, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_T5_PLAN = {
    "*.SelfAttention": "replicate",
    "*.EncDecAttention": "replicate",
    "*.wi": "column",
    "*.wo": "row",
    "lm_head": "replicate",
}
_MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, **_TOKENS}

# class, config's arguments, ZeRO stage, further sections; dropout is that of the family
FAMILIES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA, 2, {}),
    "llama with dropout": ("LlamaForCausalLM", {**_LLAMA, "attention_dropout": 0.1}, 3, {}),
    "qwen with experts": ("Qwen3MoeForCausalLM", {**_LLAMA, **_EXPERTS}, 3, {"bf16": {"enabled": True}}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, **_TOKENS}, 1, {}),
    "bert": ("BertForMaskedLM", {**_SHAPE, "num_hidden_layers": 1, "intermediate_size": 64}, 2, {}),
    "t5": ("T5ForConditionalGeneration", _T5, 1, {"parallel": {"tp": 2, "tp_plan": _T5_PLAN}}),
    "mamba": (
        "MambaForCausalLM", _MAMBA, 3,
        {"parallel": {"tp": 2, "tp_plan": {"*.mixer": "replicate", "lm_head": "replicate"}}},
    ),
}  # fmt: skip


def verified(name: str, arguments: dict[str, Any], stage: int, **sections: Any) -> TypeReport:
    def build() -> nn.Module:
        model = getattr(transformers, name)
        return model(model.config_class(**arguments))  # type: ignore[no-any-return]

    def batch(rows: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(rows, 8, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "parallel": {"tp": 2}, **sections}
    return verify_model(build, config, 4, batch=batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_a_family_is_right_by_type(family: str) -> None:
    name, arguments, stage, sections = FAMILIES[family]
    report = verified(name, arguments, stage, **sections)
    assert [str(each) for each in report.findings] == []
    assert report.axes == ["tp", "dp_shard"]


PLAN = {
    **dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), "column"),
    **dict.fromkeys(("*.o_proj", "*.down_proj"), "row"),
    "lm_head": "replicate",
}


def test_a_row_that_a_plan_takes_for_a_column_is_found() -> None:
    plan = {**PLAN, "*.down_proj": "column"}
    (fault,) = verified("LlamaForCausalLM", _LLAMA, 1, parallel={"tp": 2, "tp_plan": plan}).findings
    assert (fault.axis, fault.parameters) == ("tp", ("model.layers.0.mlp.down_proj.weight",))
    assert "modeling_llama.py" in fault.place


def test_norms_of_heads_that_a_plan_forgets_are_found() -> None:
    """The plan is complete, the loss is right, and the ranks' copies of two weights drift apart."""
    arguments = {**_LLAMA, "num_hidden_layers": 1}
    found = verified("Qwen3ForCausalLM", arguments, 1, parallel={"tp": 2, "tp_plan": PLAN}).findings
    names = {f"model.layers.0.self_attn.{name}.weight" for name in ("q_norm", "k_norm")}
    assert {name for fault in found for name in fault.parameters} == names
    assert all("the ranks' copies drift apart" in fault.what and fault.axis == "tp" for fault in found)
    norms = dict.fromkeys(("*.q_norm", "*.k_norm"), "replicate_sum_gradient")
    assert verified("Qwen3ForCausalLM", arguments, 1, parallel={"tp": 2, "tp_plan": {**PLAN, **norms}}).findings == []
