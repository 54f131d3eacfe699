"""Makes the modules below ``shoal.compat.deepspeed`` that have no file, from the tables, when they are imported.

    import shoal.compat.deepspeed.ops.adam        EXPORTS: a module with the names of the table
    import shoal.compat.deepspeed.inference       ABSENT: a module whose classes and functions raise NotBuiltError
    import shoal.compat.deepspeed.inference.v1    below an absent one, or in NAMED: AbsentModuleError

A made module is an ordinary one: its names are bound when it is made, and ``importlib.reload`` binds them again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import ExecutionLoader, Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from types import ModuleType
from typing import Any

from shoal.compat import names as tables
from shoal.compat.absent import ABSENT, MISSING, AbsentModuleError, absent_class, absent_function, what_to_do
from shoal.compat.finder import ALIAS, TARGET
from shoal.compat.names import EXPORTS, KEYS, PROGRAMS


class TableFinder:
    """Finds the modules below ``shoal.compat.deepspeed`` that are in a table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(TARGET + "."):
            return None
        name = fullname.removeprefix(TARGET + ".")
        if name in EXPORTS or name in ABSENT:
            return spec_from_file_location(
                fullname,
                tables.__file__,
                loader=TableLoader(name),
                submodule_search_locations=[] if _is_package(name) else None,
            )
        do = what_to_do(name)
        return None if do is None else ModuleSpec(fullname, RefusingLoader(name, do))


class TableLoader(ExecutionLoader):
    """Makes one module of the tables."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if _is_package(self.name):
            vars(module)["__getattr__"] = submodules_of(module.__name__)
        contents = contents_of(self.name, EXPORTS.get(self.name, {}))
        public = [each for each in contents if not each.startswith("_") or each.endswith("__")]
        vars(module).update(contents, __doc__=self._doc(), __all__=sorted(public))

    def _doc(self) -> str:
        sources = ", ".join(EXPORTS.get(self.name, {}))
        instead = " ".join(ABSENT.get(self.name, {}))
        return (
            f"``{ALIAS}.{self.name}``"
            + (f": names of {sources}." if sources else ".")
            + (f" Not a part of Shoal. Instead: {instead}" if instead else "")
        )

    # What ``python -m`` asks for.

    def get_source(self, fullname: str) -> str:
        if self.name not in PROGRAMS:
            return f'"""{self._doc()}"""\n'
        module, _, function = PROGRAMS[self.name].partition(":")
        return f'from {module} import {function}\n\nif __name__ == "__main__":\n    {function}()\n'

    def get_filename(self, fullname: str) -> str:
        return tables.__file__

    def is_package(self, fullname: str) -> bool:
        return _is_package(self.name)


class RefusingLoader(Loader):
    """Makes no module: the import raises AbsentModuleError."""

    def __init__(self, name: str, do: str) -> None:
        self.name, self.do = name, do

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise AbsentModuleError(f"{ALIAS}.{self.name} is not a part of Shoal.", do=self.do)

    def exec_module(self, module: ModuleType) -> None: ...


def contents_of(module: str, exports: Mapping[str, str]) -> dict[str, Any]:
    """The names that the tables give to a module.

    Args:
        module: its name below ``deepspeed``; empty: that of ``deepspeed`` itself.
        exports: its entry in ``EXPORTS``.
    """
    contents: dict[str, Any] = {name: name.lower() for name in KEYS.get(module, "").split()}
    for source, names in exports.items():
        defines = import_module(TARGET + source if source.startswith(".") else source)
        for theirs, _, ours in (name.partition("=") for name in names.split()):
            contents[theirs] = getattr(defines, ours or theirs)
    prefix = f"{ALIAS}.{module}".rstrip(".")
    for do, names in (ABSENT.get(module, ("", "")), *MISSING.get(module, {}).items()):
        for name in names.split():
            make = absent_class if name[0].isupper() else absent_function
            contents[name] = make(f"{prefix}.{name}", do)
    return contents


def submodules_of(package: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package (PEP 562), which imports a submodule when it is asked for as an attribute."""

    def get(name: str) -> Any:
        fullname = f"{package}.{name}"
        if not name.startswith("_"):
            spec = find_spec(fullname)
            if spec is not None and not isinstance(spec.loader, RefusingLoader):
                return import_module(fullname)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def register() -> None:
    """Let imports find the modules of the tables. A second call changes nothing."""
    if not any(isinstance(finder, TableFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TableFinder())


def _is_package(name: str) -> bool:
    """True if it has submodules; an absent module is a package, so that the import of one below it says what to do."""
    return name in ABSENT or any(other.startswith(name + ".") for table in (EXPORTS, ABSENT) for other in table)
