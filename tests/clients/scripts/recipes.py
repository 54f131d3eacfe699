"""The published recipes under Accelerate: each configuration file as it stands, the models scaled down.

``zero2``: fine-tuning a Blenderbot on two ranks. ``zero3-offload``: a GPT-2 XL from its configuration on one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from torch.utils.data import DataLoader

from tests.clients.scripts.common import Sequences, deepspeed_state, gpt2, over_ranks, run_cases, write_json

RECIPES = Path(__file__).resolve().parents[2] / "fixtures" / "recipes"


def blenderbot() -> Any:
    """A Blenderbot that keeps the published one's proportions: a shallow encoder under a deep decoder."""
    from transformers import BlenderbotConfig, BlenderbotForConditionalGeneration

    torch.manual_seed(17)
    return BlenderbotForConditionalGeneration(
        BlenderbotConfig(
            vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=3, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1, forced_eos_token_id=2,
        )
    )  # fmt: skip


def gpt2_xl() -> Any:
    """GPT-2 XL's 25 heads and depth of many equal layers, at a width of 50."""
    return gpt2(n_embd=50, n_head=25, n_layer=6)


def recipe(file: str, make_model: Any, batch: int, *, precision: str, generates: bool = False) -> Any:
    """Train as the recipe does, evaluate, and generate where it is a chatbot.

    Args:
        precision: "fp16" leaves the file as it is. Another one replaces its fp16 section, which DeepSpeed refuses on a
            CPU, and names the micro-batch, which DeepSpeed asks for where the file is silent.
    """

    def run(folder: Path) -> dict[str, Any]:
        config = json.loads((RECIPES / file).read_text())
        if precision != "fp16":
            del config["fp16"]
            config |= {"bf16": {"enabled": True}} if precision == "bf16" else {}
            config["train_micro_batch_size_per_gpu"] = batch
        path = folder / file
        write_json(path, config)
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=str(path)),
            mixed_precision=precision if precision != "fp32" else "no",
        )
        model = make_model()
        optimizer = DummyOptim(model.parameters(), lr=3e-3, weight_decay=0.01)
        schedule = DummyScheduler(optimizer, total_num_steps=80, warmup_num_steps=4)
        train = DataLoader(Sequences(64), batch_size=batch)
        test = DataLoader(Sequences(16, seed=3), batch_size=batch)
        model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
        losses, scales, skipped = [], [], 0
        for _ in range(2):
            model.train()
            for rows in train:
                loss = model(**rows).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                skipped += bool(accelerator.optimizer_step_was_skipped)
                scales.append(float(getattr(optimizer.optimizer, "cur_scale", 1.0)))
                losses.append(sum(over_ranks(float(loss))) / accelerator.num_processes)
        model.eval()
        evaluated = []
        for rows in test:
            with torch.no_grad():
                evaluated.append(float(accelerator.gather(model(**rows).loss.float().reshape(1)).mean()))
        facts: dict[str, Any] = {"skipped": skipped, "last_scale": scales[-1]}
        if generates:
            prompt = Sequences(2, seed=9).rows[:1, :6]
            made = accelerator.unwrap_model(model).generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False
            )
            facts["generated"] = list(made.shape)
        return {"curves": {"loss": losses, "eval": evaluated}, "facts": facts}

    return run


ZERO2, ZERO3 = "zero2_config_accelerate.json", "zero3_offload_config_accelerate.json"
CASES = {
    f"{name}-{precision}": recipe(file, model, 4, precision=precision, generates=name == "zero2")
    for name, file, model in (("zero2", ZERO2, blenderbot), ("zero3-offload", ZERO3, gpt2_xl))
    for precision in ("fp16", "bf16", "fp32")
}

if __name__ == "__main__":
    only = {"1": "zero3", "2": "zero2"}[os.environ["WORLD_SIZE"]]
    asked = sys.argv[1:] or [name for name in CASES if name.startswith(only)]
    run_cases(CASES, asked, deepspeed_state)
