"""Batches for one rank, and a position that says what has been read, whatever the number of ranks.

All ranks together read one endless stream of samples: an order of the whole data set for epoch 0, then one for epoch 1,
and so on. The position is the number of samples that all ranks have taken from the stream. Step by step,

    position P, batch size B, world size N:   rank r takes  stream[P + r B : P + (r + 1) B],   then P += N B

so a run that stops at P goes on at P with any N and B, repeats nothing and skips nothing. Only the position is saved.
Of the L < N B samples that an epoch ends with, each rank takes ceil(L / N), as with torch's DistributedSampler and
DataLoader: where N does not divide L, up to N - 1 samples of the epoch are taken twice, so that ranks stay alike.

A ``TokenStream`` has no end: the last batch of a pass is filled from the next one. The samples of a step, of A
micro-batches, are stream[P : P + A N B]; they are divided over ranks and micro-batches by the work that they are.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shoal.data.digest import digest_of
from shoal.data.order import Indices, shuffled
from shoal.data.packing import balance
from shoal.data.prefetch import ahead_on
from shoal.data.stream import SamplePiece, TokenStream
from shoal.data.workers import BatchReader, ReadRequest, Workers
from shoal.errors import UsageError
from shoal.text import counted

logger = logging.getLogger("shoal")


@dataclass(frozen=True)
class BatchShape:
    """How many samples are taken together."""

    batch_size: int
    world_size: int
    num_micro: int = 1  # micro-batches that are divided together

    @property
    def micro(self) -> int:
        """Samples of one micro-batch of all ranks."""
        return self.batch_size * self.world_size


class SamplePosition(NamedTuple):
    """What all ranks together have taken."""

    taken: int = 0  # samples of the stream
    into: int = 0  # micro-batches of a step that are handed out, whose samples ``taken`` does not count yet
    returned: tuple[int, ...] = ()  # positions that were taken and not used: they are taken again, first


class PlannedBatch(NamedTuple):
    """What each rank reads of one micro-batch, and the position after it."""

    keys: list[list[Any]]  # by rank
    positions: list[list[int]]  # by rank, without what makes parts equal
    after: SamplePosition
    shape: BatchShape


class FirstStep(NamedTuple):
    """A step from which on positions follow from the number of the step."""

    step: int
    taken: int
    shape: BatchShape
    returned: tuple[int, ...] = ()


class ReplayedSample(NamedTuple):
    """A sample of a step that was, or will be."""

    rank: int  # data-parallel
    micro_batch: int
    sample: Any
    pieces: list[SamplePiece]  # where its tokens are; empty: the data set is not a ``TokenStream``


class _Order:
    """The positions of a data set with indices."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        self._num_samples, self._seed, self._shuffle = num_samples, seed, shuffle

    def keys(self, positions: Indices) -> list[int]:
        epochs, places = np.divmod(positions, self._num_samples)
        if self._shuffle:
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                places[here] = shuffled(places[here], self._num_samples, self._seed, epoch)
        indices: list[int] = places.tolist()
        return indices


class _KeysAhead:
    """The keys of one step after the other, found for many steps together: that costs as much as for one."""

    _MOST_STEPS = 64

    def __init__(self, order: _Order | TokenStream) -> None:
        self._order = order
        self._num_steps = 1  # to be found next
        self._first = 0
        self._keys: list[Any] = []  # of the positions from there on

    def keys(self, positions: Indices) -> list[Any]:
        first, num = int(positions[0]), len(positions)
        if int(positions[-1]) - first != num - 1 or (np.diff(positions) != 1).any():
            return self._order.keys(positions)
        if not self._first <= first <= self._first + len(self._keys) - num:
            self._first, self._keys = first, self._order.keys(np.arange(first, first + num * self._num_steps))
            self._num_steps = min(2 * self._num_steps, self._MOST_STEPS)
        return self._keys[first - self._first : first - self._first + num]


class Loader:
    """One rank's batches, an epoch per ``for`` loop, from a position that can be saved and loaded.

    All ranks get the same number of batches, of the same sizes. The epoch's last batch is shorter where the samples do
    not fill it, or left out with ``drop_last``. With ``fills_last`` it is filled from the next epoch's order, which
    then starts after what was taken: so the samples of a step do not depend on the number of ranks. A ``for`` loop that
    was left goes on in the next one.

    Args:
        dataset: a ``TokenStream``; or with a length and indices; or an ``IterableDataset``, whose stream every rank
            reads and shares out.
        batch_size: samples per rank and batch.
        rank, world_size: this rank's coordinate and the number of data-parallel ranks.
        shuffle: a new order in each epoch; not for an ``IterableDataset``. A ``TokenStream`` has its own order.
        collate_fn: makes a batch of a list of samples; torch's default where None.
        num_workers: processes that read ahead, as long as the loader lives; not for an ``IterableDataset``.
        pin_memory: put batches in page-locked memory, for copies to an accelerator that do not block.
        num_micro: returns the micro-batches of a step, of a ``TokenStream`` over which the work is divided.
        device: to which batches are copied while the one before is computed; None: they stay in host memory.
        reads: False: no sample is read. Without ``collate_fn``, a batch is ``dataset.form(indices)`` where it has this
            method, else None; those of an ``IterableDataset`` do not end. Of a ``TokenStream`` it has documents and
            positions, and tokens and targets on the meta device.

    Raises: UsageError: sizes that are not positive, or fewer samples than one global batch with ``drop_last``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        fills_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        num_micro: Callable[[], int] | None = None,
        device: torch.device | None = None,
        reads: bool = True,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise UsageError(f"batch size {batch_size}, rank {rank} of {world_size}: no such batches.", where="Loader")
        self.dataset = dataset
        self.batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._shuffle = shuffle
        self._stream = dataset if isinstance(dataset, TokenStream) else None
        self._drop_last = drop_last and self._stream is None
        self._fills_last = fills_last and not drop_last
        usual = default_collate if self._stream is None else self._stream.collate
        self._collate = collate_fn or usual
        reader = BatchReader(dataset, self._collate, seed=seed, pins=pin_memory)
        if self._stream is not None:
            stream = self._stream
            reader = replace(reader, place=stream.place, source=stream.source, prefetch=stream.prefetch)
        self._workers = Workers(reader, num_workers)
        self._num_micro = num_micro
        self._device = device
        self.reads = reads
        self._form = getattr(dataset, "form", None) if collate_fn is None else None
        self._is_iterable = isinstance(dataset, IterableDataset)
        is_loader = isinstance(dataset, DataLoader)
        if is_loader or not (self._is_iterable or (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))):
            raise UsageError(
                f"a loader needs a data set with a length and indices, or an IterableDataset, not"
                f" {'a DataLoader' if is_loader else type(dataset).__name__}.",
                where="training_data",
                do="pass the DataLoader's .dataset; or leave training_data out and read your own loader."
                if is_loader
                else "pass a list or a torch.utils.data.Dataset.",
            )
        num_samples = 1 if self._is_iterable else len(cast(Any, dataset))
        if not num_samples:
            raise UsageError(
                f"the data set has 0 samples: len() of {type(dataset).__name__} is 0.",
                where="training_data",
                do="look at the path, the split or the filter that it is made of.",
                code="data-empty",
            )
        if num_samples < (self.global_batch if self._drop_last and not self._is_iterable else 1):
            raise UsageError(
                f"the data set has {num_samples} samples, too few for a global batch of {self.global_batch}.",
                where="Loader",
                do="give more data, smaller batches, or drop_last=False.",
            )
        self._order: _Order | TokenStream = self._stream or _Order(num_samples, seed, shuffle)
        self._position = SamplePosition()
        self._skipped: list[list[int]] = []  # ranges of positions, in order
        self._steps: list[FirstStep] = []
        self._num_moves = 0  # how often what is read next was changed
        self._is_over = False  # the epoch, at the position that was set
        self._handed_out: list[list[list[int]]] | None = None  # by batch and rank; None: not recorded
        # Of an IterableDataset: digests of the first sample of a pass and of the last one taken, by position.
        self._digests: dict[int, str] = {}

    @property
    def global_batch(self) -> int:
        """Samples that all ranks take together per batch."""
        return self.batch_size * self._world_size

    @property
    def position(self) -> int:
        """Samples that all ranks have taken so far, those of the batch in hand included."""
        return self._position.taken + self._position.into * self.global_batch

    @property
    def epoch(self) -> int:
        return 0 if self._is_iterable else self._position.taken // self._num_samples

    def __len__(self) -> int:
        """Batches of an epoch, wherever the position is.

        Raises: TypeError: the data set is a stream without a length.
        """
        if self._is_iterable:
            raise TypeError("a loader over an IterableDataset has no length")
        together = self._shape.micro * self._shape.num_micro
        whole = self._num_samples // together if self._drop_last else -(-self._num_samples // together)
        return whole * self._shape.num_micro

    def __iter__(self) -> Iterator[Any]:
        self._is_over = False
        while not self._is_over:
            move = self._num_moves
            for batch in self._iterate_stream() if self._is_iterable else self._iterate_indices():
                yield batch
                if move != self._num_moves:  # another position was loaded: the epoch continues there
                    break
            else:
                if move == self._num_moves:
                    return

    def state_dict(self) -> dict[str, Any]:
        """The position, in numbers that any number of ranks can load, and what it is a position in."""
        return {
            "num_samples": self._num_samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "taken": self._position.taken,
            "into": self._position.into,
            "returned": list(self._position.returned),
            "shape": list(astuple(self._shape)),
            "skipped": self._skipped,
            "steps": [[each.step, each.taken, *astuple(each.shape), *each.returned] for each in self._steps],
            **({} if self._stream is None else {"stream": self._stream.state()}),
            **({"digests": list(self._digests.items())} if self._is_iterable else {}),
        }

    def problems(self, state: dict[str, Any]) -> list[str]:
        """Why a saved position is none in this data."""
        if "sampler" in state:
            return ["its samples were chosen by a curriculum by measures"]
        if (self._stream is None) != (state.get("stream") is None):
            return ["its data were" + (" no" if self._stream else "") + " TokenStream"]
        if self._stream is not None:
            return self._stream.problems(state["stream"])
        here, there = self._num_samples, state.get("num_samples")
        return [] if here == there else [f"its data set has {there} samples, this run's has {here}"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of another loader over the same data.

        The seed is that of the saved position, so that orders and workers go on as without a break.

        Raises: UsageError: the data are others, or the position is inside of a step of another shape.
        """
        problems = self.problems(state)
        into, shape = int(state.get("into", 0)), BatchShape(*state.get("shape", [1, 1]))
        if into and shape != self._shape:
            problems.append(
                f"it is after {into} micro-batches of a step of {shape}, this run's steps are {self._shape}"
            )
        if problems:
            raise UsageError(
                f"the saved position does not fit this data: {'; '.join(problems)}.",
                where="Loader.load_state_dict",
                do="resume with the data set of the saved run, or start a new position.",
                code="data-position",
            )
        self._num_moves += 1
        self._is_over = False
        self._position = SamplePosition(int(state["taken"]), into, tuple(state.get("returned", ())))
        self._digests = {int(at): digest for at, digest in state.get("digests", [])}
        self._skipped = [list(each) for each in state.get("skipped", [])]
        self._steps = [
            FirstStep(step, taken, BatchShape(*shape), tuple(returned))
            for step, taken, *shape, returned in ([*each[:5], each[5:]] for each in state.get("steps", []))
        ]
        self._seed = int(state["seed"])
        self._workers.reseed(self._seed)
        if self._stream is None:
            self._shuffle = bool(state["shuffle"])
            self._order = _Order(self._num_samples, self._seed, self._shuffle)
        else:
            self._stream.load(state["stream"], self._next_step())

    # steps: what they read, and what is left out

    def begin_step(self, step: int) -> None:
        """The engine's step of this number reads from here."""
        if self._is_iterable:  # whose samples have no numbers
            return
        self._steps = [each for each in self._steps if each.step <= step]
        mine = FirstStep(step, self.position, self._step_shape, self._position.returned)
        if (
            not self._steps
            or self._position_of(step) != mine.taken
            or self._steps[-1].shape != mine.shape
            or mine.returned
        ):
            self._steps = [each for each in self._steps if each.step < step] + [mine]

    def replay(self, step: int, rank: int | None = None) -> list[ReplayedSample]:
        """The samples of a step, in the order in which ranks and micro-batches had them, or will have them.

        Args:
            step: of the engine, counted from 0: ``global_steps`` when the step begins.
            rank: data-parallel; None: all.

        Raises: UsageError: a step before the first one that was counted, or data without indices.
        """
        first = self._steps_at(step)
        shape = first.shape if self._stream is not None else replace(first.shape, num_micro=1)
        position = SamplePosition(self._position_of(step), 0, first.returned if step == first.step else ())
        samples = []
        for micro in range(first.shape.num_micro):
            next_epoch = SamplePosition(self._epoch_end(position))
            batch = next(self._plan(shape, position), None) or next(self._plan(shape, next_epoch))
            position = batch.after
            for number, keys in enumerate(batch.keys):
                if rank is None or number == rank:
                    for key in keys:
                        pieces = [] if self._stream is None else self._stream.pieces(key)
                        samples.append(ReplayedSample(number, micro, self.dataset[key], pieces))
        return samples

    def skip(self, start: int, stop: int) -> None:
        """Leave out the positions from ``start`` to ``stop``; every rank calls, between steps.

        Raises: UsageError: positions that have been read, or no range.
        """
        if not self._next_step() <= start < stop or self._is_iterable:
            raise UsageError(
                f"positions {start} to {stop} cannot be skipped: the next one to be read is {self._next_step()}.",
                where="Loader.skip",
                do="load a checkpoint from before them, then skip them.",
                code="data-skip",
            )
        self._skipped = sorted([*self._skipped, [start, stop]])
        self._change_next()

    def skip_steps(self, first: int, stop: int) -> None:
        """Leave out what the steps from ``first`` up to ``stop`` would read, as ``skip``."""
        positions = self._position_of(first), self._position_of(stop)
        if first >= stop or positions[0] < self._next_step():
            raise UsageError(
                f"steps {first} to {stop} cannot be skipped: "
                + ("it is no range." if first >= stop else f"samples of step {first} have been read."),
                where="engine.data.skip_steps",
                do="load a checkpoint from before them, then skip them.",
                code="data-skip",
            )
        self.skip(*positions)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Mix the sources of a ``TokenStream`` by other weights from the next step on; every rank calls.

        Raises: UsageError: the data are no ``TokenStream``, or the blend cannot be met.
        """
        if self._stream is None:
            raise UsageError("weights are those of a TokenStream's sources.", where="Loader.set_weights")
        self._stream.blend.change(self._next_step(), weights)
        self._change_next()

    # ranks that come and go

    def start_step(self) -> None:
        """Record from now on what is handed out, until the next call."""
        if self._is_iterable:
            raise UsageError(
                "the samples of an IterableDataset cannot be divided anew when ranks come and go.",
                do="pass a data set with a length and indices.",
            )
        self._handed_out = []

    def step_state(self) -> dict[str, Any]:
        """The position and what was handed out in this step: ``adopt_step`` takes it on a rank that joins."""
        return {"data": self.state_dict(), "handed_out": list(self._handed_out or ()), "world_size": self._world_size}

    def adopt_step(self, state: dict[str, Any]) -> None:
        self._world_size = state["world_size"]
        self.load_state_dict(state["data"])
        self._handed_out = state["handed_out"]

    def divide(self, rank: int, world_size: int, lost: Iterable[int] = ()) -> None:
        """Divide what follows among other ranks. Every rank calls, at the same position.

        Args:
            lost: ranks of those so far that did not use what they took in this step: it is taken again, first.
        """
        again = [position for by_rank in self._handed_out or () for other in lost for position in by_rank[other]]
        self._position = self._position._replace(returned=(*again, *self._position.returned))
        self._rank, self._world_size = rank, world_size
        self._change_next()

    def _change_next(self) -> None:
        """What is read next is not what was read ahead."""
        self._num_moves += 1
        taken = self._position.taken
        self._is_over = taken > 0 and taken % self._num_samples == 0 and not self._position.returned

    def _next_step(self) -> int:
        """The first position that the step in hand does not read."""
        (taken, into, returned), shape = self._position, self._shape
        return self._advance(taken, max(shape.micro * shape.num_micro - len(returned), 0)) if into else taken

    def _steps_at(self, step: int) -> FirstStep:
        number = bisect_right(self._steps, step, key=lambda each: each.step) - 1
        if number < 0 or self._is_iterable:
            raise UsageError(
                f"what step {step} reads is not known.",
                where="Loader.replay",
                do="ask for steps from the first one of this run or its checkpoints on, of data with indices.",
                code="data-replay",
            )
        return self._steps[number]

    def _position_of(self, step: int) -> int:
        first = self._steps_at(step)
        num = (step - first.step) * first.shape.micro * first.shape.num_micro
        return self._advance(first.taken, max(num - len(first.returned), 0))

    def _advance(self, taken: int, num: int) -> int:
        """The position after ``num`` samples from ``taken`` on."""
        return int(self._following(taken, num, only_last=True)[-1]) + 1 if num else taken

    def _following(self, taken: int, num: int, *, only_last: bool = False) -> Indices:
        """The next ``num`` positions that are not skipped."""
        positions = np.arange(taken + num - 1 if only_last else taken, taken + num, dtype=np.int64)
        for start, stop in self._skipped:
            if stop > taken:
                positions[positions >= max(start, taken)] += stop - max(start, taken)
        return positions

    # planning

    @property
    def _num_samples(self) -> int:
        return 1 if self._is_iterable else len(cast(Any, self.dataset))

    @property
    def _step_shape(self) -> BatchShape:
        return BatchShape(self.batch_size, self._world_size, 1 if self._num_micro is None else self._num_micro())

    @property
    def _shape(self) -> BatchShape:
        return self._step_shape if self._stream is not None else BatchShape(self.batch_size, self._world_size)

    def _epoch_end(self, position: SamplePosition) -> int:
        if position.returned and position.taken and position.taken % self._num_samples == 0:
            return position.taken  # only these are left
        return (position.taken // self._num_samples + 1) * self._num_samples

    def _plan(self, shape: BatchShape, position: SamplePosition) -> Iterator[PlannedBatch]:
        """Micro-batches from a position to the end of its epoch."""
        end, (taken, into, returned) = self._epoch_end(position), position
        together = shape.micro * shape.num_micro
        ahead = _KeysAhead(self._order)
        while returned or taken < end:
            again = np.array(returned[:together], dtype=np.int64)
            new = self._following(taken, together - len(again))
            if self._stream is None and not self._fills_last:
                new = new[new < end]
            positions = np.concatenate([again, new])
            if not len(positions) or (self._drop_last and len(positions) < together):
                return
            after = SamplePosition(int(new[-1]) + 1 if len(new) else taken, 0, returned[together:])
            numbers = positions.tolist()
            if missing := -len(positions) % shape.world_size:  # equal parts, filled from the epoch's order in a cycle
                fill = itertools.islice(itertools.cycle(range(end - self._num_samples, end)), missing)
                positions = np.append(positions, list(fill))
            keys = ahead.keys(positions)
            if self._stream is None:
                parts = np.arange(len(keys)).reshape(shape.world_size, 1, -1)
            else:
                parts = balance(self._stream.work(keys), shape.world_size, shape.num_micro)
            for micro in range(into, shape.num_micro):
                is_last = micro + 1 == shape.num_micro
                by_rank = [[keys[number] for number in part] for part in parts[:, micro].tolist()]
                used = [
                    [numbers[number] for number in part if number < len(numbers)] for part in parts[:, micro].tolist()
                ]
                inside = SamplePosition(taken, micro + 1, returned)
                yield PlannedBatch(by_rank, used, after if is_last else inside, shape)
            taken, into, returned = after

    @property
    def source_seconds(self) -> dict[str, float]:
        """The seconds that reading took so far, by source, in all workers together."""
        return self._workers.seconds

    def close(self) -> None:
        """End the workers; a loop that follows starts new ones."""
        self._workers.close()

    def _requests(self) -> Iterator[tuple[ReadRequest, PlannedBatch]]:
        """Of the rest of the epoch."""
        for plan in self._plan(self._shape, self._position):
            mine = plan.positions[self._rank]
            yield ReadRequest(plan.keys[self._rank], mine[0] if mine else plan.after.taken), plan

    def _forms(self) -> Iterator[tuple[Any, PlannedBatch]]:
        """The rest of the epoch, without reading."""
        for plan in self._plan(self._shape, self._position):
            yield None if self._form is None else self._form(plan.keys[self._rank]), plan

    def _iterate_indices(self) -> Iterator[Any]:
        end = self._epoch_end(self._position)
        batches = self._workers.batches(self._requests()) if self.reads else self._forms()
        for batch, plan in ahead_on(self._device, batches):
            if plan.shape != self._shape and not self._position.into:  # steps have another number of micro-batches now
                self._num_moves += 1
                return
            self._position = plan.after
            if self._handed_out is not None:
                self._handed_out.append(plan.positions)
            yield batch
        if self._position.taken < end:  # the end of the epoch is left out
            self._position = SamplePosition(end)

    def _own(self, together: list[Any]) -> list[Any]:
        """This rank's part of a batch of a stream; a short one is filled up to equal parts in a cycle."""
        size = -(-len(together) // self._world_size)
        missing = size * self._world_size - len(together)
        together = [*together, *itertools.islice(itertools.cycle(together), missing)]
        return together[self._rank * size : (self._rank + 1) * size]

    def _iterate_stream(self) -> Iterator[Any]:
        if not self.reads:  # where the stream ends, only its readers know
            yield from itertools.repeat(None)
        stream = iter(cast(Iterable[Any], self.dataset))
        taken, changed, num = self.position, "", 0
        for num, sample in enumerate(itertools.islice(stream, taken), 1):
            if num - 1 in self._digests:
                before, self._digests[num - 1] = self._digests[num - 1], digest_of(sample)
                if before != self._digests[num - 1]:
                    changed = changed or f"gives another sample at position {num - 1} than before"
        if num < taken:
            changed = changed or f"ends after {counted(num, 'sample')}"
            self._position = SamplePosition()  # the next pass starts anew
            stream = iter(cast(Iterable[Any], self.dataset))
        if changed and self._rank == 0:
            logger.warning(
                "%s %s: it is not the stream of which %d samples have been taken, or it has no fixed order. Samples may"
                " be repeated or left out from here on. Give it the files, the order and the seed that it had.",
                type(self.dataset).__name__,
                changed,
                taken,
            )
        while True:
            together = list(itertools.islice(stream, self.global_batch))
            is_over = len(together) < (self.global_batch if self._drop_last else 1)
            if is_over and not self.position:
                name, few = type(self.dataset).__name__, counted(len(together), "sample")
                raise UsageError(
                    f"a pass over {name} gave {few}, too few for a batch.",
                    where="training_data",
                    do="look at its source. __iter__ is called for each pass, and has to begin anew each time.",
                    code="data-empty",
                )
            if is_over:
                self._position, self._digests = SamplePosition(), {}
                return
            if not self.position:
                self._digests = {0: digest_of(together[0])}
            self._position = SamplePosition(self.position + len(together))
            self._digests = dict([*self._digests.items()][:1])
            self._digests[self.position - 1] = digest_of(together[-1])
            yield self._collate(self._own(together))


class RepeatingLoader:
    """A loader without end: starts the next epoch when one is over.

    Args:
        loader: anything that can be iterated again and again; with ``state_dict`` where the position is to be saved.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises: UsageError: the loader yields nothing at all.
        """
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise UsageError("the loader yields no batch.", where="RepeatingLoader") from None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = cast(Any, self.loader).state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        cast(Any, self.loader).load_state_dict(state)
        self._batches = iter(self.loader)
