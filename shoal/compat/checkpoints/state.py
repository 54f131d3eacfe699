"""What DeepSpeed's optimizer held, as flat tensors, and which range of which of them is which parameter.

At stages 1 and 2 the parameters of a group lie one behind the other, and each rank holds an equal part of the whole:

    group      [ embed 77 | up 91 | down 91 | padding 1 ]            2 ranks, 130 elements each
    rank 0     [ embed 77 | up 53 ]
    rank 1                [ up 38 | down 91 | padding 1 ]

At stage 3 each parameter is cut into as many equal parts as there are ranks, and a rank holds its part of each:

    rank 0     [ embed 39 | up 46 | down 46 ]
    rank 1     [ embed 38, padding 1 | up 45, padding 1 | down 45, padding 1 ]

At stage 0 every tensor is whole, and is a flat tensor of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.portable import TensorInfo, join
from shoal.checkpoint.problems import damaged_copy, unsafe
from shoal.checkpoint.rectangles import Rectangle
from shoal.errors import CheckpointError

Flat = dict[str, torch.Tensor]  # by kind: MODEL for the weights, "optimizer/KEY" for the optimizer's
# Of a group and its members: some of them, and the ranks that hold them, in the order of their parts.
Holders = Callable[[int, Mapping[str, Sequence[int]]], Iterable[tuple[Mapping[str, Sequence[int]], Sequence[int]]]]
_MAX_REPEATED_BYTES = 64 << 20  # of a buffer that was expanded
# What a group has in addition to hyperparameters: its members, and how, not what, its optimizer computes.
_NO_HYPERPARAMETERS = ("params", "param_names", "step", "foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class FlatRange:
    """Elements ``start`` to ``start + numel`` of flat tensor ``flat`` of ``rank``."""

    rank: int
    flat: int
    start: int
    numel: int


@dataclass(frozen=True)
class StateTensor:
    """A parameter, or state of it, and how it is read whole."""

    info: TensorInfo
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StateTensor:
        """A tensor that is mapped from a file; reading copies it."""
        copy = partial(tensor.detach().clone, memory_format=torch.contiguous_format)
        return cls(TensorInfo(tensor.dtype, tuple(tensor.shape)), copy)


Tensors = Mapping[str, StateTensor]  # by name


@dataclass(kw_only=True)
class NamedState:
    """The optimizer's state by parameter, wherever it lies.

    Args:
        tensors: by kind and parameter: ``MODEL``, if there are weights, and the optimizer's keys.
        groups: hyperparameters.
    """

    tensors: dict[str, dict[str, StateTensor]] = field(default_factory=dict)
    group_of: dict[str, int] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def kinds(self) -> list[str]:
        return sorted(self.tensors, key=lambda kind: kind != MODEL)


def merged(parts: Iterable[NamedState]) -> NamedState:
    """The state of several optimizers; of a parameter that several have, that of the first one."""
    result = NamedState()
    for part in parts:
        for kind, tensors in part.tensors.items():
            known = result.tensors.get(kind, {})
            result.tensors[kind] = {**known, **tensors, **known}
        result.group_of = {**result.group_of, **part.group_of, **result.group_of}
        result.scalars = {**result.scalars, **part.scalars, **result.scalars}
        result.groups += part.groups[len(result.groups) :]
        result.notes += [note for note in part.notes if note not in result.notes]
    return result


@dataclass(frozen=True)
class EqualParts:
    """Stage 3: equal parts at one offset on each of the ranks that share a tensor, the last ones padded."""

    flat: int
    start: int
    numel: int
    ranks: Sequence[int]

    @property
    def numel_per_rank(self) -> int:
        return -(-self.numel // len(self.ranks))

    def __iter__(self) -> Iterator[FlatRange]:
        part = self.numel_per_rank
        for index, rank in enumerate(self.ranks):
            numel = min(part, self.numel - index * part)
            if numel > 0 or index == 0:
                yield FlatRange(rank, self.flat, self.start, numel)


@dataclass
class FlatState(NamedState):
    """The optimizer's state in flat tensors.

    Args:
        flats: of each rank, its flat tensors. They are mapped from the files.
        files: names the ranks' files in errors.
    """

    flats: list[list[Flat]]
    files: list[str]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    places: dict[str, Iterable[FlatRange]] = field(default_factory=dict)

    def add(
        self, name: str, shape: Sequence[int], group: int, places: Iterable[FlatRange], scalars: Mapping[str, Any]
    ) -> None:
        """Raises: CheckpointError: the parts are not the whole, or not in the files."""
        numel = math.prod(shape)
        num_stored = 0
        for place in places:
            num_stored += place.numel
            for kind, flat in self.flats[place.rank][place.flat].items():
                if place.start < 0 or place.start + place.numel > flat.numel():
                    raise damaged(
                        f"{kind} of group {place.flat} has {flat.numel()} elements, too few for {name}, which lies at"
                        f" {place.start} to {place.start + place.numel}",
                        self.files[place.rank],
                    )
                check_stored(f"{kind} of group {place.flat}", flat, self.files[place.rank])
        if num_stored != numel:
            raise damaged(f"{num_stored} of the {numel} elements of {name} are in the files", ", ".join(self.files[:4]))
        if name in self.shapes:
            raise damaged(f"{name} is in two groups", self.files[0])
        self.shapes[name] = tuple(shape)
        self.places[name] = places
        self.group_of[name] = group
        if scalars:
            self.scalars[name] = dict(scalars)
        for first in islice(places, 1):
            for kind, flat in self.flats[first.rank][first.flat].items():
                info = TensorInfo(flat.dtype, tuple(shape))
                # Without a reference to this object, so that the files are unmapped once nothing refers to it.
                read = partial(_joined, self.flats, self.files, places, kind, name, info)
                self.tensors.setdefault(kind, {})[name] = StateTensor(info, read)

    def take(self, name: str) -> tuple[tuple[int, ...], Iterable[FlatRange], int, dict[str, Any]]:
        """Remove a parameter. Returns: its shape, places, group and scalars."""
        for tensors in self.tensors.values():
            tensors.pop(name, None)
        return self.shapes.pop(name), self.places.pop(name), self.group_of.pop(name), self.scalars.pop(name, {})


def _joined(
    flats: Sequence[Sequence[Flat]],
    files: Sequence[str],
    places: Iterable[FlatRange],
    kind: str,
    name: str,
    info: TensorInfo,
) -> torch.Tensor:
    """Memory: the tensor's bytes. Raises: CheckpointError: a rank's file lacks its part."""

    def slices() -> Iterator[tuple[Rectangle, torch.Tensor]]:
        at = 0
        for place in places:
            flat = flats[place.rank][place.flat].get(kind)
            if flat is None:
                raise damaged(f"{kind} of {name} is missing in group {place.flat}", files[place.rank])
            yield Rectangle((at,), (place.numel,)), flat.reshape(-1)[place.start : place.start + place.numel]
            at += place.numel

    return join(TensorInfo(info.dtype, (math.prod(info.shape),)), slices()).view(info.shape)


def held_by_all(num_ranks: int) -> Holders:
    """Every rank holds a part of each group."""
    return lambda group, members: [(members, range(num_ranks))]


def read_partitioned(
    states: list[dict[str, Any]],
    shapes: list[Mapping[str, Sequence[int]]],
    files: list[str],
    holders: Holders,
) -> FlatState:
    """Stages 1 and 2.

    Args:
        states: ``optimizer_state_dict`` of each rank.
        shapes: of each group, the parameters in the order in which they lie.

    Raises: CheckpointError: the files contradict each other.
    """
    base = _entries(states, "base_optimizer_state", files)
    weights = _entries(states, "single_partition_of_fp32_groups", files)
    paddings = [state.get("group_paddings", [0] * len(shapes)) for state in states]

    def numels(rank: int, index: int) -> tuple[int, ...]:
        numel = weights[rank][index].numel()
        return numel, numel + int(paddings[rank][index])

    trained, scalars = _collected(weights, base, len(shapes), numels, files)
    trained.groups, steps = hyperparameters(base[0], len(shapes), trained.notes)
    gaps = states[0].get("param_alignment_paddings")
    for group, members in enumerate(shapes):
        for subset, ranks in holders(group, members):
            where = _lined_up(
                [weights[rank][group].numel() for rank in ranks],
                [int(paddings[rank][group]) for rank in ranks],
                [int(gap) for gap in gaps[group]] if gaps else [0] * len(subset),
                group,
                subset,
                [files[rank] for rank in ranks],
            )
            for name, shape in subset.items():
                numbers = {**steps[group], **scalars[group]}
                places = [replace(place, rank=ranks[place.rank]) for place in where[name]]
                trained.add(name, tuple(shape), group, places, numbers if math.prod(shape) else {})
    return trained


def read_spread(
    states: list[dict[str, Any]],
    shapes: list[Mapping[str, Sequence[int]]],
    files: list[str],
    holders: Holders,
) -> FlatState:
    """Stage 3: as ``read_partitioned``, with flat tensors in place of groups."""
    shares = [list(holders(index, members)) for index, members in enumerate(shapes)]
    weights = _entries(states, "fp32_flat_groups", files)
    base = _entries(states, "optimizer_state_dict", files)

    def numels(rank: int, index: int) -> tuple[int, ...]:
        ranks = next(ranks for _, ranks in shares[index] if rank in ranks)
        needed = sum(-(-math.prod(shape) // len(ranks)) for shape in shapes[index].values())
        if (result := weights[rank][index].numel()) != needed:
            raise damaged(f"flat group {index} has {result} elements, expected {needed}", files[rank])
        return (needed,)

    trained, scalars = _collected(weights, base, len(shapes), numels, files)
    of_flat = {
        int(index): group
        for group, settings in enumerate(entry(base[0], "param_groups", files[0]))
        for index in settings["params"]
    }
    trained.groups, steps = hyperparameters(base[0], max(of_flat.values(), default=-1) + 1, trained.notes)
    for index, share in enumerate(shares):
        for subset, ranks in share:
            start = 0
            for name, shape in subset.items():
                spread = EqualParts(index, start, math.prod(shape), ranks)
                group = of_flat.get(index, 0)
                trained.add(name, tuple(shape), group, spread, {**steps[group], **scalars[index]})
                start += spread.numel_per_rank
    return trained


def _entries(states: list[dict[str, Any]], key: str, files: list[str]) -> list[Any]:
    return [entry(state, key, file) for state, file in zip(states, files, strict=True)]


def _collected(
    weights: list[Any], base: list[Any], expected: int, numels: Callable[[int, int], tuple[int, ...]], files: list[str]
) -> tuple[FlatState, list[dict[str, Any]]]:
    """The flat tensors of all ranks; and of each, from rank 0, the optimizer's entries of one number.

    Args:
        expected: number of flat tensors in a file.
        numels: by rank and flat tensor, how many elements its optimizer state may have.
    """
    trained = FlatState([], files)
    scalars: list[dict[str, Any]] = []
    for rank, (flats, file) in enumerate(zip(weights, files, strict=True)):
        if not isinstance(flats, list) or not all(isinstance(flat, torch.Tensor) for flat in flats):
            raise damaged("the flat weights are not a list of tensors", file)
        if len(flats) != expected:
            raise damaged(f"{len(flats)} flat groups, and the model file speaks of {expected}", file)
        trained.flats.append([])
        for index, flat in enumerate(flats):
            tensors, numbers = sort_state(_state_of(base[rank], index, file), numels(rank, index), trained.notes)
            trained.flats[rank].append({MODEL: flat.detach(), **tensors})
            if rank == 0:
                scalars.append(numbers)
    return trained, scalars


def sort_state(
    state: Mapping[str, Any], numels: Sequence[int], notes: list[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's entries: those with an element for each of the weights, by kind, and those of one number.

    Args:
        numels: how many elements the former may have.
        notes: gets a sentence for each entry that is neither.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for key, value in state.items():
        # A parameter of one number without a dim has state like that too.
        if isinstance(value, torch.Tensor) and value.dim() == 0 and (key == "step" or 1 not in numels):
            numbers[key] = _as_counted(value) if key == "step" else value.detach().clone()
        elif isinstance(value, torch.Tensor) and value.numel() in numels:
            tensors[f"optimizer/{key}"] = value.detach()
        elif isinstance(value, bool | int | float):
            numbers[key] = _as_counted(value) if key == "step" else value
        elif value is not None:
            note = f"The optimizer's {key!r} is not one value per element of the weights, and was left out."
            if note not in notes:
                notes.append(note)
    return tensors, numbers


def hyperparameters(base: Any, count: int, notes: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of each group, its hyperparameters, and its step where the optimizer counts there.

    Args:
        base: the optimizer's ``state_dict()``; or a list without settings, which elastic checkpoints have.
    """
    if not isinstance(base, Mapping):
        notes.append("An elastic checkpoint does not hold the groups' hyperparameters (lr, betas, ...).")
        return [{} for _ in range(count)], [{} for _ in range(count)]
    groups, steps = [], []
    for group in list(base.get("param_groups", ()))[:count]:
        plain = {key: value.item() if _is_number(value) else value for key, value in group.items()}
        if isinstance(plain.get("betas"), list):  # as JSON has it
            plain["betas"] = tuple(plain["betas"])
        steps.append({"step": _as_counted(plain["step"])} if "step" in plain else {})
        groups.append({key: value for key, value in plain.items() if key not in _NO_HYPERPARAMETERS and key[:1] != "_"})
    missing = count - len(groups)
    return groups + [{}] * missing, steps + [{}] * missing


def entry(state: Any, key: str, file: str) -> Any:
    """Raises: CheckpointError: no such entry."""
    if not isinstance(state, Mapping) or key not in state:
        raise damaged(f"entry {key!r} is missing", file)
    return state[key]


def check_stored(what: str, tensor: torch.Tensor, file: str) -> None:
    """Raises: CheckpointError: a file's few bytes claim to be a large tensor, by strides of 0."""
    if tensor.nbytes > max(tensor.untyped_storage().nbytes(), _MAX_REPEATED_BYTES):
        stored_nbytes = tensor.untyped_storage().nbytes()
        raise unsafe(f"{what} is {tensor.nbytes} bytes, of which the file holds {stored_nbytes}.", file)


def damaged(what: str, where: str) -> CheckpointError:
    return damaged_copy(f"the checkpoint is not whole: {what}.", where)


def _as_counted(step: Any) -> torch.Tensor:
    """The step as PyTorch's optimizers hold it; DeepSpeed's own hold an integer."""
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _state_of(base: Any, index: int, file: str) -> Mapping[str, Any]:
    """The optimizer's entries for one flat tensor; none before the first step."""
    if isinstance(base, list):
        state = base[index] if index < len(base) else {}
    else:
        state = entry(base, "state", file).get(index, {})
    if not isinstance(state, Mapping):
        raise damaged(f"the optimizer's state of group {index} is a {type(state).__name__}", file)
    return state


def _lined_up(
    sizes: list[int],
    paddings: list[int],
    gaps: Sequence[int],
    group: int,
    members: Mapping[str, Sequence[int]],
    files: list[str],
) -> dict[str, list[FlatRange]]:
    """Where the parameters of a group lie, one behind the other over all ranks.

    DeepSpeed also writes down where each of them lies (``param_slice_mappings``), but in another order than they do
    when ``round_robin_gradients`` is on (0.19.8), so this goes by the shapes, as its ``zero_to_fp32.py`` does.

    Args:
        sizes: elements in each rank's file.
        paddings: elements at a rank's end that were left out of it.
        gaps: elements after each parameter that are nobody's.
    """
    parts = set(sizes)
    if len(parts) > 1:
        parts = {size + padding for size, padding in zip(sizes, paddings, strict=True)}
    if len(parts) > 1:
        raise damaged(f"the ranks' parts of group {group} have {sorted(parts)} elements", files[0])
    part = parts.pop()
    if len(gaps) != len(members):
        raise damaged(f"{len(gaps)} paddings for the {len(members)} parameters of group {group}", files[0])
    ranges: dict[str, list[FlatRange]] = {}
    at = 0
    for (name, shape), gap in zip(members.items(), gaps, strict=True):
        end = at + math.prod(shape)
        if end > part * len(sizes):
            raise damaged(f"group {group} ends before {name}", files[-1])
        ranges[name] = []
        while at < end:
            rank, start = divmod(at, part)
            numel = min(end - at, part - start)
            ranges[name].append(FlatRange(rank, group, start, numel))
            at += numel
        at += gap
    return ranges
