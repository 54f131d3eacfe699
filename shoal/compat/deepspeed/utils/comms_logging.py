"""``deepspeed.utils.comms_logging``: who called; the collectives themselves are in the world's recorder."""

from __future__ import annotations

import sys


def get_caller_func(frame: int = 3) -> str:
    """The name of the function ``frame`` calls up."""
    return sys._getframe(frame).f_code.co_name


__all__ = ["get_caller_func"]
