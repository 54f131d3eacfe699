"""The smallest training script: a model, a config, and three lines per step.

python examples/minimal.py                          one rank
shoal run --ranks 2 examples/minimal.py             two, with everything sharded over them (ZeRO-3)
"""

from __future__ import annotations

import torch

import shoal

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    # Without the threshold, parameters below 100,000 elements stay whole on every rank: here all of them.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.GELU(), torch.nn.Linear(256, 16))
    engine, _, _, _ = shoal.initialize(model=model, config=CONFIG)
    generator = torch.Generator().manual_seed(engine.global_rank)  # every rank sees samples of its own
    for step in range(101):
        inputs = torch.randn(8, 16, generator=generator).to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(inputs), inputs.flip(1))
        engine.backward(loss)
        engine.step()
        if step % 50 == 0 and engine.global_rank == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    engine.destroy()


if __name__ == "__main__":
    main()
