"""ZeRO as a table: for each unit and each kind of state, where it rests.

A stage is a way to fill in the table; the engine executes rows and knows no stage. The sources are ZeRO
(arXiv:1910.02054, sections 5 and 7), MiCS (arXiv:2205.00119) and ZeRO++ hpZ (arXiv:2306.10209).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shoal.memory.placement import PARTIAL, REPLICATE, SHARD, Kind, Placement, Tier, collective
from shoal.text import table as text_table


@dataclass(frozen=True)
class Row:
    """Where the state of one unit rests."""

    unit: str
    parameter: Placement  # at rest; in use it is always Replicate
    gradient_between: Placement  # between micro-batches
    gradient_at_step: Placement
    state: Placement  # master weights and optimizer state
    secondary: bool = False  # a second, inner sharding is kept from forward to backward (hpZ)
    parameter_tier: Tier = Tier.DEVICE
    gradient_tier: Tier = Tier.DEVICE
    state_tier: Tier = Tier.DEVICE

    def __post_init__(self) -> None:
        collective(self.gradient_between.inner, self.gradient_at_step.inner)
        collective(self.parameter.inner, Kind.REPLICATE)

    @property
    def after_step(self) -> str:
        """What makes the parameters whole once the optimizer has updated this rank's range."""
        return "all_gather" if self.state.inner is Kind.SHARD and self.parameter.inner is Kind.REPLICATE else "nothing"

    def on(self, parameter_tier: Tier, state_tier: Tier, *, is_gradient_apart: bool = False) -> Row:
        """The same row on other tiers. What rests whole rests on the device.

        Args:
            is_gradient_apart: the host updates: a gradient that rests as a shard leaves for it once it is reduced.
        """
        is_sharded = self.parameter.inner is Kind.SHARD
        follows = is_gradient_apart and self.gradient_between.inner is Kind.SHARD
        return replace(
            self,
            parameter_tier=parameter_tier if is_sharded else Tier.DEVICE,
            gradient_tier=Tier.HOST if follows else Tier.DEVICE,
            state_tier=state_tier,
        )

    def cells(self) -> list[str]:
        tiers = {self.parameter_tier, self.gradient_tier, self.state_tier}
        tier = "/".join(t.value for t in (self.parameter_tier, self.gradient_tier, self.state_tier))
        return [
            self.unit,
            str(self.parameter) + (" + secondary" if self.secondary else ""),
            str(self.gradient_between),
            str(self.gradient_at_step),
            str(self.state),
            self.after_step,
            tier if len(tiers) > 1 else self.parameter_tier.value,
        ]


_STAGES: dict[int, tuple[Placement, Placement, Placement, Placement]] = {
    0: (REPLICATE, PARTIAL, REPLICATE, REPLICATE),
    1: (REPLICATE, PARTIAL, SHARD, SHARD),
    2: (REPLICATE, SHARD, SHARD, SHARD),
    3: (SHARD, SHARD, SHARD, SHARD),
}
_HYBRID_BETWEEN = Placement(Kind.SHARD, Kind.PARTIAL)


def row_of_stage(
    stage: int,
    unit: str,
    *,
    hybrid: bool = False,
    secondary: bool = False,
    persistent: bool = False,
    parameter_tier: Tier = Tier.DEVICE,
    state_tier: Tier = Tier.DEVICE,
) -> Row:
    """The row that a ZeRO stage means for one unit.

    Args:
        hybrid: shards are replicated over an outer axis (MiCS): gradients are summed over it at the step.
        secondary: hpZ.
        persistent: the parameters are too small to be worth gathering and stay whole, as at stage 2.
        parameter_tier: of shards between uses; what rests whole rests on the device.
        state_tier: of master weights and optimizer state. Gradients are reduced on the device and go there for the
            update.
    """
    if persistent and stage == 3:
        stage = 2
    parameter, between, at_step, state = _STAGES[stage]
    if hybrid and between.inner is Kind.SHARD:
        between = _HYBRID_BETWEEN
    return Row(
        unit,
        parameter,
        between,
        at_step,
        state,
        secondary=secondary and stage == 3,
        parameter_tier=parameter_tier if parameter.inner is Kind.SHARD else Tier.DEVICE,
        state_tier=state_tier,
    )


@dataclass(frozen=True)
class Table:
    """One row per unit. Prints at start-up and is kept with every checkpoint."""

    rows: tuple[Row, ...]
    by_unit: dict[str, Row] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_unit", {row.unit: row for row in self.rows})

    def __getitem__(self, unit: str) -> Row:
        return self.by_unit[unit]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def as_dict(self) -> list[dict[str, str]]:
        """The table as plain data, for a checkpoint."""
        return [dict(zip(HEADERS, row.cells(), strict=True)) for row in self.rows]

    def __str__(self) -> str:
        """Equal rows of consecutive units are one line."""
        lines: list[tuple[list[str], list[str]]] = []
        for row in self.rows:
            unit, *rest = row.cells()
            if lines and lines[-1][1] == rest:
                lines[-1][0].append(unit)
            else:
                lines.append(([unit], rest))
        named = [
            [units[0] if len(units) == 1 else f"{units[0]} .. {units[-1]} ({len(units)})", *rest]
            for units, rest in lines
        ]
        return text_table(named, HEADERS)


HEADERS = [
    "unit",
    "parameter at rest",
    "gradient between micro-batches",
    "gradient at the step",
    "master + optimizer state",
    "after the step",
    "tier",
]
