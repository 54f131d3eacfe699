"""``deepspeed.accelerator``: the one accelerator of this process, whose methods call torch's module of the device."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch

from shoal.compat import op_builders
from shoal.compat.absent import not_built
from shoal.compat.environment import local_size
from shoal.errors import UsageError
from shoal.host_heap import resident_nbytes
from shoal.processor import num_cores

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]
_CPU_ONLY_BACKEND, _CUDA_BACKEND = "gloo", "nccl"


def _nothing() -> None:
    return None


def _peak() -> int:
    return max(resident_nbytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _of_module(name: str, on_cpu: Callable[[], Any]) -> Callable[..., Any]:
    """A method that calls the function of torch's module of the device; on the CPU it returns ``on_cpu()``."""

    def call(self: DeepSpeedAccelerator, device_index: int | None = None) -> Any:
        return on_cpu() if self._is_cpu else getattr(self._module, name)(device_index)

    call.__name__ = call.__qualname__ = name
    return call


def _passed_on(name: str, on_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls torch's function, or class, of that name with its own arguments; on the CPU ``on_cpu``."""

    def call(self: DeepSpeedAccelerator, *args: Any, **kwargs: Any) -> Any:
        return (on_cpu if self._is_cpu else getattr(self._module, name))(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


class DeepSpeedAccelerator:
    """One kind of device: "cuda", "cpu", or another of torch's device types."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._communication_backend_name = _CPU_ONLY_BACKEND if kind == "cpu" else _CUDA_BACKEND
        self._compile_backend = "inductor"

    def __repr__(self) -> str:
        return f"accelerator {self._name!r}"

    @property
    def _module(self) -> ModuleType:
        module: ModuleType = torch.get_device_module(self._name)
        return module

    @property
    def _is_cpu(self) -> bool:
        return self._name == "cpu"

    # which device

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._is_cpu else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which this device is the current one."""
        return nullcontext() if self._is_cpu else self._module.device(device_index)

    def set_device(self, device_index: Any) -> None:
        if not self._is_cpu:
            torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int | str:
        return "cpu" if self._is_cpu else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return "cpu" if self._is_cpu else f"{self._name}:{torch.accelerator.current_device_index()}"

    def device_count(self) -> int:
        """Visible devices; on CPU the ranks that it makes sense to start: LOCAL_SIZE where it is set, or one a core."""
        if self._is_cpu:
            ranks = local_size()
            if ranks is not None:
                return ranks
            return num_cores()
        return torch.accelerator.device_count()

    def is_available(self) -> bool:
        return True

    synchronize = _of_module("synchronize", _nothing)

    def is_synchronized_device(self) -> bool:
        return self._is_cpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    # random numbers

    def random(self) -> ModuleType:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._is_cpu:
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, *self._index(device_index))

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if self._is_cpu:
            return torch.get_rng_state()
        state: torch.Tensor = self._module.get_rng_state(*self._index(device_index))
        return state

    manual_seed = _passed_on("manual_seed", torch.manual_seed)
    manual_seed_all = _passed_on("manual_seed_all", torch.manual_seed)
    initial_seed = _passed_on("initial_seed", torch.initial_seed)

    def default_generator(self, device_index: int) -> torch.Generator:
        generator: torch.Generator = (
            torch.default_generator if self._is_cpu else self._module.default_generators[device_index]
        )
        return generator

    # streams and events

    @property
    def Stream(self) -> Any:
        return None if self._is_cpu else self._module.Stream

    @property
    def Event(self) -> Any:
        return None if self._is_cpu else self._module.Event

    stream = _passed_on("stream", nullcontext)
    current_stream = _of_module("current_stream", _nothing)
    default_stream = _of_module("default_stream", _nothing)

    is_current_stream_capturing = _passed_on("is_current_stream_capturing", bool)
    create_graph = _passed_on("CUDAGraph", _nothing)

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return nullcontext() if self._is_cpu else self._module.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        if not self._is_cpu:
            graph.replay()

    # memory, in bytes; on CPU what the process has resident

    empty_cache = _passed_on("empty_cache", _nothing)
    memory_allocated = _of_module("memory_allocated", resident_nbytes)
    max_memory_allocated = _of_module("max_memory_allocated", _peak)
    memory_reserved = memory_cached = _of_module("memory_reserved", resident_nbytes)
    max_memory_reserved = max_memory_cached = _of_module("max_memory_reserved", _peak)
    memory_stats = _of_module("memory_stats", dict)
    reset_peak_memory_stats = _of_module("reset_peak_memory_stats", _nothing)
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        if self._is_cpu:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        index = self.current_device() if device_index is None else device_index
        return int(self._module.get_device_properties(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        if self._is_cpu:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return self.total_memory(device_index) - int(self.memory_allocated(device_index))

    # formats

    def is_bf16_supported(self) -> bool:
        return self._is_cpu or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """True if the device, or the processor, computes in fp16. (Training in fp16 works in any case, slowly.)"""
        return not self._is_cpu or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def is_fp64_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        supported = [torch.float]
        if self.is_fp16_supported():
            supported.append(torch.half)
        if self.is_bf16_supported():
            supported.append(torch.bfloat16)
        return supported

    def is_triton_supported(self) -> bool:
        return not self._is_cpu

    # tensors

    def _typed(self, dtype: torch.dtype) -> Any:
        def make(*args: Any) -> torch.Tensor:
            if len(args) == 1 and not isinstance(args[0], int):
                return torch.tensor(args[0], dtype=dtype, device=self.current_device_name())
            return torch.empty(*args, dtype=dtype, device=self.current_device_name())

        return make

    BFloat16Tensor = property(lambda self: self._typed(torch.bfloat16))
    ByteTensor = property(lambda self: self._typed(torch.uint8))
    DoubleTensor = property(lambda self: self._typed(torch.float64))
    FloatTensor = property(lambda self: self._typed(torch.float32))
    HalfTensor = property(lambda self: self._typed(torch.float16))
    IntTensor = property(lambda self: self._typed(torch.int32))
    LongTensor = property(lambda self: self._typed(torch.int64))

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, align_bytes: int = 1
    ) -> torch.Tensor:
        return tensor if self._is_cpu else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._is_cpu or tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """No effect: torch gives pinned memory back with its last tensor."""

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    # profiler ranges

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return None if self._is_cpu else self._module.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> Any:
        return None if self._is_cpu else self._module.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> Any:
        return callback()

    # other

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"]

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        return vars(op_builders).get(class_name, op_builders.BUILDERS["NotImplementedBuilder"])

    def create_op_builder(self, class_name: str) -> Any:
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def build_extension(self) -> Any:
        raise not_built("get_accelerator().build_extension()", "nothing of Shoal is compiled at run time.")

    @staticmethod
    def _index(device_index: int | None) -> tuple[int, ...]:
        return () if device_index is None else (device_index,)


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """What torch finds, or the CPU. Found once."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return DeepSpeedAccelerator(device.type if device is not None else "cpu")


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Raises: UsageError: it is not the accelerator that torch computes on."""
    if accel_obj is not get_accelerator():
        raise UsageError(
            f"set_accelerator({accel_obj!r}): Shoal computes on torch's own accelerator, {get_accelerator()!r}.",
            do="leave it out; hide the devices (CUDA_VISIBLE_DEVICES=) to compute on the CPU.",
            code="accelerator",
        )


def is_current_accelerator_supported() -> bool:
    return get_accelerator().device_name() in SUPPORTED_ACCELERATOR_LIST
