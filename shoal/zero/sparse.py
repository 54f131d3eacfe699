"""Which weights' gradients are sent as rows: those of the embeddings that ask for sparse gradients, or of all of them.

An embedding's gradient is zero but in the rows that the micro-batch looked up. Made with ``sparse=True``, torch gives
it as a sparse tensor; the config's ``sparse_gradients`` has every embedding's gradient sent so, whatever torch gives.
"""

from __future__ import annotations

import torch
from torch import nn


def row_names(model: nn.Module, *, takes_all: bool) -> frozenset[str]:
    """The names of the trained weights, as ``named_parameters`` has them, whose gradients are sent as rows.

    Args:
        takes_all: every embedding's; else those of embeddings with ``sparse=True``.
    """
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and (takes_all or module.sparse)
        and module.weight.requires_grad
    }
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in tables)


def summed(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sparse gradient with one entry a row, entries of a row added up in ``dtype`` (fp32 at least), as ``dtype``."""
    wide = gradient if gradient.dtype in (torch.float32, torch.float64) else gradient.to(torch.float32)
    return wide.coalesce().to(dtype)
