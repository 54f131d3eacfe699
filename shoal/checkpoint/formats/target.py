"""Where a conversion writes: a new folder or file, which appears when it is complete.

On a file system it is written under another name and renamed; an object store has no rename, so there what a failed
conversion wrote is removed again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.checkpoint.storage import Sink, Storage, open_storage
from shoal.errors import CheckpointError


def split(url: str | os.PathLike[str]) -> tuple[str, str]:
    """The folder around a path or URL, and the name in it.

    >>> split("s3://bucket/run/model"), split("memory://model")
    (('s3://bucket/run', 'model'), ('memory://', 'model'))
    """
    text = os.fspath(url)
    if "://" in text:
        scheme, _, rest = text.partition("://")
        folder, _, name = rest.rstrip("/").rpartition("/")
        return f"{scheme}://{folder}", name
    place = Path(text).expanduser().absolute()
    return str(place.parent), place.name


def check_free(url: str | os.PathLike[str]) -> None:
    """Raises: CheckpointError: something is there already (an empty folder is nothing)."""
    folder, name = split(url)
    storage = open_storage(folder)
    if not name or (storage.exists(name) and (not storage.is_folder(name) or storage.names(name))):
        raise CheckpointError(
            f"{os.fspath(url)} is there already.",
            do="name a folder or file that does not exist; Shoal does not overwrite weights.",
            code="checkpoint-target",
        )


@contextmanager
def new_folder(url: str | os.PathLike[str]) -> Iterator[tuple[Storage, str]]:
    """Gives a storage and the folder in it to write to. Raises: CheckpointError: something is there already."""
    with _staged(url) as (storage, staging):
        storage.make_folder(staging)
        yield storage, staging
        storage.flush_folder(staging)


@contextmanager
def new_file(url: str | os.PathLike[str]) -> Iterator[Sink]:
    """Gives a file to write to. Raises: CheckpointError: something is there already."""
    with _staged(url) as (storage, staging):
        storage.make_folder("")
        with storage.create(staging) as sink:
            yield sink
            sink.flush()


@contextmanager
def _staged(url: str | os.PathLike[str]) -> Iterator[tuple[Storage, str]]:
    check_free(url)
    folder, name = split(url)
    storage = open_storage(folder)
    staging = f"{name}.tmp-{secrets.token_hex(4)}" if storage.can_rename else name
    try:
        yield storage, staging
        if storage.can_rename:
            check_free(url)
            if storage.exists(name):
                storage.remove(name)  # an empty folder
            storage.rename(staging, name)
            storage.flush_folder("")
    except BaseException:
        storage.remove(staging)
        raise
