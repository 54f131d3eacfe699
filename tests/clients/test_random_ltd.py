"""Random-LTD of Transformers models: masks and rotary tables of kept tokens, and their own checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import shoal

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4
}  # fmt: skip


def llama(attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation=attention))


def bert() -> PreTrainedModel:
    torch.manual_seed(0)
    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForMaskedLM(config)


def losses(model: PreTrainedModel, kept: int) -> list[float]:
    ltd = {
        "enabled": True,
        "random_ltd_layer_id": [1, 2],
        "total_layer_num": 4,
        "random_ltd_schedule": {
            "min_value": kept,
            "max_value": 16,
            "schedule_config": {"require_steps": 4, "seq_per_step": 4},
        },
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}},
    }
    engine, *_ = shoal.initialize(model=model, config=config)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    found = []
    for _ in range(5):
        loss = engine(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


def test_attentions_agree_on_the_kept_tokens() -> None:
    found, other = losses(llama("sdpa"), 8), losses(llama("eager"), 8)
    assert found == pytest.approx(other, abs=1e-5)
    assert found != losses(llama("sdpa"), 16)


def test_layers_that_checkpoint_themselves_keep_the_same_tokens() -> None:
    model = llama("sdpa")
    model.activation_checkpointing_enable()
    assert losses(model, 8) == losses(llama("sdpa"), 8)


def test_an_encoder_trains_on_the_kept_tokens() -> None:
    found = losses(bert(), 8)
    assert found[-1] < found[0] and found != losses(bert(), 16)
