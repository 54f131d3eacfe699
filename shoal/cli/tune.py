"""``shoal tune``: the best plans are trained for some steps on this machine, and the fastest is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import planned


def tune(
    model: Annotated[str, planned.MODEL],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks on this machine.")],
    machine: Annotated[
        str, typer.Option(help="This machine: a name such as h100, or the file that `shoal calibrate` has written.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results and config.json. A tune goes on with those in it.")],
    sequence: planned.Sequence = 4096,
    global_batch: planned.GlobalBatch = 512,
    base: planned.Base = None,
    space: planned.Space = None,
    trials: planned.Trials = 6,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured of each, after two others.")] = 6,
) -> None:
    """Train with the best plans for some steps each, and keep the fastest configuration."""
    from shoal.planner.tune import tune as tune_on_ranks

    with planned.planning() as (show, say):
        asked = planned.searched(sequence, global_batch, base, space, trials)
        found = tune_on_ranks(model, ranks, out, machine=machine, steps=steps, progress=show, say=say, **asked)
    print(found.report())
    if found.best is None:
        raise typer.Exit(1)
    print(f"\nthe fastest is {found.best.name}; wrote {out / 'config.json'}")
