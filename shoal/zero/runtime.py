"""Executes the table on a live model: what happens before and after each unit's forward and backward.

pre-forward     gather the unit, and those that come next
post-forward    release it
pre-backward    gather it, in reverse order
gradient ready  all parameters of the unit ready? -> reduce, release
end of backward reduce what is open, release everything
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.device import at_end_of_backward, backward_pass, in_backward
from shoal.errors import CommError
from shoal.memory.pool import Pool
from shoal.zero.early import EARLY, EarlyShard
from shoal.zero.external import eagerly, external_use
from shoal.zero.hook_switch import ParameterOffload
from shoal.zero.hooks import HookSet, tensors_in
from shoal.zero.partition import ROOT
from shoal.zero.prefetch import UnitOrder
from shoal.zero.reducer import Reducer, UnitGradient
from shoal.zero.shelf import Disks
from shoal.zero.table import Table, row_of_stage
from shoal.zero.unit import Unit, UnitState


class _Call:
    """One forward call of one unit, until its backward is done."""

    __slots__ = ("is_done", "is_started", "num_inputs", "num_inputs_left")

    def __init__(self, num_inputs: int) -> None:
        self.num_inputs = num_inputs  # differentiable ones that are watched
        self.num_inputs_left = num_inputs
        self.is_started = False
        self.is_done = False


class ShardedModel:
    """A model whose units are placed as the table says.

    Args:
        units: in order; ``entries``: the gradients of those that have trainable parameters.
        modules: the modules whose forward needs a unit.
        on_backward: called when a backward pass begins. Returns: is it the last one before the step?
    """

    def __init__(
        self,
        model: nn.Module,
        table: Table,
        units: Sequence[Unit],
        entries: Sequence[UnitGradient],
        modules: dict[str, list[nn.Module]],
        comm: Communicator,
        pool: Pool,
        order: UnitOrder,
        *,
        max_reuse_numel: int,
        max_live_numel: int,
        has_overlap: bool,
        device: torch.device,
        on_backward: Callable[[], bool],
        disks: Disks | None = None,
    ) -> None:
        self.model = model
        self.disks = disks if disks is not None else Disks()
        self.table = table
        self.units = list(units)
        self.entries = list(entries)
        self.pool = pool
        self.order = order
        self.comm = comm
        self.reducer = Reducer(entries, comm, has_overlap=has_overlap, device=device)
        self.sharded = [unit for unit in self.units if unit.is_sharded]
        self._has_disk = any(unit.is_on_disk for unit in self.units)
        # Who reads parameters: the sharded units, and the model itself where nothing sharded is its own.
        self._readers = list(self.sharded)
        if self.sharded and all(model not in modules.get(unit.name, ()) for unit in self.sharded):
            root = Unit(ROOT, len(self.units), row_of_stage(3, ROOT), [])
            modules = {**modules, ROOT: [model]}
            self._readers.append(root)
        self.unit_of = {id(p): unit for unit in self.units for bucket in unit.buckets for p in bucket.parameters}
        # The order in which parameters are gathered and given to all, the same on every rank.
        self.number_of = {key: number for number, key in enumerate(self.unit_of)}
        self._changing: dict[int, int] = {}  # blocks that will give a parameter's changes to all, by its id
        self.sent_as_rows: frozenset[str] = frozenset()  # names of weights whose gradients go to the others as rows
        self.born_sharded: frozenset[int] = frozenset()  # ids of parameters that no rank ever held whole
        self.in_pass = False  # between the first event of a backward pass and its end
        self.num_plain_passes = 0  # that gave gradients and that the engine did not start; the engine sets it back
        self._is_in_graph = False  # this pass was noticed by a hook, not started by the engine
        self._has_gradient = False  # this pass gave a parameter one
        self._versions: list[int] = []  # of gradients that no hook watches, before the pass
        self._creates_graph = False  # this pass can itself be differentiated
        self._is_kept = False  # a later pass reads what this one, or an earlier one, has gathered
        self._outermost: int | None = None  # the backward pass in which this one began; inside it others may run
        self._recomputed: set[str] = set()  # units whose forward ran in this pass
        self._interrupted: list[Unit] = []  # whose forward goes on after this pass (``autograd.grad`` in a forward)
        self._on_backward = on_backward
        self._max_reuse_numel = max_reuse_numel
        self._max_live_numel = max_live_numel
        self._entry_of = {entry.unit.name: entry for entry in self.entries}
        self._is_all_trained = {
            unit.name: unit.name in self._entry_of
            and self._entry_of[unit.name].num_parameters == sum(len(bucket.parameters) for bucket in unit.buckets)
            for unit in (*self.units, *self._readers)
        }
        self._calls: dict[str, list[_Call]] = {unit.name: [] for unit in (*self.units, *self._readers)}
        self._running: list[Unit] = []
        self._searched: set[str] = set()
        self._is_searching = False
        self._modules = modules
        self._hidden: dict[str, list[tuple[nn.Module, str]]] = {unit.name: [] for unit in self._readers}
        self._hooks = HookSet()
        self.offload = ParameterOffload(model, self._hooks.switch, order)
        for unit in self._readers:
            for module in modules.get(unit.name, ()):
                self._hooks.on_unit(module, unit, self)
        self._hooks.on_model(model, self)  # the model's first, and last, where the model itself is a unit
        self._hooks.on_state_dict(model, {key: unit for key, unit in self.unit_of.items() if unit.is_sharded})
        for entry in self.entries:
            parameters = [p for gradient in entry.gradients for p in gradient.parameters]
            if any(gradient.is_watched for gradient in entry.gradients):
                for index, parameter in enumerate(parameters):
                    self._hooks.on_gradient(parameter, entry, index, self)

    # forward

    def searching(self) -> AbstractContextManager[object]:
        """In the first passes, look for parameters that are read outside their unit."""
        key = self._pass_key()
        if not self.sharded or key in self._searched or torch.compiler.is_compiling():
            return nullcontext()
        return self._search(key)

    @contextmanager
    def _search(self, key: str) -> Iterator[None]:
        self._is_searching = True
        try:
            with external_use(self.unit_of, self._read_outside), eagerly(self.model):
                yield
        finally:
            self._is_searching = False
        self._searched.add(key)

    def _read_outside(self, unit: Unit) -> None:
        reader = self._running[-1] if self._running else None
        if reader is not None:
            self.add_external(reader, unit)
        unit.gather()

    def add_external(self, reader: Unit, read: Unit) -> None:
        """From now on the forward of ``reader`` gathers ``read`` too."""
        if read is not reader and read not in reader.externals and read.is_sharded:
            reader.externals.append(read)

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
        if not in_backward():
            self._running.clear()
            self.order.start(self._pass_key())
            self._fetch_ahead()

    def after_model(self, output: Any) -> None:
        if in_backward():
            return
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
        self._running.append(unit)
        for external in unit.externals:
            self._gather(external)
        self._gather(unit)

    def after_forward(self, unit: Unit, inputs: Any, output: Any) -> None:
        if self._running and self._running[-1] is unit:
            self._running.pop()
        is_recomputing = in_backward()
        if torch.is_grad_enabled() and not (is_recomputing and self._is_open(unit)):
            self._watch(unit, inputs, output)
        if is_recomputing:
            self._recomputed.add(unit.name)
            return
        if torch.is_grad_enabled() and unit.row.secondary and unit.state is UnitState.FULL:
            for bucket in unit.buckets:
                bucket.keep_secondary()
        for candidate in (unit, *unit.externals):
            is_needed = any(candidate is running or candidate in running.externals for running in self._running)
            if not is_needed and not self._is_kept and not self._is_worth_keeping(candidate):
                candidate.release()

    def _is_worth_keeping(self, unit: Unit) -> bool:
        if not self._max_reuse_numel:
            return False
        distance = self.order.reuse_distance(unit)
        return distance is not None and distance <= self._max_reuse_numel and self.live_numel() <= self._max_live_numel

    def live_numel(self) -> int:
        """Elements of sharded units that are gathered now."""
        return sum(unit.numel for unit in self.sharded if unit.state in (UnitState.GATHERING, UnitState.FULL))

    def _gather(self, unit: Unit) -> None:
        self.order.visit(unit, in_backward=self.in_pass)
        from_secondary = self.in_pass
        unit.start_fetch(from_secondary=from_secondary)
        self._fetch_ahead()
        unit.gather(from_secondary=from_secondary)
        for later in self.order.ahead(self.live_numel()):
            later.start_gather(from_secondary=from_secondary)

    def _fetch_ahead(self) -> None:
        """Begin to read the units that come next from their disk, as far as there are buffers for them."""
        if not self._has_disk:
            return
        for unit, is_backward in self.order.upcoming():
            if unit.state is UnitState.AWAY:
                if not unit.can_fetch_ahead():
                    break
                unit.start_fetch(from_secondary=is_backward)

    # backward

    def _is_open(self, unit: Unit) -> bool:
        return any(call.is_started and not call.is_done for call in self._calls[unit.name])

    def _watch(self, unit: Unit, inputs: Any, output: Any) -> None:
        """Gather before this call's backward, and know when it is done."""
        if self._is_searching:
            self._hidden[unit.name] = list(_kept_on_modules(self._modules.get(unit.name, ())))
        kept = [getattr(module, name, None) for module, name in self._hidden[unit.name]]
        outputs = [tensor for tensor in tensors_in((output, kept)) if tensor.requires_grad]
        if not outputs:
            if unit.buckets and any(p.requires_grad for bucket in unit.buckets for p in bucket.parameters):
                for held in (unit, *unit.externals):
                    held.holds += 1  # nothing tells when its backward begins: stay gathered until a backward pass ends
                    self._calls[held.name].append(_HELD)
            return
        is_input_needed = not self._is_all_trained[unit.name]
        received = [t for t in tensors_in(inputs) if t.requires_grad] if is_input_needed else []
        call = _Call(len(received))

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

    def _before_backward(self, unit: Unit, call: _Call) -> None:
        self.begin_backward(is_in_graph=True)
        if not call.is_started:
            call.is_started = True
            call.is_done = False
            call.num_inputs_left = call.num_inputs
            self._calls[unit.name].append(call)
            for external in unit.externals:
                self._gather(external)
            self._gather(unit)
        elif unit.is_at_rest:
            self._gather(unit)

    def begin_backward(self, *, is_in_graph: bool = False, creates_graph: bool = False) -> None:
        """A backward pass begins. Idempotent within a pass.

        Args:
            is_in_graph: a hook noticed it; the engine did not start it.
            creates_graph: it can itself be differentiated.
        """
        if self.in_pass:
            if self._outermost is None:
                self._outermost = backward_pass()
            return
        self.reducer.at_step = self._on_backward()  # first, since it may refuse
        for entry in self.entries:
            for gradient in entry.gradients:
                gradient.take_back()
        self.in_pass = True
        self._outermost = backward_pass()
        self._recomputed.clear()
        self._is_in_graph = is_in_graph
        self._has_gradient = False
        self._versions = self._unwatched_versions() if is_in_graph else []
        self._creates_graph = creates_graph or (is_in_graph and torch.is_grad_enabled())
        self._is_kept |= self._creates_graph
        self._interrupted = [unit for running in self._running for unit in (running, *running.externals)]
        if is_in_graph:
            at_end_of_backward(self.finish_backward)

    def _unwatched_versions(self) -> list[int]:
        """What changes when autograd adds to a gradient on one rank, where no hook tells."""
        gradients = [
            p.grad for entry in self.entries for g in entry.gradients if not g.is_watched for p in g.parameters
        ]
        return [-1 if gradient is None else gradient._version for gradient in gradients]

    def gradient_ready(self, entry: UnitGradient, index: int) -> None:
        if not self.in_pass or self._outermost is None:
            self.begin_backward(is_in_graph=in_backward())
        self._has_gradient = True
        if entry.mark(index):
            self.reducer.complete(entry)
            unit = entry.unit
            if unit.is_sharded:
                self._release_after_backward(unit)

    def _release_after_backward(self, unit: Unit) -> None:
        """Release a unit that no further backward node can read.

        A trained weight is read for the last time before its gradient is accumulated, so a unit of trained weights is
        done when all of them have theirs. A frozen weight is read until the gradients of its calls' inputs are there;
        where no input is differentiable, or another unit reads it, only the end of backward is sure.
        """
        if not self.in_pass or self._is_kept or unit in self._interrupted:
            return
        entry = self._entry_of.get(unit.name)
        if entry is not None and not entry.is_complete:
            return
        if unit.name not in self._recomputed and backward_pass() != self._outermost:
            return  # reentrant checkpointing: a later recomputation may read it, and nothing gathers it for that
        if not self._is_all_trained[unit.name]:
            calls = self._calls[unit.name]
            is_read_elsewhere = any(unit in other.externals for other in self._readers)
            if is_read_elsewhere or any(not (call.is_done and call.num_inputs) for call in calls):
                return
        unit.release()

    def finish_backward(self) -> None:
        """A backward pass has ended: reduce what is open, bring every unit to rest. Idempotent.

        After one with ``create_graph`` (a gradient penalty) units stay gathered until the pass through that graph ends.
        """
        if not self.in_pass:
            return
        self.in_pass = False
        if self._is_in_graph:
            has_gradient = self._has_gradient or self._versions != self._unwatched_versions()
            self.num_plain_passes += has_gradient
            if self._creates_graph and not has_gradient:
                return
        self.reducer.finish()
        if not self._creates_graph:
            self._is_kept = False
            self._rest()
        self.order.end()

    def _rest(self, *, is_recovering: bool = False) -> None:
        for unit in self._readers:
            calls = self._calls[unit.name]
            unit.holds -= sum(call is _HELD for call in calls)
            for call in calls:
                if call is not _HELD:
                    call.is_done, call.is_started = True, False
            calls.clear()
            if unit in self._interrupted:
                continue
            try:
                unit.release()
            except CommError:
                if not is_recovering:
                    raise  # else the first error counts: this gather can never end

    # other callers

    def release_all(self) -> None:
        """Between two passes: release every unit that nobody holds, prefetched or kept for later. Communicates nothing.

        What a coming pass through a graph with ``create_graph`` needs stays.
        """
        if not self._is_kept:
            for unit in self.sharded:
                unit.release()

    @contextmanager
    def gathered(self, units: Sequence[Unit], *, keeps_others: bool = False) -> Iterator[None]:
        """Hold units full inside the block, whoever asks: a pipeline schedule, a user, an accessor.

        Args:
            keeps_others: what the block has made of the parameters without a copy stays valid after it. Not within a
                pass, where autograd holds them too.
        """
        for unit in units:
            unit.holds += 1
        try:
            for unit in units:
                unit.gather()
            yield
        finally:
            for unit in units:
                unit.holds -= 1
                unit.release(keeps_others=keeps_others and not self.in_pass)

    def begin_change(self, parameter: torch.Tensor) -> None:
        """A block begins that gives changes of a parameter to all ranks at its end."""
        self._changing[id(parameter)] = self._changing.get(id(parameter), 0) + 1

    def end_change(self, parameter: torch.Tensor) -> int:
        """It ends. Returns: how many such blocks are still around it."""
        num_left = self._changing.get(id(parameter), 1) - 1
        if num_left:
            self._changing[id(parameter)] = num_left
        else:
            self._changing.pop(id(parameter), None)
        return num_left

    def recover(self) -> None:
        """After an exception: every unit at rest unless a caller holds it, no gradient, no pass.

        Raises nothing about peers that are gone.
        """
        self.in_pass = self._is_kept = False
        self._running.clear()
        self._interrupted.clear()
        self.reducer.reset()
        self._rest(is_recovering=True)

    def detach(self, *, is_failed: bool = False) -> None:
        """Take every hook off and give the parameters memory of their own: whole, or sharded where they came sharded.

        Args:
            is_failed: the values are of no use: nothing is gathered, and what was sharded stays a stand-in of NaN.

        Communicates: an all_gather per sharded unit; a broadcast of each parameter that came sharded.
        Memory: of a model that came sharded, the shards and one unit.
        """
        self._hooks.detach()
        try:
            for unit in self.units if not is_failed else ():
                unit.gather()
                for bucket in unit.buckets:
                    bucket.detach()
                    for parameter in bucket.parameters:
                        if id(parameter) in self.born_sharded:
                            EARLY.put(parameter, EarlyShard(parameter, self.comm, parameter.device, None))
        finally:
            self.pool.clear()
            self.disks.close()


def _kept_on_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Attributes in which a forward left a differentiable tensor beside its output (an auxiliary loss, say)."""
    for module in modules:
        for part in module.modules():
            for name, value in vars(part).items():
                if name not in ("_parameters", "_buffers", "_modules") and any(
                    t.requires_grad for t in tensors_in(value, depth=3)
                ):
                    yield part, name


_HELD = _Call(num_inputs=0)
