"""Functions and classes of DeepSpeed that Shoal does not have: importing one works, using it raises NotBuiltError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.errors import NotBuiltError


def not_built(name: str, do: str) -> NotBuiltError:
    return NotBuiltError(f"{name} is not a part of Shoal.", do=do, code="deepspeed-part")


def absent_function(name: str, do: str) -> Callable[..., Any]:
    """A function of that name, which raises NotBuiltError.

    Args:
        name: as DeepSpeed's users write it, with its module.
        do: what to use instead, in the imperative.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise not_built(name, do)

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__module__ = name.rpartition(".")[0]
    refuse.__doc__ = f"Raises: NotBuiltError: always. Instead: {do}"
    return refuse


def absent_class(name: str, do: str) -> type:
    """A class of that name, of which nothing can be made: calling it, or a class derived from it, raises NotBuiltError.

    ``isinstance`` with it is False, and a class statement that derives from it runs.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise not_built(name if cls.__name__ == name.rpartition(".")[2] else f"{name}, the base of {cls.__name__},", do)

    body = {"__new__": refuse, "__module__": name.rpartition(".")[0], "__doc__": f"Not built. Instead: {do}"}
    return type(name.rpartition(".")[2], (), body)
