"""Parameters that are read by another module than the one that owns them."""

from __future__ import annotations

import math

import pytest
import torch

import shoal
from shoal import zero
from shoal.comm.threads import run_ranks
from tests.helpers.models import Plain, ReadsOthers
from tests.helpers.training import config, finish, largest_difference, run_steps, start, train_alone


def test_a_registered_shared_parameter_is_gathered_with_the_module_that_reads_it() -> None:
    alone = train_alone(ReadsOthers, world=2)

    def job() -> tuple[dict[str, torch.Tensor], list[str]]:
        engine = start(ReadsOthers, config(3))
        zero.register_external_parameter(engine.module, engine.module.blocks[1].up.weight)
        root = next(unit for unit in engine.sharded.units if unit.name == "root")
        externals = [unit.name for unit in root.shared]
        zero.unregister_external_parameter(engine.module, engine.module.blocks[1].up.weight)
        assert root.shared == []
        run_steps(engine, 3)
        return finish(engine, []).parameters, externals

    for parameters, externals in run_ranks(2, job):
        assert externals == ["blocks.1"]
        assert largest_difference(parameters, alone.parameters) <= 1e-5


class ReadsLater(Plain):
    """Reads another module's parameter from its second step on only, when nobody looks for such reads any more."""

    reads = False

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens, targets)
        return loss + self.blocks[1].up.bias.sum() if self.reads else loss


def test_a_read_that_begins_later_is_never_silent_and_works_once_registered() -> None:
    def job(is_registered: bool) -> float:
        engine = start(ReadsLater, config(3))
        run_steps(engine, 2)
        engine.module.reads = True
        if is_registered:
            zero.register_external_parameter(engine.module, engine.module.blocks[1].up.bias)
        loss = run_steps(engine, 1, first=2)[0]
        engine.destroy()
        return loss

    assert all(loss == loss for loss in run_ranks(2, job, True))
    with pytest.raises(shoal.errors.NonFiniteError):
        run_ranks(2, job, False)


class OwnHead(torch.nn.Module):
    """Reads the embedding in its own forward; everything that is its own alone is small."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 300)
        self.norm = torch.nn.LayerNorm(300)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.embedding(tokens)) @ self.embedding.weight.T).square().mean()


def test_a_model_without_a_root_unit_may_read_another_units_parameter_in_every_step() -> None:
    torch.manual_seed(0)
    values = OwnHead().state_dict()

    def train(stage: int) -> list[float]:
        model = OwnHead()
        model.load_state_dict(values)
        engine, *_ = shoal.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "zero_optimization": {"stage": stage},
            },
        )
        losses = []
        for step in range(4):
            loss = engine(torch.arange(4).view(2, 2) + step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    whole, sharded = run_ranks(2, train, 0)[0], run_ranks(2, train, 3)[0]
    assert sharded == whole
    assert all(math.isfinite(loss) for loss in sharded)
