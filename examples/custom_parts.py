"""A model with layers and a loss of its own, split over ranks by tensor, context or pipeline parallelism.

shoal run --ranks 2 examples/custom_parts.py --tp 2
shoal run --ranks 2 examples/custom_parts.py --cp 2
shoal run --ranks 2 examples/custom_parts.py --pp 2
shoal run --ranks 4 examples/custom_parts.py --tp 2 --pp 2

All print the losses of one rank: python examples/custom_parts.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

VOCABULARY, LENGTH, BATCH = 64, 32, 4
CONFIG = {
    "train_batch_size": 2 * BATCH,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1},
}
# What tp does with each linear layer: "column" splits outputs, "row" splits inputs and sums the results.
PLAN = {
    "blocks.*.mix.query": "column",
    "blocks.*.mix.key": "column",
    "blocks.*.mix.value": "column",
    "blocks.*.mix.out": "row",
    "blocks.*.gate": "column",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "replicate",
}


class Mix(nn.Module):
    """Causal attention with rotary positions, written by hand: no rule of Shoal knows its names."""

    head_size = 8

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        split = (-1, self.head_size)  # the number of heads is not written down: under tp a rank has some of them
        query, key, value = (
            layer(hidden).unflatten(-1, split).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        angles = positions[:, None] / 10 ** torch.arange(0, 1, 2 / self.head_size, device=hidden.device)
        mixed = shoal.attention(rotate(query, angles), rotate(key, angles), value, is_causal=True)  # over sp and cp
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), Mix(width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        hidden = hidden + self.mix(self.norm(hidden), positions)
        out: Tensor = hidden + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return out


class Model(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, positions)
        return focal_loss(self.head(hidden), targets)


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def focal_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Hard tokens weigh more (arXiv:1708.02002). A mean over positions, so ranks of cp average their parts."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    for axis in ("tp", "cp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    options = parser.parse_args()

    config: dict[str, object] = {**CONFIG, "parallel": {"tp": options.tp, "cp": options.cp, "pp": options.pp}}
    if options.tp > 1:
        config["parallel"] = {"tp": options.tp, "cp": options.cp, "pp": options.pp, "tp_plan": PLAN}
    torch.manual_seed(0)
    engine, *_ = shoal.initialize(model=Model(), config=config)
    context = engine.sequence_context or shoal.SequenceContext()
    generator = torch.Generator().manual_seed(1)

    def micro_batch() -> tuple[Tensor, Tensor, Tensor]:
        """Sequences that count up in steps of 1 to 3; of a sequence, this rank's positions."""
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
        row = ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY).to(engine.device)
        return context.shard(row[:, :-1]), context.shard(row[:, 1:]), context.positions(LENGTH, row.device)

    for step in range(21):
        batches = [micro_batch() for _ in range(2)]
        if options.pp > 1:
            mean = float(engine.train_batch(iter(batches)))
        else:
            losses = []
            for batch in batches:
                loss = engine(*batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            total = torch.stack(losses).sum()
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(total)  # with cp each rank has the loss of its positions
            mean = total.item() / len(losses) / engine.world.size
        if step % 10 == 0 and engine.global_rank == 0:
            print(f"step {step:2}  loss {mean:.4f}")
    engine.destroy()


if __name__ == "__main__":
    main()
