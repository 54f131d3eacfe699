"""``shoal doctor``: checks a configuration file, or without one this machine."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer


def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="Configuration file (JSON). Without it, this machine is checked.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Total number of ranks, to compute the mesh and batch sizes.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Print the value of every key, including defaults.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema for editors, and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a configuration: what each key does, and all problems. Without a file, check this machine.

    The exit code is 1 where anything is wrong, 2 where the file is not there.
    """
    if schema:
        from shoal.config import json_schema

        print(json_text.dumps(json_schema(), indent=2, ensure_ascii=False))
    elif file is None:
        from shoal.cli.machine import check_machine

        if not check_machine(as_json=json):
            raise typer.Exit(1)
    else:
        from shoal.cli.config_table import check_file

        if not check_file(file, world_size, shows_all=all_, as_json=json):
            raise typer.Exit(1)
