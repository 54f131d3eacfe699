"""What a model computes, module by module: multiply-adds, floating-point operations and time of its forward passes.

    counts = ModuleCounts(model)
    counts.start()
    model(batch)
    counts.stop()
    counts.of(model.head).macs

PyTorch's own counter (``torch.utils.flop_counter``) sees every operation that runs; hooks on the modules look at it
before and after each call. Nothing of PyTorch's is replaced, and nothing is left behind by ``stop()``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.compiler import is_compiled, uncompiled
from shoal.device import Device
from shoal.flop_formulas import MATRIX, OTHER, Formula, torchs

logger = logging.getLogger("shoal")


class _OneLevel:
    """In the place of the counter's own tracker of modules, whose hooks are on every module of the process."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class OperationCount:
    """Counts what this thread runs inside ``with``; may be entered again, and goes on.

    A compiled function runs uncompiled meanwhile, since compiled code cannot be counted. What an extension computes in
    a custom kernel is not counted unless ``torch.utils.flop_counter.register_flop_formula`` has its formula.

    Attributes: ``failed``: operations whose formula did not fit the call, by name.
    """

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self._products = 0  # flops of products: twice the multiply-adds
        self._others = 0
        self._counter: Any = None
        self._had_fast_path = True

    @property
    def macs(self) -> int:
        """Multiply-adds so far."""
        return self._all_products() // 2

    @property
    def flops(self) -> int:
        """Floating-point operations so far: two for each multiply-add, and those of ``flop_formulas.OTHER``."""
        return self._all_products() + self._others

    @property
    def is_open(self) -> bool:
        return self._counter is not None

    def __enter__(self) -> OperationCount:
        from torch.utils.flop_counter import FlopCounterMode

        formulas: dict[Any, Any] = {}
        for operation in {*torchs(), *MATRIX, *OTHER}:
            if isinstance(operation, torch._ops.OpOverloadPacket):
                formulas[operation] = self._formula(operation)
                if operation in OTHER and operation not in torchs():  # counted as it is, not decomposed
                    overloads = (getattr(operation, name) for name in operation.overloads())
                    formulas.update(dict.fromkeys(overloads, formulas[operation]))
        counter: Any = FlopCounterMode(display=False, custom_mapping=formulas)
        counter.mod_tracker = _OneLevel()
        # A whole encoder layer in one call of inference's would be one operation without a formula.
        self._had_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        counter.__enter__()
        self._counter = counter
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        counter, self._counter = self._counter, None
        counter.__exit__(kind, error, trace)
        torch.backends.mha.set_fastpath_enabled(self._had_fast_path)
        self._products += int(counter.get_total_flops())

    def _all_products(self) -> int:
        return self._products + (int(self._counter.get_total_flops()) if self._counter is not None else 0)

    def _formula(self, operation: Any) -> Callable[..., int]:
        theirs, ours = torchs().get(operation), MATRIX.get(operation)
        other: Formula | None = OTHER.get(operation)

        def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            try:
                if other is not None:
                    self._others += other(args, kwargs, out_val)
                if ours is not None:
                    return ours(args, kwargs, out_val)
                return int(theirs(*args, out_val=out_val, **kwargs)) if theirs is not None else 0
            except Exception as error:  # a count that fails must not end a training run
                if str(operation) not in self.failed:
                    logger.info("flops of %s are not counted: %s", operation, error)
                self.failed.add(str(operation))
                return 0

        formula._get_raw = True  # type: ignore[attr-defined]  # the counter hands over tensors, not shapes
        return formula


@dataclass
class Counted:
    """Of all calls of a module, the modules inside included."""

    calls: int = 0
    macs: int = 0
    flops: int = 0
    seconds: float = 0.0


class _Frame(NamedTuple):
    """A module that runs, and where the counts stood when it began."""

    module: nn.Module
    macs: int
    flops: int
    began: float


class ModuleCounts:
    """The counts of a model's modules.

    Order: between ``start()`` and ``stop()`` the host waits for the device before and after each module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.operations = OperationCount()
        self.num_compiled = 0
        self._records: dict[nn.Module, Counted] = {}
        self._frames: list[_Frame] = []
        self._handles: list[Any] = []
        self._uncompiled = ExitStack()
        parameter = next(model.parameters(), None)
        self._device = Device(parameter.device if parameter is not None else torch.device("cpu"))

    @property
    def is_running(self) -> bool:
        return bool(self._handles)

    def start(self, ignored: Collection[type[nn.Module]] = ()) -> None:
        """Count from now on, in addition to what was counted already.

        Args:
            ignored: classes without counts of their own: what their modules compute is their parents'.
        """
        if self.is_running:
            return
        with OperationCount():
            # What PyTorch loads for its first count is no part of the model's time.
            torch.ones(1, dtype=torch.float32, device="cpu").mul(1)
        modules = list(self.model.modules())
        self.num_compiled = sum(map(is_compiled, modules))
        if self.num_compiled:
            self._uncompiled.enter_context(uncompiled())
        for module in modules:
            if type(module) in ignored:
                continue
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def stop(self) -> None:
        """Remove all hooks. The counts stay. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._frames.clear()
        if self.operations.is_open:
            self.operations.__exit__(None, None, None)
        self._uncompiled.close()

    def clear(self) -> None:
        """Reset all counts."""
        self._records.clear()

    def of(self, module: nn.Module) -> Counted:
        """The counts of a module; of one that was never called itself (a list), the sum of those inside."""
        total = Counted()
        for record in self._parts(module, set()):
            total.calls += record.calls
            total.macs += record.macs
            total.flops += record.flops
            total.seconds += record.seconds
        return total

    def _parts(self, module: nn.Module, seen: set[nn.Module]) -> Iterator[Counted]:
        if module in seen:
            return
        seen.add(module)
        record = self._records.get(module)
        if record is not None:
            yield record
            return
        for child in module.children():
            yield from self._parts(child, seen)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._frames:
            self.operations.__enter__()
        self._device.synchronize()
        self._frames.append(_Frame(module, self.operations.macs, self.operations.flops, time.perf_counter()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._frames or self._frames[-1].module is not module:
            return
        self._device.synchronize()
        frame = self._frames.pop()
        if all(outer.module is not module for outer in self._frames):  # a module inside itself counts once
            record = self._records.setdefault(module, Counted())
            record.calls += 1
            record.macs += self.operations.macs - frame.macs
            record.flops += self.operations.flops - frame.flops
            record.seconds += time.perf_counter() - frame.began
        if not self._frames:
            self.operations.__exit__(None, None, None)
