"""What the host reads in a function that is recomputed: the recomputation has the same values, and does not wait.

    forward          values = read_once(read)      reads, and keeps the result
    recomputation    values = read_once(read)      returns the result of the same call in the forward

A function inside another one that is recomputed reads what the outer one has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class _FunctionRun:
    """One run of a function. ``position``: of the next value that a recomputation returns; None: it is the forward."""

    values: list[Any]
    position: int | None
    outer: _FunctionRun | None

    def read(self, read: Callable[[], Any]) -> Any:
        if self.position is not None and self.position < len(self.values):
            self.position += 1
            return self.values[self.position - 1]
        value = read() if self.outer is None else self.outer.read(read)
        if self.position is None:
            self.values.append(value)
        return value


_run: ContextVar[_FunctionRun | None] = ContextVar("run_with_host_reads", default=None)


@contextmanager
def keeping_reads(values: list[Any], *, is_again: bool) -> Iterator[None]:
    """Inside the block, ``read_once`` keeps its results in ``values``, or with ``is_again`` returns those in order."""
    token = _run.set(_FunctionRun(values, 0 if is_again else None, _run.get()))
    try:
        yield
    finally:
        _run.reset(token)


def read_once(read: Callable[[], T]) -> T:
    """``read()``, which blocks the host; in a recomputation, what it has returned in the forward.

    The calls are in the same order in both, and ``read`` saves no tensor for backward.
    """
    run = _run.get()
    result: T = read() if run is None else run.read(read)
    return result
