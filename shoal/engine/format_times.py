"""What formats cost in time: at start-up one gather is timed as it is and encoded, and the log says which is faster."""

from __future__ import annotations

import torch

from shoal.comm.formats import WireFormat
from shoal.comm.wire import Wire
from shoal.device import Device, is_fake
from shoal.observe.collectives import timed
from shoal.running.runtime import ShardedModel
from shoal.sharding.buffer import Axis
from shoal.sharding.param_group import ParameterGroup
from shoal.streams import simulation

_MOST_NUMEL = 1 << 22  # elements that are gathered, at most
_TRIES = 3
_SLOWER = 1.1  # times the plain gather, from which it is said
_LEAST = 0.1  # milliseconds that are worth a line


def format_notes(sharded: ShardedModel, device: Device) -> list[str]:
    """A note where this link is so fast that sending fewer bits takes longer. It changes nothing.

    Communicates: where a format is set, six all_gathers of up to 4 Mi elements, in size that of the largest group.
    Memory: what they gather, until the return. Order: blocks the host.
    """
    sent = [(group, *found) for group in sharded.groups if (found := _format_of(group)) is not None]
    if not sent or simulation() is not None or is_fake(sent[0][0].buffer.full):
        return []
    group, name, form = max(sent, key=lambda each: each[0].buffer.layout.numel)
    axis, buffer = group.buffer.axes[name], group.buffer
    numel = min(buffer.layout.numel, _MOST_NUMEL) // buffer.comm.size * buffer.comm.size
    full = torch.zeros(numel, dtype=buffer.dtype, device=buffer.device)
    plain, coded = (_milliseconds(axis, full, device, wire) for wire in (None, Wire(form)))
    if coded <= _SLOWER * plain + _LEAST:
        return []
    return [
        f"wire: on this link a gather of {numel:,} elements takes {plain:.2f} ms as they are and {coded:.2f} ms as"
        f" {form.name}: the format costs more time than it saves."
    ]


def _format_of(group: ParameterGroup) -> tuple[str, WireFormat] | None:
    """A format of the group, and the axis along which it is sent; None: it is sent as it is, or has one rank."""
    sent, shard = group.row.sent, group.axes.shard
    formats = [*([] if sent.gather is None else [(shard, sent.gather)]), *sent.reduce]
    return next(((axis, form) for axis, form in formats if axis == shard and axis in group.buffer.axes), None)


def _milliseconds(axis: Axis, full: torch.Tensor, device: Device, wire: Wire | None) -> float:
    """The shortest of some gathers."""
    return min(
        timed(device, lambda: axis.all_gather(full, label="time of a format", wire=wire), lambda work: work.drain())[1]
        for _ in range(_TRIES)
    )
