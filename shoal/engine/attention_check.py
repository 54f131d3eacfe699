"""Ranks of ``sp`` and ``cp`` hold parts of sequences: what of the model's forward must run over them, and does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from shoal.comm.recorder import Recorder
from shoal.device import is_fake
from shoal.errors import ShoalError, UsageError
from shoal.parallel.sequence.whole_sequence import (
    COUNTS,
    counts_positions,
    given_arguments,
    is_of_transformers,
    mixed_positions,
    shifts_labels_here,
    takes_positions,
    takes_tokens,
)
from shoal.sharding.axes import Axes

logger = logging.getLogger("shoal")


class AttentionCheck:
    """Warns once, at the first training forward, where the model computes with this rank's positions only."""

    def __init__(self, axes: Axes, recorder: Recorder) -> None:
        self._is_first_rank, self._recorder = axes.world.rank == 0, recorder
        self._axes = {comm.axis for comm in (axes.sp, axes.cp) if comm is not None}

    def before(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        passes: Callable[[], AbstractContextManager[object]],
        recover: Callable[[], None],
    ) -> None:
        """Look at a model of Transformers before its first training forward.

        Args:
            args, kwargs: of the forward.
            passes: entered around each pass of the model.
            recover: called if the model raises.

        Raises: UsageError: without position ids the model counts positions itself, or it takes none.
        Communicates: once, as a forward in eval mode of 32 tokens.
        """
        if self._axes and model.training and any(type(each) in _BATCH_NORMS for each in model.modules()):
            self._warn(_STATISTICS)
        if self._axes and model.training and counts_positions(model):
            raise self._no_positions(model)
        if not self._axes or not model.training or not takes_tokens(model) or any(map(is_fake, model.parameters())):
            return
        given = given_arguments(model, args, kwargs)
        if shifts_labels_here(model, given):
            self._warn(_LABELS)
        try:
            with passes():
                found = mixed_positions(model, given)
        except Exception as error:  # a model that needs other inputs: nothing is known
            recover()
            logger.debug("positions of %s were not checked: %s", type(model).__name__, error)
            return
        if found == COUNTS and takes_positions(model):
            raise self._no_positions(model)
        if found is not None:
            self._warn(f"{_PARTS}, but {type(model).__name__} {found}. {_INSTEAD}")

    def of_stages(self, model: nn.Module | None, batch: Any) -> None:
        """Look at a micro-batch of pipeline stages, of which no rank can run the whole model.

        Args:
            model: computes the loss itself; None: a loss function does.

        Raises: UsageError: a model of Transformers gets token ids and no position ids, or takes none.
        """
        if not self._axes or model is None or not is_of_transformers(model):
            return
        args = batch if isinstance(batch, tuple | list) else (batch,)
        is_named = isinstance(batch, Mapping)
        given = given_arguments(model, () if is_named else tuple(args), batch if is_named else {})
        if shifts_labels_here(model, given):
            self._warn(_LABELS)
        if "input_ids" in given and not (takes_positions(model) and "position_ids" in given):
            raise self._no_positions(model, "pipeline")

    def _no_positions(self, model: nn.Module, where: str = "") -> UsageError:
        verb, do = ("got", _GIVE_POSITIONS) if takes_positions(model) else ("takes", _TRAIN_WITHOUT)
        return UsageError(
            f"{type(model).__name__} {verb} no position_ids, and {COUNTS}: there are {self._names} ranks.",
            where=where,
            do=do,
            code="sequence-positions",
        )

    @property
    def _names(self) -> str:
        return " and ".join(sorted(self._axes))

    @contextmanager
    def watching(self, *, is_training: bool) -> Iterator[None]:
        """Look at the collectives of the first training forward."""
        if not self._axes or not is_training:
            yield
            return
        with self._recorder.recording() as entries:
            try:
                yield
            except Exception as error:
                if not isinstance(error, ShoalError):
                    error.add_note(_IN_MODEL % self._names)
                raise
        axes = self._axes
        if not any(entry.axis in axes or entry.op == "all_to_all" for entry in entries):
            self._warn(f"{_PARTS}, {_NO_ATTENTION}")
        self._axes = set()

    def _warn(self, text: str) -> None:
        if self._is_first_rank:
            logger.warning(text, self._names)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STATISTICS = (
    "each rank of %s holds a part of every sequence, and the model's batch norms take the mean over this rank's part."
    " Use torch.nn.SyncBatchNorm, or norms of each position."
)
_GIVE_POSITIONS = (
    "give it position_ids of the whole sequence (as the model counts them on one rank), cut like input_ids."
)
_TRAIN_WITHOUT = "train it without sp and cp: with tp, pp, recomputed activations."
_PARTS = "each rank of %s holds a part of every sequence"
_NO_ATTENTION = (
    "but the model's forward computed no attention over these ranks: positions attend to those of their own rank only."
    ' Call shoal.attention in the model, or set attn_implementation="shoal" of a Transformers model.'
)
_IN_MODEL = (
    "Each rank of %s holds a part of every sequence. If the model runs without them, it needs the whole sequence, or a"
    " mask of it, where the error was raised."
)
_INSTEAD = (
    "Its results are not those of the whole sequence. Train it without sp and cp: with tp, pp, recomputed activations."
)
_LABELS = (
    "each rank of %s shifts its own part of the labels: the label of its last position is lost. Shift the labels of the"
    " whole sequence by one, cut them like input_ids, and pass them as shift_labels."
)
