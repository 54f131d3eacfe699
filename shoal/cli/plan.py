"""``shoal plan``: the best configurations for a model on a cluster, each run dry."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli import planned
from shoal.errors import UsageError


def plan(
    model: Annotated[str | None, planned.MODEL] = None,
    gpus: Annotated[int, typer.Option("--gpus", "-n", min=1, help="Number of GPUs.")] = 8,
    machine: Annotated[str, typer.Option(help="GPU and node: h100, a100-80g@25gbe, ..., or a YAML file.")] = "h100",
    sequence: planned.Sequence = 4096,
    global_batch: planned.GlobalBatch = 512,
    config: Annotated[
        Path | None, typer.Option(help="Judge this configuration instead of searching for one.", exists=True)
    ] = None,
    base: planned.Base = None,
    space: planned.Space = None,
    trials: planned.Trials = 6,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a GPU hour, for the cost of tokens.")] = None,
    explain: Annotated[str | None, typer.Option(help='Say why not: "tp=4", or "tp=4 micro=2".')] = None,
    diff: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare the best of two plan.json, or of two `--json`.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for config.json, plan.json and report.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan the parallelism, sharding and batch of a model on a cluster, without a GPU."""
    from shoal.planner import report
    from shoal.planner import search as searching

    if diff is not None:
        print(report.diff(_read(diff[0]), _read(diff[1]), (str(diff[0]), str(diff[1]))))
        return
    if model is None:
        raise UsageError("no model was named.", do="name a model, or two files with --diff.")
    with planned.planning() as (show, _):
        if config is not None:
            read = json.loads(config.read_text(encoding="utf-8"))
            made = searching.judge(model, gpus, config=read, machine=machine, sequence=sequence, progress=show)
        else:
            asked = planned.searched(sequence, global_batch, base, space, trials)
            processes = os.cpu_count() or 1
            made = searching.plan(model, gpus, machine=machine, num_processes=processes, progress=show, **asked)
    if explain is not None:
        print(searching.explain(made, explain))
    elif as_json:
        print(json.dumps(report.as_dict(made, price), indent=2))
    else:
        print(report.text(made, price))
    if out is not None:
        for path in report.write(made, out, price):
            typer.echo(f"wrote {path}", err=as_json)
    if made.best is None:
        raise typer.Exit(1)


def _read(path: Path) -> dict[str, Any]:
    try:
        made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        made["configurations"][0]["seconds"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{path} is not a plan: {error}.",
            do="name the plan.json of --out, or what --json printed.",
            code="plan-file",
        ) from error
    return made
