"""The ledger: bytes by kind, tier and unit, that equal the layout's formula, next to what the allocator says."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shoal.comm.protocol import Communicator
from shoal.device import Device, MemoryReading
from shoal.running.runtime import ShardedModel
from shoal.running.step import ShardedStep
from shoal.sharding.encoded_state import EncodedState, encoded_nbytes
from shoal.sharding.memory_model import GroupMemory
from shoal.sharding.open_gradient import tensors_in
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import Tier
from shoal.text import format_bytes
from shoal.text import table as text_table

_NUM_TENSORS = 50
_KINDS_OF_STAGES = ("master", "optimizer state", "gradient", "parameter")  # stage 1 divides two, each further one one
KINDS = (
    "parameter",
    "gradient",
    "error",  # of formats in which gradients are sent
    "outer state",  # of replicas that take steps of their own
    "master",
    "optimizer state",
    "gathered",
    "buffers in flight",
    "saved activations",
    "registered, free",  # segments of memory that NCCL knows, for the next buffers
)


@dataclass(frozen=True)
class LedgerEntry:
    """Bytes of one kind of one unit on one tier."""

    unit: str
    kind: str
    tier: str
    nbytes: int
    formula: int  # what the layout says it must be, padding included
    copies: int = 1  # ranks among which a higher stage would divide it


@dataclass(frozen=True)
class Ledger:
    """The memory that Shoal uses on this rank, in bytes.

    ``held`` equals the sum of the entries; ``reading`` is the allocator's (it counts activations and all other memory
    too).
    """

    entries: tuple[LedgerEntry, ...]
    parameter_numel: int  # the whole model's elements, without padding
    reading: MemoryReading

    @property
    def held(self) -> int:
        """Bytes that Shoal uses on this rank."""
        return sum(entry.nbytes for entry in self.entries)

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind."""
        totals = dict.fromkeys(KINDS, 0)
        for entry in self.entries:
            totals[entry.kind] += entry.nbytes
        return totals

    def _on_accelerator(self, *kinds: str) -> int:
        """Bytes of these kinds in memory that is not the host's."""
        if "CUDA" not in self.reading.source:
            return 0
        return sum(e.nbytes for e in self.entries if e.kind in kinds and e.tier == Tier.DEVICE.value)

    def by_unit(self) -> dict[str, int]:
        """Bytes of each unit."""
        totals: dict[str, int] = {}
        for entry in self.entries:
            totals[entry.unit] = totals.get(entry.unit, 0) + entry.nbytes
        return totals

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

    def summary(self) -> str:
        """One line: bytes in all and by kind, and the allocator's figures."""
        kinds = [f"{kind} {format_bytes(nbytes)}" for kind, nbytes in self.by_kind().items() if nbytes]
        allocated = f"{self.reading.source}: {format_bytes(self.reading.allocated)}"
        return f"{format_bytes(self.held)} ({', '.join(kinds) or 'nothing'}); {allocated}"

    def __str__(self) -> str:
        return (
            text_table(self.rows(), ["kind", "tier", "bytes on this rank", "bytes per parameter"])
            + f"\nallocator: {format_bytes(self.reading.allocated)} now, {format_bytes(self.reading.peak)} at the peak"
            + f" ({self.reading.source})"
        )

    def changes(self, stage: int, micro_batch: int, *, is_recomputing: bool = False) -> list[str]:
        """Changes of the config that would save memory, with the bytes on this rank; the largest is the first.

        Args:
            is_recomputing: the config has activations recomputed.
        """
        savings = {
            target: sum(
                entry.nbytes * (entry.copies - 1) // entry.copies
                for entry in self.entries
                if entry.tier == Tier.DEVICE.value and entry.kind in _KINDS_OF_STAGES[:most]
            )
            for target, most in ((1, 2), (2, 3), (3, 4))
            if target > stage
        }
        other = max(self.reading.peak - self.held, 0)
        candidates = []
        if micro_batch > 1:
            text = (
                f'halve "train_micro_batch_size_per_gpu" ({micro_batch}) and double "gradient_accumulation_steps":'
                f" activations and what else is not in the ledger take {format_bytes(other)}."
            )
            candidates.append((other // 2, text))
        if any(savings.values()):
            target, saved = max(savings.items(), key=lambda item: item[1])
            text = f'set "zero_optimization": {{"stage": {target}}}: it would save {format_bytes(saved)} on this rank.'
            candidates.append((saved, text))
        movable = {
            '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}': ("master", "optimizer state")[: 2 * stage],
            '"zero_optimization": {"offload_param": {"device": "cpu"}}': ("parameter",)[: stage // 3],
            '"activation_checkpointing": {"cpu_checkpointing": true}': ("saved activations",),
        }
        for key, kinds in movable.items():
            if nbytes := self._on_accelerator(*kinds):
                candidates.append(
                    (nbytes, f"set {key}: it would move {format_bytes(nbytes)} of this rank to host memory.")
                )
        if candidates and other and not is_recomputing:
            text = (
                'set "activation_checkpointing": {"modules": ["<the class of a block>"]}: of the'
                f" {format_bytes(other)} that are not in the ledger, activations inside of blocks are recomputed."
            )
            candidates.append((other // 4, text))
        candidates.sort(key=lambda each: -each[0])
        all_sharded = (
            "train on more ranks, or recompute activations (torch.utils.checkpoint): all state is sharded already."
        )
        return [text for _, text in candidates] or [all_sharded]


def write_snapshot(folder: Path, ledger: Ledger, rank: int, device: Device, notes: Mapping[str, object]) -> Path:
    """Write what uses this rank's memory as ``out-of-memory-rank<N>.json``.

    Its keys: ``notes``; ``ledger`` and its ``entries``, the largest first; ``tensors``: the largest that Python knows,
    one of each storage, with shape, dtype, device and bytes; ``allocator``: the segments of the accelerator's.

    Raises: OSError.
    """
    tensors: dict[int, tuple[int, torch.Tensor]] = {}
    for each in _tensors_in_python():
        with suppress(Exception):  # it has no storage
            storage = each.untyped_storage()
            tensors[storage._cdata] = storage.nbytes(), each
    largest = sorted(tensors.values(), key=lambda item: -item[0])[:_NUM_TENSORS]
    content = {
        **notes,
        "ledger": ledger.as_dict(),
        "entries": [asdict(entry) for entry in sorted(ledger.entries, key=lambda entry: -entry.nbytes)],
        "tensors": [
            {"bytes": nbytes, "shape": list(tensor.shape), "dtype": str(tensor.dtype), "device": str(tensor.device),
             "is_parameter": isinstance(tensor, torch.nn.Parameter)}
            for nbytes, tensor in largest
        ],
        "allocator": device.allocator_segments(),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"out-of-memory-rank{rank}.json"
    path.write_text(json.dumps(content, default=str), encoding="utf-8")
    return path


def account(
    sharded: ShardedModel,
    step: ShardedStep | None,
    device: Device,
    saved: Mapping[Tier, int] | None = None,
    moved: Collection[str] = (),
) -> Ledger:
    """Read the ledger off the live engine. Communicates nothing.

    Args:
        saved: bytes that recomputed segments save now, by tier.
        moved: kinds that left the device for host memory (``offload_states``).
    """
    entries = [entry for group in sharded.groups for entry in _group_entries(group, moved)]
    others = [
        (
            "buffers in flight",
            Tier.DEVICE,
            sum(each.nbytes for each in sharded.staging) + (step.scratch_nbytes if step is not None else 0),
        ),
        ("buffers in flight", Tier.HOST, sharded.disks.host_nbytes),
        ("buffers in flight", Tier.HOST, step.host_nbytes if step is not None else 0),
        (
            "buffers in flight",
            Tier.HOST if device.is_cuda else Tier.DEVICE,
            sum(comm.scratch_nbytes for comm in _communicators(sharded)),
        ),
        *(("saved activations", tier, nbytes) for tier, nbytes in (saved or {}).items()),
        ("registered, free", Tier.DEVICE, sum(pool.free_nbytes for pool in sharded.pools)),
    ]
    entries += [
        LedgerEntry("(all)", kind, tier.value, nbytes, nbytes)
        for index, (kind, tier, nbytes) in enumerate(others)
        if nbytes or index == 0
    ]
    numel = sum(group.buffer.layout.parameter_numel for group in sharded.groups)
    return Ledger(tuple(entries), numel, device.memory())


def _tensors_in_python() -> list[torch.Tensor]:
    """All tensors that the garbage collector knows.

    No other thread runs while all objects are referenced here: ``tuple(...)`` raises SystemError in a thread whose
    tuple, which is not whole yet, has a second reference.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.5)  # seconds; looking through a million objects takes a tenth of it
    try:
        time.sleep(0.001)  # threads that wait already do so for the interval before
        return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    finally:
        sys.setswitchinterval(interval)


def _group_entries(group: ParameterGroup, moved: Collection[str]) -> Iterator[LedgerEntry]:
    """The bytes of one parameter group, and those of ``memory_model``'s formula."""
    row, buffer = group.row, group.buffer
    gradient_dtype = group.gradient.dtype if group.is_trained else buffer.dtype
    main_dtype = group.main.dtype if group.is_trained else buffer.dtype
    model = GroupMemory(
        buffer.layout,
        row,
        buffer.dtype,
        is_trained=group.is_trained,
        main_dtype=main_dtype,
        gradient_dtype=gradient_dtype,
        has_own_main=group.has_own_main,
    )

    placements = {"parameter": row.parameter, "gradient": row.gradient_between}

    def entry(kind: str, tier: Tier, nbytes: int, formula: int | None = None) -> LedgerEntry:
        stored = Tier.HOST if tier is Tier.DEVICE and kind in moved else tier
        copies = 1 if placements.get(kind, row.state).is_sharded else buffer.comm.size
        return LedgerEntry(row.unit, kind, stored.value, nbytes, nbytes if formula is None else formula, copies)

    yield entry("parameter", row.parameter.tier, buffer.nbytes_stored, model.parameter)
    if buffer.is_sharded and not buffer.placement.is_sharded:
        yield entry("gathered", Tier.DEVICE, model.whole)
    if group.second is not None and group.second.is_kept:
        yield entry("gathered", Tier.DEVICE, group.second.shard.nbytes)
    if not group.is_trained:
        return
    gradient = group.gradient
    if "gradient" in moved:
        yield entry("gradient", row.gradient_between.tier, sum(tensor.nbytes for tensor in tensors_in(gradient.moved)))
    else:  # of a sparse one as many rows as were looked up
        formula = None if gradient.is_sparse else model.gradient
        yield entry("gradient", row.gradient_between.tier, gradient.nbytes, formula)
    formulas = {"error": model.error, "outer state": model.outer}
    for kept in group.kept:
        if nbytes := sum(buffer.stored_values.nbytes for buffer in kept.buffers):
            yield entry(kept.kind, kept.buffers[0].stored.tier, nbytes, formulas[kept.kind])
    if group.has_own_main:
        yield entry("master", row.state.tier, group.main.nbytes, model.main)
    nbytes, num_states, itemsize = _optimizer_bytes(group)
    if nbytes:
        # An optimizer steps the elements of each of its groups from the first to the last: the rest is padding.
        padding = group.owned_numel - sum(part.stop - part.start for part in group.ranges)
        formula = model.state(num_states, itemsize) - padding * num_states * itemsize
        if group.state_format is not None:
            formula = num_states * sum(encoded_nbytes(each.stop - each.start, each.segments) for each in group.ranges)
        yield entry("optimizer state", row.state.tier, nbytes, formula)
    if unsynced := gradient.unsynced.full.nbytes:
        yield LedgerEntry(row.unit, "gradient", row.gradient_between.tier.value, unsynced, unsynced)


def _communicators(sharded: ShardedModel) -> list[Communicator]:
    """Each once. Engines of one world share them, scratch included."""
    axes = sharded.axes
    comms = [axes.comms[name] for name in ("world", "tp", "sp", "cp", "ep") if name in axes.comms]
    comms += [group.buffer.comm for group in sharded.groups]
    comms += [
        axis
        for group in sharded.trained_groups
        for axis in group.gradient.axes.values()
        if isinstance(axis, Communicator)
    ]
    return list({id(comm): comm for comm in comms}.values())


def _optimizer_bytes(group: ParameterGroup) -> tuple[int, int, int]:
    """Bytes of state of one element per element, the number of such states, and their item size."""
    nbytes, keys, size = 0, set(), 4
    for _, key, value in group.stored_state():
        nbytes += value.nbytes
        keys.add(key)
        size = 1 if isinstance(value, EncodedState) else value.element_size()
    return nbytes, len(keys), size
