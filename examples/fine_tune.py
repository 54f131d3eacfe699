"""Fine-tunes a causal language model of a Hugging Face folder on text files; writes a folder that transformers loads.

shoal run --ranks 2 examples/fine_tune.py small-llama --text docs --steps 40 --out tuned
"""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path

import torch
from torch.utils.data import default_collate
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

import shoal
from shoal.data import RepeatingLoader, read_texts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a folder of transformers: config.json, safetensors, tokenizer")
    parser.add_argument("--text", nargs="+", required=True, help="files or folders to train on")
    parser.add_argument("--config", default="examples/fine_tune.json")
    parser.add_argument("--length", type=int, default=128, help="tokens of one sequence")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="tuned")
    options = parser.parse_args()

    shoal.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = torch.tensor(tokenizer("\n".join(read_texts(options.text)))["input_ids"])
    rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
    held_out, training = rows[:16], rows[16:]

    # Each rank builds its shards only, and reads its ranges of the files.
    model = shoal.load_hf(AutoConfig.from_pretrained(options.model), options.model)
    engine, _, loader, _ = shoal.initialize(model=model, config=options.config, training_data=training)
    batches = RepeatingLoader(loader)

    def perplexity() -> float:
        """Every rank computes the same, since a forward pass gathers parameters from all ranks."""
        engine.eval()
        with torch.no_grad():
            batch = default_collate(list(held_out)).to(engine.device)
            loss = engine(input_ids=batch, labels=batch, use_cache=False).loss.item()
        engine.train()
        return math.exp(loss)

    before = perplexity()
    while engine.global_steps < options.steps:
        batch = next(batches).to(engine.device)
        engine.backward(engine(input_ids=batch, labels=batch, use_cache=False).loss)
        engine.step()
    after = perplexity()

    prompt = tokenizer("The model is", return_tensors="pt").to(engine.device)
    written = sample(engine, prompt)
    engine.save_16bit_model(options.out)
    if engine.global_rank == 0:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(options.model) / name, options.out)
        print(
            f"perplexity of 16 held-out sequences: {before:.1f} before, {after:.1f} after {engine.global_steps} steps"
        )
        print(tokenizer.decode(written[0]))
        print(f"wrote {options.out}")
    engine.destroy()


def sample(engine: shoal.Engine, prompt: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every rank generates the same; at stage 3 ranks that are done go on until all are."""
    engine.eval()
    model = engine.module
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        return model.generate(**prompt, max_new_tokens=24, do_sample=False, synced_gpus=engine.world.size > 1)


if __name__ == "__main__":
    main()
