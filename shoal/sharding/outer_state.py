"""What replicas that take steps of their own keep of a parameter group, and how they are synchronised.

    anchor      the parameters after the last synchronisation; the same on all replicas
    momentum    of the outer SGD; the same on all replicas
    error       what the format of outer gradients has lost on this rank, with error feedback

    gradient    the mean over the replicas of anchor - main parameters
    momentum    outer_momentum * momentum + gradient
    anchor      anchor - outer_lr * (gradient + outer_momentum * momentum), with Nesterov's momentum
    main parameters = anchor

All have this rank's owned range, in fp32. Sources: DiLoCo (arXiv:2311.08105), algorithm 1; fewer bits with error
feedback, Streaming DiLoCo (arXiv:2501.18512), section 2.3.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from shoal.comm.formats import WireFormat
from shoal.comm.wire import Wire
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.copied_gather import HostStorage
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import PARTIAL, SHARD, Placement, Tier
from shoal.sharding.storage import DeviceStorage

_ANCHOR, _MOMENTUM, _ERROR = OUTER = ("outer_anchor", "outer_momentum", "outer_error")  # kinds in a checkpoint


@dataclass(frozen=True)
class OuterSgd:
    """The outer optimizer, and how outer gradients are sent.

    Args:
        wire: the format; None: fp32.
        has_error: what it loses is added to the next outer gradient.
    """

    lr: float
    momentum: float
    nesterov: bool
    wire: WireFormat | None = None
    has_error: bool = False


class OuterState:
    """One parameter group's, a ``KeptState``.

    Args:
        axis: along which the replicas are.

    Memory: two, with error feedback three, values in fp32 for each element of the owned range, in the memory that
        updates the group; of state on a disk in host memory.
    """

    kind = "outer state"

    def __init__(self, group: ParameterGroup, sgd: OuterSgd, axis: str) -> None:
        self.group, self._sgd, self._axis = group, sgd, axis
        comm = group.axes.replicate
        self._axes = {} if comm is None else {axis: comm.blocking}
        self._num_replicas = 1 if comm is None else comm.size
        self._rank = 0 if comm is None else comm.rank
        self._loaded: frozenset[str] = frozenset()
        kinds = OUTER if sgd.has_error and comm is not None else (_ANCHOR, _MOMENTUM)
        with group.resident():
            anchor = group.main.to(torch.promote_types(group.main.dtype, torch.float32), copy=True)
        self._buffers = {kind: self._buffer(anchor if kind is _ANCHOR else torch.zeros_like(anchor)) for kind in kinds}

    def _buffer(self, values: torch.Tensor) -> FlatBuffer:
        group, buffer = self.group, self.group.buffer
        is_on_host = group.row.state.tier is not Tier.DEVICE
        stored = group.row.state.on(Tier.HOST if is_on_host else Tier.DEVICE)
        made = FlatBuffer(buffer.label, buffer.layout, values.dtype, values.device, buffer.comm, {}, stored)
        made.store(values, HostStorage if is_on_host else DeviceStorage)
        return made

    @property
    def buffers(self) -> tuple[FlatBuffer, ...]:
        return tuple(self._buffers.values())

    def _values(self, kind: str) -> torch.Tensor:
        return self._buffers[kind].stored_values

    def _mean(self, values: torch.Tensor, wire: Wire | None = None) -> None:
        """Set 1-D values, in whatever memory, to the mean over the replicas."""
        if not self._axes:
            return
        buffer = self.group.buffer
        sent = values.to(buffer.device, torch.promote_types(values.dtype, torch.float32))
        range_of_buffer = {self.group.axes.shard: SHARD}
        summed = FlatBuffer(
            buffer.label,
            buffer.layout,
            sent.dtype,
            buffer.device,
            buffer.comm,
            self._axes,
            Placement.of(**range_of_buffer, **{self._axis: PARTIAL}),
            storage=DeviceStorage(sent),
        )
        wires = None if wire is None else {self._axis: wire}
        summed.redistribute(Placement.of(**range_of_buffer), scale=1 / self._num_replicas, wire=wires).wait()
        if sent is not values:
            values.copy_(sent)

    def _mean_encoded(self, gradient: torch.Tensor, format: WireFormat) -> None:
        """As ``_mean``, in a format; what it loses is added to the error."""
        group, numel = self.group, gradient.numel()
        padding = (0, -numel % self._num_replicas)  # so that each replica sums a part of one size
        sent = torch.nn.functional.pad(gradient.to(group.buffer.device), padding)
        error = self._buffers.get(_ERROR)
        if error is None:
            self._mean(sent, Wire(format))
        else:
            lost = torch.nn.functional.pad(error.stored_values.to(sent.device), padding)
            later = lost.new_zeros(len(lost) // self._num_replicas)
            self._mean(sent, Wire(format, error=lost, second_error=later))
            # What the sum has lost is added to this rank's summand, of which it will be one part in so many.
            lost[self._rank * len(later) :][: len(later)].add_(later, alpha=self._num_replicas)
            error.stored_values.copy_(lost[:numel])
        gradient.copy_(sent[:numel])
        group.gradient.sent.clear_gaps(gradient, group.buffer.begin)  # of what decoding has left there

    @torch.no_grad()
    def synchronize(self) -> None:
        """Take a step of the outer SGD. Every replica calls, after the step before has ended.

        Communicates: an all_reduce of the owned range over the replicas, in fp32 or encoded; then as ``publish``.
        Memory: the owned range in fp32, with a format three times, on the device.
        """
        group, sgd = self.group, self._sgd
        group.buffer.wait_for_peers()
        with group.resident():
            gradient = self._values(_ANCHOR) - group.main
            if sgd.wire is None or not self._axes:
                self._mean(gradient)
            else:
                self._mean_encoded(gradient, sgd.wire)
            self._step(gradient)
        group.publish()

    def _step(self, gradient: torch.Tensor) -> None:
        group, sgd = self.group, self._sgd
        anchor, momentum = self._values(_ANCHOR), self._values(_MOMENTUM)
        momentum.mul_(sgd.momentum).add_(gradient)
        change = gradient.add_(momentum, alpha=sgd.momentum) if sgd.nesterov else momentum
        anchor.add_(change, alpha=-sgd.lr)
        group.main.copy_(anchor)

    @torch.no_grad()
    def outer_gradient(self) -> torch.Tensor:
        """This replica's own. Shape: [owned numel]."""
        with self.group.resident():
            return self._values(_ANCHOR) - self.group.main

    @torch.no_grad()
    def apply(self, gradient: torch.Tensor) -> None:
        """Take a step of the outer SGD with a mean that was formed elsewhere. Communicates: as ``publish``."""
        self.group.buffer.wait_for_peers()
        with self.group.resident():
            self._step(gradient.to(self._values(_ANCHOR).device))
        self.group.publish()

    # to and from a checkpoint

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        return {kind: self._values(kind) for kind in self._buffers}

    @torch.no_grad()
    def share(self) -> None:
        """Give all replicas the mean of their parameters, optimizer states and errors. Anchor and momentum stay.

        The mean over the replicas of anchor - main parameters, and of the errors, stays the same. So a checkpoint has
        one value for each element, which any number of replicas loads, and a run that is continued from it has the
        bits of the one that went on.

        Communicates: an all_reduce of the owned range for the parameters, each optimizer state and the error.
        """
        if not self._axes:
            return
        group = self.group
        group.buffer.wait_for_peers()
        with group.resident():
            self._mean(group.main)
            for _, _, values in group.elementwise_state():
                self._mean(values)
            if _ERROR in self._buffers:
                self._mean(self._values(_ERROR))
                group.gradient.sent.clear_gaps(self._values(_ERROR), group.buffer.begin)
        group.publish()

    def expect(self, keys: Collection[str]) -> None:
        self._loaded = frozenset(keys) & self._buffers.keys()

    @torch.no_grad()
    def restore(self) -> None:
        """Go on with what was loaded. Without an anchor a round begins at the parameters; others start from zero.

        Communicates: without an anchor, a broadcast of the first replica's main parameters, since what was not loaded
            may differ; then as ``publish``.
        """
        loaded, self._loaded = self._loaded, frozenset()
        group = self.group
        if _ANCHOR not in loaded:
            with group.resident():
                main = group.main.to(group.buffer.device)
                for comm in self._axes.values():
                    comm.broadcast(main, 0, label=group.label)
                group.main.copy_(main)
                self._values(_ANCHOR).copy_(main)
            group.publish()
        for kind in self._buffers.keys() - loaded - {_ANCHOR}:
            self._values(kind).zero_()
