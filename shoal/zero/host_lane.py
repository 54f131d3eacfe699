"""The optimizer's step on host memory, beside the device's work.

    device      backward 3 | backward 2 | backward 1 | backward 0 | norm | forward 0 | forward 1 | ...
    gradients        3 leaves     2 leaves     1 leaves     0 leaves
    host                    | update 3 | update 2 | update 1 | update 0 |         with ``super_offload``
                                                                   | update 0 | 1 | 2 | 3 |   without
    parameters                                                            0 returns   1 returns ...

A unit's gradient leaves for the host as soon as it is reduced for the step. Its update runs on one thread of this
rank's, which the optimizer's own threads serve, in the order in which updates are asked for. Where a unit's parameters
rest as shards, the step does not wait for it: who gathers the unit next does.

With ``super_offload`` the update begins before the norm over all units, and with it the clipping, is known: with the
factor that it will most likely be. What it overwrites is kept. At the step the factor, the gradient, the
hyperparameters and the ranges are compared with those that were taken; where one differs, the old values are put
back to the bit and the update runs again. So the numbers are always those of an update at the end.

Sources: ZeRO-Offload (arXiv:2101.06840), section 4; SuperOffload (arXiv:2509.21271), speculation and validation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shoal.device import Device, host_empty, is_fake
from shoal.memory.stream_copies import CopyDone, copies_of
from shoal.optim.host import HostStep
from shoal.optim.host_rules import Rule, RuleName, kind_of

if TYPE_CHECKING:
    from shoal.zero.bucket_state import BucketState, Piece

Mark = tuple[int, int]
"""Which gradient it is: how often it was reduced since the last step, and its memory's version."""


@dataclass(eq=False)
class _Part:
    """The update of one piece, with everything that it reads."""

    piece: Piece
    rule: Rule
    hyper: dict[str, Any]
    held: dict[str, Any]  # the optimizer's state of the piece

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the update changes: the master weights, then the states in the rule's order."""
        return [self.piece.param.detach(), *(self.held[name] for name in self.rule.state_names)]


@dataclass(eq=False)
class _Update:
    """One bucket's update, under way or done."""

    parts: list[_Part]
    coefficient: float
    mark: Mark
    work: Future[None]
    is_ahead: bool  # the step has not said yet that it is right
    is_sent_back: bool  # the parameters are rounded into a buffer first


@dataclass(eq=False)
class _Lane:
    """What one bucket has on its way between device and host."""

    gradient: torch.Tensor | None = None  # [owned numel]
    is_gradients_home: bool = False  # the device keeps none; the ledger has it as the gradient
    parameters: torch.Tensor | None = None  # [owned numel]: rounded, on their way back
    undo: list[torch.Tensor] = field(default_factory=list)  # [owned numel] each: master weights and states before
    arrival: CopyDone | None = None  # of ``gradient``
    mark: Mark | None = None  # of what ``gradient`` holds
    update: _Update | None = None


class HostLane:
    """Sends gradients to the host, updates there, sends parameters back. One per engine.

    Args:
        optimizer: its rule and hyperparameters.
        device: that computes forward and backward.
        is_ahead: updates begin in the backward pass (``super_offload``).
        step: does the arithmetic. Closed with this.
        is_pinned: page-lock what travels.

    Memory, on the host: per bucket its gradient and its rounded parameters; with ``is_ahead`` also master weights and
    optimizer state a second time.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: Device,
        *,
        is_ahead: bool,
        step: HostStep,
        is_pinned: bool = True,
    ) -> None:
        self.is_ahead = is_ahead
        self.kind: RuleName | None = kind_of(optimizer)
        self.num_ahead = 0  # updates that ran in the backward pass and were right
        self.num_undone = 0  # those that were not
        self.update_seconds = 0.0  # that updates took on the host
        self.waited_seconds = 0.0  # that anybody waited for one
        self._optimizer = optimizer
        self._device = device
        self._copies = copies_of(device.torch_device)
        self._step = step
        self._is_pinned = is_pinned
        self._thread: ThreadPoolExecutor | None = None
        self._lanes: dict[int, _Lane] = {}
        self.is_likely = True  # did the last step take the factor that was likely?

    @property
    def host_nbytes(self) -> int:
        """Bytes on their way between device and host, and of what can be put back."""
        held = [t for lane in self._lanes.values() for t in (lane.parameters, *lane.undo)]
        held += [lane.gradient for lane in self._lanes.values() if not lane.is_gradients_home]
        return sum(tensor.nbytes for tensor in held if tensor is not None) + self._step.scratch_nbytes

    def _lane(self, state: BucketState) -> _Lane:
        return self._lanes.setdefault(id(state), _Lane())

    # gradients

    def send(self, state: BucketState) -> None:
        """Start to copy a bucket's reduced gradient to the host, unless it is there. Does not block the host."""
        lane = self._lane(state)
        if lane.mark == _mark(state) and lane.gradient is not None:
            return
        gradient = state.gradient.owned()
        mark = _mark(state)
        lane.is_gradients_home = state.gradient.rests_apart
        self.settle(state)  # what reads the last step's gradient
        if lane.gradient is None or lane.gradient.dtype != gradient.dtype:
            lane.gradient = host_empty(gradient.numel(), gradient.dtype, gradient.device, is_pinned=self._is_pinned)
        lane.arrival = self._copy(gradient, lane.gradient, is_source_freed=state.gradient.rests_apart)
        lane.mark = mark

    def gradient(self, state: BucketState) -> torch.Tensor:
        """A bucket's gradient on the host. Order: blocks the host until it is there. Shape: [owned numel]."""
        lane = self._lane(state)
        assert lane.gradient is not None and lane.arrival is not None
        lane.arrival.block()
        return lane.gradient

    def _copy(self, source: torch.Tensor, target: torch.Tensor, *, is_source_freed: bool = False) -> CopyDone:
        if self._copies is None or is_fake(source):
            target.copy_(source, non_blocking=True)
            return CopyDone()
        return self._copies.copy(source, target, is_source_freed=is_source_freed)

    # updates

    def begin_ahead(self, state: BucketState, coefficient: float) -> None:
        """In the backward pass: update a bucket whose gradient has been sent, with the factor that is likely."""
        lane = self._lane(state)
        touched = all(state.gradient.touched)  # else only all ranks together know which parameters are left alone
        if not self.is_ahead or not self.is_likely or not touched or lane.update is not None:
            return
        if state.shelf is not None or not state.has_own_master:  # else it would change parameters that are in use
            return
        parts = self._parts(state, state.pieces)
        if parts is None:
            return
        tensors = [flat for part in parts[:1] for flat in part.tensors]
        owned = state.master.numel()
        if len(lane.undo) != len(tensors):
            lane.undo = [host_empty(owned, torch.float32, state.master.device, is_pinned=False) for _ in tensors]
        lane.update = self._submit(state, parts, coefficient, is_ahead=True)

    def start(self, state: BucketState, pieces: Sequence[Piece], coefficient: float) -> bool:
        """At the step: update these pieces of a bucket whose gradient has been sent. Does not block the host.

        Returns: False where this is the optimizer's own affair: a rule that is not known, state that its first step
            makes, or a dry run.
        """
        lane = self._lane(state)
        ahead = lane.update
        if ahead is not None and self._is_right(state, ahead, pieces, coefficient):
            ahead.is_ahead = False
            self.num_ahead += 1
            _count(ahead.parts)
            return True
        self.undo(state)
        parts = self._parts(state, pieces)
        if parts is None:
            return False
        if parts:
            lane.update = self._submit(state, parts, coefficient, is_ahead=False)
            _count(parts)
        return True

    def _is_right(self, state: BucketState, ahead: _Update, pieces: Sequence[Piece], coefficient: float) -> bool:
        if ahead.coefficient != coefficient or ahead.mark != _mark(state):
            return False
        if [part.piece for part in ahead.parts] != list(pieces):
            return False
        return all(part.rule == self._rule(part.piece, part.held) for part in ahead.parts)

    def undo(self, state: BucketState) -> None:
        """Put back what an update that ran ahead of the step has changed. Nothing where there is none."""
        lane = self._lanes.get(id(state))
        if lane is None or lane.update is None or not lane.update.is_ahead:
            return
        update = self._done(lane)
        self.num_undone += 1
        with torch.no_grad():
            for part in update.parts:
                for kept, value in zip(lane.undo, part.tensors, strict=True):
                    value.copy_(kept[part.piece.start : part.piece.stop])

    def _parts(self, state: BucketState, pieces: Sequence[Piece]) -> list[_Part] | None:
        if self.kind is None or state.master.dtype != torch.float32 or is_fake(state.master):
            return None
        parts = []
        for piece in pieces:
            held = self._optimizer.state.get(piece.param, {})
            rule = self._rule(piece, held)
            states = [held.get(name) for name in rule.state_names]
            if not all(isinstance(value, torch.Tensor) and value.dtype == torch.float32 for value in states):
                return None
            group = self._optimizer.param_groups[piece.group]
            hyper = {key: value for key, value in group.items() if key != "params"}
            parts.append(_Part(piece, rule, hyper, held))
        return parts

    def _rule(self, piece: Piece, held: Mapping[str, Any]) -> Rule:
        assert self.kind is not None
        # SGD counts no steps: its first one is the one that makes its momentum, and is not done here.
        number = float(held["step"]) + 1 if "step" in held else 2.0
        return Rule.of(self.kind, self._optimizer.param_groups[piece.group], number)

    def _submit(self, state: BucketState, parts: list[_Part], coefficient: float, *, is_ahead: bool) -> _Update:
        lane, mark = self._lane(state), _mark(state)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-host-lane")
        is_sent_back = state.has_own_master and (is_ahead or not state.bucket.is_shard_apart)
        target = self.rounded(state) if is_sent_back else state.bucket.shard if state.has_own_master else None
        gradient, arrival = lane.gradient, lane.arrival
        undo = lane.undo if is_ahead else None
        assert gradient is not None and arrival is not None

        def run() -> None:
            arrival.block()
            begin = time.perf_counter()
            for part in parts:
                low, high = part.piece.start, part.piece.stop
                self._step.start(
                    part.rule.kind,
                    part.piece.param,
                    part.held,
                    gradient[low:high],
                    None if target is None else target[low:high],
                    part.hyper,
                    step=part.rule.step,
                    gradient_scale=coefficient,
                    undo=None if undo is None else [kept[low:high] for kept in undo],
                ).wait()
            self.update_seconds += time.perf_counter() - begin

        return _Update(parts, coefficient, mark, self._thread.submit(run), is_ahead, is_sent_back)

    def rounded(self, state: BucketState) -> torch.Tensor:
        """Host memory for the rounded parameters. Shape: [owned numel]."""
        lane = self._lane(state)
        if lane.parameters is None:
            bucket = state.bucket
            lane.parameters = host_empty(
                bucket.end - bucket.begin, bucket.dtype, bucket.full.device, is_pinned=self._is_pinned
            )
        return lane.parameters

    # the way back

    def finish(self, state: BucketState) -> None:
        """Wait for a bucket's update, and start to send its parameters back. Nothing where there is none.

        Order: what is told to the device from now on finds them.
        Raises: what the update raised.
        """
        lane = self._lanes.get(id(state))
        if lane is None or lane.update is None or lane.update.is_ahead:
            return
        update = self._done(lane)
        if update.is_sent_back:
            self.send_back(state, [part.piece for part in update.parts])

    def send_back(self, state: BucketState, pieces: Sequence[Piece]) -> None:
        """Start to copy what lies in ``rounded`` to where the parameters rest."""
        if not pieces:
            return
        rounded = self.rounded(state)
        parameters = state.resting_parameters
        low, high = min(piece.start for piece in pieces), max(piece.stop for piece in pieces)
        if high - low == sum(piece.stop - piece.start for piece in pieces):
            ranges = [(low, high)]
        else:
            ranges = [(piece.start, piece.stop) for piece in pieces]
        with torch.no_grad():
            for start, stop in ranges:
                done = self._copy(rounded[start:stop], parameters[start:stop])
        done.wait()

    def settle(self, state: BucketState) -> None:
        """Have a bucket's master weights, optimizer state and parameters as the last step left them."""
        self.undo(state)
        self.finish(state)

    def _done(self, lane: _Lane) -> _Update:
        """Wait for an update. One that failed stays, and fails whoever waits: its bucket is half updated."""
        update = lane.update
        assert update is not None
        begin = time.perf_counter()
        update.work.result()
        self.waited_seconds += time.perf_counter() - begin
        lane.update = None
        return update

    def forget(self, state: BucketState) -> None:
        """This step's gradient counts no more; an update that ran ahead and was not wanted is undone."""
        self.undo(state)
        lane = self._lanes.get(id(state))
        if lane is not None:
            lane.mark = None

    def close(self) -> None:
        """End the threads, after what was started; give the memory back."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._step.close()
        self._lanes.clear()


def _mark(state: BucketState) -> Mark:
    return state.gradient.mark


def _count(parts: Sequence[_Part]) -> None:
    for part in parts:
        if "step" in part.held:
            part.held["step"] += 1
