"""Fabric with DeepSpeedStrategy: a plain loop, one optimizer step per micro-batch, save, load into a fresh model.

Lightning refuses the strategy without a GPU and expects devices with an index; the overridden methods are that and
nothing else.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch import nn

from tests.clients.scripts.common import Case, run_cases

HIDDEN, CLASSES, BATCH, STEPS = 32, 8, 4, 6


class OnCpu(DeepSpeedStrategy):
    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def _setup_distributed(self) -> None:
        reset_seed()
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return grown


def made(fabric: Fabric) -> tuple[Any, Any]:
    torch.manual_seed(7)
    with fabric.init_module():
        model = nn.Sequential(Block(), Block(), nn.Linear(HIDDEN, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fabric.setup(model, optimizer)


def batch(fabric: Fabric, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * index + fabric.global_rank)
    return torch.randn(BATCH, HIDDEN, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def train(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for index in steps:
        x, y = batch(fabric, index)
        loss = nn.functional.cross_entropy(model(x).float(), y)
        fabric.backward(loss, model=model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def looped(stage: int, precision: Any = "32-true") -> Case:
    """Some steps, a checkpoint, more steps; then the same steps again by a fresh model that loads the checkpoint."""

    def case(folder: Path) -> dict[str, Any]:
        strategy = OnCpu(
            config={
                "train_micro_batch_size_per_gpu": BATCH,
                "gradient_clipping": 0.5,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage},
            },
            process_group_backend="gloo",
            logging_level=logging.WARNING,
        )
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
        fabric.launch()
        model, optimizer = made(fabric)
        losses = train(fabric, model, optimizer, range(STEPS))
        fabric.save(folder / "saved", {"model": model, "optimizer": optimizer, "note": 5})
        after = train(fabric, model, optimizer, range(STEPS, 2 * STEPS))

        fresh, fresh_optimizer = made(fabric)
        state: dict[str, Any] = {"model": fresh, "optimizer": fresh_optimizer, "note": 0}
        fabric.load(folder / "saved", state)
        resumed = train(fabric, fresh, fresh_optimizer, range(STEPS, 2 * STEPS))
        return {
            "curves": {"loss": losses, "loss after": after, "resumed loss": resumed},
            "facts": {"note": state["note"]},
        }

    return case


CASES = {
    "stage1": looped(1),
    "stage2": looped(2),
    "stage3": looped(3),
    "stage2-bf16": looped(2, "bf16-true"),
    "stage3-bf16": looped(3, "bf16-true"),
}

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:], lambda: None)
