"""Attention with fewer key-value heads than tensor-parallel ranks: parity, what is communicated, what is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers.tensor_cases import Outputs, compare, randomize
from tests.helpers.training import sgd

BATCH, LENGTH, HIDDEN, HEAD = 2, 8, 24, 4


class Attention(nn.Module):
    """Grouped-query attention; the names of ``shoal.models.gpt`` (fused) and of Transformers' Llama."""

    def __init__(self, num_heads: int, num_kv_heads: int, is_fused: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_kv_heads, HEAD
        self.is_fused = is_fused
        if is_fused:
            self.qkv = nn.Linear(HIDDEN, (num_heads + 2 * num_kv_heads) * HEAD)
        else:
            self.q_proj = nn.Linear(HIDDEN, num_heads * HEAD)
            self.k_proj, self.v_proj = (nn.Linear(HIDDEN, num_kv_heads * HEAD) for _ in range(2))
        self.add_module("out" if is_fused else "o_proj", nn.Linear(num_heads * HEAD, HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_fused:
            sizes = [self.num_heads * HEAD, self.num_key_value_heads * HEAD, self.num_key_value_heads * HEAD]
            projected = self.qkv(hidden).split(sizes, -1)
        else:
            projected = [each(hidden) for each in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in projected)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.get_submodule("out" if self.is_fused else "o_proj")(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Attention, and the residual around it."""

    def __init__(self, num_heads: int, num_kv_heads: int, is_fused: bool) -> None:
        super().__init__()
        self.attn = Attention(num_heads, num_kv_heads, is_fused)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.attn(hidden)
        return out


class Layers(nn.Module):
    """Two layers of attention, and a loss."""

    def __init__(self, num_heads: int, num_kv_heads: int, is_fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(num_heads, num_kv_heads, is_fused) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


PLAN = {"layers.*.attn": "prepare_input"}
FUSED, SEPARATE = (
    {**PLAN, "qkv": "column", "out": "row"},
    {**PLAN, "o_proj": "row", **{f"{name}_proj": "column" for name in "qkv"}},
)


def forward(model: nn.Module) -> Outputs:
    return {"loss": model(torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1)))}


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(8, 1, 4), (6, 2, 4), (6, 2, 3), (9, 3, 5)])
def test_shared_heads_compute_what_one_rank_does(num_heads: int, num_kv_heads: int, size: int, is_fused: bool) -> None:
    model = randomize(Layers(num_heads, num_kv_heads, is_fused))
    for calls in compare(model, forward, size, plan=FUSED if is_fused else SEPARATE):
        calls = [call for call in calls if call.label.startswith("layers.0") and "shared" in call.label]
        numel = 2 * num_kv_heads * HEAD  # of keys and values
        part = -(-numel // size) if is_fused else 2 * -(-numel // 2 // size)
        nbytes = BATCH * LENGTH * 4 * part * (size - 1)
        for op in ("all_gather", "reduce_scatter"):
            own = [call.nbytes for call in calls if call.op == op]
            assert (len(own), sum(own)) == (1 if is_fused else 2, nbytes)


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_a_model_with_shared_heads_trains_from_a_checkpoint_of_other_ranks(
    is_sequence_parallel: bool, tmp_path: Path
) -> None:
    whole = randomize(Layers(6, 1, True))
    start = {name: value.clone() for name, value in whole.state_dict().items()}

    def job(tp: int, first: int) -> tuple[dict[str, Any], int]:
        model = Layers(6, 1, True)
        model.load_state_dict(start)
        parallel = {"tp": tp, "tp_plan": FUSED, "tp_sequence_parallel": is_sequence_parallel and tp > 1}
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        settings = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": zero, "parallel": parallel}
        settings["gradient_clipping"] = 0.5
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        if first:
            engine.load_checkpoint(tmp_path, "tag")
        for _ in range(2):
            engine.backward(forward(engine)["loss"])
            engine.step()
        if not first:
            engine.save_checkpoint(tmp_path, "tag")
        assert current_world().size == 4
        return engine.module_state_dict(), sum(group.buffer.layout.parameter_numel for group in engine.sharded.groups)

    optimizer = sgd(whole.parameters())
    for step in range(4):
        forward(whole)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            expected = whole.state_dict()
            for values, held in run_ranks(4, job, 4 if step == 1 else 2, step - 1):
                for name, value in expected.items():
                    torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6)
                biases = 2 * HIDDEN  # of the rows, whole on every rank
                matrices = sum(value.numel() for value in expected.values()) - biases
                parts = 4 if step == 1 else 2
                assert abs(held - biases - matrices / parts) <= 2 * (HIDDEN + 1) * HEAD
