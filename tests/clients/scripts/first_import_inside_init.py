"""Transformers imports a family's module at its first use; here that is inside of ``zero.Init``."""

from __future__ import annotations

import torch

import shoal

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}

shoal.init_distributed()
with shoal.zero.Init():
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(**SHAPE))
engine, *_ = shoal.initialize(model=model, config=CONFIG)
tokens = torch.arange(8)[None]
loss = engine(input_ids=tokens, labels=tokens).loss
engine.backward(loss)
engine.step()
engine.destroy()
second = MixtralForCausalLM(MixtralConfig(**SHAPE))
print("losses", loss.item(), second(input_ids=tokens, labels=tokens).loss.item())
