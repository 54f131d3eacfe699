"""The optimizer's step on this rank's range: unit by unit, block by block.

An optimizer sees *ranges* (``ranges.py``). On CPU a range is at most one block, so that casting its gradient, updating
it and casting the parameter stay in cache; on an accelerator the ranges of many units are updated in one call, because
each call costs the host more than the device. A parameter that got no gradient on any rank is left alone, as in
PyTorch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import torch

from shoal.comm.fake import SingleCommunicator
from shoal.comm.protocol import Communicator, Work
from shoal.device import Device
from shoal.offload.cpu_optimizer import CpuOptimizer
from shoal.optim.host import TRIAL_NUMEL, HostStep
from shoal.optim.one_kernel_adam import AdamRange, takes
from shoal.optim.one_kernel_adam import update as update_by_kernels
from shoal.optim.whole import Loads, WholeTensorOptimizer
from shoal.running.ranges import OptimizerRanges, in_fp32, round_back
from shoal.sharding.encoded_state import StateFormat
from shoal.sharding.param_group import ParameterGroup, ParameterRange
from shoal.sharding.placement import Tier
from shoal.sharding.unit import Unit
from shoal.streams import name_memory, optimizer_step

BATCH_NUMEL = 64 * 1024 * 1024  # that an accelerator updates in one call
MIN_RANGE_NUMEL = 512 * 1024  # a smaller ``sub_group_size`` would cost more in calls than it saves in memory

HasGrad = Mapping[ParameterGroup, bytes]
"""By parameter group, one byte per parameter: did a gradient arrive on some rank?"""
Gather = tuple[ParameterGroup, Work]
"""The all-gather of a group whose parameters are stored whole, after its update."""
_ENDED = object()


class ShardedStep(OptimizerRanges):
    """Runs one torch optimizer over the ranges of all units.

    Args:
        optimizer: its ``param_groups`` hold the user's parameters between steps and ranges during one.
        groups: every trained parameter group, in unit order.
        block_numel: most elements of one range of what is stored on the device; None: no limit.
        sub_group_numel: most elements that an accelerator updates in one call (``sub_group_size``), at least
            ``MIN_RANGE_NUMEL``; None: ``BATCH_NUMEL``.
        device: that computes forward and backward.
        is_ahead: updates on the host begin in the backward pass (``super_offload``).
        num_host_threads: of updates on the host; None: torch's number.
        pins_host: page-lock what is copied between device and host.
        state_dtype: of optimizer state; None: that of the main parameters. The optimizer must be elementwise.
        state_format: how state of ``state_dtype`` fp32 is stored between steps; None: as it is.
        step_number: counts the steps, for stochastic rounding of bf16 main parameters; None: they are rounded to the
            nearest. Needs a ``state_dtype``.
        make_cpu_optimizer: makes what updates on the host, from the arguments of ``CpuOptimizer``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ParameterGroup],
        *,
        block_numel: int | None,
        sub_group_numel: int | None = None,
        device: Device | None = None,
        is_ahead: bool = False,
        num_host_threads: int | None = None,
        pins_host: bool = True,
        state_dtype: torch.dtype | None = None,
        state_format: StateFormat | None = None,
        step_number: Callable[[], int] | None = None,
        make_cpu_optimizer: Callable[..., CpuOptimizer] = CpuOptimizer,
    ) -> None:
        cpu_optimizer: CpuOptimizer | None = None
        if any(group.is_state_offloaded for group in groups):
            numel = sum(group.owned_numel for group in groups if group.is_state_offloaded)
            cpu_optimizer = make_cpu_optimizer(
                optimizer,
                device if device is not None else Device(torch.device("cpu")),
                is_ahead=is_ahead,
                step=HostStep("auto" if numel >= TRIAL_NUMEL else "threads", num_threads=num_host_threads),
                is_pinned=pins_host,
            )
        sub_group = max(sub_group_numel or BATCH_NUMEL, MIN_RANGE_NUMEL)
        super().__init__(optimizer, block_numel or sub_group, cpu_optimizer, state_dtype)
        self.groups = list(groups)
        self._step_number = step_number
        self._batch_numel = 0 if block_numel and not self.is_whole_tensor else min(sub_group, BATCH_NUMEL)
        self._scratch: torch.Tensor | None = None
        self._user_groups: list[list[torch.nn.Parameter]] = []
        for group in self.groups:
            group.optimizer, group.state_format = optimizer, state_format
            if group.is_state_offloaded:
                group.updates = cpu_optimizer
            group.ranges = list(self._ranges_of(group))

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of gradients that were cast for an update, on the tier that updates; and what the CPU optimizer has on
        the device.
        """
        on_device = 0 if self.cpu_optimizer is None else self.cpu_optimizer.device_nbytes
        return on_device + (0 if self._scratch is None else self._scratch.nbytes)

    def free_scratch(self) -> None:
        """Free that memory until the next step."""
        self._scratch = None

    @property
    def host_nbytes(self) -> int:
        """Bytes of gradients and parameters on their way between device and host."""
        return 0 if self.cpu_optimizer is None else self.cpu_optimizer.host_nbytes

    # the step

    def begin(self) -> None:
        """Put ranges in the place of the user's parameters."""
        first = next((group for group in self.groups if group.disk is not None), None)
        if first is not None and first.disk is not None:
            first.disk.start_fetch(first)
        self._user_groups = [group["params"] for group in self.optimizer.param_groups]
        if self.cpu_optimizer is not None:
            for group in self.groups:
                if group.updates is not None:
                    self.cpu_optimizer.send(group)

    def drop_gradients(self) -> None:
        """The gradients of this step are of no use any more."""
        if self.cpu_optimizer is not None:
            for group in self.groups:
                self.cpu_optimizer.drop_gradient(group)

    def state_was_loaded(self) -> None:
        """Optimizer state was set from outside."""
        if self.cpu_optimizer is not None:
            self.cpu_optimizer.state_was_loaded(self.groups)

    def before_save(self) -> None:
        """A checkpoint is about to be saved: every rank calls, the gradients of an open step stay as they are."""
        if self.cpu_optimizer is not None:
            self.cpu_optimizer.before_save()

    def release_state(self) -> None:
        """Optimizer state is about to move to other memory: keep it by range only."""

    def synchronize(self) -> None:
        """Wait for pending updates of all groups; afterwards the state may be modified."""
        for group in self.groups:
            group.synchronize()

    def end(self) -> None:
        """Give the optimizer the user's parameters back."""
        for group, params in zip(self.optimizer.param_groups, self._user_groups, strict=True):
            group["params"] = params
        self._user_groups = []

    @optimizer_step()
    def update(self, units: Sequence[Unit], gradient_scale: float, has_grad: HasGrad) -> list[Gather]:
        """Between ``begin`` and ``end``: update the ranges of units, and start to bring their replicas up to date; on
        the host, start to update them.

        Groups whose state is on the device are updated together, ``BATCH_NUMEL`` elements in one call. Those of an
        optimizer of whole tensors are, too, those on the host as well; of three such calls each begins while the
        exchanges of the one before are under way.

        Args:
            gradient_scale: the gradients are multiplied by it (clipping, loss scale).

        Returns: the all-gathers under way.
        Communicates: where the row says so, one all-gather per group; and as a whole-tensor optimizer documents.
        """
        works: list[Gather] = []
        batches: list[list[ParameterGroup]] = []
        last: dict[Hashable, tuple[list[ParameterGroup], int]] = {}  # of each kind of group; and its elements
        for unit in units:
            unit.has_pending_update = any(g.updates is not None and any(has_grad[g]) for g in unit.trained)
            for group in unit.trained:
                if not self._is_batched(group):
                    works += self._step_group(group, gradient_scale, has_grad[group])
                    continue
                kind, more = self._goes_with(group), self._numel_of(group)
                batch, numel = last.get(kind, ([], 0))
                if not batch or numel + more > self._batch_numel:
                    batch, numel = [], 0
                    batches.append(batch)
                batch.append(group)
                last[kind] = batch, numel + more
        step_all = self._step_whole_batches if self.is_whole_tensor else self._step_batches
        return works + step_all(batches, gradient_scale, has_grad)

    def _is_batched(self, group: ParameterGroup) -> bool:
        return bool(self._batch_numel) and not _is_on_disk(group) and (self.is_whole_tensor or group.updates is None)

    def _numel_of(self, group: ParameterGroup) -> int:
        """Elements that this rank updates; of parts of tensors their mean over the ranks, which batch alike."""
        parts = self._parts_comm(group) if self.is_whole_tensor else None
        if parts is None:
            return group.owned_numel
        ranks = self._ranks_of(group)
        numel = sum(math.prod(spec.global_shape) for spec in group.buffer.layout.specs)
        return numel // parts.size // (1 if ranks is None else ranks.size)

    def _goes_with(self, group: ParameterGroup) -> Hashable:
        """Equal for groups that one call can update: of an optimizer of whole tensors those of the same ranks."""
        is_on_host = group.updates is not None
        return (self._ranks_of(group), self._parts_comm(group), is_on_host) if self.is_whole_tensor else None

    def _step_batches(
        self, batches: Sequence[Sequence[ParameterGroup]], gradient_scale: float, has_grad: HasGrad
    ) -> list[Gather]:
        works: list[Gather] = []
        for batch in batches:
            with_grad = _begin(batch, has_grad)
            ranges = [(group, part) for group in batch for part in self._with_grad(group, has_grad[group])]
            self._step_ranges(ranges, gradient_scale, self._batch_numel)
            works += _end(batch, with_grad)
        return works

    def _step_whole_batches(
        self, batches: Sequence[Sequence[ParameterGroup]], gradient_scale: float, has_grad: HasGrad
    ) -> list[Gather]:
        works: list[Gather] = []
        loads: Loads = {}

        def step(batch: Sequence[ParameterGroup]) -> Iterator[None]:
            with_grad = _begin(batch, has_grad)
            if with_grad:
                yield from self._step_whole(with_grad, gradient_scale, has_grad, loads)
            works.extend(_end(batch, with_grad))

        run_overlapped(map(step, batches))
        return works

    def _step_group(self, group: ParameterGroup, gradient_scale: float, has_grad: bytes) -> list[Gather]:
        group.begin_update()
        if group.disk is not None:
            group.disk.fetch(group, reads_ahead=True)
        if any(has_grad):
            group.buffer.storage.pin(is_overwritten=all(has_grad))
        if self.is_whole_tensor:
            if any(has_grad):
                for _ in self._step_whole([group], gradient_scale, {group: has_grad}, {}):
                    pass
        else:
            ranges = self._with_grad(group, has_grad)
            cpu = self.cpu_optimizer if group.updates is not None else None
            if cpu is None or not cpu.start(group, ranges, gradient_scale):
                self._step_ranges([(group, part) for part in ranges], gradient_scale, self._block_of(group))
        if group.updates is not None and _is_on_disk(group):
            group.updates.finish(group)  # memory holds few groups of what is stored on a disk
        if group.disk is not None:
            group.disk.store(group)
        if any(has_grad):
            group.buffer.storage.unpin()
        return _update_replicas(group) if group.updates is None else []

    @optimizer_step()
    def finish(self, units: Sequence[Unit]) -> list[Gather]:
        """After ``update``: wait for updates on the host, and start to bring replicas of their ranges up to date.

        Where parameters are stored as shards, the next ``unit.gather()`` waits for the update.

        Returns, Communicates: as ``update``.
        """
        works: list[Gather] = []
        for group in (group for unit in units for group in unit.trained):
            if group.updates is not None and not group.buffer.is_sharded:
                group.updates.finish(group)
                works += _update_replicas(group)
        return works

    def _step_ranges(
        self, ranges: Sequence[tuple[ParameterGroup, ParameterRange]], gradient_scale: float, limit: int | None
    ) -> None:
        """Update ranges in calls of at most ``limit`` elements, or of one range."""
        for alike in self._with_like_state(ranges):
            batch: list[tuple[ParameterGroup, ParameterRange]] = []
            numel = 0
            for group, part in alike:
                if batch and limit and numel + part.stop - part.start > limit:
                    self._update(batch, gradient_scale)
                    batch, numel = [], 0
                batch.append((group, part))
                numel += part.stop - part.start
            self._update(batch, gradient_scale)

    def _with_like_state(
        self, ranges: Sequence[tuple[ParameterGroup, ParameterRange]]
    ) -> Iterable[Sequence[tuple[ParameterGroup, ParameterRange]]]:
        """Torch's fused SGD takes either parameters that all have a momentum, or parameters that have none yet."""
        if not isinstance(self.optimizer, torch.optim.SGD):
            return [ranges]
        by_state: dict[bool, list[tuple[ParameterGroup, ParameterRange]]] = {}
        for group, part in ranges:
            is_first = self.optimizer.state.get(part.param, {}).get("momentum_buffer") is None
            by_state.setdefault(is_first, []).append((group, part))
        return by_state.values()

    def _gradients(self, ranges: Sequence[tuple[ParameterGroup, ParameterRange]]) -> list[torch.Tensor]:
        """Of each range, as the gradient is accumulated."""
        flat = {id(group): group for group, _ in ranges}
        source = {
            key: self.cpu_optimizer.gradient(group)
            if self.cpu_optimizer is not None and group.updates is not None
            else group.gradient.owned()
            for key, group in flat.items()
        }
        return [source[id(group)][part.start : part.stop] for group, part in ranges]

    def _load_gradients(
        self,
        ranges: Sequence[tuple[ParameterGroup, ParameterRange]],
        params: Sequence[torch.nn.Parameter],
        gradient_scale: float,
    ) -> None:
        """Give ``params`` the gradients of the ranges, in their dtype and scaled."""
        gradients = self._gradients(ranges)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, param in enumerate(params):
            if gradients[index].dtype != param.dtype:
                by_dtype.setdefault(param.dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            sizes = [gradients[index].numel() for index in indices]
            casts = list(self._scratch_of(sum(sizes), dtype, gradients[indices[0]])[: sum(sizes)].split(sizes))
            torch._foreach_copy_(casts, [gradients[index] for index in indices])
            for index, cast in zip(indices, casts, strict=True):
                gradients[index] = cast
        if gradient_scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, gradient_scale)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient

    def _update(self, ranges: Sequence[tuple[ParameterGroup, ParameterRange]], gradient_scale: float) -> None:
        if self._batch_numel and self.state_dtype is None:
            ranges = self._update_by_kernels(ranges, gradient_scale)
        if not ranges:
            return
        stored = [part.param for _, part in ranges]
        params = stored if self.state_dtype is None else in_fp32(self.optimizer, stored)
        self._load_gradients(ranges, params, gradient_scale)
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] = [param for param, (_, part) in zip(params, ranges, strict=True) if part.group == index]
        self.optimizer.step()
        if self.state_dtype is not None:
            step_number = None if self._step_number is None else self._step_number()
            round_back(self.optimizer, ranges, params, self.state_dtype, step_number)
        self._round(ranges)

    def _update_by_kernels(
        self, ranges: Sequence[tuple[ParameterGroup, ParameterRange]], gradient_scale: float
    ) -> list[tuple[ParameterGroup, ParameterRange]]:
        """Update ranges on the device that one kernel each updates. Returns: the others."""
        # Those of the host keep their gradients there, for which it would wait here too.
        others = [(group, part) for group, part in ranges if group.updates is not None]
        own = [(group, part) for group, part in ranges if group.updates is None]
        taken: dict[int, list[AdamRange]] = {}
        for (group, part), gradient in zip(own, self._gradients(own), strict=True):
            parameter = group.buffer.shard[part.start : part.stop] if group.has_own_main else None
            each = AdamRange(part.param, gradient, parameter)
            if takes(self.optimizer, self.optimizer.param_groups[part.group], each):
                taken.setdefault(part.group, []).append(each)
            else:
                others.append((group, part))
        for index, parts in taken.items():
            update_by_kernels(self.optimizer, self.optimizer.param_groups[index], parts, gradient_scale)
        return others

    def _round(self, ranges: Sequence[tuple[ParameterGroup, ParameterRange]]) -> None:
        """Round the updated main parameters into the parameters."""
        targets, sources = [], []
        for group, part in ranges:
            part.param.grad = None
            if not group.has_own_main:
                continue
            if group.updates is not None and not group.buffer.is_offloaded:
                # Rounded on the host, so that half the bytes are copied.
                assert self.cpu_optimizer is not None
                flat = self.cpu_optimizer.rounded(group)
            else:
                flat = group.buffer.shard
            targets.append(flat[part.start : part.stop])
            sources.append(part.param.detach())
        if targets:
            torch._foreach_copy_(targets, sources)
        for group in dict.fromkeys(group for group, _ in ranges):
            if group.has_own_main and group.updates is not None and not group.buffer.is_offloaded:
                assert self.cpu_optimizer is not None
                self.cpu_optimizer.copy_back(group, [part for owner, part in ranges if owner is group])
                self.cpu_optimizer.finish(group)

    def _step_whole(
        self, groups: Sequence[ParameterGroup], gradient_scale: float, has_grad: HasGrad, loads: Loads
    ) -> Iterator[None]:
        """Update groups that go together. It stops where ``WholeTensorOptimizer.step_ranges`` does."""
        optimizer, first = self.optimizer, groups[0]
        assert isinstance(optimizer, WholeTensorOptimizer)
        ranges = [(group, part) for group in groups for part in group.ranges]
        self._load_gradients(ranges, [part.param for _, part in ranges], gradient_scale)
        owned = [each for group in groups for each in self._owned_ranges(group, has_grad[group])]
        comm = self._ranks_of(first)
        if comm is None:
            comm = SingleCommunicator(first.buffer.comm.axis)
        yield from optimizer.step_ranges(owned, comm, first.buffer.device, self._parts_comm(first), loads)
        self._round(ranges)

    @staticmethod
    def _ranks_of(group: ParameterGroup) -> Communicator | None:
        """Over which the group's state is sharded; None: this rank has all of it."""
        return None if group.owned_numel == group.buffer.layout.numel else group.buffer.comm

    def _scratch_of(self, numel: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """Memory of values that are used up in the next call, in the memory that ``like`` lies in."""
        scratch = self._scratch
        if scratch is None or scratch.numel() < numel or scratch.dtype != dtype or scratch.device != like.device:
            made = name_memory(like.new_empty(numel, dtype=dtype), "gradients in another dtype", "buffers in flight")
            self._scratch = scratch = made
        return scratch

    def free(self) -> None:
        """End the CPU optimizer, and drop the optimizer state of all ranges."""
        if self.cpu_optimizer is not None:
            self.cpu_optimizer.close()
        for group in self.groups:
            group.disk = group.updates = None
            for part in group.ranges:
                self.optimizer.state.pop(part.param, None)
            group.ranges = []
        self.groups = []
        self._scratch = None


def run_overlapped(steps: Iterable[Iterator[None]]) -> None:
    """Run all steps: one begins when the one before has stopped once, and goes on when others have."""
    waiting = iter(steps)
    under_way: deque[Iterator[None]] = deque()
    while True:
        if (begun := next(waiting, None)) is not None:
            under_way.appendleft(begun)
        if not under_way:
            return
        for step in tuple(under_way):  # the newest first: what it sends is under way while others compute
            if next(step, _ENDED) is _ENDED:
                under_way.remove(step)


def _is_on_disk(group: ParameterGroup) -> bool:
    return group.disk is not None or group.buffer.storage.tier is Tier.DISK


def _begin(batch: Sequence[ParameterGroup], has_grad: HasGrad) -> list[ParameterGroup]:
    """Before groups are updated together. Returns: those that have a gradient."""
    for group in batch:
        group.begin_update()
    with_grad = [group for group in batch if any(has_grad[group])]
    for group in with_grad:
        group.buffer.storage.pin(is_overwritten=all(has_grad[group]))
    return with_grad


def _end(batch: Sequence[ParameterGroup], with_grad: Sequence[ParameterGroup]) -> list[Gather]:
    for group in with_grad:
        group.buffer.storage.unpin()
    return [work for group in batch if group.updates is None for work in _update_replicas(group)]


def _update_replicas(group: ParameterGroup) -> list[Gather]:
    return [] if group.row.after_step == "nothing" else [(group, group.update_replicas())]
