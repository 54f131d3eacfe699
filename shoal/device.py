"""The accelerator behind one seam:

streams, memory counters, scalar reads. Nothing above this floor names ``torch.cuda``.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shoal.host_heap import HostHeap, resident_nbytes
from shoal.streams import host_memory, is_accelerator, is_in_host_memory, simulation

logger = logging.getLogger("shoal")


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a tensor of a dry run, which has a shape but no values."""
    return isinstance(tensor, FakeTensor)


def fake_tensors(**options: Any) -> FakeTensorMode:
    """A mode in which tensors are fake, and ``nn.Module.to`` converts modules of them.

    torch's own mode keeps weak references to some results of operators, and ``nn.Module.to`` refuses tensors that have
    one.
    """
    mode = FakeTensorMode(**options)
    converter: Any = mode.fake_tensor_converter
    keep = converter.set_tensor_memo

    def keep_of_real(tensor: torch.Tensor, fake: FakeTensor) -> None:
        if tensor.device.type != "meta":  # a meta tensor is a result: no operator takes it, so it is converted once
            keep(tensor, fake)

    converter.set_tensor_memo = keep_of_real
    return mode


def numel_at_once(tensor: torch.Tensor, numel: int) -> int:
    """The elements of a tensor that several passes process at once: on a CPU ``numel``, so that what lies between two
    passes stays in the cache; elsewhere all.
    """
    return numel if tensor.device.type == "cpu" and not is_fake(tensor) else max(tensor.numel(), 1)


def read_vector(tensor: torch.Tensor, *, when_fake: float) -> list[float]:
    """The values of a 1-D tensor, or ``when_fake`` for each in a dry run.

    Order: blocks the host until they are there.
    """
    if is_fake(tensor):
        if (accelerator := simulation()) is not None:
            accelerator.read_on_host(tensor)
        return [when_fake] * tensor.numel()
    return [float(value) for value in tensor.tolist()]


def numbers_on(device: torch.device, numbers: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """``numbers`` on ``device``. The host does not wait for it, as in ``torch.tensor(numbers, device=device)``."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if it is in host memory, or a copy there. Order: the copy blocks the host until it is there."""
    if is_in_host_memory(tensor):
        return tensor
    return host_memory(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"), is_pinned=False).copy_(tensor)


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """The compute capability of the NVIDIA GPU that holds ``tensor``; (0, 0): none does, or the tensor is fake."""
    if not tensor.is_cuda or is_fake(tensor) or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(tensor.device)


def pci_addresses() -> list[str]:
    """Of the GPUs that this process sees, as the kernel writes them: ``0000:3b:00.0``."""
    found: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{each.pci_domain_id:04x}:{each.pci_bus_id:02x}:{each.pci_device_id:02x}.0" for each in found]


@dataclass(frozen=True)
class MemoryReading:
    """What the allocator says, in bytes. On CPU ``allocated`` is the resident set of the process."""

    allocated: int
    peak: int
    source: str


class Device:
    """One device of this rank. Every method is a no-op, or the plain thing, on CPU."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.is_cuda = device.type == "cuda"
        self.heap: HostHeap | None = None  # where this process keeps what it frees

    @property
    def step_block_numel(self) -> int | None:
        """Elements of the optimizer step that are done together; None: no limit.

        On CPU the cast of the gradient, the update and the cast of the parameter of one block stay in cache: the step
        moves each byte through memory once. A GPU wants one large launch instead.
        """
        return None if is_accelerator(self.torch_device) else 512 * 1024

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)
        elif (accelerator := simulation()) is not None:
            accelerator.synchronize()

    def give_cache_back(self) -> None:
        """Give the memory that the allocator keeps for later, and nothing uses, back to the driver or the kernel."""
        if self.is_cuda:
            with torch.cuda.device(self.torch_device):
                torch.cuda.empty_cache()
        elif self.heap is not None:
            self.heap.give_back()

    def use(self) -> AbstractContextManager[object]:
        """Make this the current device inside the block."""
        return torch.cuda.device(self.torch_device) if self.is_cuda else nullcontext()

    def memory(self) -> MemoryReading:
        if self.is_cuda:
            return MemoryReading(
                torch.cuda.memory_allocated(self.torch_device),
                torch.cuda.max_memory_allocated(self.torch_device),
                "CUDA caching allocator",
            )
        resident = resident_nbytes()
        peak = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return MemoryReading(resident, peak, "resident set of the process")

    @property
    def name(self) -> str:
        """What the driver calls the device: "NVIDIA H100 80GB HBM3"; "cpu"."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else self.torch_device.type

    @property
    def total_nbytes(self) -> int:
        """Bytes of the accelerator's memory."""
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    @property
    def num_multiprocessors(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).multi_processor_count)

    @property
    def capability(self) -> int:
        """NVIDIA's compute capability, its major number: 8 of an A100, 9 of an H100."""
        return int(torch.cuda.get_device_capability(self.torch_device)[0])

    def free_nbytes(self) -> int:
        """Bytes of the accelerator that are free, and those that this process's allocator keeps without using."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(free) + int(kept)

    def generator_states(self) -> dict[str, torch.Tensor]:
        """The states of this device's generators, without the CPU's. Each 1-D, uint8."""
        return {"cuda": torch.cuda.get_rng_state(self.torch_device)} if self.is_cuda else {}

    def set_generator_states(self, states: dict[str, torch.Tensor]) -> None:
        if self.is_cuda and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.torch_device)

    def allocator_segments(self) -> list[dict[str, Any]]:
        """The segments of this process's allocator, with their blocks; none on a CPU."""
        return list(torch.cuda.memory_snapshot()) if self.is_cuda else []

    @staticmethod
    def is_out_of_memory(error: BaseException) -> bool:
        """True if this error came from an allocator that has no memory left."""
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def num_accelerators() -> int:
    """That this process sees."""
    return torch.cuda.device_count()


def host_empty(numel: int, dtype: torch.dtype, device: torch.device, *, is_pinned: bool = True) -> torch.Tensor:
    """Host memory that copies to and from ``device`` reach fast. Shape: [numel].

    Where the system refuses to page-lock so much, one line says so and the memory is an ordinary one.
    """
    if not is_pinned or device.type != "cuda":
        return host_memory(torch.empty(numel, dtype=dtype, device="cpu"), is_pinned=is_pinned)
    try:
        return locked_empty(numel * dtype.itemsize, device).view(dtype)
    except (RuntimeError, OSError) as error:
        _warn_unpinned((str(error).strip() or type(error).__name__).splitlines()[0])
        return torch.empty(numel, dtype=dtype, device="cpu")


def locked_empty(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Host memory of this size that is locked for ``device``; None: the current one. Shape: [nbytes], uint8.

    Raises: RuntimeError, OSError: the system refuses.
    """
    # torch's allocator rounds up to a power of two, and keeps what is freed for later.
    if nbytes >= _MIN_LOCKED and nbytes & (nbytes - 1) and (device is not None or torch.cuda.is_available()):
        return _LockedMemory.allocate(nbytes, device or torch.device("cuda", torch.cuda.current_device()))
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")


_MIN_LOCKED = 1024 * 1024  # bytes: below, what rounding up costs is not worth a call of the driver


class _LockedMemory(mmap.mmap):
    """Pages of the process that are locked for an accelerator until the last tensor of them is gone."""

    unused: ClassVar[list[_LockedMemory]] = []  # still locked
    address = 0  # 0: not locked
    device: torch.device
    pid: int

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> torch.Tensor:
        """Shape: [nbytes], uint8. Raises: RuntimeError, OSError: the system refuses."""
        cls.unlock_unused()
        memory = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork would make the next write here go to a copy of the page, which the accelerator does not know.
        memory.madvise(mmap.MADV_DONTFORK)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), nbytes, 1))
        if code:
            with suppress(Exception):
                # The next kernel reports the error again, and clears it.
                torch.zeros(1, dtype=torch.float32, device=device)
            raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed with error {code}")
        memory.address, memory.device, memory.pid = flat.data_ptr(), device, os.getpid()
        return flat

    @classmethod
    def unlock_unused(cls) -> None:
        """Unlock the memory of tensors that are gone, unless this thread is capturing a CUDA graph: garbage may be
        collected then, and to wait for the device would end the capture. The next call unlocks it.
        """
        for memory in list(cls.unused):
            with torch.cuda.device(memory.device):
                if torch.cuda.is_current_stream_capturing():
                    return
                torch.cuda.synchronize()  # copies may still be under way
                with suppress(ValueError):  # another thread unlocks it
                    cls.unused.remove(memory)
                    if memory.pid == os.getpid():
                        torch.cuda.cudart().cudaHostUnregister(memory.address)

    def __del__(self) -> None:
        if self.address and self.pid == os.getpid():
            self.unused.append(self)
            with suppress(Exception):  # at the end of the process the driver is gone
                self.unlock_unused()


@cache
def _warn_unpinned(reason: str) -> None:
    logger.warning(
        "host memory could not be page-locked, so copies to and from the accelerator block the host and are slower: %s."
        ' Raise the limit of locked memory (ulimit -l), or set "pin_memory": false.',
        reason,
    )


def in_backward() -> bool:
    """True if autograd is running a backward pass in this thread."""
    return backward_pass() is not None


def in_transform() -> bool:
    """True inside of torch.func's transforms (``grad``, ``vmap``, ...), which differentiate by themselves."""
    return torch._C._are_functorch_transforms_active()


def backward_pass() -> int | None:
    """The backward pass that runs in this thread, by number; one that runs inside another has its own."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else int(number)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback()`` when the backward pass that is running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
