"""Embeddings that ask for sparse gradients are found before anything is sharded: gradients are dense here."""

from __future__ import annotations

from torch import nn

from shoal.errors import ModelError


def check_dense(model: nn.Module) -> None:
    """Raises: ModelError: an embedding that trains was made with ``sparse=True``.

    Its gradient would be a tensor without memory of its shape, which neither a bucket nor the norm can take.
    """
    found = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
    ]
    if found:
        raise ModelError(
            f"sparse gradients are not built yet: {', '.join(map(repr, found[:4]))}{' ...' if len(found) > 4 else ''}"
            " was made with sparse=True.",
            do="make it with sparse=False, or set module.sparse = False before initialize().",
            code="sparse-gradient",
        )
