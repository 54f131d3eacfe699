"""Names that other programs' engines and optimizers have, and Shoal's have not: the error says what to use instead.

This package knows no such name. A program's names are registered as a function, which is imported at the first name
that an engine or optimizer lacks; ``shoal/__init__.py`` does so, as with formats of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.errors import NotBuiltError


class AbsentError(NotBuiltError, AttributeError):
    """A name that an engine does not have: ``hasattr`` says so, and using it says what to use instead."""


_ADVISERS: list[str] = []


def register(adviser: str) -> None:
    """Make a program's names known.

    Args:
        adviser: as ``module:function``, which takes the class of the engine or optimizer and the name, and returns the
            error to raise; None: the name is not that program's.
    """
    _ADVISERS.append(adviser)


def refuse_foreign_name(kind: type, name: str) -> None:
    """Raises: AbsentError: another program's engine or optimizer has a public name that this class does not have."""
    if name.startswith("_"):
        return
    import pkgutil  # `import shoal` does not need it

    for adviser in _ADVISERS:
        advise: Callable[[type, str], AbsentError | None] = pkgutil.resolve_name(adviser)
        error = advise(kind, name)
        if error is not None:
            raise error
