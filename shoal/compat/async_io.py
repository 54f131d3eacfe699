"""DeepSpeed's handles for files and pinned memory: ``aio_handle`` and ``pin_handle``.

    handle.async_pwrite(tensor, "file")     threads write parts of the tensor's bytes
    handle.wait()                           1: the number of requests that have ended

Each request opens its file and closes it.
"""

from __future__ import annotations

import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shoal.errors import UsageError

ALIGNMENT = 4096  # bytes


class AsyncIoError(UsageError, OSError):
    """A request that cannot be carried out."""

    code = "async-io"


class PinHandle:
    """Allocates host memory, page-locked where there is an accelerator."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A 1-D tensor of ``num_elem`` elements of the example's dtype; zeros. It is kept until it is freed."""
        tensor = torch.zeros(
            num_elem, dtype=example_tensor.dtype, pin_memory=torch.accelerator.is_available(), device="cpu"
        )
        self._tensors[tensor.data_ptr()] = tensor
        return tensor

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Forget a tensor that this handle has made. Returns: True if it was one."""
        return self.free_cpu_locked_tensor_by_ptr(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """As ``free_cpu_locked_tensor``, by ``data_ptr()``."""
        return self._tensors.pop(address, None) is not None

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """True if it is page-locked, or made by this handle."""
        storage = buffer.untyped_storage().data_ptr()
        return buffer.is_pinned() or any(t.untyped_storage().data_ptr() == storage for t in self._tensors.values())


class AsyncIoHandle(PinHandle):
    """Reads and writes contiguous tensors, from any offset of a file.

    Args:
        block_size, queue_depth, single_submit, overlap_events: kept, without effect.
        intra_op_parallelism: threads that share one request.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        super().__init__()
        if intra_op_parallelism < 1:
            raise AsyncIoError(f"intra_op_parallelism is {intra_op_parallelism}.", do="give at least 1.")
        self._settings = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._threads = ThreadPoolExecutor(intra_op_parallelism, thread_name_prefix="shoal-aio")
        weakref.finalize(self, self._threads.shutdown, wait=False)
        self._pending: list[_Request] = []

    def get_block_size(self) -> int:
        return self._settings[0]

    def get_queue_depth(self) -> int:
        return self._settings[1]

    def get_single_submit(self) -> bool:
        return self._settings[2]

    def get_overlap_events(self) -> bool:
        return self._settings[3]

    def get_intra_op_parallelism(self) -> int:
        return self._settings[4]

    def get_alignment(self) -> int:
        """Bytes that sizes and offsets need not be a multiple of: requests are not aligned."""
        return ALIGNMENT

    # requests

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        """Fill ``buffer`` from a file.

        Args:
            validate: no effect.
            is_async: return 0 at once; ``wait()`` waits.

        Returns: the number of requests that have ended: 1, or 0.
        Raises: AsyncIoError: the file cannot be opened or is too short, or the tensor is not contiguous.
        """
        if os.path.exists(filename) and os.path.getsize(filename) < file_offset + buffer.nbytes:
            raise AsyncIoError(
                f"{filename!r} has {os.path.getsize(filename)} bytes, and bytes {file_offset} to"
                f" {file_offset + buffer.nbytes} were requested.",
                do="pass a tensor that is not larger than the rest of the file.",
            )
        return self._submit(buffer, filename, file_offset, is_write=False, is_async=is_async)

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        """Write ``buffer`` to a file, which is made if it is not there. Arguments and results: as ``pread``."""
        return self._submit(buffer, filename, file_offset, is_write=True, is_async=is_async)

    def read(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """``sync_pread`` with another order of arguments."""
        return self.pread(buffer, filename, validate, False, file_offset)

    def write(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """``sync_pwrite`` with another order of arguments."""
        return self.pwrite(buffer, filename, validate, False, file_offset)

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pwrite(buffer, filename, False, True, file_offset)

    def wait(self) -> int:
        """Wait for the requests that were started by ``async_``. Returns: their number."""
        pending, self._pending = self._pending, []
        for request in pending:
            request.wait()
        return len(pending)

    def _submit(self, buffer: torch.Tensor, filename: str, offset: int, *, is_write: bool, is_async: bool) -> int:
        if not buffer.is_contiguous():
            raise AsyncIoError(
                f"the tensor of shape {tuple(buffer.shape)} is not contiguous.", do="pass .contiguous()."
            )
        request = _Request(buffer, filename, offset, is_write=is_write)
        request.start(self._threads, self.get_intra_op_parallelism())
        if is_async:
            self._pending.append(request)
            return 0
        request.wait()
        return 1


class _Request:
    """One tensor to or from one file."""

    def __init__(self, buffer: torch.Tensor, filename: str, offset: int, *, is_write: bool) -> None:
        self._buffer, self._is_write, self._offset = buffer, is_write, offset
        is_read_to_device = not is_write and buffer.device.type != "cpu"
        on_host = torch.empty_like(buffer, device="cpu") if is_read_to_device else buffer.detach().cpu()
        self._on_host = on_host.reshape(-1)
        plain: Any = self._on_host.view(torch.uint8).numpy() if buffer.numel() else b""
        self._bytes = memoryview(plain)
        flags = os.O_WRONLY | os.O_CREAT if is_write else os.O_RDONLY
        try:
            self._file = os.open(filename, flags, 0o644)
        except OSError as error:
            raise AsyncIoError(f"{filename!r} cannot be opened: {error.strerror}.", do="give another path.") from error
        self._parts: list[Future[None]] = []

    def start(self, threads: ThreadPoolExecutor, num_parts: int) -> None:
        size = -(-len(self._bytes) // num_parts)
        starts = range(0, len(self._bytes), size) if size else ()
        self._parts = [threads.submit(self._transfer, start, min(start + size, len(self._bytes))) for start in starts]

    def _transfer(self, start: int, stop: int) -> None:
        while start < stop:
            part = self._bytes[start:stop]
            at = self._offset + start
            done = os.pwrite(self._file, part, at) if self._is_write else os.preadv(self._file, [part], at)
            if not done:
                raise AsyncIoError("the file ended before the tensor was full.", do="keep the file until wait().")
            start += done

    def wait(self) -> None:
        try:
            for part in self._parts:
                part.result()
        finally:
            os.close(self._file)
        if not self._is_write and self._buffer.device.type != "cpu":
            self._buffer.copy_(self._on_host.view(self._buffer.shape))
