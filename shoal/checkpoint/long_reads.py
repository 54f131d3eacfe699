"""Reading that takes long is logged every ten seconds, on rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from shoal.comm.environment import is_first_process

T = TypeVar("T")

_EVERY_SECONDS = 10.0

logger = logging.getLogger("shoal")


def reported(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, and from time to time a line on how many are done: ``reading model.safetensors: 120 of 300``."""
    said = time.monotonic()
    for number, item in enumerate(items):
        yield item
        if time.monotonic() - said >= _EVERY_SECONDS:
            said = time.monotonic()
            if is_first_process():
                logger.info("%s: %d of %d", what, number + 1, len(items))
