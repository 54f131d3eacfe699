"""Reads a raw dict against the schema: old names, unknown names, "auto", and values written loosely.

What comes out is a dict that pydantic accepts, the origin of every value, and every problem.
"""

from __future__ import annotations

import enum
import numbers
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from shoal.config.base import Key, Section, below, keys_of, members, names_of, walk
from shoal.config.optimizer import OPTIMIZERS, SCHEDULERS
from shoal.config.problems import HIDDEN, Problem, shown
from shoal.config.schema import Schema
from shoal.config.support import DEEPCOMPILE, SUPPORT, SWITCHES
from shoal.config.zero import OLD_KEYS, rewrite_old_keys
from shoal.text import nearest

Origin = Literal["user", "default", "auto", "derived", "deprecated alias"]

DROPPED = object()  # a value that leaves the key at its default

# Keys that other programs leave in the file.
OF_OTHER_PROGRAMS = {
    "msamp": "set by Accelerate for MS-AMP",
    "cuda_visible_devices": "the launcher chooses devices",
    "inference": "Transformers alone reads it, for tensor parallelism in inference",
}
# Keys that people have read of and that never existed.
NEVER_EXISTED = {
    "chunk_size": "no ZeRO ever had it; reduce_bucket_size, stage3_prefetch_bucket_size and sub_group_size set sizes",
    "profile": "flops_profiler.enabled counts operations, wall_clock_breakdown times phases",
}


@dataclass(frozen=True)
class Given:
    """A key that the file sets.

    Args:
        schema_path: its path with ``[]`` and ``<name>`` in place of indices and of names that the user chose; empty
            for arguments of a constructor.
        switches: the keys above it that turn its sections on or off, and their defaults.
        is_inside: a section above it has a support of its own.
    """

    value: Any
    key: Key
    schema_path: str
    switches: tuple[tuple[str, Any], ...] = ()
    is_inside: bool = False


@dataclass(frozen=True)
class At:
    """The position of the reader: in the schema, in the file, and below which switches."""

    path: str = ""
    schema_path: str = ""
    place: tuple[str | int, ...] = ()
    switches: tuple[tuple[str, Any], ...] = ()
    is_inside: bool = False

    def key(self, key: Key, spelling: str | int) -> At:
        """The position of a key of the section here."""
        path, schema_path = _join(self.path, key.name), _join(self.schema_path, key.name)
        return replace(self, path=path, schema_path=schema_path, place=(*self.place, spelling))

    def inside(self, key: Key, name: str | int | None = None) -> At:
        """The position in the section of a key; ``name``: of one of its several sections."""
        assert key.model is not None
        at = replace(self, schema_path=below(self.schema_path, key))
        if name is not None:
            path = f"{self.path}[{name}]" if key.kind == "list" else f"{self.path}.{name}"
            at = replace(at, path=path, place=(*self.place, name))
        mine = [
            (f"{at.path}.{switch}", inner.default) for switch, inner in keys_of(key.model).items() if switch in SWITCHES
        ]
        is_whole = key.kind == "section" and self.schema_path in SUPPORT
        return replace(at, switches=(*at.switches, *mine), is_inside=self.is_inside or is_whole)


@dataclass
class Normalised:
    """The result of reading.

    Args:
        values: what pydantic gets.
        origins: for each path that is not simply a default.
        wrong: paths of keys with values that they do not accept; ``values`` is without them.
        given: each key that the file sets, by its path; a section only where it has a support of its own.
    """

    lines: Mapping[tuple[str | int, ...], int]
    is_strict: bool = True
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    raw_paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    def problem(self, path: str, what: str, do: str = "", raw: tuple[str | int, ...] | None = None) -> None:
        self.problems.append(Problem(path, what, do, self.line(path, raw)))

    def line(self, path: str, raw: tuple[str | int, ...] | None = None) -> int | None:
        """The line of a key, or of the nearest one above it that the file has."""
        place = raw or self.raw_paths.get(path) or tuple(path.split("."))
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place)


def normalise(raw: Mapping[str, Any], lines: Mapping[tuple[str | int, ...], int]) -> Normalised:
    """Read a whole file."""
    strict = coerce(raw.get("strict", True), bool | Literal["warn"])
    reading = Normalised(lines, is_strict=strict not in ("warn", False))
    top = {name: value for name, value in raw.items() if name != "$schema"}  # which editors read
    _old_zero(top, reading)
    _deepcompile(top, reading)
    reading.values = _section(top, Schema, At(), reading)
    return reading


def _old_zero(top: dict[str, Any], reading: Normalised) -> None:
    """Rewrites the oldest forms of ``zero_optimization``, in a copy."""
    zero = coerce(top.get("zero_optimization"), bool | dict)
    if isinstance(zero, bool):
        reading.warnings.append(
            f'"zero_optimization": {shown(zero)} is an old form; write {{"stage": {1 if zero else 0}}}.'
        )
        size = top.pop("allgather_size", None)
        top["zero_optimization"] = {"stage": 1 if zero else 0}
        if size is not None:
            top["zero_optimization"]["allgather_bucket_size"] = size
            reading.warnings.append('"allgather_size" is an old name; write zero_optimization.allgather_bucket_size.')
            reading.origins["zero_optimization.allgather_bucket_size"] = "deprecated alias"
        reading.origins["zero_optimization.stage"] = "deprecated alias"
    elif isinstance(zero, Mapping):
        copy = {name: dict(inner) if isinstance(inner, Mapping) else inner for name, inner in zero.items()}
        for old, new in rewrite_old_keys(copy):
            reading.warnings.append(f"zero_optimization.{old} is deprecated; write {new}.")
            if OLD_KEYS[old] in copy:
                reading.origins[f"zero_optimization.{OLD_KEYS[old]}.device"] = "deprecated alias"
        top["zero_optimization"] = copy


def _deepcompile(top: dict[str, Any], reading: Normalised) -> None:
    """Writes what ``compile.deepcompile`` stands for into Shoal's keys, in a copy."""
    asked = top.get("compile")
    if not isinstance(asked, Mapping) or coerce(asked.get("deepcompile"), bool) is not True:
        return
    targets = {path: ("device", "cpu") for name, path in DEEPCOMPILE.items() if coerce(asked.get(name), bool) is True}
    for path, (name, value) in {"compile": ("enabled", True), **targets}.items():
        inner, *below = path.split(".")
        section = top[inner] = dict(top.get(inner) or {})
        if below:
            section[below[0]] = section = dict(section.get(below[0]) or {})
        if name not in section:
            section[name] = value
            reading.origins[f"{path}.{name}"] = "derived"
        elif section[name] in (False, None, "none"):
            what = f"{shown(section[name])}, but compile.deepcompile asks for it."
            reading.problem(f"{path}.{name}", what, "leave one of them out.")


def _section(raw: Mapping[Any, Any], model: type[Section], at: At, reading: Normalised) -> dict[str, Any]:
    spellings = names_of(model)
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in raw.items():
        key = spellings.get(name) if isinstance(name, str) else None
        if key is None:
            if model.model_config.get("extra") == "allow":
                values[str(name)] = value
            else:
                _unknown(name, value, model, at, reading)
            continue
        here = at.key(key, name)
        if key.name in spelled:
            _twice(here, (spelled[key.name], name), (values.get(key.name), coerce(value, key.annotation)), reading)
            continue
        spelled[key.name] = name
        reading.raw_paths[here.path] = here.place
        if name in key.deprecated:
            reading.warnings.append(f"{_join(at.path, name)} is deprecated; write {key.name}.")
            reading.origins[here.path] = "deprecated alias"
        read = _value(value, key, here, reading)
        if read is not DROPPED:
            values[key.name] = read
    return values


def _twice(at: At, names: tuple[str, str], values: tuple[Any, Any], reading: Normalised) -> None:
    """The same key under two of its names: harmless where both say the same."""
    if values[0] != values[1]:
        reading.problem(
            at.path,
            f"given twice, as {names[0]!r} = {shown(values[0])} and as {names[1]!r} = {shown(values[1])}.",
            f"keep {at.path.rpartition('.')[2]!r}.",
            at.place,
        )


def _value(value: Any, key: Key, at: At, reading: Normalised) -> Any:
    if isinstance(value, str) and value.strip().lower() == "auto" and not _takes_auto(key):
        reading.origins[at.path] = "auto"
        return DROPPED
    if value is None and not _takes_null(key):
        return DROPPED  # as DeepSpeed has it, and as clients write it: the key is not set
    if key.kind == "leaf":
        reading.origins.setdefault(at.path, "user")
        read = coerce(value, key.annotation)
        reading.given[at.path] = Given(read, key, at.schema_path, at.switches, at.is_inside)
        if key.accepts(read):
            return read
        reading.wrong.append(at.path)
        value = HIDDEN if key.is_secret else shown(read)
        reading.problem(at.path, f"{value} is not {key.expected}.", raw=at.place)
        return DROPPED
    assert key.model is not None
    if key.kind == "list":
        if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
            reading.problem(at.path, f"{shown(value)} is not a list of objects.", raw=at.place)
            return DROPPED
        return tuple(_section(item, key.model, at.inside(key, index), reading) for index, item in enumerate(value))
    if not isinstance(value, Mapping):
        reading.problem(at.path, f"{shown(value)} is not an object.", f'write {{"{_first(key)}": ...}}.', at.place)
        return DROPPED
    if key.kind == "map":
        read = {}
        for name, inner in value.items():
            if isinstance(inner, Mapping):
                read[name] = _section(inner, key.model, at.inside(key, name), reading)
            else:
                reading.problem(f"{at.path}.{name}", f"{shown(inner)} is not an object.", raw=(*at.place, name))
        return read
    if at.schema_path in SUPPORT:
        reading.given[at.path] = Given(value, key, at.schema_path, at.switches, at.is_inside)
    return _section(value, key.model, at.inside(key), reading)


def _first(key: Key) -> str:
    assert key.model is not None
    return next(iter(key.model.model_fields))


def _takes_auto(key: Key) -> bool:
    return any("auto" in getattr(member, "__args__", ()) for member in members(key.annotation)) or (
        key.kind == "leaf" and key.default == "auto"
    )


def _takes_null(key: Key) -> bool:
    """True if null means a choice. Among choices it means ``"none"``."""
    kinds = members(key.annotation)
    return key.kind == "leaf" and any(
        kind is Any or kind is type(None) or "none" in getattr(kind, "__args__", ()) for kind in kinds
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unknown(given_name: object, value: Any, model: type[Section], at: At, reading: Normalised) -> None:
    name = str(given_name)
    here = _join(at.path, name)
    is_flat = "." in name and name.partition(".")[0] in names_of(Schema)
    if not at.path and (name in OF_OTHER_PROGRAMS or is_flat):
        why = OF_OTHER_PROGRAMS.get(name) or "a path written as one key, as TRL writes it"
        reading.warnings.append(f"{here} = {shown(value)} is ignored: {why}.")
        return
    what, do = "no such key" + (f" in {at.path}" if at.path else "") + ".", _suggestion(name, model, at.path)
    if name.strip() != name and name.strip() in names_of(model):
        what, do = "no such key: there is space around its name.", f"did you mean {name.strip()!r}, without the space?"
    if reading.is_strict:
        reading.problem(here, what, do, (*at.place, name))
    else:
        reading.warnings.append(f"{here} = {shown(value)} is ignored: {what} {do}")


def _suggestion(name: str, model: type[Section], path: str) -> str:
    if name in NEVER_EXISTED:
        return f"{NEVER_EXISTED[name]}."
    is_typo = path.endswith(".params") or nearest(name, names_of(model), cutoff=0.85)
    meant = [key.name for key in keys_of(model).values() if key.description.startswith((f"{name}-", f"{name} "))]
    if path and len(meant) == 1 and not is_typo:
        return f"did you mean {meant[0]!r}?"
    elsewhere = _places()
    if name.strip() in elsewhere and not is_typo:
        return f"it belongs elsewhere: did you mean {_either(elsewhere[name.strip()][:3])}?"
    near = nearest(name, names_of(model), limit=4)
    if near:
        return f"did you mean {_either(near)}?"
    if path:
        return f"it takes {', '.join(sorted(keys_of(model)))}."
    far = [place for spelling in nearest(name, elsewhere, limit=2) for place in elsewhere[spelling][:2]]
    return f"did you mean {_either(far)}?" if far else "leave it out."


@cache
def _places() -> Mapping[str, list[str]]:
    """The paths of every spelling in the schema, and of the common arguments of optimizers and schedules."""
    places: dict[str, list[str]] = {}
    for there, key in walk(Schema):
        for spelling in (key.name, *key.aliases):
            places.setdefault(spelling, []).append(there)
    for kind, models in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        for model in models.values():
            for spelling in keys_of(model):
                places.setdefault(spelling, [f"{kind}.params.{spelling}"])
    return places


def _either(names: list[str]) -> str:
    return " or ".join(repr(name) for name in names)


def read_params(kind: Literal["optimizer", "scheduler"], model: type[Section], reading: Normalised) -> None:
    """Read the arguments of an optimizer or schedule of a known type, in place.

    Only what the file sets stays; an "auto" is taken out, and ``reading.origins`` has it.
    """
    at = At(path=f"{kind}.params", place=(kind, "params"))
    del reading.given[at.path]
    values = _section(reading.values[kind]["params"], model, at, reading)
    for path in [path for path in reading.given if path.startswith(f"{at.path}.")]:
        reading.given[path] = replace(reading.given[path], schema_path="")
    reading.values[kind]["params"] = values


DTYPES = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}


def coerce(value: Any, annotation: Any) -> Any:
    """The value in one of the annotation's types where it means the same; else the value unchanged. Bounds are ignored.

    >>> coerce("true", bool), coerce(2e8, int), coerce("CPU", Literal["none", "cpu"])
    (True, 200000000, 'cpu')
    """
    value = _plain(value)
    adapter = _adapter(annotation)
    with suppress(ValidationError):
        return adapter.validate_python(value, strict=True)
    meant = _meant(value, members(annotation))
    # Without strictness pydantic takes true for 1 and "yes" for true, which more often is a mistake.
    is_exact = isinstance(meant, bool | str | bytes)
    is_exact |= isinstance(meant, tuple) and any(isinstance(item, bool) for item in meant)
    with suppress(ValidationError):
        return adapter.validate_python(meant, strict=is_exact)
    return value


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    union: Any = Union[(*members(annotation),)]
    return TypeAdapter(union)


def _plain(value: Any) -> Any:
    """Numbers, dtypes, enums and paths of other libraries as plain ones."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, enum.Enum):
        return value.value
    return value


def _meant(value: Any, kinds: Sequence[Any]) -> Any:
    """The choice, truth value, number or list that a value means, where it is one; else the value."""
    if isinstance(value, list):
        return tuple(value)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    text = "none" if value is None else value.strip().casefold() if isinstance(value, str) else ""
    names = (text, DTYPES.get(text.removeprefix("torch.")))
    for choice in choices:
        if str(choice).casefold() in names or (type(value) is float and value == choice):
            return choice
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    if isinstance(value, str) and (int in kinds or float in kinds):
        with suppress(ValueError):
            value = int(value) if text.lstrip("-").isdecimal() else float(value)
    return int(value) if int in kinds and isinstance(value, float) and value.is_integer() else value
