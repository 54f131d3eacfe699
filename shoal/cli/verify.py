"""``shoal verify``: is a configuration right, by type or by the values of one process."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.usage import MODEL_HELP


class Against(StrEnum):
    """What the values of a configuration are compared with."""

    one_process = "one-process"


def verify(
    config: Annotated[Path, typer.Argument(help="A DeepSpeed-style JSON file.")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks of the whole run.")] = 8,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens of a row. Default: the model's.")] = None,
    against: Annotated[
        Against | None,
        typer.Option(
            help="one-process: train on RANKS local ranks and on one, and compare all values. Default: one step by"
            " type, without values, ranks or a GPU."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of --against: steps to compare.")] = 2,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Of --against: module:function, which gets the rows of a micro-batch and returns the model's"
            " arguments, random values from torch's generator. Default: random tokens of a language model."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find sums over ranks that are missing, taken twice or of the wrong tensor; or the first value that is not that of
    one process. Exit code 1: there is one.
    """
    from shoal.config import load

    load(config, world_size=ranks)  # names every problem of the file
    settings = json.loads(config.read_text(encoding="utf-8"))
    if against is None:
        is_right = _by_type(model, settings, ranks, sequence, as_json=as_json)
    else:
        is_right = _by_value(model, settings, ranks, steps, sequence, batch, as_json=as_json)
    if not is_right:
        raise typer.Exit(1)


def _by_type(model: str, settings: dict[str, Any], ranks: int, sequence: int | None, *, as_json: bool) -> bool:
    from rich.console import Console

    from shoal.planner.verify import verify_model

    with Console(stderr=True).status("one step by type"):
        report = verify_model(model, settings, ranks, sequence=sequence)
    print(json.dumps(report.as_dict(), indent=2) if as_json else report)
    return not report.findings


def _by_value(
    model: str,
    settings: dict[str, Any],
    ranks: int,
    steps: int,
    sequence: int | None,
    batch: str | None,
    *,
    as_json: bool,
) -> bool:
    from shoal.planner.verify_values import verify_values
    from shoal.text import counted

    def say(text: str) -> None:
        typer.echo(text, err=True)

    result = verify_values(model, settings, ranks, steps=steps, sequence=sequence, batch=batch, say=say)
    if as_json:
        first = None if result.first is None else {"place": result.first.place, **asdict(result.first)}
        print(json.dumps({"is_equal": result.is_equal, "first": first, "missing": result.missing}, indent=2))
        return result.is_equal
    print(result.report())
    if result.is_equal:
        print(f"No value differs by more than rounding from one process in {counted(steps, 'step')}.")
    return result.is_equal
