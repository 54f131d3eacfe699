"""On a GPU, states in host memory change no bit: copies run on streams of their own, beside computing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import shoal
from shoal.device import host_empty
from shoal.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.device

MODEL = GPT(GPTConfig(512, 128, num_layers=6, hidden_size=256, num_heads=4, tied=False))


def config(stage: int, *places: str, accumulation: int = 1) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    for place in places:
        zero[f"offload_{place}"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }


def loss_of(engine: shoal.Engine, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(512, (1, 128), generator=generator).to(engine.device)
    with sdpa_kernel(SDPBackend.MATH):  # others add up in an order that differs from run to run
        return engine(tokens, tokens)


def train(settings: dict[str, Any], steps: int = 6) -> list[float]:
    engine = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)[0]
    losses = []
    for index in range(steps * engine.gradient_accumulation_steps()):
        loss = loss_of(engine, index)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses


@pytest.mark.parametrize("places", [("param",), ("optimizer",), ("param", "optimizer")])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_from_host_memory_is_training_on_the_device(places: tuple[str, ...], accumulation: int) -> None:
    expected = train(config(3, accumulation=accumulation))
    found = train(config(3, *places, accumulation=accumulation))
    if places == ("param",):
        assert found == expected
    else:  # the update on the host rounds otherwise
        assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_in_a_stream_of_the_script_and_evaluating_in_the_default_one_changes_no_bit(stage: int) -> None:
    def run(stream: torch.cuda.Stream) -> list[float]:
        engine = shoal.initialize(model=copy.deepcopy(MODEL), config=config(stage))[0]
        losses = []
        for index in range(6):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)
                engine.backward(loss_of(engine, index))
                engine.step()
            with torch.no_grad():
                losses.append(loss_of(engine, 100 + index))
        found = [float(loss) for loss in losses]
        engine.destroy()
        return found

    assert run(torch.cuda.Stream()) == run(torch.cuda.default_stream())


def test_pinned_memory_has_the_size_that_was_asked_for() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    numel = 5 * 1024 * 1024 + 1  # 20 MiB of fp32, where torch's allocator would lock 32
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    host = host_empty(numel, torch.float32, device)
    assert host.is_pinned()
    assert host[7:].is_pinned()
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
    source = torch.randn(numel, device=device)
    host.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, source.cpu())
    assert torch.equal(host.to(device), source)
