"""The base of every section of the configuration: a frozen model whose keys have their own descriptions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

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
