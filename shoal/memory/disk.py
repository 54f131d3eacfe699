"""The disk as a tier: room by name, and reads and writes of it that go on while the device computes.

    tier = DiskTier("/scratch", rank=0)
    tier.reserve(nbytes)                         # asked before the run
    extent = tier.allocate("layers.3", nbytes)
    tier.write(extent, tensor)                   # both return at once; the read waits for the write
    tier.read(extent, buffer).wait()

The tensor of a write must not be changed, and that of a read not be used, until its ticket is done.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from shoal.errors import TierError, UsageError
from shoal.memory.host import PAGE, aligned_empty, round_up
from shoal.memory.io_threads import IoThreads, Ticket
from shoal.memory.private_folder import PrivateFolder
from shoal.memory.transfer import DiskTransfer, FileExtent, Traffic, Way, failed, free_nbytes, no_room
from shoal.streams import host_memory, host_transfer

logger = logging.getLogger("shoal")

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class DiskTier:
    """This rank's part of a disk: a private folder with a file for each extent, and the threads that read and write.

    Args:
        folder: on a local disk; must exist. A folder of this rank's own is made in it, what dead processes of this
            machine left there is removed first, and its own goes at ``close()`` or when the process ends.
        num_threads: that read and write, for all extents together.
        block_nbytes: of one request to the device, rounded up to whole pages.
        queue_depth: requests that the device is given at once by all threads together. A thread asks for
            ``queue_depth / num_threads`` blocks in one call, which the kernel splits.
        max_pending: reads and writes that may be unfinished before the next one makes its caller wait.
        uses_direct: past the page cache (``O_DIRECT``); "auto": where the file system lets us.
        checks_sums: keep the xxh3 of each block in memory and check it on every read (for debugging: a block is then
            written whole, so a write of a part of one reads it first).
        job: 32 hexadecimal digits, the same on all ranks of a job; None: of this tier's own.

    Raises: TierError: the folder is not there, not writable, or refuses ``O_DIRECT`` where ``uses_direct`` is True.
    Memory: per thread one buffer as large as its calls.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int,
        num_threads: int = 4,
        block_nbytes: int = 1 << 20,
        queue_depth: int = 8,
        max_pending: int = 64,
        uses_direct: bool | Literal["auto"] = "auto",
        checks_sums: bool = False,
        job: str | None = None,
    ) -> None:
        if min(num_threads, block_nbytes, queue_depth, max_pending) < 1:
            raise UsageError(
                f"num_threads {num_threads}, block_nbytes {block_nbytes}, queue_depth {queue_depth} and max_pending "
                f"{max_pending} must all be at least 1."
            )
        block_nbytes = round_up(block_nbytes, PAGE)
        part_nbytes = block_nbytes * -(-queue_depth // num_threads)
        self._folder = PrivateFolder(Path(folder), rank=rank, job=job)
        try:
            is_direct = _takes_direct(self._folder, uses_direct)
            self._way = Way(is_direct, checks_sums, block_nbytes, part_nbytes)
            self._threads = IoThreads(
                num_threads, name=f"shoal-disk-{rank}", bounce_nbytes=part_nbytes, max_pending=max_pending
            )
        except BaseException:
            self._folder.remove()
            raise
        self._lock = threading.Lock()  # guards the counts and the extents
        self._extents: dict[str, FileExtent] = {}
        self._num_made = 0
        self._promised_nbytes = 0
        self.traffic = Traffic()
        # Also at the interpreter's end, and when the last reference goes.
        self._finalizer = weakref.finalize(self, _close, self._threads, self._folder, os.getpid())

    @property
    def path(self) -> Path:
        """The private folder."""
        return self._folder.path

    @property
    def is_direct(self) -> bool:
        return self._way.is_direct

    @property
    def available_nbytes(self) -> int:
        """Bytes that the file system has free beyond what was reserved and is not allocated yet."""
        return max(0, free_nbytes(str(self.path)) - self._promised_nbytes)

    def memory(self, nbytes: int, *, is_pinned: bool) -> torch.Tensor:
        """Host memory that is read and written where it lies. Shape: [nbytes], uint8; the values are arbitrary."""
        return aligned_empty(nbytes, is_pinned=is_pinned)

    def reserve(self, nbytes: int, *, num_ranks: int = 1) -> None:
        """Make sure that ``nbytes`` more will fit; allocations use up what was reserved. Writes nothing.

        Args:
            num_ranks: that reserve as much on the same disk.

        Raises: OutOfMemoryError: less is free, with what is needed and what is available.
        """
        available = self.available_nbytes
        if nbytes * num_ranks > available:
            raise no_room(
                nbytes * num_ranks,
                available,
                where=str(self._folder.parent),
                what="the disk has too little room for the state to be offloaded"
                + (f" by {num_ranks} ranks" if num_ranks > 1 else ""),
            )
        with self._lock:
            self._promised_nbytes += nbytes

    def allocate(self, name: str, nbytes: int) -> FileExtent:
        """Room for ``nbytes``, taken on the disk at once, so that a later write finds it.

        Raises: UsageError: the name is taken, or the tier closed. OutOfMemoryError: no room; nothing is left behind.
            TierError: the disk fails.
        """
        with self._lock:
            if name in self._extents or nbytes < 0 or not self._finalizer.alive:
                raise UsageError(
                    f"no extent {name!r} of {nbytes} bytes can be made: the name is taken, the size negative, or "
                    "the tier closed.",
                    where=str(self.path),
                    do="free the old one first.",
                )
            file_name = f"extent-{self._num_made:04}.bin"
            path = str(self.path / file_name)
            file_nbytes = round_up(nbytes, PAGE)
            try:
                fd = self._folder.make(file_name)
                try:
                    if file_nbytes:
                        os.posix_fallocate(fd, 0, file_nbytes)
                    status = os.fstat(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                self._folder.unlink(file_name)
                raise failed(error, f"making room for {name!r}", path=path, start=0, nbytes=file_nbytes) from error
            self._num_made += 1
            extent = FileExtent(name, nbytes, path, file_name, (status.st_dev, status.st_ino))
            self._extents[name] = extent
            self._promised_nbytes = max(0, self._promised_nbytes - file_nbytes)
        return extent

    def free(self, extent: FileExtent) -> None:
        """Give an extent's room back. Order: blocks the host until its reads and writes are done."""
        self._own(extent)
        extent.is_free = True
        self._threads.wait_idle(extent)
        self._folder.unlink(extent.file_name)
        with self._lock:
            del self._extents[extent.name]

    def write(self, extent: FileExtent, tensor: torch.Tensor, offset: int = 0) -> Ticket:
        """Store a tensor's bytes at ``offset`` of the extent.

        Args:
            tensor: in host memory, contiguous, of any shape and dtype. Where it begins on a page (and ``offset`` is a
                multiple of 4096) it is read where it lies, otherwise it is copied part by part.
            offset: in bytes.

        Raises: UsageError: the tensor is elsewhere or too long, or the tier closed.
        Order: returns at once, unless too much is pending. Reads and writes of the same bytes keep their order.
        """
        return self._submit(extent, tensor, offset, is_write=True)

    def read(self, extent: FileExtent, tensor: torch.Tensor, offset: int = 0) -> Ticket:
        """Fetch bytes at ``offset`` of the extent into a tensor. Arguments, errors and order: see ``write``.

        What was never written is an error of the ticket, never zeros; where a write failed, it is that write's.
        """
        return self._submit(extent, tensor, offset, is_write=False)

    def drain(self) -> None:
        """Block the host until no read or write is pending. Their tickets raise their errors."""
        self._threads.wait_idle()

    def close(self) -> None:
        """Stop the threads and remove the files. Idempotent. What is pending fails: ``drain()`` first if it matters."""
        self._finalizer()

    def _submit(self, extent: FileExtent, tensor: torch.Tensor, offset: int, *, is_write: bool) -> Ticket:
        self._own(extent)
        if offset < 0 or offset + tensor.nbytes > extent.nbytes:
            raise UsageError(
                f"{tensor.nbytes} bytes at offset {offset} are not inside {extent.name!r}, which has {extent.nbytes}.",
                do="allocate a larger extent, or move a smaller tensor.",
            )
        start = self._prepare(extent, tensor, offset, is_write=is_write)
        if is_write:
            waited = host_transfer(f"disk write of {extent.name!r}", reads=[tensor])
        else:
            waited = host_transfer(f"disk read of {extent.name!r}", writes=[tensor])
        ticket = start()
        ticket.on_waited = waited
        return ticket

    def _prepare(
        self, extent: FileExtent, tensor: torch.Tensor, offset: int, *, is_write: bool
    ) -> Callable[[], Ticket]:
        """What starts a transfer. The tensor's address is taken now, before the stream checker counts it as in use."""
        way, open_file = self._way, self._folder.open
        return partial(
            self._threads.submit,
            DiskTransfer(extent, tensor, offset, is_write=is_write, way=way, open_file=open_file, traffic=self.traffic),
        )

    def _own(self, extent: FileExtent) -> None:
        if self._extents.get(extent.name) is not extent or extent.is_free:
            raise UsageError(f"{extent.name!r} is not an extent of this tier, or was freed.", where=str(self.path))


def _close(threads: IoThreads, folder: PrivateFolder, pid: int) -> None:
    if os.getpid() != pid:
        return  # forked: threads and files are the parent's
    try:
        threads.close()
    finally:
        folder.remove()


def _takes_direct(folder: PrivateFolder, wish: bool | Literal["auto"]) -> bool:
    """Write and read a page directly, if that is wished for.

    Raises: TierError: it must be, and cannot. OutOfMemoryError: there is no room for a page.
    """
    if wish is False:
        return False
    page = aligned_empty(PAGE).fill_(7).numpy().data
    back = aligned_empty(PAGE).numpy().data
    try:
        fd = folder.make("probe", os.O_DIRECT)
        try:
            is_same = os.pwritev(fd, [page], 0) == os.preadv(fd, [back], 0) == PAGE and page == back
        finally:
            os.close(fd)
        refusal = "" if is_same else "a page came back changed"
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise failed(
                error, "trying direct access", path=str(folder.path / "probe"), start=0, nbytes=PAGE
            ) from error
        refusal = error.strerror or str(error)
    finally:
        folder.unlink("probe")
    if refusal and wish is True:
        raise TierError(
            f"the file system refuses direct access (O_DIRECT): {refusal}.",
            where=str(folder.parent),
            do="let uses_direct be 'auto', or name a folder on a local disk (ext4, xfs).",
            code="tier-no-direct",
        )
    if refusal:
        logger.info(
            "%s refuses direct access (O_DIRECT: %s); state is read and written through the page cache.",
            folder.parent,
            refusal,
        )
    return not refusal


class UnwrittenDisk(DiskTier):
    """The disk of a dry run: extents without files, whose reads and writes take simulated time and move nothing."""

    def __init__(self) -> None:
        self._extents: dict[str, FileExtent] = {}
        self.traffic = Traffic()

    def memory(self, nbytes: int, *, is_pinned: bool) -> torch.Tensor:
        return host_memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"), is_pinned=is_pinned)

    def reserve(self, nbytes: int, *, num_ranks: int = 1) -> None:
        pass

    def allocate(self, name: str, nbytes: int) -> FileExtent:
        extent = self._extents[name] = FileExtent(name, nbytes, "", "", (0, 0))
        return extent

    def free(self, extent: FileExtent) -> None:
        self._own(extent)
        extent.is_free = True
        del self._extents[extent.name]

    def drain(self) -> None:
        pass

    def close(self) -> None:
        self._extents.clear()

    def _prepare(
        self, extent: FileExtent, tensor: torch.Tensor, offset: int, *, is_write: bool
    ) -> Callable[[], Ticket]:
        self.traffic.add(tensor.nbytes, is_write=is_write)
        return _TicketOfNothing


class _TicketOfNothing(Ticket):
    """Of a simulated transfer, which is done when the host has waited for it."""

    def wait(self, timeout_seconds: float | None = None) -> None:
        self.finish(None)
        super().wait()
