"""Trains a small Llama on long sequences: each rank has a part of them, the loss is computed in chunks.

shoal run --ranks 2 examples/long_context.py --cp 2 --length 2048 --steps 20
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import shoal
from shoal.data import ByteTokenizer, RepeatingLoader, default_texts, split, tokenize
from shoal.parallel.loss import count_tokens, linear_cross_entropy
from shoal.parallel.sequence import huggingface

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "loss_reduction": "token",  # every token weighs the same, whichever rank has it
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "activation_checkpointing": {"modules": ["LlamaDecoderLayer"], "cpu_checkpointing": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sp", type=int, default=1, help="ranks that exchange heads (Ulysses)")
    parser.add_argument("--cp", type=int, default=1, help="ranks that exchange keys and values (ring)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of one sequence, over all ranks")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    shape = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.length,
    )
    huggingface.register()  # attn_implementation="shoal"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="shoal")
    training, _ = split(tokenize(default_texts(), ByteTokenizer()), 0.05, options.length)
    config = {**CONFIG, "parallel": {"sp": options.sp, "cp": options.cp}}
    engine, _, loader, _ = shoal.initialize(model=WithLoss(model), config=config, training_data=training)
    context = engine.sequence_context or shoal.SequenceContext()
    batches = RepeatingLoader(loader)
    losses = []
    while engine.global_steps < options.steps:
        tokens, targets = (part.to(engine.device) for part in next(batches))  # whole sequences: the same on these ranks
        positions = context.positions(tokens.shape[1], tokens.device)
        targets = context.shard(targets)
        loss = engine(context.shard(tokens), targets, positions[None])
        engine.backward(loss, num_tokens=count_tokens(targets))
        engine.step()
        loss = loss.detach() / engine.world.size
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(loss)  # each rank has the loss of its positions
        losses.append(loss.item())
    if engine.global_rank == 0:
        size = f"{options.length // context.size} of {options.length} positions on each rank"
        print(f"{size}: loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last of {len(losses)}")
    engine.destroy()


class WithLoss(torch.nn.Module):
    """A causal model whose loss never holds all logits. ``targets`` are the tokens that follow: no shift is left."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden, self.model.lm_head.weight, targets)


if __name__ == "__main__":
    main()
