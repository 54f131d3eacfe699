"""Runs a script, or with -m a module, as ``python`` does, after ``install()``: ``import deepspeed`` is Shoal there.

python -m shoal.compat.deepspeed SCRIPT [ARGUMENTS ...]
python -m shoal.compat.deepspeed -m MODULE [ARGUMENTS ...]

With --local-rank before them the script gets --local_rank=N as its first argument, as DeepSpeed's launcher passes it.
"""

from __future__ import annotations

import os
import runpy
import sys

from shoal.compat.environment import local_rank
from shoal.compat.finder import install
from shoal.errors import UsageError


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line names; it is ``__main__``, with its own ``sys.argv``.

    Raises: UsageError: nothing was named. SystemExit and whatever the script raises.
    """
    given = sys.argv[1:] if arguments is None else arguments
    passes_rank = given[:1] == ["--local-rank"]
    given = given[1:] if passes_rank else given
    is_module = given[:1] == ["-m"]
    given = given[1:] if is_module else given
    if not given:
        raise UsageError(
            "no script was named.",
            do="python -m shoal.compat.deepspeed SCRIPT [ARGUMENTS ...], or -m MODULE [ARGUMENTS ...].",
            code="as-deepspeed-script",
        )
    install()
    if passes_rank:
        given = [given[0], f"--local_rank={local_rank() or 0}", *given[1:]]
    sys.argv = list(given)
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(given[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(given[0]))
        runpy.run_path(given[0], run_name="__main__")


if __name__ == "__main__":
    main()
