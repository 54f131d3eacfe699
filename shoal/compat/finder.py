"""Makes ``import deepspeed`` mean Shoal in this process, from ``install()`` to ``uninstall()``.

    import deepspeed.runtime.engine          the finder is asked first; it names the module that is there already:
      deepspeed                 is  shoal.compat.deepspeed                    one module object with both names,
      deepspeed.runtime.engine  is  shoal.compat.deepspeed.runtime.engine     so one class object with both names

    importlib.metadata.version("deepspeed")  the finder answers too: 0.19.8+shoal.X, the API level and the provider

Nothing on disk changes, and a DeepSpeed that is installed stays as it is. This file does not import torch: it runs when
an interpreter starts in a process tree where ``install()`` was called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, cast

from shoal.compat.environment import is_first_rank, restore, tell_children
from shoal.errors import UsageError

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.metadata import Distribution

ALIAS = "deepspeed"
TARGET = "shoal.compat.deepspeed"
CLIENTS_THAT_LOOK_EARLY = ("accelerate", "transformers", "lightning")


class AliasLoader:
    """Loads nothing: returns the module that has the name ``real``.

    Without a base class: importlib.abc takes longer to import than everything else here.
    """

    def __init__(self, real: str) -> None:
        self.real = real
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.real)
        self._spec = module.__spec__
        # A submodule that has the name of a function of its package gets its second name before the package does: an
        # import of it later would put the module over the function.
        for name, value in list(vars(module).items()):
            submodule = sys.modules.get(f"{self.real}.{name}")
            if submodule is not None and submodule is not value:
                sys.modules[f"{spec.name}.{name}"] = submodule
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import machinery has put the alias's in its place
        if self.real == TARGET:
            _behave_as_deepspeed()
            _announce()

    # What ``python -m deepspeed.x`` and tools that read sources ask for.

    def get_code(self, fullname: str) -> CodeType | None:
        code: CodeType | None = self._inner().get_code(self.real)
        return code

    def get_source(self, fullname: str) -> str | None:
        source: str | None = self._inner().get_source(self.real)
        return source

    def get_filename(self, fullname: str) -> str:
        name: str = self._inner().get_filename(self.real)
        return name

    def is_package(self, fullname: str) -> bool:
        return bool(self._inner().is_package(self.real))

    def _inner(self) -> Any:
        spec = find_spec(self.real)
        assert spec is not None and spec.loader is not None
        return spec.loader


class Finder:
    """Finds ``deepspeed`` and its submodules, and the metadata of a distribution of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ALIAS and not fullname.startswith(ALIAS + "."):
            return None
        real = TARGET + fullname.removeprefix(ALIAS)
        real_spec = _ours(real)
        if real_spec is None:
            return None
        spec = ModuleSpec(fullname, cast("Loader", AliasLoader(real)), origin=real_spec.origin)
        spec.submodule_search_locations = real_spec.submodule_search_locations
        spec.has_location = real_spec.has_location
        return spec

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        from shoal.compat.distribution import AliasDistribution

        name = getattr(context, "name", None)
        return [AliasDistribution()] if name is None or name.replace("_", "-").lower() == ALIAS else []


def _ours(real: str) -> ModuleSpec | None:
    try:
        return find_spec(real)
    except ModuleNotFoundError:  # the package that it would be in is not there either
        return None


class _Installed:
    """What ``install`` has changed, for ``uninstall``."""

    def __init__(self) -> None:
        self.finder: Finder | None = None
        self.environment: dict[str, str | None] = {}


_installed = _Installed()


def install(*, children: bool = True) -> None:
    """From now on ``import deepspeed`` is Shoal. A second call changes nothing.

    Args:
        children: child processes too: SHOAL_AS_DEEPSPEED and PYTHONPATH are set for them.

    Raises: UsageError: the real DeepSpeed is imported already.
    """
    loaded = sys.modules.get(ALIAS)
    if loaded is not None and loaded is not sys.modules.get(TARGET):
        raise UsageError(
            f"DeepSpeed is imported already, from {getattr(loaded, '__file__', 'an unknown place')}: its classes are in"
            " use, so Shoal cannot take its name in this process.",
            do="call shoal.compat.deepspeed.install() as the first line of the script, or start it by"
            " `shoal run --as-deepspeed`.",
            code="as-deepspeed-late",
        )
    if _installed.finder is None:
        _warn_if_late()
        _installed.finder = Finder()
        sys.meta_path.insert(0, _installed.finder)
    if children and not _installed.environment:
        _installed.environment = tell_children()


def uninstall() -> None:
    """Undo ``install()``: remove the finder and the aliases that it made, and restore the environment variables."""
    if _installed.finder is not None:
        if _installed.finder in sys.meta_path:
            sys.meta_path.remove(_installed.finder)
        _installed.finder = None
        if TARGET in sys.modules:
            _behave_as_shoal()
        for name in [name for name in list(sys.modules) if name == ALIAS or name.startswith(ALIAS + ".")]:
            del sys.modules[name]
    restore(_installed.environment)
    _installed.environment = {}


def is_installed() -> bool:
    """True if ``import deepspeed`` imports Shoal."""
    return _installed.finder is not None


def _warn_if_late() -> None:
    from shoal.compat.distribution import real_deepspeed

    early = [name for name in CLIENTS_THAT_LOOK_EARLY if name in sys.modules]
    if early and real_deepspeed() is None:
        from shoal.engine.log import logger, make_audible

        make_audible(None)
        logger.warning(
            f"{', '.join(early)} looked for DeepSpeed when imported, and found none: call install() before that."
        )


def _behave_as_deepspeed() -> None:
    """Give torch's classes DeepSpeed's attributes, and the engines of ``shoal.initialize`` all of DeepSpeed's names."""
    from shoal.compat.entry import CLASSES, use_classes
    from shoal.compat.parameters import add_attributes

    add_attributes()
    use_classes(CLASSES)


def _behave_as_shoal() -> None:
    from shoal.compat.entry import use_classes
    from shoal.compat.parameters import remove_attributes
    from shoal.engine.entry import EngineClasses

    remove_attributes()
    use_classes(EngineClasses())


def _announce() -> None:
    if is_first_rank():
        from shoal.compat.about import announce

        announce()
