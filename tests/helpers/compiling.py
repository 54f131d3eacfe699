"""``torch.compile`` in tests, on ranks that are threads."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

CRASHES_IN_THREADS = torch.torch_version.TorchVersion(torch.__version__) < (2, 13)


Backend = Callable[[torch.fx.GraphModule, list[Any]], Any]


def overwriting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """``aot_eager``, but at the end of a graph the memory of what it does not return is overwritten.

    Inductor reuses such memory for other tensors of the graph, also where an operator has kept the tensor.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiled(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        # Not by torch.fx.Interpreter: it writes a state of the process that a rank which compiles meanwhile reads.
        copied, nodes = torch.fx.Graph(), {}
        returned = copied.graph_copy(graph.graph, nodes)
        given = [new for old, new in nodes.items() if old.op in ("placeholder", "get_attr")]
        copied.output((returned, given, [new for new in nodes.values() if new not in given]))
        whole = torch.fx.GraphModule(graph, copied)

        def run(*inputs: Any) -> Any:
            results, given, made = whole(*inputs)
            kept, others = (
                {tensor.untyped_storage().data_ptr(): tensor for tensor in _tensors(each)}
                for each in ((results, given), made)
            )
            for address in others.keys() - kept.keys():
                values = others[address].detach()
                torch.empty(0, dtype=values.dtype, device=values.device).set_(values.untyped_storage()).fill_(
                    torch.nan if values.is_floating_point() else 0
                )
            return results

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiled, partition_fn=min_cut_rematerialization_partition)(graph, inputs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


class CountsGraphs:
    """A backend that counts what it is asked to compile."""

    def __init__(self, inner: str | Backend) -> None:
        self.num_graphs = 0
        self._inner = inner

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.num_graphs += 1
        inner = lookup_backend(self._inner) if isinstance(self._inner, str) else self._inner
        return inner(graph, inputs)


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
