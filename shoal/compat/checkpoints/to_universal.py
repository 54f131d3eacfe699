"""Makes a checkpoint for every layout under another tag, as DeepSpeed's ``ds_to_universal`` does.

    INPUT is                        ROOT/NAME becomes
    a checkpoint of Shoal's         the same checkpoint: its files under a second name, or copied, and a manifest
    one of DeepSpeed's              a checkpoint of Shoal's, converted

    ROOT/latest_universal           NAME

A save of Shoal's creates new files and never writes into an existing one. So a hard link is as safe as a copy: if one
checkpoint is replaced or removed, the other stays complete. The bytes are on the disk once.
The new checkpoint is loaded by its tag, or with ``checkpoint.load_universal``; ``latest`` goes on to name another.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint import directory
from shoal.checkpoint.commit import Commit, Retention
from shoal.checkpoint.formats import detect, open_source
from shoal.checkpoint.formats.target import split
from shoal.checkpoint.native import ShoalSource, write_shoal
from shoal.checkpoint.storage import LocalStorage, Storage, open_storage
from shoal.compat.checkpoints import DEEPSPEED
from shoal.errors import CheckpointError


@dataclass(frozen=True)
class UniversalResult:
    """What ``make_universal`` did.

    Args:
        format: of the input: ``"shoal"`` or ``"deepspeed"``.
        linked, copied: how many files have a second name now, and how many were copied.
        notes: what was found and is not kept, a sentence each.
    """

    format: str
    linked: int = 0
    copied: int = 0
    notes: tuple[str, ...] = ()


def make_universal(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> UniversalResult:
    """Make ``target`` of ``source``, and let ``latest_universal`` beside it name it.

    Args:
        source: a tag's folder, or the folder around it, whose newest is taken.
        target: the folder to make. A checkpoint that is there is replaced once the new one is whole.

    Raises: CheckpointError: the source is no checkpoint of the two kinds, or damaged, or the target is something else.
    """
    root, name = split(target)
    storage = open_storage(root)
    if not name or not directory.is_name(name):
        raise CheckpointError(f"{os.fspath(target)!r} does not name a folder.", code="checkpoint-target")
    found = detect(source)
    if found == "shoal":
        made = _twin(ShoalSource(source), storage, name)
    elif found == "deepspeed":
        opened = open_source(source, format=found)
        write_shoal(opened, root, name, is_for_resuming=False)
        made = UniversalResult(found, notes=tuple(opened.about.notes))
    else:
        raise CheckpointError(
            f"{os.fspath(source)} is {found}, not a checkpoint.",
            do="name a tag's folder of a checkpoint; `shoal convert` takes other formats.",
            code="checkpoint-format",
        )
    storage.replace(directory.LATEST_UNIVERSAL, name.encode())
    return made


def _twin(source: ShoalSource, storage: Storage, name: str) -> UniversalResult:
    origin = source.storage
    if not isinstance(origin, LocalStorage) or not isinstance(storage, LocalStorage):
        raise CheckpointError(
            f"{origin.url} or {storage.url} is no folder of a file system, so no file gets a second name there.",
            do="load the checkpoint itself: it loads in every layout.",
            code="checkpoint-storage",
        )
    folder = origin.root / source.folder
    if folder.resolve() == (storage.root / name).resolve():
        raise CheckpointError(
            f"{folder} is both the input and the output.",
            do=f"name another output, as {folder.name}_universal beside it.",
            code="checkpoint-target",
        )
    files = [*(folder / record.name for record in source.manifest.files), *_beside(folder)]
    commit = Commit(storage, name)
    try:
        storage.make_folder("")
        is_near = os.stat(folder).st_dev == os.stat(storage.root).st_dev
        commit.begin(0 if is_near else source.manifest.nbytes)
        place = storage.root / commit.folder
        linked = _take(files, place)
        manifest = source.manifest.model_copy(update={"tag": name, "is_for_resuming": False})
        commit.publish(manifest, Retention(), save_latest=False)
    except OSError as error:
        raise CheckpointError(
            f"{name} could not be made: {error}.", where=storage.url, code="checkpoint-storage"
        ) from error
    finally:
        commit.end()
    return UniversalResult("shoal", linked, len(files) - linked)


def _beside(folder: Path) -> Iterable[Path]:
    """Files of DeepSpeed's layout in a checkpoint's folder."""
    return (path for path in sorted(folder.iterdir()) if DEEPSPEED.file.fullmatch(path.name) and path.is_file())


def _take(files: Iterable[Path], place: Path) -> int:
    """Hard-link each file, or copy it where the file system cannot. Returns: how many are linked."""
    linked = 0
    for file in files:
        try:
            os.link(file, place / file.name, follow_symlinks=False)
            linked += 1
        except OSError:  # another file system, one without links, or as many as it can have
            with file.open("rb") as old, (place / file.name).open("xb") as new:
                shutil.copyfileobj(old, new, 1 << 20)
                new.flush()
                os.fsync(new.fileno())
    return linked
