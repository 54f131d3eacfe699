"""One logger. Rank 0 speaks, each thing once; ``log_level`` in the config says how much."""

from __future__ import annotations

import logging

logger = logging.getLogger("shoal")


def make_audible(level: str | None) -> None:
    """Let information lines be seen where nobody has set logging up; whoever has, keeps it.

    Args:
        level: ``log_level`` of the config; None: information and up.
    """
    if level is not None:
        logger.setLevel(level.upper())
    elif logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("shoal: %(message)s"))
        logger.addHandler(handler)


def say_on_rank_0(rank: int, message: str) -> None:
    """An information line, on one rank only."""
    if rank == 0:
        logger.info(message)
