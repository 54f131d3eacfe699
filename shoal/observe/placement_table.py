"""The table of placements as text: printed at start-up, in a run's report, and saved with every checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.comm.formats import WireFormat
from shoal.sharding.table import Row
from shoal.text import table as text_table

HEADERS = [
    "unit",
    "parameter, stored",
    "gradient between micro-batches",
    "gradient at the step",
    "main parameters + optimizer state",
    "after the step",
    "tier",
]


def cells_of(row: Row) -> list[str]:
    """The row as text: one cell for each of ``HEADERS``."""
    tiers = [placement.tier.value for placement in (row.parameter, row.gradient_between, row.state)]
    return [
        row.unit,
        str(row.parameter) + (" + hpZ" if row.has_second else "") + _in(row.sent.gather),
        str(row.gradient_between),
        str(row.gradient_at_step) + "".join(_in(each) for _, each in row.sent.reduce),
        str(row.state),
        row.after_step + (" of differences" if row.sent.is_difference else ""),
        "/".join(tiers) if len(set(tiers)) > 1 else tiers[0],
    ]


def _in(sent: WireFormat | None) -> str:
    return "" if sent is None else f", {sent.name}"


@dataclass(frozen=True)
class Table:
    """The rows of a model."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Table:
        """Rows of the same unit that are equal are one."""
        return cls(tuple(dict.fromkeys(rows)))

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def as_dict(self) -> list[dict[str, str]]:
        """The table as plain data, for a checkpoint."""
        return [dict(zip(HEADERS, cells_of(row), strict=True)) for row in self.rows]

    def summary(self) -> str:
        """One line: which units store what where; of more than three kinds of rows, their number."""
        kinds: dict[tuple[str, ...], dict[str, None]] = {}
        for row in self.rows:
            unit, parameter, between, _, state, _, tier = cells_of(row)
            kinds.setdefault((parameter, between, state, tier), {})[unit] = None
        if len(kinds) > 3:
            return f"{len({row.unit for row in self.rows})} units, placed in {len(kinds)} ways"
        return "; ".join(
            f"{next(iter(units)) if len(units) == 1 else f'{len(units)} units'}: parameters {parameter}, gradients"
            f" {between}, optimizer state {state} ({tier})"
            for (parameter, between, state, tier), units in kinds.items()
        )

    def merged(self) -> list[list[str]]:
        """The rows as text; equal rows of consecutive units are one."""
        lines: list[tuple[list[str], list[str]]] = []
        for row in self.rows:
            unit, *rest = cells_of(row)
            if lines and lines[-1][1] == rest:
                lines[-1][0].append(unit)
            else:
                lines.append(([unit], rest))
        return [
            [units[0] if len(units) == 1 else f"{units[0]} .. {units[-1]} ({len(units)})", *rest]
            for units, rest in lines
        ]

    def __str__(self) -> str:
        return text_table(self.merged(), HEADERS)
