"""On a GPU the kernels are others than on the CPU, and the multiply-adds the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shoal
from shoal.models.gpt import GPT, GPTConfig
from shoal.observe.flops import OperationCount

pytestmark = pytest.mark.device


def attention(query: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, query, query)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(8, 16), (4, 8)),
        (lambda: nn.Conv2d(4, 8, 3), (2, 4, 8, 8)),
        (lambda: nn.ConvTranspose2d(4, 8, 3), (2, 4, 8, 8)),
        (lambda: nn.LSTM(8, 16, 2, bidirectional=True), (5, 2, 8)),
        (lambda: nn.GRU(8, 16), (5, 2, 8)),
        (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 8, 16)),
        (lambda: attention, (2, 4, 16, 32)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiply_adds_are_those_of_the_cpu(
    make: Callable[[], Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    on_host, on_device = OperationCount(), OperationCount()
    function = make()
    with on_host:
        function(torch.randn(shape))
    if isinstance(function, nn.Module):
        function.to("cuda", dtype)
    with on_device:
        function(torch.randn(shape, device="cuda", dtype=dtype))
    assert on_device.macs == on_host.macs > 0
    assert not on_device.failed


def test_a_training_step_is_counted_forward_and_backward(tmp_path: Any) -> None:
    shape = GPTConfig(vocab_size=64, sequence_length=32, num_layers=2, hidden_size=64, num_heads=4)
    path = tmp_path / "profile.txt"
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(path)},
    }
    engine = shoal.initialize(model=GPT(shape).to("cuda"), config=settings)[0]
    for _ in range(2):
        tokens = torch.randint(0, 64, (2, 33), device="cuda")
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
    assert engine.flops_profiler is not None
    assert engine.flops_profiler.macs * 6 == shape.flops_per_token() * 2 * 32
    assert "bwd MACs counted / fwd MACs:" in path.read_text()
