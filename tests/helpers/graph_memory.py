"""The memory of PyTorch's CUDA graphs on a CPU: a backend for ``torch.compile``.

As ``torch/_inductor/cudagraph_trees.py``, a graph is recorded for one place in the order of graphs, for the addresses
of its static inputs and for what of earlier graphs is alive. It is replayed where all that is as it was, and what it
returns is at the addresses of its recording. After ``cudagraph_mark_step_begin`` what earlier graphs have returned may
be overwritten: here it becomes NaN at once.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Code = str  # of a graph: ranks that are threads may compile the same one twice, and run either


class GraphMemory(threading.local):
    """Of each thread, as of each process: ranks may be threads.

    ``counts``: graphs that were recorded and replayed. ``num_marks``: calls of ``mark_step``.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_marks = 0
        self._tree = _Tree()

    def mark_step(self) -> None:
        """For ``torch.compiler.cudagraph_mark_step_begin``."""
        self.num_marks += 1

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        forward, backward = partial(self._compile, is_backward=False), partial(self._compile, is_backward=True)
        return aot_autograd(fw_compiler=forward, bw_compiler=backward)(graph, inputs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._inductor.utils import count_tangents

        context = torch._guards.TracingContext.get()
        static = range(count_tangents(graph)) if is_backward else context.fw_metadata.static_input_indices

        def run(*given: Any) -> Sequence[Any]:
            result, what = self._tree.run(graph, list(given), list(static), self.num_marks)
            self.counts[what] += 1
            return result

        return make_boxed_func(run)


class _Output:
    """A tensor that a graph returns, at one address for all replays."""

    def __init__(self, value: torch.Tensor) -> None:
        self.like = torch.empty_like(value, device="meta")
        nbytes = value.untyped_storage().nbytes()
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._made: StorageWeakRef | None = None
        self.address = self._memory.data_ptr()

    def made(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, in this memory."""
        raw = (ctypes.c_char * self._memory.numel()).from_address(self.address)
        flat = torch.frombuffer(raw, dtype=torch.uint8).view(value.dtype)
        made = flat.as_strided(self.like.shape, self.like.stride()).copy_(value)
        self._made = StorageWeakRef(made.untyped_storage())
        return made

    @property
    def is_alive(self) -> bool:
        return self._made is not None and not self._made.expired()

    def overwrite(self) -> None:
        values = self._memory.view(self.like.dtype)
        values.fill_(torch.nan if values.is_floating_point() else 1)


class _Recording:
    def __init__(self, parent: _Recording | None) -> None:
        self.parent = parent
        self.children: dict[Code, list[_Recording]] = {}
        self.addresses: dict[int, int] = {}  # of static inputs, and of those that earlier graphs have returned
        self.dead: list[_Output] = []  # returned by earlier graphs, when it was recorded
        self.outputs: list[_Output | None] = []

    def path(self) -> Iterator[_Output]:
        node: _Recording | None = self
        while node is not None:
            yield from (output for output in node.outputs if output is not None)
            node = node.parent


class _Tree:
    def __init__(self) -> None:
        self._roots: dict[Code, list[_Recording]] = {}
        self._current: _Recording | None = None
        self._is_recording = False
        self._mark = 0

    def run(
        self, graph: torch.fx.GraphModule, inputs: list[Any], static: Sequence[int], mark: int
    ) -> tuple[Sequence[Any], str]:
        assert mark != 0, "no step was marked"
        if self._is_recording:
            self._try_to_end(mark)
        found = self._find(graph.code, inputs)
        if found is None and not self._is_recording:
            self._try_to_end(mark)
            found = self._find(graph.code, inputs)
        self._mark, self._is_recording = mark, found is None
        values = graph(*inputs)
        if found is not None:
            self._current = found
            pairs = zip(found.outputs, values, strict=True)
            return [value if output is None else output.made(value) for output, value in pairs], "replayed"
        return self._record(graph.code, inputs, static, values), "recorded"

    def _children(self, graph: Code) -> list[_Recording]:
        return (self._roots if self._current is None else self._current.children).setdefault(graph, [])

    def _find(self, graph: Code, inputs: list[Any]) -> _Recording | None:
        for child in self._children(graph):
            is_same = all(inputs[index].data_ptr() == address for index, address in child.addresses.items())
            if is_same and not any(output.is_alive for output in child.dead):
                return child
        return None

    def _try_to_end(self, mark: int) -> None:
        if self._current is None:
            return
        alive = [output for output in self._current.path() if output.is_alive]
        if mark != self._mark or not alive:
            for output in alive:
                output.overwrite()
            self._current = None

    def _record(self, graph: Code, inputs: list[Any], static: Sequence[int], values: Sequence[Any]) -> Sequence[Any]:
        made = _Recording(self._current)
        self._children(graph).append(made)
        earlier = list(made.path())
        made.dead = [output for output in earlier if not output.is_alive]
        managed = {output.address for output in earlier if output.is_alive}
        kept = set()  # memory of inputs that a graph reads where it is
        for index, value in enumerate(inputs):
            if isinstance(value, torch.Tensor):
                address = value.untyped_storage().data_ptr()
                if index in static or address in managed:
                    made.addresses[index] = value.data_ptr()
                    kept.add(address)
        results = []
        for value in values:
            is_new = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in kept
            made.outputs.append(_Output(value) if is_new else None)
            results.append(made.outputs[-1].made(value) if is_new else value)
        self._current = made
        return results
