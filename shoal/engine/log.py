"""One logger. Warnings and up by default, every line once, rank 0 unless said otherwise."""

from __future__ import annotations

import logging

logger = logging.getLogger("shoal")


def say_on_rank_0(rank: int, message: str) -> None:
    """An information line, on one rank only."""
    if rank == 0:
        logger.info(message)
