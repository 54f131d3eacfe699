"""Keys and sections that are rows of a table: what Shoal knows and does not support (``unsupported.txt``), and the
arguments of optimizers and schedules (``arguments.txt``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import Field, create_model

from shoal.config.base import Dtype, OpenSection, Section, key, section

S = TypeVar("S", bound=Section)

Beta = Annotated[float, Field(ge=0, lt=1)]

TYPES: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "text": str,
    "any": Any,
    "null": None,
    "object": dict[str, Any],
    "list": tuple[Any, ...],
    "ints": tuple[int, ...],
    "floats": tuple[float, ...],
    "betas": tuple[Beta, Beta],
    "texts": tuple[str, ...],
    "dtype": Dtype,
    "texts by name": dict[str, str],
}
BOUNDS = {">=": "ge", ">": "gt", "<=": "le", "<": "lt"}
BOUND = re.compile(r" ([<>]=?) (\S+)")


@dataclass
class TableKey:
    """A row of a table.

    Args:
        path: in the schema, with ``[]`` and ``<name>`` for items of lists and names that the user chooses.
        takes: its type and bounds; or its kind of section.
        default: as JSON.
        support: empty: that of the section it is in.
        conditions: of the support, separated by commas.
    """

    path: str
    takes: str
    default: str
    description: str
    support: str
    conditions: str
    inner: list[TableKey] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def conditions_of(self, kind: str) -> list[str]:
        """What follows a word in the conditions."""
        words = [each.partition(" ") for each in self.conditions.split(", ")]
        return [value for word, _, value in words if word == kind]

    @property
    def is_section(self) -> bool:
        return "section" in self.takes


_INNER = {"list of sections": "[]", "sections by name": ".<name>"}  # what follows the path of such a key


def _read(name: str) -> list[TableKey]:
    """The table's outermost rows, with the others inside them."""
    above: list[TableKey] = []
    outermost: list[TableKey] = []
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        key_name, takes, description, support, conditions = [*line.strip().split(" | "), *[""] * 4][:5]
        takes, _, default = takes.partition(" = ")
        del above[(len(line) - len(line.lstrip())) // 2 :]
        inner = _INNER.get(above[-1].takes, "") if above else ""
        path = f"{above[-1].path}{inner}.{key_name}" if above else key_name
        row = TableKey(path, takes, default, description, support, conditions)
        (above[-1].inner if above else outermost).append(row)
        above.append(row)
    return outermost


ROWS = _read("unsupported.txt")


def all_rows() -> Iterator[TableKey]:
    """Every row, each section before what is in it."""
    waiting = ROWS[::-1]
    while waiting:
        row = waiting.pop()
        yield row
        waiting += row.inner[::-1]


def _type(text: str) -> Any:
    parts = text.split(" or ")
    choices = tuple(part.strip("'") for part in parts if part.startswith("'"))
    kinds = [TYPES[part] for part in parts if not part.startswith("'")]
    return Union[(*kinds, *((Literal[choices],) if choices else ()))]


def _field(row: TableKey) -> tuple[Any, Any]:
    """The annotation and the field of a row's key, as ``create_model`` takes them."""
    if not row.is_section:
        bounds = {BOUNDS[sign]: json.loads(limit) for sign, limit in BOUND.findall(row.takes)}
        default = json.loads(row.default)
        default = tuple(default) if isinstance(default, list) else default
        also, was = tuple(row.conditions_of("also")), tuple(row.conditions_of("was"))
        return _type(BOUND.sub("", row.takes)), key(default, row.description, alias=also, deprecated=was, **bounds)
    name = "".join(part.capitalize() for part in re.findall(r"[^\W_]+", row.path))
    base = OpenSection if row.takes.startswith("open") else Section
    model: Any = create_model(name, __base__=base, __module__=__name__, **_fields(row.inner))
    MODELS[name] = model
    if row.takes == "list of sections":
        return tuple[model, ...], key((), row.description)
    if row.takes == "sections by name":
        return dict[str, model], key({}, row.description)
    if row.takes.endswith("or null"):
        return model | None, key(None, row.description)
    return model, section(model, row.description)


def _fields(rows: list[TableKey]) -> dict[str, Any]:
    return {row.name: _field(row) for row in rows}


MODELS: dict[str, type[Section]] = {}


def __getattr__(name: str) -> type[Section]:
    """The section's class: pickle looks it up here."""
    if name in MODELS:
        return MODELS[name]
    raise AttributeError(name)


def with_unsupported(path: str = "") -> Callable[[type[S]], type[S]]:
    """Give a section the keys that the table has directly below a path. A type checker does not see them."""

    def extend(model: type[S]) -> type[S]:
        rows = [row for row in ROWS if row.path.rpartition(".")[0] == path]
        return create_model(model.__name__, __base__=model, __module__=model.__module__, **_fields(rows))

    return extend


def types_of_arguments() -> dict[str, dict[str, type[Section]]]:
    """The arguments of each type that DeepSpeed names, as a section; by ``optimizer`` and ``scheduler``."""
    types: dict[str, dict[str, type[Section]]] = {}
    for group in _read("arguments.txt"):
        models = types.setdefault(group.name, {})
        for row in group.inner:
            names, _, base = row.name.partition(": ")
            made: Any = create_model(
                f"{names.split()[0]}Arguments",
                __base__=models.get(base, Section),
                __module__=__name__,
                **_fields(row.inner),
            )
            models |= dict.fromkeys(names.split(), made)
        for name in ("common", "torch", "one_bit"):
            models.pop(name, None)
    return types
