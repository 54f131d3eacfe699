"""The optimizer's step on this rank's range: unit by unit, block by block.

An optimizer sees *pieces*: contiguous ranges of the flat master weights, each within one bucket and one parameter
group. On CPU a piece is at most one block, so that casting its gradient, updating it and casting the parameter stay in
cache. A parameter that got no gradient on any rank is left alone, as in PyTorch: a piece that holds such a parameter
beside others is cut, its optimizer state with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.comm.single import SingleCommunicator
from shoal.device import Device
from shoal.errors import OptimizerError
from shoal.memory.layout import Segment
from shoal.optim.host import TRIAL_NUMEL, HostStep
from shoal.optim.whole import OwnedRange, ParameterPart, WholeTensorOptimizer
from shoal.zero.bucket_state import BucketState, Piece
from shoal.zero.host_lane import HostLane
from shoal.zero.unit import Unit

HOST_PIECE_NUMEL = 16 * 1024 * 1024  # of state that is updated on the host: one call's overhead is not felt


class ShardedStep:
    """Runs one torch optimizer over the pieces of all units.

    Args:
        optimizer: its ``param_groups`` hold the user's parameters between steps and pieces during one.
        states: every trainable bucket, in unit order.
        shard_comm: the axis that shards optimizer state.
        block_numel: most elements of one piece of what rests on the device; None: no limit.
        chunk_numel: most elements that are stepped in one call (``sub_group_size``).
        device: that computes forward and backward.
        is_ahead: updates on the host begin in the backward pass (``super_offload``).
        num_host_threads: of updates on the host; None: torch's number.
        pins_host: page-lock what travels between device and host.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: Sequence[BucketState],
        shard_comm: Communicator,
        *,
        block_numel: int | None,
        chunk_numel: int | None,
        device: Device | None = None,
        is_ahead: bool = False,
        num_host_threads: int | None = None,
        pins_host: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.states = list(states)
        self._comm = shard_comm
        self.lane: HostLane | None = None
        if any(state.is_apart for state in states):
            away = sum(state.master.numel() for state in states if state.is_apart)
            self.lane = HostLane(
                optimizer,
                device if device is not None else Device(torch.device("cpu")),
                is_ahead=is_ahead,
                step=HostStep("auto" if away >= TRIAL_NUMEL else "threads", num_threads=num_host_threads),
                is_pinned=pins_host,
            )
        self._is_whole_tensor = isinstance(optimizer, WholeTensorOptimizer)
        self._block = block_numel
        self._chunk_numel = chunk_numel
        self._scratch: torch.Tensor | None = None
        self._user_groups: list[list[torch.nn.Parameter]] = []
        for state in self.states:
            if state.is_apart:
                state.lane = self.lane
                state.gradient.rests_apart = not (state.gradient.is_whole_between or state.is_native)
                if state.bucket.is_sharded:
                    state.unit.before_gather = partial(self.finish_updates, state.unit)
            state.pieces = list(self._pieces_of(state))

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of casts in flight, on the tier that updates."""
        return 0 if self._scratch is None else self._scratch.numel() * self._scratch.element_size()

    def drop_scratch(self) -> None:
        """Give that memory back until the next step."""
        self._scratch = None

    @property
    def is_whole_tensor(self) -> bool:
        """Does the optimizer need whole parameters (LAMB, Muon)?"""
        return self._is_whole_tensor

    @property
    def host_nbytes(self) -> int:
        """Bytes of gradients and parameters on their way between device and host."""
        return 0 if self.lane is None else self.lane.host_nbytes

    # pieces

    def _pieces_of(self, state: BucketState) -> Iterator[Piece]:
        bucket, layout = state.bucket, state.bucket.layout
        for group in layout.groups:
            if state.gradient.has_own_pieces:
                ranges = [(slot.offset, slot.offset + slot.numel) for slot in layout.slots if slot.group == group]
            else:
                ranges = [layout.group_range(group, bucket.begin, bucket.end)]
            for start, stop in ranges:
                if start == stop and not self._is_whole_tensor:
                    continue
                block = self._block_of(state) or max(stop - start, 1)
                for low in range(start, max(stop, start + 1), block):
                    yield self._piece(state, group, low, min(low + block, stop))

    def _block_of(self, state: BucketState) -> int | None:
        """Most elements of one piece."""
        if self._is_whole_tensor or state.lane is None:
            return None if self._is_whole_tensor else self._block
        # The host's step cuts blocks by itself; another optimizer's are cut here, so that its casts stay in cache.
        return HOST_PIECE_NUMEL if state.lane.kind is not None else Device(torch.device("cpu")).step_block_numel

    def _piece(self, state: BucketState, group: int, start: int, stop: int) -> Piece:
        begin = state.bucket.begin
        segments = state.bucket.layout.segments_in(begin + start, begin + stop)
        return Piece(torch.nn.Parameter(state.master[start:stop]), group, start, stop, segments)

    def _split(self, state: BucketState, piece: Piece, touched: bytes) -> list[Piece]:
        """Cut a piece into runs of parameters that did, and did not, get a gradient."""
        runs: list[list[int]] = []  # [start, stop, touched]
        for segment in piece.segments:
            is_touched = touched[segment.slot]
            if runs and runs[-1][2] == is_touched:
                runs[-1][1] = piece.start + segment.stop
            else:
                runs.append([piece.start + segment.start, piece.start + segment.stop, is_touched])
        old = self.optimizer.state.pop(piece.param, None)
        parts = []
        for start, stop, _ in runs:
            part = self._piece(state, piece.group, start, stop)
            if old:
                low, high = start - piece.start, stop - piece.start
                self.optimizer.state[part.param] = {
                    key: _cut(value, piece.stop - piece.start, low, high) for key, value in old.items()
                }
            parts.append(part)
        index = state.pieces.index(piece)
        state.pieces[index : index + 1] = parts
        return parts

    # the step

    def begin(self) -> None:
        """Put pieces in the place of the user's parameters."""
        first = next((state for state in self.states if state.shelf is not None), None)
        if first is not None and first.shelf is not None:
            first.shelf.start_fetch(first)
        self._user_groups = [group["params"] for group in self.optimizer.param_groups]
        for state in self.states:
            if state.lane is not None:
                state.lane.send(state)

    def reduced(self, unit: Unit, coefficient: float, *, at_step: bool = True) -> None:
        """In the backward pass: a unit's gradient was reduced. What is updated on the host goes there.

        Args:
            coefficient: what the gradient will be multiplied by, if it is not clipped.
            at_step: it is the gradient for the step; else one micro-batch of several was added.
        """
        for state in self.states:
            if state.unit is not unit or state.lane is None or not (at_step or state.gradient.rests_apart):
                continue
            state.lane.send(state)
            if at_step:
                state.let_go()
                state.lane.begin_ahead(state, coefficient)
            if state.gradient.rests_apart:
                state.gradient.park(partial(state.lane.gradient, state), is_for_step=at_step)

    def forget(self) -> None:
        """The gradients of this step count no more."""
        for state in self.states:
            if state.lane is not None:
                state.lane.forget(state)

    def let_state_go(self) -> None:
        """Optimizer state is about to move elsewhere: hold none but by piece."""

    def settle(self) -> None:
        """Have everything as the last step leaves it, also where updates are still under way."""
        for state in self.states:
            state.settle()

    def finish_updates(self, unit: Unit) -> None:
        """Have a unit's parameters as the last step leaves them. Order: may block the host for an update on it."""
        for state in self.states:
            if state.unit is unit and state.lane is not None:
                state.lane.finish(state)

    def end(self) -> None:
        """Give the optimizer the user's parameters back."""
        for group, params in zip(self.optimizer.param_groups, self._user_groups, strict=True):
            group["params"] = params
        self._user_groups = []

    def update(self, units: Sequence[Unit], coefficient: float, touched: dict[int, bytes]) -> list[Work]:
        """Between ``begin`` and ``end``: ``step_unit`` of every unit, then ``finish_unit``. Args, Returns: as there."""
        works = []
        for unit in units:
            works += self.step_unit(unit, coefficient, touched)
        for unit in units:
            works += self.finish_unit(unit)
        return works

    def step_unit(self, unit: Unit, coefficient: float, touched: dict[int, bytes]) -> list[Work]:
        """Update one unit's range, and start to make its parameters whole; on the host, start to update it.

        Args:
            coefficient: the gradients are multiplied by it (clipping, loss scale).
            touched: by bucket state (its index in ``states``), which parameters got a gradient on any rank.

        Returns: the all-gathers under way.
        Communicates: where the row says so, one all_gather per bucket.
        """
        works = []
        for index, state in enumerate(self.states):
            if state.unit is not unit:
                continue
            state.let_go()
            if state.shelf is not None:
                state.shelf.bring(state, reads_ahead=True)
            if any(touched[index]):
                state.bucket.hold_shard(is_overwritten=all(touched[index]))
            if self._is_whole_tensor:
                if any(touched[index]):
                    self._step_whole(state, coefficient, touched[index])
            else:
                pieces = self._touched_pieces(state, touched[index])
                if state.lane is None or not state.lane.start(state, pieces, coefficient):
                    self._step_pieces(state, pieces, coefficient)
            if state.lane is not None and (state.shelf is not None or state.bucket.is_on_disk):
                state.lane.finish(state)  # memory holds few buckets of what rests on a disk
            if state.shelf is not None:
                state.shelf.put_away(state)
            if any(touched[index]):
                state.bucket.store_shard()
            if state.lane is None:
                works += self._make_whole(state)
        return works

    def finish_unit(self, unit: Unit) -> list[Work]:
        """After ``step_unit`` of every unit: as there, for what is updated on the host.

        Where parameters rest as shards, who gathers the unit next waits for its update.
        """
        works = []
        for state in self.states:
            if state.unit is unit and state.lane is not None and not state.bucket.is_sharded:
                state.lane.finish(state)
                works += self._make_whole(state)
        return works

    def _make_whole(self, state: BucketState) -> list[Work]:
        bucket = state.bucket
        if state.unit.row.after_step != "all_gather" or bucket.comm.size == 1:
            return []
        return [bucket.comm.all_gather(bucket.full, label=bucket.label)]

    def _touched_pieces(self, state: BucketState, touched: bytes) -> list[Piece]:
        """The pieces of which some rank has a gradient; a piece that is so in part is cut."""
        if all(touched):
            return list(state.pieces)
        found: list[Piece] = []
        for piece in list(state.pieces):
            flags = {bool(touched[segment.slot]) for segment in piece.segments}
            if len(flags) > 1:
                found += [part for part in self._split(state, piece, touched) if touched[part.segments[0].slot]]
            elif flags == {True}:
                found.append(piece)
        return found

    def _step_pieces(self, state: BucketState, pieces: Sequence[Piece], coefficient: float) -> None:
        batch: list[Piece] = []
        numel = 0
        limits = [limit for limit in (self._block_of(state), self._chunk_numel) if limit]
        for piece in pieces:
            if batch and limits and numel + piece.stop - piece.start > min(limits):
                self._update(state, batch, coefficient)
                batch, numel = [], 0
            batch.append(piece)
            numel += piece.stop - piece.start
        if batch:
            self._update(state, batch, coefficient)

    def _load_gradients(self, state: BucketState, pieces: Sequence[Piece], coefficient: float) -> None:
        """Give each piece its gradient, in the master dtype and scaled."""
        if state.lane is not None:
            arrived = state.lane.gradient(state)
            gradients = [arrived[piece.start : piece.stop] for piece in pieces]
        else:
            gradients = [state.gradient.part(piece.start, piece.stop, piece.segments) for piece in pieces]
        if gradients and gradients[0].dtype != state.master.dtype:
            sizes = [gradient.numel() for gradient in gradients]
            scratch = self._scratch_of(sum(sizes), state.master.dtype, gradients[0].device)
            casts = list(scratch[: sum(sizes)].split(sizes))
            torch._foreach_copy_(casts, gradients)
            gradients = casts
        if coefficient != 1.0 and gradients:
            torch._foreach_mul_(gradients, coefficient)
        for piece, gradient in zip(pieces, gradients, strict=True):
            piece.param.grad = gradient

    def _update(self, state: BucketState, pieces: Sequence[Piece], coefficient: float) -> None:
        self._load_gradients(state, pieces, coefficient)
        groups = self.optimizer.param_groups
        for index, group in enumerate(groups):
            group["params"] = [piece.param for piece in pieces if piece.group == index]
        self.optimizer.step()
        self._store(state, pieces)

    def _store(self, state: BucketState, pieces: Sequence[Piece]) -> None:
        """Round the updated master weights into the parameters."""
        for piece in pieces:
            piece.param.grad = None
        if not state.has_own_master or not pieces:
            return
        if state.lane is not None and not state.bucket.is_shard_apart:
            # Rounded on the host, so that half the bytes travel.
            rounded = state.lane.rounded(state)
            torch._foreach_copy_([rounded[p.start : p.stop] for p in pieces], [p.param.detach() for p in pieces])
            state.lane.send_back(state, pieces)
        else:
            parameters = state.resting_parameters
            torch._foreach_copy_([parameters[p.start : p.stop] for p in pieces], [p.param.detach() for p in pieces])

    def _step_whole(self, state: BucketState, coefficient: float, touched: bytes) -> None:
        optimizer = self.optimizer
        assert isinstance(optimizer, WholeTensorOptimizer)
        self._load_gradients(state, state.pieces, coefficient)
        whole = []
        are_all_touched = all(touched)
        for piece in state.pieces:
            members = [i for i, slot in enumerate(state.bucket.layout.slots) if slot.group == piece.group]
            index_of = {slot: index for index, slot in enumerate(members)}
            parts = tuple(
                ParameterPart(
                    index_of[s.slot],
                    torch.Size(state.bucket.layout.slots[s.slot].shape),
                    s.start,
                    s.stop,
                    s.offset,
                )
                for s in piece.segments
                if s.slot in index_of and touched[s.slot]
            )
            slots = [state.bucket.layout.slots[i] for i in members]
            whole.append(
                OwnedRange(
                    param=piece.param,
                    group=optimizer.param_groups[piece.group],
                    parts=parts,
                    shapes=tuple(torch.Size(slot.shape) for slot in slots),
                    names=tuple(slot.name for slot in slots),
                    offsets=tuple(slot.offset for slot in slots) if are_all_touched else None,
                    shard_numel=state.bucket.end - state.bucket.begin,
                )
            )
        is_whole = state.bucket.end - state.bucket.begin == state.bucket.layout.numel
        comm = SingleCommunicator(self._comm.axis) if is_whole else self._comm
        optimizer.step_unit(whole, comm, state.bucket.full.device)
        self._store(state, state.pieces)

    def _scratch_of(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        held = self._scratch
        if held is None or held.numel() < numel or held.dtype != dtype or held.device != device:
            self._scratch = held = torch.empty(numel, dtype=dtype, device=device)
        return held

    # state, by parameter

    def pieces_of_slot(self, state: BucketState, slot: int) -> Iterator[tuple[Piece, Segment]]:
        """The pieces that hold a part of one parameter, with that part."""
        for piece in state.pieces:
            for segment in piece.segments:
                if segment.slot == slot:
                    yield piece, segment

    def make_room(
        self, state: BucketState, scalars: Sequence[Mapping[str, Any]], dtypes: Sequence[Mapping[str, torch.dtype]]
    ) -> None:
        """Drop one bucket's optimizer state and make room for a loaded one, its elements zero.

        Args:
            scalars: by slot, state that is one value for the whole parameter.
            dtypes: by slot, the keys of state of one element per element.

        A piece is cut where its parameters' scalars or keys differ (they did not take the same steps).
        """
        for piece in state.pieces:
            self.optimizer.state.pop(piece.param, None)
        state.pieces = list(self._pieces_of(state))
        if self._is_whole_tensor:
            for piece in state.pieces:
                self._fill_whole(state, piece, scalars, dtypes)
            return
        labels = [_label(s, d) for s, d in zip(scalars, dtypes, strict=True)]
        for piece in list(state.pieces):
            runs: list[list[int]] = []  # [start, stop, slot]
            for segment in piece.segments:
                if runs and labels[runs[-1][2]] == labels[segment.slot]:
                    runs[-1][1] = piece.start + segment.stop
                else:
                    runs.append([piece.start + segment.start, piece.start + segment.stop, segment.slot])
            if len(runs) == 1:
                self._fill_piece(piece, scalars[runs[0][2]], dtypes[runs[0][2]])
            elif runs:
                parts = [self._piece(state, piece.group, start, stop) for start, stop, _ in runs]
                for part, (_, _, slot) in zip(parts, runs, strict=True):
                    self._fill_piece(part, scalars[slot], dtypes[slot])
                index = state.pieces.index(piece)
                state.pieces[index : index + 1] = parts

    def _fill_whole(
        self,
        state: BucketState,
        piece: Piece,
        scalars: Sequence[Mapping[str, Any]],
        dtypes: Sequence[Mapping[str, torch.dtype]],
    ) -> None:
        """One piece holds several whole parameters, which count their steps one by one."""
        own = [segment.slot for segment in piece.segments if scalars[segment.slot]]
        if not own:
            return
        members = [index for index, slot in enumerate(state.bucket.layout.slots) if slot.group == piece.group]
        steps = [float(scalars[index].get("step", 0)) for index in members]
        step = max(float(scalars[index].get("step", 0)) for index in own)
        keys = {key: dtype for index in own for key, dtype in dtypes[index].items()}
        self._fill_piece(piece, {**scalars[own[0]], "step": torch.tensor(step)}, keys)
        if len(piece.segments) > 1 or piece.segments[0].stop - piece.segments[0].start < piece.stop - piece.start:
            # A piece of one parameter counts in "step" alone.
            self.optimizer.state[piece.param]["steps"] = torch.tensor([steps], dtype=torch.float32)

    def _fill_piece(self, piece: Piece, scalars: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> None:
        if not scalars and not dtypes:
            return
        group = self.optimizer.param_groups[piece.group]
        is_on_device = bool(group.get("fused") or group.get("capturable"))
        held: dict[str, Any] = {}
        for key, value in scalars.items():
            is_moved = isinstance(value, torch.Tensor) and is_on_device
            held[key] = value.to(piece.param.device, copy=True) if is_moved else copy.copy(value)
            if isinstance(value, torch.Tensor) and not is_moved:
                held[key] = value.clone()
        for key, dtype in dtypes.items():
            held[key] = torch.zeros_like(piece.param.detach(), dtype=dtype)
        self.optimizer.state[piece.param] = held

    def free(self) -> None:
        if self.lane is not None:
            self.lane.close()
        for state in self.states:
            state.shelf = None
            for piece in state.pieces:
                self.optimizer.state.pop(piece.param, None)
            state.pieces = []
        self.states = []
        self._scratch = None


def _label(scalars: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> tuple[Any, ...]:
    """Equal where two parameters may lie in one piece. (A tensor's ``repr`` shows four digits only.)"""
    numbers = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in scalars.items()}
    return sorted((key, repr(number)) for key, number in numbers.items()), sorted(dtypes.items(), key=str)


def _is_elementwise(value: Any, numel: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel


def _cut(value: Any, numel: int, low: int, high: int) -> Any:
    """The part of one state entry that belongs to ``[low, high)`` of its piece."""
    if _is_elementwise(value, numel) and numel != 1:
        return value[low:high]
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return value.clone()
        raise OptimizerError(
            f"optimizer state of shape {tuple(value.shape)} cannot be cut for a parameter range of {numel} elements.",
            do="use an elementwise optimizer, or make sure that every parameter gets a gradient in every step.",
            code="optimizer-state-shape",
        )
    return value
