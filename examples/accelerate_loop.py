"""A loop of Accelerate's on Shoal: what trains how is said by the launcher's flags, or by a configuration file.

shoal run --as-deepspeed accelerate launch --use_deepspeed --zero_stage 2 --num_processes 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="runs/accelerate")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    # The backend has to be named on a CPU only.
    handlers = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(kwargs_handlers=handlers)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)
    rows = [(start + torch.arange(32)) % 64 for start in range(64)]
    batches = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=4, shuffle=True)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    if options.resume:
        accelerator.load_state(f"{options.output}/state")
    for epoch in range(2):
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        mean = accelerator.gather(loss.detach().reshape(1)).mean()
        accelerator.print(f"epoch {epoch}: loss {mean:.3f}, rate {schedule.get_last_lr()[0]:.1e}")
    accelerator.save_state(f"{options.output}/state")
    accelerator.save_model(model, f"{options.output}/final")
    accelerator.end_training()


if __name__ == "__main__":
    main()
