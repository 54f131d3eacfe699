"""Ranks of ``sp`` and ``cp`` hold parts of sequences: the context of their attention, and what a model lacks for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from shoal.comm.recorder import Entry
from shoal.device import in_transform, is_fake
from shoal.engine.parts.part import Part
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import ShoalError, UsageError
from shoal.parallel.sequence.context import (
    SequenceContext,
    drop_sequence_context,
    take_sequence_context,
    use_sequence_context,
)
from shoal.parallel.sequence.whole_sequence import (
    COUNTS,
    balance_whole_sequences,
    counts_positions,
    follow_longest_sequence,
    given_arguments,
    is_of_transformers,
    mixed_positions,
    shifts_labels_here,
    takes_positions,
    takes_tokens,
)

logger = logging.getLogger("shoal")


class SequenceRanks(Part):
    """Sets the context of attention before each pass, since each engine of a process has a context of its own.

    Attributes:
        context: over ``sp`` and ``cp``; None without them.
    """

    def __init__(self, sharding: Sharding, properties: Properties) -> None:
        axes = properties.axes
        self.context = None
        if axes.get("sp") is not None or axes.get("cp") is not None:
            self.context = SequenceContext(
                sp=axes.get("sp"), cp=axes.get("cp"), wire=properties.plan.activations.sequence
            )
        # What the script has set for attention, in register_with_transformers for example, is for one engine.
        registered = take_sequence_context()
        self._used = self.context or registered
        use_sequence_context(self._used)
        self._hooks: list[Any] = []
        if self._used is not None:
            self._hooks = follow_longest_sequence(sharding.module)
            balance_whole_sequences(sharding.module)

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        use_sequence_context(self._used)

    def before_backward(self, loss: torch.Tensor) -> None:
        use_sequence_context(self._used)

    def before_destroy(self) -> None:
        for hook in self._hooks:
            hook.remove()
        drop_sequence_context(self._used)


class AttentionCheck(Part):
    """Warns once, at the first training forward, where the model computes with this rank's positions only."""

    def __init__(self, sharding: Sharding, properties: Properties) -> None:
        axes = properties.axes
        self._sharding = sharding
        self._is_first_rank, self._recorder = properties.rank == 0, properties.world.recorder
        self._axes = {comm.axis for comm in (axes.get("sp"), axes.get("cp")) if comm is not None}
        self._names = " and ".join(sorted(self._axes))
        self._watching = ExitStack()  # in the first training forward
        self._entries: list[Entry] | None = None  # the collectives of this forward

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model = self._sharding.module
        if not self._axes or not model.training or in_transform():
            return
        self._check(model, args, kwargs)
        self._watching.close()  # of a forward that has failed
        self._entries = self._watching.enter_context(self._recorder.recording())

    def after_forward(self, output: Any) -> None:
        entries, self._entries = self._entries, None
        if entries is None:
            return
        self._watching.close()
        if not any(entry.axis in self._axes or entry.op == "all_to_all" for entry in entries):
            self._warn(f"{_PARTS}, {_NO_ATTENTION}")
        self._axes = set()

    def explain(self, error: Exception) -> None:
        entries, self._entries = self._entries, None
        if entries is not None:
            self._watching.close()
            if not isinstance(error, ShoalError):
                error.add_note(_IN_MODEL % self._names)

    def before_destroy(self) -> None:
        self._watching.close()

    def _check(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at a model of Transformers before its first training forward.

        Raises: UsageError: without position ids the model counts positions itself, or it takes none.
        Communicates: once, as a forward in eval mode of 32 tokens.
        """
        if any(type(each) in _BATCH_NORMS for each in model.modules()):
            self._warn(_STATISTICS)
        if counts_positions(model):
            raise self._no_positions(model)
        if not takes_tokens(model) or any(map(is_fake, model.parameters())):
            return
        given = given_arguments(model, args, kwargs)
        if shifts_labels_here(model, given):
            self._warn(_LABELS)
        try:
            with self._trial_pass():
                problem = mixed_positions(model, given)
        except Exception as error:  # a model that needs other inputs: nothing is known
            self._sharding.recover()
            logger.debug("positions of %s were not checked: %s", type(model).__name__, error)
            return
        if problem == COUNTS and takes_positions(model):
            raise self._no_positions(model)
        if problem is not None:
            self._warn(f"{_PARTS}, but {type(model).__name__} {problem}. {_INSTEAD}")

    @contextmanager
    def _trial_pass(self) -> Iterator[None]:
        """A pass before the script's first, in which reads outside of units are looked for nevertheless."""
        model = self._sharding.model
        with torch.no_grad():
            with model.outside_reads.searching(model.model):
                yield
            model.outside_reads.search_again()

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
