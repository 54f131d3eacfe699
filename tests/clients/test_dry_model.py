"""A step of a model of Transformers under a configuration, dry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from shoal.planner.dry_model import dry_run_model


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}])
def test_a_folder_of_hugging_face_is_run(tmp_path: Path, parallel: dict[str, int]) -> None:
    shape: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320}
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, **shape).save_pretrained(tmp_path)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
        "parallel": parallel,
    }
    step = dry_run_model(str(tmp_path), config, 8, sequence=32)
    assert step.seconds > 0 and step.memory.allocated > 0
    assert len(step.stages) == parallel.get("pp", 1)
    assert ("recv" in step.received) == bool({"pp", "cp"} & parallel.keys())  # attention runs over the ranks of cp


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_a_function_that_adds_adapters_is_run() -> None:
    """Which PEFT converts to fp32."""
    shape: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320}
    made = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, **shape)

    def build() -> nn.Module:
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
        return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
    }
    step = dry_run_model(build, config, 8, sequence=32)
    numel = sum(parameter.numel() for parameter in build().parameters() if parameter.requires_grad)
    assert step.seconds > 0
    assert 0 < step.memory.by_kind["optimizer state"] < 8 * numel  # of adapters alone
