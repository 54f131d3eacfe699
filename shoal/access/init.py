"""``zero.Init``: a model that fits no single rank is built sharded, module by module.

Inside the context each parameter is created and initialised, and is sharded when the constructor of its module
returns, so peak memory is the shards and one module. If code accesses a parameter later in a constructor
(``nn.init.normal_(self.head.weight)``, ``self.apply(init)``), the access gathers it, and rank 0's value is kept.

On CPU ranks, large tensors are mapped separately from then on (``shoal.host_heap``), so that resident memory is what
live tensors need.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shoal.comm.world import current_world
from shoal.config import load
from shoal.errors import NotBuiltError, UsageError
from shoal.host_heap import HostHeap
from shoal.launch.environment import heap_is_set
from shoal.mesh import Mesh
from shoal.running.parameter_access import ParameterAccessMode
from shoal.running.sharded_at_init import ChunkedTransfer, ShardedAtInit


class Init:
    """Shards parameters as modules are built. DeepSpeed's signature.

    Args:
        module: a module that exists already: it is sharded at once.
        config_dict_or_path, config: the config of the run: its ``fp16`` and ``bf16`` give the dtype of the parameters,
            and its ``enable_sanity_checks`` applies. Values may still be ``"auto"``.
        enabled: False: the context does nothing.
        remote_device: "cpu" or "nvme": shards are kept in host memory until ``initialize``.
        dtype: cast floating-point parameters to it; None: to the config's. Without either, parameters keep their dtype
            and main parameters get its full precision.

    Raises: ConfigError: as ``initialize`` does, for the same config.
    Communicates: broadcasts of each parameter (rank 0's values count).
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        **_unused: Any,
    ) -> None:
        groups = {
            "data_parallel_group": data_parallel_group,
            "zero_param_parallel_group": zero_param_parallel_group,
            "sequence_data_parallel_group": sequence_data_parallel_group,
        }
        for name, group in groups.items():
            if group is not None and enabled:
                raise UsageError(
                    f"zero.Init({name}=...): groups are made from the config.",
                    do="leave it out.",
                    code="zero-init-group",
                )
        if (zero_quantized_weights or zero_quantized_nontrainable_weights) and enabled:
            raise NotBuiltError("zero.Init(zero_quantized_weights=True): quantized weights are not built yet.")
        if remote_device not in (None, "none", "cpu", "nvme"):
            raise UsageError(
                f"zero.Init(remote_device={remote_device!r}): there is no such device for shards.",
                do='pass None, "cpu" or "nvme"; offload_param in the config decides after initialize().',
                code="zero-init-device",
            )
        self._shard_device = torch.device("cpu") if remote_device not in (None, "none") else None
        self._enabled = enabled
        source = config_dict_or_path or config
        self._settings = load(source, check_supported=False) if enabled and source else None
        self._dtype = dtype or self._dtype_of_config()
        self._mode: ParameterAccessMode | None = None
        self._building: set[int] = set()
        if module is not None and enabled:
            self._prepare()
            for part in module.modules():
                self._shard(part)

    def _dtype_of_config(self) -> torch.dtype | None:
        settings = self._settings
        if settings is not None and settings.fp16.enabled:
            return torch.float16
        return torch.bfloat16 if settings is not None and settings.bf16.enabled else None

    def _prepare(self) -> None:
        world, settings = current_world(), self._settings
        if world.device.type == "cpu" and not heap_is_set():
            HostHeap.begin()
        self._sharded = ShardedAtInit(
            ChunkedTransfer(world.communicator("dp", Mesh.of(world.size)), world.device),
            self._dtype,
            shard_device=self._shard_device,
            checks_changes=settings is not None and bool(settings.zero_optimization.enable_sanity_checks),
        )

    def __enter__(self) -> Init:
        if self._enabled:
            self._prepare()
            _PATCH.enter(self)
            self._mode = ParameterAccessMode(self._sharded.gather_accessed)
            self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled and self._mode is not None:
            self._mode.__exit__(kind, error, trace)
            self._mode = None
            _PATCH.leave(self)
            if error is None:
                self._sharded.release_accessed()

    def suspend(self) -> None:
        """Shard what code has accessed, and do nothing until ``resume``."""
        self._sharded.release_accessed()
        if self._mode is not None:
            self._mode.is_on = False

    def resume(self) -> None:
        """Continue after ``suspend``."""
        if self._mode is not None:
            self._mode.is_on = True

    # called by the patched constructors

    def construct(self, module: nn.Module, constructor: Callable[[], None]) -> None:
        """Run one constructor; the outermost one of a module shards its parameters."""
        if id(module) in self._building:
            constructor()
            return
        self._building.add(id(module))
        try:
            constructor()
        finally:
            self._building.discard(id(module))
        self._shard(module)

    def _shard(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                self._sharded.shard(parameter)


class _ConstructorPatch:
    """Wraps the constructor of every module class while a context is open in any thread; unwraps it when the last one
    is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open = 0
        # By class, its constructor and what replaces it.
        self._wrapped: dict[type[nn.Module], tuple[Callable[..., None], Callable[..., None]]] = {}
        self._to_empty: Any = nn.Module.to_empty
        self._subclass_hook: Any = None
        self._local = threading.local()

    def _stack(self) -> list[Init]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[Init] = self._local.stack
        return stack

    def enter(self, init: Init) -> None:
        self._stack().append(init)
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._wrap_all()

    def leave(self, init: Init) -> None:
        self._stack().remove(init)
        with self._lock:
            self._open -= 1
            if self._open == 0:
                # Undoes the patch; mypy does not allow assigning to a method. A decorator that has replaced a
                # constructor inside the block calls the wrapper, which then only calls the original.
                for cls, (original, wrapper) in self._wrapped.items():
                    if cls.__dict__.get("__init__") is wrapper:
                        cls.__init__ = original  # type: ignore[method-assign]
                self._wrapped.clear()
                nn.Module.to_empty = self._to_empty  # type: ignore[method-assign]
                if self._subclass_hook is None:
                    del nn.Module.__init_subclass__
                else:
                    nn.Module.__init_subclass__ = self._subclass_hook  # type: ignore[method-assign]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        held = self._stack()
        for init in held:
            init.suspend()
        self._local.stack = []
        try:
            yield
        finally:
            self._local.stack = held
            for init in held:
                init.resume()

    def _wrap_all(self) -> None:
        pending: list[type[nn.Module]] = [nn.Module]
        while pending:
            cls = pending.pop()
            pending.extend(cls.__subclasses__())
            self._wrap(cls)
        self._wrap_to_empty()
        self._subclass_hook = nn.Module.__dict__.get("__init_subclass__")
        patch = self

        def defined(cls: type[nn.Module], /, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            patch._wrap(cls)

        # It takes any keyword arguments; object's, which it replaces, takes none.
        nn.Module.__init_subclass__ = classmethod(defined)  # type: ignore[assignment]

    def _wrap_to_empty(self) -> None:
        """``torch.nn.utils.skip_init`` builds a module on the meta device, and allocates its memory afterwards."""
        original, stack = nn.Module.to_empty, self._stack
        self._to_empty = original

        @functools.wraps(original)
        def to_empty(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            made = original(module, *args, **kwargs)
            active = stack()
            if active:
                for part in made.modules():
                    active[-1]._shard(part)
            return made

        # The patch; it takes any arguments and passes them on.
        nn.Module.to_empty = to_empty  # type: ignore[method-assign, assignment]

    def _wrap(self, cls: type[nn.Module]) -> None:
        original = cls.__dict__.get("__init__")
        if original is None or cls in self._wrapped or cls is nn.Module:
            return
        stack = self._stack

        @functools.wraps(original)
        def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            active = stack()
            if not active:
                original(module, *args, **kwargs)
            else:
                active[-1].construct(module, lambda: original(module, *args, **kwargs))

        self._wrapped[cls] = original, construct
        # The patch; it takes any arguments and passes them on.
        cls.__init__ = construct  # type: ignore[method-assign, assignment]


_PATCH = _ConstructorPatch()


def suspended() -> AbstractContextManager[None]:
    """Inside the block, the open contexts of this thread do nothing. For code that is not part of the model.

    Communicates: a broadcast of each parameter that code has accessed.
    """
    return _PATCH.suspended()
