"""The saved inputs of all segments of one rank: each kept once, however many share it, and counted in bytes."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.device import is_fake
from shoal.parallel.kept import Kept, KeptInPlace, Place, Segment, is_plain, version_of
from shoal.sharding.placement import Tier

Packed = tuple[Segment, Kept]


class SavedInputs:
    """Keeps what autograd asks to keep, at one place.

    What is not plain strided memory (a DTensor, a sparse tensor) stays where it is.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._by_identity: weakref.WeakValueDictionary[Hashable, Kept] = weakref.WeakValueDictionary()
        self._nbytes: Counter[Tier] = Counter()
        self._lock = threading.RLock()  # bytes are given back by whichever thread drops the graph, in __del__ too
        self.peak_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held for segments whose backward is still to come."""
        return sum(self._nbytes.values())

    def nbytes_by_tier(self) -> dict[Tier, int]:
        return {tier: nbytes for tier, nbytes in self._nbytes.items() if nbytes}

    def begin(self) -> AbstractContextManager[object]:
        """A context for what autograd saves: the inputs of one segment."""
        return torch.autograd.graph.saved_tensors_hooks(*self.hooks())

    def hooks(self) -> tuple[Callable[[torch.Tensor], Packed], Callable[[Packed], torch.Tensor]]:
        """What such a context calls, for one segment that begins now."""
        segment = self._place.begin()

        def pack(tensor: torch.Tensor) -> Packed:
            kept = self._keep(tensor, segment)
            segment.kept.append(kept)
            return segment, kept

        return pack, self._unpack

    def _unpack(self, packed: Packed) -> torch.Tensor:
        segment, kept = packed
        if isinstance(kept, KeptInPlace):
            return kept.get()
        return self._place.bring(kept, segment)

    def _keep(self, tensor: torch.Tensor, segment: Segment) -> Kept:
        if not (is_plain(tensor) or is_fake(tensor)):
            return self._counted(KeptInPlace(tensor, Tier.DEVICE))
        storage = StorageWeakRef(tensor.untyped_storage())  # while it lives no other storage has this number
        key = (
            storage.cdata,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
            version_of(tensor),
        )
        found = self._by_identity.get(key)
        if found is None:
            found = self._counted(self._place.keep(tensor, segment), storage)
            self._by_identity[key] = found
        return found

    def _counted(self, kept: Kept, storage: StorageWeakRef | None = None) -> Kept:
        with self._lock:
            self._nbytes[kept.tier] += kept.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        weakref.finalize(kept, self._forget, kept.tier, kept.nbytes, storage).atexit = False
        return kept

    def _forget(self, tier: Tier, nbytes: int, storage: StorageWeakRef | None) -> None:
        with self._lock:
            self._nbytes[tier] -= nbytes

    def reset(self) -> None:
        self._place.reset()
