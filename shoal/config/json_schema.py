"""The schema as a JSON Schema, for editors."""

from __future__ import annotations

import math
from typing import Any

from pydantic import TypeAdapter

from shoal.config.base import Key, Section, below, keys_of, members
from shoal.config.normalise import DTYPES
from shoal.config.schema import Schema
from shoal.config.support import SUPPORT, support_of

JSON_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
AUTO = {"const": "auto"}


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of the whole file: keys with description, support, default and other names."""
    schema = _object(Schema, "")
    schema["properties"]["$schema"] = {"type": "string"}
    schema["patternProperties"] = {r"^\w+\.": {"description": "a path written as one key: ignored, with a warning"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Shoal's configuration",
        "description": "DeepSpeed's configuration file, as Shoal reads it.",
        **schema,
    }


def _object(model: type[Section], path: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for key in keys_of(model).values():
        here = f"{path}.{key.name}" if path else key.name
        properties[key.name] = _property(key, here)
        for name in (*key.aliases, *key.deprecated):
            properties[name] = {**properties[key.name], "description": f"The same as {key.name}."}
            if name in key.deprecated:
                properties[name]["deprecated"] = True
    is_open = model.model_config.get("extra") == "allow"
    return {"type": "object", "properties": properties, "additionalProperties": is_open}


def _property(key: Key, path: str) -> dict[str, Any]:
    about: dict[str, Any] = {"description": _described(key, path)}
    if key.kind == "leaf":
        if key.default is not None and _is_json(key.default):
            about["default"] = key.default
        return {**about, "anyOf": [*_types(key), AUTO]}
    assert key.model is not None
    inner = _object(key.model, below(path, key))
    if key.kind == "map":
        return {**about, "type": "object", "additionalProperties": inner}
    if key.kind == "list":
        return {**about, "type": "array", "items": inner}
    also = [{"type": "boolean"}] if path == "zero_optimization" else []
    return {**about, "anyOf": [inner, *also, {"type": "null"}, AUTO]}


def _described(key: Key, path: str) -> str:
    text = f"{sentence(key.description)}"
    if key.kind == "leaf" or path in SUPPORT:
        text += f" Shoal: {support_of(path)}."
    return text


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _types(key: Key) -> list[dict[str, Any]]:
    """The type of a key as JSON Schema, with the loose forms that reading accepts."""
    schema = TypeAdapter(key.annotation).json_schema()
    schema.pop("title", None)
    limits = {JSON_BOUNDS[bound]: limit for bound, limit in key.bounds.items()}
    kinds = schema.get("anyOf", [schema])
    kinds = [{**kind, **limits} if kind.get("type") in ("integer", "number") else kind for kind in kinds]
    if any(member is bool for member in members(key.annotation)):
        kinds.append({"enum": ["true", "false", "True", "False"]})
    if any(member in (int, float) for member in members(key.annotation)):
        kinds.append({"type": "string", "pattern": r"^\s*[-+]?(\d|\.\d|[iI]nf)"})
    choices = [choice for kind in kinds for choice in kind.get("enum", [kind.get("const")])]
    if "bf16" in choices:
        kinds.append({"enum": sorted(DTYPES)})
    if "none" in choices:
        kinds.append({"type": "null"})
    return kinds


def _is_json(value: Any) -> bool:
    return isinstance(value, bool | int | str | list | dict) or (isinstance(value, float) and math.isfinite(value))
