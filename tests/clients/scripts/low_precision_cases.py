"""Layers that compute in few bits, under Accelerate: the section of the file, and Accelerate's own fp8."""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader

from tests.clients.scripts.common import Case, Sequences, deepspeed_state, gpt2, run_cases

STEPS = 4


def train(section: dict[str, Any], precision: str = "no", adapters: bool = False) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": "auto"},
        **section,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), mixed_precision=precision)
    model = gpt2()
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(Sequences(16), batch_size=2))
    names = [name for name, module in model.module.named_modules() if "forward" in vars(module)]
    losses = []
    for _, batch in zip(range(STEPS), batches, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach().float().reshape(1)).mean()))
    return {"losses": losses, "layers": names}


def accelerates_own() -> dict[str, Any]:
    try:
        return {**train({}, precision="fp8"), "said": ""}
    except (ImportError, ValueError) as error:
        return {"said": str(error)}


FP8 = {"fp8": {"recipe": "rowwise", "modules": ["*.c_attn", "*.c_fc"], "keep_last_layers": 0.5}}
LORA = {"fp8": {"recipe": "rowwise", "modules": ["*.base_layer"]}}

CASES: dict[str, Case] = {
    "plain": lambda _: train({}),
    "section": lambda _: train(FP8),
    "section-bf16": lambda _: train(FP8, precision="bf16"),
    "lora": lambda _: train({}, adapters=True),
    "lora-section": lambda _: train(LORA, adapters=True),
    "accelerates-own": lambda _: accelerates_own(),
}

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:], deepspeed_state)
