"""One rank's micro-batches of a curriculum by measures, from a position that any number of ranks can go on at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch.utils.data import Dataset, default_collate

from shoal.data.difficulty import DifficultySampler
from shoal.data.workers import BatchReader, ReadRequest, Workers
from shoal.errors import UsageError


class CurriculumLoader:
    """The samples that a ``DifficultySampler`` draws, divided over ranks as ``Loader`` does.

    One ``for`` loop reads ``num_epochs`` times as many samples as the data set has; one that was left goes on in the
    next.

    Args:
        sampler: draws samples for all ranks; every rank has one of its own.
        batch_size: samples per rank and micro-batch.
        num_workers, pin_memory, collate_fn: as of ``Loader``.
        reads: False: batches are None, and no sample is read.

    Attributes: ``post_process``: gets each batch and ``{"current_difficulties", "curriculum_step",
        "consumed_samples"}``, and returns the batch that the loop gets; None: it is left as it is.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        sampler: DifficultySampler,
        *,
        rank: int = 0,
        world_size: int = 1,
        num_epochs: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        reads: bool = True,
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.sampler, self._rank, self._world_size = sampler, rank, world_size
        self._num_samples = len(cast(Any, dataset))
        self._end = num_epochs * self._num_samples
        self._workers = Workers(BatchReader(dataset, collate_fn or default_collate, pins=pin_memory), num_workers)
        self._reads = reads
        self._taken = 0  # samples that all ranks have taken
        self._state = sampler.state_dict()
        self._num_loads = 0
        self.post_process: Callable[[Any, dict[str, Any]], Any] | None = None

    @property
    def global_batch(self) -> int:
        """Samples that all ranks take together per micro-batch."""
        return self.batch_size * self._world_size

    @property
    def position(self) -> int:
        """Samples that all ranks have taken, those of the batch in hand included."""
        return self._taken

    def __len__(self) -> int:
        """Micro-batches of the whole run, wherever the position is."""
        return self._end // self.global_batch

    def __iter__(self) -> Iterator[Any]:
        place = self._num_loads - 1
        while place != self._num_loads:  # another position was loaded: the loop goes on there
            place = self._num_loads
            self.sampler.load_state_dict(self._state)  # workers may have read ahead in a loop that was left
            unread = ((None, after) for _, after in self._requests())
            for batch, after in self._workers.batches(self._requests()) if self._reads else unread:
                self._taken, self._state, about = after
                yield batch if self.post_process is None or not self._reads else self.post_process(batch, about)
                if place != self._num_loads:
                    break

    def close(self) -> None:
        """End the workers; a loop that follows starts new ones."""
        self._workers.close()

    def _requests(self) -> Iterator[tuple[ReadRequest, tuple[int, dict[str, Any], dict[str, Any]]]]:
        taken = self._taken
        while taken + self.global_batch <= self._end:
            together = self.sampler.take(self.global_batch)
            taken += self.global_batch
            about = {
                "current_difficulties": dict(self.sampler.difficulties),
                "curriculum_step": self.sampler.step,
                "consumed_samples": taken,
            }
            mine = together[self._rank * self.batch_size : (self._rank + 1) * self.batch_size]
            yield ReadRequest(mine, taken), (taken, self.sampler.state_dict(), about)

    def set_custom_schedule(self, functions: Callable[[int], int] | Mapping[str, Callable[[int], int]]) -> None:
        """The functions of measures with a ``custom`` schedule, by measure: from a step, counted from 1."""
        self.sampler.set_custom_schedule(functions)

    def state_dict(self) -> dict[str, Any]:
        """The position, in numbers and text that do not depend on rank, world size or batch size."""
        return {"num_samples": self._num_samples, "consumed": self._taken, "sampler": self._state}

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Why a saved position is none in this data."""
        if "sampler" not in state:
            return ["its samples were chosen by no curriculum by measures"]
        here, there = self._num_samples, state["num_samples"]
        return [] if here == there else [f"its data set has {there} samples, this run's has {here}"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of another loader over the same data set and measures.

        Raises: UsageError: the data set has another number of samples, or the position is of another kind of loader.
        """
        if problems := self.problems(state):
            raise UsageError(
                f"the saved position does not fit this data: {problems[0]}.",
                where="CurriculumLoader.load_state_dict",
                do="resume with the data set and the curriculum of the saved run, or start a new position.",
                code="curriculum-position",
            )
        self._num_loads += 1
        self._taken, self._state = int(state["consumed"]), dict(state["sampler"])  # the next loop's sampler goes there
