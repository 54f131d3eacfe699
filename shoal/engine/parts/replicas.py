"""``debug.replica_check_steps``: every N steps, ranks that hold the same bits compare their sums, twice.

    before the optimizer    what forward and backward have read; the gather after the step would hide a wrong parameter
    after the step          what is saved

    of each parameter, main parameter and state that this rank has in memory   its bits as integers, summed
    of each axis along which ranks hold the same                               one exchange of the sums

A flipped bit, a device that computes wrong, or a kernel whose bits vary shows as another sum on one rank. State on a
disk is not read for it; where every range has one holder (stage 3 without replicas), there is nothing to compare.
Replicas of ``fault_tolerance`` compare theirs themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.comm.protocol import Communicator
from shoal.device import is_fake, read_vector
from shoal.engine.accumulation import Counters
from shoal.engine.parts.part import Part
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import ModelError
from shoal.sharding.encoded_state import EncodedState
from shoal.sharding.layout import Segment
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import Tier
from shoal.text import counted, listed

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck(Part):
    """Compares ranks that hold the same.

    Communicates: every ``steps`` steps two exchanges along each axis with copies: 8 bytes for each tensor.
    Order: the host waits for the device, once for each such axis.
    """

    def __init__(self, sharding: Sharding, properties: Properties, counters: Counters, steps: int) -> None:
        self._sharding = sharding
        self._properties = properties
        self._counters = counters
        self._steps = steps
        self._last_alike = 0

    def before_step(self) -> None:
        """Raises: as ``after_step``."""
        step = self._counters.global_steps + 1
        if step % self._steps == 0:
            self._compare(step)

    def after_step(self) -> None:
        """Raises: ModelError: ranks that should hold the same bits do not."""
        step = self._counters.global_steps
        if step % self._steps == 0:
            self._compare(step)
            self._last_alike = step

    @torch.no_grad()
    def _compare(self, step: int) -> None:
        self._sharding.wait()
        names: dict[Communicator, list[str]] = defaultdict(list)
        sums: dict[Communicator, list[torch.Tensor]] = defaultdict(list)
        for group in self._sharding.model.groups:
            group.synchronize()
            for name, total, is_sharded in _sums(group):
                for comm in _holders(group, is_sharded=is_sharded):
                    names[comm].append(name)
                    sums[comm].append(total)
        device = self._properties.device.torch_device
        rank = torch.tensor(self._properties.rank, dtype=torch.int64, device=device)
        for comm in sorted(names, key=lambda comm: comm.axis):
            mine = torch.stack([rank, *(total.to(device) for total in sums[comm])])
            exchanged = comm.exchange(mine, label="replicas").wait()
            if is_fake(exchanged):
                read_vector(exchanged.flatten(), when_fake=0.0)  # waits as tolist() does
                continue
            ranks, *columns = exchanged.T.tolist()
            differing = {name: column for name, column in zip(names[comm], columns, strict=True) if len({*column}) > 1}
            if differing:
                where = f"step {step}; they were alike after step {self._last_alike}"
                raise DifferingBits("rank", ranks, differing).error(f"the ranks along axis {comm.axis!r}", where)


@dataclass(frozen=True)
class DifferingBits:
    """Holders of the same tensors whose bits are not the same.

    Args:
        noun: rank or replica.
        holders: their numbers.
        differing: the sums of the bits, by holder, of each tensor that differs. Not empty.
    """

    noun: str
    holders: Sequence[int]
    differing: Mapping[str, Sequence[int]]

    @property
    def odd(self) -> list[int]:
        """The holders of other bits than most; all of them where no bits are those of most."""
        column = next(iter(self.differing.values()))
        (usual, count), (_, next_count), *_ = Counter(column).most_common()
        return [who for who, sum_ in zip(self.holders, column, strict=True) if sum_ != usual or count == next_count]

    def error(self, who: str, where: str) -> ModelError:
        name, odd = next(iter(self.differing)), self.odd
        if len(odd) == len(self.holders):
            which = f"{self.noun}s {listed(odd)} do not agree"
        else:
            which = f"{counted(len(odd), self.noun)} of {len(self.holders)} ({listed(odd)}) has others than the rest"
        more = f", and in {counted(len(self.differing) - 1, 'more tensor')}" if len(self.differing) > 1 else ""
        return ModelError(
            f"{who} hold other bits where they should hold the same: in {name}{more}, {which}.",
            where=where,
            do=f"test the device and memory of that {self.noun}, or set torch.use_deterministic_algorithms(True) if a"
            " kernel's bits vary; continue from a checkpoint of before.",
            code="replicas-differ",
        )


@torch.no_grad()
def sums_of_bits(sharding: Sharding, device: torch.device) -> dict[str, int]:
    """The sum of the bits of each tensor that this rank has in memory. The host waits for the device."""
    sharding.wait()
    sums: dict[str, torch.Tensor] = {}
    for group in sharding.model.groups:
        group.synchronize()
        sums.update({name: total.to(device) for name, total, _ in _sums(group)})
    return dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}


def _holders(group: ParameterGroup, *, is_sharded: bool) -> Iterator[Communicator]:
    """The axes along which ranks hold the same range."""
    axes = group.axes
    if not is_sharded:
        yield axes.comms.get(axes.shard, axes.data) if axes.is_apart else axes.data
    elif axes.replicate is not None and not axes.is_apart:
        yield axes.replicate
    yield from axes.copies
    yield from axes.across


def _sums(group: ParameterGroup) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Of each tensor in memory: its name, the sum of its bits (int64, shape []), and whether this is a range of it."""
    buffer, layout = group.buffer, group.buffer.layout
    owned = layout.segments_in(buffer.begin, buffer.end)
    if buffer.storage.tier is not Tier.DISK:
        begin, end = (buffer.begin, buffer.end) if buffer.is_sharded else (0, layout.numel)
        for name, part in _parts(group, buffer.stored_values, layout.segments_in(begin, end)):
            yield f"parameter {name!r}", _sum(part), buffer.is_sharded
    if not group.is_trained or group.disk is not None:
        return
    is_range = buffer.owned.is_sharded
    if group.has_own_main:
        for name, part in _parts(group, group.main, owned):
            yield f"main parameter {name!r}", _sum(part), is_range
    for each, key, value in group.stored_state():
        if isinstance(value, EncodedState):
            yield f"{key} from {layout.specs[each.segments[0].slot].name!r} on", _sum(value.memory), is_range
        else:
            for name, part in _parts(group, value, each.segments):
                yield f"{key} of {name!r}", _sum(part), is_range


def _parts(
    group: ParameterGroup, values: torch.Tensor, segments: tuple[Segment, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """By name what lies between the gaps. ``values``: [numel]."""
    flat = values.view(-1)
    for segment in segments:
        yield group.buffer.layout.specs[segment.slot].name, flat[segment.start : segment.stop]


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
