"""``debug.check_streams`` of the config: the check of streams lasts from ``initialize`` to the end of ``destroy``."""

from __future__ import annotations

from shoal.engine.parts.part import Part
from shoal.simulation.check import LastingCheck


class CheckStreams(Part):
    """Raises: StreamError: when the engine is destroyed, if something was found."""

    def __init__(self, check: LastingCheck) -> None:
        self._check = check

    @property
    def num_operations(self) -> int:
        return self._check.num_operations

    def after_destroy(self) -> None:
        self._check.end()
