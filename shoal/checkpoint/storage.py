"""Where checkpoints are stored: a folder of a file system, or an object store behind an fsspec URL.

    local folder      a checkpoint is written to TAG.tmp-XXXX, flushed, and renamed to TAG, which is atomic
    object store      has no rename: files are written under TAG, and the manifest, written last, makes it a checkpoint

All paths are names relative to the storage's root, joined by "/".
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import CheckpointError
from shoal.memory.host import PAGE, round_down

_TEXT_PART_NBYTES = 1 << 20
_EARLY_NBYTES = 64 << 20  # after so many written bytes an early flush begins


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None: ...

    def flush(self) -> None:
        """Return once the bytes would survive a loss of power."""
        ...


class Reader(Protocol):
    """A file that can be read from any offset."""

    nbytes: int

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on. Raises: OSError: the file is shorter, or cannot be read."""
        ...


class Storage(Protocol):
    """A folder or object store that holds checkpoints."""

    url: str
    can_rename: bool

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder, sorted; empty if there is no such folder."""
        ...

    def exists(self, path: str) -> bool: ...

    def is_folder(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents. The root and its parents survive a loss of power."""
        ...

    def create(self, path: str, *, is_direct: bool = False) -> Any:
        """A context manager that gives a ``Sink`` to a new file.

        Args:
            is_direct: past the page cache, where the file system and the data's address allow it.

        Raises: FileExistsError.
        """
        ...

    def open(self, path: str) -> Any:
        """A context manager that gives a ``Reader``."""
        ...

    def read(self, path: str, most: int) -> bytes:
        """A whole small text file. Raises: OSError: it has more than ``most`` bytes, or is no text."""
        with self.open(path) as file:
            return _read_text(file, path, most)

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file so that a reader sees the old one or the new one."""
        with self.replacing(path) as sink:
            sink.write(memoryview(data))

    def replacing(self, path: str) -> Any:
        """The same for a large file: a context manager that gives a ``Sink``.

        An exception keeps the old file; on an object store, it leaves none.
        """
        ...

    def rename(self, source: str, target: str) -> None:
        """Raises: OSError: ``target`` is there."""
        ...

    def flush_folder(self, path: str = "") -> None: ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents; nothing happens if there is none."""
        ...

    def free_bytes(self) -> int | None:
        """How many bytes may be written; None: unknown."""
        ...


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """The storage at a path or an fsspec URL (``file://``, ``memory://``, ``s3://``, ...).

    Raises: CheckpointError: the URL's scheme is unknown or its package is not installed.
    """
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(Path(text).expanduser().absolute())
    if scheme in ("file", "local"):
        return LocalStorage(Path(rest).absolute())
    return ObjectStorage(text)


class LocalStorage(Storage):
    """A folder of a file system."""

    can_rename = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def _at(self, path: str) -> Path:
        return self.root / path if path else self.root

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._at(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: str) -> bool:
        return self._at(path).exists()

    def is_folder(self, path: str) -> bool:
        return self._at(path).is_dir() and not self._at(path).is_symlink()

    def size(self, path: str) -> int:
        status = os.lstat(self._at(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(self._at(path)))
        return status.st_size

    def make_folder(self, path: str) -> None:
        missing = [place for place in (self.root, *self.root.parents) if not place.exists()]
        self._at(path).mkdir(parents=True, exist_ok=True)
        for place in missing:
            _flush_folder(place.parent)

    @contextmanager
    def create(self, path: str, *, is_direct: bool = False) -> Iterator[Sink]:
        fd = os.open(self._at(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        sink = _LocalSink(fd, is_direct=is_direct)
        try:
            yield sink
        finally:
            sink.join()
            os.close(fd)

    @contextmanager
    def open(self, path: str) -> Iterator[Reader]:
        # Non-blocking: a pipe in place of a file must not block the reader.
        fd = os.open(self._at(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a plain file", str(self._at(path)))
            yield _LocalReader(fd, status.st_size)
        finally:
            os.close(fd)

    @contextmanager
    def replacing(self, path: str) -> Iterator[Sink]:
        staging = f"{path}.tmp-{os.getpid()}"
        self._at(staging).unlink(missing_ok=True)
        try:
            with self.create(staging) as sink:
                yield sink
                sink.flush()
            os.replace(self._at(staging), self._at(path))
        except BaseException:
            self._at(staging).unlink(missing_ok=True)
            raise
        self.flush_folder(os.path.dirname(path))

    def rename(self, source: str, target: str) -> None:
        # os.rename replaces an empty folder; here nothing is replaced.
        if os.path.lexists(self._at(target)):
            raise FileExistsError(errno.EEXIST, "is there already", str(self._at(target)))
        os.rename(self._at(source), self._at(target))

    def flush_folder(self, path: str = "") -> None:
        _flush_folder(self._at(path))

    def remove(self, path: str) -> None:
        place = self._at(path)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)

    def free_bytes(self) -> int | None:
        place = self.root
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free


def _flush_folder(place: Path) -> None:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot flush a folder, and need not
            raise
    finally:
        os.close(fd)


class _LocalSink:
    """A file that is flushed on a thread while more is written, so that the last flush is short.

    Args:
        is_direct: write whole pages past the page cache (``O_DIRECT``), which takes a fraction of the processor time.
            What the system refuses to write so goes through the cache, and so does all that follows.
    """

    def __init__(self, fd: int, *, is_direct: bool) -> None:
        self._fd = fd
        self._is_direct = is_direct and _set_direct(fd, is_direct=True)
        self._num_waiting = 0  # bytes since the last early flush began
        self._early: threading.Thread | None = None
        self._problem: OSError | None = None

    def write(self, data: memoryview) -> None:
        if self._is_direct:
            data = self._write_direct(data)
        while data:
            written = os.write(self._fd, data)
            if written <= 0:
                raise OSError(errno.EIO, "nothing was written")
            data = data[written:]
            self._num_waiting += written
        if self._num_waiting >= _EARLY_NBYTES and (self._early is None or not self._early.is_alive()):
            self._num_waiting = 0
            self._early = threading.Thread(target=self._flush_early, name="shoal-flush", daemon=True)
            self._early.start()

    def _write_direct(self, data: memoryview) -> memoryview:
        """Returns: what must go through the page cache."""
        try:
            while len(data) >= PAGE and (written := os.write(self._fd, data[: round_down(len(data), PAGE)])) > 0:
                data = data[written:]
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EFAULT):  # the address or the position is not aligned
                raise
        if data:
            self._is_direct = False
            _set_direct(self._fd, is_direct=False)
        return data

    def _flush_early(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:  # the system reports it once
            self._problem = self._problem or error

    def join(self) -> None:
        if self._early is not None:
            self._early.join()

    def flush(self) -> None:
        self.join()
        if self._problem is not None:
            raise self._problem
        os.fsync(self._fd)


def _set_direct(fd: int, *, is_direct: bool) -> bool:
    """Returns: True if the file system allows it."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if is_direct else flags & ~flag)
    except OSError:
        return False
    return bool(flag)


class _LocalReader:
    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self.nbytes = nbytes

    def read_into(self, offset: int, target: memoryview) -> None:
        while target:
            got = os.preadv(self._fd, [target], offset)
            if got <= 0:
                raise OSError(errno.EIO, f"the file ends at {offset}, and {len(target)} more bytes were expected")
            target, offset = target[got:], offset + got


class ObjectStorage(Storage):
    """What an fsspec file system can do."""

    can_rename = False

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise CheckpointError(
                f"{url!r} cannot be opened: {error}.",
                do="use a path, or install the package that fsspec needs for this kind of URL.",
                code="checkpoint-storage",
            ) from error
        self._root = root.rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def names(self, folder: str = "") -> list[str]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._at(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries})

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(self._at(path)))

    def is_folder(self, path: str) -> bool:
        return bool(self._fs.isdir(self._at(path)))

    def size(self, path: str) -> int:
        return int(self._fs.size(self._at(path)))

    def make_folder(self, path: str) -> None:
        self._fs.makedirs(self._at(path), exist_ok=True)

    @contextmanager
    def create(self, path: str, *, is_direct: bool = False) -> Iterator[Sink]:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, "is there already", self._at(path))
        with self.replacing(path) as sink:
            yield sink

    @contextmanager
    def open(self, path: str) -> Iterator[Reader]:
        with self._fs.open(self._at(path), "rb") as file:
            yield _ObjectReader(file, self.size(path))

    @contextmanager
    def replacing(self, path: str) -> Iterator[Sink]:
        try:
            with self._fs.open(self._at(path), "wb") as file:
                yield _ObjectSink(file)
        except BaseException:  # closing has stored what was written so far
            self.remove(path)
            raise

    def rename(self, source: str, target: str) -> None:
        raise OSError(errno.ENOTSUP, "an object store cannot rename", self.url)

    def flush_folder(self, path: str = "") -> None:
        return

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm(self._at(path), recursive=True)

    def free_bytes(self) -> int | None:
        return None


class _ObjectSink:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> None:
        if data:
            self._file.write(data)

    def flush(self) -> None:
        return  # an object is stored durably when it is closed


class _ObjectReader:
    def __init__(self, file: Any, nbytes: int) -> None:
        self._file = file
        self.nbytes = nbytes

    def read_into(self, offset: int, target: memoryview) -> None:
        self._file.seek(offset)
        while target:
            data = self._file.read(len(target))
            if not data:
                raise OSError(errno.EIO, f"the file ends early, {len(target)} more bytes were expected")
            target[: len(data)] = data
            target = target[len(data) :]


def _read_text(file: Reader, path: str, most: int) -> bytes:
    if file.nbytes > most:
        raise OSError(errno.EFBIG, f"{path} has {file.nbytes} bytes, and at most {most} were expected")
    data = bytearray()
    while len(data) < file.nbytes:
        part = bytearray(min(_TEXT_PART_NBYTES, file.nbytes - len(data)))
        file.read_into(len(data), memoryview(part))
        if 0 in part:
            # A hole in a sparse file takes no disk space, any amount of memory, and reads as zeros.
            raise OSError(errno.EINVAL, f"{path} is no text")
        data += part
    return bytes(data)
