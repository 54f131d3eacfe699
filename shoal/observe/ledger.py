"""The ledger: bytes by kind, tier and unit, that equal the layout's formula, beside what the allocator says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.comm.protocol import Communicator
from shoal.device import Device, MemoryReading
from shoal.memory.placement import Kind, Tier
from shoal.text import format_bytes
from shoal.text import table as text_table
from shoal.zero.bucket_state import BucketState
from shoal.zero.runtime import ShardedModel
from shoal.zero.step import ShardedStep

KINDS = (
    "parameter",
    "gradient",
    "master",
    "optimizer state",
    "gathered",
    "buffers in flight",
    "saved activations",
)


@dataclass(frozen=True)
class LedgerEntry:
    """Bytes of one kind of one unit on one tier."""

    unit: str
    kind: str
    tier: str
    nbytes: int
    formula: int  # what the layout says it must be, padding included


@dataclass(frozen=True)
class Ledger:
    """What Shoal holds on this rank, in bytes.

    ``held`` equals the sum of the entries; ``reading`` is the allocator's (it counts activations and everything else
    too).
    """

    entries: tuple[LedgerEntry, ...]
    parameter_numel: int  # the whole model's elements, without padding
    reading: MemoryReading

    @property
    def held(self) -> int:
        """Bytes that Shoal holds on this rank."""
        return sum(entry.nbytes for entry in self.entries)

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind."""
        found = dict.fromkeys(KINDS, 0)
        for entry in self.entries:
            found[entry.kind] += entry.nbytes
        return found

    def _on_accelerator(self, *kinds: str) -> int:
        """Bytes of these kinds in memory that is not the host's."""
        if "CUDA" not in self.reading.source:
            return 0
        return sum(e.nbytes for e in self.entries if e.kind in kinds and e.tier == Tier.DEVICE.value)

    def by_unit(self) -> dict[str, int]:
        """Bytes of each unit."""
        found: dict[str, int] = {}
        for entry in self.entries:
            found[entry.unit] = found.get(entry.unit, 0) + entry.nbytes
        return found

    def as_dict(self) -> dict[str, object]:
        """The ledger as plain data, in bytes."""
        return {
            "by_kind": self.by_kind(),
            "by_unit": self.by_unit(),
            "held": self.held,
            "allocated": self.reading.allocated,
            "peak": self.reading.peak,
            "source": self.reading.source,
        }

    def rows(self) -> list[list[str]]:
        """A row per kind: kind, tier, bytes, bytes per parameter of the model."""
        rows = []
        for kind in KINDS:
            for tier in sorted({entry.tier for entry in self.entries if entry.kind == kind}):
                total = sum(e.nbytes for e in self.entries if e.kind == kind and e.tier == tier)
                rows.append([kind, tier, format_bytes(total), f"{total / max(self.parameter_numel, 1):.2f}"])
        rows.append(["total", "", format_bytes(self.held), f"{self.held / max(self.parameter_numel, 1):.2f}"])
        return rows

    def __str__(self) -> str:
        return (
            text_table(self.rows(), ["kind", "tier", "bytes on this rank", "bytes per parameter"])
            + f"\nallocator: {format_bytes(self.reading.allocated)} now, {format_bytes(self.reading.peak)} at the peak"
            + f" ({self.reading.source})"
        )

    def advice(self, stage: int, num_ranks: int, micro_batch: int) -> str:
        """The change of the config that would save most."""
        kinds = self.by_kind()
        shardable = {
            1: kinds["master"] + kinds["optimizer state"],
            2: kinds["gradient"],
            3: kinds["parameter"],
        }
        savings = {
            target: sum(nbytes for s, nbytes in shardable.items() if stage < s <= target) * (num_ranks - 1) // num_ranks
            for target in (1, 2, 3)
            if target > stage
        }
        model_bytes = self.held
        rest = max(self.reading.peak - model_bytes, 0)
        best = max(savings.items(), key=lambda item: item[1], default=None)
        movable = self._on_accelerator("master", "optimizer state") if stage else 0
        if movable > rest // 2 and movable > (best[1] if best is not None else 0):
            return (
                f'set "zero_optimization": {{"offload_optimizer": {{"device": "cpu"}}}}: it would move'
                f" {format_bytes(movable)} of this rank to host memory."
            )
        if best is not None and best[1] > max(rest // 2, 0) and best[1] > 0:
            return (
                f'set "zero_optimization": {{"stage": {best[0]}}}: it would save {format_bytes(best[1])} on this rank.'
            )
        if micro_batch > 1:
            return (
                f'halve "train_micro_batch_size_per_gpu" ({micro_batch}) and double "gradient_accumulation_steps":'
                f" activations and what else is not in the ledger take {format_bytes(rest)}."
            )
        if savings:
            assert best is not None
            return (
                f'set "zero_optimization": {{"stage": {best[0]}}}: it would save {format_bytes(best[1])} on this rank.'
            )
        return "train on more ranks, or recompute activations (torch.utils.checkpoint): all state is sharded already."


def account(
    sharded: ShardedModel,
    states: Sequence[BucketState],
    step: ShardedStep | None,
    device: Device,
    saved: Mapping[Tier, int] | None = None,
    moved: Collection[str] = (),
) -> Ledger:
    """Read the ledger off the live engine. Communicates nothing.

    Args:
        saved: bytes that recomputed segments hold now, by tier.
        moved: kinds that left the device for host memory (``offload_states``).
    """
    entries: list[LedgerEntry] = []
    numel = 0
    for unit in sharded.units:
        row = unit.row
        tier = _tier(row.parameter_tier, "parameter", moved)
        for bucket in unit.buckets:
            numel += bucket.layout.parameter_numel
            size = _itemsize(bucket.dtype)
            shards = bucket.layout.num_shards if row.parameter.inner is Kind.SHARD else 1
            entries.append(
                LedgerEntry(unit.name, "parameter", tier, bucket.nbytes_at_rest, bucket.layout.numel * size // shards)
            )
            if bucket.is_sharded and bucket.is_full:
                whole = bucket.layout.numel * size
                entries.append(LedgerEntry(unit.name, "gathered", Tier.DEVICE.value, whole, whole))
            if bucket.nbytes_secondary:
                entries.append(
                    LedgerEntry(
                        unit.name, "gathered", Tier.DEVICE.value, bucket.nbytes_secondary, bucket.nbytes_secondary
                    )
                )
    for state in states:
        row, layout = state.unit.row, state.bucket.layout
        gradient_shards = layout.num_shards if row.gradient_between.inner is Kind.SHARD else 1
        formula = layout.numel * _itemsize(state.gradient.dtype) // gradient_shards
        held = state.gradient.nbytes
        if state.gradient.keeps_rows:
            formula = held  # as many as were looked up
        if "gradient" in moved:
            held = formula = state.gradient.nbytes_moved
        gradient_tier = _tier(row.gradient_tier, "gradient", moved)
        entries.append(LedgerEntry(state.unit.name, "gradient", gradient_tier, held, formula))
        owned = layout.numel // (layout.num_shards if row.state.inner is Kind.SHARD else 1)
        stepped = _stepped_numel(state)
        if state.has_own_master:
            held = state.master.numel() * state.master.element_size()
            entries.append(
                LedgerEntry(
                    state.unit.name,
                    "master",
                    _tier(row.state_tier, "master", moved),
                    held,
                    owned * _itemsize(state.master.dtype),
                )
            )
        if step is not None:
            held, count, size = _optimizer_bytes(state, step)
            if held:
                tier = _tier(row.state_tier, "optimizer state", moved)
                entries.append(LedgerEntry(state.unit.name, "optimizer state", tier, held, stepped * count * size))
        if state.gradient.nbytes_held:
            held = state.gradient.nbytes_held
            entries.append(LedgerEntry(state.unit.name, "gradient", row.gradient_tier.value, held, held))
    in_flight = sharded.pool.nbytes + (step.scratch_nbytes if step is not None else 0)
    entries.append(LedgerEntry("(all)", "buffers in flight", "device", in_flight, in_flight))
    if sharded.disks.host_nbytes:
        held = sharded.disks.host_nbytes
        entries.append(LedgerEntry("(all)", "buffers in flight", "host", held, held))
    if step is not None and step.host_nbytes:
        entries.append(LedgerEntry("(all)", "buffers in flight", "host", step.host_nbytes, step.host_nbytes))
    sums = sum(comm.scratch_nbytes for comm in _communicators(sharded, states))
    if sums:
        entries.append(LedgerEntry("(all)", "buffers in flight", "host" if device.is_cuda else "device", sums, sums))
    for place, nbytes in (saved or {}).items():
        if nbytes:
            entries.append(LedgerEntry("(all)", "saved activations", place.value, nbytes, nbytes))
    return Ledger(tuple(entries), numel, device.memory())


def _tier(rests: Tier, kind: str, moved: Collection[str]) -> str:
    return (Tier.HOST if rests is Tier.DEVICE and kind in moved else rests).value


def _communicators(sharded: ShardedModel, states: Sequence[BucketState]) -> list[Communicator]:
    """Each once. Engines of one world share them, scratch included."""
    found = [sharded.comm, *(bucket.comm for unit in sharded.units for bucket in unit.buckets)]
    found += [state.gradient.outer for state in states if state.gradient.outer is not None]
    return list({id(comm): comm for comm in found}.values())


def _stepped_numel(state: BucketState) -> int:
    """Elements that an optimizer steps: of each group from its first to its last, padding at the ends left out."""
    bucket, layout = state.bucket, state.bucket.layout
    if state.gradient.has_own_pieces:  # a piece for each parameter
        return layout.parameter_numel
    ranges = [layout.group_range(group, bucket.begin, bucket.end) for group in layout.groups]
    return sum(stop - start for start, stop in ranges)


def _optimizer_bytes(state: BucketState, step: ShardedStep) -> tuple[int, int, int]:
    held, keys, size = 0, set(), 4
    for piece in state.pieces:
        for key, value in step.optimizer.state.get(piece.param, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == piece.param.numel():
                held += value.numel() * value.element_size()
                keys.add(key)
                size = value.element_size()
    return held, len(keys), size


def _itemsize(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()
