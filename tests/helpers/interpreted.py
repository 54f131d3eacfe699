"""What the tests of interpreted kernels share."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

UNIT = 2.0**-24
LOST = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # the interpreter cuts bf16 off


def counting(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType, *names: str) -> list[str]:
    """The names of the functions of ``kernels`` that ran, in order, from now on."""
    made: list[str] = []
    for name in names:
        kernel = getattr(kernels, name)

        def counted(*args: Any, kernel: Any = kernel, name: str = name) -> None:
            made.append(name)
            kernel(*args)

        monkeypatch.setattr(kernels, name, counted)
    return made
