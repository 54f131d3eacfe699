"""How difficulty grows by steps: the keys of a curriculum's schedule, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from shoal.config.base import Section, key


class ScheduleConfig(Section):
    """How difficulty grows."""

    total_curriculum_step: int | None = key(None, "steps until full difficulty", deprecated=("total_step",))
    difficulty_step: int | None = key(None, "difficulty is a multiple of this")
    root_degree: int | None = key(None, "degree of the root, for fixed_root")
    difficulty: tuple[int, ...] | None = key(None, "difficulties, for fixed_discrete")
    max_step: tuple[int, ...] | None = key(None, "the last step of each of them")


ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]

# In addition to ``min_difficulty`` and ``max_difficulty``: what ``schedule_config`` must have.
NEEDED: dict[ScheduleType, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def schedule_problems(schedule: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The key, what is wrong with it and what to do, for each thing that is wrong.

    Args:
        schedule: ``min_difficulty``, ``max_difficulty``, ``schedule_type``, ``schedule_config``; None: not given.
    """
    low, high = schedule.get("min_difficulty"), schedule.get("max_difficulty")
    for name, value in (("min_difficulty", low), ("max_difficulty", high)):
        if value is None:
            yield name, "missing.", "write where difficulty begins and ends."
    if low is not None and high is not None and low > high:
        yield "min_difficulty", f"{low}, which is more than max_difficulty = {high}.", "swap them."
    kind = schedule.get("schedule_type")
    if kind not in NEEDED:
        kinds = ", ".join(get_args(ScheduleType))
        yield "schedule_type", "missing." if kind is None else f'"{kind}" is no schedule.', f"write one of {kinds}."
        return
    how = schedule.get("schedule_config") or {}
    missing = [name for name in NEEDED[kind] if how.get(name) is None]
    for name in missing:
        yield f"schedule_config.{name}", f"missing, and {kind} needs it.", "write it."
    if missing:
        return
    if kind == "fixed_discrete":
        levels, ends = how["difficulty"], how["max_step"]
        if len(levels) != len(ends) + 1 or not ends:
            yield (
                "schedule_config.max_step",
                f"{len(ends)} steps for {len(levels)} difficulties: the last one has no end, each other has one.",
                f"write {max(len(levels) - 1, 1)} steps.",
            )
        elif list(ends) != sorted(ends):
            yield "schedule_config.max_step", f"{list(ends)} goes down.", "write the steps in order."
    for name in ("total_curriculum_step", "difficulty_step", "root_degree"):
        if name in NEEDED[kind] and how[name] < 1:
            yield f"schedule_config.{name}", f"{how[name]} is no positive number.", "write one."
