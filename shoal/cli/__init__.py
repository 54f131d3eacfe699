"""The command line, ``shoal COMMAND``: each command's options, and what it prints. ``app`` lists the commands."""

from __future__ import annotations

import sys

from shoal.errors import ShoalError


def main() -> None:
    """The console script. An error of Shoal's own is a message, any other one a traceback.

    Exit codes: 0: done; 1: it failed, or found something wrong; 2: the command, or a file that it names, is wrong. Of
    ``shoal run``: that of the script.
    """
    from shoal.cli.app import app
    from shoal.cli.usage import exit_code_of
    from shoal.launch import read_environment

    try:
        app(prog_name="shoal")
    except ShoalError as error:
        if read_environment().wants_tracebacks:
            raise
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(exit_code_of(error))
