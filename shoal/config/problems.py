"""The problems of a configuration, collected and then raised as one error."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError

HIDDEN = "***"  # printed in place of a secret


@dataclass(frozen=True)
class Problem:
    """One problem.

    Args:
        path: the key, from the top.
        what: what is wrong, without the key's name.
        do: the repair.
        line: where it is in the file, from 1; None: not known.
        code: of the error, where this is the only problem; empty: ``config``.
    """

    path: str
    what: str
    do: str = ""
    line: int | None = None
    code: str = ""

    def __str__(self) -> str:
        place = f" (line {self.line})" if self.line is not None else ""
        return f"{self.path}{place}: {self.what}" + (f" -> {self.do}" if self.do else "")


class ConfigProblems(ConfigError):
    """The error for all problems of a configuration; ``problems`` lists them."""

    def __init__(self, problems: Sequence[Problem], name: str) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            only = self.problems[0]
            line = f", line {only.line}" if only.line is not None else ""
            super().__init__(f"{only.path}: {only.what}", where=f"{name}{line}", do=only.do, code=only.code or None)
        else:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
            super().__init__(f"{len(self.problems)} problems:\n{lines}", where=name, do="fix each of them.")


class ConfigWarning(UserWarning):
    """Warns about a key that is accepted and should be changed."""


def warn(text: str) -> None:
    warnings.warn(text, ConfigWarning, stacklevel=2)


def shown(value: object) -> str:
    """A value as JSON would show it, shortened if it is long."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, tuple | list):
        text = f"[{', '.join(map(shown, value))}]"
    else:
        text = repr(value).removesuffix(".0") if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
