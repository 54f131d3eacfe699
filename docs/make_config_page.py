"""Writes docs/reference/config.md and the JSON Schema for editors, config.schema.json.

python docs/make_config_page.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.config import json_schema
from shoal.config.base import Key, Section, below, keys_of, walk
from shoal.config.json_schema import sentence
from shoal.config.optimizer import OPTIMIZERS, SCHEDULERS
from shoal.config.schema import Schema
from shoal.config.support import PARAMS, SUPPORT, SUPPORTED, Support, support_of

PAGE = Path(__file__).resolve().parent / "reference" / "config.md"


def page() -> str:
    """The page of the configuration, from the schema and the table of support."""
    counts: dict[str, int] = {}
    for path, key in walk(Schema):
        if key.model is None:
            kind = support_of(path).kind
            counts[kind] = counts.get(kind, 0) + 1
    total = sum(counts.values())
    lines = [
        "# The configuration, key by key",
        "",
        "Made from the schema by `python docs/make_config_page.py`; do not edit by hand.",
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
        *keys_table([key for key in keys_of(Schema).values() if key.kind == "leaf"], ""),
    ]
    for key in keys_of(Schema).values():
        if key.model is not None:
            lines += sections_of(key, key.name, 2)
    lines += params_of("optimizer", OPTIMIZERS) + params_of("scheduler", SCHEDULERS)
    return "\n".join(lines).rstrip() + "\n"


def sections_of(key: Key, path: str, depth: int) -> list[str]:
    assert key.model is not None
    inner = below(path, key)
    keys = keys_of(key.model)
    lines = ["", f"{'#' * depth} `{inner}`", "", sentence(key.description)]
    if path in SUPPORT:
        lines[-1] += f" Shoal: {shown_support(support_of(path))}."
    if key.deprecated:
        lines[-1] += f" Old name: {', '.join(f'`{name}`' for name in key.deprecated)}."
    leaves = [inner_key for inner_key in keys.values() if inner_key.kind == "leaf"]
    if leaves:
        lines += ["", *keys_table(leaves, inner)]
    for inner_key in keys.values():
        if inner_key.model is not None:
            lines += sections_of(inner_key, f"{inner}.{inner_key.name}", min(depth + 1, 4))
    return lines


def keys_table(keys: list[Key], path: str) -> list[str]:
    rows = ["| key | takes | default | meaning | Shoal |", "| --- | --- | --- | --- | --- |"]
    for key in keys:
        support = support_of(f"{path}.{key.name}" if path else key.name)
        rows.append(row_of(key, shown_support(support)))
    return rows


def row_of(key: Key, support: str) -> str:
    names = f"`{key.name}`"
    if key.aliases:
        names += f" (also {', '.join(f'`{name}`' for name in key.aliases)})"
    if key.deprecated:
        names += f" (old: {', '.join(f'`{name}`' for name in key.deprecated)})"
    cells = (names, key.expected, shown_default(key.default), key.description, support)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def shown_support(support: Support) -> str:
    kind, _, reason = str(support).partition(": ")
    return f"**{kind}**" + (f": {reason}" if reason else "")


def shown_default(value: Any) -> str:
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


def params_of(section: str, types: Mapping[str, type[Section]]) -> list[str]:
    lines = []
    for name, model in types.items():
        lines += ["", f"## `{section}.params` of {name}", ""]
        lines += ["| key | takes | default | meaning | Shoal |", "| --- | --- | --- | --- | --- |"]
        lines += [row_of(key, shown_support(PARAMS.get(key.name, SUPPORTED))) for key in keys_of(model).values()]
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    schema = json.dumps(json_schema(), indent=1, ensure_ascii=False)
    PAGE.with_name("config.schema.json").write_text(schema + "\n", encoding="utf-8")
