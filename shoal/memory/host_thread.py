"""One thread of the host that carries out functions in turn, while the thread that asks for them goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from shoal.streams import carried

T = TypeVar("T")


class ThreadResult(Generic[T]):
    """What a function on a ``HostThread`` returns, or will return."""

    def __init__(self, future: Future[T], joined: Callable[[], None]) -> None:
        self._future = future
        self._joined = joined

    def result(self) -> T:
        """Order: blocks the host until it is there. Raises: what the function raised."""
        try:
            return self._future.result()
        finally:
            self._joined()


class HostThread:
    """The thread; it starts with the first function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, run: Callable[[], T]) -> ThreadResult[T]:
        """Call ``run()`` after the functions before. Does not block the host."""
        run, joined = carried(run, self._name)
        return ThreadResult(self._pool.submit(run), joined)

    def close(self) -> None:
        """End the thread after what was submitted."""
        self._pool.shutdown()
