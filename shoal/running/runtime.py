"""Runs the table on a live model: what happens before and after each unit's forward and backward.

pre-forward     gather the unit, and those that come next
post-forward    release it, unless backward begins with it
pre-backward    reduce the units that backward has left; gather the unit, in reverse order
gradient ready  the unit's last one? -> reduce (or at the next unit's pre-backward, see ``reducer``), release
end of backward reduce what is left, release everything
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.device import at_end_of_backward, backward_pass, in_backward, in_transform, is_fake
from shoal.errors import CommError, UsageError
from shoal.memory.stream_copies import ComputeStream
from shoal.offload.disk_state import Disks
from shoal.running.deferred_gathers import DeferredGathers
from shoal.running.gather_ahead import GatherAhead
from shoal.running.hooks import HookSet, accumulates_into, tensors_in
from shoal.running.order import UnitOrder
from shoal.running.parameter_access import ReadsBetweenSteps, eagerly, gather_on_access
from shoal.running.reducer import Reducer
from shoal.running.sharded_at_init import ChunkedTransfer, ShardedAtInit
from shoal.sharding.axes import Axes
from shoal.sharding.layout import Used
from shoal.sharding.partition import ROOT
from shoal.sharding.staging import StagingBuffers
from shoal.sharding.table import Table
from shoal.sharding.unit import Unit, UnitState

_RECOMPUTED = -1  # the forward in which a call was made that only backward makes (reentrant checkpointing)
_MAX_CALLS_KEPT = 64  # of one unit, whose backward has not come


@dataclass(eq=False)
class _UnitCall:
    """One forward call of one unit, until its backward is done."""

    forward: int  # number of the model's forward that it belongs to
    num_inputs: int  # differentiable ones that are watched
    used: Used | None  # the blocks that are gathered for its backward; None: all
    num_inputs_left: int = 0
    is_started: bool = False
    is_done: bool = False


@dataclass(eq=False)
class _Pass:
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


class _Calls:
    """The forward calls of one unit that a backward pass may reach."""

    def __init__(self) -> None:
        self.started: list[_UnitCall] = []  # in this backward pass
        self.watched: list[_UnitCall] = []  # whose backward has not ended
        self.num_pinned = 0  # pins of calls of which no hook tells when their backward begins

    def watch(self, call: _UnitCall) -> None:
        self.watched.append(call)
        del self.watched[:-_MAX_CALLS_KEPT]

    def is_open(self) -> bool:
        return any(not call.is_done for call in self.started)

    def is_left(self, forwards: set[int]) -> bool:
        """True if backward has begun in every call of these forwards."""
        own = [call for call in self.watched if call.forward in forwards]
        return bool(own) and not self.num_pinned and all(call.is_started for call in own)

    def end_pass(self) -> None:
        for call in self.started:
            call.is_done, call.is_started = True, False
        done = {id(call) for call in self.started}
        self.watched = [call for call in self.watched if id(call) not in done]
        self.started.clear()


class ShardedModel:
    """A model whose units are stored as the table says.

    Args:
        units: in order.
        modules: by unit name, the modules whose forward needs the unit.
        on_backward: called when a backward pass begins. Returns: is it the last one before the step?
        sparse_names: weights whose gradients are sent as rows.
        sharded_at_init: ids of parameters that no rank ever held whole.
    """

    def __init__(
        self,
        model: nn.Module,
        table: Table,
        units: Sequence[Unit],
        modules: Mapping[str, Sequence[nn.Module]],
        axes: Axes,
        staging: Sequence[StagingBuffers],
        order: UnitOrder,
        *,
        max_reuse_numel: int,
        max_live_numel: int,
        has_overlap: bool,
        device: torch.device,
        on_backward: Callable[[], bool],
        disks: Disks | None = None,
        sparse_names: frozenset[str] = frozenset(),
        sharded_at_init: frozenset[int] = frozenset(),
    ) -> None:
        self.model = model
        self.disks = disks if disks is not None else Disks()
        self.table = table
        self.units = list(units)
        self.groups = [group for unit in self.units for group in unit.groups]
        self.trained_groups = [group for unit in self.units for group in unit.trained]
        self.staging = staging
        self.order = order
        self.axes = axes
        self._device = device
        self._compute = ComputeStream(device)
        self._gather_ahead = GatherAhead(device)
        self.sparse_names = sparse_names
        self.sharded_at_init = sharded_at_init
        self.sharded = [unit for unit in self.units if unit.is_sharded]
        self.reducer = Reducer(
            [unit for unit in self.units if unit.trained],
            axes.same_units,
            has_overlap=has_overlap,
            follows_gathers=bool(self.sharded),
            device=device,
        )
        self._has_disk = any(unit.is_on_disk for unit in self.units)
        self._has_host_updates = any(group.is_state_offloaded for group in self.trained_groups)
        # The units whose forward is watched: the sharded ones, and the model itself where it is none of them.
        self._readers = list(self.sharded)
        self._modules = dict(modules)
        if self.sharded and all(model not in modules.get(unit.name, ()) for unit in self.sharded):
            self._modules[ROOT] = [model]
            self._readers.append(Unit(ROOT, len(self.units), []))
        self.unit_of = {id(p): unit for unit in self.units for p in unit.parameters}
        self.home_of = {id(p): (group, slot) for group in self.groups for slot, p in enumerate(group.parameters)}
        # The order in which parameters are gathered and broadcast, the same on every rank.
        self.number_of = {key: number for number, key in enumerate(self.unit_of)}
        self.num_plain_passes = 0  # that gave gradients and that the engine did not start; the engine sets it back
        self._on_backward = on_backward
        self._max_reuse_numel = max_reuse_numel
        self._max_live_numel = max_live_numel
        self._pass: _Pass | None = None
        self._is_kept = False  # a later pass reads what a pass with ``create_graph`` has gathered
        self._running: list[Unit] = []
        self._num_forwards = 0
        self._contents: dict[str, set[str]] = {}  # by unit whose forward runs other units, those
        self._calls = {unit.name: _Calls() for unit in (*self.units, *self._readers)}
        self._is_all_trained = {
            unit.name: bool(unit.trained) and len(unit.trained) == len(unit.groups)
            for unit in (*self.units, *self._readers)
        }
        self.deferred = DeferredGathers(device, self._gather_ahead)
        self.reads = ReadsBetweenSteps(self._gather_pending, self._sharded_at)
        self._searched: set[str] = set()  # kinds of passes in which reads of other units' parameters are known
        self._is_searching = False
        self._kept_outputs: dict[str, list[tuple[nn.Module, str]]] = {unit.name: [] for unit in self._readers}
        self._hooks = HookSet()
        self.switch = self._hooks.switch
        for unit in self._readers:
            for module in self._modules.get(unit.name, ()):
                self._hooks.on_unit(module, unit, self)
        self._hooks.on_model(model, self)  # the model's first, and last, where the model itself is a unit
        self._hooks.on_state_dict(model, {key: unit for key, unit in self.unit_of.items() if unit.is_sharded})
        self._trained = [parameter for unit in self.reducer.units for parameter in unit.trained_parameters]
        for unit in self.reducer.units:
            for index, parameter in enumerate(unit.trained_parameters):
                self._hooks.on_gradient(parameter, unit, index, self)

    @property
    def in_pass(self) -> bool:
        """True if a backward pass is under way."""
        return self._pass is not None

    def _follow_stream(self) -> None:
        """Order what comes now after what the engine has queued in another stream, if the current one has changed.

        Called at every way in. Autograd runs hooks of gradients in a stream of its own choice.
        """
        self._compute.follow(self._gathered_buffers)

    def _gathered_buffers(self) -> Iterator[torch.Tensor]:
        for unit in self.sharded:
            if unit.state in (UnitState.GATHERING, UnitState.FULL):
                yield from (group.buffer.full for group in unit.groups if group.buffer.is_sharded)

    # forward

    def searching(self) -> AbstractContextManager[object]:
        """In the first passes, look for parameters that are read outside their unit."""
        key = self._pass_key()
        if not (self.sharded or self.deferred.is_pending) or key in self._searched or torch.compiler.is_compiling():
            return nullcontext()
        return self._search(key)

    def search_again(self) -> None:
        """The next pass runs another part of the model: look once more for parameters that are read outside."""
        self._searched.discard(self._pass_key())

    @contextmanager
    def _search(self, key: str) -> Iterator[None]:
        self._is_searching = True
        try:
            with gather_on_access(self.unit_of, self._read_outside), eagerly(self.model):
                yield
        finally:
            self._is_searching = False
        self._searched.add(key)

    def _read_outside(self, unit: Unit) -> None:
        reader = self._running[-1] if self._running else None
        if reader is unit and not _uses_any(_used(unit)):
            return  # its module runs without rows
        if reader is not None:
            self.add_shared(reader, unit)
        self.deferred.add_read_early(unit)
        self.deferred.gather(unit)

    def add_shared(self, reader: Unit, read: Unit) -> None:
        """From now on the forward of ``reader`` gathers ``read`` too."""
        if read is not reader and read not in reader.shared and read.is_sharded:
            reader.shared.append(read)

    def reader_of(self, module: nn.Module) -> Unit | None:
        """The unit that runs when ``module`` runs: the innermost whose forward contains it."""
        found: tuple[int, Unit] | None = None
        for unit in self._readers:
            for outer in self._modules.get(unit.name, ()):
                parts = list(outer.modules())
                if any(part is module for part in parts) and (found is None or len(parts) < found[0]):
                    found = len(parts), unit
        return found[1] if found is not None else None

    def _pass_key(self) -> str:
        return "training" if torch.is_grad_enabled() else "evaluation"

    def before_model(self) -> None:
        self.reads.stop()
        if in_transform():
            self.deferred.wait()
            return
        self._follow_stream()
        self.deferred.before_model()
        if not in_backward():
            self._num_forwards += 1
            self._running.clear()
            self.order.start(self._pass_key())
            self._fetch_ahead()

    def after_model(self, output: Any) -> None:
        if in_backward() or in_transform():
            return
        self._gather_ahead.cancel()
        self.deferred.start()
        for unit in self.sharded:
            if unit.state is UnitState.GATHERING:
                unit.release()
        if torch.is_grad_enabled():
            self._fetch_ahead()
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._output_gradient)

    def _output_gradient(self, _gradient: torch.Tensor) -> None:
        self.begin_backward(is_in_graph=True)

    def before_forward(self, unit: Unit) -> None:
        if in_transform():
            _refuse_sharded(unit)
            return
        self._follow_stream()
        for running in self._running:
            if running is not unit:
                self._contents.setdefault(running.name, set()).add(unit.name)
        self._running.append(unit)
        for other in unit.shared:
            self._gather(other)
        self._gather(unit, _used(unit))

    def after_forward(self, unit: Unit, inputs: Any, output: Any) -> None:
        if in_transform():
            return
        if self._running and self._running[-1] is unit:
            self._running.pop()
        is_recomputing = in_backward()
        if torch.is_grad_enabled() and not (is_recomputing and self._calls[unit.name].is_open()):
            self._watch(unit, inputs, output, is_recomputing=is_recomputing)
        if is_recomputing:
            if self._pass is not None:
                self._pass.recomputed.add(unit.name)
            return
        if torch.is_grad_enabled() and unit.has_second and unit.state is UnitState.FULL:
            for group in unit.groups:
                group.keep_second()
        for candidate in (unit, *unit.shared):
            is_needed = any(candidate is running or candidate in running.shared for running in self._running)
            if not is_needed and not self._is_kept and not self._is_worth_keeping(candidate):
                candidate.release()
        updated = self.order.after_update(self.live_numel()) if self._has_host_updates else None
        if updated is not None:
            self._gather_ahead.start(updated)

    def _is_worth_keeping(self, unit: Unit) -> bool:
        distance = self.order.reuse_distance(unit, self._running)
        return distance is not None and distance <= self._max_reuse_numel and self.live_numel() <= self._max_live_numel

    def live_numel(self) -> int:
        """Elements of sharded units that are gathered now, the same on every rank: without those gathered if used."""
        states = (UnitState.GATHERING, UnitState.FULL)
        return sum(unit.numel for unit in self.sharded if unit.used is None and unit.state in states)

    def _gather(self, unit: Unit, used: Used | None = None) -> None:
        self.order.visit(unit, in_backward=self.in_pass)
        from_second = self.in_pass
        if _uses_any(used):
            unit.start_fetch(from_second=from_second, used=used)
        self._fetch_ahead()
        if _uses_any(used):
            unit.gather(from_second=from_second, used=used)
        for later in self.order.ahead(self.live_numel(), self._is_expected):
            later.start_gather(from_second=from_second, used=self._next_used(later, self.in_pass))
        if self._has_host_updates and not from_second:
            self._gather_ahead.reserve(self.order.after_update(self.live_numel()))

    def _fetch_ahead(self) -> None:
        """Begin to read the units that come next from their disk, as far as there are buffers for them."""
        if not self._has_disk:
            return
        for unit, is_backward in self.order.upcoming():
            if unit.state is UnitState.ON_DISK and self._is_expected(unit, is_backward):
                if not unit.can_fetch_ahead():
                    break
                unit.start_fetch(from_second=is_backward, used=self._next_used(unit, is_backward))

    def _is_expected(self, unit: Unit, is_backward: bool) -> bool:
        """True if it is known that the next use of ``unit`` gathers it."""
        return _uses_any(self._next_used(unit, is_backward))

    def _next_used(self, unit: Unit, is_backward: bool) -> Used | None:
        """The blocks that the next use of ``unit`` gathers, as far as it is known; None: all."""
        if unit.used is None:
            return None
        if not is_backward:
            return unit.used() or ()
        coming = (call.used for call in reversed(self._calls[unit.name].watched) if not call.is_started)
        return next(filter(_uses_any, coming), ())

    # backward

    def _watch(self, unit: Unit, inputs: Any, output: Any, *, is_recomputing: bool) -> None:
        """Gather before this call's backward, and know when it is done."""
        if self._is_searching:
            self._kept_outputs[unit.name] = list(_kept_on_modules(self._modules.get(unit.name, ())))
        kept = [getattr(module, name, None) for module, name in self._kept_outputs[unit.name]]
        outputs = [tensor for tensor in tensors_in((output, kept)) if tensor.requires_grad]
        if not outputs:
            if any(p.requires_grad for p in unit.parameters):
                for pinned in (unit, *unit.shared):
                    pinned.pin_count += 1  # no hook tells when its backward begins: gathered until a pass ends
                    self._calls[pinned.name].num_pinned += 1
            return
        received = [] if self._is_all_trained[unit.name] else [t for t in tensors_in(inputs) if t.requires_grad]
        call = _UnitCall(_RECOMPUTED if is_recomputing else self._num_forwards, len(received), _used(unit))
        calls = self._calls[unit.name]
        # A call that is only recomputed has no backward of its own where the first one's graph is still there.
        if not is_recomputing or not (self._pass and any(c.forward in self._pass.forwards for c in calls.watched)):
            calls.watch(call)

        def start(_gradient: torch.Tensor) -> None:
            self._before_backward(unit, call)

        def arrived(_gradient: torch.Tensor) -> None:
            call.num_inputs_left -= 1
            if call.num_inputs_left == 0:
                call.is_done = True
                self._release_after_backward(unit)

        # Plain hooks that hold no graph node: one that did would keep the graph alive through itself, for ever.
        for tensor in outputs:
            tensor.register_hook(start)
        for tensor in received:
            tensor.register_hook(arrived)

    def _before_backward(self, unit: Unit, call: _UnitCall) -> None:
        self._follow_stream()
        current = self.begin_backward(is_in_graph=True)
        if not call.is_started:
            call.is_started = True
            call.is_done = False
            call.num_inputs_left = call.num_inputs
            self._calls[unit.name].started.append(call)
            current.forwards.add(call.forward)
            if current.gives_gradients:
                self.reducer.leave([left for left in current.entered.values() if self._is_left(left, unit, current)])
            current.entered.setdefault(unit.name, unit)
            for other in unit.shared:
                self._gather(other)
            self._gather(unit, call.used)
        elif _uses_any(call.used) and not unit.holds(call.used):
            self._gather(unit, call.used)

    def _is_left(self, unit: Unit, entering: Unit, current: _Pass) -> bool:
        """True if backward has left ``unit`` for good, as far as every rank can tell alike.

        A unit that runs others gets gradients while they do; the root, and one whose parameters others read, until the
        pass ends. Of a module whose output is that of a module inside it, backward enters the inner one first.
        """
        if (
            unit is entering
            or unit.name == ROOT
            or entering.name in self._contents.get(unit.name, ())
            or unit.name in self._contents.get(entering.name, ())
            or any(unit in other.shared for other in self._readers)
        ):
            return False
        return self._calls[unit.name].is_left(current.forwards)

    def begin_backward(self, *, is_in_graph: bool = False, creates_graph: bool = False) -> _Pass:
        """A backward pass begins. Idempotent within a pass.

        Args:
            is_in_graph: a hook noticed it; the engine did not start it.
            creates_graph: it can itself be differentiated.
        """
        if self._pass is not None:
            if self._pass.outermost is None:
                self._pass.outermost = backward_pass()
            return self._pass
        self.reads.stop()
        self._follow_stream()
        self.reducer.at_step = self._on_backward()  # first, since it may refuse
        self.deferred.start()
        for group in self.trained_groups:
            group.gradient.take_back()
        self._pass = _Pass(
            is_in_graph=is_in_graph,
            creates_graph=creates_graph or (is_in_graph and torch.is_grad_enabled()),
            interrupted=[unit for running in self._running for unit in (running, *running.shared)],
            outermost=backward_pass(),
            gives_gradients=not is_in_graph or accumulates_into(self._trained),
        )
        self._is_kept |= self._pass.creates_graph
        self._hooks.listen_to_gradients(not all(unit.is_attached for unit in self.reducer.units))
        if is_in_graph:
            at_end_of_backward(self.finish_backward)
        return self._pass

    def gradient_ready(self, unit: Unit, index: int) -> None:
        current = self._pass
        if unit.is_attached and current is not None:
            current.has_gradient = True
            return
        self._follow_stream()
        if current is None or current.outermost is None:
            current = self.begin_backward(is_in_graph=in_backward())
        current.has_gradient = True
        if unit.mark_grad(index):
            self.reducer.complete(unit)
            if unit.is_sharded:
                self._release_after_backward(unit)

    def _release_after_backward(self, unit: Unit) -> None:
        """Release a unit that no further backward node can read.

        A trained weight is read for the last time before its gradient is accumulated, so a unit of trained weights is
        done when all of them have theirs. A frozen weight is read until the gradients of its calls' inputs are there;
        where no input is differentiable, or another unit reads it, only the end of backward is sure.
        """
        current = self._pass
        if current is None or self._is_kept or unit in current.interrupted:
            return
        if unit.trained and not unit.is_complete:
            return
        if unit.name not in current.recomputed and backward_pass() != current.outermost:
            return  # reentrant checkpointing: a later recomputation may read it, and nothing gathers it for that
        if not self._is_all_trained[unit.name]:
            is_read_elsewhere = any(unit in other.shared for other in self._readers)
            started = self._calls[unit.name].started
            if is_read_elsewhere or self._calls[unit.name].num_pinned:
                return
            if any(not (call.is_done and call.num_inputs) for call in started):
                return
        unit.release()

    def finish_backward(self) -> None:
        """A backward pass has ended: reduce what is left, release every unit. Idempotent.

        A pass in a graph that gave no weight gradient (``autograd.grad`` on inputs) reduces nothing. After one with
        ``create_graph`` (a gradient penalty) units stay gathered until the pass through that graph ends.
        """
        self._follow_stream()
        current, self._pass = self._pass, None
        if current is None:
            return
        is_reduced = True
        if current.is_in_graph:
            is_reduced = current.gives_gradients or current.has_gradient
            self.num_plain_passes += current.has_gradient
            if current.creates_graph and not is_reduced:
                return
        self.reducer.finish(is_reduced=is_reduced)
        for group in self.trained_groups:
            group.gradient.show()
        if not current.creates_graph:
            self._is_kept = False
            self._release_readers(current.interrupted)
        self.order.end()

    def _release_readers(self, interrupted: Sequence[Unit] = (), *, is_recovering: bool = False) -> None:
        for unit in self._readers:
            calls = self._calls[unit.name]
            unit.pin_count -= calls.num_pinned
            calls.num_pinned = 0
            calls.end_pass()
            if unit in interrupted:
                continue
            try:
                unit.release()
            except CommError:
                if not is_recovering:
                    raise  # else the first error counts: this gather can never end

    # other callers

    def release_all(self) -> None:
        """Between two passes: release every unit that is not pinned. Communicates nothing.

        What a coming pass through a graph with ``create_graph`` needs stays.
        """
        if not self._is_kept:
            for unit in self.sharded:
                unit.release()

    def release_kept(self, units: Sequence[Unit] | None = None) -> None:
        """Shards are about to change: release units (None: all) that a forward left gathered for its backward.

        Within a pass this does nothing. Communicates nothing, and raises nothing about peers that are gone.
        """
        if self._pass is None and not self._running and not self._is_kept:
            for unit in self.sharded if units is None else units:
                if unit.state is UnitState.FULL:
                    unit.release()

    @contextmanager
    def gathered(self, units: Sequence[Unit], *, keep_user_views: bool = False) -> Iterator[None]:
        """Pin units inside the block, gathered.

        Args:
            keep_user_views: what the block has made of the parameters without a copy stays valid after it. Not within
                a pass, where autograd holds such views too.
        """
        self._follow_stream()
        for unit in units:
            unit.pin_count += 1
        try:
            for unit in units:
                unit.gather()
            yield
        finally:
            for unit in units:
                unit.pin_count -= 1
                unit.release(keep_user_views=keep_user_views and not self.in_pass)

    def watch_reads(self) -> None:
        """A step has ended: parameters that the script reads before the next pass are valid, or it is warned."""
        if (self.sharded or self.deferred.is_pending) and not is_fake(next(self.units[0].parameters)):
            self.reads.watch()

    def _gather_pending(self, parameter: nn.Parameter) -> None:
        unit = self.unit_of.get(id(parameter))
        if unit is not None and unit.state is UnitState.GATHERING and self.deferred.is_pending:
            self.deferred.gather(unit)
            for group in unit.groups:
                group.buffer.comm.drain()  # the script may change them in place

    def _sharded_at(self, address: int) -> str | None:
        """The name of the sharded parameter with this placeholder."""
        for group in self.groups if any(unit.is_released for unit in self.sharded) else ():
            for data, spec in zip(group.placeholders, group.buffer.layout.specs, strict=False):
                if data.data_ptr() == address:
                    return spec.name
        return None

    def defer_gathers(self) -> None:
        """From now on a step may leave its gathers to the next uses: ``deferred.defer``."""
        self.deferred.install(self._hooks, self.model, self.units, self._modules, self._follow_stream)

    def recover(self) -> None:
        """After an exception: release every unit that is not pinned, drop gradients, end the pass.

        Raises nothing about peers that are gone.
        """
        self._pass = None
        self._is_kept = False
        self._running.clear()
        self._gather_ahead.cancel()
        self.reducer.reset()
        self._release_readers(is_recovering=True)

    def clear_staging(self) -> None:
        """Free the staging buffers; the next reduction allocates others."""
        for staging in self.staging:
            staging.clear()

    def detach(self, *, is_failed: bool = False) -> None:
        """Remove every hook and give the parameters memory of their own: whole, or sharded where they came sharded.

        Args:
            is_failed: the values are of no use: nothing is gathered, and what was sharded stays a placeholder of NaN.

        Communicates: an all-gather per sharded unit; a broadcast of each parameter that came sharded.
        Memory: of a model that came sharded, the shards and one unit.
        """
        self._hooks.detach()
        self.reads.stop()
        for unit in self.units:
            if unit.if_used is not None:
                unit.if_used.stop()
        at_init = ShardedAtInit(ChunkedTransfer(self.axes.data, self._device))
        try:
            for unit in self.units if not is_failed else ():
                unit.gather()
                for group in unit.groups:
                    group.detach()
                for parameter in unit.parameters:
                    if id(parameter) in self.sharded_at_init:
                        at_init.shard(parameter)
        finally:
            at_init.transfer.free()
            self.clear_staging()
            self.disks.close()


def _used(unit: Unit) -> Used | None:
    """The blocks of a unit that the forward which runs uses; None: all."""
    return None if unit.used is None else unit.used()


def _refuse_sharded(unit: Unit) -> None:
    """Raises: UsageError: a transform of torch.func reads parameters that are not gathered."""
    if unit.is_sharded and unit.state is not UnitState.FULL:
        raise UsageError(
            f"torch.func transforms the forward of unit {unit.name!r}, whose parameters are sharded: nothing gathers"
            " them again for the transform's own backward.",
            do="call the transform inside `with shoal.zero.GatheredParameters(model.parameters()):`, on every rank; or"
            " use ZeRO stage 2.",
            code="transform-sharded",
        )


def _uses_any(used: Used | None) -> bool:
    return used is None or any(used)


def _kept_on_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Attributes in which a forward left a differentiable tensor in addition to its output (an auxiliary loss, say)."""
    for module in modules:
        for part in module.modules():
            for name, value in vars(part).items():
                if name not in ("_parameters", "_buffers", "_modules") and any(
                    t.requires_grad for t in tensors_in(value, depth=3)
                ):
                    yield part, name
