"""Tensors that autograd saves for the backward pass: where they are stored until then, each once, counted in bytes.

A ``TensorStore`` says where: left where they are (``InPlaceStore``), in host memory (``activations``), or partitioned
over the ranks of an axis (``PartitionedStore``). Wherever it was stored, a fetched tensor has the same values, shape,
strides and device, so that a recomputation selects the same kernels and gives the same bits.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointFunction

from shoal.comm.protocol import Communicator
from shoal.device import backward_pass, in_backward, is_fake
from shoal.errors import UsageError
from shoal.sharding.placement import Tier


class SavedTensor(Protocol):
    """A saved tensor. ``nbytes`` are this rank's bytes of it, on ``tier``."""

    tier: Tier
    nbytes: int


@dataclass(eq=False)
class ForwardCall:
    """One forward call of a checkpointed function or an offloaded block: its saved tensors, in order."""

    number: int
    tensors: list[SavedTensor]


class TensorStore(Protocol):
    """Where saved tensors are stored. Called by one thread at a time; tensors carry no gradient."""

    def begin(self) -> ForwardCall:
        """A forward call begins."""
        ...

    def store(self, tensor: torch.Tensor, call: ForwardCall) -> SavedTensor:
        """Store a tensor that autograd saves in this call."""
        ...

    def fetch(self, saved: SavedTensor, call: ForwardCall) -> torch.Tensor:
        """The saved tensor, for this call's backward pass. May be called again."""
        ...

    def reset(self) -> None:
        """Free what was fetched ahead of its use, and wait for copies under way."""
        ...


@dataclass(frozen=True)
class Form:
    """A tensor's shape in memory. An expanded tensor is its distinct elements: ``compact_size``.

    >>> form = Form.of(torch.zeros(3, 1).expand(3, 4))
    >>> form.compact_size, form.nbytes
    ((3, 1), 12)
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def compact_size(self) -> tuple[int, ...]:
        return tuple(1 if stride == 0 else size for size, stride in zip(self.size, self.stride, strict=True))

    @property
    def numel(self) -> int:
        """Distinct elements."""
        return 0 if 0 in self.size else prod(self.compact_size)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def can_move(self) -> bool:
        """True if each element has an address of its own, so that a copy can have the same strides."""
        span = 1
        for stride, size in sorted((t, s) for t, s in zip(self.stride, self.size, strict=True) if t and s > 1):
            if stride < span:
                return False
            span = stride * (size - 1) + span
        return self.numel > 0

    def compact(self, tensor: torch.Tensor) -> torch.Tensor:
        """The distinct elements of a tensor of this form: a view, of ``compact_size``."""
        for dim, (stride, size) in enumerate(zip(self.stride, self.size, strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor

    def empty(self) -> torch.Tensor:
        """Memory for the distinct elements, with this form's strides. Shape: ``compact_size``."""
        return torch.empty_strided(self.compact_size, self.stride, dtype=self.dtype, device=self.device)

    def expand(self, compact: torch.Tensor) -> torch.Tensor:
        """A tensor of this form from what ``empty`` made."""
        return compact.as_strided(self.size, self.stride)


class InPlaceTensor:
    """The tensor itself.

    Args:
        tier: what it is counted as.
    """

    def __init__(self, tensor: torch.Tensor, tier: Tier) -> None:
        self.tier = tier
        self.nbytes = Form.of(tensor).nbytes if is_plain(tensor) else tensor.numel() * tensor.element_size()
        self._tensor = tensor
        self._version = version_of(tensor)

    def get(self) -> torch.Tensor:
        """Raises: UsageError: it was changed in place since."""
        if version_of(self._tensor) != self._version:
            raise input_changed(self._tensor)
        return self._tensor


class InPlaceStore:
    """Does not move saved tensors."""

    def __init__(self) -> None:
        self._number = 0

    def begin(self) -> ForwardCall:
        self._number += 1
        return ForwardCall(self._number, [])

    def store(self, tensor: torch.Tensor, call: ForwardCall) -> SavedTensor:
        return InPlaceTensor(tensor, Tier.DEVICE)

    def fetch(self, saved: SavedTensor, call: ForwardCall) -> torch.Tensor:
        assert isinstance(saved, InPlaceTensor)
        return saved.get()

    def reset(self) -> None:
        return None


class PartitionedTensor:
    """This rank's range of the bytes of a tensor, stored in another store."""

    def __init__(self, form: Form, part: SavedTensor) -> None:
        self.form = form
        self.part = part
        self.tier: Tier = part.tier
        self.nbytes = part.nbytes


class PartitionedStore:
    """Stores 1/n of each saved tensor on each of the n ranks of an axis; the backward pass gathers it.

    Meant for model parallelism, where the ranks along an axis compute on the same activations. All ranks of the axis
    must have the same values and make the same calls; this is not checked.

    Args:
        inner: stores this rank's parts.

    Communicates: in the backward pass, an all_gather of each saved tensor: (n - 1) / n of its bytes received per rank.
    Memory: ceil(nbytes / n) per saved tensor and rank.
    Source: activation partitioning in ZeRO-R, section 6.1 (arXiv:1910.02054).
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
        values = values[begin : begin + share]
        part = torch.zeros(share, dtype=torch.uint8, device=tensor.device)
        part[: values.numel()].copy_(values)
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


_VIEWS = {
    f"{name}Backward0"
    for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Expand")
}


class ParameterCast:
    """In place of a parameter's values in another dtype, or of a view of them: the parameter, which is cast again.

    The parameter has its values, in memory of the same strides, when they are asked for.
    """

    def __init__(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        self._parameter = parameter
        self._form = Form.of(tensor)
        self._offset = tensor.storage_offset()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ParameterCast | None:
        """None: it is something else."""
        node = tensor.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        if node is None or node.name() != "ToCopyBackward0":
            return None
        parameter = getattr(node.next_functions[0][0], "variable", None)  # of the node that accumulates a gradient
        if not isinstance(parameter, nn.Parameter) or not is_plain(tensor):
            return None
        return cls(parameter, tensor)

    def values(self) -> torch.Tensor:
        values = self._parameter.detach().to(self._form.dtype)
        return values.as_strided(self._form.size, self._form.stride, self._offset)


def saving_parameters() -> AbstractContextManager[object]:
    """A context in which autograd saves a parameter in place of its cast. Other tensors are saved as they are."""

    def pack(tensor: torch.Tensor) -> ParameterCast | tuple[torch.Tensor, int]:
        # Its own graph would keep a tensor alive that is the result of what saves it.
        found = ParameterCast.of(tensor)
        return found or (tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def unpack(saved: ParameterCast | tuple[torch.Tensor, int]) -> torch.Tensor:
        if isinstance(saved, ParameterCast):
            return saved.values()
        tensor, version = saved
        if tensor._version != version:
            raise activation_changed(
                f"a tensor that the backward pass needs was changed in place after autograd saved it ({tensor.dtype}, "
                f"shape {tuple(tensor.shape)})."
            )
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


Packed = tuple[ForwardCall, SavedTensor]


class SavedTensors:
    """The saved tensors of one rank in one store: a tensor that several calls save is stored once.

    What is not plain strided memory (a DTensor, a sparse tensor) stays where it is.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._by_identity: weakref.WeakValueDictionary[Hashable, SavedTensor] = weakref.WeakValueDictionary()
        self._nbytes: Counter[Tier] = Counter()
        self._lock = threading.RLock()  # any thread that frees a graph updates the count, in __del__ too
        self.peak_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of calls whose backward pass has not run yet."""
        return sum(self._nbytes.values())

    def nbytes_by_tier(self) -> dict[Tier, int]:
        return {tier: nbytes for tier, nbytes in self._nbytes.items() if nbytes}

    def begin(self) -> AbstractContextManager[object]:
        """A context in which autograd saves the inputs of one checkpointed call."""
        return torch.autograd.graph.saved_tensors_hooks(*self.hooks())

    def hooks(self) -> tuple[Callable[[torch.Tensor], Packed], Callable[[Packed], torch.Tensor]]:
        """Pack and unpack hooks for one call that begins now."""
        call = self._store.begin()

        def pack(tensor: torch.Tensor) -> Packed:
            # With its graph, which the call holds by other tensors too, it is only freed by a backward pass.
            saved = self._save(tensor if tensor.is_leaf else tensor.detach(), call)
            call.tensors.append(saved)
            return call, saved

        return pack, self._unpack

    def _unpack(self, packed: Packed) -> torch.Tensor:
        call, saved = packed
        return saved.get() if isinstance(saved, InPlaceTensor) else self._store.fetch(saved, call)

    def _save(self, tensor: torch.Tensor, call: ForwardCall) -> SavedTensor:
        if not is_plain(tensor):
            return self._counted(InPlaceTensor(tensor, Tier.DEVICE))
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
        saved = self._by_identity.get(key)
        if saved is None:
            saved = self._by_identity[key] = self._counted(self._store.store(tensor, call), storage)
        return saved

    def _counted(self, saved: SavedTensor, storage: StorageWeakRef | None = None) -> SavedTensor:
        with self._lock:
            self._nbytes[saved.tier] += saved.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        weakref.finalize(saved, self._forget, saved.tier, saved.nbytes, storage).atexit = False
        return saved

    def _forget(self, tier: Tier, nbytes: int, storage: StorageWeakRef | None) -> None:
        with self._lock:
            self._nbytes[tier] -= nbytes

    def reset(self) -> None:
        self._store.reset()


@contextmanager
def counting_saved(parameters: Iterable[torch.Tensor]) -> Iterator[Callable[[], int]]:
    """Count the bytes that autograd saves inside the block: each storage once, those of ``parameters`` left out.

    Yields: a function that returns the count so far.
    """
    left_out = {parameter.untyped_storage()._cdata for parameter in parameters}
    saved: dict[int, tuple[StorageWeakRef, int]] = {}  # a reference, so that no other storage gets the number

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in left_out and storage._cdata not in saved:
            saved[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(nbytes for _, nbytes in saved.values())


def checkpoint_around() -> object | None:
    """What tells apart the functions that ``torch.utils.checkpoint`` recomputes, inside of one; None outside.

    Such a function takes what autograd saves by its order: other hooks for saved tensors would take a part of it, and
    tensors that were computed before the function began are not there in the recomputation.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint" else None


def recomputed_calls() -> Iterator[tuple[object, object | None]]:
    """The calls of ``torch.utils.checkpoint`` around, as far as torch tells.

    Yields: for each, what torch keeps until its backward; and what tells apart its recomputations, None in the forward.
    """
    hook: Any = checkpoint_around()
    variables = {} if hook is None else inspect.getclosurevars(inspect.unwrap(hook)).nonlocals
    if "frame" in variables:
        yield variables["frame"], None
    elif "target_frame_ref" in variables:
        yield variables["target_frame_ref"](), hook
    if torch.is_grad_enabled() and not in_backward():
        return
    forward, backward = CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__  # use_reentrant=True
    caller = inspect.currentframe()
    while caller is not None:
        if caller.f_code in (forward, backward):
            yield caller.f_locals["ctx"], backward_pass() if caller.f_code is backward else None
        caller = caller.f_back


def input_changed(tensor: torch.Tensor) -> UsageError:
    """The error for a saved tensor that was changed."""
    return UsageError(
        f"an input or saved output of a recomputed segment was changed in place after the segment ran ({tensor.dtype}, "
        f"shape {tuple(tensor.shape)}). The recomputation would not give what the forward pass gave.",
        do="write x = x + y instead of x += y for an input of a recomputed segment, or pass x.clone() to it.",
        code="recompute-input-changed",
    )


def activation_changed(what: str) -> UsageError:
    """The error for a tensor that was changed after autograd saved it."""
    do = "write x = x + y instead of x += y for what a later operation reads."
    return UsageError(what, do=do, code="activation-changed")


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place; -1 for one made in inference mode, which is not counted."""
    return -1 if tensor.is_inference() else tensor._version


def is_plain(tensor: torch.Tensor) -> bool:
    """True for strided memory and nothing else (no DTensor, no sparse tensor, no nested one), also in a dry run."""
    is_tensor = type(tensor) is torch.Tensor or is_fake(tensor)
    return is_tensor and tensor.layout is torch.strided and not tensor.is_nested
