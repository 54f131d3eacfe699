"""Partitioned saved tensors: each rank of an axis stores 1/n of each tensor, and the backward pass gathers it.

Meant for model parallelism, where the ranks along an axis compute on the same activations.
Source: activation partitioning in ZeRO-R, section 6.1 (arXiv:1910.02054).
"""

from __future__ import annotations

import torch

from shoal.comm.protocol import Communicator
from shoal.parallel.saved_tensors import Form, ForwardCall, InPlaceTensor, SavedTensor, TensorStore
from shoal.sharding.placement import Tier


class PartitionedTensor:
    """This rank's range of the bytes of a tensor, stored in another store."""

    def __init__(self, form: Form, part: SavedTensor) -> None:
        self.form = form
        self.part = part
        self.tier: Tier = part.tier
        self.nbytes = part.nbytes

    @property
    def local(self) -> SavedTensor:
        return self.part


class PartitionedStore:
    """Stores 1/n of each saved tensor on each of the n ranks of an axis.

    All ranks of the axis must have the same values and make the same calls; this is not checked.

    Args:
        inner: stores this rank's parts.

    Communicates: in the backward pass, an all_gather of each saved tensor: (n - 1) / n of its bytes received per rank.
    Memory: ceil(nbytes / n) per saved tensor and rank.
    """

    def __init__(self, comm: Communicator, inner: TensorStore) -> None:
        self._comm = comm
        self._inner = inner

    def begin(self) -> ForwardCall:
        return self._inner.begin()

    def store(self, tensor: torch.Tensor, call: ForwardCall) -> SavedTensor:
        form = Form.of(tensor)
        if not form.can_move:
            return self._inner.store(tensor, call)
        values = form.compact(tensor).contiguous().view(-1).view(torch.uint8)
        share = -(-form.nbytes // self._comm.size)
        begin = min(self._comm.rank * share, form.nbytes)
        own = values[begin : begin + share]
        part = torch.zeros(share, dtype=torch.uint8, device=tensor.device)
        part[: own.numel()].copy_(own)
        return PartitionedTensor(form, self._inner.store(part, call))

    def fetch(self, saved: SavedTensor, call: ForwardCall) -> torch.Tensor:
        if not isinstance(saved, PartitionedTensor):
            return self._fetch_part(saved, call)
        form = saved.form
        part = self._fetch_part(saved.part, call)
        full = self._comm.empty(part.numel() * self._comm.size, torch.uint8, form.device)
        work = self._comm.all_gather(full, part, label="saved input")
        work.wait()
        work.drain()  # peers may still read the part, which is freed with its call
        values = full[: form.nbytes].view(form.dtype).view(form.compact_size)
        return form.expand(form.empty().copy_(values))

    def _fetch_part(self, saved: SavedTensor, call: ForwardCall) -> torch.Tensor:
        return saved.get() if isinstance(saved, InPlaceTensor) else self._inner.fetch(saved, call)

    def reset(self) -> None:
        self._inner.reset()
