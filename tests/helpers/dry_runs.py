"""What the tests of dry runs share."""

from __future__ import annotations

from typing import Any

import torch

from shoal.simulation.dry_run import DryRun


def take_steps(run: DryRun, engine: Any, batch: torch.Tensor, count: int, num_micro: int = 1) -> None:
    """Steps of a model that returns its loss of a batch, each of ``num_micro`` micro-batches."""
    for _ in range(count):
        with run.step():
            for _ in range(num_micro):
                engine.backward(engine(batch, batch))
                engine.step()
