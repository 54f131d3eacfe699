"""GPUs whose memory is the CPU's: each storage has a label, the device that it is on, and what CUDA refuses raises.

    with labelled_gpus():
        torch.zeros(2, device="cuda").device               # cuda:1
        torch.zeros(2, device="cuda") + torch.zeros(2)     # Expected all tensors to be on the same device

Operators compute on the CPU at once, so streams and events do nothing here: the stream check is for those. Ranks use
GPU 1 of 2, and a new thread is on GPU 0, as with CUDA: an operator of a thread that was not put on its device raises.
The GPUs draw random numbers from a generator of their own. Kernels of Triton are not used.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

import shoal.kernels.use
from shoal.simulation.modes import INDEXED, effects_of, needs_values, tensors_of
from shoal.streams import TorchStreams

GPU = torch.device("cuda", 1)
HOST = torch.device("cpu")
# Of a tensor that C++ made from nothing: it asked for the true device of another tensor, whose label it does not see.
_EITHER = torch.device("meta")
_Base: Any = torch._C.TensorBase

_MIX_DEVICES = {"copy_", "_to_copy", "_foreach_copy_", "set_", "lift_fresh"}
_TAKE_HOST_NUMBERS = {"where", "masked_fill", "masked_fill_", "fill_", "full_like", "index_fill", "index_fill_"}


class _Thread(threading.local):
    index = 0  # of the current device
    num_calls = 0  # of functions of Python that make tensors, under way


class _State:
    """Of one ``labelled_gpus`` block."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.labels: dict[int, tuple[StorageWeakRef, torch.device]] = {}  # by storage: those that are not the host's
        self.locked: dict[int, StorageWeakRef] = {}  # by storage: that torch allocated page-locked
        self.generators: dict[int, torch.device] = {}
        self.random = torch.Generator().manual_seed(1).get_state()
        self.sync_mode: Any = 0


_thread = _Thread()
_state = _State()


# labels


def _is_labelled(tensor: torch.Tensor) -> bool:
    """True for a tensor that is memory: no fake tensor, and no subclass that consists of others."""
    dispatch = getattr(type(tensor), "__torch_dispatch__", torch._C._disabled_torch_dispatch_impl)
    is_memory = dispatch is torch._C._disabled_torch_dispatch_impl and not isinstance(tensor, FakeTensor)
    return is_memory and _Base.device.__get__(tensor).type == "cpu"


def _storages(tensor: torch.Tensor) -> list[Any]:
    if tensor.layout is torch.sparse_coo:
        return [_Base.untyped_storage(tensor._values())]
    return [_Base.untyped_storage(tensor)] if tensor.layout is torch.strided else []


def _label(tensor: torch.Tensor) -> torch.device:
    if not _is_labelled(tensor):
        return _Base.device.__get__(tensor)  # type: ignore[no-any-return]
    return next((_label_of_storage(storage) for storage in _storages(tensor)), HOST)


def _label_of_storage(storage: Any) -> torch.device:
    known = _state.labels.get(storage._cdata)
    return HOST if known is None or known[0].expired() else known[1]


def _shown(tensor: torch.Tensor) -> torch.device:
    found = _label(tensor)
    return GPU if found == _EITHER and _is_labelled(tensor) else found


def _set_label(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    for storage in _storages(tensor):
        with _state.lock:
            if device == HOST:
                _state.labels.pop(storage._cdata, None)
            else:
                _state.labels[storage._cdata] = StorageWeakRef(storage), device
    return tensor


def _allocated_nbytes(*_: Any) -> int:
    with _state.lock:
        refs = [ref for ref, device in _state.labels.values() if device.type == "cuda" and not ref.expired()]
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in refs]
    return sum(-(-storage.nbytes() // 512) * 512 for storage in storages if storage is not None)


def _resolved(device: Any) -> torch.device | None:
    if device is None:
        return None
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device("cuda", _thread.index) if found == torch.device("cuda") else found


def _place() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None and "/shoal/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


# operators


class _LabelledOperators(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = list(tensors_of([*args, *kwargs.values()]))
        asked = _resolved(kwargs.get("device"))
        is_elsewhere = asked is not None and asked.type not in ("cpu", "cuda")
        if func.namespace == "prim" or is_elsewhere or not all(map(_is_labelled, given)):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if asked is not None:
            kwargs["device"] = HOST
        is_locked = bool(kwargs.pop("pin_memory", False))
        targets = _labels_of_lists(func, name, args) if name.startswith("_foreach_") else []
        target = targets[0] if targets else _common_label(func, name, args, given)
        if asked is not None and (asked != HOST or _thread.num_calls):
            target = asked
        elif asked is not None and not given:
            target = _EITHER
        generator = kwargs.get("generator")
        _check(func, name, args, kwargs, target, generator)
        is_random = torch.Tag.nondeterministic_seeded in func.tags and target.type == "cuda" and generator is None
        with _random_numbers_of_gpu() if is_random else nullcontext():
            result = func(*args, **kwargs)
        known = {storage._cdata for each in given for storage in _storages(each)}
        for index, made in enumerate(tensors_of(result)):
            if _is_labelled(made) and not any(storage._cdata in known for storage in _storages(made)):
                _set_label(made, targets[index] if targets else target)
                if is_locked:
                    _lock_pages(made)
        return result


def _common_label(func: Any, name: str, args: Any, given: list[torch.Tensor]) -> torch.device:
    """The device of an operator's results. Raises: RuntimeError: CUDA refuses these devices together."""
    if name.removeprefix("_foreach_") in _MIX_DEVICES:
        return _label(given[0]) if given else HOST
    checked = given
    if name in INDEXED:  # an index in host memory is copied
        indices = [index for index in tensors_of(args[1]) if _label(index) == HOST or _label(args[0]) == HOST]
        host_indices = {id(index) for index in indices if _label(index) == HOST}
        checked = [each for each in given if id(each) not in host_indices or each is args[0]]
    labels = [(each, _label(each)) for each in checked]
    devices = {device for _, device in labels if device != _EITHER}
    if len(devices) <= 1:
        return devices.pop() if devices else (_EITHER if labels else HOST)
    is_elementwise = torch.Tag.pointwise in func.tags or name.startswith("_foreach_")
    takes_numbers = is_elementwise or name in _TAKE_HOST_NUMBERS | INDEXED
    devices = {device for each, device in labels if device != _EITHER and (each.dim() or device != HOST)}
    written = [args[index] for index, each in enumerate(func._schema.arguments[: len(args)]) if _is_written(each)]
    is_moved = bool(devices) and any(_label(each) not in (_EITHER, *devices) for each in tensors_of(written))
    if len(devices) > 1 or not takes_numbers or is_moved:
        text = ", ".join(f"{tuple(each.shape)} on {device}" for each, device in labels)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {text}{_place()}")
    return devices.pop() if devices else GPU  # a number of each


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _labels_of_lists(func: Any, name: str, args: Any) -> list[torch.device]:
    """As ``_common_label``, of each element of lists: those of two devices are computed one after the other."""
    lists = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], torch.Tensor)]
    number = next((each for each in args[1:] if isinstance(each, torch.Tensor)), None)
    if number is not None and "scalars" in (each.name for each in func._schema.arguments):  # numbers of the host
        if _label(number).type == "cuda":
            raise RuntimeError(f"Expected scalars to be on CPU, got {_label(number)}{_place()}")
        number = None
    elif number is not None and _label(number) == HOST and not name.startswith("_foreach_add"):
        number = None  # is read as a number
    of_each = [[*each, *([] if number is None else [number])] for each in zip(*lists, strict=True)]
    if number is not None and number.dtype == lists[0][0].dtype and _label(number) != _label(lists[0][0]):
        raise RuntimeError(f"scalar tensor is expected to be on the same device, but {func} got it on {HOST}{_place()}")
    return [_common_label(func, name, (), each) for each in of_each]


def _check(func: Any, name: str, args: Any, kwargs: Any, target: torch.device, generator: Any) -> None:
    """Raises: RuntimeError: the thread is on another device, the generator too, or the host waits and must not."""
    if target.type == "cuda" and target.index != _thread.index:
        thread = threading.current_thread().name
        raise RuntimeError(f"thread {thread} is on device {_thread.index}, and {func} on {target}{_place()}")
    if generator is not None and target != _EITHER:
        kind = _state.generators.get(generator._cdata, HOST).type
        if kind != target.type:
            raise RuntimeError(f"Expected a '{target.type}' device type for generator but found '{kind}'{_place()}")
    if _state.sync_mode in (0, "default"):
        return
    if target.type == "cuda" and needs_values(func, effects_of(func), args, kwargs):
        _host_waits(str(func))
    if name == "copy_" and {_label(args[0]).type, _label(args[1]).type} == {"cpu", "cuda"}:
        host = args[0] if _label(args[0]) == HOST else args[1]
        is_free = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if not is_free or (host is args[0] and not _has_locked_pages(host)):
            _host_waits(f"{func} of {tuple(host.shape)}")


def _host_waits(what: str) -> None:
    if _state.sync_mode not in (0, "default"):
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}{_place()}")


@contextmanager
def _random_numbers_of_gpu() -> Iterator[None]:
    with _state.lock:
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(_state.random)
        try:
            yield
        finally:
            _state.random = torch.default_generator.get_state()
            torch.default_generator.set_state(before)


# tensors' methods, which do not look at labels


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        ctx.origin = _label(tensor), tensor.dtype
        return _copied(tensor, device, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _copied(gradient, *ctx.origin), None, None


@torch.no_grad()
def _copied(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    copied = torch.empty_like(tensor.detach(), dtype=dtype, device=device)
    return copied.copy_(tensor.detach())


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_labelled(self):
        return _Base.to(self, *args, **kwargs)
    rest = list(args)
    device, dtype = _resolved(kwargs.pop("device", None)), kwargs.pop("dtype", None)
    if rest and isinstance(rest[0], torch.Tensor):
        device, dtype = _shown(rest[0]), rest.pop(0).dtype
    elif rest and not isinstance(rest[0], torch.dtype):
        device = _resolved(rest.pop(0))
    if rest and isinstance(rest[0], torch.dtype | None):
        dtype = rest.pop(0)
    kwargs |= dict(zip(("non_blocking", "copy"), rest, strict=False))
    dtype = dtype or self.dtype
    if device is None or device == _shown(self):
        return _Base.to(self, dtype, **kwargs)
    if device.type == "meta":
        return _Base.to(self, device, dtype)
    if device == HOST and not kwargs.get("non_blocking"):
        _host_waits(".to() the host")
    return _Moved.apply(self, device, dtype)


def _numpy(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _label(self).type == "cuda":
        raise TypeError(f"can't convert cuda:1 device type tensor to numpy{_place()}")
    return _Base.numpy(self, *args, **kwargs)


def _pin_memory(self: Any, *_: Any) -> Any:
    if _label(self).type == "cuda":
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return _lock_pages(_copied(self, HOST, self.dtype))


def _lock_pages(tensor: torch.Tensor) -> torch.Tensor:
    for storage in _storages(tensor):
        _state.locked[storage._cdata] = StorageWeakRef(storage)
    return tensor


def _has_locked_pages(tensor: Any, *_: Any) -> bool:
    storage = _Base.untyped_storage(tensor)
    known = _state.locked.get(storage._cdata)
    address = storage.data_ptr()
    return (known is not None and not known.expired()) or any(first <= address < end for first, end in _Runtime.locked)


def _gradient(self: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return _Base.grad.__get__(self)


def _set_gradient(self: Any, value: Any) -> None:
    if value is not None and _is_labelled(self) and {_label(self), _label(value)} >= {HOST, GPU}:
        raise RuntimeError(
            f"assigned grad has data located on a different device: {_label(value)}, not {_label(self)}{_place()}"
        )
    _Base.grad.__set__(self, value)


def _from_python(maker: Any, *, has_values: bool) -> Any:
    """A function that makes tensors, told that Python called it. ``has_values``: it is as ``torch.tensor``."""

    def made(*args: Any, **kwargs: Any) -> Any:
        _thread.num_calls += 1
        try:
            if not has_values:
                return maker(*args, **kwargs)
            contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
            device = _resolved(kwargs.get("device") or (contexts[-1].device if contexts else HOST))
            assert device is not None
            if isinstance(args[0], torch.Tensor) and maker is not torch.tensor:
                return args[0].to(kwargs.get("device") or _shown(args[0]), kwargs.get("dtype") or args[0].dtype)
            if device.type != "cuda":
                return maker(*args, **kwargs)
            _host_waits("values of the host to a GPU")
            values = maker(*args, **{**kwargs, "device": HOST}).detach()
            return _set_label(values, device).requires_grad_(kwargs.get("requires_grad", False))
        finally:
            _thread.num_calls -= 1

    return made


def _on_its_device(maker: Any) -> Any:
    """A method as ``new_zeros``: without a device, on the tensor's own."""

    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        _thread.num_calls += 1
        try:
            return maker(self, *args, **{**kwargs, "device": kwargs.get("device") or _shown(self)})
        finally:
            _thread.num_calls -= 1

    return made


def _grouped(lists: Any, with_indices: bool = False) -> Any:
    groups: dict[Any, Any] = {}
    for place, first in enumerate(lists[0]):
        tensors, places = groups.setdefault((_shown(first), first.dtype), ([[] for _ in lists], []))
        for home, each in zip(tensors, lists, strict=True):
            if each:
                home.append(each[place])
        places.extend([place] * with_indices)
    return groups


# torch.cuda


class _Nothing:
    """A stream or an event: what is queued has run already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.stream_id = GPU, 0

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


class _Generator(torch._C.Generator):
    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls)
        _state.generators[made._cdata] = _resolved(device) or HOST  # type: ignore[attr-defined]
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass


class _Properties:
    total_memory, multi_processor_count, name, uuid, major, minor = 1 << 34, 100, "labelled", "labelled", 8, 0


class _Runtime:
    locked: ClassVar[list[tuple[int, int]]] = []

    def cudaHostRegister(self, address: int, nbytes: int, _: int) -> int:
        self.locked.append((address, address + nbytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked[:] = [each for each in self.locked if each[0] != address]
        return 0


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _set_index(device: Any) -> None:
    found = _resolved(device)
    assert found is not None
    assert found.index is not None
    _thread.index = found.index


@contextmanager
def _on_device(device: Any) -> Iterator[None]:
    before = _thread.index
    _set_index(before if device is None else device)
    try:
        yield
    finally:
        _thread.index = before


def _set_random_state(state: torch.Tensor, *_: Any) -> None:
    assert _label(state) == HOST
    _state.random = state.clone()


def _seed(seed: int) -> None:
    made = torch._C.Generator()
    _state.random = made.manual_seed(seed + 1).get_state()


def _of_other_device(function: Any) -> Any:
    def called(kind: str = "cuda", *args: Any) -> Any:
        return function({"cuda": "cpu", "cpu": "cuda"}.get(kind, kind), *args)

    return called


@contextmanager
def labelled_gpus() -> Iterator[None]:
    """Inside the block torch has two GPUs, and this thread is on number 1."""
    _state.__init__()  # type: ignore[misc]
    before = _thread.index
    with pytest.MonkeyPatch.context() as patch:
        _patch_tensors(patch)
        _patch_cuda(patch)
        run: Any = threading.Thread.run

        def labelled(self: Any) -> None:
            with _LabelledOperators():
                run(self)

        patch.setattr(threading.Thread, "run", labelled)
        torch._C._set_only_lift_cpu_tensors(True)
        _thread.index = 1
        try:
            with _LabelledOperators():
                yield
        finally:
            _thread.index = before
            torch._C._set_only_lift_cpu_tensors(False)


def _patch_tensors(patch: pytest.MonkeyPatch) -> None:
    array = torch.Tensor.__array__
    attributes: dict[str, Any] = {
        "device": property(_shown),
        "is_cuda": property(lambda self: _shown(self).type == "cuda"),
        "is_cpu": property(lambda self: _shown(self).type == "cpu"),
        "grad": property(_gradient, _set_gradient, _Base.grad.__delete__),
        "get_device": lambda self: -1 if _shown(self).index is None else _shown(self).index,
        "to": _to,
        "cpu": lambda self, *_, **__: _to(self, HOST),
        "cuda": lambda self, device=None, *_, **__: _to(self, "cuda" if device is None else device),
        "numpy": _numpy,
        "__array__": lambda self, dtype=None: (_numpy(self), array(self, dtype))[1],
        "pin_memory": _pin_memory,
        "is_pinned": _has_locked_pages,
        "record_stream": _nothing,
    }
    for name, value in attributes.items():
        patch.setattr(torch.Tensor, name, value, raising=False)
    true_device: Any = torch.UntypedStorage.device

    def device_of_storage(storage: Any) -> torch.device:
        found = _label_of_storage(storage)
        return true_device.__get__(storage) if found == HOST else GPU if found == _EITHER else found

    patch.setattr(torch.UntypedStorage, "device", property(device_of_storage), raising=False)
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"):
        patch.setattr(torch.Tensor, name, _on_its_device(getattr(_Base, name)))
    like = [getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")]
    for maker in (*_device_constructors(), *like):
        name = getattr(maker, "__name__", "")
        if getattr(torch, name, None) is maker:
            patch.setattr(torch, name, _from_python(maker, has_values=name in ("tensor", "as_tensor", "asarray")))
    patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", _grouped)


def _patch_cuda(patch: pytest.MonkeyPatch) -> None:
    for module in (torch.cuda, torch.accelerator):
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "current_stream": _Nothing,
            "memory_allocated": _allocated_nbytes,
            "max_memory_allocated": _allocated_nbytes,
            "memory_reserved": _allocated_nbytes,
        }.items():
            patch.setattr(module, name, value)
    functions: dict[str, Any] = {
        "_initialized": True,
        "_lazy_init": _nothing,
        "_sleep": _nothing,
        "current_device": lambda: _thread.index,
        "set_device": _set_index,
        "device": _on_device,
        "stream": _Nothing,
        "Stream": _Nothing,
        "Event": _Nothing,
        "default_stream": _Nothing,
        "cudart": _Runtime,
        "mem_get_info": lambda *_: ((1 << 34) - _allocated_nbytes(), 1 << 34),
        "memory_snapshot": lambda *_: [],
        "get_device_properties": lambda *_: _Properties(),
        "get_device_capability": lambda *_: (8, 0),
        "get_device_name": lambda *_: "labelled",
        "get_rng_state": lambda *_: _state.random.clone(),
        "set_rng_state": _set_random_state,
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "get_sync_debug_mode": lambda: _state.sync_mode,
        "set_sync_debug_mode": lambda mode: setattr(_state, "sync_mode", mode),
    }
    for name, value in functions.items():
        patch.setattr(torch.cuda, name, value, raising=False)
    # C++ casts what is in the CPU's memory as autocast of the CPU says.
    for name in ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"):
        patch.setattr(torch, name, _of_other_device(getattr(torch, name)))
    patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    patch.setattr(torch.accelerator, "current_device_index", lambda: _thread.index)
    patch.setattr(torch.accelerator, "set_device_index", _set_index)
    patch.setattr(torch, "Event", _Nothing)
    patch.setattr(torch, "Generator", _Generator)
    patch.setattr(shoal.kernels.use, "_has_triton", lambda: False)
    for name in ("stream", "event", "current"):
        patch.setattr(TorchStreams, name, _Nothing)
    patch.setattr(TorchStreams, "record_stream", _nothing)
