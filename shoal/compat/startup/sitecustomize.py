"""Runs when an interpreter starts in a process tree that lends DeepSpeed's name: the child lends it too.

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


def _lend() -> None:
    try:
        from shoal.compat.environment import is_asked_for
        from shoal.compat.finder import install
    except ImportError:  # another environment's interpreter: Shoal is not there, and DeepSpeed's name not ours to lend
        return
    if is_asked_for():
        install(children=False)


_lend()
_run_the_next_one()
