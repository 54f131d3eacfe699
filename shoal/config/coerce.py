"""Values as people write them turned into values as the schema wants them: "true", 2e8, "NVMe", torch.bfloat16."""

from __future__ import annotations

import enum
import numbers
import os
from typing import Any, Literal, get_args, get_origin

from shoal.config.tree import members

DTYPES = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}
BOOLS = {"true": True, "false": False}


def coerce(value: Any, annotation: Any) -> Any:
    """The value in one of the annotation's types where it means the same; else the value unchanged.

    >>> coerce("true", bool), coerce(2e8, int), coerce("CPU", Literal["none", "cpu"])
    (True, 200000000, 'cpu')
    """
    value = _plain(value)
    kinds = members(annotation)
    for kind in kinds:
        if _fits(value, kind):
            return _inside(value, kind)
    for kind in kinds:
        changed = _inside(_to(value, kind), kind)
        if _fits(changed, kind):
            return changed
    return value


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


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, float)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    origin = get_origin(kind) or kind
    return isinstance(value, origin) if isinstance(origin, type) else False


def _inside(value: Any, kind: Any) -> Any:
    """The items of a list, each in its own type."""
    if get_origin(kind) is not tuple or not isinstance(value, tuple):
        return value
    wanted = get_args(kind)
    inner = wanted[0] if wanted else Any
    return tuple(coerce(item, inner) for item in value)


def _to(value: Any, kind: Any) -> Any:
    if kind is bool:
        return _to_bool(value)
    if kind in (int, float):
        return _to_number(value, kind)
    if get_origin(kind) is Literal:
        return _to_choice(value, get_args(kind))
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(value)
    return value


def _to_bool(value: Any) -> Any:
    if isinstance(value, str):
        return BOOLS.get(value.strip().lower(), value)
    return bool(value) if value in (0, 1) and isinstance(value, int | float) else value


def _to_number(value: Any, kind: type[int] | type[float]) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            value = float(value) if not value.strip().lstrip("-").isdecimal() else int(value)
        except ValueError:
            return value
    if kind is float and isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return value
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _to_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    if value is None and "none" in choices:
        return "none"
    if isinstance(value, str):
        folded = value.strip().casefold()
        folded = DTYPES.get(folded.removeprefix("torch."), folded)
        for choice in choices:
            if str(choice).casefold() == folded:
                return choice
    return int(value) if isinstance(value, float) and value.is_integer() else value
