"""The syntax tree of a function's source, read by one thread at a time."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

_PARSING = threading.Lock()  # two threads that parse at once fail in Python 3.11: one depth counter


def syntax_tree(function: Callable[..., Any] | CodeType) -> ast.Module | None:
    """The tree of a Python function or code object; None: its source cannot be read or does not stand alone."""
    try:
        with _PARSING:
            return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
