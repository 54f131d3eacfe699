"""A published recipe at its full size: GPT-2 XL (1.6 B parameters) from its configuration, ZeRO-3 with the optimizer on
the host, fp16, micro-batch 16 of 128 tokens, under Accelerate, on one GPU of which 24 GB may be used.

    shoal run --as-deepspeed --ranks 1 benchmarks/recipe_gpt2_xl.py \\
        --config tests/fixtures/recipes/zero3_offload_config_accelerate.json

Published for a GPU of 24 GB: plain training runs out of memory at batch 1; this recipe takes 6608 s for an epoch of
WikiText-2 raw (about 18,544 blocks of 128 tokens). Prints the seconds of a step, of an epoch at that pace,
and the most memory held on the device. Text: random tokens, or a file's bytes. Host memory: about 30 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

BLOCKS = 18_544  # of an epoch
CAP_BYTES = 24 * 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--text", type=Path, help="a file whose bytes are the tokens")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("skipped: this benchmark needs a GPU, and PyTorch sees none here")
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_BYTES / total))
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, GPT2Config

    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=str(options.config)), mixed_precision="fp16"
    )
    torch.manual_seed(0)
    shape = GPT2Config(n_embd=1600, n_layer=options.layers, n_head=25, n_positions=1024)
    model = AutoModelForCausalLM.from_config(shape)
    num_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    wanted = options.steps * options.batch
    if options.text is None:
        rows = torch.randint(shape.vocab_size, (wanted, options.length), generator=torch.Generator().manual_seed(0))
    else:
        tokens = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
        rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
        rows = rows.repeat(math.ceil(wanted / len(rows)), 1)[:wanted]
    optimizer = DummyOptim(model.parameters(), lr=1e-4, weight_decay=0.0)
    schedule = DummyScheduler(optimizer, total_num_steps=10 * options.steps, warmup_num_steps=2)
    batches = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=options.batch)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    seconds, losses = [], []
    for batch in batches:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    step = statistics.median(seconds[2:] or seconds)
    result = {
        "parameters": num_parameters,
        "step_seconds": step,
        "epoch_seconds": step * math.ceil(BLOCKS / options.batch),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "cap_bytes": CAP_BYTES,
        "losses": losses,
        "device": torch.cuda.get_device_name(),
    }
    if accelerator.is_main_process:
        print(json.dumps(result, indent=1))
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1))
    accelerator.end_training()


if __name__ == "__main__":
    main()
