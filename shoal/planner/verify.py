"""``shoal verify``: a step of a configuration by type, for a model that is named or built by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

import torch
from torch import nn

from shoal.config import load
from shoal.config.ranks import mesh_of, model_degrees
from shoal.engine.entry import initialize
from shoal.planner.model_of import Batch, as_builder, attend_by_ranks, token_batch
from shoal.planner.short_training import take_step
from shoal.simulation.verify import TypeReport, verify


def verify_model(
    model: str | Callable[[], nn.Module],
    config: Mapping[str, Any],
    num_ranks: int,
    *,
    sequence: int | None = None,
    batch: Callable[[int], Batch] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> TypeReport:
    """Take one step of ``config`` by type, as the first rank of each pipeline stage.

    Args: as of ``dry_run_model``. A configuration without an optimizer gets AdamW.

    Raises: UsageError: no batch is known for the model. What ``initialize`` and the model raise.
    """
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **config}
    settings = load(dict(config), world_size=num_ranks, warns=False)
    degrees = model_degrees(settings)
    num_stages, parts = degrees.get("pp", 1), degrees.get("sp", 1) * degrees.get("cp", 1)
    num_micro, num_rows = int(settings.gradient_accumulation_steps), int(settings.train_micro_batch_size_per_gpu)
    build = as_builder(model, sequence)

    def train() -> None:
        made = build()
        if parts > 1:
            attend_by_ranks(made)
        given = batch(num_rows) if batch is not None else token_batch(made, num_rows, sequence, parts)
        engine = initialize(model=made, config=dict(config))[0]
        torch.manual_seed(engine.axes.data.rank)  # of dropout
        take_step(engine, repeat(given, num_micro), loss)
        engine.destroy()

    def stride(num: int) -> int:
        return mesh_of(load(dict(config), world_size=num, warns=False), num).ranks_along("pp", 0)[1]

    return verify(train, num_ranks, num_stages=num_stages, stride=stride if num_stages > 1 else None)
