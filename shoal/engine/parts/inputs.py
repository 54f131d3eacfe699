"""The first batches: their size is compared with the config's, and tensor-parallel ranks need the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shoal.comm.protocol import Communicator
from shoal.config.batch import MICRO
from shoal.data.digest import digest_of
from shoal.device import in_transform, is_fake
from shoal.engine.accumulation import Accumulation
from shoal.engine.log import logger
from shoal.engine.parts.part import Part
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import UsageError

NUM_COMPARED = 3  # training forwards


class FirstInputs(Part):
    """Looks at the inputs of the first training forwards.

    Warns where the first batch is not of the size that the config gives. Tensor-parallel ranks compute parts of the
    same layers, so their batches are compared.

    Args:
        of_micro_batch: which argument of a forward is the micro-batch; None: all arguments together.
    """

    def __init__(
        self, sharding: Sharding, properties: Properties, accumulation: Accumulation, of_micro_batch: int | None
    ) -> None:
        self._sharding, self._properties, self._accumulation = sharding, properties, accumulation
        self._of_micro_batch = of_micro_batch
        self._comm = properties.axes.get("tp")
        self._num_left = NUM_COMPARED if self._comm is not None else 1
        self._is_size_checked = properties.config.origin(MICRO) not in ("user", "deprecated alias", "derived")

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises: UsageError: on every rank: the ranks were given different batches.

        Communicates: one exchange of a digest over the tensor-parallel axis.
        """
        if not self._num_left or not self._sharding.module.training or in_transform():
            return
        inputs = (args, kwargs) if self._of_micro_batch is None else args[self._of_micro_batch]
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        if self._comm is not None and not any(is_fake(each.detach()) for each in tensors):  # a dry run's, or in one
            self._compare(tensors, self._comm)
        if not self._is_size_checked:
            self._is_size_checked = True
            note = batch_size_note(tensors, self._accumulation.micro_batch)
            if note is not None and self._properties.rank == 0:
                logger.warning(note)
        if self._comm is None:
            self._num_left = 0

    def _compare(self, tensors: Sequence[torch.Tensor], comm: Communicator) -> None:
        self._num_left -= 1
        digests = comm.gather_objects(digest_of(tensors, is_whole=True), label="same batch")
        if len(set(digests)) > 1:
            raise UsageError(
                f"the {comm.size} ranks of a tensor-parallel group were given {len(set(digests))} different batches.",
                where=self._properties.where(self._accumulation.counters.global_steps),
                do="divide the data by engine.dp_world_size and engine.get_data_parallel_rank(), not by the number of"
                " ranks; the loader that initialize() returns does.",
                code="batch-differs",
            )


def batch_size_note(tensors: Sequence[torch.Tensor], micro_batch: int) -> str | None:
    """A warning where no tensor has ``micro_batch`` samples along dim 0, or along dim 1 as in [sequence, batch]."""
    shapes = [tensor.shape for tensor in tensors if tensor.ndim]
    if not shapes or any(micro_batch in shape[:2] for shape in shapes):
        return None
    sizes = sorted({shape[0] for shape in shapes})
    return (
        f"the first batch has {' or '.join(map(str, sizes))} samples, and train_micro_batch_size_per_gpu is"
        f" {micro_batch}: engine.global_samples, train_batch_size and rates by samples count {micro_batch}. Give the"
        " DataLoader batch_size=engine.train_micro_batch_size_per_gpu(), or change the config."
    )
