"""``deepspeed.utils.exceptions``: an error for what is no longer there."""

from __future__ import annotations


class DeprecatedException(Exception):
    """Something that DeepSpeed has taken away."""


__all__ = ["DeprecatedException"]
