"""Sections of the configuration, frozen models whose keys have descriptions, and the schema as a tree of those keys."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

Auto = Literal["auto"]
Dtype = Literal["fp32", "fp16", "bf16"]


class Section(BaseModel):
    """A JSON object of the file. Attribute names are DeepSpeed's key names."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", strict=True, protected_namespaces=())


class OpenSection(Section):
    """A JSON object whose further keys belong to another library and are passed on unchanged."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="allow", strict=True, protected_namespaces=())


def key(
    default: Any,
    description: str,
    *,
    alias: tuple[str, ...] = (),
    deprecated: tuple[str, ...] = (),
    secret: bool = False,
    **bounds: Any,
) -> Any:
    """One key.

    Args:
        alias: other names that mean the same.
        deprecated: old names; each is read, with one warning.
        secret: never printed, logged or saved.
        bounds: pydantic's constraints (``ge``, ``gt``, ``le`` ...).
    """
    about: dict[str, JsonValue] = {"alias": list(alias), "deprecated": list(deprecated), "secret": secret}
    return Field(default, description=description, json_schema_extra=about, **bounds)


def section(model: type[Section], description: str, *, deprecated: tuple[str, ...] = ()) -> Any:
    """A key whose value is a section; it has its defaults even when the file does not name it."""
    about: dict[str, JsonValue] = {"alias": [], "deprecated": list(deprecated), "secret": False}
    return Field(default_factory=model, description=description, json_schema_extra=about)


KeyKind = Literal["leaf", "section", "list", "map"]

WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    dict: "an object",
    tuple: "a list",
    type(None): "null",
    Any: "anything",
}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


@dataclass(frozen=True)
class Key:
    """One key of a section.

    ``kind``: a ``leaf``; a ``section``, whose keys ``model`` lists; a ``list`` of such sections; or
    a ``map``, an object of them under names that the user chooses.
    """

    name: str
    field: FieldInfo
    kind: KeyKind
    model: type[Section] | None
    aliases: tuple[str, ...]
    deprecated: tuple[str, ...]
    is_secret: bool

    @property
    def annotation(self) -> Any:
        return self.field.annotation

    @property
    def description(self) -> str:
        return self.field.description or ""

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)

    @property
    def bounds(self) -> dict[str, float]:
        """Numeric limits, by pydantic's names."""
        return _bounds(self.field.metadata)

    @property
    def expected(self) -> str:
        """The type of the key, in words."""
        return _within(in_words(self.annotation), self.bounds)

    def accepts(self, value: object) -> bool:
        """True if the key, a leaf, accepts the value."""
        try:
            self._adapter.validate_python(value)
        except ValidationError:
            return False
        return True

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        bounded: Any = Annotated[self.annotation, self.field]
        return TypeAdapter(bounded, config=ConfigDict(strict=True))


def _bounds(metadata: Iterable[Any]) -> dict[str, float]:
    return {
        bound: limit
        for constraint in metadata
        for bound in BOUNDS
        if (limit := getattr(constraint, bound, None)) is not None
    }


def _within(text: str, bounds: Mapping[str, float]) -> str:
    limits = " and ".join(f"{BOUNDS[bound]} {limit:g}" for bound, limit in bounds.items())
    return f"{text}, {limits}" if limits else text


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, recursively, without ``Annotated``; else the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) for inner in members(member))
    if hasattr(annotation, "__metadata__"):
        return members(annotation.__origin__)
    return (annotation,)


def in_words(annotation: Any) -> str:
    """The type of an annotation, in words."""
    parts = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            parts += [_shown(choice) for choice in get_args(member)]
        elif get_origin(member) is tuple:
            inner = [arg for arg in get_args(member) if arg is not Ellipsis]
            parts.append(_list_in_words(inner) if inner and inner[0] is not Any else "a list")
        else:
            parts.append(WORDS.get(get_origin(member) or member, "an object"))
    if len(parts) == 1:
        return parts[0]
    return f"one of {', '.join(parts)}" if len(parts) > 2 else " or ".join(parts)


def _list_in_words(items: list[Any]) -> str:
    bounds = _bounds(each for field in getattr(items[0], "__metadata__", ()) for each in field.metadata)
    text = _within(in_words(items[0]), bounds)
    return f"a list of {len(items)}, each {text}" if len(items) > 1 else f"a list of {text}"


def _shown(choice: object) -> str:
    return f'"{choice}"' if isinstance(choice, str) else str(choice)


@cache
def keys_of(model: type[Section]) -> Mapping[str, Key]:
    """A section's keys by name, in the order of the schema."""
    return types.MappingProxyType({name: _key(name, field) for name, field in model.model_fields.items()})


def _key(name: str, field: FieldInfo) -> Key:
    kind: KeyKind = "leaf"
    model = None
    for member in members(field.annotation):
        inner = [arg for arg in (member, *get_args(member)) if isinstance(arg, type) and issubclass(arg, Section)]
        if inner:
            model = inner[0]
            kind = "section" if model is member else "map" if get_origin(member) is dict else "list"
    about: Any = field.json_schema_extra or {}
    names, old = tuple(about.get("alias", ())), tuple(about.get("deprecated", ()))
    return Key(name, field, kind, model, names, old, about.get("secret", False))


@cache
def names_of(model: type[Section]) -> Mapping[str, Key]:
    """Every spelling that a section reads: names, aliases and deprecated names."""
    spellings = {}
    for key in keys_of(model).values():
        for name in (key.name, *key.aliases, *key.deprecated):
            spellings[name] = key
    return types.MappingProxyType(spellings)


def below(path: str, key: Key) -> str:
    """The path below a key: ``[]`` is any item of a list, ``<name>`` any name that the user chose."""
    return path + {"list": "[]", "map": ".<name>"}.get(key.kind, "")


def walk(model: type[Section], path: str = "") -> Iterator[tuple[str, Key]]:
    """Every key, sections too, with its path, depth first."""
    for name, key in keys_of(model).items():
        here = f"{path}.{name}" if path else name
        yield here, key
        if key.model is not None:
            yield from walk(key.model, below(here, key))
