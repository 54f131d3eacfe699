"""Tensor-parallel ranks compute parts of the same layers, so they need the same batch: the first ones are compared."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch.utils._pytree import tree_leaves

from shoal.comm.protocol import Communicator
from shoal.device import is_fake
from shoal.errors import UsageError

NUM_COMPARED = 3  # training forwards


class SameInputs:
    """Compares the inputs of the first training forwards over the tensor-parallel ranks.

    Args:
        comm: those ranks; None: there is one.
    """

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm
        self._num_left = NUM_COMPARED if comm is not None else 0

    def check(self, inputs: Any, *, where: str) -> None:
        """Compare, unless enough batches were.

        Raises: UsageError: on every rank: the ranks were given different batches.

        Communicates: one exchange of a digest over the tensor-parallel axis.
        """
        if self._comm is None or not self._num_left:
            return
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        if any(is_fake(tensor) for tensor in tensors):
            return
        self._num_left -= 1
        digest = xxhash.xxh3_64()
        for tensor in tensors:
            digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
            array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(memoryview(array))
        found = self._comm.gather_objects(digest.hexdigest(), label="same batch")
        if len(set(found)) > 1:
            raise UsageError(
                f"the {self._comm.size} ranks of a tensor-parallel group were given {len(set(found))} different"
                " batches.",
                where=where,
                do="divide the data by engine.dp_world_size and engine.get_data_parallel_rank(), not by the number of"
                " ranks; the loader that initialize() returns does.",
                code="batch-differs",
            )
