"""Fine-tunes low-rank adapters (PEFT's LoRA) on a Hugging Face folder; writes the adapter and a merged model.

python examples/make_small_llama.py small-llama
shoal run --ranks 2 examples/lora.py small-llama --text docs --steps 40 --out lora-tuned
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shoal
from shoal.data import RepeatingLoader, read_texts

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a folder of transformers: config.json, safetensors, tokenizer")
    parser.add_argument("--text", nargs="+", required=True, help="files or folders to train on")
    parser.add_argument("--length", type=int, default=64, help="tokens of one sequence")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="lora-tuned")
    options = parser.parse_args()

    shoal.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = torch.tensor(tokenizer("\n".join(read_texts(options.text)))["input_ids"])
    rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)

    # The base is built in shards and read from the folder; the adapters are small and are made whole on every rank.
    base = shoal.load_hf(AutoConfig.from_pretrained(options.model), options.model)
    torch.manual_seed(0)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, adapters)  # type: ignore[arg-type]  # load_hf gives an nn.Module
    engine, _, loader, _ = shoal.initialize(model=model, config=CONFIG, training_data=rows)
    batches = RepeatingLoader(loader)

    losses = []
    while engine.global_steps < options.steps:
        batch = next(batches).to(engine.device)
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    # Only what was trained: a few megabytes, also of a model that no rank could hold whole.
    trained = engine.module_state_dict(exclude_frozen_parameters=True)
    if engine.global_rank == 0:
        assert trained is not None
        print(f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last of {len(losses)}")
        adapter = Path(options.out) / "adapter"
        os.makedirs(adapter, exist_ok=True)
        save_file(get_peft_model_state_dict(model, trained), adapter / "adapter_model.safetensors")
        adapters.save_pretrained(str(adapter))
        whole = AutoModelForCausalLM.from_pretrained(options.model)
        PeftModel.from_pretrained(whole, adapter).merge_and_unload().save_pretrained(Path(options.out) / "merged")
        tokenizer.save_pretrained(Path(options.out) / "merged")
        print(f"wrote {adapter} and {Path(options.out) / 'merged'}")
    engine.destroy()


if __name__ == "__main__":
    main()
