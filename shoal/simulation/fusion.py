"""Operators that follow each other as one kernel, as torch.compile makes it of pointwise operators and reductions.

    x = norm(hidden); y = gelu(x + bias); product(y)

is a kernel that reads ``hidden`` and ``bias`` and writes ``y``, and what backward keeps of the rest; then the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.simulation.clocks import SimulatedStream
from shoal.simulation.kernels import Kernel

_REDUCTIONS = frozenset(
    (
        *("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
        *("native_dropout", "native_dropout_backward", "nll_loss_forward", "nll_loss_backward"),
        *("sum", "mean", "amax", "var_mean", "_to_copy", "copy_", "clone", "cat"),
    )
)


def is_fusible(operator: Any) -> bool:
    """True of an operator that computes elements, or sums of them."""
    return torch.Tag.pointwise in operator.tags or operator.overloadpacket.__name__ in _REDUCTIONS


class Fusion:
    """One kernel, whose operators are queued on a stream.

    Args:
        written: the kernel of Shoal's that it is (``shoal.kernels.use``); None: a compiler would make it.
    """

    def __init__(self, stream: SimulatedStream, written: object | None) -> None:
        self.stream = stream
        self._written = written
        self._dtype = torch.float32
        self._read: dict[int, int] = {}  # bytes by storage
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._allocated: list[StorageWeakRef] = []

    def goes_on(self, stream: SimulatedStream, written: object | None) -> bool:
        """True if an operator of the kernel ``written`` that is queued on ``stream`` now is a part of this one."""
        return self.stream is stream and self._written is written

    def add(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """The kernel computes another operator. ``reads``: also what the operator changes in place."""
        for tensor in reads:
            if (key := tensor.untyped_storage()._cdata) not in self._made:
                self._read[key] = max(self._read.get(key, 0), tensor.nbytes)
        for tensor in (*writes, *made):
            storage = tensor.untyped_storage()
            self._made[storage._cdata] = (StorageWeakRef(storage), tensor.nbytes)
            self._dtype = tensor.dtype

    def allocate(self, made: Sequence[torch.Tensor]) -> None:
        """An operator of it makes these tensors, which have memory where they outlive the kernel."""
        self._allocated += [StorageWeakRef(tensor.untyped_storage()) for tensor in made]

    def outliving(self) -> list[torch.UntypedStorage]:
        """The storages that it made and that still exist."""
        storages = (torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self._allocated)
        return [storage for storage in storages if storage is not None]

    def kernel(self) -> Kernel:
        """The kernel as it is launched: it writes what still exists."""
        written = sum(nbytes for storage, nbytes in self._made.values() if not storage.expired())
        return Kernel("fused", self._dtype, sum(self._read.values()) + written)
