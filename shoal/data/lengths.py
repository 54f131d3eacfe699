"""How long the sequences are that a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def longest_sequences(model: nn.Module) -> Mapping[str, int]:
    """Tokens that the model's configuration says it takes, by the key that says so; empty: none does."""
    config: Any = getattr(model, "config", None)
    said = {name: getattr(config, name, None) for name in ("sequence_length", "max_position_embeddings")}
    return {name: length for name, length in said.items() if isinstance(length, int) and length}
