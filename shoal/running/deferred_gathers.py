"""The gathers after a step at stages 1 and 2, which overlap the next forward (``overlap_param_gather``).

step      issues the gathers of all units but those that are updated on the host; parameters become placeholders
forward   each unit's pre-forward hook waits for the unit's own update and gather; its end waits for updates of units
          that it did not use
others    whatever reads parameters through Shoal waits for all

After an update on the host, parameters are copied back and gathered during the forward of the units before. These
gathers are issued in unit order, and all before the first collective of a backward pass, whatever a forward uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from shoal.comm.protocol import Work
from shoal.comm.side_stream import CopyDone
from shoal.memory.stream_copies import mark
from shoal.running.gather_ahead import GatherAhead
from shoal.running.hooks import HookSet
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.unit import Unit, UnitState


class DeferredGathers:
    """The units whose gathers a step leaves to their next use; none until ``install``."""

    def __init__(self, device: torch.device, gather_ahead: GatherAhead) -> None:
        self._device = device
        self._gather_ahead = gather_ahead
        self._updated_late: deque[Unit] = deque()  # whose gathers wait for updates on the host, in unit order
        self._mark = CopyDone()  # the end of the step
        self._units: dict[ParameterGroup, Unit] = {}
        self._read_early: list[Unit] = []

    def install(
        self,
        hooks: HookSet,
        model: nn.Module,
        units: Sequence[Unit],
        modules: Mapping[str, Sequence[nn.Module]],
        before_use: Callable[[], None],
    ) -> None:
        """From now on a step may ``defer``.

        Args:
            units: whose parameters are stored whole.
            modules: by unit name, the modules whose forward needs the unit.
            before_use: called before each use of a unit.
        """

        def use(unit: Unit) -> None:
            before_use()
            self.gather(unit)

        self._units = {group: unit for unit in units for group in unit.trained}
        for unit in dict.fromkeys(self._units.values()):
            for module in modules.get(unit.name, ()):
                hooks.before_unit(module, use, unit)
        hooks.before_state_dict(model, self.wait)
        # Refuses copies of placeholders.
        hooks.on_state_dict(model, {id(p): unit for unit in self._units.values() for p in unit.parameters})

    @property
    def is_installed(self) -> bool:
        return bool(self._units)

    @property
    def is_pending(self) -> bool:
        """True if there is a unit to wait for."""
        return any(unit.state is UnitState.GATHERING for unit in self._units.values())

    def defer(self, gathers: Sequence[tuple[ParameterGroup, Work]]) -> None:
        """Let the next use of each unit wait for its updates on the host and its gathers."""
        by_unit: dict[Unit, list[tuple[ParameterGroup, Work]]] = {}
        for group, work in gathers:
            by_unit.setdefault(self._units[group], []).append((group, work))
        for unit in dict.fromkeys(self._units.values()):
            late = [group for group in unit.trained if group.updates is not None]
            if late or unit in by_unit:
                unit.defer_gather(by_unit.get(unit, ()), late)
            if late:
                self._updated_late.append(unit)
        self._mark = mark(self._device)

    def start(self, last: Unit | None = None) -> None:
        """Start the gathers that wait for updates on the host, up to unit ``last``; None: all.

        Order: blocks the host until the updates are done.
        """
        while self._updated_late:
            unit = self._updated_late[0]
            self._gather_ahead.start_after(self._mark, unit)
            self._updated_late.popleft()
            if unit is last:
                return

    def add_read_early(self, unit: Unit) -> None:
        """A parameter of the unit was read outside of its forward: wait for it before the model's forward."""
        if unit in self._units.values():
            self._read_early.append(unit)

    def before_model(self) -> None:
        for unit in self._read_early:
            self.gather(unit)

    def gather(self, unit: Unit) -> None:
        """Make the parameters of a unit valid."""
        with torch._C._DisableFuncTorch():  # a transform of torch.func refuses that parameters are written inside it
            if unit in self._updated_late:
                self.start(unit)
            unit.gather()

    def gather_if_pending(self, unit: Unit) -> None:
        """A parameter of the unit is read between two steps: make the unit's valid."""
        if unit.state is UnitState.GATHERING and self.is_pending:
            self.gather(unit)
            for group in unit.groups:
                group.buffer.wait_for_peers()  # the script may change them in place

    def wait(self) -> None:
        """Make all parameters valid."""
        self._updated_late.clear()  # all follow on the current stream
        with torch._C._DisableFuncTorch():
            for unit in self._units.values():
                unit.gather()
