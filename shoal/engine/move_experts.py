"""Experts change ranks between two steps: their parameters, main parameters and optimizer state.

    ep rank 0 | expert 0 | expert 1 |          expert 4 and expert 0 change places: both ranks exchange the same range
    ep rank 1 | expert 4 | expert 5 |          of the buffer, of the main parameters and of each state

All expert-parallel ranks have the same layouts, and an expert keeps its place among the experts of a rank. So of an
expert that is sharded, the ranks that own the same range exchange it, along ``ep`` only.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.parallel.expert.held import ExpertsHeld
from shoal.parallel.expert.rebalance import ExpertsByRank
from shoal.parallel.tensor.parts import as_ranges
from shoal.running.runtime import ShardedModel
from shoal.sharding.encoded_state import EncodedState
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.param_group import ParameterGroup


@dataclass(frozen=True)
class _Piece:
    """What one expert has of a parameter, as a range of the buffer."""

    place: int  # of the expert among those of a rank
    slot: int  # of the parameter
    start: int
    stop: int


def can_move(groups: Iterable[ParameterGroup], comm: Communicator) -> bool:
    """True if ranks along ``comm`` can exchange their optimizer state: they have equal ranges, steps, keys and dtypes.

    State that is neither one value per element nor one for all, and steps that differ between experts, cannot.

    Communicates: one exchange of a number.
    """
    forms: list[object] = []
    is_flat = True
    for group in groups:
        for part in group.ranges:
            state = group.state_of(part)
            tensors = {k: value for k, value in state.items() if isinstance(value, torch.Tensor | EncodedState)}
            scalars = {key: value for key, value in state.items() if key not in tensors}
            single = {key: value for key, value in tensors.items() if value.numel() == 1}
            scalars |= {key: value.item() for key, value in single.items() if isinstance(value, torch.Tensor)}
            is_flat &= all(value.numel() in (1, part.param.numel()) for value in tensors.values())
            kinds = sorted((key, str(getattr(value, "dtype", "encoded"))) for key, value in tensors.items())
            forms.append((part.start, part.stop, kinds, sorted((key, repr(value)) for key, value in scalars.items())))
    mine = torch.tensor([float(is_flat), float(zlib.crc32(repr(forms).encode()))], dtype=torch.float64, device="cpu")
    of_all = comm.exchange(mine, label="experts' states").wait().tolist()
    return all(flat == 1.0 and code == of_all[0][1] for flat, code in of_all)


@torch.no_grad()
def move_experts(
    sharded: ShardedModel,
    prefix: str,
    module: nn.Module,
    held: ExpertsHeld,
    before: ExpertsByRank,
    after: ExpertsByRank,
) -> None:
    """Exchange the experts of one layer along ``held.comm`` until they are where ``after`` says.

    Args:
        prefix: the module's name.
        before: where they are. Each expert has the same place among those of its rank in both.

    Communicates: for each parameter group and dtype one all-to-all of the moved experts: parameters (this rank's
        range, or all of them where they are stored whole), main parameters and optimizer state.
    Memory: twice the moved experts of one group, on the device.
    Order: call it between two steps, when updates are done, and no peer reads parameters.
    """
    comm = held.comm
    assert comm is not None
    rank = {expert: owner for owner, ids in enumerate(before) for expert in ids}
    new_rank = {expert: owner for owner, ids in enumerate(after) for expert in ids}
    sources = [rank[expert] for expert in after[comm.rank]]
    targets = [new_rank[expert] for expert in before[comm.rank]]
    for group, pieces in _pieces(sharded, module, held).items():
        with group.resident(), group.buffer.storage.resident():
            by_dtype: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
            for begin, flat in _tensors(group):
                for piece in pieces:
                    low, high = max(piece.start - begin, 0), min(piece.stop - begin, flat.numel())
                    if low < high and sources[piece.place] != comm.rank:
                        by_dtype.setdefault(flat.dtype, []).append((piece.place, flat[low:high]))
            for dtype in sorted({flat.dtype for _, flat in _tensors(group)}, key=str):
                _exchange(by_dtype.get(dtype, []), dtype, sources, targets, group, comm)
    held.place(after)
    for group, pieces in _pieces(sharded, module, held).items():
        slots = {piece.slot: piece.place for piece in pieces}
        specs = [
            _renamed(spec, prefix, held, slots[slot]) if slot in slots else spec
            for slot, spec in enumerate(group.buffer.layout.specs)
        ]
        group.buffer.layout = replace(group.buffer.layout, specs=tuple(specs))


def _pieces(sharded: ShardedModel, module: nn.Module, held: ExpertsHeld) -> dict[ParameterGroup, list[_Piece]]:
    """By parameter group, in the same order on every rank."""
    by_group: dict[ParameterGroup, list[_Piece]] = {}
    for name, parameter in module.named_parameters():
        group, slot = sharded.home_of[id(parameter)]
        spec = group.buffer.layout.specs[slot]
        pieces = by_group.setdefault(group, [])
        if held.form == "listed":
            pieces.append(_Piece(int(name.split(".")[0]), slot, spec.offset, spec.offset + spec.numel))
            continue
        each = spec.numel // held.num_local
        starts = range(spec.offset, spec.offset + spec.numel, each)
        pieces += [_Piece(place, slot, start, start + each) for place, start in enumerate(starts)]
    return by_group


def _tensors(group: ParameterGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """Flat tensors that have one element per element of the group's buffer, and where each begins in it."""
    buffer = group.buffer
    yield (buffer.begin, buffer.shard) if buffer.is_sharded else (0, buffer.full)
    if not group.is_trained:
        return
    if group.has_own_main:
        yield buffer.begin, group.main
    for part, _, value in sorted(group.elementwise_state(), key=lambda each: (each[0].start, each[1])):
        yield buffer.begin + part.start, value


def _exchange(
    parts: Sequence[tuple[int, torch.Tensor]],
    dtype: torch.dtype,
    sources: Sequence[int],
    targets: Sequence[int],
    group: ParameterGroup,
    comm: Communicator,
) -> None:
    """Send each part to the rank that gets its expert, and overwrite it with that of the rank which had the new one.

    Args:
        parts: the place of the expert, and its elements, in the same order on all ranks.
        sources, targets: by place, the rank from which an expert comes, and the one to which it goes.
    """
    device = group.buffer.full.device
    out_splits = [sum(part.numel() for place, part in parts if sources[place] == peer) for peer in range(comm.size)]
    splits = [sum(part.numel() for place, part in parts if targets[place] == peer) for peer in range(comm.size)]
    outgoing = [part for peer in range(comm.size) for place, part in parts if targets[place] == peer]
    incoming = [part for peer in range(comm.size) for place, part in parts if sources[place] == peer]
    source = comm.empty(sum(splits), dtype, device)
    for part, to in zip(outgoing, source.split([part.numel() for part in outgoing]), strict=True):
        to.copy_(part)
    received = torch.empty(sum(out_splits), dtype=dtype, device=device)
    label = f"{group.label}: experts"
    comm.blocking.all_to_all(received, source, out_splits=out_splits, source_splits=splits, label=label)
    for part, new in zip(incoming, received.split([part.numel() for part in incoming]), strict=True):
        part.copy_(new)


def _renamed(spec: ParameterSpec, prefix: str, held: ExpertsHeld, place: int) -> ParameterSpec:
    """What the parameter is of the whole model, now that this rank holds other experts."""
    if held.stack is not None:
        return replace(spec, local=(as_ranges(held.ids, unit=held.stack.rows), *spec.local[1:]))
    rest = spec.name.removeprefix(f"{prefix}.").partition(".")[2]
    return replace(spec, name=f"{prefix}.{held.ids[place]}.{rest}")
