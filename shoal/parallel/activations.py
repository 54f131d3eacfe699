"""Saved tensors in host memory: copied out while the forward pass goes on, fetched one call ahead of the backward pass.

    forward    call 0      call 1      call 2      call 3
    copies     [0 to host] [1 to host] [2 to host] [3 to host]
    backward                                                   call 3        call 2        call 1        call 0
    copies                                                                   [1 to device] [0 to device]

A call that begins waits, on the device, for the copies of the call before the last one, and frees their sources. So
the device holds the saved tensors of two calls, however many there are, and those of the last two are used without a
copy. In the backward pass it holds those of the running call and of the one before it.

A call is a recomputed segment (``segment``), of which the inputs are saved; or with ``HostActivations`` (activation
offload) a block of the model, of which all activations are saved and nothing is recomputed. Tensors saved outside of
blocks, and parameters, stay on the device. A recomputed block, or a block inside of a recomputed function, saves the
function's inputs only, in the store that ``activation_checkpointing`` names. Of a compiled block, what its graph saves
is stored.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn

from shoal.compiler import untraced
from shoal.device import in_backward
from shoal.errors import UsageError
from shoal.memory.stream_copies import copies_of as stream_copies_of
from shoal.parallel.recompute_blocks import RecomputedBlocks, find_blocks
from shoal.parallel.saved_tensors import (
    Form,
    ForwardCall,
    InPlaceTensor,
    Packed,
    ParameterCast,
    PartitionedTensor,
    SavedTensor,
    SavedTensors,
    activation_changed,
    checkpoint_around,
    input_changed,
    is_plain,
    version_of,
)
from shoal.sharding.placement import Tier

LEAST_NBYTES = 4096  # a smaller tensor costs more to copy than it saves


class Done(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Make the current stream wait for the copy. Does not block the host."""
        ...


class Copies(Protocol):
    """Copies between one device and the host, in order, while the device computes."""

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, Done]:
        """Start a copy. The caller keeps ``source`` until it is done.

        Returns: host memory of the same shape and dtype, contiguous; its values are there when the copy is done.
        """
        ...

    def to_device(self, host: torch.Tensor, target: torch.Tensor) -> Done:
        """Start a copy into ``target``, which the caller keeps until it is done."""
        ...


CopiesOf = Callable[[torch.device], Copies | None]


class HostTensor:
    """A saved tensor in host memory, with its device copy before it has left and after it was fetched."""

    tier = Tier.HOST

    def __init__(self, source: torch.Tensor, copies: Copies, call: ForwardCall) -> None:
        self._source: torch.Tensor | None = None  # until it is copied
        self._changed: UsageError | None = None
        self._fetched: tuple[torch.Tensor, Done | None] | None = None  # Done is None once it was waited for
        self.form = Form.of(source)
        self.nbytes = self.form.nbytes
        self.number = call.number
        self._version = version_of(source)
        self._copies = copies
        self._host, self._copied = copies.to_host(self.form.compact(source))
        self._source = source

    def release_source(self) -> None:
        """Free the device memory of the source once the copy to the host is done."""
        if self._source is None:
            return
        self._copied.wait()
        if version_of(self._source) != self._version:
            self._changed = input_changed(self._source)  # perhaps before it was copied
        self._source = None

    def prefetch(self) -> None:
        """Start the copy to the device, unless the values are there."""
        if self._source is None and self._fetched is None:
            target = self.form.empty()
            self._fetched = target, self._copies.to_device(self._host, target)

    def get(self) -> torch.Tensor:
        """Raises: UsageError: it was changed in place before it was copied."""
        if self._source is not None and version_of(self._source) != self._version:
            raise input_changed(self._source)
        if self._changed is not None:
            raise self._changed
        if self._source is not None:
            return self._source
        self.prefetch()
        assert self._fetched is not None
        target, done = self._fetched
        if done is not None:
            done.wait()
            self._fetched = target, None
        return self.form.expand(target)

    def __del__(self) -> None:
        # The graph may be freed while a copy is under way: later uses of the memory must wait for the copy.
        if sys.is_finalizing():
            return
        if self._source is not None:
            self._copied.wait()
        self.release_fetched()

    def release_fetched(self) -> None:
        """Free the device memory of the fetched values."""
        if self._fetched is not None and self._fetched[1] is not None:
            self._fetched[1].wait()  # else the copy would write into the memory's next use
        self._fetched = None


class HostStore:
    """Stores saved tensors in host memory. Those of a CPU are there already: no copy, counted as the host's.

    Args:
        copies_of: makes the copies of a device; None for a device whose memory is the host's.
    """

    def __init__(self, copies_of: CopiesOf) -> None:
        self._copies_of = cache(copies_of)
        self._number = 0
        self._calls: weakref.WeakValueDictionary[int, ForwardCall] = weakref.WeakValueDictionary()
        self._leaving: deque[weakref.ref[HostTensor]] = deque()
        self._running: weakref.ref[ForwardCall] | None = None  # the call fetched last
        self._ahead: weakref.ref[ForwardCall] | None = None  # the call that is expected next

    def begin(self) -> ForwardCall:
        self._number += 1
        self._release_sources(before=self._number - 1)
        call = ForwardCall(self._number, [])
        self._calls[self._number] = call
        return call

    def _release_sources(self, before: int) -> None:
        """Free the device memory of what calls before number ``before`` copied to the host."""
        while self._leaving:
            saved = self._leaving[0]()
            if saved is not None:
                if saved.number >= before:
                    return
                saved.release_source()
            self._leaving.popleft()

    def store(self, tensor: torch.Tensor, call: ForwardCall) -> SavedTensor:
        copies = self._copies_of(tensor.device)
        if copies is None:
            return InPlaceTensor(tensor, Tier.HOST)
        if not Form.of(tensor).can_move:
            return InPlaceTensor(tensor, Tier.DEVICE)
        saved = HostTensor(tensor, copies, call)
        self._leaving.append(weakref.ref(saved))
        return saved

    def fetch(self, saved: SavedTensor, call: ForwardCall) -> torch.Tensor:
        assert isinstance(saved, HostTensor)
        if self._running is None or self._running() is not call:
            self._running = weakref.ref(call)
            for each in _on_host(call):
                each.prefetch()
        tensor = saved.get()
        previous = self._before(call)
        self._prefetch(previous, call)
        if not _is_in(saved, previous):
            saved.release_fetched()
        return tensor

    def _before(self, call: ForwardCall) -> ForwardCall | None:
        """The call before this one in the forward pass, of those whose backward pass is still to come."""
        return self._calls.get(max((number for number in self._calls if number < call.number), default=0))

    def _prefetch(self, coming: ForwardCall | None, running: ForwardCall) -> None:
        last = self._ahead() if self._ahead is not None else None
        if last is coming and coming is not None:
            return
        if last is not None and last is not running:
            for each in _on_host(last):  # another call came next
                if not _is_in(each, running) and not _is_in(each, coming):
                    each.release_fetched()
        self._ahead = weakref.ref(coming) if coming is not None else None
        if coming is not None:
            for each in _on_host(coming):
                each.prefetch()

    def reset(self) -> None:
        self._release_sources(before=self._number + 1)
        last = self._ahead() if self._ahead is not None else None
        for each in _on_host(last) if last is not None else ():
            each.release_fetched()
        self._ahead = None


def _on_host(call: ForwardCall) -> list[HostTensor]:
    parts = (saved.part if isinstance(saved, PartitionedTensor) else saved for saved in call.tensors)
    return [part for part in parts if isinstance(part, HostTensor)]


def _is_in(saved: HostTensor, call: ForwardCall | None) -> bool:
    return call is not None and any(saved is other for other in _on_host(call))


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
        only: modules that another object runs through this one, in place of the model's blocks.
        copies_of: makes the copies between a device and the host.

    Memory: on the device the activations of two blocks; on the host those of all.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str] = (),
        *,
        max_nbytes: int | None = None,
        only: Mapping[str, nn.Module] | None = None,
        copies_of: CopiesOf = stream_copies_of,
    ) -> None:
        self._store = _LimitedHostStore(copies_of, max_nbytes)
        self._saved = SavedTensors(self._store)
        self._seen: set[str] = set()
        self._modules = only or find_blocks(model, blocks) or dict(_parts(model, ""))
        self._blocks = RecomputedBlocks({} if only else dict(self._modules), self)

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

    @partial(untraced, recursive=False)  # the block itself is compiled
    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``; the tensors that autograd saves are stored on the host."""
        with self._storing(name):
            return function(*args, **kwargs)

    @untraced
    def _storing(self, name: str) -> AbstractContextManager[None]:
        if not torch.is_grad_enabled() or in_backward() or checkpoint_around() is not None:
            return nullcontext()  # nothing is saved, or not by these hooks
        if name in self._seen:  # another forward pass
            self._seen.clear()
            self._store.num_moved_nbytes = 0
        self._seen.add(name)
        pack, unpack = self._saved.hooks()
        parameters = {parameter.untyped_storage()._cdata for parameter in self._modules[name].parameters()}

        def pack_activation(tensor: torch.Tensor) -> Packed | ParameterCast | torch.Tensor:
            if is_plain(tensor) and tensor.untyped_storage()._cdata in parameters:
                return tensor
            return ParameterCast.of(tensor) or pack(tensor)

        def unpack_activation(packed: Packed | ParameterCast | torch.Tensor) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            if isinstance(packed, ParameterCast):
                return packed.values()
            try:
                return unpack(packed)
            except UsageError as error:
                raise activation_changed(
                    f"an activation of {name!r} was changed in place after autograd saved it: {error.what}"
                ) from None

        return torch.autograd.graph.saved_tensors_hooks(pack_activation, unpack_activation)


def _parts(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The modules that the model calls one after the other, lists gone into."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        parts += _parts(child, f"{path}{name}.") if is_container else [(f"{path}{name}", child)]
    return parts
