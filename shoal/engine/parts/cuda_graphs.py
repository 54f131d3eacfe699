"""The steps of blocks that are compiled with CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from shoal.compiler import GRAPH_STEPS
from shoal.engine.parts.part import Part


class CudaGraphs(Part):
    """Says where a step begins, and when the optimizer has stepped: micro-batches of a step share its memory."""

    def __init__(self) -> None:
        self._engine: Any = None

    def prepare(self, engine: Any) -> None:
        self._engine = engine

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._engine.compiled.has_cuda_graphs:
            GRAPH_STEPS.begin(self, is_training=torch.is_grad_enabled())

    def after_step(self) -> None:
        GRAPH_STEPS.end(self)

    def after_destroy(self) -> None:
        GRAPH_STEPS.end(self)
