"""The command line: ``shoal run | train | doctor | report``."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script. An error of Shoal's own is a message and exit code 2, any other one a traceback."""
    from shoal.cli.app import app
    from shoal.errors import ShoalError

    try:
        app(prog_name="shoal")
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(2)
