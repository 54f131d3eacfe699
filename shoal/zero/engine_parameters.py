"""The parameters of an engine: gathered in a block, and full and local values to read and to set.

``full`` calls are made on every rank and return the same on every rank; ``local`` calls see this rank's part (1-D)
and communicate nothing. The ``safe_`` functions, DeepSpeed's names, find the engine by the bare parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.memory.bucket import ParameterBucket
from shoal.memory.layout import Segment, Slot
from shoal.zero.bucket_state import BucketState
from shoal.zero.parameter_owner import OWNERS, ParameterOwner, ParameterState
from shoal.zero.runtime import ShardedModel
from shoal.zero.step import ShardedStep
from shoal.zero.unit import UnitState

_STATES: dict[UnitState, ParameterState] = {UnitState.FULL: "gathered", UnitState.GATHERING: "gathering"}


class EngineParameters(ParameterOwner):
    """The owner of an engine's parameters.

    Args:
        engine: found again by its parameters; not kept alive.
        unscale: what gradients in memory must be multiplied by (accumulation, loss scale).
        before: called before each access; copies parameters that a script has changed into the main parameters.
        stage, checks_changes: as ``ParameterOwner``'s.
    """

    def __init__(
        self,
        engine: object,
        sharded: ShardedModel,
        states: Sequence[BucketState],
        step: ShardedStep | None,
        unscale: Callable[[], float],
        before: Callable[[], None] = lambda: None,
        *,
        stage: int,
        checks_changes: bool,
    ) -> None:
        super().__init__(sharded.comm, stage, checks_changes=checks_changes)
        self._engine = weakref.ref(engine)
        self._sharded = sharded
        self._states = states
        self._step = step
        self._unscale = unscale
        self._before = before
        self._home = {
            id(parameter): (state, slot) for state in states for slot, parameter in enumerate(state.bucket.parameters)
        }

    @property
    def engine(self) -> object:
        """The engine; None once it is gone."""
        return self._engine()

    # the same for every owner

    def _resident(self, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        units = dict.fromkeys(self._sharded.unit_of[id(parameter)] for parameter in parameters)
        return self._sharded.gathered([unit for unit in units if unit.is_sharded], keeps_others=True)

    def _place(self, parameter: torch.Tensor) -> tuple[ParameterBucket, int]:
        """The parameter's bucket, and its slot there."""
        for bucket in self._sharded.unit_of[id(parameter)].buckets:
            for slot, member in enumerate(bucket.parameters):
                if member is parameter:
                    return bucket, slot
        raise AssertionError("a unit holds its parameters")

    def _owned(self, parameter: torch.Tensor) -> tuple[ParameterBucket, int, int, int]:
        """The parameter's bucket and slot, and the range of the bucket that is the parameter's and this rank's."""
        bucket, slot = self._place(parameter)
        info = bucket.layout.slots[slot]
        low = max(info.offset, bucket.begin)
        return bucket, slot, low, max(low, min(info.offset + info.numel, bucket.end))

    def write_through(self, parameter: torch.Tensor, source: int) -> None:
        """Main parameters change only where the parameter did, so they keep their precision elsewhere."""
        bucket, slot, low, high = self._owned(parameter)
        value = bucket.full.narrow(0, bucket.layout.slots[slot].offset, bucket.layout.slots[slot].numel)
        if not value.numel():
            return
        if parameter.data_ptr() != value.data_ptr():
            value.copy_(parameter.data.reshape(-1))
        if self.comm.size > 1:
            self.comm.broadcast(value, source, label=bucket.label).drain()
        bucket.comm.drain()
        if low >= high:
            return
        new, start, stop = bucket.full[low:high], low - bucket.begin, high - bucket.begin
        if self.knows(parameter):
            self._home[id(parameter)][0].follow(start, stop, new)
        if bucket.is_sharded:
            with bucket.shard_at_hand():
                bucket.shard[start:stop].copy_(new)

    def number_of(self, parameter: torch.Tensor) -> int:
        return self._sharded.number_of[id(parameter)]

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        return self._sharded.unit_of[id(parameter)].is_sharded

    def state_of(self, parameter: torch.Tensor) -> ParameterState:
        return _STATES.get(self._sharded.unit_of[id(parameter)].state, "sharded")

    def shard_of(self, parameter: torch.Tensor) -> torch.Tensor:
        bucket, _, low, high = self._owned(parameter)
        own = bucket.shard if bucket.is_sharded else bucket.full[bucket.begin : bucket.end]
        return own[low - bucket.begin : high - bucket.begin]

    def num_shards(self, parameter: torch.Tensor) -> int:
        return self._place(parameter)[0].comm.size

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, read: Callable[[int, int], torch.Tensor]) -> None:
        bucket, slot, low, high = self._owned(parameter)
        info = bucket.layout.slots[slot]
        if not bucket.is_sharded:
            value = read(0, info.numel).view(info.shape)
            if self.knows(parameter):
                self.set_full_parameter(parameter, value)
            else:
                bucket.comm.drain()
                bucket.views[slot].copy_(value)
        elif low < high:
            value = read(low - info.offset, high - info.offset)
            if self.knows(parameter):
                self.set_local_parameter(parameter, value)
            else:
                bucket.comm.drain()
                with bucket.shard_at_hand():
                    bucket.shard[low - bucket.begin : high - bucket.begin].copy_(value)

    def share(self, module: nn.Module, parameter: torch.Tensor, *, is_shared: bool) -> None:
        reader, unit = self._sharded.reader_of(module), self._sharded.unit_of[id(parameter)]
        if reader is None:
            return
        if is_shared:
            self._sharded.add_external(reader, unit)
        elif unit in reader.externals:
            reader.externals.remove(unit)

    # values

    def knows(self, parameter: torch.Tensor) -> bool:
        """Does the engine train it?"""
        return id(parameter) in self._home

    def _find(self, parameter: nn.Parameter) -> tuple[BucketState, int, Segment | None]:
        self._before()
        try:
            state, slot = self._home[id(parameter)]
        except KeyError:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} is not trained by this engine.",
                do="pass a parameter of engine.module that is in an optimizer group.",
                code="access-unknown",
            ) from None
        owned = state.bucket.layout.segments_in(state.bucket.begin, state.bucket.end)
        return state, slot, next((segment for segment in owned if segment.slot == slot), None)

    def _full(self, state: BucketState, slot: int, segment: Segment | None, owned: torch.Tensor | None) -> torch.Tensor:
        """Put the ranks' parts of one parameter together. ``owned``: this rank's part, fp32, or None."""
        info = state.bucket.layout.slots[slot]
        comm = state.bucket.comm
        whole = torch.zeros(info.numel, dtype=torch.float32, device=state.master.device)
        if segment is not None and owned is not None:
            whole[segment.offset : segment.offset + owned.numel()] = owned
        if state.bucket.end - state.bucket.begin < state.bucket.layout.numel and info.numel:
            # Each element comes from one rank only, so the sum is exact.
            comm.all_reduce(whole, label=f"{state.bucket.label}: {info.name}").drain()
        return whole.view(info.shape)

    def _part(self, state: BucketState, segment: Segment, value: torch.Tensor) -> torch.Tensor:
        return value.detach().reshape(-1)[segment.offset : segment.offset + segment.stop - segment.start]

    # main parameters

    def full_parameter(self, parameter: nn.Parameter) -> torch.Tensor:
        """The fp32 main parameter. Communicates: one all_reduce of it where it is sharded."""
        state, slot, segment = self._find(parameter)
        with state.at_hand():
            owned = state.master[segment.start : segment.stop].float() if segment else None
            return self._full(state, slot, segment, owned)

    def local_parameter(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the main parameter, 1-D, not a copy (except from a disk); None where it owns nothing."""
        state, _, segment = self._find(parameter)
        if segment is None:
            return None
        with state.at_hand():
            part = state.master[segment.start : segment.stop]
            return part if state.shelf is None else part.clone()

    @torch.no_grad()
    def set_full_parameter(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set the main parameter and the parameter. Called with the same value on every rank. Communicates nothing."""
        state, slot, segment = self._find(parameter)
        _check_shape(value, state.bucket.layout.slots[slot])
        state.bucket.comm.drain()
        if segment:
            self._write_parameter(state, segment, self._part(state, segment, value))
        if not state.bucket.is_sharded:
            state.bucket.views[slot].copy_(value)

    @torch.no_grad()
    def set_local_parameter(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set this rank's part. Called on every rank; replicas of the parameter follow after the next step."""
        state, _, segment = self._find(parameter)
        if segment is not None:
            _check_numel(value, segment)
            state.bucket.comm.drain()
            self._write_parameter(state, segment, value.reshape(-1))

    def _write_parameter(self, state: BucketState, segment: Segment, part: torch.Tensor) -> None:
        with state.at_hand():
            state.master[segment.start : segment.stop].copy_(part)
        if state.has_own_master:
            with state.bucket.shard_at_hand():
                state.owned_parameters[segment.start : segment.stop].copy_(part)

    # gradients

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The reduced gradient of the current step, fp32, as the optimizer will see it before clipping; None
        before backward.
        """
        state, slot, segment = self._find(parameter)
        if not self._has_gradient(state):
            return None
        owned = None
        if segment:
            owned = state.gradient.owned()[segment.start : segment.stop].float() * self._unscale()
        return self._full(state, slot, segment, owned)

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Did a backward pass reach it since the last step?"""
        return self._has_gradient(self._find(parameter)[0])

    def _has_gradient(self, state: BucketState) -> bool:
        self._sharded.finish_backward()
        if state.gradient.is_moved:
            raise UsageError(
                "the gradients are in host memory since offload_states().",
                do="call engine.reload_states() first.",
                code="states-away",
            )
        if state.is_native:
            return any(parameter.grad is not None for parameter in state.gradient.parameters)
        return state.gradient.state.value != "NONE"

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the reduced gradient, 1-D, fp32; None before backward or where it owns nothing."""
        state, _, segment = self._find(parameter)
        if segment is None or not self._has_gradient(state):
            return None
        return state.gradient.owned()[segment.start : segment.stop].float() * self._unscale()

    @torch.no_grad()
    def set_full_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the gradient. Called with the same value on every rank, after backward at the boundary."""
        state, slot, segment = self._find_gradient(parameter)
        _check_shape(value, state.bucket.layout.slots[slot])
        if segment:
            state.gradient.write(slot, segment, self._part(state, segment, value / self._unscale()))
        state.gradient.touched[slot] = 1

    @torch.no_grad()
    def set_local_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace this rank's part of the gradient, after backward at the boundary. Communicates nothing.

        Raises: UsageError: there is no gradient, or another number of elements than this rank owns.
        """
        state, slot, segment = self._find_gradient(parameter)
        if segment is not None:
            _check_numel(value, segment)
            state.gradient.write(slot, segment, value.reshape(-1) / self._unscale())
            state.gradient.touched[slot] = 1

    def _find_gradient(self, parameter: nn.Parameter) -> tuple[BucketState, int, Segment | None]:
        found = self._find(parameter)
        if not self._has_gradient(found[0]):
            raise UsageError(
                "there is no gradient to replace.", do="call engine.backward(loss) first.", code="access-no-gradient"
            )
        return found

    # optimizer state

    def _state_parts(
        self, parameter: nn.Parameter, key: str, *, create: bool = False
    ) -> tuple[BucketState, int, Segment | None, torch.Tensor | None]:
        state, slot, segment = self._find(parameter)
        if self._step is None or segment is None:
            return state, slot, segment, None
        with state.at_hand():
            return state, slot, segment, self._parts_at_hand(state, slot, key, create=create)

    def _parts_at_hand(self, state: BucketState, slot: int, key: str, *, create: bool) -> torch.Tensor | None:
        assert self._step is not None
        parts = []
        for piece, part in self._step.pieces_of_slot(state, slot):
            held = (
                self._step.optimizer.state[piece.param] if create else self._step.optimizer.state.get(piece.param, {})
            )
            if key not in held:
                if not create:
                    return None
                held[key] = torch.zeros_like(piece.param.detach())
            parts.append(held[key][part.start : part.stop])
        whole = torch.cat(parts) if len(parts) != 1 else parts[0]
        return whole if state.shelf is None or len(parts) != 1 else whole.clone()

    def full_optimizer_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor | None:
        """One per-element state, whole, fp32; None before the first step. Communicates as ``full_parameter``."""
        if key in ("fp32_param", "master"):
            return self.full_parameter(parameter)
        state, slot, segment, owned = self._state_parts(parameter, key)
        if not self._anywhere(owned is not None, state):
            return None
        return self._full(state, slot, segment, owned.float() if owned is not None else None)

    def _anywhere(self, flag: bool, state: BucketState) -> bool:
        comm = state.bucket.comm
        if comm.size == 1:
            return flag
        return bool(comm.exchange(torch.tensor([float(flag)], device=state.master.device), label="state").wait().any())

    def local_optimizer_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor | None:
        """This rank's part of one per-element state, 1-D; None before the first step or where it owns nothing."""
        if key in ("fp32_param", "master"):
            return self.local_parameter(parameter)
        return self._state_parts(parameter, key)[3]

    @torch.no_grad()
    def set_full_optimizer_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Set one per-element state. Called with the same value on every rank. Communicates nothing."""
        if key in ("fp32_param", "master"):
            self.set_full_parameter(parameter, value)
            return
        state, slot, segment = self._find(parameter)
        _check_shape(value, state.bucket.layout.slots[slot])
        if segment:
            self._write_state(state, slot, key, self._part(state, segment, value))

    @torch.no_grad()
    def set_local_optimizer_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        state, slot, segment = self._find(parameter)
        if segment is not None:
            _check_numel(value, segment)
            self._write_state(state, slot, key, value.reshape(-1))

    def _write_state(self, state: BucketState, slot: int, key: str, flat: torch.Tensor) -> None:
        assert self._step is not None
        done = 0
        with state.at_hand():
            for piece, part in self._step.pieces_of_slot(state, slot):
                held = self._step.optimizer.state[piece.param]
                if key not in held:
                    held[key] = torch.zeros_like(piece.param.detach())
                numel = part.stop - part.start
                held[key][part.start : part.stop].copy_(flat[done : done + numel])
                done += numel


def _check_shape(value: torch.Tensor, slot: Slot) -> None:
    if tuple(value.shape) != tuple(slot.shape):
        raise UsageError(
            f"the value for {slot.name!r} has shape {tuple(value.shape)}, expected {tuple(slot.shape)}.",
            do="pass the whole tensor; the local forms take this rank's part.",
            code="access-shape",
        )


def _check_numel(value: torch.Tensor, segment: Segment) -> None:
    if value.numel() != segment.stop - segment.start:
        raise UsageError(
            f"the local value has {value.numel()} elements, this rank owns {segment.stop - segment.start}.",
            do="pass a tensor of the size that the local getter returns.",
            code="access-shape",
        )


# DeepSpeed's safe accessors


def _owner_of(parameter: nn.Parameter) -> EngineParameters:
    owner = OWNERS.get(parameter)
    if not isinstance(owner, EngineParameters):
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no live engine.",
            do="pass a parameter of a model that shoal.initialize() got.",
            code="access-unknown",
        )
    return owner


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The fp32 main parameter, whole. Every rank calls."""
    return _owner_of(param).full_parameter(param)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the main parameter and the parameter; the same value on every rank."""
    _owner_of(param).set_full_parameter(param, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The reduced gradient, whole, fp32; None before backward. Every rank calls."""
    return _owner_of(param).full_gradient(param)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient; the same value on every rank."""
    _owner_of(param).set_full_gradient(param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One optimizer state (``exp_avg``, ...), whole, fp32; None before the first step. Every rank calls."""
    return _owner_of(param).full_optimizer_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set one optimizer state; the same value on every rank."""
    _owner_of(param).set_full_optimizer_state(param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the main parameter, 1-D; None where it owns nothing of it."""
    return _owner_of(param).local_parameter(param)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the main parameter."""
    _owner_of(param).set_local_parameter(param, value)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the reduced gradient, 1-D, fp32."""
    return _owner_of(param).local_gradient(param)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the reduced gradient; every rank its own."""
    _owner_of(param).set_local_gradient(param, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of one optimizer state, 1-D."""
    return _owner_of(param).local_optimizer_state(param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of one optimizer state."""
    _owner_of(param).set_local_optimizer_state(param, optim_state_key, value)
