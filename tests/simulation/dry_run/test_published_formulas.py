"""A dry run against the formulas and tables of papers: ZeRO's table 1, and activations by Korthikanti et al."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import shoal
from shoal.engine.estimate import estimate
from shoal.sharding.placement import Tier

# Bytes of model states on one rank in GB, by parameters, then by ranks; each of stages 1, 2 and 3.
# ZeRO (arXiv:1910.02054), table 1.
TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}
MIXED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "fp16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
}


def model_of(num_parameters: float) -> nn.Module:
    """32 square matrices with so many elements in all; their sides are rounded."""
    side = round(math.sqrt(num_parameters / 32))
    return nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(32)))


@pytest.mark.parametrize("num_parameters", TABLE_1)
def test_every_cell_of_zeros_table_1(num_parameters: float) -> None:
    with FakeTensorMode():
        model = model_of(num_parameters)
        for num_ranks, row in TABLE_1[num_parameters].items():
            for stage, gigabytes in zip((1, 2, 3), row, strict=True):
                config = {**MIXED, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
                made = estimate(model, config, num_ranks).on(
                    Tier.DEVICE, "parameter", "gradient", "master", "optimizer state"
                )
                # The table rounds to three digits, and cuts off two of its cells.
                assert made / 1e9 == pytest.approx(gigabytes, rel=0.005, abs=0.006), (num_ranks, stage)


@pytest.mark.parametrize(("num_ranks", "stage", "gigabytes"), [(64, 1, 31.4), (64, 2, 16.6), (16, 3, 7.5)])
def test_the_engine_holds_what_table_1_says(num_ranks: int, stage: int, gigabytes: float) -> None:
    config = {**MIXED, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    with shoal.dry_run(num_ranks) as run:
        engine = shoal.initialize(model=model_of(7.5e9), config=config)[0]
        batch = torch.zeros(1, round(math.sqrt(7.5e9 / 32)), dtype=torch.float16)
        for _ in range(2):
            with run.step():
                engine.backward(engine(batch).float().sum())
                engine.step()
        engine.destroy()
    peak = run.steps[-1].memory.by_kind
    kept = peak["parameter"] + peak["master"] + peak["optimizer state"]
    # At the peak not all gradients are there: their 2 bytes for each element are those of the formula.
    gradients = 2 * 7.5e9 / (num_ranks if stage > 1 else 1)
    assert (kept + gradients) / 1e9 == pytest.approx(gigabytes, rel=0.005)


# Korthikanti et al., Reducing activation recomputation in large transformer models (arXiv:2205.05198), section 4.


class Layer(nn.Module):
    """A transformer layer as in the paper's figure 2: the products of attention are not fused, with dropout."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_1(x)
        query, key, value = (
            layer(h).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = functional.softmax(query @ key.transpose(-1, -2), -1)
        mixed = functional.dropout(scores, 0.1) @ value
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        up = functional.gelu(self.up(self.norm_2(x)))
        return x + functional.dropout(self.down(up), 0.1)


class Layers(nn.Module):
    def __init__(self, number: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


S, B, H, A = 1024, 2, 2048, 16
PLAN = {
    "layers.*.query": "colwise",
    "layers.*.key": "colwise",
    "layers.*.value": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


def activations_of_a_layer(num_ranks: int, *, rows: int = B, hidden: int = H, **settings: Any) -> float:
    """Bytes of activations at the peak that one more layer adds, where they are most of the memory."""
    nbytes = []
    for number in (4, 5):
        with shoal.dry_run(num_ranks) as run:
            config = {**MIXED, "fp16": {"enabled": False}, "bf16": {"enabled": True}, **settings}
            engine = shoal.initialize(model=Layers(number, hidden, A), config=config)[0]
            batch = torch.zeros(rows, S, hidden, dtype=torch.bfloat16)
            for _ in range(2):
                with run.step():
                    engine.backward(engine(batch).float().sum())
                    engine.step()
            engine.destroy()
        nbytes.append(run.steps[-1].memory.by_kind["activation"])
    return float(nbytes[1] - nbytes[0])


NORMS = 2 * 2 * 2 * S * B  # mean and deviation of each token, which the paper leaves out; of a CPU's operator in bf16


def test_a_layer_keeps_34sbh_and_5as2b_bytes() -> None:
    assert activations_of_a_layer(1) == 34 * S * B * H + 5 * A * S * S * B + NORMS


@pytest.mark.parametrize("t", [2, 4])
def test_a_tensor_parallel_layer_keeps_what_the_formula_says(t: int) -> None:
    made = activations_of_a_layer(t, parallel={"tp": t, "tp_plan": PLAN})
    assert made == S * B * H * (10 + 24 / t + 5 * A * S / (H * t)) + NORMS


def test_recomputed_layers_keep_2sbh_bytes() -> None:
    made = activations_of_a_layer(1, rows=16, hidden=256, activation_checkpointing={"modules": ["Layer"]})
    assert made == 2 * S * 16 * 256
