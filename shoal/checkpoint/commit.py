"""The commit: makes one checkpoint of the files that all ranks have written, atomically.

    1  rank 0   acquires the folder's lock, removes what dead saves left, checks the free space, makes TAG.tmp-XXXX
    2  all      write and flush rank-NNNNN.safetensors into it
    3  all      exchange name, size and checksums of their files; if one is missing, the save fails
    4  rank 0   writes and flushes manifest.json, flushes the folder
    5  rank 0   renames TAG.tmp-XXXX to TAG and flushes the parent: the checkpoint is valid from here on
    6  rank 0   writes ``latest`` next to it and renames it into place
    7  rank 0   removes old checkpoints, releases the lock

Before step 5 the older checkpoints are the valid ones; after it the new one is the newest, and a later failure is
reported but undoes nothing. On an object store the files lie in TAG from the start, under unique names, and writing the
manifest is the commit.

Order: POSIX keeps a rename after the data that it names only if the file was flushed (fsync) before the rename.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.directory import (
    LATEST,
    STAGING,
    FoundCheckpoint,
    inspect,
    is_our_file,
    is_ours,
    list_checkpoints,
    only_foreign,
    read_latest,
)
from shoal.checkpoint.lock import FolderLock
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.storage import LocalStorage, Storage
from shoal.errors import CheckpointError
from shoal.text import format_bytes

logger = logging.getLogger("shoal")

_HINT_STAGING = re.compile(re.escape(LATEST) + r"\.tmp-\d+")  # of LocalStorage.replace

Phase = Callable[[str], None]  # called by name as a save goes on; tests let it fail there


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept. The newest always is.

    Args:
        keep_last: number of the newest ones to keep; 0: all.
        keep_every: also keep each whose step is a multiple of this; 0: none.
    """

    keep_last: int = 0
    keep_every: int = 0


class Commit:
    """One save, as rank 0 sees it.

    Args:
        on_phase: called with ``"manifest"``, ``"rename"``, ``"latest"`` and ``"gc"`` just before each.
    """

    def __init__(self, storage: Storage, tag: str, on_phase: Phase = lambda phase: None) -> None:
        self.storage = storage
        self.tag = tag
        self.token = secrets.token_hex(6)
        self.folder = f"{tag}.tmp-{self.token}" if storage.can_rename else tag
        self.suffix = "" if storage.can_rename else f"-{self.token}"
        self._lock: FolderLock | None = None
        self._on_phase = on_phase
        self._is_committed = False

    def begin(self, nbytes: int) -> None:
        """Step 1.

        Args:
            nbytes: that all ranks together will write.

        Raises: CheckpointError: another job saves here, the tag names what is no checkpoint, or there is too little
            space. OSError: no permission.
        """
        storage = self.storage
        storage.make_folder("")
        if isinstance(storage, LocalStorage):
            lock = FolderLock(storage.root)
            lock.acquire()
            self._lock = lock
        self._sweep()
        self._refuse_other_files()
        free = storage.free_bytes()
        if free is not None and free < nbytes + nbytes // 100:
            raise CheckpointError(
                f"the checkpoint needs {format_bytes(nbytes)}, and {format_bytes(free)} are free.",
                where=storage.url,
                do="free space, keep fewer checkpoints (checkpoint.keep_last), or save elsewhere.",
                code="checkpoint-space",
            )
        storage.make_folder(self.folder)

    def _sweep(self) -> None:
        """Remove what dead saves have left. Needs the lock: no other process writes to the folder."""
        for name in self.storage.names():
            try:
                if self._is_leftover(name):
                    self.storage.remove(name)
            except OSError as error:
                logger.warning("%s is left over from a failed save and cannot be removed: %s", name, error)

    def _is_leftover(self, name: str) -> bool:
        storage = self.storage
        if _HINT_STAGING.fullmatch(name):
            return not storage.is_folder(name)
        match = STAGING.fullmatch(name)
        if match is None or not storage.is_folder(name):
            return False
        if storage.names(name) and not is_ours(storage, name) and only_foreign(storage, name) is None:
            return False
        return match["what"] == "tmp" or _is_whole(storage, match["tag"])

    def _refuse_other_files(self) -> None:
        """Raises: CheckpointError: the tag is the name of something that is no checkpoint; only those are replaced."""
        storage, tag = self.storage, self.tag
        if not storage.exists(tag):
            return
        if storage.is_folder(tag) and (
            not storage.names(tag) or is_ours(storage, tag) or storage.exists(f"{tag}/{manifests.NAME}")
        ):
            return
        if storage.can_rename and only_foreign(storage, tag) is not None:  # it is kept until the new one is complete
            return
        raise CheckpointError(
            f"{tag!r} already exists and is not a checkpoint, so it is not replaced.",
            where=storage.url,
            do="save under another tag, or to another folder.",
            code="checkpoint-tag",
        )

    def publish(self, manifest: Manifest, retention: Retention, *, save_latest: bool) -> list[str]:
        """Steps 4 to 7.

        Returns: what failed after the commit, in words.
        Raises: OSError, CheckpointError: it is not committed.
        """
        storage, tag = self.storage, self.tag
        manifest = self._later_than_the_newest(manifest)
        data = manifests.dump(manifest)
        manifests.refuse_oversized(data, manifest.nbytes, f"checkpoint {tag}")
        self._on_phase("manifest")
        if storage.can_rename:
            replaced = self._rename_into_place(data)
        else:
            replaced = None
            self._on_phase("rename")
            storage.replace(f"{tag}/{manifests.NAME}", data)
            self._is_committed = True

        def write_hint() -> None:
            self._on_phase("latest")
            if save_latest:
                storage.replace(LATEST, tag.encode())

        def collect() -> None:
            self._on_phase("gc")
            if replaced is not None and (theirs := only_foreign(storage, replaced)) is not None:
                logger.warning("%s is a checkpoint that %s saved; it is replaced.", tag, theirs.program)
                storage.remove(replaced)
            elif replaced is not None and is_ours(storage, replaced):
                storage.remove(replaced)
            if not storage.can_rename:
                kept = {file.name for file in manifest.files} | {manifests.NAME}
                for name in storage.names(tag):
                    if name not in kept and is_our_file(name):
                        storage.remove(f"{tag}/{name}")
            if retention.keep_last:
                for entry in prunable(list_checkpoints(storage), retention, protected=tag):
                    discard(storage, entry.folder)

        return [
            *_attempt(write_hint, f"checkpoint {tag!r} is saved, but {LATEST!r} does not name it"),
            *_attempt(collect, f"checkpoint {tag!r} is saved, but what it replaces could not be removed"),
        ]

    def _rename_into_place(self, manifest: bytes) -> str | None:
        """Steps 4 and 5. Returns: the folder to which an older checkpoint of this tag was moved."""
        storage, tag = self.storage, self.tag
        with storage.create(f"{self.folder}/{manifests.NAME}") as sink:
            sink.write(memoryview(manifest))
            sink.flush()
        storage.flush_folder(self.folder)
        self._on_phase("rename")
        replaced = None
        if storage.exists(tag):
            replaced = f"{tag}.old-{self.token}"
            storage.rename(tag, replaced)
        try:
            storage.rename(self.folder, tag)
        except OSError:
            if replaced is not None:
                with suppress(OSError):  # a load finds it under either name
                    storage.rename(replaced, tag)
            raise
        self._is_committed = True
        storage.flush_folder()
        return replaced

    def _later_than_the_newest(self, manifest: Manifest) -> Manifest:
        """The clocks of two machines differ; a later save gets a later time all the same."""
        named = read_latest(self.storage)
        with suppress(CheckpointError, OSError, ValueError, OverflowError):
            newest = inspect(self.storage, named).created if named is not None else ""
            if newest >= manifest.created:
                later = datetime.fromisoformat(newest) + timedelta(microseconds=1)
                return manifest.model_copy(update={"created": later.isoformat(timespec="microseconds")})
        return manifest

    def end(self) -> None:
        """Release the lock, and remove the files of a save that was not committed. Idempotent."""
        try:
            if not self._is_committed and self._lock is not None:
                self.storage.remove(self.folder)
            elif not self._is_committed and not self.storage.can_rename:
                for name in self.storage.names(self.folder):
                    if self.suffix in name:
                        self.storage.remove(f"{self.folder}/{name}")
        except OSError as error:
            logger.warning("%s of a failed save could not be removed yet: %s", self.folder, error)
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None


def _is_whole(storage: Storage, folder: str) -> bool:
    try:
        inspect(storage, folder)
    except CheckpointError:
        return False
    return True


def _attempt(act: Callable[[], None], what: str) -> list[str]:
    try:
        act()
    except (OSError, CheckpointError) as error:
        return [f"{what}: {error}"]
    return []


def discard(storage: Storage, folder: str) -> None:
    """Remove a checkpoint. If this process dies meanwhile, no partial checkpoint is left. Raises: OSError."""
    if storage.can_rename:
        doomed = f"{folder}.tmp-{secrets.token_hex(6)}"
        storage.rename(folder, doomed)
        storage.remove(doomed)
    else:
        storage.remove(f"{folder}/{manifests.NAME}")
        storage.remove(folder)


def prunable(
    checkpoints: Sequence[FoundCheckpoint], retention: Retention, protected: str | None = None
) -> list[FoundCheckpoint]:
    """Which of a folder's checkpoints (the newest first) may be removed.

    Damaged ones and those saved with ``save_latest=False`` are neither counted nor removed.
    """
    if not retention.keep_last:
        return []
    counted = [f for f in checkpoints if f.manifest is not None and f.manifest.is_for_resuming]
    return [
        f
        for f in counted[retention.keep_last :]
        if f.folder != protected
        and not (retention.keep_every and f.manifest is not None and f.manifest.step % retention.keep_every == 0)
    ]
