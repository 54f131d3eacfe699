"""The kind of every tensor of one simulated rank along each mesh axis, through operators and collectives.

    with types.following():      every operator of this thread, forward and backward, gives its results kinds
    types.backend(backend, ...)  a backend whose collectives do too
    types.findings               what is wrong: operator, axis, line

An axis is a *digit* here: a run of ranks that every communicator has whole or not at all (``tp``, or its factors where
experts are split over some of its ranks), so that a collective changes the kinds along some digits and leaves the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.comm.fake import FakeStageCommunicator, FakeTransport
from shoal.comm.protocol import Backend, Call, Communicator, Work
from shoal.mesh import Mesh
from shoal.simulation.modes import tensors_of
from shoal.simulation.random_draws import RandomDraw, draw_of, need_of, wrong_draws
from shoal.simulation.spreads import (
    REPLICATED,
    VARIES,
    ZERO,
    Fault,
    Kind,
    OperatorCall,
    call_of,
    equal_factor,
    factor_of_results,
    kinds_of_results,
)

Kinds = tuple[Kind, ...]  # by digit
_HERE = str(Path(__file__).parent.parent) + "/"
_BETWEEN = (
    str(Path(torch.__file__).parent) + "/",
    _HERE + "simulation/",
    _HERE + "running/parameter_access.py",
    _HERE + "parallel/selective.py",
)
_BASIC = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_SAMPLES = ("dp_replicate", "dp_shard")
_DATA = (*_SAMPLES, "cp", "sp")


class Digit(NamedTuple):
    """Ranks ``0, stride, 2 * stride, ...``, ``size`` of them. ``axis``: of the mesh, that they are (a factor of)."""

    name: str
    axis: str
    stride: int
    size: int


@dataclass(frozen=True)
class TypeFinding:
    """One fault.

    Attributes: ``parameters``: whose gradient, or which an operator reads. ``place``: the line of the script's code, or
    the innermost one of Shoal's.
    """

    what: str
    axis: str
    operator: str
    place: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = f"{', '.join(self.parameters[:4])}{' ...' if len(self.parameters) > 4 else ''}: "
        return (
            f"{names if self.parameters else ''}{self.what}\n"
            f"  axis {self.axis}, operator {self.operator or '-'}\n  {self.place}"
        )


@dataclass
class _TypeRecord:
    kinds: Kinds
    version: int = 0
    parameter: str = ""  # of which this is a view or a copy
    scale: float | None = None  # of a gradient since it arrived, of a loss since it is one number; None: not known
    draw: RandomDraw | None = None  # whose numbers these are

    @property
    def factor(self) -> float | None:
        return 0.0 if all(kind is ZERO for kind in self.kinds) else self.scale


class Types:
    """Kinds and findings of one rank. Nothing is known before ``begin``."""

    def __init__(self) -> None:
        self.findings: list[TypeFinding] = []
        self.digits: tuple[Digit, ...] = ()
        self.groups: list[tuple[int, ...]] = []  # of all communicators of this rank
        self.uses: dict[str, tuple[str, str]] = {}  # by parameter: the operator that reads it first, and its line
        self.num_operators = 0
        self.table: dict[str, list[str]] = {}  # by parameter: a cell for each digit
        self.losses: list[tuple[float | None, str]] = []  # their factors, and lines
        self.draws: list[RandomDraw] = []
        self.is_drawing = False  # in a forward pass
        self.told: dict[
            tuple[object, ...], list[Any]
        ] = {}  # to the other ranks of a communicator, by its ranks and label
        self.first: Types | None = None  # of rank 0, where this is another rank
        self.is_stage = False  # of a pipeline
        self.has_failed = False  # an operator has refused tensors that are sharded
        self.messages: dict[object, list[Kinds]] = {}  # of pipeline stages, which share it
        self._records: MutableMapping[torch.Tensor, _TypeRecord] = WeakTensorKeyDictionary()
        self._parameters: dict[int, tuple[nn.Parameter, _TypeRecord]] = {}
        self._memory: dict[int, _TypeRecord] = {}  # by storage: what was last written to it
        self.of_parameters: set[int] = set()  # storages in which parameters are: their kinds stay
        self._version = 0
        self._places: dict[int, str] = {}  # by number of autograd's node
        self._num_paused = 0
        self._data: Kinds = ()  # of a batch as the model gets it
        self._given: Kinds = ()  # of tensors that no operator made: batches before they are cut

    # what is known

    def begin(self, mesh: Mesh) -> None:
        """The engine's mesh: from now on tensors have kinds."""
        points = {1, mesh.world_size}
        for ranks in [*self.groups, *(mesh.ranks_along(axis, 0) for axis in _BASIC)]:
            for stride, size in _extents(ranks):
                points |= {stride, stride * size}
        ordered = sorted(points)
        digits = []
        for stride, stop in pairwise(ordered):
            axis = next((axis for axis in _BASIC if _has(mesh, axis, stride)), None)
            if axis is not None:
                digits.append(Digit(axis, axis, stride, stop // stride))
        twice = [digit.axis for digit in digits]
        self.digits = tuple(
            digit if twice.count(digit.axis) == 1 else digit._replace(name=f"{digit.axis}/{digit.stride}")
            for digit in digits
        )
        self._data = tuple(VARIES if digit.axis in _DATA else REPLICATED for digit in self.digits)
        self._given = tuple(VARIES if digit.axis in _SAMPLES else REPLICATED for digit in self.digits)

    def along(self, ranks: Sequence[int]) -> set[int]:
        """The digits that the ranks of a communicator differ in; none where it has some ranks of one only."""
        found = {
            place
            for place, digit in enumerate(self.digits)
            if len({rank // digit.stride % digit.size for rank in ranks}) > 1
        }
        return found if prod(self.digits[place].size for place in found) == len(ranks) else set()

    def of_comm(self, comm: Communicator) -> set[int]:
        """The digits along which a communicator is."""
        return self.along(comm.backend.ranks) if isinstance(comm.backend, TypedBackend) else set()

    def kinds(self, tensor: torch.Tensor) -> Kinds:
        return self._record(tensor).kinds

    def _record(self, tensor: torch.Tensor) -> _TypeRecord:
        if id(tensor) in self._parameters:
            return self._parameters[id(tensor)][1]
        record = self._records.get(tensor)
        key = storage_of(tensor)
        written = None if key in self.of_parameters else self._memory.get(key)
        if written is not None and (record is None or written.version > record.version):
            return written
        return _TypeRecord(self._given) if record is None else record

    def factor(self, tensor: torch.Tensor) -> float | None:
        """The product of the host's numbers by which a gradient was multiplied since it arrived, or a loss.

        0: zeros. None: not known.
        """
        return self._record(tensor).factor

    def set(self, tensor: torch.Tensor, kinds: Kinds, factor: float | None = None) -> None:
        """Tell the kinds of a tensor that no operator made."""
        self._records[tensor] = _TypeRecord(kinds, self._version, scale=factor)

    def set_parameter(self, parameter: nn.Parameter, name: str, kinds: Kinds) -> None:
        self._parameters[id(parameter)] = parameter, _TypeRecord(kinds, parameter=name)

    def mark_inputs(self, values: Iterable[Any]) -> None:
        """Tensors of a batch: they vary over the ranks that see other samples or other parts of a sequence."""
        for tensor in _nested(values):
            pairs = zip(self.kinds(tensor), self._data, strict=True)
            self.set(tensor, tuple(own if isinstance(own, int) else kind for own, kind in pairs))

    def report(
        self, what: str, digits: Iterable[int], operator: str, place: str, parameters: tuple[str, ...] = ()
    ) -> None:
        """Add a finding; parameters join an earlier one that says the same."""
        for digit in digits:
            axis = self.digits[digit].name
            for number, each in enumerate(self.findings):
                if (each.what, each.axis, each.operator, each.place) == (what, axis, operator, place):
                    names = dict.fromkeys((*each.parameters, *parameters))
                    self.findings[number] = TypeFinding(what, axis, operator, place, tuple(names))
                    break
            else:
                self.findings.append(TypeFinding(what, axis, operator, place, parameters))

    # what changes it

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the operators of this thread inside the block."""
        token = _CURRENT.set(self)
        try:
            with _TypedOperators(self):
                yield
        finally:
            _CURRENT.reset(token)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1

    @property
    def is_paused(self) -> bool:
        return bool(self._num_paused) or not self.digits

    def place(self) -> str:
        """The line that runs now; in a backward pass that of the forward one, and the function of the node."""
        node: Any = torch._C._current_autograd_node()
        here = _line()
        if node is None:
            return here
        before = self._places.get(node._sequence_nr())
        return f"{node.name()}, the backward of {before}" if before else f"{node.name()} {here}"

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator has run."""
        self.num_operators += 1
        call = call_of(func, args, kwargs, result)
        number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        if torch._C._current_autograd_node() is None and number not in self._places:
            self._places[number] = _line()
        records = [self._record(tensor) for tensor in call.tensors]
        given = [record.kinds for record in records]
        names = tuple(dict.fromkeys(record.parameter for record in records if record.parameter))
        columns: list[list[Kind]] = []
        for digit in range(len(self.digits)):
            own = [kinds[digit] for kinds in given]
            if own and all(kind is ZERO for kind in own) and _in_transport():
                columns.append([ZERO] * len(call.outs))  # what is encoded, also by a scale, is decoded as zeros
                continue
            try:
                columns.append(kinds_of_results(call, own))
            except Fault as fault:
                columns.append([VARIES] * len(call.outs))
                # Each rank's loss may be any function of its samples; a quotient of sums over a cut sequence is none.
                if (self.digits[digit].axis not in _DATA or fault.is_quotient) and not _in_transport():
                    self.report(str(fault), [digit], str(func), self.place(), names)
        factor = factor_of_results(call, [self.factor(tensor) for tensor in call.tensors])
        if factor is None and call.outs and not call.outs[0].dim() and any(tensor.dim() for tensor in call.tensors):
            factor = 1.0  # one number, made of several: a loss
        draw = self._draw(func, call, records)
        passes_on = names[0] if len(names) == 1 and call.name in _PASSES_ON else ""
        for name in names if not passes_on else ():
            self.uses.setdefault(name, (str(func), self.place()))
        for out, kinds in zip(call.outs, zip(*columns, strict=True), strict=True):
            if any(out is each for each in call.written):
                self.wrote(out, kinds, factor, draw)
                continue
            if self._memory and call.name not in _VIEWING:
                self._memory.pop(storage_of(out), None)
            self._records[out] = _TypeRecord(kinds, self._version, passes_on, factor, draw)

    def _draw(self, func: Any, call: OperatorCall, records: Sequence[_TypeRecord]) -> RandomDraw | None:
        """The draw whose random numbers the results are; None: they are none, or have met other tensors."""
        if not self.is_drawing:
            return None
        given = list(zip(call.tensors, records, strict=True))
        draw = draw_of(func, call, self.place()) if call.outs else None
        if draw is not None:
            self.draws.append(draw)
            is_of_shape = call.name.endswith("_like") or call.written
            met = {} if is_of_shape else {id(draw): (draw, call.outs[0])}
        else:
            met = {id(record.draw): (record.draw, tensor) for tensor, record in given if record.draw is not None}
        others = [(tensor, record.kinds) for tensor, record in given if record.draw is None and record.factor != 0]
        if draw is not None and not met:
            return draw
        if not others or not met:
            return next((each for each, _ in met.values()), None)
        for each, numbers in met.values() if call.is_pointwise or draw is not None else ():
            each.needs = tuple(
                need_of(numbers, [(tensor, kinds[place]) for tensor, kinds in others], is_data=digit.axis in _DATA)
                for place, digit in enumerate(self.digits)
            )
        return None

    def compare_draws(self, other: Types, digit: int) -> None:
        """Report random numbers that a rank with another coordinate must draw too, or must not."""
        for what, draw in wrong_draws(self.draws, other.draws, digit):
            self.report(what, [digit], draw.operator, draw.place)

    def failed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        """An operator has refused its tensors: a fault of a plan, where a parameter is one of them."""
        records = [(tensor, self._record(tensor)) for tensor in tensors_of([args, *kwargs.values()])]
        names = tuple(dict.fromkeys(record.parameter for _, record in records if record.parameter))
        for digit in range(len(self.digits)):
            kinds = [record.kinds[digit] for _, record in records]
            num_parts = sum(isinstance(kind, int) for kind in kinds)
            if num_parts and (names or num_parts < len(kinds)):
                given = ", ".join(
                    f"{word(kind)} {tuple(tensor.shape)}" for kind, (tensor, _) in zip(kinds, records, strict=True)
                )
                what = f"{str(error).splitlines()[0]} (tensors: {given})"
                self.report(what, [digit], str(func), self.place(), names)
                self.has_failed = True

    def wrote(
        self, tensor: torch.Tensor, kinds: Kinds, factor: float | None = None, draw: RandomDraw | None = None
    ) -> None:
        """Values were written to a tensor; other tensors of its memory see them."""
        self._version += 1
        key = storage_of(tensor)
        flat: Kinds = tuple(VARIES if isinstance(kind, int) else kind for kind in kinds)
        before = self._memory.get(key)
        record = _TypeRecord(kinds, self._version, scale=factor, draw=draw)
        if tensor.nbytes < tensor.untyped_storage().nbytes() and before is not None:
            flat = tuple(_both(*pair) for pair in zip(before.kinds, flat, strict=True))
            factor = equal_factor([before.factor, factor])
        self._memory[key] = _TypeRecord(flat, self._version, scale=factor, draw=draw)
        if id(tensor) not in self._parameters:
            self._records[tensor] = record

    def collective(self, call: Call, ranks: Sequence[int], axis: str) -> None:
        """A collective was issued: what its result will have."""
        along = self.along(ranks)
        sent = self.kinds(call.sent)
        if call.verb in ("all_reduce", "reduce_scatter", "all_gather") and call.sent.is_floating_point():
            same = [digit for digit in along if sent[digit] is REPLICATED]
            does = "counted" if call.verb != "all_gather" else "there"
            same = [digit for digit in same if does == "counted" or self.digits[digit].axis not in _DATA]
            what = f"{call.verb} {call.label!r} of a replicated tensor: it is {does} {len(ranks)} times"
            self.report(what, same, call.verb, self.place())
        after: Kind = REPLICATED if call.verb in ("all_reduce", "all_gather", "broadcast", "exchange") else VARIES
        flat = [VARIES if isinstance(kind, int) else kind for kind in sent]
        kinds = tuple(after if digit in along else kind for digit, kind in enumerate(flat))
        factor = self.factor(call.sent)
        factor = None if factor is None else factor * call.scale
        if call.verb == "reduce_scatter" and call.accumulate:
            kinds = tuple(_both(*pair) for pair in zip(self.kinds(call.result), kinds, strict=True))
            factor = equal_factor([self.factor(call.result), factor])
        if call.verb == "send":
            self.messages.setdefault((axis, ranks, call.label), []).append(sent)
        elif call.verb != "recv":
            self.wrote(call.result, kinds, factor)

    def received(self, call: Call, ranks: tuple[int, ...], axis: str) -> None:
        """A message has arrived: of the kinds that one with its label had when it was sent."""
        sent = self.messages.get((axis, ranks, call.label))
        along = self.along(ranks)
        kinds = sent[-1] if sent else self._data
        self.wrote(call.result, tuple(VARIES if digit in along else kind for digit, kind in enumerate(kinds)))

    def divided(self, whole: torch.Tensor, part: torch.Tensor, dim: int, ranks: Sequence[int], label: str) -> None:
        """A rank takes its own part, along ``dim``, of what all ranks have."""
        along, kinds = self.along(ranks), self.kinds(whole)
        wrong = [digit for digit in along if kinds[digit] not in (REPLICATED, ZERO)]
        if wrong:
            what = f"{label!r} takes each rank's part of a tensor that is not replicated but {word(kinds[wrong[0]])}"
            self.report(what, wrong, "split", self.place())
        self.set(part, tuple(dim if digit in along else kind for digit, kind in enumerate(self.kinds(part))))


class TypedBackend(Backend):
    """A backend whose results have kinds."""

    def __init__(self, backend: Backend, types: Types, ranks: tuple[int, ...]) -> None:
        super().__init__(backend.axis, backend.rank, backend.size)
        self.ranks = ranks
        self._backend, self._types = backend, types
        self.barrier = backend.barrier  # type: ignore[method-assign]

    def issue(self, call: Call) -> Work:
        if call.messages:
            return self.issue_each(call)
        types = self._types
        with types.paused():
            work = self._backend.issue(call)
        if not types.digits:
            return work
        types.collective(call, self.ranks, self.axis)
        stages = self._backend
        if isinstance(stages, FakeStageCommunicator) and call.verb == "send":
            stages.post(call.peer, call.label, call.result, 0.0)
        elif isinstance(stages, FakeStageCommunicator) and call.verb == "recv":
            arrive = partial(stages.take, call.peer, stages.expect(call.peer), call.label, call.result)
            return _Arriving(work, partial(types.received, call, self.ranks, self.axis), arrive)
        elif call.verb == "recv":
            types.received(call, self.ranks, self.axis)
        return work

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        """What rank 0 has told is known to another rank of its communicators."""
        values, told = list(self._backend.gather_objects(value, label=label)), self._types.told
        before = told.setdefault((self.ranks, label), [])
        first = self._types.first
        if first is not None and len(first.told.get((self.ranks, label), ())) > len(before):
            values[0] = first.told[self.ranks, label][len(before)]
        before.append(value)
        return values

    def divides(self, whole: torch.Tensor, part: torch.Tensor, dim: int, label: str) -> None:
        if self._types.digits:
            self._types.divided(whole, part, dim % whole.dim(), self.ranks, label)


@dataclass
class _Arriving:
    """A message of another stage: it has kinds once that stage has sent it."""

    work: Work
    receive: Callable[[], None]
    arrive: Callable[[], object] | None

    def wait(self) -> torch.Tensor:
        if self.arrive is not None:
            self.arrive()
            self.arrive = None
            self.receive()
        return self.work.wait()

    def drain(self) -> None:
        self.wait()


class TypedTransport:
    """Opens communicators of a simulated rank whose results have kinds."""

    def __init__(self, transport: FakeTransport, types: Types, rank: int) -> None:
        self._transport, self._types, self._rank = transport, types, rank
        self.report_failure, self.close = transport.report_failure, transport.close

    def open(
        self, axis: str, groups: Sequence[tuple[int, ...]], max_ctas: int | None = None, number: int = 0
    ) -> Backend:
        ranks = next(group for group in groups if self._rank in group)
        self._types.groups.append(tuple(rank - ranks[0] for rank in ranks))
        return TypedBackend(self._transport.open(axis, groups, max_ctas, number), self._types, ranks)


_CURRENT: ContextVar[Types | None] = ContextVar("followed types", default=None)


def current_types() -> Types | None:
    """Those of the innermost ``following`` block of this thread."""
    return _CURRENT.get()


class _TypedOperators(TorchDispatchMode):
    def __init__(self, types: Types) -> None:
        super().__init__()
        self._types = types

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # what fake tensors ask most often, answered without their mode
            is_device = func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
            return args[0].fake_device if is_device else func(*args, **kwargs)
        if any(kind not in (torch.Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            if not self._types.is_paused:
                self._types.failed(func, args, kwargs, error)
            raise
        if not self._types.is_paused:
            with self._types.paused():
                self._types.operator(func, args, kwargs, result)
        return result


_VIEWS = (
    "view reshape _reshape_alias t transpose permute expand slice select split unbind split_with_sizes detach alias"
    " squeeze unsqueeze as_strided chunk narrow diagonal unfold"
)
_VIEWING = frozenset(_VIEWS.split())
_PASSES_ON = _VIEWING | {"_to_copy", "clone", "_unsafe_view"}


def _both(one: Kind, other: Kind) -> Kind:
    """Of memory in which some values have one kind and some another."""
    if ZERO in (one, other):
        return other if one is ZERO else one
    return one if one == other else VARIES


def word(kind: Kind) -> str:
    return f"sharded (dim {kind})" if isinstance(kind, int) else "varying" if kind is VARIES else kind


def _extents(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Strides and sizes of the nested runs that the ranks are, the fastest first."""
    offsets = [rank - ranks[0] for rank in ranks]
    while len(offsets) > 1:
        stride, size = offsets[1], 1
        while size < len(offsets) and offsets[size] == size * stride:
            size += 1
        yield stride, size
        offsets = offsets[::size]


def _has(mesh: Mesh, axis: str, stride: int) -> bool:
    """True if neighbours at this distance are on one axis."""
    ranks = mesh.ranks_along(axis, 0)
    return len(ranks) > 1 and ranks[1] <= stride < ranks[1] * len(ranks)


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _nested(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for each in value:
            yield from _nested(each)


def _in_transport() -> bool:
    """True in what encodes tensors for a message."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_HERE + "comm/"):
        name = frame.f_code.co_filename
        if not name.startswith(_BETWEEN):
            return False
        frame = frame.f_back
    return frame is not None


def _line() -> str:
    """The innermost line of the script, and the one of Shoal that it runs."""
    frame: Any = sys._getframe(1)
    own = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_BETWEEN) and "<" not in name:
            if not name.startswith(_HERE):
                at = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
                return f"{at} (shoal/{own})" if own else at
            own = own or f"{name.removeprefix(_HERE)}:{frame.f_lineno}"
        frame = frame.f_back
    return f"shoal/{own}" if own else "?"
