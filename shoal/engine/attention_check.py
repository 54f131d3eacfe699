"""Ranks of ``sp`` and ``cp`` hold parts of sequences: the first training forward must exchange something over them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.comm.recorder import Recorder
from shoal.zero.settings import Axes

logger = logging.getLogger("shoal")


class AttentionCheck:
    """Warns once where the model computes no attention over the ranks of ``sp`` and ``cp``.

    Attention of the model's own (torch's ``scaled_dot_product_attention``) sees this rank's positions only, without an
    error.
    """

    def __init__(self, axes: Axes, recorder: Recorder) -> None:
        self._is_first_rank, self._recorder = axes.world.rank == 0, recorder
        self._axes = {comm.axis for comm in (axes.sp, axes.cp) if comm is not None}

    @contextmanager
    def watching(self, *, is_training: bool) -> Iterator[None]:
        """Look at the collectives of the first training forward."""
        if not self._axes or not is_training:
            yield
            return
        with self._recorder.recording() as entries:
            yield
        axes, self._axes = self._axes, set()
        if self._is_first_rank and not any(entry.axis in axes or entry.op == "all_to_all" for entry in entries):
            logger.warning(
                "each rank of %s holds a part of every sequence, but the model's forward computed no attention over"
                " these ranks: positions attend to those of their own rank only. Call shoal.attention in the model, or"
                ' set attn_implementation="shoal" of a Transformers model.',
                " and ".join(sorted(axes)),
            )
