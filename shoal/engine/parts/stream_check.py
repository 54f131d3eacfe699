"""``debug.check_streams`` of the config: the check of streams lasts from ``initialize`` to the end of ``destroy``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shoal.config import Config
from shoal.engine.parts.part import Part
from shoal.simulation.check import LastingCheck
from shoal.streams import simulation


class CheckStreams(Part):
    """Raises: StreamError: when the engine is destroyed, if something was found."""

    def __init__(self, check: LastingCheck) -> None:
        self._check = check

    @property
    def num_operations(self) -> int:
        return self._check.num_operations

    def after_destroy(self) -> None:
        self._check.end()


@contextmanager
def checking_streams(config: Config) -> Iterator[Sequence[Part]]:
    """The part that checks, if the config asks for it, and what happens in the block. An error there ends the check."""
    if not config.debug.check_streams or simulation() is not None:
        yield ()
        return
    check = LastingCheck()
    try:
        yield (CheckStreams(check),)
    except BaseException as error:
        check.give_up(error)
        raise
