"""Optimizers that need whole parameters (LAMB, Muon): the protocol between them and the sharded step.

    unit's buffer   | w: 0..6          | b: 6..9 |
    rank 0's range  |<-- 5 -->|                      ParameterPart(parameter=0, start=0, stop=5, offset=0)
    rank 1's range            |<- 1 ->|<-- 3 -->|    ParameterPart(0, 0, 1, offset=5), ParameterPart(1, 1, 4, offset=0)

Every rank passes one ``OwnedRange`` per unit and parameter group, possibly of no elements, so all ranks issue the same
collectives. A parameter without a part on any rank is not updated. An optimizer stores the state of its range
(``state[owned.param]``) and exchanges what it needs: LAMB two numbers per parameter, Muon the matrices.

The ranges of many units are updated in one call, so that each rank has a matrix to compute, and calls overlap: one
begins while the exchanges of the one before are under way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shoal.comm.protocol import Communicator
from shoal.device import numbers_on
from shoal.errors import OptimizerError
from shoal.optim.options import refuse_sparse
from shoal.sharding.layout import ParameterSpec
from shoal.streams import is_accelerator

CPU_CHUNK_NUMEL = 1 << 16
GPU_CHUNK_NUMEL = 1 << 24

Interval = tuple[int, int]  # [offset, end) of a flattened parameter; (0, 0): none of it
Loads = dict[Communicator, tuple[int, ...]]  # by rank
HeldPart = tuple[int, int, int]  # rank; and [offset, end) of a flattened parameter


@dataclass(frozen=True)
class ParameterPart:
    """The part of one parameter that lies in this rank's range."""

    parameter: int  # index within the unit and group, the same on every rank
    shape: torch.Size  # of the whole parameter
    start: int  # first and last element + 1 in the range
    stop: int
    offset: int  # where that range begins in the flattened parameter

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def elements(self, begin: int, end: int) -> slice:
        """Where elements of the flattened parameter lie in the range."""
        return slice(self.start + begin - self.offset, self.start + end - self.offset)


@dataclass(frozen=True)
class OwnedRange:
    """This rank's range of one parameter group of one unit.

    ``offsets`` and ``shard_numel`` say where the parameters lie on every rank. Without them the ranks exchange their
    parts in every step, which blocks the host. ``specs`` say which elements of larger tensors the parameters are, where
    tensor-parallel ranks hold the others.
    """

    param: torch.nn.Parameter  # 1-D, with .grad set
    group: dict[str, Any]
    parts: tuple[ParameterPart, ...]
    shapes: tuple[torch.Size, ...]  # of all the parameters of this unit and group
    names: tuple[str, ...]
    offsets: tuple[int, ...] | None = None  # of each parameter in the unit's buffer
    shard_numel: int | None = None  # rank r owns [r * shard_numel, (r + 1) * shard_numel) of the buffer
    specs: tuple[ParameterSpec, ...] = ()  # default: they are whole tensors


@dataclass
class RangeViews:
    """An ``OwnedRange`` as an optimizer updates it: 1-D views of weights, gradient and state; no parts if it has no
    gradient.
    """

    weight: torch.Tensor  # [numel]
    gradient: torch.Tensor | None  # [numel]
    state: dict[str, torch.Tensor]  # [numel] each; and 'step', 0-d, 'steps', [1, parameters]
    group: dict[str, Any]
    parts: tuple[ParameterPart, ...]
    shapes: tuple[torch.Size, ...]
    device: torch.device  # that computes forward and backward
    offsets: tuple[int, ...] | None = None
    shard_numel: int | None = None
    specs: tuple[ParameterSpec, ...] = ()

    def tensor_shape(self, parameter: int) -> torch.Size:
        """The shape of the tensor that a parameter is, or is a part of."""
        return torch.Size(self.specs[parameter].global_shape) if self.specs else self.shapes[parameter]

    def count(self) -> list[torch.Tensor]:
        """Count a step.

        Returns: for each part the number of steps that updated its parameter. 0-d, fp64.
        """
        if not self.parts:
            return []
        self.state["step"] += 1
        if len(self.parts) == 1 and self.parts[0].numel == self.weight.numel():
            return [self.state["step"].double()]
        if "steps" not in self.state:
            self.state["steps"] = torch.zeros(1, len(self.shapes), dtype=torch.float32, device="cpu")
        steps = self.state["steps"][0]
        numbers = numbers_on(steps.device, [part.parameter for part in self.parts])
        counted = steps.index_select(0, numbers) + 1
        steps.index_copy_(0, numbers, counted)
        return list(counted.double().unbind())


def numbered(flats: Sequence[RangeViews]) -> Iterator[tuple[int, RangeViews, ParameterPart]]:
    """The parts of some ranges, each with the number of its parameter among those of all."""
    first = 0
    for flat in flats:
        for part in flat.parts:
            yield first + part.parameter, flat, part
        first += len(flat.shapes)


class WholeTensorOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that need whole parameters.

    The sharded step calls ``step_ranges()``; ``step()`` updates ordinary parameters, for use without Shoal's engine.
    Subclasses say which state an element has and how flat ranges are updated.
    """

    moves_to_device = False
    """True if the costly part is computed on the device where weights and state lie in host memory."""

    by_parameter: ClassVar[Mapping[str, float]] = {}
    """State of one number for each parameter of a range, [1, parameters], and what it begins with."""

    @abstractmethod
    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the per-element state of a group's parameters."""

    @abstractmethod
    def _update(
        self, flats: Sequence[RangeViews], comm: Communicator | None, tp: Communicator | None, loads: Loads
    ) -> Iterator[None]:
        """Update the weights and the state in place. ``comm`` None: every parameter is on this rank. ``tp`` None: every
        parameter is a whole tensor. As ``step_ranges`` it stops where it has issued a collective.
        """

    @torch.no_grad()
    def step_ranges(
        self,
        ranges: Sequence[OwnedRange],
        comm: Communicator,
        device: torch.device | None = None,
        tp: Communicator | None = None,
        loads: Loads | None = None,
    ) -> Iterator[None]:
        """Update ranges of one or more units. It stops where it has issued collectives; what follows waits for them.

        It stops as often on every rank: the collectives of calls that overlap are in one order on all.

        Gradients are read before the first stop, weights are written after the last one.

        Args:
            ranges: one per unit and parameter group, the same ones on every rank. On one rank also several.
            comm: the axis over which the parameters are sharded.
            device: that computes forward and backward, where ranges may lie in host memory; None: where they lie.
            tp: the ranks that hold the other parts of the tensors of which the parameters are parts; the same
                coordinate on ``comm`` on each of them. None: the parameters are whole tensors.
            loads: of the calls of one step: an optimizer notes there what it gives each rank to compute.

        Communicates: along ``comm`` and ``tp``, as the optimizer documents; nothing where their size is 1.
        """
        self._opt_called = True  # torch's schedules warn when they are stepped before an optimizer is
        flats = []
        for owned in ranges:
            param = owned.param
            weight = param.detach()
            if weight.dim() != 1:
                raise OptimizerError(
                    f"a range of shape {tuple(weight.shape)} is not flat.",
                    do="pass 1-D ranges.",
                    code="optimizer-piece",
                )
            state = self._state_of(param, owned.group)
            flats.append(
                RangeViews(
                    weight,
                    param.grad,
                    state,
                    owned.group,
                    owned.parts if param.grad is not None else (),
                    owned.shapes,
                    weight.device if device is None else device,
                    owned.offsets,
                    owned.shard_numel,
                    owned.specs,
                )
            )
        others = None if comm.size == 1 else comm
        if others is None:
            _check_whole(ranges)
        yield from self._update(flats, others, tp, {} if loads is None else loads)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update ordinary parameters. A parameter without a gradient is skipped."""
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
                part = ParameterPart(0, param.shape, 0, weight.numel(), 0)
                parts = (part,) if weight.numel() else ()
                shapes = (param.shape,)
                flats.append(RangeViews(weight, param.grad.reshape(-1), state, group, parts, shapes, weight.device))
        for _ in self._update(flats, None, None, {}):
            pass
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


def _check_whole(ranges: Sequence[OwnedRange]) -> None:
    for owned in ranges:
        for part in owned.parts:
            if part.numel != part.shape.numel():
                raise OptimizerError(
                    f"parameter {owned.names[part.parameter]!r} has {part.shape.numel()} elements, but one rank, "
                    f"alone on its axis, owns {part.numel} of them in one range.",
                    do="pass whole parameters where the axis has one rank.",
                    code="optimizer-piece",
                )


class PartTable:
    """Which part of each parameter each rank owns. Parameters are numbered through all ranges.

    ``key`` is equal for equal tables, so that what was computed from one can be cached.
    """

    def __init__(self, flats: Sequence[RangeViews], comm: Communicator) -> None:
        """Communicates: nothing where the ranges carry their offsets; else one exchange of 16 bytes per parameter,
        read on the host.
        """
        self.size = comm.size
        self.shapes = tuple(shape for flat in flats for shape in flat.shapes)
        self._flats = flats
        self._rows: list[list[Interval]] | None = None
        self.key: Hashable
        if all(flat.offsets is not None and flat.shard_numel is not None for flat in flats):
            self.key = (self.size, tuple((flat.shapes, flat.offsets, flat.shard_numel) for flat in flats))
        else:
            self._rows = self._ask(comm)
            self.key = (self.size, self.shapes, tuple(map(tuple, self._rows)))

    def holders(self) -> list[list[HeldPart]]:
        """Of each parameter: the ranks that own a part of it, and their intervals, in order."""
        if self._rows is not None:
            columns = zip(*self._rows, strict=True)
            return [[(rank, *part) for rank, part in enumerate(column) if part[0] < part[1]] for column in columns]
        found = []
        for flat in self._flats:
            assert flat.offsets is not None and flat.shard_numel is not None
            for shape, offset in zip(flat.shapes, flat.offsets, strict=True):
                numel, each = shape.numel(), max(flat.shard_numel, 1)
                ranks = range(offset // each, min(-(-(offset + numel) // each), self.size))
                parts = [(rank, *_owned_by(rank, offset, numel, flat.shard_numel)) for rank in ranks]
                found.append([part for part in parts if part[1] < part[2]])
        return found

    def of(self, rank: int) -> list[Interval]:
        """The intervals of all parameters that ``rank`` owns."""
        if self._rows is not None:
            return self._rows[rank]
        parts = []
        for flat in self._flats:
            assert flat.offsets is not None and flat.shard_numel is not None
            for shape, offset in zip(flat.shapes, flat.offsets, strict=True):
                parts.append(_owned_by(rank, offset, shape.numel(), flat.shard_numel))
        return parts

    def _ask(self, comm: Communicator) -> list[list[Interval]]:
        own: list[int] = []
        for flat in self._flats:
            by_index = {part.parameter: part for part in flat.parts}
            for index in range(len(flat.shapes)):
                part = by_index.get(index)
                own += (0, 0) if part is None else (part.offset, part.offset + part.numel)
        vector = torch.tensor(own, dtype=torch.int64, device=self._flats[0].device)
        answers = comm.exchange(vector, label="optimizer.parts").wait()
        return [[(low, high) for low, high in row] for row in answers.view(self.size, -1, 2).tolist()]


def _owned_by(rank: int, offset: int, numel: int, shard_numel: int) -> Interval:
    low, high = max(offset, rank * shard_numel), min(offset + numel, (rank + 1) * shard_numel)
    return (low - offset, high - offset) if low < high else (0, 0)


def chunks(start: int, stop: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Consecutive ranges that fit a core's cache, or that bound a GPU's scratch."""
    numel = GPU_CHUNK_NUMEL if is_accelerator(device) else CPU_CHUNK_NUMEL
    for begin in range(start, stop, numel):
        yield begin, min(begin + numel, stop)
