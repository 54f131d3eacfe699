"""``shoal doctor FILE``: what each key of a configuration file does, its problems, and the effective values."""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.config import Examined, examine
from shoal.config.problems import shown
from shoal.errors import ConfigError, UsageError
from shoal.processor import emulation_notes

WIDTH = 140  # of a page that is not a terminal
COLOURS = {"supported": "green", "no effect": "yellow", "not built": "red", "refused": "red"}


def check_file(file: Path, world_size: int | None, *, shows_all: bool = False, as_json: bool = False) -> bool:
    """Print what each key of the file does, its problems, and where asked all effective values.

    Returns: True if nothing is wrong. Raises: UsageError: there is no such file.
    """
    if not file.is_file():
        raise UsageError(f"there is no file {str(file)!r}.")
    try:
        seen = examine(file, world_size=world_size)
    except ConfigError as error:
        _show_unreadable(error, as_json)
        return False
    if as_json:
        print(json_text.dumps(_as_json(seen), indent=2, ensure_ascii=False))
    else:
        console = Console()
        _show(seen, console if console.is_terminal else Console(width=WIDTH), world_size, shows_all)
    return not seen.problems


def _show_unreadable(error: ConfigError, json: bool) -> None:
    if json:
        problem = {"path": "", "what": error.what, "do": error.do, "line": None, "where": error.where}
        print(json_text.dumps({"problems": [problem]}, indent=2, ensure_ascii=False))
    else:
        Console(stderr=True).print(f"[red]{escape(str(error))}[/red]", highlight=False, soft_wrap=True)


def _show(seen: Examined, console: Console, world_size: int | None, shows_all: bool) -> None:
    notes = [*seen.reading.warnings, *_notes(seen)]
    keys = _table(f"{seen.name}", "what happens")
    for path, value, text, colour in _rows(seen, notes):
        keys.add_row(escape(path), escape(value), f"[{colour}]{escape(text)}[/{colour}]")
    console.print(keys)
    if seen.config is not None and shows_all:
        values = _table("Effective values", "origin")
        for path, value, origin in _effective(seen):
            colour = "dim" if origin == "default" else "bold"
            values.add_row(escape(path), escape(shown(value)), f"[{colour}]{origin}[/{colour}]")
        console.print(values)
    elif seen.config is not None:
        defaults = sum(origin == "default" for _, _, origin in _effective(seen))
        notes.append(f"{defaults} other keys have their defaults: --all prints them.")
    if world_size is None:
        notes.append("batch sizes depend on the number of ranks: --world-size computes them.")
    for note in notes:
        console.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    if seen.problems:
        console.print(f"\n[red]{len(seen.problems)} problem{'s' if len(seen.problems) > 1 else ''}[/red]")
        for number, problem in enumerate(seen.problems, 1):
            console.print(f"  {number}. {escape(str(problem))}", highlight=False, soft_wrap=True)
    else:
        console.print("\n[green]Nothing is wrong.[/green]")


def _rows(seen: Examined, notes: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """Key, value, what happens, and its colour, for what the file sets and what follows from it.

    A note on one key is taken out of ``notes`` and becomes its row's text.
    """

    def noted(path: str, value: str) -> str:
        start = f"{path} = {value}: "
        text = next((note for note in notes if note.startswith(start)), None)
        if text is not None:
            notes.remove(text)
        return "" if text is None else text.removeprefix(start).removesuffix(".")

    numbers = {problem.path: number for number, problem in reversed(list(enumerate(seen.problems, 1)))}
    for each in seen.keys:
        support, value = each.support, shown(each.value)
        note = noted(each.path, value)
        if support.kind == "supported" and each.path in numbers:
            yield each.path, value, f"wrong: see problem {numbers[each.path]}", "red"
        elif support.kind == "supported" and note:
            yield each.path, value, note, "yellow"
        elif support.kind != "not built" or each.asks:
            yield each.path, value, str(support), COLOURS[support.kind]
        else:
            yield each.path, value, f"{support}; asks for nothing", "yellow"
    for path, origin in seen.reading.origins.items():
        if origin != "auto":
            continue
        note = noted(path, '"auto"').replace("null is used", "follows from the number of ranks")
        is_open = seen.config is not None and path in seen.config.unresolved_auto
        yield path, '"auto"', note or ("a client has to replace it" if is_open else "the default is used"), "yellow"
    if seen.config is not None:
        for path, value, source in _effective(seen):
            if source in ("derived", "deprecated alias"):
                yield path, shown(value), source, "bold"


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
        if verdict == "supported" and each.path in wrong:
            verdict, reason = "wrong", wrong[each.path]
        value = _plain(each.value)
        keys.append({"path": each.path, "value": value, "verdict": verdict, "reason": reason, "asks": each.asks})
    return {
        "file": seen.name,
        "keys": keys,
        "problems": [
            {"path": each.path, "what": each.what, "do": each.do, "line": each.line} for each in seen.problems
        ],
        "warnings": seen.reading.warnings,
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
