"""Source code: the syntax tree of a function, read by one thread at a time, and the place of a frame."""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_PARSING = threading.Lock()  # two threads that parse at once fail in Python 3.11: one depth counter


def syntax_tree(function: Callable[..., Any] | CodeType) -> ast.Module | None:
    """The tree of a Python function or code object; None: its source cannot be read or does not stand alone."""
    try:
        with _PARSING:
            return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def place_of(frame: re.Match[str]) -> str:
    """``train.py:9, in main`` of a frame's groups ``path``, ``line`` and ``name``."""
    path = Path(frame["path"])
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame['line']}, in {frame['name']}"


def is_users_file(path: str) -> bool:
    """True for a file that is in no package and not in Python's library."""
    if path.startswith("<") or "site-packages" in path:
        return False
    return not Path(path).is_relative_to(_PACKAGE) and not Path(path).is_relative_to(sysconfig.get_paths()["stdlib"])
