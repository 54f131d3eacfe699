"""A folder's weights under the names, and in the layout, of a model whose experts are stacked.

    in the folder                              in the model
    block_sparse_moe.experts.0.w1.weight  [I, D]
    block_sparse_moe.experts.0.w3.weight  [I, D]      mlp.experts.gate_up_proj  [E, 2 I, D]
    block_sparse_moe.experts.1.w1.weight  [I, D]
    ...
    block_sparse_moe.experts.0.w2.weight  [D, I]      mlp.experts.down_proj     [E, D, I]

Checkpoints on the Hub have the experts one by one, also where Transformers 5 stacks them. Flattened, the stacked tensor
is its parts one after the other, so a range of it is read from few of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from shoal.checkpoint.formats.quantized import DequantizedWeights, QuantizedTensor
from shoal.checkpoint.formats.safetensors_file import StoredTensor

_PART = re.compile(r"(?P<prefix>(?:.+\.)?experts)\.(?P<expert>\d+)\.(?P<weight>\w+)\.weight")
# The stacked parameter, and the weights of one expert that it is made of, as two families name them.
_STACKS = (
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("up_proj", ("up_proj",)),
    ("down_proj", ("down_proj",)),
    ("down_proj", ("w2",)),
)
_RENAMED = (".block_sparse_moe.", ".mlp.")  # of Mixtral and MiniMax, in the Hub's checkpoints and in Transformers 5


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor that the folder has in parts of equal size, one after the other."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class ExpertWeights:
    """The weights of a folder, by the names of a model.

    Args:
        names: of the model's parameters, with or without a prefix.
        rename: gives a name in the folder as the model's library reads it.
    """

    def __init__(self, weights: DequantizedWeights, names: Collection[str], rename: Callable[[str], str] = str) -> None:
        self.url = weights.url
        self._weights = weights
        old, new = _RENAMED
        is_renamed = not any(old in name for name in names)
        self._names = {rename(name.replace(old, new) if is_renamed else name): name for name in weights.tensors}
        self.tensors: dict[str, StoredTensor | QuantizedTensor | JoinedTensor] = {
            name: weights.tensors[stored] for name, stored in self._names.items()
        }
        self._join({name.rpartition("experts.")[2] for name in names if "experts." in name})

    def _join(self, wanted: Collection[str]) -> None:
        """Put stacked tensors, of those that the model has, in the place of their parts."""
        counts: dict[str, int] = {}
        for name in self._names:
            if found := _PART.fullmatch(name):
                counts[found["prefix"]] = max(counts.get(found["prefix"], 0), int(found["expert"]) + 1)
        for prefix, num_experts in counts.items():
            for stack, weights in _STACKS:
                parts = tuple(f"{prefix}.{e}.{weight}.weight" for e in range(num_experts) for weight in weights)
                shapes = {self.tensors[part].shape if part in self.tensors else () for part in parts}
                if stack in wanted and len(shapes) == 1 and len(shape := shapes.pop()) == 2:
                    dtype = min((self.tensors[part].dtype for part in parts), key=lambda dtype: dtype.itemsize)
                    for part in parts:
                        del self.tensors[part]
                    shape = (num_experts, len(weights) * shape[0], shape[1])
                    self.tensors[f"{prefix}.{stack}"] = JoinedTensor(shape, parts, dtype)

    def stored_names(self, name: str) -> list[str]:
        """What the folder has of a tensor."""
        stored = self.tensors[name]
        return [self._names[part] for part in (stored.parts if isinstance(stored, JoinedTensor) else (name,))]

    def read(self, name: str) -> torch.Tensor:
        """One tensor, whole."""
        stored = self.tensors[name]
        return self.read_range(name, 0, stored.numel).view(stored.shape)

    def read_range(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of the flattened tensor, 1-D. Only their bytes are read."""
        stored = self.tensors[name]
        if not isinstance(stored, JoinedTensor):
            return self._weights.read_range(self._names[name], begin, end)
        size = max(stored.numel // len(stored.parts), 1)
        first = min(begin // size, len(stored.parts) - 1)
        pieces = [
            self._weights.read_range(self._names[part], max(begin - at, 0), min(end - at, size))
            for at, part in zip(range(0, stored.numel, size), stored.parts, strict=False)
            if first * size <= at < max(end, first * size + 1)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
