"""Compares what a file asks for with what this version does: parts not built, keys refused, keys without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.clean import Cleaned, Given
from shoal.config.problems import Problem, shown
from shoal.config.verdicts import AT_STAGE_3, OBEYED, PARAMS, SWITCHES, TYPES_NOT_BUILT, Kind, Verdict, verdict_of

OFF: tuple[Any, ...] = (None, False, 0, "none", "", (), {})


@dataclass(frozen=True)
class Judged:
    """A key that the file sets, with its verdict.

    Args:
        asks: it asks for something.
        schema_path: its path in the schema, where it is set to something else than its default; else empty.
        off_switch: a key above it that the file does not set, so that the section is off; ``is_off``: it, or one that
            the file sets, is off.
    """

    path: str
    value: Any
    verdict: Verdict
    asks: bool
    schema_path: str = ""
    off_switch: str = ""
    is_off: bool = False


def judge(found: Cleaned) -> list[Judged]:
    """Every key that the file sets, in its order."""
    judged = []
    chosen = found.given.get("zero_optimization.stage")
    stage = 0 if chosen is None else chosen.value
    for path, given in found.given.items():
        if not given.schema_path:
            verdict = PARAMS.get(path.rpartition(".")[2], OBEYED)
            judged.append(Judged(path, given.value, verdict, asks=_is_on(given.value)))
            continue
        verdict = _verdict(given.schema_path, stage)
        part = TYPES_NOT_BUILT.get(str(given.value).casefold().replace("_", ""))
        if given.schema_path == "optimizer.type" and part is not None:
            judged.append(Judged(path, given.value, Verdict("not built", part), asks=True))
            continue
        is_changed = given.key.model is None and given.value is not None and given.value != given.key.default
        off = [
            switch for switch, default in given.switches if switch != path and _is_switch_off(switch, default, found)
        ]
        judged.append(
            Judged(
                path,
                given.value,
                verdict,
                _asks(path, given, verdict, found.given),
                given.schema_path if is_changed else "",
                off[0] if off and not any(name in found.given for name in off) else "",
                bool(off),
            )
        )
    return judged


def _verdict(path: str, stage: Any) -> Verdict:
    if path in AT_STAGE_3 and isinstance(stage, int) and stage != 3:
        return Verdict("no effect", f"only stage 3 shards parameters, and this is stage {stage}")
    return verdict_of(path)


def _is_switch_off(switch: str, default: Any, found: Cleaned) -> bool:
    given = found.given.get(switch)
    return not _is_on(given.value if given is not None else default)


def unmet(judged: list[Judged], found: Cleaned, kinds: tuple[Kind, ...]) -> Iterator[Problem]:
    """What the file asks for and does not get."""
    for each in judged:
        if not each.asks or each.verdict.kind not in kinds:
            continue
        what = f"{shown(each.value)} asks for a part that is not built yet: {each.verdict.reason}."
        do = "leave it out for now."
        if each.verdict.kind == "refused":
            what, do = f"{shown(each.value)} is not supported.", f"{each.verdict.reason}."
        yield Problem(each.path, what, do, found.line(each.path))


def _asks(path: str, given: Given, verdict: Verdict, all_given: Mapping[str, Given]) -> bool:
    """Whether a key's value wants more than its default does, and nothing above it has said so already."""
    value, key = given.value, given.key
    if given.is_inside or any(value == same and type(value) is type(same) for same in verdict.harmless):
        return False
    if key.model is not None:
        is_there = bool(value) or key.default is None  # {} switches a section on that is off when it is left out
        return is_there and value is not None and _is_on(value.get("enabled", True))
    switches = [(switch, default) for switch, default in given.switches if switch != path]
    if verdict.switch:
        switches = [(verdict.switch, None)]
    for switch, default in [] if verdict.stands_alone else switches:
        over = all_given.get(switch)
        if not _is_on(over.value if over is not None else default):
            return False
        if verdict_of(over.schema_path if over is not None else switch).kind == verdict.kind:
            return False  # said at the switch
    if key.name in SWITCHES:
        return _is_on(value)
    return _is_on(value) and bool(value != key.default)


def _is_on(value: Any) -> bool:
    return value not in OFF
