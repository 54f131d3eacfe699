"""Counts the bytes of the storages that one thread made and that are alive, by any reference (autograd's included)."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """While active, notes every storage that an operation of this thread allocates.

    Args:
        has_resizes: storages may grow after they were made; without, it sums only where a new peak is possible.

    Attributes:
        peak: the largest sum of living storages after any operation since ``reset_peak()``.
    """

    def __init__(self, *, has_resizes: bool = True) -> None:
        super().__init__()
        self.peak = 0
        self._has_resizes = has_resizes
        self._most = 0  # bytes that can be alive: those of the last sum, and what has been allocated since
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            # A view, or a result that is an argument, may be of another thread's storage.
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and (key := _key(tensor)) not in given:
                held = self._seen.get(key)
                if held is None or held.expired():
                    self._seen[key] = StorageWeakRef(tensor.untyped_storage())
                    self._most += tensor.untyped_storage().nbytes()
        if self._has_resizes or self._most > self.peak:
            self._most = self.now()
            self.peak = max(self.peak, self._most)
        return result

    def now(self) -> int:
        """Bytes of the storages that are alive."""
        total = 0
        for key, reference in list(self._seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._seen[key]
            else:
                total += storage.nbytes()
        return total

    def reset_peak(self) -> None:
        self.peak = self._most = self.now()


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
