"""minimal.py, plus data: a small GPT on text, the loader that ``initialize`` returns, and a validation loss.

shoal run --ranks 2 examples/text.py
"""

from __future__ import annotations

import torch

import shoal
from shoal.data import ByteTokenizer, RepeatingLoader, default_texts, split, tokenize
from shoal.models import GPT, named_config

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # small parameters are sharded too
}


def main() -> None:
    shape = named_config("nano")
    training, validation = split(tokenize(default_texts(), ByteTokenizer()), 0.05, shape.sequence_length)
    torch.manual_seed(0)
    with shoal.zero.Init():  # built in shards: no rank ever holds the whole model
        model = GPT(shape)
    engine, _, loader, _ = shoal.initialize(model=model, config=CONFIG, training_data=training)
    batches = RepeatingLoader(loader)

    def validate() -> float:
        engine.eval()
        tokens, targets = (part.to(engine.device) for part in validation.batch(range(16)))
        with torch.no_grad():
            loss = engine(tokens, targets).item()
        engine.train()
        return loss

    before = validate()
    for _ in range(60):
        tokens, targets = (part.to(engine.device) for part in next(batches))
        engine.backward(engine(tokens, targets))
        engine.step()
    after = validate()
    if engine.global_rank == 0:
        print(f"validation loss before {before:.3f}, after {after:.3f}")
    engine.destroy()


if __name__ == "__main__":
    main()
