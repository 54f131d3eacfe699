"""Batches for one rank, and a position that says what has been read, whatever the number of ranks.

All ranks together read one endless stream of samples: an order of the whole data set for epoch 0, then one for epoch 1,
and so on. The position is the number of samples that all ranks have taken from the stream. Step by step,

    position P, batch size B, world size N:   rank r takes  stream[P + r B : P + (r + 1) B],   then P += N B

so a run that stops at P goes on at P with any N and B, repeats nothing and skips nothing. Only the position is saved.
Of the L < N B samples that an epoch ends with, each rank takes ceil(L / N), as with torch's DistributedSampler and
DataLoader: where N does not divide L, up to N - 1 samples of the epoch are taken twice, so that ranks stay alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shoal.data.order import shuffled
from shoal.errors import UsageError


@dataclass(frozen=True)
class SamplePosition:
    """A position in the stream of a data set of ``num_samples``, shuffled anew in each epoch from ``seed``."""

    num_samples: int
    seed: int
    shuffle: bool
    taken: int = 0  # samples that all ranks together have taken from the stream
    returned: tuple[int, ...] = ()  # indices of those of them that were not used: they are taken again, first

    @property
    def epoch(self) -> int:
        return self.taken // self.num_samples

    @property
    def left_in_epoch(self) -> int:
        return self.num_samples - self.taken % self.num_samples

    def advance(self, num: int) -> SamplePosition:
        again = min(num, len(self.returned))
        return replace(self, taken=self.taken + num - again, returned=self.returned[again:])

    def left(self) -> list[int]:
        """The indices that are left in the epoch."""
        is_over = bool(self.returned) and self.taken > 0 and self.taken % self.num_samples == 0
        return [*self.returned, *([] if is_over else self.order()[self.num_samples - self.left_in_epoch :])]

    def order(self) -> list[int]:
        """The indices of the whole epoch."""
        if not self.shuffle:
            return list(range(self.num_samples))
        order: list[int] = shuffled(range(self.num_samples), self.num_samples, self.seed, self.epoch).tolist()
        return order


class Loader:
    """One rank's batches, an epoch per ``for`` loop, from a position that can be saved and loaded.

    All ranks get the same number of batches, of the same sizes. The epoch's last batch is shorter where the samples do
    not fill it, or left out with ``drop_last``. With ``fills_last`` it is filled from the next epoch's order, which
    then starts after what was taken: so the samples of a step do not depend on the number of ranks. A ``for`` loop that
    was left goes on in the next one.

    Args:
        dataset: with a length and indices, or an ``IterableDataset``, whose stream every rank reads and shares out.
        batch_size: samples per rank and batch.
        rank, world_size: this rank's coordinate and the number of data-parallel ranks.
        shuffle: a new order in each epoch; not for an ``IterableDataset``.
        collate_fn: makes a batch of a list of samples; torch's default where None.
        num_workers: processes that read ahead; not for an ``IterableDataset``.
        pin_memory: put batches in page-locked memory, for copies to an accelerator that do not block.

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
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise UsageError(f"batch size {batch_size}, rank {rank} of {world_size}: no such batches.", where="Loader")
        self.dataset = dataset
        self.batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._drop_last = drop_last
        self._fills_last = fills_last and not drop_last
        self._collate = default_collate if collate_fn is None else collate_fn
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._is_stream = isinstance(dataset, IterableDataset)
        is_loader = isinstance(dataset, DataLoader)
        if is_loader or not (self._is_stream or (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))):
            raise UsageError(
                f"a loader needs a data set with a length and indices, or an IterableDataset, not"
                f" {'a DataLoader' if is_loader else type(dataset).__name__}.",
                where="training_data",
                do="pass the DataLoader's .dataset; or leave training_data out and read your own loader."
                if is_loader
                else "pass a list or a torch.utils.data.Dataset.",
            )
        num_samples = 1 if self._is_stream else len(cast(Any, dataset))
        if num_samples < (self.global_batch if drop_last and not self._is_stream else 1):
            raise UsageError(
                f"the data set has {num_samples} samples, too few for a global batch of {self.global_batch}.",
                where="Loader",
                do="give more data, smaller batches, or drop_last=False.",
            )
        self._position = SamplePosition(num_samples, seed, shuffle)
        self._num_loads = 0
        self._is_over = False  # the epoch, at the position that was set
        self._handed_out: list[list[int]] | None = None  # by batch, what all ranks took together; None: not recorded

    @property
    def global_batch(self) -> int:
        """Samples that all ranks take together per batch."""
        return self.batch_size * self._world_size

    @property
    def position(self) -> int:
        """Samples that all ranks have taken so far, those of the batch in hand included."""
        return self._position.taken

    @property
    def epoch(self) -> int:
        return 0 if self._is_stream else self._position.epoch

    def __len__(self) -> int:
        """Batches of an epoch, wherever the position is.

        Raises: TypeError: the data set is a stream without a length.
        """
        if self._is_stream:
            raise TypeError("a loader over an IterableDataset has no length")
        return self._count(self._position.num_samples)

    def __iter__(self) -> Iterator[Any]:
        self._is_over = False
        while not self._is_over:
            place = self._num_loads
            for batch in self._iterate_stream() if self._is_stream else self._iterate_indices():
                yield batch
                if place != self._num_loads:  # another position was loaded: the epoch continues there
                    break
            else:
                return

    def state_dict(self) -> dict[str, Any]:
        """The position, in numbers that do not depend on rank, world size or batch size."""
        state = asdict(self._position)
        if not state["returned"]:
            del state["returned"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of another loader over the same data set.

        Raises: UsageError: the data set has another number of samples.
        """
        if state["num_samples"] != self._position.num_samples:
            raise UsageError(
                f"the saved position is in a data set of {state['num_samples']} samples, "
                f"but this one has {self._position.num_samples}.",
                where="Loader.load_state_dict",
                do="resume with the data set of the saved run, or start a new position.",
            )
        self._num_loads += 1
        self._is_over = False
        self._position = SamplePosition(
            int(state["num_samples"]),
            int(state["seed"]),
            bool(state["shuffle"]),
            int(state["taken"]),
            tuple(state.get("returned", ())),
        )

    # ranks that come and go

    def start_step(self) -> None:
        """Record from now on what is handed out, until the next call."""
        if self._is_stream:
            raise UsageError(
                "the samples of an IterableDataset cannot be divided anew when ranks come and go.",
                do="pass a data set with a length and indices.",
            )
        self._handed_out = []

    def step_state(self) -> dict[str, Any]:
        """The position and what was handed out in this step: ``adopt_step`` takes it on a rank that joins."""
        return {"data": self.state_dict(), "handed_out": list(self._handed_out or ()), "world_size": self._world_size}

    def adopt_step(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state["data"])
        self._handed_out, self._world_size = state["handed_out"], state["world_size"]

    def divide(self, rank: int, world_size: int, lost: Iterable[int] = ()) -> None:
        """Divide what follows among other ranks. Every rank calls, at the same position.

        Args:
            lost: ranks of those so far that did not use what they took in this step: it is taken again, first.
        """
        again: list[int] = []
        for together in self._handed_out or ():
            size = -(-len(together) // self._world_size)
            again += [index for other in lost for index in together[other * size : (other + 1) * size]]
        self._position = replace(self._position, returned=(*again, *self._position.returned))
        self._rank, self._world_size = rank, world_size
        self._num_loads += 1
        left = self._position.left_in_epoch
        self._is_over = self._position.taken > 0 and left == self._position.num_samples and not self._position.returned

    def _count(self, num_samples: int) -> int:
        return num_samples // self.global_batch if self._drop_last else -(-num_samples // self.global_batch)

    def _iterate_indices(self) -> Iterator[Any]:
        left, order = self._position.left(), self._position.order()
        end = self._position.advance(len(left))
        if self._fills_last:
            left += itertools.islice(itertools.cycle(end.order()), -len(left) % self.global_batch)
        starts = range(0, self._count(len(left)) * self.global_batch, self.global_batch)
        batches = [left[start : start + self.global_batch] for start in starts]
        loader = DataLoader(
            self.dataset,
            batch_sampler=[self._own(together, order) for together in batches],
            collate_fn=self._collate,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
        )
        for batch, together in zip(loader, batches, strict=True):
            self._position = self._position.advance(len(together))
            if self._handed_out is not None:
                self._handed_out.append(together)
            yield batch
        if self._drop_last:
            self._position = end

    def _own(self, together: list[Any], repeated: Sequence[Any]) -> list[Any]:
        """This rank's part of a global batch; a short one is filled up to equal parts from ``repeated``, in a cycle."""
        size = -(-len(together) // self._world_size)
        missing = size * self._world_size - len(together)
        together = [*together, *itertools.islice(itertools.cycle(repeated), missing)]
        return together[self._rank * size : (self._rank + 1) * size]

    def _iterate_stream(self) -> Iterator[Any]:
        stream = iter(cast(Iterable[Any], self.dataset))
        skipped = sum(1 for _ in itertools.islice(stream, self._position.taken))
        if skipped < self._position.taken:
            self._position = replace(self._position, taken=0)  # the stream ended here: the next pass starts anew
            stream = iter(cast(Iterable[Any], self.dataset))
        while True:
            together = list(itertools.islice(stream, self.global_batch))
            if not together or (self._drop_last and len(together) < self.global_batch):
                self._position = replace(self._position, taken=0)
                return
            self._position = self._position.advance(len(together))
            yield self._collate(self._own(together, together))


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
