"""Compares what a file asks for with what this version does: parts not built, keys refused, keys without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.normalise import Given, Normalised
from shoal.config.problems import Problem, shown
from shoal.config.support import AT_STAGE_3, OBEYED, PARAMS, SWITCHES, TYPES_NOT_BUILT, Support, SupportKind, support_of

OFF: tuple[Any, ...] = (None, False, 0, "none", "", (), {})


@dataclass(frozen=True)
class KeySupport:
    """A key that the file sets, with its support.

    Args:
        asks: it asks for something.
        schema_path: its path in the schema, where it is set to something else than its default; else empty.
        off_switch: a key above it that the file does not set, so that the section is off; ``is_off``: it, or one that
            the file sets, is off.
    """

    path: str
    value: Any
    support: Support
    asks: bool
    schema_path: str = ""
    off_switch: str = ""
    is_off: bool = False


def keys_with_support(found: Normalised) -> list[KeySupport]:
    """Every key that the file sets, in its order."""
    keys = []
    chosen = found.given.get("zero_optimization.stage")
    stage = 0 if chosen is None else chosen.value
    for path, given in found.given.items():
        if not given.schema_path:
            support = PARAMS.get(path.rpartition(".")[2], OBEYED)
            keys.append(KeySupport(path, given.value, support, asks=_is_on(given.value)))
            continue
        support = _support(given.schema_path, stage)
        part = TYPES_NOT_BUILT.get(str(given.value).casefold().replace("_", ""))
        if given.schema_path == "optimizer.type" and part is not None:
            keys.append(KeySupport(path, given.value, Support("not built", part), asks=True))
            continue
        is_changed = given.key.model is None and given.value is not None and given.value != given.key.default
        off = [
            switch for switch, default in given.switches if switch != path and _is_switch_off(switch, default, found)
        ]
        keys.append(
            KeySupport(
                path,
                given.value,
                support,
                _asks(path, given, support, found.given),
                given.schema_path if is_changed else "",
                off[0] if off and not any(name in found.given for name in off) else "",
                bool(off),
            )
        )
    return keys


def _support(path: str, stage: Any) -> Support:
    if path in AT_STAGE_3 and isinstance(stage, int) and stage != 3:
        return Support("no effect", f"only stage 3 shards parameters, and this is stage {stage}")
    return support_of(path)


def _is_switch_off(switch: str, default: Any, found: Normalised) -> bool:
    given = found.given.get(switch)
    return not _is_on(given.value if given is not None else default)


def unsupported_problems(
    keys: list[KeySupport], found: Normalised, kinds: tuple[SupportKind, ...]
) -> Iterator[Problem]:
    """Problems for the keys that ask for something that Shoal does not do."""
    for each in keys:
        if not each.asks or each.support.kind not in kinds:
            continue
        what = f"{shown(each.value)} asks for a part that is not built yet: {each.support.reason}."
        do = "leave it out for now."
        if each.support.kind == "refused":
            what, do = f"{shown(each.value)} is not supported.", f"{each.support.reason}."
        yield Problem(each.path, what, do, found.line(each.path))


def _asks(path: str, given: Given, support: Support, all_given: Mapping[str, Given]) -> bool:
    """Whether a key's value differs from its default, and no key above it is reported already."""
    value, key = given.value, given.key
    if given.is_inside or any(value == same and type(value) is type(same) for same in support.harmless):
        return False
    if key.model is not None:
        is_there = bool(value) or key.default is None  # {} switches a section on that is off when it is left out
        return is_there and value is not None and _is_on(value.get("enabled", True))
    switches = [(switch, default) for switch, default in given.switches if switch != path]
    if support.switch:
        switches = [(support.switch, None)]
    for switch, default in [] if support.stands_alone else switches:
        over = all_given.get(switch)
        if not _is_on(over.value if over is not None else default):
            return False
        if support_of(over.schema_path if over is not None else switch).kind == support.kind:
            return False  # reported at the switch
    if key.name in SWITCHES:
        return _is_on(value)
    return _is_on(value) and bool(value != key.default)


def _is_on(value: Any) -> bool:
    return value not in OFF
