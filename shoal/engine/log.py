"""The logger ``shoal``. Rank 0 logs; ``log_level`` in the config sets the level; SHOAL_LOG_LEVEL overrides it.

Of the start, INFO has a line on the placement and one on memory; DEBUG has the tables.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from shoal.launch.environment import log_level
from shoal.shared_block import SharedBlock

logger = logging.getLogger("shoal")


def make_audible(level: str | None) -> None:
    """Show messages of level INFO unless the script has configured logging.

    Args:
        level: ``log_level`` of the config; None: INFO.
    """
    level = log_level() or level
    if level is not None:
        logger.setLevel(level.upper())
    elif logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("shoal: %(message)s"))
        logger.addHandler(handler)


@contextmanager
def _disabled() -> Iterator[None]:
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


_QUIET = SharedBlock(_disabled)


def quiet() -> AbstractContextManager[None]:
    """Inside the block, and in other threads meanwhile, log nothing: each dry run would say what it shards."""
    return _QUIET


def say_on_rank_0(rank: int, message: str) -> None:
    """Log a message of level INFO on rank 0."""
    if rank == 0:
        logger.info(message)
