"""Checkpoints that other programs save, by format. This package knows no format by name: each is registered.

``shoal/__init__.py`` registers them, so they are known after any import of Shoal. What opens a checkpoint is imported
at the first one that is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from shoal.checkpoint.portable import Source

Shapes = Mapping[str, tuple[int, ...] | None]  # of a model's tensors, by name; None: it is not known


class SourceOpener(Protocol):
    """Opens a checkpoint of a format as a ``Source``."""

    def __call__(
        self,
        folder: str | os.PathLike[str],
        tag: str | None = None,
        *,
        names: Sequence[Sequence[str]] | None = None,
        verify: bool = True,
        rank: int = 0,
        size: int = 1,
        model: Shapes | None = None,
    ) -> Source:
        """Args:
        folder: what the program's save was given, or a tag's folder in it.
        tag: which checkpoint; None: the one that ``latest`` names.
        names: of each parameter group, the names of its parameters in the optimizer's order, for a format that
            saves none; ``()``: leave the optimizer's state out there.
        verify: compare the checksums in all files first.
        rank, size: of several processes that open it together each compares its share of the files.
        model: the tensors of the model that loads it.
        """
        ...


class ForeignFormat(NamedTuple):
    """A format of checkpoints that lie in a folder by tag.

    Args:
        name: as ``shoal convert --from`` has it.
        program: as messages call the program that saves it.
        file: fits the names of the files in a checkpoint's folder, and no others.
        folders: the folders that may be there.
        opener: a ``SourceOpener``, as ``module:name``.
    """

    name: str
    program: str
    file: re.Pattern[str]
    folders: Collection[str]
    opener: str

    def has(self, name: str) -> bool:
        """True for the name of a file or folder in a checkpoint of this format."""
        return name in self.folders or self.file.fullmatch(name) is not None

    def opening(self) -> SourceOpener:
        import pkgutil  # `import shoal` does not need it

        opener: SourceOpener = pkgutil.resolve_name(self.opener)
        return opener


FORMATS: list[ForeignFormat] = []


def register(format: ForeignFormat) -> None:
    """Make a format known."""
    FORMATS.append(format)


def format_of(names: Iterable[str]) -> ForeignFormat | None:
    """The format that has files of these names; None: none has."""
    names = list(names)
    return next((each for each in FORMATS if any(map(each.file.fullmatch, names))), None)
