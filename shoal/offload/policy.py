"""Which tier each unit's parameters and optimizer state are stored on: arithmetic, the same on every rank.

Two ways to decide: ``from_config`` follows the file's keys (device, ``ratio``, ``max_in_cpu``), ``fit_to_memory`` takes
what is free, the device first, then the host, then the disk.

Where not all units fit, the first in forward stay on the nearer tier. Their gradients arrive last in backward, so a CPU
optimizer that updates during backward would have the least time for them; the next forward waits for their parameters
first; and while they compute, those of later units are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.errors import OutOfMemoryError
from shoal.sharding.memory_model import UnitMemory
from shoal.sharding.placement import Tier
from shoal.text import counted, format_bytes

ACTIVATION_SHARE = 0.3  # of the device's free memory, kept for activations and what the allocator cannot use
HOST_SHARE = 0.1  # of the host's, kept for everything else that runs there


@dataclass(frozen=True)
class Tiers:
    """The tiers of one unit."""

    parameter: Tier = Tier.DEVICE
    state: Tier = Tier.DEVICE


Decide = Callable[[Sequence[UnitMemory]], Sequence[Tiers]]


def from_config(
    sizes: Sequence[UnitMemory], parameter: Tier, state: Tier, *, ratio: float = 1.0, max_host_numel: int = 0
) -> list[Tiers]:
    """The tiers that the file names.

    Args:
        ratio: share of the trained elements whose state is stored on ``state``; of the first units in forward it
            stays on the device, as long as that is at most ``1 - ratio`` of all (DeepSpeed's ZeRO-Offload++,
            "Twin-Flow").
        max_host_numel: elements of this rank's parameters that stay in host memory though ``parameter`` is the disk.
    """
    kept = (1 - ratio) * sum(size.trained_numel for size in sizes)
    on_host_numel = 0
    tiers = []
    for size in sizes:
        parameter_tier, state_tier = parameter, state
        if parameter is Tier.DISK and size.can_move_parameters and on_host_numel + size.stored_numel <= max_host_numel:
            on_host_numel += size.stored_numel
            parameter_tier = Tier.HOST
        if state is not Tier.DEVICE and 0 < size.trained_numel <= kept:
            kept -= size.trained_numel
            state_tier = Tier.DEVICE
        tiers.append(Tiers(parameter_tier if size.can_move_parameters else Tier.DEVICE, state_tier))
    return tiers


@dataclass(frozen=True)
class Free:
    """Bytes that one rank may take. ``host``: in addition to the device's; 0 where they are the same memory.

    ``disk``: None: there is none to be used.
    """

    device: int
    host: int
    disk: int | None = None

    def least(self, other: Free) -> Free:
        """What both have."""
        disks = [disk for disk in (self.disk, other.disk) if disk is not None]
        is_none = self.disk is None or other.disk is None
        return Free(min(self.device, other.device), min(self.host, other.host), None if is_none else min(disks))


@dataclass(frozen=True)
class FittedTiers:
    """What ``fit_to_memory`` decided, and from which numbers."""

    tiers: tuple[Tiers, ...]
    free: Free
    activation_nbytes: int
    gathered_nbytes: int
    gradient_nbytes: int
    used: tuple[tuple[Tier, int], ...]

    def __str__(self) -> str:
        words = []
        for kind in ("parameter", "state"):
            count = Counter(getattr(tiers, kind) for tiers in self.tiers)
            words.append(
                f"{'parameters' if kind == 'parameter' else 'optimizer state'} of "
                + ", ".join(f"{count[tier]} on the {tier.value}" for tier in Tier if count[tier])
            )
        used = dict(self.used)
        free = [(Tier.DEVICE, self.free.device), (Tier.HOST, self.free.host), (Tier.DISK, self.free.disk)]
        rooms = [
            f"{tier.value} {format_bytes(used.get(tier, 0))} of {format_bytes(nbytes)}"
            for tier, nbytes in free
            if nbytes
        ]
        return (
            f"offload auto, {counted(len(self.tiers), 'unit')}: {'; '.join(words)}. Taken on each rank of what the "
            f"fullest one has free: {', '.join(rooms)}. Kept on the device: {format_bytes(self.activation_nbytes)} for "
            f"activations, {format_bytes(self.gathered_nbytes)} for two gathered units, "
            f"{format_bytes(self.gradient_nbytes)} for gradients"
        )


def fit_to_memory(sizes: Sequence[UnitMemory], free: Free) -> FittedTiers:
    """Fill the device, then the host, then the disk.

    Kept free on the device: ``ACTIVATION_SHARE`` of it, the two largest units gathered, all gradients and two of the
    largest whole ones on their way. Parameters come before state: a byte of theirs on another tier is moved at least
    twice a step, in forward and in backward; a byte of state less than once.

    Raises: OutOfMemoryError: they do not fit, with what is needed and what there is.
    """
    activations = int(ACTIVATION_SHARE * free.device)
    gathered = sum(sorted((size.gathered_nbytes for size in sizes), reverse=True)[:2])
    gradients = sum(size.gradient_nbytes for size in sizes) + 2 * max((size.reduce_nbytes for size in sizes), default=0)
    room = {
        Tier.DEVICE: free.device - activations - gathered - gradients,
        Tier.HOST: int((1 - HOST_SHARE) * free.host),
        Tier.DISK: free.disk or 0,
    }
    used: Counter[Tier] = Counter()
    parameters: dict[int, Tier] = {}  # by position
    states: dict[int, Tier] = {}

    def fits(tier: Tier, nbytes: int) -> bool:
        if room[tier] - used[tier] < nbytes:
            return False
        used[tier] += nbytes
        return True

    def refuse(size: UnitMemory, what: str, nbytes: int) -> OutOfMemoryError:
        left = ", ".join(f"{tier.value} {format_bytes(max(0, room[tier] - used[tier]))}" for tier in Tier)
        total = sum(s.parameter_nbytes + s.state_nbytes for s in sizes)
        return OutOfMemoryError(
            f"offload auto finds no room for the {what} of unit {size.name!r}: {format_bytes(nbytes)} are "
            f"needed, left are {left}. All parameters and state of a rank take {format_bytes(total)}; activations keep "
            f"{format_bytes(activations)} of the device, two gathered units {format_bytes(gathered)}, gradients "
            f"{format_bytes(gradients)}.",
            do="name a folder on a local disk (zero_optimization.offload_param.nvme_path), free space there, or train "
            "on more ranks.",
            code="offload-auto-no-room",
        )

    def put(size: UnitMemory, what: str, nbytes: int, *, can_move: bool) -> Tier:
        tiers = [Tier.HOST] * (free.host > 0) + [Tier.DISK] * (free.disk is not None)
        for tier in tiers if can_move else []:
            if fits(tier, nbytes):
                return tier
        raise refuse(size, what, nbytes)

    for index, size in enumerate(sizes):
        if fits(Tier.DEVICE, size.parameter_nbytes):
            parameters[index] = Tier.DEVICE
    for index, size in enumerate(sizes):
        if fits(Tier.DEVICE, size.state_nbytes if index in parameters else size.offloaded_state_nbytes):
            states[index] = Tier.DEVICE
    for index, size in enumerate(sizes):  # also where its state is on the disk
        if index not in states and free.host > 0 and not fits(Tier.HOST, size.transfer_nbytes):
            raise refuse(size, "optimizer state", size.transfer_nbytes)
    for index, size in enumerate(sizes):
        if index not in parameters:
            nbytes = size.parameter_nbytes
            parameters[index] = put(size, "parameters", nbytes, can_move=size.can_move_parameters)
    for index, size in enumerate(sizes):
        if index not in states:
            states[index] = put(size, "optimizer state", size.offloaded_state_nbytes, can_move=size.can_move_state)
    tiers = tuple(Tiers(parameters[index], states[index]) for index in range(len(sizes)))
    return FittedTiers(tiers, free, activations, gathered, gradients, tuple(used.items()))
