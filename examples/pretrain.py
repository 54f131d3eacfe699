"""Pre-trains a Llama from text to a sample: a tokenizer of the text, shards from the start, checkpoints, a resume.

shoal run --ranks 2 examples/pretrain.py --text docs --steps 60 --out runs/pretrain
shoal run --ranks 2 examples/pretrain.py --text docs --steps 90 --out runs/pretrain      # goes on at step 60
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

import shoal
from shoal.data import RepeatingLoader, read_texts

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
LENGTH = 64  # tokens of one sequence
SAVE_EVERY = 30  # steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", nargs="+", required=True, help="files or folders to train on")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="runs/pretrain")
    options = parser.parse_args()

    shoal.init_distributed()
    texts = list(read_texts(options.text))
    tokenizer = trained_tokenizer(texts)  # every rank trains the same one
    tokens = torch.tensor(tokenizer("\n".join(texts))["input_ids"])
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    held_out, training = rows[:16], rows[16:]

    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("meta"):  # initialize() fills each rank's shards: no rank ever has the whole model
        model = AutoModelForCausalLM.from_config(shape)
    engine, _, loader, _ = shoal.initialize(model=model, config=CONFIG, training_data=training)
    checkpoints = Path(options.out) / "checkpoints"
    if checkpoints.exists():
        engine.load_checkpoint(str(checkpoints))
    if engine.global_rank == 0:
        print(f"{model.num_parameters():,} parameters, from step {engine.global_steps}")

    batches = RepeatingLoader(loader)
    while engine.global_steps < options.steps:
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches).to(engine.device)
            engine.backward(engine(input_ids=batch, labels=batch, use_cache=False).loss)
            engine.step()
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(str(checkpoints))

    loss = validation_loss(engine, held_out)
    prompt = tokenizer("The model", return_tensors="pt").to(engine.device)
    written = sample(engine, prompt)
    engine.save_16bit_model(options.out)
    if engine.global_rank == 0:
        shape.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
        print(f"validation loss {loss:.3f} after {engine.global_steps} steps")
        print(tokenizer.decode(written[0]))
        print(f"wrote {options.out}, for from_pretrained")
    engine.destroy()


def trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>")


def validation_loss(engine: shoal.Engine, rows: torch.Tensor) -> float:
    """Every rank computes the same, since a forward pass gathers parameters from all ranks."""
    engine.eval()
    batch = default_collate(list(rows)).to(engine.device)
    with torch.no_grad():
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss.item()
    engine.train()
    return loss


def sample(engine: shoal.Engine, prompt: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every rank generates the same; at stage 3 ranks that are done go on until all are."""
    engine.eval()
    model = engine.module
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        return model.generate(**prompt, max_new_tokens=24, do_sample=False, synced_gpus=engine.world.size > 1)


if __name__ == "__main__":
    main()
