"""Which checkpoints are in a folder, which of them are complete, and which one is loaded.

A checkpoint is a folder with a manifest. ``latest`` is only a hint, since a run can die after the commit and before it
writes the hint; the newest complete checkpoint is loaded:

    asked for                     chosen
    a tag                         that one, of Shoal's or another program's
    none, ``load_universal``      what ``latest_universal`` names, if there is that file
    none                          what ``latest`` names, if another program saved it; else Shoal's newest complete one
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.checkpoint import foreign
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.foreign import ForeignFormat
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.problems import agree, damaged, unsafe
from shoal.checkpoint.reader import CheckpointReader
from shoal.checkpoint.storage import Storage
from shoal.comm.protocol import Communicator
from shoal.errors import CheckpointError

logger = logging.getLogger("shoal")

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"  # of what ds_to_universal made last
STAGING = re.compile(r"(?P<tag>.+)\.(?P<what>tmp|old)-[0-9a-f]{12}")
_OUR_FILE = re.compile(r"rank-\d{5,}(-[0-9a-f]{12})?\.safetensors|manifest\.json")
_MAX_HINT_BYTES = 4096


@dataclass(frozen=True)
class FoundCheckpoint:
    """One checkpoint of a folder."""

    folder: str
    manifest: Manifest | None
    problem: CheckpointError | None = None

    @property
    def order(self) -> tuple[str, int]:
        """Sorts by age."""
        return ("", 0) if self.manifest is None else (self.manifest.created, self.manifest.step)


def list_checkpoints(storage: Storage) -> list[FoundCheckpoint]:
    """The checkpoints of a folder, the newest first, those that cannot be read last.

    Reads manifests and file sizes only.

    Raises: CheckpointError: the folder itself cannot be read.
    """
    with _reading(storage):
        names = storage.names()
    checkpoints = [entry for name in names if (entry := _inspect_entry(storage, name)) is not None]
    return sorted(checkpoints, key=lambda entry: entry.order, reverse=True)


def _inspect_entry(storage: Storage, name: str) -> FoundCheckpoint | None:
    staging = STAGING.fullmatch(name)
    try:
        with _reading(storage):
            if (staging is not None and staging["what"] == "tmp") or not storage.is_folder(name):
                return None
            if not storage.exists(f"{name}/{manifests.NAME}"):
                return FoundCheckpoint(name, None, _missing_manifest(storage, name)) if is_ours(storage, name) else None
        return FoundCheckpoint(name, inspect(storage, name))
    except CheckpointError as error:
        return FoundCheckpoint(name, None, error)


@contextmanager
def _reading(storage: Storage) -> Iterator[None]:
    """Raises: CheckpointError: instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the folder cannot be read: {error}.",
            where=storage.url,
            do="check its permissions and the disk.",
            code="checkpoint-storage",
        ) from error


def inspect(storage: Storage, folder: str) -> Manifest:
    """Read a manifest, and compare the names and sizes of the files in the folder with it.

    Raises: CheckpointError: it is damaged, or a file is missing, or has another size.
    """
    where = f"checkpoint {folder or '.'} in {storage.url}"
    prefix = f"{folder}/" if folder else ""
    try:
        names = storage.names(folder)
        present = sum(storage.size(prefix + name) for name in names if name.endswith(".safetensors"))
        data = storage.read(prefix + manifests.NAME, manifests.most_bytes(present))
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint cannot be read: {error}.",
            where=where,
            do="check the folder's permissions and the disk, or load another checkpoint.",
            code="checkpoint-damaged",
        ) from error
    manifest = manifests.parse(data, f"{where}, {manifests.NAME}", present)
    problems = []
    for file in manifest.files:
        if file.name not in names:
            problems.append(f"{file.name} is missing")
            continue
        try:
            size = storage.size(prefix + file.name)
        except OSError as error:
            problems.append(f"{file.name}: {error}")
            continue
        if size != file.nbytes:
            problems.append(f"{file.name} has {size} bytes, and {file.nbytes} were written")
    if problems:
        shown = "; ".join(problems[:5]) + (" ..." if len(problems) > 5 else "")
        raise damaged(f"the checkpoint is not whole: {shown}.", where)
    return manifest


def verify(
    storage: Storage, folder: str, on_file: Callable[[str, int], None] = lambda name, nbytes: None
) -> list[CheckpointError]:
    """Read all of a checkpoint and compare every checksum.

    Args:
        on_file: called with each file's name and size when it has been read.

    Returns: what is damaged; nothing if it is whole.
    """
    try:
        manifest = inspect(storage, folder)
    except CheckpointError as error:
        return [error]
    reader = CheckpointReader(storage, folder, manifest)
    problems = []
    for index, file in enumerate(manifest.files):
        try:
            reader.check_file(index)
        except CheckpointError as error:
            problems.append(error)
        on_file(file.name, file.nbytes)
    return problems


def read_latest(storage: Storage, file: str = LATEST) -> str | None:
    """The tag in ``latest``; None if there is no such file, or it cannot be read."""
    try:
        return storage.read(file, _MAX_HINT_BYTES).decode().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def find_tag(storage: Storage, tag: str) -> str:
    """The folder of a tag.

    Raises: CheckpointError: there is none, and it names those that there are; or the folder cannot be read.
    """
    with _reading(storage):
        if storage.is_folder(tag) and storage.exists(f"{tag}/{manifests.NAME}"):
            return tag
    others = list_checkpoints(storage)
    for entry in others:  # a checkpoint that was being replaced when the run died
        if entry.manifest is not None and entry.manifest.tag == tag:
            return entry.folder
    if storage.is_folder(tag) and is_ours(storage, tag):
        raise _missing_manifest(storage, tag)
    if (theirs := foreign_folder(storage, tag)) is not None:
        return theirs[0]
    whole = [entry.folder for entry in others if entry.manifest is not None]
    raise CheckpointError(
        f"there is no checkpoint {tag!r} in {storage.url}.",
        do=f"load one of: {', '.join(whole[:8])}."
        if whole
        else "check that this is the folder that was saved to; `shoal convert` reads other formats.",
        code="checkpoint-missing",
    )


def candidates(comm: Communicator, storage: Storage, tag: str | None, *, is_universal: bool = False) -> list[str]:
    """The folders that may be loaded, the best first. Raises: CheckpointError: there is none.

    Args:
        is_universal: without a tag, the one that ``latest_universal`` names, if there is that file.

    Communicates: rank 0's answer.
    """
    problem: Exception | None = None
    folders: list[str] = []
    if comm.rank == 0:
        try:
            named = _universal(storage) if is_universal and tag is None else None
            wanted = tag if tag is not None else named
            folders = [find_tag(storage, str(wanted))] if wanted is not None else _resumable(storage)
        except Exception as error:
            problem = error
    return list(agree(comm, problem, folders, "checkpoint: choice")[0])


def _universal(storage: Storage) -> str | None:
    """The tag in ``latest_universal``. Later saves do not change that file; a warning names a later save."""
    named, latest = read_latest(storage, LATEST_UNIVERSAL), read_latest(storage)
    if named is None:
        logger.info(
            "checkpoint.load_universal: there is no %s; none is needed, because every Shoal checkpoint loads in every"
            " layout.",
            LATEST_UNIVERSAL,
        )
        return None
    if not is_name(named):
        raise unsafe(f"{LATEST_UNIVERSAL} holds {named[:200]!r}, which is not the name of a folder in it.", storage.url)
    if latest is not None and latest != named and f"{latest}_universal" != named:
        logger.warning(
            "checkpoint.load_universal: %s names %r, which is loaded instead of %r, the newest checkpoint. Remove the"
            " key from the config to load the newest.",
            LATEST_UNIVERSAL,
            named,
            latest,
        )
    return named


def _resumable(storage: Storage) -> list[str]:
    checkpoints = list_checkpoints(storage)
    for entry in checkpoints:
        if entry.problem is not None:
            logger.warning("%s is skipped: %s", entry.folder, entry.problem.what)
    whole = [entry for entry in checkpoints if entry.manifest is not None]
    meant = [entry for entry in whole if entry.manifest is not None and entry.manifest.is_for_resuming] or whole
    if (theirs := foreign_tag(storage)) is not None:
        folder, saved_as = theirs
        if meant:
            logger.warning(
                "%s names %r, which %s saved: it is loaded. Pass tag=%r to load the newest of Shoal's.",
                LATEST,
                folder,
                saved_as.program,
                meant[0].folder,
            )
        return [folder]
    if not meant:
        damaged = [entry.folder for entry in checkpoints]
        raise CheckpointError(
            f"no complete checkpoint in {storage.url}"
            + (f" (damaged or unfinished: {', '.join(damaged[:5])})." if damaged else "."),
            do="load from its parent folder, with its name as the tag."
            if storage.exists(manifests.NAME)
            else "check that this is the folder that was saved to; `shoal convert` reads other formats.",
            code="checkpoint-missing",
        )
    hinted = read_latest(storage)
    names = {entry.folder for entry in whole} | {entry.manifest.tag for entry in whole if entry.manifest is not None}
    if hinted in names - {meant[0].folder, meant[0].manifest and meant[0].manifest.tag}:
        logger.warning(
            "%s names %r, but %s is newer and whole: it is loaded. Pass tag=%r to load the other.",
            LATEST,
            hinted,
            meant[0].folder,
            hinted,
        )
    elif hinted is not None and hinted not in names | {entry.folder for entry in checkpoints}:
        logger.warning("%s names %r, which is not there: %s is loaded.", LATEST, hinted, meant[0].folder)
    return [entry.folder for entry in meant]


def foreign_format(storage: Storage, folder: str) -> ForeignFormat | None:
    """The format of a checkpoint that another program saved; None: the folder holds none."""
    names = storage.names(folder)
    return None if any(map(is_our_file, names)) else foreign.format_of(names)


def foreign_tag(storage: Storage) -> tuple[str, ForeignFormat] | None:
    """Another program's checkpoint that ``latest``, or else ``latest_universal``, names: its folder and format."""
    for file in (LATEST, LATEST_UNIVERSAL):
        tag = read_latest(storage, file)
        if tag is not None:
            return foreign_folder(storage, tag) if is_name(tag) else None
    return None


def foreign_folder(storage: Storage, tag: str) -> tuple[str, ForeignFormat] | None:
    """Where another program's checkpoint of a tag lies, and its format.

    It lies in the tag's folder, or under the name that a save gave it that died before it replaced it.
    """
    replaced = (match for match in map(STAGING.fullmatch, storage.names()) if match is not None)
    old = [match.string for match in replaced if (match["what"], match["tag"]) == ("old", tag)]
    for folder in (tag, *old):
        if (theirs := foreign_format(storage, folder)) is not None:
            return folder, theirs
    return None


def only_foreign(storage: Storage, folder: str) -> ForeignFormat | None:
    """The format of another program's checkpoint in a folder that holds nothing else."""
    theirs = foreign_format(storage, folder)
    return theirs if theirs is not None and all(map(theirs.has, storage.names(folder))) else None


def is_name(tag: str) -> bool:
    """True if it is the name of a folder, and not a path to another one."""
    return tag not in (".", "..") and not re.search(r"[/\\\0]", tag)


def is_ours(storage: Storage, folder: str) -> bool:
    """True if the folder holds only files that a save of Shoal's writes, and at least one."""
    names = storage.names(folder)
    return any(map(is_our_file, names)) and all(is_our_file(name) or foreign.format_of([name]) for name in names)


def is_our_file(name: str) -> bool:
    """True if a save of Shoal's gives this name to a file inside a checkpoint."""
    return _OUR_FILE.fullmatch(name) is not None


def _missing_manifest(storage: Storage, folder: str) -> CheckpointError:
    what = f"{folder} was never committed: it has no {manifests.NAME}."
    return damaged(what, f"checkpoint {folder} in {storage.url}")
