"""Transformers' Trainer on Shoal: a small GPT-2 that learns to count, stage 3, a checkpoint, a resume.

shoal run --as-deepspeed --ranks 2 examples/trainer.py --deepspeed examples/deepspeed_auto.json
"""

from __future__ import annotations

import argparse

import torch
from accelerate import PartialState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True, help="the configuration, a path")
    parser.add_argument("--output", default="runs/trainer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --output")
    options = parser.parse_args()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:  # Trainer asks for a backend only where there is an accelerator
        import os

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    arguments = TrainingArguments(
        output_dir=options.output,
        deepspeed=options.deepspeed,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=4,
        max_steps=options.steps,
        logging_steps=5,
        save_steps=10,
        use_cpu=on_cpu,
        accelerator_config={"use_configured_state": on_cpu},
        report_to=[],
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    rows = [(start + torch.arange(32)) % 64 for start in range(64)]
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(f"{options.output}/final")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
