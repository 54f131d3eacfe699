"""``shoal verify``: is a configuration right, by type: a table of parameters and axes, or the faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def verify(
    config: Annotated[Path, typer.Argument(help="A DeepSpeed-style JSON file.", exists=True, dir_okay=False)],
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face folder or config.json, a size of `shoal train` (124m, 6.7b, ...), or module:function,"
            " a function without arguments that returns the model."
        ),
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks of the whole run.")] = 8,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens of a row. Default: the model's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one step by type: find sums over ranks that are missing, taken twice or of the wrong tensor."""
    from rich.console import Console

    from shoal.planner.verify import verify_model

    settings = json.loads(config.read_text(encoding="utf-8"))
    with Console(stderr=True).status("one step by type"):
        report = verify_model(model, settings, ranks, sequence=sequence)
    print(json.dumps(report.as_dict(), indent=2) if as_json else report)
    if report.findings:
        raise typer.Exit(1)
