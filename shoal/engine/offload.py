"""Offload at start-up: measure free memory, choose the tier of each unit, open the disks.

1  every rank   measures its device, its share of its host, its share of the disk    (``offload: "auto"`` only)
2  all ranks    exchange the numbers and take the least of each, so all choose the same tiers
3  every rank   opens its folders and reserves room; if one rank finds none, all raise
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.device import Device, is_fake
from shoal.engine.settings import Properties
from shoal.errors import OutOfMemoryError, ShoalError, TierError
from shoal.memory.disk import DiskTier, UnwrittenDisk
from shoal.memory.disk_store import DiskStore
from shoal.memory.host import host_available_nbytes, host_too_small
from shoal.memory.transfer import free_nbytes
from shoal.offload.disk_state import DiskOptimizerState, Disks
from shoal.offload.policy import FittedTiers, Free, Tiers, fit_to_memory
from shoal.sharding.memory_model import UnitMemory
from shoal.sharding.placement import Tier


def measure(device: Device, *, is_host_separate: bool, num_ranks_here: int, path: str | None) -> Free:
    """The free memory that one of ``num_ranks_here`` ranks of this host may use.

    Args:
        is_host_separate: False: the device computes in host memory, so it has none of its own.
    """
    host = host_available_nbytes() // num_ranks_here
    disk = free_nbytes(path) // num_ranks_here if path is not None else None
    if not is_host_separate:
        return Free(host, 0, disk)
    return Free(device.free_nbytes() if device.is_cuda else host, host, disk)


class Offload:
    """Chooses the tiers of one engine's units, and opens its disks.

    Args:
        num_ranks_here: ranks on this rank's host.
    """

    def __init__(self, model: nn.Module, properties: Properties, num_ranks_here: int) -> None:
        self._model = model
        self._config = properties.config
        self._zero = properties.plan.zero
        self._itemsize = (properties.plan.precision.parameter or torch.float32).itemsize
        self._comm = properties.axes.world
        self._device = properties.device
        self._rank = properties.rank
        self._is_host_separate = self._zero.has_separate_host(self._device.torch_device)
        self.num_ranks_here = num_ranks_here
        self._moves_no_parameter = False
        self.fitted: FittedTiers | None = None

    def decide(self, sizes: Sequence[UnitMemory]) -> Sequence[Tiers]:
        """The tiers of the units.

        Raises: OutOfMemoryError: the host is too small for them, or ``auto`` finds no room; on every rank.
        Communicates: with ``auto`` three numbers; on an accelerator whether host memory suffices.
        """
        if self._config.offload != "auto":
            tiers = self._zero.tiers(sizes)
            self._moves_no_parameter = not any(size.can_move_parameters for size in sizes)
            self._check_host(sizes, tiers)
            return tiers
        free = self._free()
        self.fitted = fit_to_memory(sizes, free)
        return self.fitted.tiers

    def _check_host(self, sizes: Sequence[UnitMemory], tiers: Sequence[Tiers]) -> None:
        if not self._is_host_separate:
            return
        copies = 2 if self._config.zero_optimization.offload_optimizer.super_offload else 1
        flow = self._config.zero_optimization.zenflow
        zenflow_nbytes = 0 if flow is None else 9 if flow.overlap_step else 5  # sums and a mask
        needed = 0
        for size, on in zip(sizes, tiers, strict=True):
            needed += size.parameter_nbytes * (on.parameter is Tier.HOST)
            needed += size.offloaded_state_nbytes * copies * (on.state is Tier.HOST)
            needed += size.transfer_nbytes * (on.state is not Tier.DEVICE)
            needed += size.trained_numel * zenflow_nbytes
        if (self._zero.parameter_tier, self._zero.state_tier) != (Tier.DEVICE, Tier.DEVICE):
            needed *= self.num_ranks_here
            _agree(self._comm, host_too_small(needed) if needed > host_available_nbytes() else None)

    def _free(self) -> Free:
        paths = [path for path in self._paths() if path is not None]
        mine = measure(
            self._device,
            is_host_separate=self._is_host_separate,
            num_ranks_here=self.num_ranks_here,
            path=paths[0] if paths else None,
        )
        # The model's own copy is freed, unit by unit, while the units are built.
        mine = Free(mine.device + self._held_nbytes(), mine.host, mine.disk)
        least = mine
        for device, host, disk in self._comm.gather_objects([mine.device, mine.host, mine.disk], label="offload: free"):
            least = least.least(Free(device, host, disk))
        return least

    def _held_nbytes(self) -> int:
        storages = {}
        for parameter in self._model.parameters():
            if parameter.device == self._device.torch_device:
                storage = parameter.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())

    def notes(self) -> list[str]:
        """Lines for start-up."""
        if self.fitted is not None:
            return [f"{self.fitted}."]
        zero = self._config.zero_optimization
        if self._zero.parameter_tier is not Tier.DEVICE and self._moves_no_parameter:
            return [
                "zero_optimization.offload_param moves nothing: every parameter has fewer than"
                f" {zero.stage3_param_persistence_threshold:,} elements (stage3_param_persistence_threshold), so each"
                " rank keeps it whole on the device; a lower threshold offloads it."
            ]
        if self._zero.parameter_tier is Tier.DISK and self._zero.max_host_numel:
            return [
                f"zero_optimization.offload_param.max_in_cpu: the first {zero.offload_param.max_in_cpu:,} elements of "
                "each rank's parameters stay in host memory; 0 sends all to the disk."
            ]
        return []

    # disks

    def _paths(self) -> tuple[str | None, str | None]:
        zero = self._config.zero_optimization
        parameters, state = zero.offload_param.nvme_path, zero.offload_optimizer.nvme_path
        if self._config.offload == "auto":
            return parameters or state, state or parameters
        return parameters, state

    def open_disks(self, parameter_nbytes: int, state_nbytes: int) -> Disks:
        """Make this rank's folders and reserve room.

        Raises: TierError, OutOfMemoryError: on every rank, if one rank's folder has no room. The folders are removed.
        Communicates: each rank's error, or none, if the config has a disk: this rank's units may have nothing on it.
        """
        if not any(self._paths()):
            return Disks()
        tiers: dict[str, DiskTier] = {}
        problem: ShoalError | None = None
        disks = Disks()
        try:
            parameter_path, state_path = self._paths()
            for path, nbytes in ((parameter_path, parameter_nbytes), (state_path, state_nbytes)):
                if nbytes:
                    tier = tiers.get(str(path)) or tiers.setdefault(str(path), self._tier(str(path)))
                    tier.reserve(nbytes, num_ranks=self.num_ranks_here)
            if parameter_nbytes:
                disks.parameters = self._parameter_shelf(tiers[str(parameter_path)])
            if state_nbytes:
                disks.state = DiskOptimizerState(
                    DiskStore(
                        tiers[str(state_path)],
                        "state",
                        device=self._device.torch_device,
                        is_pinned=self._zero.pins_state,
                    )
                )
        except ShoalError as error:
            problem = error
        try:
            _agree(self._comm, problem)
        except BaseException:
            for tier in tiers.values():
                tier.close()
            raise
        return disks

    def _parameter_shelf(self, tier: DiskTier) -> DiskStore:
        section = self._config.zero_optimization.offload_param
        count = int(section.buffer_count)
        return DiskStore(
            tier,
            "parameters",
            device=self._device.torch_device,
            max_ahead=(count, count * int(section.buffer_size) * self._itemsize),
            is_pinned=self._zero.pins_parameters,
        )

    def _tier(self, path: str) -> DiskTier:
        if any(map(is_fake, self._model.parameters())):
            return UnwrittenDisk()
        aio = self._config.aio
        threads = max(2, int(aio.intra_op_parallelism))
        return DiskTier(
            path,
            rank=self._rank,
            num_threads=threads,
            block_nbytes=int(aio.block_size),
            queue_depth=max(threads, int(aio.queue_depth)),
            checks_sums=self._config.debug.disk_sums,
        )


_KINDS: dict[str, type[ShoalError]] = {kind.__name__: kind for kind in (TierError, OutOfMemoryError)}


def _agree(comm: Communicator, problem: ShoalError | None) -> None:
    """Raises: the problem of the first rank that has one, on every rank."""
    words: Any = None
    if problem is not None:
        kind = next((name for name, kind in _KINDS.items() if isinstance(problem, kind)), TierError.__name__)
        words = [kind, problem.what, problem.where, problem.do, problem.code]
    answers = list(comm.gather_objects(words, label="offload: room"))
    for rank, theirs in enumerate(answers):
        if theirs is not None:
            kind, what, where, do, code = theirs
            raise _KINDS[kind](what, where=f"rank {rank}: {where}", do=do, code=code) from problem
