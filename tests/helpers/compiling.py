"""``torch.compile`` in tests, on ranks that are threads."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

CRASHES_IN_THREADS = torch.torch_version.TorchVersion(torch.__version__) < (2, 13)


class CountsGraphs:
    """A backend that counts what it is asked to compile."""

    def __init__(self, inner: str) -> None:
        self.num_graphs = 0
        self._inner = inner

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.num_graphs += 1
        return lookup_backend(self._inner)(graph, inputs)


@contextmanager
def compiling() -> Iterator[None]:
    """The compiler as in a fresh process, before and after; its warnings, about tensors without .grad, are dropped."""
    if CRASHES_IN_THREADS:
        pytest.skip("older torch crashes where several threads compile at once, as ranks that are threads do")
    if "torch._dynamo" not in sys.modules:
        importlib.import_module("torch._dynamo")
        gc.freeze()  # as of all that is imported: tests/conftest.py
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._dynamo.reset()
