"""Whether a kernel runs, and the operators that count as one where it would.

    if has_kernels(rows):
        block_formats.encode(...)
    else:
        with one_kernel():  # in a dry run of a GPU: one pass over memory
            ...

``TRITON_INTERPRET=1`` runs kernels on CPU tensors, slowly, once Triton is imported: tests of their numbers need no GPU.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from shoal.device import is_fake

logger = logging.getLogger("shoal")
_inside = threading.local()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_kernels(*tensors: torch.Tensor) -> bool:
    """True if Triton runs kernels on all of these tensors."""
    if not _has_triton() or any(is_fake(tensor) for tensor in tensors):
        return False
    return _is_interpreted() or (all(tensor.is_cuda for tensor in tensors) and _can_launch())


@cache
def _can_launch() -> bool:
    """True if Triton launches kernels on this machine's GPUs; a warning says why it does not."""
    if obstacle := launch_obstacle():
        logger.warning("Triton cannot run kernels, so torch's operators run, which are slower: %s", obstacle)
    return not obstacle


@cache
def launch_obstacle() -> str:
    """Why Triton cannot launch kernels on this machine's GPUs; empty: it can.

    Images without a C compiler are common, and Triton compiles C with Python's headers before it launches a kernel.
    """
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        return f"{reason} (It needs a C compiler, Python's headers and a home that it can write to.)"
    return ""


def _is_interpreted() -> bool:
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


@contextmanager
def one_kernel() -> Iterator[None]:
    """The operators inside compute what one kernel computes on a GPU."""
    before = this_kernel()
    _inside.kernel = before or object()
    try:
        yield
    finally:
        _inside.kernel = before


def this_kernel() -> object | None:
    """The kernel that the operators of this thread are a part of; None: outside of ``one_kernel``."""
    return getattr(_inside, "kernel", None)
