"""How an optimizer that needs whole parameters sees a shard: the protocol between the sharded step and LAMB, Muon and
their like.

    unit's bucket   | w: 0..6          | b: 6..9 |
    rank 0's piece  |<-- 5 -->|                      Segment(parameter=0, start=0, stop=5, offset=0)
    rank 1's piece            |<- 1 ->|<-- 3 -->|    Segment(0, 0, 1, offset=5), Segment(1, 1, 4, offset=0)

Every rank passes exactly one piece per (unit, parameter group), possibly of no elements, so all ranks make the same
collective calls. A parameter without a segment on any rank is left alone. An optimizer keeps its state as shards
beside the piece (``state[piece.param]``) and exchanges what it needs: LAMB two numbers per parameter, Muon the
matrices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.comm.protocol import Communicator
from shoal.errors import OptimizerError
from shoal.optim.options import refuse_sparse

CPU_CHUNK_NUMEL = 1 << 16
GPU_CHUNK_NUMEL = 1 << 24

Part = tuple[int, int]  # [offset, end) of a flattened parameter; (0, 0): none of it


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that lies in this rank's piece."""

    parameter: int  # index within the unit and group, the same on every rank
    shape: torch.Size  # of the whole parameter
    start: int  # range in the piece
    stop: int
    offset: int  # where that range begins in the flattened parameter

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """This rank's range of one parameter group of one unit.

    ``offsets`` and ``shard_numel`` say where the parameters lie on every rank. Without them an optimizer has to ask the
    other ranks in every step, and read the answer on the host.
    """

    param: torch.nn.Parameter  # 1-D, with .grad set
    group: dict[str, Any]
    segments: tuple[Segment, ...]
    shapes: tuple[torch.Size, ...]  # of all the parameters of this unit and group
    names: tuple[str, ...]
    offsets: tuple[int, ...] | None = None  # of each parameter in the unit's bucket
    shard_numel: int | None = None  # rank r owns [r * shard_numel, (r + 1) * shard_numel) of the bucket


@dataclass
class Flat:
    """A piece as an optimizer works on it: 1-D views of its weights, gradient and state. Without a gradient it has
    no segments.
    """

    weight: torch.Tensor  # [numel]
    gradient: torch.Tensor | None  # [numel]
    state: dict[str, torch.Tensor]  # [numel] each; and 'step', 0-d, 'steps', [1, parameters]
    group: dict[str, Any]
    segments: tuple[Segment, ...]
    shapes: tuple[torch.Size, ...]
    device: torch.device  # that computes forward and backward
    offsets: tuple[int, ...] | None = None
    shard_numel: int | None = None

    def count(self) -> list[torch.Tensor]:
        """Count a step.

        Returns: for each segment the count of its own parameter, which may have been left alone in some. 0-d, fp64.
        """
        if not self.segments:
            return []
        self.state["step"] += 1
        if len(self.segments) == 1 and self.segments[0].numel == self.weight.numel():
            return [self.state["step"].double()]
        if "steps" not in self.state:
            self.state["steps"] = torch.zeros(1, len(self.shapes), dtype=torch.float32, device="cpu")
        steps = self.state["steps"][0]
        for segment in self.segments:
            steps[segment.parameter] += 1
        return [steps[segment.parameter].double() for segment in self.segments]


class WholeTensorOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that need whole parameters.

    ``step_unit()`` is what the sharded step calls; ``step()`` works on ordinary parameters, for use without Shoal's
    engine. Subclasses say which state an element has and how flat pieces are updated.
    """

    moves_to_device = False
    """Is the costly part computed on the device where weights and state lie in host memory?"""

    @abstractmethod
    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the per-element state of a group's parameters."""

    @abstractmethod
    def _update(self, flats: Sequence[Flat], comm: Communicator | None) -> None:
        """Update the weights and the state in place. ``comm`` None: every parameter is whole."""

    @torch.no_grad()
    def step_unit(self, pieces: Sequence[Piece], comm: Communicator, device: torch.device | None = None) -> None:
        """Update one unit's pieces.

        Args:
            pieces: one per parameter group of the unit, the same groups on every rank. On one rank also several per
                group.
            comm: the axis over which the unit's parameters are sharded.
            device: that computes forward and backward, where pieces may lie in host memory; None: where they lie.

        Communicates: along ``comm``, what the optimizer says; nothing where its size is 1.
        """
        self._opt_called = True  # torch's schedules warn when they are stepped before an optimizer is
        flats = []
        for piece in pieces:
            param = piece.param
            weight = param.detach()
            if weight.dim() != 1:
                raise OptimizerError(
                    f"a piece of shape {tuple(weight.shape)} is not flat.",
                    do="pass 1-D pieces.",
                    code="optimizer-piece",
                )
            state = self._state_of(param, piece.group)
            flats.append(
                Flat(
                    weight,
                    param.grad,
                    state,
                    piece.group,
                    piece.segments if param.grad is not None else (),
                    piece.shapes,
                    weight.device if device is None else device,
                    piece.offsets,
                    piece.shard_numel,
                )
            )
        if comm.size == 1:
            _check_whole(pieces)
        self._update(flats, None if comm.size == 1 else comm)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update ordinary parameters, which this process holds whole. A parameter without a gradient is left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flats, copies = [], []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                refuse_sparse(type(self).__name__, param)
                weight = param.detach().reshape(-1)
                if not param.is_contiguous():
                    copies.append((param, weight))
                state = {
                    key: value if key == "step" else value.view(-1)
                    for key, value in self._state_of(param, group).items()
                }
                segment = Segment(0, param.shape, 0, weight.numel(), 0)
                segments = (segment,) if weight.numel() else ()
                shapes = (param.shape,)
                flats.append(Flat(weight, param.grad.reshape(-1), state, group, segments, shapes, weight.device))
        self._update(flats, None)
        for param, weight in copies:
            param.copy_(weight.view(param.shape))
        return loss

    def _state_of(self, param: torch.nn.Parameter, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for name in self._state_names(group):
                state[name] = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
        return state


def _check_whole(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        for segment in piece.segments:
            if segment.numel != segment.shape.numel():
                raise OptimizerError(
                    f"parameter {piece.names[segment.parameter]!r} has {segment.shape.numel()} elements, but one rank, "
                    f"alone on its axis, holds {segment.numel} of them in one piece.",
                    do="pass whole parameters where the axis has one rank.",
                    code="optimizer-piece",
                )


class Parts:
    """Which part of each parameter of a unit's pieces each rank holds. Parameters are numbered through all pieces.

    ``key`` is equal for equal parts, so that plans made from them can be kept.
    """

    def __init__(self, flats: Sequence[Flat], comm: Communicator) -> None:
        """Communicates: nothing where the pieces carry their offsets; else one exchange of 16 bytes per parameter,
        read on the host.
        """
        self.size = comm.size
        self.shapes = tuple(shape for flat in flats for shape in flat.shapes)
        self._flats = flats
        self._rows: list[list[Part]] | None = None
        self.key: Hashable
        if all(flat.offsets is not None and flat.shard_numel is not None for flat in flats):
            self.key = (self.size, tuple((flat.shapes, flat.offsets, flat.shard_numel) for flat in flats))
        else:
            self._rows = self._ask(comm)
            self.key = (self.size, self.shapes, tuple(map(tuple, self._rows)))

    def of(self, rank: int) -> list[Part]:
        """The parts of all parameters that ``rank`` holds."""
        if self._rows is not None:
            return self._rows[rank]
        parts = []
        for flat in self._flats:
            assert flat.offsets is not None and flat.shard_numel is not None
            begin, end = rank * flat.shard_numel, (rank + 1) * flat.shard_numel
            for shape, offset in zip(flat.shapes, flat.offsets, strict=True):
                low, high = max(offset, begin), min(offset + shape.numel(), end)
                parts.append((low - offset, high - offset) if low < high else (0, 0))
        return parts

    def _ask(self, comm: Communicator) -> list[list[Part]]:
        own: list[int] = []
        for flat in self._flats:
            held = {segment.parameter: segment for segment in flat.segments}
            for index in range(len(flat.shapes)):
                segment = held.get(index)
                own += (0, 0) if segment is None else (segment.offset, segment.offset + segment.numel)
        vector = torch.tensor(own, dtype=torch.int64, device=self._flats[0].device)
        answers = comm.exchange(vector, label="optimizer.parts").wait()
        return [[(low, high) for low, high in row] for row in answers.view(self.size, -1, 2).tolist()]


def chunks(start: int, stop: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges that a core's cache holds, or that keep a GPU's scratch small."""
    numel = CPU_CHUNK_NUMEL if device.type == "cpu" else GPU_CHUNK_NUMEL
    for begin in range(start, stop, numel):
        yield begin, min(begin + numel, stop)
