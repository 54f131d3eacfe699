"""Which line of Python asked for what happens."""

from __future__ import annotations

import sys
from functools import cache
from types import FrameType

_SKIPPED = (
    "/torch/",
    "/contextlib.py",
    "/threading.py",
    "/concurrent/",
    "/shoal/simulation/",
    "/shoal/streams.py",
    "/shoal/comm/",
    "/shoal/memory/",
    "/shoal/running/parameter_access.py",
)
_NUM_PLACES = 3


def place_of_call() -> str:
    """The lines of Python, outside of torch and of what every operation passes through, that are running."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _NUM_PLACES:
        code = frame.f_code
        if not _is_skipped(code.co_filename):
            name = code.co_filename if not found else code.co_filename.rpartition("/")[2]
            found.append(f"{name}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return ", called by ".join(found)


@cache
def _is_skipped(file: str) -> bool:
    return any(part in file for part in _SKIPPED)
