"""The accumulator of a gradient: the flat memory that it is summed in, and where that is.

    whole       the whole buffer, with one view per parameter (stages 0 and 1)
    a range     this rank's range of the buffer (stages 2 and 3)
    on host     a range whose sum is in host memory. The next micro-batch is reduced into a *part* on the device, which
                the host adds. Every other access fetches the sum back

Beside a range, ``no_sync`` needs the unsynced gradient: the whole buffer, until a reduction adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shoal.comm.protocol import Work
from shoal.memory.stream_copies import CopyDone
from shoal.sharding.gradient_norm import sums_of_squares
from shoal.sharding.layout import BufferLayout
from shoal.sharding.parameter_buffer import ParameterBuffer
from shoal.sharding.sparse_sum import coalesced
from shoal.sharding.staging import StagingBuffers


class HostGradient(Protocol):
    """The sum of an accumulator that is on the host."""

    def values(self) -> torch.Tensor:
        """Order: blocks the host until all copies and additions are done. Shape: [owned numel]."""
        ...

    def sum_of_squares(self) -> torch.Tensor:
        """Of the values, on the host. Order: as ``values``. Shape: []."""
        ...


class Accumulator:
    """The accumulator of one parameter group.

    Memory: the buffer or the range, from the first access until ``drop`` or ``offload``; of an offloaded one a staging
    buffer that groups share, until it has been copied to the host.
    """

    def __init__(
        self, parameters: ParameterBuffer, staging: StagingBuffers, dtype: torch.dtype, *, is_whole: bool
    ) -> None:
        self.dtype = dtype
        self.is_whole = is_whole
        self.is_offloaded = False  # it moves to the host whenever it has been reduced into
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.part: torch.Tensor | None = None  # reduced, not added to the sum on the host yet
        self.reader: Work | None = None  # the last collective that peers read it for
        self.num_fetches = 0
        self._buffer = parameters
        self._shards = staging.shards
        self._host: HostGradient | None = None  # has the sum, and the device does not
        self._host_version = 0
        self._norm_squared: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        return self._buffer.layout.numel if self.is_whole else self._buffer.end - self._buffer.begin

    def memory(self, *, is_overwritten: bool = False) -> torch.Tensor:
        """The sum, on the device; allocated at the first call, with zeros unless every parameter is overwritten now."""
        self._fetch_back()
        if self.flat is None:
            device = self._buffer.full.device
            if self.is_whole:
                self.flat = self._buffer.comm.empty(self.numel, self.dtype, device)
                self.views = _views_of(self.flat, self._buffer.layout)
            elif self.is_offloaded:
                self.flat = self._shards.acquire(self.numel, self.dtype)
            else:
                self.flat = torch.empty(self.numel, dtype=self.dtype, device=device)
            if not is_overwritten or self._buffer.layout.parameter_numel < self.numel:  # with gaps, which stay zero
                self.flat.zero_()
        return self.flat

    def wait_for_reader(self) -> None:
        """Wait until no peer reads the memory. Waiting for the whole axis would wait for the slowest rank."""
        if self.reader is not None:
            self.reader.drain()
            self.reader = None

    def widen(self, dtype: torch.dtype, *, is_kept: bool) -> None:
        """From now on in another dtype. ``is_kept``: with the values."""
        self._fetch_back()
        self.dtype = dtype
        self.wait_for_reader()
        narrow = self.flat
        self.drop()
        if narrow is not None and is_kept:
            self.memory().copy_(narrow)

    def move(self) -> None:
        """Continue in other memory: the script may keep a view of this one."""
        seen, self.flat = self.flat, None
        if seen is not None:
            self.memory().copy_(seen)

    def drop(self) -> None:
        """Free the device memory."""
        for held in (self.flat, self.part):
            if held is not None and self.is_offloaded:
                self._shards.discard(held)
        self.flat, self.views, self.part = None, [], None

    # on the host

    @property
    def is_on_host(self) -> bool:
        """True if the sum is on the host alone."""
        return self._host is not None

    def new_part(self) -> torch.Tensor:
        """Device memory to reduce into what the host will add. Shape: [owned numel].

        Of a 16-bit sum in fp32, so that it is rounded once.
        """
        self.part = self._shards.acquire(self.numel, torch.promote_types(self.dtype, torch.float32))
        return self.part

    def offload(self, host: HostGradient, copied: CopyDone, *, is_for_step: bool) -> None:
        """Free the device copy of the sum, or of the part. The next access fetches the sum from the host.

        Args:
            host: has the sum from now on.
            copied: the copy to the host; the memory is reused after it.
            is_for_step: the step will ask for the norm, so the device computes it where it has the sum.
        """
        held = self.part if self.part is not None else self.memory()
        self._norm_squared = sums_of_squares([held])[0] if is_for_step and self.part is None else None
        self._host_version = held._version
        self._host, self.flat, self.part = host, None, None
        self._shards.release(held, copied)

    @property
    def host_norm_squared(self) -> torch.Tensor | None:
        """The sum of squares of a sum that is on the host; None: it is on the device. Order: may block the host."""
        if self._host is not None and self._norm_squared is None:
            self._norm_squared = self._host.sum_of_squares().to(self._buffer.full.device)
        return self._norm_squared

    @property
    def host_version(self) -> int | None:
        """The version counter of what was offloaded; None: the sum is on the device."""
        return None if self._host is None else self._host_version

    def forget_host(self) -> None:
        """The sum on the host is of no use any more."""
        self._host = self._norm_squared = None

    def _fetch_back(self) -> None:
        if self._host is not None:
            host = self._host.values()
            self.forget_host()
            self.flat = self._shards.acquire(host.numel(), host.dtype).copy_(host)
            self.num_fetches += 1  # the caller may change the values from now on


class UnsyncedGradient:
    """The whole gradient of passes in ``no_sync``, beside an accumulator that is a range.

    Memory: the whole buffer from the first such pass until the next reduction.
    """

    def __init__(self, layout: BufferLayout, device: torch.device) -> None:
        self.flat: torch.Tensor | None = None  # [numel]
        self._views: list[torch.Tensor] = []
        self._layout = layout
        self._device = device

    def memory(self, dtype: torch.dtype) -> torch.Tensor:
        """It, allocated at the first call."""
        if self.flat is None:
            self.flat = torch.zeros(self._layout.numel, dtype=dtype, device=self._device)
            self._views = _views_of(self.flat, self._layout)
        return self.flat

    def add(self, parameters: Sequence[torch.nn.Parameter], has_grad: bytearray, dtype: torch.dtype) -> None:
        """Add the parameters' gradients."""
        self.memory(dtype)
        take_gradients(parameters, self._views, has_grad, add=True)

    def drop(self) -> None:
        self.flat, self._views = None, []


def _views_of(flat: torch.Tensor, layout: BufferLayout) -> list[torch.Tensor]:
    return [flat[spec.offset : spec.offset + spec.numel].view(spec.shape) for spec in layout.specs]


def take_gradients(
    parameters: Sequence[torch.nn.Parameter], views: Sequence[torch.Tensor], has_grad: bytearray, *, add: bool
) -> None:
    """Move the parameters' gradients into ``views``: add them, or copy them, with zeros for those that are None.

    Args:
        has_grad: set where there was one. One that is the view itself is in its place already.
    """
    targets, gradients = [], []
    for index, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
        gradient = parameter.grad
        if gradient is not None:
            has_grad[index] = 1
            parameter.grad = None
            if gradient is view:
                continue
            if gradient.is_sparse:
                if not add:
                    view.zero_()
                view.add_(coalesced(gradient, view.dtype))
                continue
            targets.append(view)
            gradients.append(gradient)
        elif not add:
            view.zero_()
    if targets and add:
        torch._foreach_add_(targets, gradients)
    elif targets:
        torch._foreach_copy_(targets, gradients)
