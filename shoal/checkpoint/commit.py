"""The commit: from files that all ranks have written to a checkpoint that is there, at once or not at all.

    1  rank 0   takes the folder's lock, sweeps what dead saves left, asks for the space, makes TAG.tmp-XXXX
    2  all      write and flush rank-NNNNN.safetensors into it
    3  all      tell each other name, size and sums; a missing one ends the save
    4  rank 0   writes and flushes manifest.json, flushes the folder
    5  rank 0   renames TAG.tmp-XXXX to TAG and flushes the parent: now it counts
    6  rank 0   writes ``latest`` beside it and renames it into place
    7  rank 0   removes what need not be kept, gives the lock back

Before 5 the older checkpoints are all there is; after it the new one is the newest. On an object store the files lie in
TAG from the start, under names of their own, and the manifest's writing is the commit.

Source: the order of flushes and renames is what POSIX promises to keep: fsync a file before the rename that names it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.catalogue import LATEST, STAGING, Found, is_ours, look
from shoal.checkpoint.lock import FolderLock
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.storage import LocalStorage, Storage
from shoal.errors import CheckpointError
from shoal.text import format_bytes

Phase = Callable[[str], None]  # called by name as a save goes on; tests let it fail there


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay. The newest always does.

    Args:
        keep_last: so many; 0: all.
        keep_every: also each whose step divides by this; 0: none.
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

        Raises: CheckpointError: another job saves here, or there is too little space. OSError: no permission.
        """
        storage = self.storage
        storage.make_folder("")
        if isinstance(storage, LocalStorage):
            lock = FolderLock(storage.root)
            lock.acquire()
            self._lock = lock
        self._sweep()
        free = storage.free_bytes()
        if free is not None and free < nbytes + nbytes // 100:
            raise CheckpointError(
                f"the checkpoint needs {format_bytes(nbytes)}, and {format_bytes(free)} are free.",
                where=storage.url,
                do="make room, keep fewer checkpoints (checkpoint.keep_last), or save elsewhere.",
                code="checkpoint-space",
            )
        storage.make_folder(self.folder)

    def _sweep(self) -> None:
        """Remove what saves that died have left. Only under the lock: nobody else is writing."""
        for name in self.storage.names():
            found = STAGING.fullmatch(name)
            if found is None or not self.storage.is_folder(name):
                continue
            is_leftover = found["what"] == "tmp" or self.storage.exists(f"{found['tag']}/{manifests.NAME}")
            if is_leftover and (is_ours(self.storage, name) or not self.storage.names(name)):
                self.storage.remove(name)

    def publish(self, manifest: Manifest, retention: Retention, *, save_latest: bool) -> None:
        """Steps 4 to 7. Raises: OSError."""
        storage, tag = self.storage, self.tag
        data = manifests.dump(manifest)
        self._on_phase("manifest")
        old: list[str] = []
        replaced: str | None = None
        if storage.can_rename:
            with storage.create(f"{self.folder}/{manifests.NAME}") as sink:
                sink.write(memoryview(data))
                sink.flush()
            storage.flush_folder(self.folder)
            self._on_phase("rename")
            if storage.exists(tag):
                replaced = f"{tag}.old-{self.token}"
                storage.rename(tag, replaced)
            storage.rename(self.folder, tag)
            storage.flush_folder()
        else:
            kept = {file.name for file in manifest.files} | {manifests.NAME}
            old = [name for name in storage.names(tag) if name not in kept]
            self._on_phase("rename")
            storage.replace(f"{tag}/{manifests.NAME}", data)
        self._is_committed = True
        self._on_phase("latest")
        if save_latest:
            storage.replace(LATEST, tag.encode())
        self._on_phase("gc")
        if replaced is not None:
            storage.remove(replaced)
        for name in old:
            storage.remove(f"{tag}/{name}")
        for found in prunable(look(storage), retention, protected=tag):
            storage.remove(found.folder)

    def end(self) -> None:
        """Give the lock back, and remove the files of a save that was not committed. Idempotent."""
        try:
            if not self._is_committed and self._lock is not None:
                self.storage.remove(self.folder)
            elif not self._is_committed and not self.storage.can_rename:
                for name in self.storage.names(self.folder):
                    if self.suffix in name:
                        self.storage.remove(f"{self.folder}/{name}")
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None


def prunable(found: Sequence[Found], retention: Retention, protected: str | None = None) -> list[Found]:
    """Which of a folder's checkpoints (the newest first) need not be kept.

    Damaged ones and those saved under a tag of their own (``save_latest=False``) neither count nor go.
    """
    if not retention.keep_last:
        return []
    counted = [f for f in found if f.manifest is not None and f.manifest.is_for_resuming]
    return [
        f
        for f in counted[retention.keep_last :]
        if f.folder != protected
        and not (retention.keep_every and f.manifest is not None and f.manifest.step % retention.keep_every == 0)
    ]
