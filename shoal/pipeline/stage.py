"""A rank's pipeline stages: the interface between a model that is cut and the engine that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn


class StageModule(nn.Module):
    """This rank's pipeline stages: a part of a model, whose parameters have their names in the whole model.

    Several micro-batches are between their forward and their backward at a time, so a stage keeps no state on the
    module.

    Attributes:
        num_stages: of the whole model, virtual ones included.
        stages: those of this rank, ascending.
        tied: by name of a parameter, the stages (of all) that hold a copy of it; only parameters of several stages.
        is_dynamic: what a stage returns may have other shapes though the micro-batch has the same.
        has_engine: ``initialize`` has taken over the parameters.
        reads_between: what stages between the first and the last need of a micro-batch: all values; only shapes,
            positions and documents of packed tokens; or nothing.
    """

    num_stages: int
    stages: tuple[int, ...]
    tied: Mapping[str, tuple[int, ...]]
    is_dynamic: bool = False
    has_engine: bool = False
    reads_between: Literal["values", "form", "nothing"] = "values"

    @property
    def own_blocks(self) -> list[str]:
        """The names of the modules that this rank's stages call one after the other."""
        return []

    @property
    def loss_model(self) -> nn.Module | None:
        """The model that computes the loss itself, from a micro-batch; None: a loss function does."""
        return None

    def forward(self, stage: int, received: Any, batch: Any, **arguments: Any) -> Any:
        """Run one pipeline stage on one micro-batch.

        Args:
            received: what the stage before returned; None on stage 0. Tensors in tuples, lists, dicts; None.
            batch: the micro-batch, as the data iterator gave it. Where only the first and the last stage have one, it
                is None elsewhere.
            arguments: in training, what the curriculum gives the model's forward (``curriculum_seqlen``).

        Returns: what the next stage receives: tensors in tuples, lists, dicts; None. Of the last stage: the model's
            output.
        """
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        """The loss of a micro-batch, on the last stage. Shape: []."""
        raise NotImplementedError

    def cast_absent(self, dtype_of: Callable[[torch.dtype], torch.dtype]) -> None:
        """Other stages' parameters get these dtypes there: what this rank's stages derive from them gets them too."""

    def stage_parameters(self, stage: int) -> list[nn.Parameter]:
        """The parameters that a stage uses; one of several stages is in each of them."""
        raise NotImplementedError
