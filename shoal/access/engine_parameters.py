"""The parameters of an engine: gathered in a block, and full and local values to read and to set.

``full`` calls are made on every rank and return the same on every rank; ``local`` calls see this rank's part (1-D)
and communicate nothing. The ``safe_`` functions, DeepSpeed's names, find the engine by the bare parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

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

_MAIN = ("fp32_param", "master")  # names of the main parameter among optimizer states
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
                group.buffer.wait_for_peers()  # the script may change them in place
        return self._sharded.gathered([unit for unit in units if unit.is_sharded], keep_user_views=True)

    def write_through(self, parameter: torch.Tensor, source: int) -> None:
        """Main parameters change only where the parameter did, so they keep their precision elsewhere."""
        home, mesh = self._home_of(parameter), self._sharded.axes.mesh
        group, part, spec, buffer = home.group, home.part, home.spec, home.group.buffer
        value = buffer.full.narrow(0, spec.offset, spec.numel)
        if not value.numel():
            return
        if parameter.data_ptr() != value.data_ptr():
            value.copy_(parameter.data.reshape(-1))
        # Of parameters that ``source`` does not hold (of other experts), the rank at its place among those that do.
        for comm in (group.axes.data, *group.axes.copies):
            comm.blocking.broadcast(value, mesh.index(comm.axis, source), label=buffer.label)
        buffer.wait_for_peers()
        if part is None:
            return
        new = home.owned_in(buffer.full[buffer.begin : buffer.end])
        if group.is_trained:
            group.update_main(part.start, part.stop, new)
        if buffer.is_sharded:
            with buffer.storage.resident():
                home.owned_in(buffer.shard).copy_(new)

    def number_of(self, parameter: torch.Tensor) -> int:
        return self._sharded.number_of[id(parameter)]

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        return self._sharded.unit_of[id(parameter)].is_sharded

    def state_of(self, parameter: torch.Tensor) -> ParameterState:
        return _STATES.get(self._sharded.unit_of[id(parameter)].state, "sharded")

    def shard_of(self, parameter: torch.Tensor) -> torch.Tensor:
        home = self._home_of(parameter)
        return home.owned_in(home.group.buffer.shard)

    def spec_of(self, parameter: torch.Tensor) -> ParameterSpec:
        """Its name, its global shape, and the part of it that this rank's engine has."""
        return self._home_of(parameter).spec

    def num_shards(self, parameter: torch.Tensor) -> int:
        return self._sharded.home_of[id(parameter)][0].buffer.comm.size

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, read: Callable[[int, int], torch.Tensor]) -> None:
        home = self._home_of(parameter)
        buffer, part = home.group.buffer, home.part
        self._before()
        self._make_writable(parameter, home.group)
        value = None
        if not buffer.is_sharded:
            whole = read(0, home.spec.numel)
            buffer.views[home.slot].copy_(whole.view(home.spec.shape))
            value = None if part is None else whole.reshape(-1)[part.offset : part.offset + part.stop - part.start]
        elif part is not None:
            value = read(part.offset, part.offset + part.stop - part.start)
        if value is None:
            return
        if home.group.is_trained:
            self._set_main(home, value)
        elif buffer.is_sharded:
            with buffer.storage.resident():
                home.owned_in(buffer.shard).copy_(value)

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
        home = self._sharded.home_of.get(id(parameter))
        return home is not None and home[0].is_trained

    def shows_sum(self, parameter: torch.Tensor) -> bool:
        """True if ``parameter.grad`` is of all ranks, and not of this one alone."""
        return self.comm.size == 1 or not self.knows(parameter) or self._home_of(parameter).group.gradient.is_shown

    @property
    def has_whole_model(self) -> bool:
        """True if no other rank has other parameters, or other parts of them."""
        axes = self._sharded.axes
        return axes.get("tp") is None and axes.get("ep") is None and axes.same_units.size == axes.world.size

    def _home_of(self, parameter: torch.Tensor) -> _ParameterHome:
        group, slot = self._sharded.home_of[id(parameter)]
        return _ParameterHome(group, slot, group.buffer.layout.segment_in(slot, group.buffer.begin, group.buffer.end))

    def _find(self, parameter: nn.Parameter) -> _ParameterHome:
        """Where a trained parameter is, once pending updates and gathers are done."""
        self._before()
        self._sharded.deferred.wait()
        if not self.knows(parameter):
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} is not trained by this engine.",
                do="pass a parameter of engine.module that is in an optimizer group.",
                code="access-unknown",
            )
        return self._home_of(parameter)

    def _make_writable(self, parameter: torch.Tensor, group: ParameterGroup) -> None:
        """Release what a forward left gathered of the unit, and wait until no peer, and no save, reads the values."""
        self._sharded.deferred.wait()
        self._sharded.release_kept([self._sharded.unit_of[id(parameter)]])
        group.wait_for_readers()
        group.buffer.wait_for_peers()

    def _full(self, home: _ParameterHome, owned: torch.Tensor | None) -> torch.Tensor:
        """Put the ranks' parts of one parameter together. ``owned``: this rank's part, fp32, or None."""
        buffer, spec = home.group.buffer, home.spec
        whole = torch.zeros(spec.numel, dtype=torch.float32, device=home.group.main.device)
        if home.part is not None and owned is not None:
            whole[home.part.offset : home.part.offset + owned.numel()] = owned
        if buffer.end - buffer.begin < buffer.layout.numel and spec.numel:
            # Each element comes from one rank only, so the sum is exact.
            buffer.comm.blocking.all_reduce(whole, label=f"{buffer.label}: {spec.name}")
        value, parts = whole.view(spec.shape), home.group.axes.parts
        return value if parts is None or not spec.is_part else gather_parts(value, spec, parts)

    # main parameters

    def full_parameter(self, parameter: nn.Parameter) -> torch.Tensor:
        """The fp32 main parameter. Communicates: one all_reduce of it where it is sharded."""
        home = self._find(parameter)
        with home.group.resident():
            return self._full(home, home.owned_in(home.group.main).float())

    def local_parameter(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the main parameter, 1-D, not a copy (except from a disk); None where it owns nothing."""
        home = self._find(parameter)
        if home.part is None:
            return None
        with home.group.resident():
            part = home.owned_in(home.group.main)
            return part if home.group.disk is None else part.clone()

    @torch.no_grad()
    def set_full_parameter(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set the main parameter and the parameter. Called with the same value on every rank. Communicates nothing."""
        home = self._find(parameter)
        part = home.part_of(value)
        self._make_writable(parameter, home.group)
        self._set_main(home, part)
        if not home.group.buffer.is_sharded:
            home.group.buffer.views[home.slot].copy_(cut(value, home.spec))

    @torch.no_grad()
    def set_local_parameter(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set this rank's part. Called on every rank; replicas of the parameter follow after the next step."""
        home = self._find(parameter)
        if home.part is not None:
            part = home.checked(value)
            self._make_writable(parameter, home.group)
            self._set_main(home, part)

    def _set_main(self, home: _ParameterHome, part: torch.Tensor) -> None:
        """Set this rank's part of the main parameter, and of the parameter."""
        group = home.group
        with group.resident():
            home.owned_in(group.main).copy_(part)
        if group.has_own_main:
            with group.buffer.storage.resident():
                home.owned_in(group.buffer.shard).copy_(part)

    # gradients

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The reduced gradient of the current step, fp32, as the optimizer will see it before clipping; None
        before backward.
        """
        home = self._find(parameter)
        return self._full(home, self._own_gradient(home)) if self._has_gradient(home.group) else None

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the reduced gradient, 1-D, fp32; None before backward or where it owns nothing."""
        home = self._find(parameter)
        return None if home.part is None or not self._has_gradient(home.group) else self._own_gradient(home)

    def _own_gradient(self, home: _ParameterHome) -> torch.Tensor:
        return home.owned_in(home.group.gradient.owned()).float() * self._unscale()

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """True if a backward pass has reached it since the last step."""
        return self._has_gradient(self._find(parameter).group)

    def _has_gradient(self, group: ParameterGroup) -> bool:
        self._sharded.finish_backward()
        gradient = group.gradient
        if gradient.moved is not None:
            raise UsageError(
                "the gradients are in host memory since offload_states().",
                do="call engine.reload_states() first.",
                code="states-away",
            )
        if gradient.is_shown:  # take over what the script has set
            gradient.take_back()
            gradient.show_sum()
        return gradient.state is not GradientState.NONE

    @torch.no_grad()
    def set_full_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the gradient. Called with the same value on every rank, after backward at the boundary."""
        home = self._find(parameter)
        part = home.part_of(value)
        self._require_gradient(home.group)
        if home.part is not None:
            home.group.gradient.write(home.slot, home.part, part / self._unscale())
        home.group.gradient.has_grad[home.slot] = 1

    @torch.no_grad()
    def set_local_gradient(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace this rank's part of the gradient, after backward at the boundary. Communicates nothing.

        Raises: UsageError: there is no gradient, or another number of elements than this rank owns.
        """
        home = self._find(parameter)
        self._require_gradient(home.group)
        if home.part is not None:
            home.group.gradient.write(home.slot, home.part, home.checked(value) / self._unscale())
            home.group.gradient.has_grad[home.slot] = 1

    def _require_gradient(self, group: ParameterGroup) -> None:
        if not self._has_gradient(group):
            raise UsageError(
                "there is no gradient to replace.", do="call engine.backward(loss) first.", code="access-no-gradient"
            )

    # optimizer state

    def full_optimizer_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor | None:
        """One per-element state, whole, fp32; None before the first step. Communicates as ``full_parameter``."""
        if key in _MAIN:
            return self.full_parameter(parameter)
        home = self._find(parameter)
        owned, comm = self._state(home, key), home.group.buffer.comm
        has_state = torch.tensor([float(owned is not None)], dtype=torch.float32, device=home.group.main.device)
        if not comm.exchange(has_state, label="state").wait().any():
            return None
        return self._full(home, owned.float() if owned is not None else None)

    def local_optimizer_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor | None:
        """This rank's part of one per-element state, 1-D; None before the first step or where it owns nothing."""
        return self.local_parameter(parameter) if key in _MAIN else self._state(self._find(parameter), key)

    def _state(self, home: _ParameterHome, key: str) -> torch.Tensor | None:
        if self._step is None or home.part is None:
            return None
        parts: list[torch.Tensor] = []
        with home.group.resident():
            for owned, segment in home.group.ranges_of(home.slot):
                state = self._step.optimizer.state.get(owned.param, {})
                if key not in state:
                    return None
                parts.append(state[key][segment.start : segment.stop])
            if len(parts) != 1:
                return torch.cat(parts)
            return parts[0] if home.group.disk is None else parts[0].clone()

    @torch.no_grad()
    def set_full_optimizer_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Set one per-element state. Called with the same value on every rank. Communicates nothing."""
        if key in _MAIN:
            self.set_full_parameter(parameter, value)
            return
        home = self._find(parameter)
        self._set_state(home, key, home.part_of(value))

    @torch.no_grad()
    def set_local_optimizer_state(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        home = self._find(parameter)
        if home.part is not None:
            self._set_state(home, key, home.checked(value))

    def _set_state(self, home: _ParameterHome, key: str, flat: torch.Tensor) -> None:
        assert self._step is not None
        done = 0
        with home.group.resident():
            for owned, segment in home.group.ranges_of(home.slot):
                state = self._step.optimizer.state[owned.param]
                if key not in state:
                    if state:
                        raise UsageError(
                            f"the optimizer has no state {key!r}; it has {', '.join(map(repr, state))}.",
                            where=f"parameter {home.spec.name!r}",
                            do="pass one of these names, 'fp32_param' for the main parameter.",
                            code="access-state",
                        )
                    state[key] = torch.zeros_like(owned.param.detach())
                numel = segment.stop - segment.start
                state[key][segment.start : segment.stop].copy_(flat[done : done + numel])
                done += numel


class _ParameterHome(NamedTuple):
    """Where a parameter is: its group, its number there, and the part of it that this rank owns (None: nothing)."""

    group: ParameterGroup
    slot: int
    part: Segment | None

    @property
    def spec(self) -> ParameterSpec:
        return self.group.buffer.layout.specs[self.slot]

    def owned_in(self, range_: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in a tensor of this rank's range; none where it owns nothing."""
        return range_[:0] if self.part is None else range_[self.part.start : self.part.stop]

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value, 1-D. Raises: UsageError: the value has another shape."""
        if tuple(value.shape) != self.spec.global_shape:
            raise UsageError(
                f"the value for {self.spec.name!r} has shape {tuple(value.shape)}, expected {self.spec.global_shape}.",
                do="pass the whole tensor; the local forms take this rank's part.",
                code="access-shape",
            )
        flat, part = cut(value.detach(), self.spec).reshape(-1), self.part
        return flat[:0] if part is None else flat[part.offset : part.offset + part.stop - part.start]

    def checked(self, value: torch.Tensor) -> torch.Tensor:
        """A value of this rank's part, 1-D. Raises: UsageError: it has another number of elements."""
        assert self.part is not None
        numel = self.part.stop - self.part.start
        if value.numel() != numel:
            raise UsageError(
                f"the local value has {value.numel()} elements, this rank owns {numel}.",
                do="pass a tensor of the size that the local getter returns.",
                code="access-shape",
            )
        return value.reshape(-1)


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
