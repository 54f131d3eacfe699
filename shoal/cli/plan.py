"""``shoal plan``: the best configurations for a model on a cluster, each run dry. ``shoal tune``: the best plans are
trained for some steps on this machine, and the fastest is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.usage import MODEL_HELP
from shoal.errors import UsageError
from shoal.processor import num_cores

_MODEL = typer.Argument(help=MODEL_HELP)
_Sequence = Annotated[int, typer.Option(min=1, help="Tokens of a row.")]
_GlobalBatch = Annotated[int, typer.Option(min=1, help="Rows of a step, over all ranks.")]
_Base = Annotated[
    Path | None,
    typer.Option(help="Configuration with keys that each proposal keeps (optimizer, wire).", exists=True),
]
_Space = Annotated[
    list[str] | None, typer.Option(help="Values of an axis to try: tp=8,16; may be given several times.")
]
_Trials = Annotated[int, typer.Option(min=1, help="Configurations that are run, at most.")]


def plan(
    model: Annotated[str | None, _MODEL] = None,
    gpus: Annotated[int, typer.Option("--gpus", "-n", min=1, help="Number of GPUs.")] = 8,
    machine: Annotated[str, typer.Option(help="GPU and node: h100, a100-80g@25gbe, ..., or a YAML file.")] = "h100",
    sequence: _Sequence = 4096,
    global_batch: _GlobalBatch = 512,
    config: Annotated[
        Path | None, typer.Option(help="Judge this configuration instead of searching for one.", exists=True)
    ] = None,
    base: _Base = None,
    space: _Space = None,
    trials: _Trials = 6,
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
    with _planning() as (show, _):
        if config is not None:
            read = json.loads(config.read_text(encoding="utf-8"))
            made = searching.judge(model, gpus, config=read, machine=machine, sequence=sequence, progress=show)
        else:
            asked = _searched(sequence, global_batch, base, space, trials)
            made = searching.plan(model, gpus, machine=machine, num_processes=num_cores(), progress=show, **asked)
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


def tune(
    model: Annotated[str, _MODEL],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks on this machine.")],
    machine: Annotated[
        str, typer.Option(help="This machine: a name such as h100, or the file that `shoal calibrate` has written.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results and config.json. A tune goes on with those in it.")],
    sequence: _Sequence = 4096,
    global_batch: _GlobalBatch = 512,
    base: _Base = None,
    space: _Space = None,
    trials: _Trials = 6,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured of each, after two others.")] = 6,
) -> None:
    """Train with the best plans for some steps each, and keep the fastest configuration."""
    from shoal.planner.tune import tune as tune_on_ranks

    with _planning() as (show, say):
        asked = _searched(sequence, global_batch, base, space, trials)
        found = tune_on_ranks(model, ranks, out, machine=machine, steps=steps, progress=show, say=say, **asked)
    print(found.report())
    if found.best is None:
        raise typer.Exit(1)
    print(f"\nthe fastest is {found.best.name}; wrote {out / 'config.json'}")


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


def _searched(
    sequence: int, global_batch: int, base: Path | None, space: list[str] | None, trials: int
) -> dict[str, Any]:
    """The arguments of ``shoal.plan`` in these."""
    from shoal.planner.search import parse_space

    return {
        "sequence": sequence,
        "global_batch": global_batch,
        "config": {} if base is None else json.loads(base.read_text(encoding="utf-8")),
        "space": parse_space(space or []),
        "num_trials": trials,
    }


@contextmanager
def _planning() -> Iterator[tuple[Callable[[str, int, int], None], Callable[..., None]]]:
    """A bar on stderr. Yields: a function that is told what is done, and one that prints above the bar."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None)
        yield (
            lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
            bar.console.print,
        )
