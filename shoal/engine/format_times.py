"""What formats cost in time: at start-up one gather is timed as it is and encoded, and the log says which is faster."""

from __future__ import annotations

import torch

from shoal.comm.encoded import gather_milliseconds
from shoal.comm.formats import WireFormat
from shoal.device import Device, is_fake
from shoal.running.runtime import ShardedModel
from shoal.sharding.param_group import ParameterGroup
from shoal.streams import simulation

_MOST_NUMEL = 1 << 22  # elements that are gathered, at most
_SLOWER = 1.1  # times the plain gather, from which it is said
_LEAST = 0.1  # milliseconds that are worth a line


def format_notes(sharded: ShardedModel, device: Device) -> list[str]:
    """A note where this link is so fast that sending fewer bits takes longer. It changes nothing.

    Communicates: where a format is set, six all_gathers of up to 4 Mi elements, in size that of the largest group.
    Memory: what they gather, until the return. Order: blocks the host.
    """
    sent = [(group, found) for group in sharded.groups if (found := _format_of(group)) is not None]
    if not sent or simulation() is not None or is_fake(sent[0][0].buffer.full):
        return []
    group, form = max(sent, key=lambda each: each[0].buffer.layout.numel)
    buffer = group.buffer
    numel = min(buffer.layout.numel, _MOST_NUMEL) // buffer.comm.size * buffer.comm.size
    full = torch.zeros(numel, dtype=buffer.dtype, device=buffer.device)
    plain, coded = (gather_milliseconds(buffer.comm, full, each, device.synchronize) for each in (None, form))
    if coded <= _SLOWER * plain + _LEAST:
        return []
    return [
        f"wire: on this link a gather of {numel:,} elements takes {plain:.2f} ms as they are and {coded:.2f} ms as"
        f" {form.name}: the format costs more time than it saves."
    ]


def _format_of(group: ParameterGroup) -> WireFormat | None:
    """The format along the axis that shards the group; None: it is sent as it is."""
    sent, shard = group.row.sent, group.axes.shard
    formats = [*([] if sent.gather is None else [(shard, sent.gather)]), *sent.reduce]
    return next((form for axis, form in formats if axis == shard), None)
