"""The schema written out: as a JSON Schema for editors, and as a page of the documentation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from shoal.config.base import Key, Section, below, keys_of, members, walk
from shoal.config.normalise import DTYPES
from shoal.config.optimizer import OPTIMIZERS, SCHEDULERS
from shoal.config.schema import Schema
from shoal.config.support import PARAMS, SUPPORT, SUPPORTED, TYPES_NOT_BUILT, Support, support_of

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
    text = f"{_sentence(key.description)}"
    if key.kind == "leaf" or path in SUPPORT:
        text += f" Shoal: {support_of(path)}."
    return text


def _sentence(text: str) -> str:
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


def reference() -> str:
    """The page ``docs/reference/config.md``, from the schema and the table of support."""
    counts: dict[str, int] = {}
    for path, key in walk(Schema):
        if key.model is None:
            kind = support_of(path).kind
            counts[kind] = counts.get(kind, 0) + 1
    total = sum(counts.values())
    lines = [
        "# The configuration, key by key",
        "",
        "Made from the schema by `shoal.config.reference()`; do not edit by hand.",
        "",
        "A configuration is DeepSpeed's JSON file: a path, a dict, JSON text, or base64 of it. Comments and trailing "
        "commas are accepted. Every key of DeepSpeed's schema is known, and none is ignored silently. An unknown key "
        "is an error that names the nearest one. `shoal doctor FILE` prints what happens with each key of a file, and "
        "its effective value. For editors there is a [JSON Schema](config.schema.json).",
        "",
        f"Of {total} keys, {counts.get('supported', 0)} are **supported**; {counts.get('no effect', 0)} have **no "
        f"effect**, for the reason given; {counts.get('not built', 0)} belong to parts that are **not built yet** and "
        f"are an error when they ask for something; {counts.get('refused', 0)} are **refused**, with what to use "
        "instead.",
        "",
        "Every key may be `auto`: a batch size is then derived, and any other key has its default. `true` and `false` "
        "may be strings, whole numbers may be written as `2e8`, and `null` means that the key or section is absent.",
        "",
        "## Top level",
        "",
        *_table([key for key in keys_of(Schema).values() if key.kind == "leaf"], ""),
    ]
    for key in keys_of(Schema).values():
        if key.model is not None:
            lines += _pages(key, key.name, 2)
    lines += _params("optimizer", OPTIMIZERS) + _params("scheduler", SCHEDULERS)
    return "\n".join(lines).rstrip() + "\n"


def _pages(key: Key, path: str, depth: int) -> list[str]:
    assert key.model is not None
    inner = below(path, key)
    keys = keys_of(key.model)
    lines = ["", f"{'#' * depth} `{inner}`", "", _sentence(key.description)]
    if path in SUPPORT:
        lines[-1] += f" Shoal: {_shown_support(support_of(path))}."
    if key.deprecated:
        lines[-1] += f" Old name: {', '.join(f'`{name}`' for name in key.deprecated)}."
    leaves = [inner_key for inner_key in keys.values() if inner_key.kind == "leaf"]
    if leaves:
        lines += ["", *_table(leaves, inner)]
    for inner_key in keys.values():
        if inner_key.model is not None:
            lines += _pages(inner_key, f"{inner}.{inner_key.name}", min(depth + 1, 4))
    return lines


def _table(keys: list[Key], path: str) -> list[str]:
    rows = ["| key | takes | default | meaning | Shoal |", "| --- | --- | --- | --- | --- |"]
    for key in keys:
        support = support_of(f"{path}.{key.name}" if path else key.name)
        rows.append(_row(key, _shown_support(support)))
    return rows


def _row(key: Key, support: str) -> str:
    names = f"`{key.name}`"
    if key.aliases:
        names += f" (also {', '.join(f'`{name}`' for name in key.aliases)})"
    if key.deprecated:
        names += f" (old: {', '.join(f'`{name}`' for name in key.deprecated)})"
    cells = (names, key.expected, _default(key.default), key.description, support)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _shown_support(support: Support) -> str:
    kind, _, reason = str(support).partition(": ")
    return f"**{kind}**" + (f": {reason}" if reason else "")


def _default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    if isinstance(value, int) and value >= 10_000_000 and value % 1_000_000 == 0:
        return f"{value:g}".replace("e+0", "e").replace("e+", "e")
    return "no limit" if isinstance(value, int) and value > 2**62 else str(value)


def _params(section: str, types: Mapping[str, type[Section]]) -> list[str]:
    lines = []
    for name, model in types.items():
        lines += ["", f"## `{section}.params` of {name}", ""]
        part = TYPES_NOT_BUILT.get(name.casefold()) if section == "optimizer" else None
        if part is not None:
            lines += [f"Not built yet: {part.reason}.", ""]
        lines += ["| key | takes | default | meaning | Shoal |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(key, _shown_support(PARAMS.get(key.name, SUPPORTED))) for key in keys_of(model).values()]
    return lines
