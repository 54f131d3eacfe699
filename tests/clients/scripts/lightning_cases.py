"""Lightning's Trainer and DeepSpeedStrategy: fit with accumulation, clipping and a schedule, save, test, resume.

Lightning refuses the strategy without a GPU and expects devices with an index; the overridden methods are that and
nothing else.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.scripts.common import Case, run_cases

HIDDEN, CLASSES, ROWS, BATCH = 32, 8, 96, 4


class OnCpu(DeepSpeedStrategy):
    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return grown


class Classifier(pl.LightningModule):
    def __init__(self, *, late: bool, optimizer: str) -> None:
        super().__init__()
        self.chosen = optimizer
        self.late = late
        self.body: nn.Module | None = None
        self.losses: list[float] = []
        self.lrs: list[float] = []
        self.tested: list[float] = []
        if not late:
            self.make()

    def make(self) -> None:
        torch.manual_seed(7)
        self.body = nn.Sequential(Block(), Block(), nn.Linear(HIDDEN, CLASSES))

    def configure_model(self) -> None:
        if self.body is None:
            self.make()

    def loss_of(self, batch: list[torch.Tensor]) -> torch.Tensor:
        assert self.body is not None
        x, y = batch
        scores = self.body(x.to(next(self.body.parameters()).dtype))
        return nn.functional.cross_entropy(scores.float(), y)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.tested.append(self.loss_of(batch).item())

    def configure_optimizers(self) -> Any:
        made: torch.optim.Optimizer
        if self.chosen == "sgd":
            made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        else:
            made = torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.9**step)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rows(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(ROWS, HIDDEN, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)
    )


def loader(seed: int) -> DataLoader[Any]:
    return DataLoader(rows(seed), batch_size=BATCH, shuffle=False)


def trainer(stage: int, precision: Any, epochs: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        plugins=[TorchElasticEnvironment()],
        strategy=OnCpu(process_group_backend="gloo", logging_level=logging.WARNING, stage=stage),
        precision=precision,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=stage == 3,
        num_sanity_val_steps=0,
    )


def fitted(stage: int, precision: Any = "32-true", *, optimizer: str = "adamw", late: bool = False) -> Case:
    """Two epochs, a checkpoint, a test; then a fresh model and Trainer that go on from the checkpoint for a third.

    Args:
        late: build the model in configure_model, which runs under zero.Init at stage 3.
    """

    def case(folder: Path) -> dict[str, Any]:
        saved = folder / "first"
        model = Classifier(late=late, optimizer=optimizer)
        first = trainer(stage, precision, 2)
        first.fit(model, loader(1), loader(2))
        validated = float(first.callback_metrics["val"])
        first.save_checkpoint(saved)
        first.test(model, loader(3), verbose=False)
        tested = list(model.tested)

        again = Classifier(late=late, optimizer=optimizer)
        second = trainer(stage, precision, 3)
        second.fit(again, loader(1), loader(2), ckpt_path=saved, weights_only=False)

        held: dict[str, Any] = {}
        if second.is_global_zero:
            convert_zero_checkpoint_to_fp32_state_dict(saved, folder / "whole.pt")
            held = torch.load(folder / "whole.pt", weights_only=False)
        return {
            "curves": {
                "loss": model.losses,
                "lr": model.lrs,
                "validated": [validated],
                "tested": tested,
                "resumed loss": again.losses,
                "resumed lr": again.lrs,
            },
            "weights": {name: value.float().norm().item() for name, value in held.get("state_dict", {}).items()},
            "facts": {
                "steps": [first.global_step, second.global_step],
                "epoch": held.get("epoch"),
                "dtype": sorted({str(value.dtype) for value in held.get("state_dict", {}).values()}),
            },
        }

    return case


CASES = {
    "stage1-sgd": fitted(1, optimizer="sgd"),
    "stage2": fitted(2),
    "stage2-sgd": fitted(2, optimizer="sgd"),
    "stage2-bf16": fitted(2, "bf16-true"),
    "stage2-bf16-mixed": fitted(2, "bf16-mixed"),
    "stage3": fitted(3),
    "stage3-late": fitted(3, late=True),
    "stage3-late-sgd": fitted(3, late=True, optimizer="sgd"),
    "stage3-late-bf16": fitted(3, "bf16-true", late=True),
}

if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    run_cases(CASES, sys.argv[1:], lambda: None)
