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
from shoal.running.parameter_owner import OWNERS, ParameterOwner, ParameterState
from shoal.running.runtime import ShardedModel
from shoal.running.step import ShardedStep
from shoal.sharding.gradient import GradientState
from shoal.sharding.layout import ParameterSpec, Segment
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.parts import cut, gather_parts
from shoal.sharding.unit import UnitState

_STATES: dict[UnitState, ParameterState] = {UnitState.FULL: "gathered", UnitState.GATHERING: "gathering"}


class EngineParameters(ParameterOwner):
    """The owner of an engine's parameters.

    Args:
        unscale: what gradients in memory must be multiplied by (accumulation, loss scale).
        before: called before each access; copies parameters that a script has changed into the main parameters.
        stage, checks_changes: as ``ParameterOwner``'s.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        groups: Sequence[ParameterGroup],
        step: ShardedStep | None,
        unscale: Callable[[], float],
        before: Callable[[], None] = lambda: None,
        *,
        stage: int,
        checks_changes: bool,
    ) -> None:
        super().__init__(sharded.axes.same_units, stage, checks_changes=checks_changes)
        self._engine: weakref.ref[object] | None = None
        self._sharded = sharded
        self._step = step
        self._unscale = unscale
        self._before = before
        self._home = {
            id(parameter): (group, slot) for group in groups for slot, parameter in enumerate(group.parameters)
        }

    @property
    def engine(self) -> object:
        """The engine; None once it is gone."""
        return None if self._engine is None else self._engine()

    @engine.setter
    def engine(self, engine: object) -> None:
        self._engine = weakref.ref(engine)

    # the same for every owner

    def _resident(self, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        units = dict.fromkeys(self._sharded.unit_of[id(parameter)] for parameter in parameters)
        if self._sharded.deferred.is_installed:
            self._sharded.deferred.wait()
            for group in {self._sharded.home_of[id(parameter)][0] for parameter in parameters}:
                group.buffer.comm.drain()  # the script may change them in place
        return self._sharded.gathered([unit for unit in units if unit.is_sharded], keep_user_views=True)

    def write_through(self, parameter: torch.Tensor, source: int) -> None:
        """Main parameters change only where the parameter did, so they keep their precision elsewhere."""
        group, slot = self._sharded.home_of[id(parameter)]
        buffer, part, mesh = group.buffer, group.buffer.owned_part(slot), self._sharded.axes.mesh
        spec = buffer.layout.specs[slot]
        value = buffer.full.narrow(0, spec.offset, spec.numel)
        if not value.numel():
            return
        if parameter.data_ptr() != value.data_ptr():
            value.copy_(parameter.data.reshape(-1))
        # Of parameters that ``source`` does not hold (of other experts), the rank at its place among those that do.
        for comm in (group.axes.data, *group.axes.copies):
            comm.blocking.broadcast(value, mesh.index(comm.axis, source), label=buffer.label)
        buffer.comm.drain()
        if part is None:
            return
        new = buffer.full[buffer.begin : buffer.end][part.start : part.stop]
        if group.is_trained:
            group.update_main(part.start, part.stop, new)
        if buffer.is_sharded:
            with buffer.storage.resident():
                buffer.shard[part.start : part.stop].copy_(new)

    def number_of(self, parameter: torch.Tensor) -> int:
        return self._sharded.number_of[id(parameter)]

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        return self._sharded.unit_of[id(parameter)].is_sharded

    def state_of(self, parameter: torch.Tensor) -> ParameterState:
        return _STATES.get(self._sharded.unit_of[id(parameter)].state, "sharded")

    def shard_of(self, parameter: torch.Tensor) -> torch.Tensor:
        group, slot = self._sharded.home_of[id(parameter)]
        part, owned = group.buffer.owned_part(slot), group.buffer.shard
        return owned[:0] if part is None else owned[part.start : part.stop]

    def spec_of(self, parameter: torch.Tensor) -> ParameterSpec:
        """Its name, its global shape, and the part of it that this rank's engine has."""
        group, slot = self._sharded.home_of[id(parameter)]
        return group.buffer.layout.specs[slot]

    def num_shards(self, parameter: torch.Tensor) -> int:
        return self._sharded.home_of[id(parameter)][0].buffer.comm.size

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, read: Callable[[int, int], torch.Tensor]) -> None:
        group, slot = self._sharded.home_of[id(parameter)]
        buffer, part = group.buffer, group.buffer.owned_part(slot)
        spec = buffer.layout.specs[slot]
        if not buffer.is_sharded:
            value = read(0, spec.numel).view(spec.shape)
            buffer.comm.drain()
            if group.is_trained and part is not None:
                self.set_local_parameter(
                    parameter, value.reshape(-1)[part.offset : part.offset + part.stop - part.start]
                )
            buffer.views[slot].copy_(value)
        elif part is not None:
            value = read(part.offset, part.offset + part.stop - part.start)
            if group.is_trained:
                self.set_local_parameter(parameter, value)
            else:
                _make_writable(self._sharded, parameter, group)
                with buffer.storage.resident():
                    buffer.shard[part.start : part.stop].copy_(value)

    def share(self, module: nn.Module, parameter: torch.Tensor, *, is_shared: bool) -> None:
        reader, unit = self._sharded.calls.reader_of(module), self._sharded.unit_of[id(parameter)]
        if reader is None:
            return
        if is_shared:
            reader.share(unit)
        elif unit in reader.shared:
            reader.shared.remove(unit)

    # values

    def knows(self, parameter: torch.Tensor) -> bool:
        """True if the engine trains it."""
        return id(parameter) in self._home

    def shows_sum(self, parameter: torch.Tensor) -> bool:
        """True if ``parameter.grad`` is of all ranks, and not of this one alone."""
        return self.comm.size == 1 or not self.knows(parameter) or self._home[id(parameter)][0].gradient.is_shown

    @property
    def has_whole_model(self) -> bool:
        """True if no other rank has other parameters, or other parts of them."""
        axes = self._sharded.axes
        return axes.get("tp") is None and axes.get("ep") is None and axes.same_units.size == axes.world.size

    def _find(self, parameter: nn.Parameter) -> tuple[ParameterGroup, int, Segment | None]:
        self._before()
        self._sharded.deferred.wait()
        try:
            group, slot = self._home[id(parameter)]
        except KeyError:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} is not trained by this engine.",
                do="pass a parameter of engine.module that is in an optimizer group.",
                code="access-unknown",
            ) from None
        return group, slot, group.buffer.owned_part(slot)

    def _full(
        self, group: ParameterGroup, slot: int, segment: Segment | None, owned: torch.Tensor | None
    ) -> torch.Tensor:
        """Put the ranks' parts of one parameter together. ``owned``: this rank's part, fp32, or None."""
        info = group.buffer.layout.specs[slot]
        comm = group.buffer.comm
        whole = torch.zeros(info.numel, dtype=torch.float32, device=group.main.device)
        if segment is not None and owned is not None:
            whole[segment.offset : segment.offset + owned.numel()] = owned
        if group.buffer.end - group.buffer.begin < group.buffer.layout.numel and info.numel:
            # Each element comes from one rank only, so the sum is exact.
            comm.blocking.all_reduce(whole, label=f"{group.buffer.label}: {info.name}")
        part = whole.view(info.shape)
        parts = group.axes.parts
        return part if parts is None or not info.is_part else gather_parts(part, info, parts)

    def _part(self, group: ParameterGroup, slot: int, segment: Segment, value: torch.Tensor) -> torch.Tensor:
        flat = cut(value.detach(), group.buffer.layout.specs[slot]).reshape(-1)
        return flat[segment.offset : segment.offset + segment.stop - segment.start]

    # main parameters

    def full_parameter(self, parameter: nn.Parameter) -> torch.Tensor:
        """The fp32 main parameter. Communicates: one all_reduce of it where it is sharded."""
        group, slot, segment = self._find(parameter)
        with group.resident():
            owned = group.main[segment.start : segment.stop].float() if segment else None
            return self._full(group, slot, segment, owned)

    def local_parameter(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the main parameter, 1-D, not a copy (except from a disk); None where it owns nothing."""
        group, _, segment = self._find(parameter)
        if segment is None:
            return None
        with group.resident():
            part = group.main[segment.start : segment.stop]
            return part if group.disk is None else part.clone()

    @torch.no_grad()
    def set_full_parameter(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set the main parameter and the parameter. Called with the same value on every rank. Communicates nothing."""
        group, slot, segment = self._find(parameter)
        _check_shape(value, group.buffer.layout.specs[slot])
        _make_writable(self._sharded, parameter, group)
        if segment:
            part = self._part(group, slot, segment, value)
            with group.resident():
                group.main[segment.start : segment.stop].copy_(part)
            if group.has_own_main:
                with group.buffer.storage.resident():
                    group.owned_parameters[segment.start : segment.stop].copy_(part)
        if not group.buffer.is_sharded:
            group.buffer.views[slot].copy_(cut(value, group.buffer.layout.specs[slot]))

    @torch.no_grad()
    def set_local_parameter(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set this rank's part. Called on every rank; replicas of the parameter follow after the next step."""
        group, _, segment = self._find(parameter)
        if segment is None:
            return
        _check_numel(value, segment)
        _make_writable(self._sharded, parameter, group)
        with group.resident():
            group.main[segment.start : segment.stop].copy_(value.reshape(-1))
        if group.has_own_main:
            with group.buffer.storage.resident():
                group.owned_parameters[segment.start : segment.stop].copy_(value.reshape(-1))

    # gradients

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The reduced gradient of the current step, fp32, as the optimizer will see it before clipping; None
        before backward.
        """
        group, slot, segment = self._find(parameter)
        if not self._has_gradient(group):
            return None
        owned = None
        if segment:
            owned = group.gradient.owned()[segment.start : segment.stop].float() * self._unscale()
        return self._full(group, slot, segment, owned)

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """True if a backward pass has reached it since the last step."""
        return self._has_gradient(self._find(parameter)[0])

    def _has_gradient(self, group: ParameterGroup) -> bool:
        self._sharded.finish_backward()
        if group.gradient.is_moved:
            raise UsageError(
                "the gradients are in host memory since offload_states().",
                do="call engine.reload_states() first.",
                code="states-away",
            )
        group.gradient.sync_view()
        return group.gradient.state is not GradientState.NONE

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the reduced gradient, 1-D, fp32; None before backward or where it owns nothing."""
        group, _, segment = self._find(parameter)
        if segment is None or not self._has_gradient(group):
            return None
        return group.gradient.owned()[segment.start : segment.stop].float() * self._unscale()

    @torch.no_grad()
    def set_full_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the gradient. Called with the same value on every rank, after backward at the boundary."""
        group, slot, segment = self._find(parameter)
        _check_shape(value, group.buffer.layout.specs[slot])
        if not self._has_gradient(group):
            raise UsageError(
                "there is no gradient to replace.", do="call engine.backward(loss) first.", code="access-no-gradient"
            )
        if segment:
            group.gradient.write(slot, segment, self._part(group, slot, segment, value / self._unscale()))
        group.gradient.has_grad[slot] = 1

    @torch.no_grad()
    def set_local_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace this rank's part of the gradient, after backward at the boundary. Communicates nothing.

        Raises: UsageError: there is no gradient, or another number of elements than this rank owns.
        """
        group, slot, segment = self._find(parameter)
        if not self._has_gradient(group):
            raise UsageError(
                "there is no gradient to replace.", do="call engine.backward(loss) first.", code="access-no-gradient"
            )
        if segment is None:
            return
        _check_numel(value, segment)
        group.gradient.write(slot, segment, value.reshape(-1) / self._unscale())
        group.gradient.has_grad[slot] = 1

    # optimizer state

    def _state_parts(
        self, parameter: nn.Parameter, key: str
    ) -> tuple[ParameterGroup, int, Segment | None, torch.Tensor | None]:
        group, slot, segment = self._find(parameter)
        if self._step is None or segment is None:
            return group, slot, segment, None
        with group.resident():
            return group, slot, segment, self._resident_parts(group, slot, key)

    def _resident_parts(self, group: ParameterGroup, slot: int, key: str) -> torch.Tensor | None:
        assert self._step is not None
        parts = []
        for part_range, segment in group.ranges_of(slot):
            held = self._step.optimizer.state.get(part_range.param, {})
            if key not in held:
                return None
            parts.append(held[key][segment.start : segment.stop])
        whole = torch.cat(parts) if len(parts) != 1 else parts[0]
        return whole if group.disk is None or len(parts) != 1 else whole.clone()

    def full_optimizer_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor | None:
        """One per-element state, whole, fp32; None before the first step. Communicates as ``full_parameter``."""
        if key in ("fp32_param", "master"):
            return self.full_parameter(parameter)
        group, slot, segment, owned = self._state_parts(parameter, key)
        if not self._anywhere(owned is not None, group):
            return None
        return self._full(group, slot, segment, owned.float() if owned is not None else None)

    def _anywhere(self, flag: bool, group: ParameterGroup) -> bool:
        comm = group.buffer.comm
        return bool(comm.exchange(torch.tensor([float(flag)], device=group.main.device), label="state").wait().any())

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
        group, slot, segment = self._find(parameter)
        _check_shape(value, group.buffer.layout.specs[slot])
        if segment:
            self._write_state(group, slot, key, self._part(group, slot, segment, value))

    @torch.no_grad()
    def set_local_optimizer_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        group, slot, segment = self._find(parameter)
        if segment is not None:
            _check_numel(value, segment)
            self._write_state(group, slot, key, value.reshape(-1))

    def _write_state(self, group: ParameterGroup, slot: int, key: str, flat: torch.Tensor) -> None:
        assert self._step is not None
        done = 0
        with group.resident():
            for part_range, segment in group.ranges_of(slot):
                held = self._step.optimizer.state[part_range.param]
                if key not in held:
                    if held:
                        raise UsageError(
                            f"the optimizer has no state {key!r}; it has {', '.join(map(repr, held))}.",
                            where=f"parameter {group.buffer.layout.specs[slot].name!r}",
                            do="pass one of these names, 'fp32_param' for the main parameter.",
                            code="access-state",
                        )
                    held[key] = torch.zeros_like(part_range.param.detach())
                numel = segment.stop - segment.start
                held[key][segment.start : segment.stop].copy_(flat[done : done + numel])
                done += numel


def _make_writable(sharded: ShardedModel, parameter: torch.Tensor, group: ParameterGroup) -> None:
    """Release what a forward left gathered of the parameter's unit, and wait until no peer reads its shard."""
    sharded.release_kept([sharded.unit_of[id(parameter)]])
    group.buffer.comm.drain()


def _check_shape(value: torch.Tensor, slot: ParameterSpec) -> None:
    if tuple(value.shape) != slot.global_shape:
        raise UsageError(
            f"the value for {slot.name!r} has shape {tuple(value.shape)}, expected {slot.global_shape}.",
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
    if owner is None and OWNERS.is_elsewhere(parameter):
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} is on another pipeline stage: this rank has no part of it.",
            do="call this on the ranks of its stage alone, which have it in engine.module.named_parameters();"
            " engine.module_state_dict() gives the weights of all stages.",
            code="access-stage",
        )
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
