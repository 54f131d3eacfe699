"""Trains a mixture of experts of Transformers (a small Mixtral), its experts divided among the ranks.

shoal run --ranks 2 examples/mixture.py --steps 40
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

import shoal
from shoal.data import ByteTokenizer, RepeatingLoader, default_texts, split, tokenize

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 2},
    "expert_parallel": {"enabled": True, "rebalance_every": 20},
}
SHAPE = MixtralConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=128,
    output_router_logits=True,  # the loss includes the auxiliary loss, which balances the experts
    router_aux_loss_coef=0.02,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ep", type=int, default=2, help="ranks among which the experts of a layer are divided")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPE)  # a large one: with torch.device("meta"), see the guide
    training, _ = split(tokenize(default_texts(), ByteTokenizer()), 0.05, 128)
    config = {**CONFIG, "parallel": {"ep": options.ep}}
    engine, _, loader, _ = shoal.initialize(model=model, config=config, training_data=training)
    batches = RepeatingLoader(loader)
    losses = []
    while engine.global_steps < options.steps:
        tokens, _ = next(batches)
        tokens = tokens.to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    load = engine.expert_load()  # of the last step: a collective, so every rank calls it
    if engine.global_rank == 0:
        print(f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last of {len(losses)}")
        for layer, counts in load.items():
            print(f"{layer}: tokens of each expert {counts}")
    engine.destroy()


if __name__ == "__main__":
    main()
