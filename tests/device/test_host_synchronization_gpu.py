"""On a GPU the host waits for the device once a step, for norm, flags and loss; never in forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import shoal
from shoal.comm import protocol
from shoal.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.device


@contextmanager
def sync_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_waits_once_a_step_and_never_in_forward_and_backward(
    stage: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.1,
        precision: {"enabled": True} if precision == "bf16" else {"enabled": True, "loss_scale": 128.0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model = GPT(GPTConfig(512, 128, num_layers=4, hidden_size=128, num_heads=4, tied=False))
    engine = shoal.initialize(model=model, config=settings)[0]
    tokens = torch.randint(512, (1, 128), device=engine.device)
    for _ in range(3):
        engine.backward(engine(tokens, tokens))
        engine.step()
    reads: list[int] = []
    read = protocol.read_vector

    def allowed(*args: Any, **kwargs: Any) -> list[float]:
        reads.append(1)
        with sync_mode("default"):
            return read(*args, **kwargs)

    monkeypatch.setattr(protocol, "read_vector", allowed)
    torch.cuda.synchronize()
    with sync_mode("error"):
        engine.backward(engine(tokens, tokens))
        engine.step()
    assert len(reads) == 1
    assert engine.was_step_applied()
    engine.destroy()
