"""The file that ``torch.save`` writes, read without running anything in it.

    archive/data.pkl    {"w": tensor made of storage "0", shape (2, 3)}, as instructions that torch.load follows
    archive/byteorder, archive/version
    archive/data/0      the bytes, beginning at a multiple of 64

A file asks for the classes and functions that it was made of. ``torch.load(weights_only=True)`` grants those of
tensors; a file that asks for another is refused with the name that it asked for, whatever that name is.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from shoal.checkpoint.problems import damaged_copy, unsafe
from shoal.checkpoint.storage import Reader
from shoal.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ZIP = b"PK\x03\x04"


def load(path: str | os.PathLike[str]) -> Any:
    """What a file holds. Its tensors are mapped from the file and read when they are used (but of a file in the format
    before PyTorch 1.6, which is read whole).

    Raises: CheckpointError: it asks for more than tensors, is compressed, damaged, or no such file.
    """
    place = Path(path)
    try:
        with place.open("rb") as file:
            is_zip = file.read(4) == _ZIP
            if is_zip:
                check_zip(file, str(place))
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be opened: {error}.", do="name an existing file.", code="checkpoint-missing"
        ) from error
    try:
        return torch.load(place, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # what a hostile file raises can be anything
        raise _refused(error, str(place), place) from error


def load_part(file: Reader, offset: int, nbytes: int, where: str) -> Any:
    """What a part of a file holds, as ``load``; its tensors are read at once."""
    part = cast(IO[bytes], _FileSlice(file, offset, nbytes))
    check_zip(part, where)
    try:
        part.seek(0)
        return torch.load(part, map_location="cpu", weights_only=True)
    except Exception as error:
        part.seek(0)
        raise _refused(error, where, part) from error


class _FileSlice(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, file: Reader, begin: int, nbytes: int) -> None:
        self._file = file
        self._begin = begin
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        target = memoryview(buffer).cast("B")
        target = target[: max(0, min(len(target), self._nbytes - self._position))]
        self._file.read_into(self._begin + self._position, target)
        self._position += len(target)
        return len(target)


def check_zip(file: IO[bytes], where: str) -> None:
    """Raises: CheckpointError: not a whole zip file, or a compressed one, which could unfold to any size."""
    try:
        entries = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _damaged(where, str(error)) from error
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise unsafe(f"{entry.filename[:200]!r} in it is compressed, which torch.save never does.", where)


def _refused(error: Exception, where: str, file: Path | IO[bytes]) -> CheckpointError:
    asked = _asked_for(file) or re.findall(r"GLOBAL ([\w.]+)", str(error))
    if asked:
        return CheckpointError(
            f"the file asks for {', '.join(asked[:5])}, and Shoal loads tensors and plain containers only.",
            where=where,
            do="do not trust this file; from one that you made yourself, save the tensors alone"
            " (torch.save(model.state_dict())).",
            code="checkpoint-unsafe",
        )
    first = str(error).strip().partition("\n")[0][:300]
    return _damaged(where, f"{type(error).__name__}: {first}")


def _asked_for(file: Path | IO[bytes]) -> list[str]:
    """Names that a file asks for and does not get; none where that is not known."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # the file is damaged as well
        return []


def _damaged(where: str, what: str) -> CheckpointError:
    return damaged_copy(f"this is no whole file of torch.save: {what}.", where)
