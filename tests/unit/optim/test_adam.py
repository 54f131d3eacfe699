"""Adam without bias correction: the formula, every implementation of torch's, on shards and on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.optim.build import build
from shoal.optim.variants import AdamWithBias

BETAS, EPS, LR, DECAY = (0.8, 0.9), 1e-6, 0.05, 0.1


def gradients() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(40, generator=random) for _ in range(4)]


def expected(start: torch.Tensor, *, is_decoupled: bool) -> torch.Tensor:
    """The update written out, in fp64."""
    weight, m, v = start.double(), torch.zeros(40).double(), torch.zeros(40).double()
    for gradient in gradients():
        g = gradient.double() + (0 if is_decoupled else DECAY) * weight
        if is_decoupled:
            weight = weight * (1 - LR * DECAY)
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        weight = weight - LR * m / (v.sqrt() + EPS)
    return weight.float()


@pytest.mark.parametrize("implementation", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("is_decoupled", [True, False])
def test_the_running_means_are_used_as_they_are(implementation: dict[str, bool], is_decoupled: bool) -> None:
    start = torch.linspace(-1, 1, 40)
    weight = torch.nn.Parameter(start.clone())
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, **implementation}
    optimizer = AdamWithBias([weight], bias_correction=False, decoupled_weight_decay=is_decoupled, **settings)
    for gradient in gradients():
        weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected(start, is_decoupled=is_decoupled))
    assert optimizer.state_dict()["state"][0]["step"] == 4  # counted as ever: a checkpoint may be read with correction


def test_with_correction_it_has_the_bits_of_torchs() -> None:
    results = []
    for make in (torch.optim.Adam, AdamWithBias):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 40))
        optimizer = make([weight], lr=LR, fused=True)
        for gradient in gradients():
            weight.grad = gradient
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_config_builds_it(name: str) -> None:
    optimizer, _ = build(name, {"bias_correction": False}, [torch.nn.Parameter(torch.ones(2))])
    assert type(optimizer) is AdamWithBias
    assert optimizer.defaults["decoupled_weight_decay"]


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}])
def test_an_engine_steps_with_it_on_the_device_and_on_the_host(zero: dict[str, Any]) -> None:
    model = torch.nn.Linear(40, 1, bias=False)
    start = model.weight.detach().flatten().clone()
    params = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY, "bias_correction": False}
    config = {
        "train_batch_size": 1, "gradient_clipping": 0, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": params},
    }  # fmt: skip
    engine = shoal.initialize(model=model, config=config)[0]
    for gradient in gradients():
        engine.backward(engine(gradient).sum())
        engine.step()
    engine.destroy()
    torch.testing.assert_close(model.weight.detach().flatten(), expected(start, is_decoupled=True))
