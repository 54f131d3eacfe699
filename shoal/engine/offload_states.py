"""``offload_states()`` and ``reload_states()``: move states to host memory between two passes, and back.

    on the device    train ...  offload_states()   another program's work   reload_states()  ... train
    on the host                 [ states                                  ]

States that the config keeps on the host or on a disk do not move. Where the device is a CPU, nothing moves.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch

from shoal.engine.accumulation import Counters
from shoal.engine.log import say_on_rank_0
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import UsageError
from shoal.memory.host import aligned_empty, host_available_nbytes, host_too_small
from shoal.sharding import open_gradient
from shoal.sharding.copied_gather import HostStorage
from shoal.sharding.encoded_state import EncodedState
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import Tier
from shoal.text import format_bytes

# DeepSpeed's names, and the ledger's.
KINDS = {
    "optim_states": "optimizer state",
    "hp_params": "master",
    "lp_params": "parameter",
    "lp_grads": "gradient",
    "contiguous_grad_buffer": "buffers in flight",
}
_NEEDS = {
    "forward()": ("lp_params",),
    "backward()": ("lp_params", "lp_grads", "contiguous_grad_buffer"),
    "step()": tuple(KINDS),
    "loading": tuple(KINDS),
}


class Offloaded:
    """Which states of one engine are offloaded now: moved by ``offload_states()`` and not yet moved back."""

    def __init__(self, properties: Properties, counters: Counters) -> None:
        self.is_host_separate = properties.plan.zero.is_offloaded(Tier.HOST, properties.device.torch_device)
        self.names: set[str] = set()
        self._properties = properties
        self._counters = counters

    @property
    def ledger_kinds(self) -> frozenset[str]:
        """The ledger's kinds of what is in host memory meanwhile."""
        if not self.is_host_separate:
            return frozenset()
        return frozenset(KINDS[name] for name in self.names) | ({"error"} if "lp_grads" in self.names else set())

    def require(self, call: str) -> None:
        """Raises: UsageError: a state that ``call`` needs is offloaded."""
        if not self.names:
            return
        missing = [name for name in _NEEDS[call] if name in self.names]
        if missing:
            raise UsageError(
                f"{call} needs {', '.join(missing)}, which offload_states() moved away.",
                where=self._properties.where(self._counters.global_steps),
                do="call engine.reload_states() first.",
                code="states-away",
            )


class OffloadStates:
    """Moves the states of one engine between the device and host memory."""

    def __init__(self, sharding: Sharding, properties: Properties, offloaded: Offloaded) -> None:
        self._sharding = sharding
        self._axes = properties.axes
        self._device = properties.device
        self._rank = properties.rank
        self._offloaded = offloaded
        self._moved: list[ParameterGroup] = []  # whose parameters are in host memory meanwhile

    def offload(self, include: Any, device: Any, *, is_pinned: bool) -> None:
        """Move states to the host. Returns when the device's memory is free."""
        wanted = _names(include)
        place = str(getattr(device, "value", device))
        if place == "none":
            say_on_rank_0(self._rank, "offload_states(device='none'): nothing was moved.")
            return
        if place.partition(":")[0] != "cpu":
            raise UsageError(
                f"offload_states(device={place!r}): states move to host memory only.",
                do="pass device='cpu'; optimizer state is kept on a disk with"
                ' "offload_optimizer": {"device": "nvme"} in the config.',
                code="states-device",
            )
        self.empty_cache(frees_memory=False)
        gathered = [unit.name for unit in self._sharding.model.sharded if not unit.is_released]
        if gathered:
            raise UsageError(
                f"offload_states() while {', '.join(gathered[:4])}{' ...' if len(gathered) > 4 else ''} are gathered.",
                do="call it outside of GatheredParameters, and not between a backward pass with create_graph and the"
                " next.",
                code="states-held",
            )
        new = [name for name in KINDS if name in wanted and name not in self._offloaded.names]
        if not self._offloaded.is_host_separate:
            self._offloaded.names.update(new)
            computes = f"{self._device.torch_device} computes in host memory"
            say_on_rank_0(self._rank, f"offload_states({', '.join(new)}): nothing was moved: {computes}.")
            return
        needed = sum(tensor.nbytes for name in new for tensor in self._on_device(name))
        if needed > host_available_nbytes():
            raise host_too_small(needed)
        self._axes.drain()  # peers may still be reading this memory
        done: set[str] = set()
        try:
            for name in new:
                done.add(name)
                self._move_out(name, is_pinned=is_pinned)
        except BaseException:
            for name in done:
                self._move_back(name)
            raise
        self._offloaded.names |= done
        self._device.synchronize()
        gc.collect()  # graphs that only a reference cycle keeps hold gradients and gathered units
        self._device.give_cache_back()
        moved = f"{format_bytes(needed)} of rank 0 in host memory: {', '.join(new)}"
        say_on_rank_0(self._rank, f"offload_states: {moved}.")

    @torch.no_grad()
    def _move_out(self, name: str, *, is_pinned: bool) -> None:
        copied = partial(_copied_to_host, is_pinned=is_pinned)
        step = self._sharding.step
        if name == "lp_params":
            for group in self._on_device_groups():
                self._moved.append(group)
                if group.second is not None:
                    group.second.free_shard()  # kept again by the next forward
                group.buffer.store(copied(group.buffer.stored_values), HostStorage)
            self._point_at_parameters()
        elif name == "hp_params":
            self._copy_main_parameters(copied)
        elif name == "optim_states":
            if step is not None:
                step.release_state()
            self._copy_optimizer_state(copied)
        elif name == "lp_grads":
            for group in self._sharding.groups:
                open_gradient.move_to_host(group.gradient, copied)
        else:
            self._sharding.model.clear_staging()
            if step is not None:
                step.free_scratch()

    def reload(self, *, is_blocking: bool) -> None:
        """Move everything back."""
        for name in reversed(KINDS):  # gradients after parameters: autograd wants them on one device
            if name in self._offloaded.names and self._offloaded.is_host_separate:
                self._move_back(name)
        self._offloaded.names.clear()
        if is_blocking:
            self._device.synchronize()

    @torch.no_grad()
    def _move_back(self, name: str) -> None:
        device = self._device.torch_device
        copied = partial(_copied_to_device, device=device)
        if name == "lp_params":
            for group in self._moved:
                buffer = group.buffer
                target = buffer.comm.empty(buffer.stored_numel, buffer.dtype, device)
                buffer.store(target.copy_(buffer.stored_values, non_blocking=True))
            self._point_at_parameters()
            self._moved.clear()
        elif name == "hp_params":
            self._copy_main_parameters(copied)
        elif name == "optim_states":
            self._copy_optimizer_state(copied)
        elif name == "lp_grads":
            for group in self._sharding.groups:
                open_gradient.move_to_device(group.gradient, copied)

    def empty_cache(self, *, frees_memory: bool = True) -> None:
        """Release every gathered unit that no block holds.

        Args:
            frees_memory: give the allocator's unused memory back to the device, too.
        """
        if self._sharding.model.in_pass:
            raise UsageError(
                "states were to be moved, or units released, inside a backward pass.",
                do="call it between two passes.",
                code="states-in-pass",
            )
        self._sharding.model.release_all()
        if frees_memory:
            gc.collect()
            self._device.give_cache_back()

    # which tensors

    def _on_device_groups(self) -> Iterator[ParameterGroup]:
        """Groups whose parameters are stored on the device."""
        for group in self._sharding.model.groups:
            is_on_device = not group.buffer.is_sharded or group.row.parameter.tier is Tier.DEVICE
            if is_on_device and not group.buffer.is_offloaded:
                yield group

    def _states(self) -> Iterator[ParameterGroup]:
        """Groups whose main parameters and optimizer state are stored on the device when they are not offloaded."""
        for group in self._sharding.groups:
            if not group.is_state_offloaded and group.disk is None:
                yield group

    def _optimizer_tensors(self) -> Iterator[tuple[dict[str, Any], str]]:
        for group in self._states():
            for part in group.ranges:
                state = group.state_of(part)
                for key, value in list(state.items()):
                    if isinstance(value, EncodedState):
                        yield vars(value), "memory"
                    elif isinstance(value, torch.Tensor) and value.dim():
                        yield state, key

    def _on_device(self, name: str) -> list[torch.Tensor]:
        """The tensors that ``_move_out`` copies."""
        if name == "lp_params":
            return [group.buffer.stored_values for group in self._on_device_groups()]
        if name == "hp_params":
            return [group.main for group in self._states() if group.has_own_main]
        if name == "optim_states":
            return [state[key] for state, key in self._optimizer_tensors()]
        if name == "lp_grads":
            exported = [open_gradient.export(group.gradient) for group in self._sharding.groups]
            errors = [e.stored_values for group in self._sharding.groups for e in group.gradient.sent.errors]
            return [tensor for values in exported for tensor in open_gradient.tensors_in(values)] + errors
        return []

    def _copy_optimizer_state(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for state, key in self._optimizer_tensors():
            state[key] = copied(state[key])

    def _copy_main_parameters(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for group in self._states():
            if group.has_own_main:
                group.main = copied(group.main)
                _point(group)

    def _point_at_parameters(self) -> None:
        """Parameters that are stored whole, and main parameters that share the parameters' memory, follow it."""
        for group in self._moved:
            if not group.buffer.is_sharded:
                group.attach_views()
        for group in self._sharding.groups:
            if not group.has_own_main and group.disk is None:
                group.synchronize()
                _point(group)


def _point(group: ParameterGroup) -> None:
    for part in group.ranges:
        part.param.data = group.main[part.start : part.stop]


def _copied_to_host(source: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
    target = aligned_empty(source.nbytes, is_pinned=is_pinned).view(source.dtype).view(source.shape)
    return target.copy_(source, non_blocking=True)


def _copied_to_device(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device=device).copy_(source, non_blocking=True)


def _names(include: Any) -> frozenset[str]:
    """Which kinds, from strings or from members of an enum with such values; None: all.

    >>> sorted(_names(["optim_states", "hp_params"]))
    ['hp_params', 'optim_states']
    """
    if include is None:
        return frozenset(KINDS)
    given: Iterable[Any] = [include] if isinstance(include, str | Enum) else include
    names = [str(getattr(each, "value", each)) for each in given]
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise UsageError(
            f"offload_states(include=...): {', '.join(map(repr, unknown))} is no kind of state.",
            do=f"choose of {', '.join(KINDS)}.",
            code="states-kind",
        )
    return frozenset(names)
