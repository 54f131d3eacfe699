"""``deepspeed.utils.logging``: Shoal's logger, and lines from some ranks only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from shoal.comm.world import current_world
from shoal.engine.log import logger, make_audible
from shoal.errors import UsageError

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """A line from the given ranks; None or -1 among them: from all."""
    rank = current_world().rank
    if not ranks or -1 in ranks or rank in ranks:
        make_audible(None)
        logger.log(level, f"[Rank {rank}] {message}")


@cache
def log_dist_once(message: str, ranks: tuple[int, ...] | None = None, level: int = logging.INFO) -> None:
    """As ``log_dist``, once in this process."""
    log_dist(message, ranks, level)


@cache
def warning_once(message: str) -> None:
    """A warning, once in this process."""
    logger.warning(message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Raises: UsageError: no such level."""
    if log_level_str.lower() not in log_levels:
        raise UsageError(f"{log_level_str!r} is not a log level.", do=f"use one of: {', '.join(log_levels)}.")
    (custom_logger or logger).setLevel(log_levels[log_level_str.lower()])


__all__ = ["log_dist", "log_dist_once", "log_levels", "logger", "set_log_level_from_string", "warning_once"]
