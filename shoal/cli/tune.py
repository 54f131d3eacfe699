"""``shoal tune``: the best plans are trained for some steps on this machine, and the fastest is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def tune(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face folder or config.json, a size of `shoal train` (124m, 6.7b, ...), or module:function,"
            " a function without arguments that returns the model."
        ),
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks on this machine.")],
    machine: Annotated[
        str, typer.Option(help="This machine: a name such as h100, or the file that `shoal calibrate` has written.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results and config.json. A tune goes on with those in it.")],
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 4096,
    global_batch: Annotated[int, typer.Option(min=1, help="Rows of a step, over all ranks.")] = 512,
    base: Annotated[
        Path | None, typer.Option(help="Configuration with keys that each proposal keeps (optimizer, wire).")
    ] = None,
    space: Annotated[
        list[str] | None, typer.Option(help="Values of an axis to try: tp=1,2; may be given several times.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Configurations that are run, at most.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured of each, after two others.")] = 6,
) -> None:
    """Train with the best plans for some steps each, and keep the fastest configuration."""
    from rich.console import Console
    from rich.progress import Progress

    from shoal.planner.search import parse_space
    from shoal.planner.tune import tune as tune_on_ranks

    kept = {} if base is None else json.loads(base.read_text(encoding="utf-8"))
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None)
        found = tune_on_ranks(
            model,
            ranks,
            out,
            machine=machine,
            sequence=sequence,
            global_batch=global_batch,
            config=kept,
            space=parse_space(space or []),
            num_trials=trials,
            steps=steps,
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
            say=bar.console.print,
        )
    print(found.report())
    if found.best is None:
        raise typer.Exit(1)
    print(f"\nthe fastest is {found.best.name}; wrote {out / 'config.json'}")
