"""``shoal plan``: the best configurations for a model on a cluster, each run dry."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.errors import UsageError


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face folder or config.json, a size of `shoal train` (124m, 6.7b, ...), or module:function,"
            " a function without arguments that returns the model."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", "-n", min=1, help="Number of GPUs.")] = 8,
    machine: Annotated[str, typer.Option(help="GPU and node: h100, a100-80g@25gbe, ..., or a YAML file.")] = "h100",
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 4096,
    global_batch: Annotated[int, typer.Option(min=1, help="Rows of a step, over all GPUs.")] = 512,
    config: Annotated[
        Path | None, typer.Option(help="Judge this configuration instead of searching for one.", exists=True)
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="Configuration with keys that each proposal keeps (optimizer, wire).", exists=True),
    ] = None,
    space: Annotated[
        list[str] | None, typer.Option(help="Values of an axis to try: tp=8,16; may be given several times.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Configurations that are run dry, at most.")] = 6,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a GPU hour, for the cost of tokens.")] = None,
    explain: Annotated[str | None, typer.Option(help='Say why not: "tp=4", or "tp=4 micro=2".')] = None,
    diff: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare the best of two plan.json, or of two `--json`.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for config.json, plan.json and report.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan the parallelism, sharding and batch of a model on a cluster, without a GPU."""
    from rich.console import Console
    from rich.progress import Progress

    from shoal.planner import report
    from shoal.planner import search as searching

    if diff is not None:
        print(report.diff(_read(diff[0]), _read(diff[1]), (str(diff[0]), str(diff[1]))))
        return
    if model is None:
        raise UsageError("no model was named.", do="name a model, or two files with --diff.")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        given: dict[str, Any] = {"machine": machine, "sequence": sequence, "progress": show}
        if config is not None:
            made = searching.judge(model, gpus, config=json.loads(config.read_text(encoding="utf-8")), **given)
        else:
            kept = {} if base is None else json.loads(base.read_text(encoding="utf-8"))
            axes = searching.parse_space(space or [])
            made = searching.plan(
                model,
                gpus,
                global_batch=global_batch,
                config=kept,
                space=axes,
                num_trials=trials,
                num_processes=os.cpu_count() or 1,
                **given,
            )
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
