"""Arguments that ``shoal plan`` and ``shoal tune`` share: of what is planned, and among which configurations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

MODEL = typer.Argument(
    help="A Hugging Face folder or config.json, a size of `shoal train` (124m, 6.7b, ...), or module:function,"
    " a function without arguments that returns the model."
)
Sequence = Annotated[int, typer.Option(min=1, help="Tokens of a row.")]
GlobalBatch = Annotated[int, typer.Option(min=1, help="Rows of a step, over all ranks.")]
Base = Annotated[
    Path | None,
    typer.Option(help="Configuration with keys that each proposal keeps (optimizer, wire).", exists=True),
]
Space = Annotated[list[str] | None, typer.Option(help="Values of an axis to try: tp=8,16; may be given several times.")]
Trials = Annotated[int, typer.Option(min=1, help="Configurations that are run, at most.")]


def searched(
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
def planning() -> Iterator[tuple[Callable[[str, int, int], None], Callable[..., None]]]:
    """A bar on stderr. Yields: a function that is told what is done, and one that prints above the bar."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None)
        yield (
            lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
            bar.console.print,
        )
