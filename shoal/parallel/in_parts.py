"""Saved inputs in parts: each rank of an axis keeps 1/n of what all of them have, and the backward pass gathers it.

Meant for model parallelism, where the ranks along an axis compute on the same activations.
Source: activation partitioning in ZeRO-R, section 6.1 (arXiv:1910.02054).
"""

from __future__ import annotations

import torch

from shoal.comm.protocol import Communicator
from shoal.parallel.kept import Form, Kept, KeptInPlace, Place, Segment
from shoal.sharding.placement import Tier


class KeptPart:
    """This rank's range of the bytes of a tensor, at a place of its own."""

    def __init__(self, form: Form, part: Kept) -> None:
        self.form = form
        self.part = part
        self.tier: Tier = part.tier
        self.nbytes = part.nbytes

    @property
    def resting(self) -> Kept:
        return self.part


class InParts:
    """Keeps 1/n of each saved input on each of the n ranks of an axis.

    All ranks of the axis must have the same values, and run the same segments: it is not checked.

    Args:
        place: where the parts rest.

    Communicates: in the backward pass, an all_gather of each saved input: (n - 1) / n of its bytes received per rank.
    Memory: ceil(nbytes / n) per saved input and rank.
    """

    def __init__(self, comm: Communicator, place: Place) -> None:
        self._comm = comm
        self._place = place

    def begin(self) -> Segment:
        return self._place.begin()

    def keep(self, tensor: torch.Tensor, segment: Segment) -> Kept:
        form = Form.of(tensor)
        if not form.can_move:
            return self._place.keep(tensor, segment)
        values = form.compact(tensor).contiguous().view(-1).view(torch.uint8)
        share = -(-form.nbytes // self._comm.size)
        begin = min(self._comm.rank * share, form.nbytes)
        own = values[begin : begin + share]
        part = torch.zeros(share, dtype=torch.uint8, device=tensor.device)
        part[: own.numel()].copy_(own)
        return KeptPart(form, self._place.keep(part, segment))

    def bring(self, kept: Kept, segment: Segment) -> torch.Tensor:
        if not isinstance(kept, KeptPart):
            return self._bring_part(kept, segment)
        form = kept.form
        part = self._bring_part(kept.part, segment)
        full = self._comm.empty(part.numel() * self._comm.size, torch.uint8, form.device)
        work = self._comm.all_gather(full, part, label="saved input")
        work.wait()
        work.drain()  # peers may still read the part, which goes with its segment
        values = full[: form.nbytes].view(form.dtype).view(form.compact_size)
        return form.expand(form.empty().copy_(values))

    def _bring_part(self, kept: Kept, segment: Segment) -> torch.Tensor:
        return kept.get() if isinstance(kept, KeptInPlace) else self._place.bring(kept, segment)

    def reset(self) -> None:
        self._place.reset()
