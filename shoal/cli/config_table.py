"""``shoal doctor``: the support of each key of a configuration file, and the effective values."""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.config import Examined, examine, json_schema
from shoal.config.problems import shown
from shoal.errors import ConfigError
from shoal.processor import emulation_notes

WIDTH = 140  # of a page that is not a terminal
COLOURS = {"obeyed": "green", "no effect": "yellow", "not built": "red", "refused": "red"}


def doctor(
    file: Annotated[Path | None, typer.Argument(help="The configuration, a JSON file.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks in all, to compute the mesh and batch sizes.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema for editors, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print for programs.")] = False,
) -> None:
    """Print the support of each key of a configuration, its problems, and the effective values.

    The exit code is 1 where anything is wrong, 2 where there is no file to look at.
    """
    if schema:
        print(json_text.dumps(json_schema(), indent=2, ensure_ascii=False))
        return
    if file is None:
        Console(stderr=True).print("doctor needs a file: shoal doctor ds_config.json", highlight=False, soft_wrap=True)
        raise typer.Exit(2)
    try:
        seen = examine(Path(file), world_size=world_size)
    except ConfigError as error:
        _show_unreadable(error, json)
        raise typer.Exit(1) from None
    if json:
        print(json_text.dumps(_as_json(seen), indent=2, ensure_ascii=False))
    else:
        console = Console()
        _show(seen, console if console.is_terminal else Console(width=WIDTH), world_size)
    if seen.problems:
        raise typer.Exit(1)


def _show_unreadable(error: ConfigError, json: bool) -> None:
    if json:
        problem = {"path": "", "what": error.what, "do": error.do, "line": None, "where": error.where}
        print(json_text.dumps({"problems": [problem]}, indent=2, ensure_ascii=False))
    else:
        Console(stderr=True).print(f"[red]{escape(str(error))}[/red]", highlight=False, soft_wrap=True)


def _show(seen: Examined, console: Console, world_size: int | None) -> None:
    keys = _table("Keys in the file", "what happens")
    numbers = {problem.path: number for number, problem in reversed(list(enumerate(seen.problems, 1)))}
    for each in seen.keys:
        support = each.support
        colour = COLOURS[support.kind] if support.kind != "not built" or each.asks else "yellow"
        text = str(support) if support.kind != "not built" or each.asks else f"{support}; asks for nothing"
        if support.kind == "obeyed" and each.path in numbers:
            colour, text = "red", f"wrong: see problem {numbers[each.path]}"
        keys.add_row(escape(each.path), escape(shown(each.value)), f"[{colour}]{escape(text)}[/{colour}]")
    for path in [path for path, origin in seen.found.origins.items() if origin == "auto"]:
        is_open = seen.config is not None and path in seen.config.unresolved_auto
        text = "a client has to replace it" if is_open else "resolved: see its value below"
        keys.add_row(escape(path), '"auto"', f"[yellow]{text}[/yellow]")
    console.print(keys)
    if seen.config is not None:
        values = _table("Effective values", "origin")
        for path, value, origin in _effective(seen):
            colour = "dim" if origin == "default" else "bold"
            values.add_row(escape(path), escape(shown(value)), f"[{colour}]{origin}[/{colour}]")
        console.print(values)
    notes = [*seen.found.warnings, *_notes(seen)]
    if world_size is None:
        notes.append("batch sizes depend on the number of ranks: give --world-size to see them filled in.")
    if notes:
        console.print("Notes")
        for note in notes:
            console.print(f"  {escape(note)}", highlight=False, soft_wrap=True)
    if seen.problems:
        console.print(f"\n[red]{len(seen.problems)} problem{'s' if len(seen.problems) > 1 else ''}[/red]")
        for number, problem in enumerate(seen.problems, 1):
            console.print(f"  {number}. {escape(str(problem))}", highlight=False, soft_wrap=True)
    else:
        console.print("\n[green]Nothing is wrong.[/green]")


def _notes(seen: Examined) -> list[str]:
    if seen.config is None:
        return []
    return [*seen.config.notes(), *emulation_notes(seen.config.low_precision_formats)]


def _table(title: str, last: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for header in ("key", "value", last):
        table.add_column(header, overflow="fold")
    return table


def _effective(seen: Examined) -> Iterator[tuple[str, Any, str]]:
    assert seen.config is not None
    for path, value in _leaves(seen.config.effective()):
        yield path, value, seen.config.origin(path)


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, here)
        else:
            yield here, value


def _as_json(seen: Examined) -> dict[str, Any]:
    config = seen.config
    wrong = {problem.path: problem.what for problem in reversed(seen.problems)}
    keys = []
    for each in seen.keys:
        verdict, reason = str(each.support.kind), each.support.reason
        if verdict == "obeyed" and each.path in wrong:
            verdict, reason = "wrong", wrong[each.path]
        value = _plain(each.value)
        keys.append({"path": each.path, "value": value, "verdict": verdict, "reason": reason, "asks": each.asks})
    return {
        "file": seen.name,
        "keys": keys,
        "problems": [
            {"path": each.path, "what": each.what, "do": each.do, "line": each.line} for each in seen.problems
        ],
        "warnings": seen.found.warnings,
        "notes": _notes(seen),
        "unresolved_auto": list(config.unresolved_auto) if config is not None else [],
        "effective": {path: {"value": _plain(value), "origin": origin} for path, value, origin in _effective(seen)}
        if config is not None
        else {},
    }


def _plain(value: Any) -> Any:
    """A value as strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value if isinstance(value, bool | int | float | str | None) else str(value)
