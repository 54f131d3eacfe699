"""Checking keyword arguments that come from a configuration against what a class takes: all problems at once, with
the nearest name.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from typing import Any


def accepted_names(factory: type, *, leave_out: Collection[str] = ()) -> dict[str, bool]:
    """The keyword parameters of a constructor, each with whether it must be given. ``self`` and the first argument
    are left out.
    """
    found = {}
    for name, parameter in list(inspect.signature(factory).parameters.items())[1:]:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name not in leave_out:
            found[name] = parameter.default is parameter.empty
    return found


def nearest(name: str, names: Collection[str]) -> str:
    """A hint such as `` (did you mean 'betas'?)``, or nothing."""
    found = difflib.get_close_matches(name.lower(), [other.lower() for other in names], n=1)
    match = next((other for other in names if found and other.lower() == found[0]), None)
    return f" (did you mean {match!r}?)" if match else ""


def problems_with(params: Mapping[str, Any], accepted: Mapping[str, bool]) -> list[str]:
    """Unknown and missing names, and values that nothing has filled in."""
    problems = [f"unknown parameter {name!r}{nearest(name, accepted)}" for name in params if name not in accepted]
    problems += [
        f"missing parameter {name!r}" for name, required in accepted.items() if required and name not in params
    ]
    problems += [
        f"{name} is 'auto', which only a client such as Transformers or Accelerate can fill in"
        for name, value in params.items()
        if value == "auto" and name in accepted
    ]
    return problems
