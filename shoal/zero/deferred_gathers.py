"""The gathers after a step at stages 1 and 2, which overlap the next forward (``overlap_param_gather``).

step      issues the gathers of all units; their parameters become placeholders
forward   each unit's pre-forward hook waits for the unit's own
others    whatever reads parameters through Shoal waits for all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from shoal.comm.protocol import Work
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.unit import Unit, UnitState
from shoal.zero.hooks import HookSet


class DeferredGathers:
    """The units whose gathers a step leaves to their next use; none until ``install``."""

    def __init__(self) -> None:
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
            unit.gather()

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
        """Is there a unit to wait for?"""
        return any(unit.state is UnitState.GATHERING for unit in self._units.values())

    def defer(self, gathers: Sequence[tuple[ParameterGroup, Work]]) -> None:
        """Let the next use of each unit wait for its gathers."""
        by_unit: dict[Unit, list[tuple[ParameterGroup, Work]]] = {}
        for group, work in gathers:
            by_unit.setdefault(self._units[group], []).append((group, work))
        for unit, own in by_unit.items():
            unit.defer_gather(own)

    def add_read_early(self, unit: Unit) -> None:
        """A parameter of the unit was read outside of its forward: wait for it before the model's forward."""
        if unit in self._units.values():
            self._read_early.append(unit)

    def before_model(self) -> None:
        for unit in self._read_early:
            unit.gather()

    def wait(self) -> None:
        """Make all parameters valid."""
        for unit in self._units.values():
            unit.gather()
