"""Opens files of a folder that another program wrote, by names that are not trusted.

A name is that of a plain file in the folder, not of a link. One kind of link is allowed:
the Hugging Face cache keeps a model as

    models--org--name/blobs/5f3c...                                    the bytes
    models--org--name/snapshots/REVISION/model.safetensors             a link to ../../blobs/5f3c...

so in a folder ``X/snapshots/REVISION`` a link may lead to a file that lies in ``X/blobs``, and nowhere else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.checkpoint.problems import unsafe
from shoal.checkpoint.storage import LocalStorage, Reader, open_storage
from shoal.errors import CheckpointError

_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+=@-]{0,250}")


class UntrustedFolder:
    """A folder of files to read.

    Args:
        url: a path or an fsspec URL.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.storage = open_storage(url)
        self.url = self.storage.url

    def names(self) -> list[str]:
        return self.storage.names()

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        """A file to read at any place.

        Raises: CheckpointError: it is not there, leads out of the folder, or cannot be opened.
        """
        check_name(name, self.url)
        storage, place = self.storage, name
        if isinstance(storage, LocalStorage) and (storage.root / name).is_symlink():
            storage, place = self._blob(storage, name)
        try:
            context = storage.open(place)
            file = context.__enter__()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{name} is missing.", where=self.url, do="copy it there.", code="checkpoint-missing"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{name} cannot be opened: {error}.", where=self.url, code="checkpoint-storage"
            ) from error
        try:
            yield file
        finally:
            context.__exit__(None, None, None)

    def read(self, name: str, most: int) -> bytes:
        """A whole small file. Raises: CheckpointError: as ``open``, or it has more than ``most`` bytes."""
        with self.open(name) as file:
            if file.nbytes > most:
                raise unsafe(f"{name} has {file.nbytes} bytes, and at most {most} were expected.", self.url)
            data = bytearray(file.nbytes)
            file.read_into(0, memoryview(data))
        return bytes(data)

    def _blob(self, storage: LocalStorage, name: str) -> tuple[LocalStorage, str]:
        folder = storage.root.resolve()
        target = (folder / name).resolve()
        blobs = folder.parent.parent / "blobs"
        if folder.parent.name != "snapshots" or target.parent != blobs:
            raise CheckpointError(
                f"{name} is a link to {target}.",
                where=self.url,
                do="copy the file itself there. A link is followed only from a snapshot of the Hugging Face cache to a"
                " blob of the same model.",
                code="checkpoint-unsafe",
            )
        return LocalStorage(blobs), target.name


def check_name(name: str, where: str) -> None:
    """Raises: CheckpointError: not the plain name of a file in the folder."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise unsafe(f"{name[:200]!r} is not the name of a file in the folder.", where)
