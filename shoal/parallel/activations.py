"""Activation offload: the tensors that autograd saves in a block are stored in host memory; nothing is recomputed.

    forward    block 0       block 1       block 2       ...
    copies     [0 to host]   [1 to host]   [2 to host]
    device     0             0, 1          1, 2

Copies run while the device computes; in the backward pass a block's tensors are fetched while the block after it runs.
Tensors saved outside of blocks, and parameters, stay on the device. A recomputed block, or a block inside of a
recomputed function, saves the function's inputs only, in the store that ``activation_checkpointing`` names. Inside
compiled code the compiler decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shoal.device import in_backward
from shoal.errors import UsageError
from shoal.memory.stream_copies import copies_of as stream_copies_of
from shoal.parallel.cpu_offload import CopiesOf, HostStore
from shoal.parallel.recompute_blocks import RecomputedBlocks, find_blocks
from shoal.parallel.saved_tensors import (
    Form,
    ForwardCall,
    InPlaceTensor,
    Packed,
    SavedTensor,
    SavedTensors,
    checkpoint_around,
)
from shoal.sharding.placement import Tier

LEAST_NBYTES = 4096  # a smaller tensor costs more to copy than it saves


class _LimitedHostStore(HostStore):
    """Does not offload small tensors, or tensors beyond a number of bytes."""

    def __init__(self, copies_of: CopiesOf, max_nbytes: int | None) -> None:
        super().__init__(copies_of)
        self._max_nbytes = max_nbytes
        self.num_moved_nbytes = 0  # in this forward pass

    def store(self, tensor: torch.Tensor, call: ForwardCall) -> SavedTensor:
        nbytes = Form.of(tensor).nbytes
        is_over = self._max_nbytes is not None and self.num_moved_nbytes + nbytes > self._max_nbytes
        if nbytes < LEAST_NBYTES or is_over:
            return InPlaceTensor(tensor, Tier.DEVICE)
        self.num_moved_nbytes += nbytes
        return super().store(tensor, call)


class HostActivations:
    """Stores the activations of a model's blocks in host memory, until ``remove()``.

    Args:
        blocks: names of the model's blocks; empty: those of ``find_blocks``, or the model's children.
        max_nbytes: most bytes that are offloaded in one forward pass, those of the first blocks; None: all.
        copies_of: makes the copies between a device and the host.

    Memory: on the device the activations of two blocks; on the host those of all.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str] = (),
        *,
        max_nbytes: int | None = None,
        copies_of: CopiesOf = stream_copies_of,
    ) -> None:
        self._store = _LimitedHostStore(copies_of, max_nbytes)
        self._saved = SavedTensors(self._store)
        self._seen: set[str] = set()
        self._modules = find_blocks(model, blocks) or dict(_parts(model, ""))
        self._blocks = RecomputedBlocks(self._modules, self)

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks, as ``named_modules()`` has them."""
        return self._blocks.names

    def saved_bytes_by_tier(self) -> dict[Tier, int]:
        """Bytes that wait for their backward pass."""
        return self._saved.nbytes_by_tier()

    @property
    def peak_saved_bytes(self) -> int:
        """The peak of ``saved_bytes``."""
        return self._saved.peak_nbytes

    def remove(self) -> None:
        """Restore the modules' own ``forward``. Idempotent."""
        self._blocks.remove()

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``; the tensors that autograd saves are stored on the host."""
        is_plain = not torch.is_grad_enabled() or in_backward()
        if is_plain or torch.compiler.is_compiling() or checkpoint_around() is not None:
            return function(*args, **kwargs)  # nothing is saved, or not by these hooks
        return self._run(name, function, args, kwargs)

    def _run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in self._seen:  # another forward pass
            self._seen.clear()
            self._store.num_moved_nbytes = 0
        self._seen.add(name)
        pack, unpack = self._saved.hooks()
        parameters = {parameter.untyped_storage()._cdata for parameter in self._modules[name].parameters()}

        def pack_activation(tensor: torch.Tensor) -> Packed | torch.Tensor:
            is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
            return tensor if is_plain and tensor.untyped_storage()._cdata in parameters else pack(tensor)

        def unpack_activation(packed: Packed | torch.Tensor) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            try:
                return unpack(packed)
            except UsageError as error:
                raise UsageError(
                    f"an activation of {name!r} was changed in place after autograd saved it: {error.what}",
                    do="write x = x + y instead of x += y for what a later operation reads.",
                    code="activation-changed",
                ) from None

        with torch.autograd.graph.saved_tensors_hooks(pack_activation, unpack_activation):
            return function(*args, **kwargs)


def _parts(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The modules that the model calls one after the other, lists gone into."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        parts += _parts(child, f"{path}{name}.") if is_container else [(f"{path}{name}", child)]
    return parts
