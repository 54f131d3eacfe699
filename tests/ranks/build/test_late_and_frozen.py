"""Parameters that are used late, or frozen for a while by ``requires_grad_(False)``, train as in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from tests.helpers.training import STAGES

RANKS, WIDTH, STEPS = 2, 64, 4
BATCHES = [torch.randn(2 * RANKS, WIDTH, generator=torch.Generator().manual_seed(index)) for index in range(STEPS)]
BOUND = 1e-6  # largest difference: a mean over two ranks against a mean over all rows


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": zero, **more}


def values(*models: nn.Module) -> torch.Tensor:
    parts = [shoal.zero.safe_get_full_fp32_param(p) for model in models for p in model.parameters()]
    return torch.cat([part.reshape(-1) for part in parts if part is not None])


def flat(*models: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


# a parameter whose first gradient comes in a later step


class Late(nn.Module):
    """Uses its second layer from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.first(x)
        if step >= 2:
            hidden = hidden + self.late(x)
        out: torch.Tensor = self.last(hidden)
        return out.square().mean()


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("stage", STAGES)
def test_fused_sgd_with_momentum_takes_a_parameter_whose_first_gradient_comes_late(
    stage: int, dampening: float
) -> None:
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": dampening}
    made = Late()
    alone = copy.deepcopy(made)
    optimizer = torch.optim.SGD(alone.parameters(), **settings)
    for step, batch in enumerate(BATCHES):
        alone(batch, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    def run() -> torch.Tensor:
        model = copy.deepcopy(made)
        section = {"optimizer": {"type": "SGD", "params": settings}}  # fused
        engine = shoal.initialize(model=model, config=config(stage, **section))[0]
        for step, batch in enumerate(BATCHES):
            engine.backward(engine(batch.chunk(RANKS)[engine.global_rank], step))
            engine.step()
        result = values(model)
        engine.destroy()
        return result

    for result in run_ranks(RANKS, run):
        assert (result - flat(alone)).abs().max() < BOUND


# the two networks of an adversarial training


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 1))
    return generator, critic


def losses(generator: Any, critic: Any, batch: torch.Tensor) -> torch.Tensor:
    fake = generator(batch).detach()
    loss: torch.Tensor = critic(batch).square().mean() + (1 - critic(fake)).square().mean()
    return loss


@pytest.mark.parametrize("stage", STAGES)
def test_a_network_that_is_frozen_while_another_is_updated_trains_as_alone(stage: int) -> None:
    made = networks()
    alone = copy.deepcopy(made)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in alone]
    for batch in BATCHES:
        alone[1].requires_grad_(False)
        alone[1](alone[0](batch)).square().mean().backward()
        optimizers[0].step()
        alone[1].requires_grad_(True)
        losses(*alone, batch).backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    def run() -> torch.Tensor:
        models = copy.deepcopy(made)
        generator, critic = (
            shoal.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), config=config(stage))[
                0
            ]
            for model in models
        )
        for batch in (whole.chunk(RANKS)[generator.global_rank] for whole in BATCHES):
            models[1].requires_grad_(False)
            generator.backward(critic(generator(batch)).square().mean())
            generator.step()
            models[1].requires_grad_(True)
            critic.backward(losses(generator, critic, batch))
            critic.step()
        result = values(*models)
        generator.destroy()
        critic.destroy()
        return result

    for result in run_ranks(RANKS, run):
        assert (result - flat(*alone)).abs().max() < BOUND
