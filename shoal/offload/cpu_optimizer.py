"""The CPU optimizer: the step on host memory, while the device works (ZeRO-Offload).

    device      backward 3 | backward 2 | backward 1 | backward 0 | norm | forward 0 | forward 1 | ...
    gradients     3 is sent    2 is sent    1 is sent    0 is sent
    host                    | update 3 | update 2 | update 1 | update 0 |         with ``super_offload``
                                                                   | update 0 | 1 | 2 | 3 |   without
    parameters                                                            0 is back   1 is back ...

A group's gradient is copied to the host as soon as it is reduced for the step. Its update runs on one thread of this
rank's, in the order in which updates are started. Where the parameters are stored as shards, the step does not wait for
it: ``unit.gather()`` does.

With ``super_offload`` the update begins before the norm over all units, and with it the clipping, is known: with the
most likely gradient scale. It keeps a copy of what it overwrites. At the step the scale, the gradient, the
hyperparameters and the ranges are compared with those that were used; where one differs, the old values are restored to
the bit and the update runs again. So the numbers are always those of an update at the end.

Sources: ZeRO-Offload (arXiv:2101.06840), section 4; SuperOffload (arXiv:2509.21271), speculation and validation.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from shoal.comm.side_stream import CopyDone
from shoal.device import Device, host_empty, is_fake
from shoal.memory.stream_copies import copies_of
from shoal.optim.host import HostStep
from shoal.optim.host_rules import Rule, RuleName, kind_of
from shoal.sharding.gradient_norm import sum_of_squares
from shoal.sharding.offloaded_gradient import MAX_SHARDS, OffloadedGradient
from shoal.sharding.param_group import ParameterGroup, ParameterRange
from shoal.streams import HostThread, ThreadResult, name_memory, simulation

_Result = TypeVar("_Result")


@dataclass(eq=False)
class RangeUpdate:
    """The update of one range, with everything that it reads."""

    range: ParameterRange
    rule: Rule
    state: dict[str, Any]  # the optimizer's, of the range
    gradient: torch.Tensor  # [range's numel]
    gradient_scale: float

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the update changes: the main parameters, then the states in the rule's order."""
        return [self.range.param.detach(), *(self.state[name] for name in self.rule.state_names)]


@dataclass(eq=False)
class _Update:
    """One group's update, under way or done."""

    ranges: list[RangeUpdate]
    version: tuple[int, int]  # of the gradient
    work: ThreadResult[None]
    is_ahead: bool  # the step has not confirmed it yet
    is_sent_back: bool  # the parameters are rounded into a buffer first


@dataclass(eq=False)
class _HostCopies:
    """The host copies of one group."""

    gradient: torch.Tensor | None = None  # [owned numel]
    is_only_copy: bool = False  # the device keeps no gradient; the ledger counts this one as the gradient
    parameters: torch.Tensor | None = None  # [owned numel]: rounded, on their way back
    undo: list[torch.Tensor] = field(default_factory=list)  # [owned numel] each: main parameters and states before
    arrival: CopyDone | None = None  # of ``gradient``
    returned: CopyDone = field(default_factory=CopyDone)  # the last write to the device's parameters
    addition: ThreadResult[torch.Tensor | None] | None = None  # the last one to ``gradient``; at the step with its norm
    version: tuple[int, int] | None = None  # of what ``gradient`` holds
    update: _Update | None = None

    def values(self) -> torch.Tensor:
        """See ``HostGradient``."""
        assert self.gradient is not None and self.arrival is not None
        self.arrival.block()
        if self.addition is not None:
            self.addition.result()
        return self.gradient

    def sum_of_squares(self) -> torch.Tensor:
        """See ``HostGradient``."""
        found = None if self.addition is None else self.addition.result()
        return sum_of_squares(self.values()) if found is None else found


class CpuOptimizer:
    """Sends gradients to the host, updates there, sends parameters back. One per engine.

    Args:
        optimizer: its rule and hyperparameters.
        device: that computes forward and backward.
        is_ahead: updates begin in the backward pass (``super_offload``).
        step: does the arithmetic. Closed with this.
        is_pinned: page-lock what is copied.

    Memory, on the host: per group its gradient and its rounded parameters; with ``is_ahead`` also main parameters and
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
        self.likely_scale: Callable[[], float] = lambda: 1.0  # what gradients are multiplied by, if nothing is clipped
        self.steps_per_epoch: Callable[[], int | None] = lambda: None  # of the training data; None: unknown
        self.is_likely = True  # True if the last step used the likely scale
        self.num_ahead = 0  # updates that ran in the backward pass and were right
        self.num_undone = 0  # those that were not
        self.update_seconds = 0.0  # that updates took on the host
        self.waited_seconds = 0.0  # that this rank waited for updates
        self._optimizer = optimizer
        self._copies = copies_of(device.torch_device)
        self._step = step
        self._is_pinned = is_pinned
        self._threads: dict[str, HostThread] = {}
        self._transfers: defaultdict[ParameterGroup, _HostCopies] = defaultdict(_HostCopies)
        # By numel and dtype, host memory for parts and the addition that reads it.
        self._parts: dict[tuple[int, torch.dtype], deque[tuple[torch.Tensor, ThreadResult[torch.Tensor | None]]]] = {}

    @property
    def host_nbytes(self) -> int:
        """Bytes on their way between device and host, and of what can be restored."""
        held = [t for transfer in self._transfers.values() for t in (transfer.parameters, *transfer.undo)]
        held += [part for parts in self._parts.values() for part, _ in parts]
        held += [transfer.gradient for transfer in self._transfers.values() if not transfer.is_only_copy]
        return sum(tensor.nbytes for tensor in held if tensor is not None) + self._step.scratch_nbytes

    @property
    def device_nbytes(self) -> int:
        """Bytes of optimizer state on the device."""
        return 0

    # gradients

    def send_gradient(self, group: ParameterGroup, *, at_step: bool) -> None:
        """In the backward pass: the group's gradient was reduced. Start to copy it, and the update with super_offload.

        Args:
            at_step: it is the gradient for the step; else one micro-batch of several was added.
        """
        transfer, offloaded = self._transfers[group], offloaded_gradient(group)
        if not (at_step or offloaded is not None):
            return
        if offloaded is None or offloaded.part is None:
            self.send(group)
            copied = transfer.arrival
        else:
            copied = self._add(group, offloaded.part, is_for_step=at_step)
        if offloaded is not None:
            assert copied is not None
            offloaded.offload(transfer, copied, is_for_step=at_step)
            transfer.version = offloaded.version
        if at_step:
            group.wait_for_readers()
            self._start_ahead(group)

    def send(self, group: ParameterGroup) -> None:
        """Start to copy a group's reduced gradient to the host, unless it is there. Does not block the host."""
        transfer = self._transfers[group]
        if transfer.version == group.gradient.version and transfer.gradient is not None:
            return
        gradient = group.gradient.owned()
        is_freed = transfer.is_only_copy = offloaded_gradient(group) is not None
        self._before_write(group)
        if transfer.addition is not None:  # to a gradient that was dropped
            transfer.addition.result()
            transfer.addition = None
        if transfer.gradient is None or transfer.gradient.dtype != gradient.dtype:
            transfer.gradient = host_empty(gradient.numel(), gradient.dtype, gradient.device, is_pinned=self._is_pinned)
        name_memory(transfer.gradient, f"the gradient of unit {group.label!r} on the host")
        transfer.arrival = self._copy(gradient, transfer.gradient, is_source_freed=is_freed)
        if not is_freed:
            group.gradient.copied = transfer.arrival
        transfer.version = group.gradient.version

    def _before_write(self, group: ParameterGroup) -> None:
        """Wait for what reads the gradient on the host."""
        self.synchronize(group)

    def _add(self, group: ParameterGroup, part: torch.Tensor, *, is_for_step: bool) -> CopyDone:
        """Add what one more micro-batch gave to the gradient on the host.

        Returns: the end of the copy of ``part`` to the host. Order: the addition runs on the thread of the updates;
        blocks the host until the last addition but one of this size is done.
        """
        transfer = self._transfers[group]
        total, arrival = transfer.gradient, transfer.arrival
        assert total is not None and arrival is not None
        self._before_write(group)
        parts = self._parts.setdefault((part.numel(), part.dtype), deque())
        if len(parts) < MAX_SHARDS:
            host = host_empty(part.numel(), part.dtype, part.device, is_pinned=self._is_pinned)
        else:
            host, reader = parts.popleft()
            reader.result()
        name_memory(host, f"a part of the gradient of unit {group.label!r} on the host")
        copied = self._copy(part, host, is_source_freed=True)

        def run() -> torch.Tensor | None:
            arrival.block()
            copied.block()
            with torch.no_grad():
                total.add_(host)
            return sum_of_squares(total) if is_for_step else None

        transfer.addition = self._on_thread(run)
        parts.append((host, transfer.addition))
        return copied

    def _on_thread(self, run: Callable[[], _Result], name: str = "cpu-optimizer") -> ThreadResult[_Result]:
        if name not in self._threads:
            self._threads[name] = HostThread(f"shoal-{name}")
        return self._threads[name].submit(run)

    def gradient(self, group: ParameterGroup) -> torch.Tensor:
        """A group's gradient on the host. Order: blocks the host until it is there. Shape: [owned numel]."""
        return self._transfers[group].values()

    def _copy(self, source: torch.Tensor, target: torch.Tensor, *, is_source_freed: bool = False) -> CopyDone:
        if self._copies is None:
            target.copy_(source, non_blocking=True)
            return CopyDone()
        return self._copies.copy(source, target, is_source_freed=is_source_freed)

    def _queued(self) -> AbstractContextManager[CopyDone]:
        """What the block queues on the device comes after the copies that were started. Gives: its end."""
        return nullcontext(CopyDone()) if self._copies is None else self._copies.queued()

    # updates

    def _start_ahead(self, group: ParameterGroup) -> None:
        """In the backward pass: update a group whose gradient has been sent, with the likely gradient scale."""
        transfer = self._transfers[group]
        is_known = all(group.gradient.has_grad)  # else only all ranks together know which parameters are left alone
        if not self.is_ahead or not self.is_likely or not is_known or transfer.update is not None:
            return
        if group.disk is not None or not group.has_own_main:  # else it would change parameters that are in use
            return
        ranges = self._range_updates(group, group.ranges, self.likely_scale())
        if ranges is None:
            return
        tensors = ranges[0].tensors if ranges else []
        if len(transfer.undo) != len(tensors):
            transfer.undo = [
                host_empty(group.main.numel(), torch.float32, group.main.device, is_pinned=False) for _ in tensors
            ]
        transfer.update = self._submit(group, ranges, is_ahead=True)

    def start(self, group: ParameterGroup, ranges: Sequence[ParameterRange], gradient_scale: float) -> bool:
        """At the step: update these ranges of a group whose gradient has been sent. Does not block the host.

        Returns: False where the optimizer has to do it itself: a rule that is not known, state that its first step
            makes, or a dry run.
        """
        transfer = self._transfers[group]
        ahead = transfer.update
        if ahead is not None and self._is_right(group, ahead, ranges, gradient_scale):
            updates: list[RangeUpdate] | None = ahead.ranges
            ahead.is_ahead = False
            self.num_ahead += 1
        else:
            self._undo(group)
            updates = self._range_updates(group, ranges, gradient_scale)
            if updates:
                transfer.update = self._submit(group, updates)
        for update in updates or ():
            if "step" in update.state:
                update.state["step"] += 1
        return updates is not None

    def _is_right(
        self, group: ParameterGroup, ahead: _Update, ranges: Sequence[ParameterRange], gradient_scale: float
    ) -> bool:
        if ahead.version != group.gradient.version or [update.range for update in ahead.ranges] != list(ranges):
            return False
        return all(
            update.gradient_scale == gradient_scale and update.rule == self._rule(update.range, update.state)
            for update in ahead.ranges
        )

    def _undo(self, group: ParameterGroup) -> None:
        """Restore what an update that ran ahead of the step has changed. Nothing where there is none."""
        transfer = self._transfers[group]
        if transfer.update is None or not transfer.update.is_ahead:
            return
        update = self._done(transfer)
        self.num_undone += 1
        with torch.no_grad():
            for part in update.ranges:
                for old, value in zip(transfer.undo, part.tensors, strict=True):
                    value.copy_(old[part.range.start : part.range.stop])

    def _range_updates(
        self, group: ParameterGroup, ranges: Sequence[ParameterRange], gradient_scale: float
    ) -> list[RangeUpdate] | None:
        if self.kind is None or group.main.dtype != torch.float32:
            return None
        if is_fake(group.main) and simulation() is None:
            return None
        updates, gradient = [], self._transfers[group].gradient
        assert gradient is not None
        for part in ranges:
            state = self._optimizer.state.get(part.param, {})
            rule = self._rule(part, state)
            states = [state.get(name) for name in rule.state_names]
            if not all(isinstance(value, torch.Tensor) and value.dtype == torch.float32 for value in states):
                return None
            updates.append(RangeUpdate(part, rule, state, gradient[part.start : part.stop], gradient_scale))
        return updates

    def _rule(self, part: ParameterRange, state: Mapping[str, Any], number: float | None = None) -> Rule:
        """``number``: of the update, from 1; None: that after the last one."""
        assert self.kind is not None
        if number is None:
            # SGD counts no steps: its first one is the one that makes its momentum, and is not done here.
            is_counted = "step" in state and not is_fake(state["step"])
            number = float(state["step"]) + 1 if is_counted else 2.0
        return Rule.of(self.kind, self._optimizer.param_groups[part.group], number)

    def _submit(
        self,
        group: ParameterGroup,
        updates: list[RangeUpdate],
        *,
        is_ahead: bool = False,
        after: ThreadResult[Any] | None = None,
        thread: str = "cpu-optimizer",
    ) -> _Update:
        """Start updates on a thread, which waits for ``after``, and until it may read and write the memory."""
        transfer, version = self._transfers[group], group.gradient.version
        is_sent_back = group.has_own_main and (is_ahead or not group.buffer.is_offloaded)
        target = self.rounded(group) if is_sent_back else group.buffer.shard if group.has_own_main else None
        arrival, returned = transfer.arrival, transfer.returned
        undo = transfer.undo if is_ahead else None
        assert arrival is not None

        def run() -> None:
            arrival.block()
            returned.block()
            if after is not None:
                after.result()
            begin = time.perf_counter()
            for update in updates:
                low, high = update.range.start, update.range.stop
                self._step.start(
                    update.rule,
                    update.range.param,
                    update.state,
                    update.gradient,
                    None if target is None else target[low:high],
                    gradient_scale=update.gradient_scale,
                    undo=None if undo is None else [old[low:high] for old in undo],
                ).wait()
            self.update_seconds += time.perf_counter() - begin

        return _Update(updates, version, self._on_thread(run, thread), is_ahead, is_sent_back)

    def rounded(self, group: ParameterGroup) -> torch.Tensor:
        """Host memory for the rounded parameters. Shape: [owned numel]."""
        transfer = self._transfers[group]
        if transfer.parameters is None:
            buffer = group.buffer
            transfer.parameters = host_empty(group.owned_numel, buffer.dtype, buffer.device, is_pinned=self._is_pinned)
        return name_memory(transfer.parameters, f"the updated parameters of unit {group.label!r} on the host")

    # parameters

    def finish(self, group: ParameterGroup) -> None:
        """Wait for a group's update, and start to send its parameters back. Nothing where there is none.

        Order: work queued on the device afterwards sees them. Raises: what the update raised.
        """
        transfer = self._transfers[group]
        if transfer.update is not None and not transfer.update.is_ahead:
            update = self._done(transfer)
            if update.is_sent_back:
                self.copy_back(group, [part.range for part in update.ranges])
        transfer.returned.wait()

    def copy_back(self, group: ParameterGroup, ranges: Sequence[ParameterRange]) -> None:
        """Start to copy ``rounded`` to where the parameters are stored. ``finish`` waits for it."""
        if not ranges:
            return
        rounded, parameters = self.rounded(group), group.buffer.shard
        low, high = min(part.start for part in ranges), max(part.stop for part in ranges)
        if high - low == sum(part.stop - part.start for part in ranges):
            extents = [(low, high)]
        else:
            extents = [(part.start, part.stop) for part in ranges]
        with torch.no_grad():
            for start, stop in extents:
                self._transfers[group].returned = self._copy(rounded[start:stop], parameters[start:stop])

    def synchronize(self, group: ParameterGroup) -> None:
        """Wait for a group's update, and undo one that ran ahead of the step."""
        self._undo(group)
        self.finish(group)

    def _done(self, transfer: _HostCopies) -> _Update:
        """Wait for an update. One that failed stays, and fails every waiter: its group is half updated."""
        update = transfer.update
        assert update is not None
        self._wait(update.work)
        transfer.update = None
        return update

    def _wait(self, work: ThreadResult[Any]) -> None:
        begin = time.perf_counter()
        work.result()
        self.waited_seconds += time.perf_counter() - begin

    # checkpoints

    def before_save(self) -> None:
        """A checkpoint is about to be saved, by every rank."""

    def state_was_loaded(self, groups: Sequence[ParameterGroup]) -> None:
        """Optimizer state was set from outside."""

    def parameters_of(self, group: ParameterGroup) -> torch.Tensor:
        """See ``Updates``."""
        return group.main

    def drop_gradient(self, group: ParameterGroup) -> None:
        """This step's gradient is of no use any more; undo an update that ran ahead and was not confirmed."""
        self._undo(group)
        self._transfers[group].version = None
        group.gradient.copied.wait()  # no update of a skipped step has, and a backward pass writes to the source

    def close(self) -> None:
        """End the threads, after the updates that were started; free the memory."""
        for thread in self._threads.values():
            thread.close()
        self._threads.clear()
        self._step.close()
        self._transfers.clear()
        self._parts.clear()


def offloaded_gradient(group: ParameterGroup) -> OffloadedGradient | None:
    """The gradient of a group, if its sum is on the host between reductions."""
    return group.gradient if isinstance(group.gradient, OffloadedGradient) else None
