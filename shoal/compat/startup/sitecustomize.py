"""Runs when an interpreter starts in a process tree where ``import deepspeed`` is Shoal: installs the alias in it.

Python imports the first ``sitecustomize`` of its path, and only that one; so the one that would have been found without
this folder is run afterwards. Nothing is imported here but the finder, which does not import torch.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os.path import abspath, dirname

_HERE = dirname(abspath(__file__))


def _run_the_next_one() -> None:
    others = [path for path in sys.path if abspath(path or ".") != _HERE]
    sys.path[:] = others
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _install() -> None:
    try:
        from shoal.compat.environment import is_asked_for
        from shoal.compat.finder import install
    except ImportError:  # another environment's interpreter, without Shoal
        return
    if is_asked_for():
        install(children=False)


_install()
_run_the_next_one()
