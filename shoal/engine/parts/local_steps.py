"""``local_steps``: when replicas that take steps of their own are synchronised.

    step         1   2   3   4   5   6   7   8   9  10     every 4, 2 fragments of the units
    fragment 0               x               x
    fragment 1       x               x               x

Between two synchronisations nothing but the status of a step is exchanged over the replicas. That keeps what they count
alike: a step in which a gradient of one replica is not finite is skipped on all, and all have one loss scale, one
schedule and one number of optimizer steps. The gradient's norm, and so clipping, is each replica's own.

A save gives the replicas the mean of their parameters and optimizer states (``OuterState.share``). So another number of
replicas may continue, wherever in a round it was.

Sources: DiLoCo (arXiv:2311.08105); fragments of strided layers, Streaming DiLoCo (arXiv:2501.18512), section
2.1.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shoal.comm.formats import format_named
from shoal.engine.parts.fault_tolerance import FaultTolerance
from shoal.engine.parts.part import Part
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import ConfigError
from shoal.sharding.outer_state import OuterSgd, OuterState


class LocalSteps(Part):
    """Synchronises the replicas each ``every`` steps, fragment by fragment.

    Raises: ConfigError: there are more fragments than units.
    """

    def __init__(self, sharding: Sharding, properties: Properties) -> None:
        section = properties.config.local_steps
        assert section.every is not None and properties.axes.apart is not None
        self._every, self._num_fragments = section.every, section.fragments
        self._sharding = sharding
        wire = None if section.wire is None else format_named(section.wire, section.block)
        sgd = OuterSgd(section.outer_lr, section.outer_momentum, section.nesterov, wire, section.error_feedback)
        units = [unit for unit in sharding.model.units if unit.trained]
        if len(units) < self._num_fragments:
            raise ConfigError(
                f"local_steps.fragments is {self._num_fragments}, and there are {len(units)} units that are trained.",
                where=f"rank {properties.rank}",
                do=f"write at most {max(len(units), 1)}, or name more modules in units.",
                code="local-steps",
            )
        self._fragments: list[list[OuterState]] = [[] for _ in range(self._num_fragments)]
        for number, unit in enumerate(units):
            for group in unit.trained:
                # Copies on ranks with other units are synchronised in one step.
                fragment = 0 if group.axes.across else number % self._num_fragments
                state = OuterState(group, sgd, properties.axes.apart)
                group.kept.append(state)
                self._fragments[fragment].append(state)

    def prepare(self, engine: Any) -> None:
        self._steps = engine.accumulation.counters
        self._replicas: FaultTolerance | None = engine.part(FaultTolerance)  # that are jobs of their own

    def at_step(self, was_applied: bool) -> None:
        steps = self._steps.global_steps
        offsets = [number * self._every // self._num_fragments for number in range(self._num_fragments)]
        self._synchronize([number for number, at in enumerate(offsets) if (steps - at) % self._every == 0])

    def synchronize(self) -> None:
        """End the round of every fragment now, so that all replicas have the same parameters. Every rank calls.

        Communicates: as the synchronisation of all fragments.
        """
        self._synchronize(range(self._num_fragments))

    def _synchronize(self, fragments: Collection[int]) -> None:
        if not fragments:
            return
        self._sharding.wait()
        states = [state for number in fragments for state in self._fragments[number]]
        if self._replicas is None:
            for state in states:
                state.synchronize()
        elif (means := self._replicas.average([(state.group, state.outer_gradient()) for state in states])) is not None:
            for state, mean in zip(states, means, strict=True):
                state.apply(mean)
