"""What is fixed about an engine from its start: its config, the plan made from the config, its ranks, its device."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.world import World
from shoal.config import Config
from shoal.device import Device
from shoal.engine.settings import Plan
from shoal.sharding.axes import Axes


@dataclass(frozen=True)
class Properties:
    """Given to every part of an engine."""

    config: Config
    plan: Plan
    world: World
    axes: Axes
    device: Device

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.plan.zero.stage

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return self.world.rank

    def where(self, step: int) -> str:
        """The place that an error names."""
        return f"rank {self.rank}, step {step}"
