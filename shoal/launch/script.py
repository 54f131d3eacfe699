"""What can be known to be wrong with a script before ranks are started."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from shoal.errors import UsageError


def misplaced_ranks(script: str, args: Sequence[str]) -> str:
    """A sentence on ``--ranks`` after the script, which is the script's, if its source does not mention it."""
    given = next((arg for arg in args if arg.partition("=")[0] == "--ranks"), None)
    path = Path(script)
    if given is None or path.suffix != ".py" or "ranks" in path.read_text(encoding="utf-8", errors="replace"):
        return ""
    return (
        f"shoal: {given} after {script} is an option of the script, which does not mention it. For the number of ranks"
        f" write: shoal run --ranks N {script} ..."
    )


def check_script(script: str, *, is_module: bool = False) -> None:
    """Raises: UsageError: there is no such file or module, or it is no Python."""
    if is_module:
        if PathFinder.find_spec(script.partition(".")[0], [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"there is no module {script!r}.")
        return
    path = Path(script)
    if not path.exists():
        raise UsageError(f"there is no file {script!r}.")
    if path.suffix != ".py" or not path.is_file():  # such as a folder with a __main__.py
        return
    try:
        ast.parse(path.read_bytes(), script)
    except SyntaxError as error:
        raise UsageError(f"{script}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}") from None
