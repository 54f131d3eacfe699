"""Runs the table on a live model: what happens before and after each unit's forward and backward.

pre-forward     gather the unit, and those that come next
post-forward    release it, unless backward begins with it
pre-backward    reduce the units that backward has left; gather the unit, in reverse order
gradient ready  the unit's last one? -> reduce (or at the next unit's pre-backward, see ``reducer``), release
end of backward reduce what is left, release everything
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.device import at_end_of_backward, backward_pass, in_backward, in_transform
from shoal.errors import CommError
from shoal.memory.stream_copies import ComputeStream
from shoal.offload.disk_state import Disks
from shoal.running.calls import BackwardPass, ForwardCalls, UnitCall
from shoal.running.deferred_gathers import DeferredGathers
from shoal.running.gather_ahead import GatherAhead
from shoal.running.hooks import HookSet, accumulates_into, refuse_sharded, tensors_in
from shoal.running.order import UnitOrder
from shoal.running.parameter_access import OutsideReads, ReadsBetweenSteps
from shoal.running.reducer import Reducer
from shoal.running.sharded_at_init import give_back
from shoal.sharding.axes import Axes
from shoal.sharding.layout import Used, uses_any
from shoal.sharding.offloaded_gradient import ShardBuffers
from shoal.sharding.partition import ROOT
from shoal.sharding.staging import StagingBuffers
from shoal.sharding.unit import Unit, UnitState


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
        units: Sequence[Unit],
        modules: Mapping[str, Sequence[nn.Module]],
        axes: Axes,
        staging: Sequence[StagingBuffers | ShardBuffers],
        order: UnitOrder,
        *,
        has_overlap: bool,
        device: torch.device,
        on_backward: Callable[[], bool],
        disks: Disks | None = None,
        sparse_names: frozenset[str] = frozenset(),
        sharded_at_init: frozenset[int] = frozenset(),
    ) -> None:
        self.model = model
        self.disks = disks if disks is not None else Disks()
        self.units = list(units)
        self.groups = [group for unit in self.units for group in unit.groups]
        self.trained_groups = [group for unit in self.units for group in unit.trained]
        self.staging = staging
        self.pools = {each.pool for each in staging if isinstance(each, StagingBuffers) and each.pool is not None}
        self.order = order
        self.axes = axes
        self.device = device
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
        readers = list(self.sharded)
        self._modules = dict(modules)
        if self.sharded and all(model not in modules.get(unit.name, ()) for unit in self.sharded):
            self._modules[ROOT] = [model]
            readers.append(Unit(ROOT, len(self.units), []))
        self.calls = ForwardCalls(readers, self._modules)
        self.unit_of = {id(p): unit for unit in self.units for p in unit.parameters}
        self.home_of = {id(p): (group, slot) for group in self.groups for slot, p in enumerate(group.parameters)}
        # The order in which parameters are gathered and broadcast, the same on every rank.
        self.number_of = {key: number for number, key in enumerate(self.unit_of)}
        self.num_plain_passes = 0  # that gave gradients and that the engine did not start; the engine sets it back
        self._on_backward = on_backward
        self._pass: BackwardPass | None = None
        self._is_kept = False  # a later pass reads what a pass with ``create_graph`` has gathered
        self._running: list[Unit] = []
        self.deferred = DeferredGathers(device, self._gather_ahead)
        self.outside_reads = OutsideReads(self.unit_of, self._running, self.deferred)
        self.reads = ReadsBetweenSteps(self.units, self.unit_of, self.deferred)
        self._hooks = HookSet()
        self.switch = self._hooks.switch
        for unit in readers:
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
        self._compute.follow(self._memory_in_use)

    def _memory_in_use(self) -> Iterator[torch.Tensor]:
        """What one stream has allocated and another may free: gathered buffers, and gradients that are not in a sum."""
        for unit in self.sharded:
            if unit.state in (UnitState.GATHERING, UnitState.FULL):
                yield from (group.buffer.full for group in unit.sharded)
        for group in self.trained_groups:
            if group.gradient.unsynced.has_memory:
                yield group.gradient.unsynced.full
        for parameter in self._trained:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                yield gradient

    # forward

    def before_model(self) -> None:
        self.reads.stop()
        if in_transform():
            self.deferred.wait()
            return
        self._follow_stream()
        self.deferred.before_model()
        if not in_backward():
            self.calls.num_forwards += 1
            self._running.clear()
            self.order.start()
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
            refuse_sharded(unit)
            return
        self._follow_stream()
        self.calls.enter(unit, self._running)
        self._running.append(unit)
        for other in unit.shared:
            self._gather(other)
        self._gather(unit, unit.used())

    def after_forward(self, unit: Unit, inputs: Any, output: Any) -> None:
        if in_transform():
            return
        if self._running and self._running[-1] is unit:
            self._running.pop()
        if torch.is_grad_enabled():
            self.calls.watch(unit, inputs, output, self._pass, self, is_first=self.outside_reads.is_searching)
        if in_backward():
            if self._pass is not None:
                self._pass.recomputed.add(unit.name)
            return
        if torch.is_grad_enabled() and unit.state is UnitState.FULL:
            for second in unit.second_shards:
                second.keep()
        for candidate in (unit, *unit.shared):
            is_needed = any(candidate is running or candidate in running.shared for running in self._running)
            if not is_needed and not self._is_kept and not self.order.is_worth_keeping(candidate, self._running):
                candidate.release()
        updated = self.order.after_update() if self._has_host_updates else None
        if updated is not None:
            self._gather_ahead.start(updated)

    def _gather(self, unit: Unit, used: Used | None = None) -> None:
        self.order.visit(unit, in_backward=self.in_pass)
        from_second = self.in_pass
        if uses_any(used):
            unit.start_fetch(from_second=from_second, used=used)
        self._fetch_ahead()
        if uses_any(used):
            with self.reducer.timed("gather"):
                unit.gather(from_second=from_second, used=used)
        for later in self.order.ahead(self._is_expected):
            later.start_gather(from_second=from_second, used=self.calls.next_used(later, is_backward=self.in_pass))
        if self._has_host_updates and not from_second:
            self._gather_ahead.reserve(self.order.after_update())

    def _fetch_ahead(self) -> None:
        """Begin to read the units that come next from their disk, as far as there are buffers for them."""
        if not self._has_disk:
            return
        for unit, is_backward in self.order.upcoming():
            if unit.state is UnitState.ON_DISK and self._is_expected(unit, is_backward):
                if not unit.can_fetch_ahead():
                    break
                unit.start_fetch(from_second=is_backward, used=self.calls.next_used(unit, is_backward=is_backward))

    def _is_expected(self, unit: Unit, is_backward: bool) -> bool:
        """True if it is known that the next use of ``unit`` gathers it."""
        return uses_any(self.calls.next_used(unit, is_backward=is_backward))

    # backward

    def before_backward(self, unit: Unit, call: UnitCall) -> None:
        """A gradient of what a call has returned is there."""
        self._follow_stream()
        current = self.begin_backward(is_in_graph=True)
        if not call.is_started:
            self.calls.start(unit, call, current)
            if current.gives_gradients:
                self.reducer.leave(self.calls.left(unit, current))
            current.entered.setdefault(unit.name, unit)
            for other in unit.shared:
                self._gather(other)
            self._gather(unit, call.used)
        elif uses_any(call.used) and not unit.holds(call.used):
            self._gather(unit, call.used)

    def begin_backward(self, *, is_in_graph: bool = False, creates_graph: bool = False) -> BackwardPass:
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
        self.reducer.at_step = self._on_backward() and self.reducer.is_syncing  # first, since it may refuse
        self.deferred.start()
        for group in self.trained_groups:
            group.gradient.take_back()
        self._pass = BackwardPass(
            is_in_graph=is_in_graph,
            creates_graph=creates_graph or (is_in_graph and torch.is_grad_enabled()),
            interrupted=[unit for running in self._running for unit in (running, *running.shared)],
            outermost=backward_pass(),
            gives_gradients=not is_in_graph or accumulates_into(self._trained),
        )
        self._is_kept |= self._pass.creates_graph
        self._hooks.listen_to_gradients(not all(group.gradient.is_attached for group in self.trained_groups))
        if is_in_graph:
            at_end_of_backward(self.finish_backward)
        return self._pass

    def gradient_ready(self, unit: Unit, index: int) -> None:
        if self._compute.has_streams:
            self._follow_stream()
        current = self._pass
        if current is None or current.outermost is None:
            current = self.begin_backward(is_in_graph=in_backward())
        current.has_gradient = True
        if unit.mark_grad(index):
            self.reducer.complete(unit)
            if unit.is_sharded:
                self.release_after_backward(unit)

    def release_after_backward(self, unit: Unit) -> None:
        """Release a unit that no further backward node can read."""
        current = self._pass
        if current is None or self._is_kept or unit in current.interrupted:
            return
        if unit.name not in current.recomputed and backward_pass() != current.outermost:
            return  # reentrant checkpointing: a later recomputation may read it, and nothing gathers it for that
        if self.calls.can_release(unit):
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
        for unit in self.calls.units:
            self.calls.end_pass(unit)
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
        self.release_kept([unit for unit in units if any(group.row.sent.gather for group in unit.groups)])
        for unit in units:
            unit.pin_count += 1
        try:
            for unit in units:
                unit.gather(is_exact=True)
            yield
        finally:
            for unit in units:
                unit.pin_count -= 1
                unit.release(keep_user_views=keep_user_views and not self.in_pass)

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
        try:
            if not is_failed:
                give_back(self.units, self.sharded_at_init, self.axes.data, self.device)
        finally:
            self.clear_staging()
            self.disks.close()
