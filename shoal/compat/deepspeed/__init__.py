"""Shoal under DeepSpeed's names: what ``import deepspeed`` is after ``install()``.

    import shoal.compat.deepspeed
    shoal.compat.deepspeed.install()        # first of all
    import deepspeed

The modules below it give Shoal's own objects the names that DeepSpeed's users and clients know. They have no files:
``shoal.compat.table_finder`` makes one when it is imported, from the tables in ``shoal.compat.names``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shoal.compat.finder import install, is_installed, uninstall
from shoal.compat.names import TOP
from shoal.compat.table_finder import contents_of, register, submodules_of

# Names of modules that are imported when they are asked for.
_LATER = {
    "DeepSpeedHybridEngine": "runtime.hybrid_engine",
    "PipelineEngine": "runtime.pipe.engine",
    "PipelineModule": "runtime.pipe.module",
    "checkpointing": "runtime.activation_checkpointing",
}
_submodule = submodules_of(__name__)


def __getattr__(name: str) -> Any:
    """Import a submodule, or a name of one, when it is asked for (PEP 562)."""
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return _submodule(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
_contents = contents_of("", TOP)
globals().update(_contents)
comm = dist = import_module(f"{__name__}.comm")
utils = import_module(f"{__name__}.utils")
zero = import_module(f"{__name__}.runtime.zero")

__all__ = [*_contents, *_LATER, "comm", "dist", "install", "is_installed", "ops", "uninstall", "utils", "zero"]
