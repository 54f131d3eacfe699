"""The forward calls of each unit, and how far a backward pass has come through them.

    forward    a call is recorded, with the blocks that its backward needs and hooks on the tensors that it returns
    backward   begins in a call with the first gradient of what it returned; the call is done when the gradients of its
               inputs are there

The calls tell when a unit can be reduced (backward has left it) and when released (nothing reads it any more).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shoal.device import in_backward
from shoal.running.hooks import tensors_in
from shoal.sharding.layout import Used, uses_any
from shoal.sharding.partition import ROOT
from shoal.sharding.unit import Unit

_RECOMPUTED = -1  # the forward in which a call was made that only backward makes (reentrant checkpointing)
_MAX_CALLS_KEPT = 64  # of one unit, whose backward has not come


@dataclass(eq=False)
class UnitCall:
    """One forward call of one unit, until its backward is done."""

    forward: int  # number of the model's forward that it belongs to
    num_inputs: int  # differentiable ones that are watched
    used: Used | None  # the blocks that are gathered for its backward; None: all
    num_inputs_left: int = 0
    is_started: bool = False
    is_done: bool = False


@dataclass(eq=False)
class BackwardPass:
    """One backward pass, from its first event to its end."""

    is_in_graph: bool  # a hook noticed it; the engine did not start it
    creates_graph: bool  # it can itself be differentiated
    interrupted: list[Unit]  # their forward goes on after this pass (``autograd.grad`` inside a forward)
    outermost: int | None  # the number of the backward pass in which it began; others may run inside it
    gives_gradients: bool  # it will accumulate a gradient into some parameter, of whatever unit
    has_gradient: bool = False  # it gave a parameter one
    recomputed: set[str] = field(default_factory=set)  # units whose forward ran in it
    forwards: set[int] = field(default_factory=set)  # numbers of the forwards that it goes back through
    entered: dict[str, Unit] = field(default_factory=dict)  # units whose backward has begun, in order


class CallHandler(Protocol):
    """What runs a unit when backward comes to a call."""

    def before_backward(self, unit: Unit, call: UnitCall) -> None: ...
    def release_after_backward(self, unit: Unit) -> None: ...


class _CallsOfUnit:
    """The forward calls of one unit that a backward pass may reach."""

    def __init__(self, unit: Unit) -> None:
        self.is_all_trained = bool(unit.trained) and len(unit.trained) == len(unit.groups)
        self.started: list[UnitCall] = []  # in this backward pass
        self.watched: list[UnitCall] = []  # whose backward has not ended
        self.num_pinned = 0  # pins of calls of which no hook tells when their backward begins
        self.contents: set[str] = set()  # the units that the unit's forward runs
        self.kept_outputs: list[tuple[nn.Module, str]] = []  # attributes in which its forward leaves tensors


class ForwardCalls:
    """The calls of all units of a model.

    Args:
        units: whose calls are watched.
        modules: by unit name, the modules whose forward needs the unit.
    """

    def __init__(self, units: Sequence[Unit], modules: Mapping[str, Sequence[nn.Module]]) -> None:
        self.units = list(units)
        self.num_forwards = 0  # of the model
        self._modules = modules
        self._calls = {unit.name: _CallsOfUnit(unit) for unit in units}

    def reader_of(self, module: nn.Module) -> Unit | None:
        """The unit that runs when ``module`` runs: the innermost whose forward contains it."""
        sizes: list[tuple[int, int]] = []
        for index, unit in enumerate(self.units):
            for outer in self._modules.get(unit.name, ()):
                parts = list(outer.modules())
                if any(part is module for part in parts):
                    sizes.append((len(parts), index))
        return self.units[min(sizes)[1]] if sizes else None

    # forward

    def enter(self, unit: Unit, running: Sequence[Unit]) -> None:
        """The forward of ``unit`` begins inside of those that run."""
        for outer in running:
            if outer is not unit:
                self._calls[outer.name].contents.add(unit.name)

    def watch(
        self,
        unit: Unit,
        inputs: Any,
        output: Any,
        current: BackwardPass | None,
        handler: CallHandler,
        *,
        is_first: bool,
    ) -> None:
        """The forward of ``unit`` has ended: tell ``handler`` when this call's backward begins and when it is done.

        Args:
            current: the backward pass that recomputes the call, if any.
            is_first: look for attributes in which the modules leave tensors.
        """
        calls, is_recomputed = self._calls[unit.name], in_backward()
        if is_recomputed and any(not call.is_done for call in calls.started):
            return
        if is_first:
            calls.kept_outputs = list(_kept_on_modules(self._modules.get(unit.name, ())))
        kept = [getattr(module, name, None) for module, name in calls.kept_outputs]
        outputs = [tensor for tensor in tensors_in((output, kept)) if tensor.requires_grad]
        if not outputs:
            if any(p.requires_grad for p in unit.parameters):
                for pinned in (unit, *unit.shared):
                    pinned.pin_count += 1  # no hook tells when its backward begins: gathered until a pass ends
                    self._calls[pinned.name].num_pinned += 1
            return
        received = [] if calls.is_all_trained else [t for t in tensors_in(inputs) if t.requires_grad]
        call = UnitCall(_RECOMPUTED if is_recomputed else self.num_forwards, len(received), unit.used())
        # A call that is only recomputed has no backward of its own where the first one's graph is still there.
        if not is_recomputed or not (current and any(c.forward in current.forwards for c in calls.watched)):
            calls.watched.append(call)
            del calls.watched[:-_MAX_CALLS_KEPT]

        def start(_gradient: torch.Tensor) -> None:
            handler.before_backward(unit, call)

        def arrived(_gradient: torch.Tensor) -> None:
            call.num_inputs_left -= 1
            if call.num_inputs_left == 0:
                call.is_done = True
                handler.release_after_backward(unit)

        # Plain hooks that hold no graph node: one that did would keep the graph alive through itself, for ever.
        for tensor in outputs:
            tensor.register_hook(start)
        for tensor in received:
            tensor.register_hook(arrived)

    # backward

    def start(self, unit: Unit, call: UnitCall, current: BackwardPass) -> None:
        """Backward begins in a call."""
        call.is_started, call.is_done, call.num_inputs_left = True, False, call.num_inputs
        self._calls[unit.name].started.append(call)
        current.forwards.add(call.forward)

    def next_used(self, unit: Unit, *, is_backward: bool) -> Used | None:
        """The blocks that the next use of ``unit`` gathers, as far as it is known; None: all."""
        if unit.if_used is None:
            return None
        if not is_backward:
            return unit.used() or ()
        coming = (call.used for call in reversed(self._calls[unit.name].watched) if not call.is_started)
        return next(filter(uses_any, coming), ())

    def left(self, entering: Unit, current: BackwardPass) -> list[Unit]:
        """The units to reduce that backward has left for good when it enters one, as far as every rank can tell alike.

        A unit that runs others gets gradients while they do; the root, and one whose parameters others read, until the
        pass ends. Of a module whose output is that of a module inside it, backward enters the inner one first.
        """
        read_by_others = self._read_by_others()
        return [
            unit
            for unit in current.entered.values()
            if not unit.is_reduced
            and unit is not entering
            and unit.name != ROOT
            and entering.name not in self._calls[unit.name].contents
            and unit.name not in self._calls[entering.name].contents
            and unit not in read_by_others
            and self._is_started(unit, current.forwards)
        ]

    def _is_started(self, unit: Unit, forwards: set[int]) -> bool:
        """True if backward has begun in every call of these forwards."""
        calls = self._calls[unit.name]
        of_forwards = [call for call in calls.watched if call.forward in forwards]
        return bool(of_forwards) and not calls.num_pinned and all(call.is_started for call in of_forwards)

    def _read_by_others(self) -> set[Unit]:
        return {read for unit in self.units for read in unit.shared}

    def can_release(self, unit: Unit) -> bool:
        """True if no further backward node reads the unit's parameters, once its gradients have arrived.

        A trained weight is read for the last time before its gradient is accumulated, so a unit of trained weights is
        done when all of them have theirs. A frozen weight is read until the gradients of its calls' inputs are there;
        where no input is differentiable, or another unit reads it, only the end of backward is sure.
        """
        calls = self._calls[unit.name]
        if not unit.is_complete or calls.is_all_trained:
            return unit.is_complete
        is_done = all(call.is_done and call.num_inputs for call in calls.started)
        return is_done and not calls.num_pinned and unit not in self._read_by_others()

    def end_pass(self, unit: Unit) -> None:
        """A backward pass has ended: its calls are done, and the unit is pinned for none."""
        calls = self._calls[unit.name]
        unit.pin_count -= calls.num_pinned
        calls.num_pinned = 0
        for call in calls.started:
            call.is_done, call.is_started = True, False
        done = set(map(id, calls.started))
        calls.watched = [call for call in calls.watched if id(call) not in done]
        calls.started.clear()


def _kept_on_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Attributes in which a forward left a differentiable tensor in addition to its output (an auxiliary loss, say)."""
    for module in modules:
        for part in module.modules():
            for name, value in vars(part).items():
                if name not in ("_parameters", "_buffers", "_modules") and any(
                    t.requires_grad for t in tensors_in(value, depth=3)
                ):
                    yield part, name
