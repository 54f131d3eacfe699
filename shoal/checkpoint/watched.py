"""A progress bar of the bytes that are read from a source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from shoal.checkpoint.portable import Source, TensorInfo


def nbytes_of(source: Source, kinds: Iterable[str]) -> int:
    infos = [info for kind in kinds for info in source.tensors(kind).values()]
    return sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)


@contextmanager
def watched(source: Source, kinds: Iterable[str], console: Console) -> Iterator[Source]:
    """The source, with a bar on the console that moves as its tensors are read; without a terminal there is no bar."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield _Watched(source, bar, nbytes_of(source, kinds))


class _Watched:
    """A source that moves a progress bar when it is read."""

    def __init__(self, source: Source, bar: Progress, total: int) -> None:
        self.about = source.about
        self._source = source
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def kinds(self) -> Iterable[str]:
        return self._source.kinds()

    def tensors(self, kind: str) -> Mapping[str, TensorInfo]:
        return self._source.tensors(kind)

    def read(self, kind: str, name: str) -> torch.Tensor:
        value = self._source.read(kind, name)
        self._bar.update(self._task, advance=value.numel() * value.element_size(), description=escape(name))
        return value
