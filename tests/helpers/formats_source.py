"""A ``Source`` in memory, for tests of what formats make of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.portable import About, Source, TensorInfo


class MemorySource:
    """Tensors by kind and name."""

    def __init__(self, tensors: dict[str, dict[str, torch.Tensor]], about: About | None = None, **said: Any) -> None:
        self._tensors = tensors
        parameters = {
            n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in tensors[MODEL].items() if t.is_floating_point()
        }
        self.about = about or About(parameters=said.pop("parameters", parameters), **said)

    def kinds(self) -> Iterable[str]:
        return tuple(self._tensors)

    def tensors(self, kind: str) -> Mapping[str, TensorInfo]:
        return {n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in self._tensors[kind].items()}

    def read(self, kind: str, name: str) -> torch.Tensor:
        return self._tensors[kind][name].clone()


def trained() -> MemorySource:
    """A small model with a tied weight and a buffer, computed in bf16 with fp32 main parameters, and Adam's state."""
    generator = torch.Generator().manual_seed(3)
    model = {
        "embedding.weight": torch.randn(7, 4, generator=generator),
        "layer.weight": torch.randn(5, 4, generator=generator),
        "layer.bias": torch.randn(5, generator=generator),
        "scale": torch.randn((), generator=generator),
        "empty": torch.empty(0, 3),
        "position": torch.arange(6),
    }
    trained = [name for name in model if name != "position"]
    state = {
        f"optimizer/{key}": {name: torch.randn(model[name].shape, generator=generator) for name in trained}
        for key in ("exp_avg", "exp_avg_sq")
    }
    return MemorySource(
        {MODEL: model, **state},
        parameters={name: TensorInfo(torch.bfloat16, tuple(model[name].shape)) for name in trained},
        aliases={"embedding.weight": ("head.weight",)},
        group_of={name: int("weight" not in name) for name in trained},
        groups=[{"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.01}, {"lr": 0.2, "betas": (0.9, 0.99)}],
        scalars={name: {"step": 3.0} for name in trained},
    )


def everything(source: Source) -> dict[str, dict[str, torch.Tensor]]:
    """All tensors of a source, by kind and name."""
    return {kind: {name: source.read(kind, name) for name in source.tensors(kind)} for kind in source.kinds()}


def are_equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """The same names, dtypes, shapes and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
