"""Stage 0: an optimizer's state without names, and how each tensor finds its parameter.

DeepSpeed keeps the optimizer's ``state_dict()`` as it is: groups of numbered tensors. The parameters are known in the
model's order. What is assumed is that a group lists its parameters in that order too (as a comprehension over
``model.parameters()`` does); then few assignments fit, because shapes have to agree, and in 16 bits the values as well:
the optimizer's fp32 weight rounds to the model's. Exactly one has to fit, or else the caller has to say the names.

    model          embed [11, 7]   up [13, 7]   bias [13]   norm [7]
    group 0        [11, 7]         [13, 7]                              -> embed, up
    group 1                                     [13]        [7]         -> bias, norm

Where AutoEP has replaced parameters of groups that the script has given, it takes them out of theirs and appends the
new ones, and DeepSpeed then splits the experts off into groups of their own:

    the script      embed    gate     gate_up_proj    down_proj    shared_expert    head
    AutoEP          embed    shared_expert    head    router.gate          w1    w2    w3

A group that DeepSpeed makes itself is in the order of the model. Exactly one of the two orders has to fit, or both have
to give the same tensors the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shoal.checkpoint.manifest import MODEL
from shoal.compat.checkpoints.autoep import AutoEpLayer, of_expert, on_rank, under
from shoal.compat.checkpoints.autoep_names import ModelNames
from shoal.compat.checkpoints.state import Flat, FlatRange, FlatState, entry, hyperparameters, sort_state
from shoal.errors import CheckpointError

_MAX_STATES = 20_000


class _SeparateTensors:
    """A group's tensors in order, one for each parameter; ``first`` is the number of the first one.

    A position is where the next parameter's begins.
    """

    def __init__(self, first: int, flats: list[Flat]) -> None:
        self._first, self._flats = first, flats
        self.end = len(flats)

    def fits(self, position: int, tensor: torch.Tensor, *, by_value: bool) -> int | None:
        """The next position, if a parameter with the weights ``tensor`` can be the one here; None: it cannot."""
        flats = self._flats[position]
        if any(flat.shape != tensor.shape for flat in flats.values()):
            return None
        if by_value and MODEL in flats and not _rounds_to(flats[MODEL], tensor):
            return None
        return position + 1

    def fewest(self, position: int) -> int:
        """How many parameters are still to come at least."""
        return self.end - position

    def place(self, position: int, tensor: torch.Tensor) -> FlatRange:
        return FlatRange(0, self._first + position, 0, tensor.numel())


class _FlatGroup:
    """All of a group's parameters in one flat tensor, which has the number ``index``."""

    def __init__(self, index: int, weights: torch.Tensor) -> None:
        self._index, self._weights, self.end = index, weights, weights.numel()

    def fits(self, position: int, tensor: torch.Tensor, *, by_value: bool) -> int | None:
        end = position + tensor.numel()
        if end > self.end or end == position:
            return None
        if by_value and not _rounds_to(self._weights[position:end].view(tensor.shape), tensor):
            return None
        return end

    def fewest(self, position: int) -> int:
        return int(position < self.end)

    def place(self, position: int, tensor: torch.Tensor) -> FlatRange:
        return FlatRange(0, self._index, position, tensor.numel())


_UnnamedGroup = _SeparateTensors | _FlatGroup


def read_unnamed(
    state: dict[str, Any],
    parameters: Mapping[str, torch.Tensor],
    names: Sequence[Sequence[str]] | None,
    file: str,
) -> FlatState:
    """The optimizer's state at stage 0.

    Args:
        state: ``optimizer`` of the model file.
        parameters: the model's, in its order, each once.
        names: of each group, its parameters, where the caller knows them.

    Raises: CheckpointError: no assignment of names fits, or more than one.
    """
    masters, joined = state.get("fp32_groups"), state.get("fp32_groups_flat")
    base = state.get("optimizer_state_dict", state)
    groups = entry(base, "param_groups", file)
    trained = FlatState([[]], [file])
    flats = trained.flats[0]
    scalars: list[dict[str, Any]] = []
    rows: list[_UnnamedGroup] = []
    for index, group in enumerate(groups):
        first = len(flats)
        for position, number in enumerate(group["params"]):
            entries = entry(base, "state", file).get(number, {})
            weights = joined[index] if joined is not None else masters[index][position] if masters is not None else None
            numel = weights.numel() if weights is not None else _numel_of(entries)
            tensors, numbers = sort_state(entries, (numel,), trained.notes)
            flats.append({**({} if weights is None else {MODEL: weights.detach()}), **tensors})
            scalars.append(numbers)
        rows.append(
            _SeparateTensors(first, flats[first:]) if joined is None else _FlatGroup(first, joined[index].detach())
        )
    trained.groups, steps = hyperparameters(base, len(groups), trained.notes)
    said = names if names is not None else _said(groups)
    places = _follow(said, rows, parameters, file) if said is not None else _search(rows, parameters, file)
    for name, (index, place) in places.items():
        shape = tuple(parameters[name].shape)
        trained.add(name, shape, index, [place], {**steps[index], **scalars[place.flat]})
    return trained


def _said(groups: list[dict[str, Any]]) -> list[list[str]] | None:
    """The names, of an optimizer that was made from named parameters."""
    if not all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        return None
    return [list(group["param_names"]) for group in groups]


def _follow(
    names: Sequence[Sequence[str]], rows: Sequence[_UnnamedGroup], parameters: Mapping[str, torch.Tensor], file: str
) -> dict[str, tuple[int, FlatRange]]:
    places = {}
    if len(names) != len(rows):
        raise unclear(f"{len(names)} groups were named, and the optimizer has {len(rows)}", file)
    for index, (group, row) in enumerate(zip(names, rows, strict=True)):
        position = 0
        for name in group:
            if name not in parameters:
                raise unclear(f"the model has no parameter {name!r}", file)
            after = row.fits(position, parameters[name], by_value=False) if position < row.end else None
            if after is None:
                raise unclear(f"{name} is not the tensor at {position} of group {index}", file)
            places[name] = (index, row.place(position, parameters[name]))
            position = after
        if position != row.end:
            raise unclear(f"group {index} has more tensors than names", file)
    return places


def _search(
    rows: Sequence[_UnnamedGroup], parameters: Mapping[str, torch.Tensor], file: str
) -> dict[str, tuple[int, FlatRange]]:
    """The one way to give each tensor a name, in the model's order."""
    end = tuple(row.end for row in rows)
    # After each parameter, the positions that the rows can be at: in how many ways, from where, and by which row.
    steps: list[dict[tuple[int, ...], _Reached]] = [{(0,) * len(rows): _Reached(1, (), None)}]
    for count, tensor in enumerate(parameters.values(), start=1):
        reached: dict[tuple[int, ...], _Reached] = {}
        fitting: dict[tuple[int, int], int | None] = {}
        for before, how in steps[-1].items():
            options: list[tuple[tuple[int, ...], int | None]] = [(before, None)]  # None: it is not trained
            for index, row in enumerate(rows):
                at = before[index]
                if at < row.end:
                    if (index, at) not in fitting:
                        fitting[index, at] = row.fits(at, tensor, by_value=True)
                    after = fitting[index, at]
                    if after is not None:
                        options.append(((*before[:index], after, *before[index + 1 :]), index))
            for positions, taken in options:
                to_come = sum(row.fewest(at) for row, at in zip(rows, positions, strict=True))
                if to_come <= len(parameters) - count:
                    ways = how.ways + (reached[positions].ways if positions in reached else 0)
                    reached[positions] = _Reached(ways, before, taken)
        if len(reached) > _MAX_STATES:
            raise unclear("too many assignments of names to its tensors are possible", file)
        steps.append(reached)
    ways = steps[-1][end].ways if end in steps[-1] else 0
    if ways != 1:
        raise unclear(f"{ways or 'no'} assignments of names to its tensors fit", file)
    places: dict[str, tuple[int, FlatRange]] = {}
    positions = end
    for (name, tensor), reached in zip(reversed(list(parameters.items())), reversed(steps), strict=False):
        how = reached[positions]
        positions = how.before
        if how.taken is not None:
            places[name] = (how.taken, rows[how.taken].place(positions[how.taken], tensor))
    return {name: places[name] for name in parameters if name in places}


@dataclass(frozen=True)
class _Reached:
    ways: int
    before: tuple[int, ...]
    taken: int | None


def _rounds_to(weights: torch.Tensor, tensor: torch.Tensor) -> bool:
    return torch.equal(weights.detach().to(tensor.dtype), tensor)


def _numel_of(entries: Mapping[str, Any]) -> int:
    """The elements of a parameter of which only the state is known."""
    return max((value.numel() for value in entries.values() if isinstance(value, torch.Tensor)), default=0)


def unclear(what: str, file: str) -> CheckpointError:
    return CheckpointError(
        f"at stage 0 DeepSpeed saves the optimizer's state without names, and {what}.",
        where=file,
        do="say which parameters each group has, in the order in which they were given to the optimizer:"
        " DeepSpeedSource(folder, names=[['embed.weight', ...], ...]); names=() leaves the optimizer's state out.",
        code="checkpoint-unnamed",
    )


_Groups = list[list[str]]
_Value = TypeVar("_Value")


def read_replaced(
    state: dict[str, Any],
    dense: Mapping[str, torch.Tensor],
    of_rank: Mapping[str, torch.Tensor],
    names: Sequence[Sequence[str]] | None,
    file: str,
    layers: Sequence[AutoEpLayer],
    own_names: ModelNames,
) -> FlatState:
    """The optimizer's state of one expert-parallel rank, under AutoEP's names.

    Args:
        dense: the parameters that are not experts', in the model's order.
        of_rank: those of this rank's experts.
        names: of each group, the model's names of its parameters, where the caller knows them.

    Raises: CheckpointError: no order of the parameters fits, or two that differ.
    """
    starts = tuple(f"{under(layer.path)}router." for layer in layers)
    number = len(entry(state.get("optimizer_state_dict", state), "param_groups", file))
    said = None if names is None else _groups(names, number, dense, of_rank, layers, own_names)
    fitting: list[FlatState] = []
    problem: CheckpointError | None = None
    for is_moved in (False, True):
        parameters = _ordered({**dense, **of_rank}, starts, is_moved=is_moved)
        groups = said and [list(_ordered(dict.fromkeys(group), starts, is_moved=is_moved)) for group in said]
        try:
            fitting.append(read_unnamed(state, parameters, groups, file))
        except CheckpointError as error:
            problem = problem or error
    if not fitting:
        assert problem is not None
        raise problem
    if len(fitting) > 1 and fitting[0].places != fitting[1].places:
        raise unclear("AutoEP's routers may have two places in its groups", file)
    return fitting[0]


def _ordered(values: Mapping[str, _Value], starts: tuple[str, ...], *, is_moved: bool) -> dict[str, _Value]:
    """By name: as they are; or those whose names begin so after the others."""
    moved = {name: value for name, value in values.items() if is_moved and name.startswith(starts)}
    return {name: value for name, value in values.items() if name not in moved} | moved


def _groups(
    names: Sequence[Sequence[str]],
    number: int,
    dense: Mapping[str, torch.Tensor],
    of_rank: Mapping[str, torch.Tensor],
    layers: Sequence[AutoEpLayer],
    own_names: ModelNames,
) -> _Groups | None:
    """AutoEP's names of each of ``number`` groups; None: those given do not say them.

    Where there are more groups than the caller has, the experts of each have a group of their own, after all others.
    """
    group_of = {each: index for index, group in enumerate(names) for name in group for each in own_names.parts(name)}
    first = {
        on_rank(tensor, rank): of_expert(tensor, experts[0])
        for layer in layers
        for tensor in layer.tensors
        for rank, experts in enumerate(layer.experts_of)
    }
    if not all(first[part] in group_of for part in of_rank):
        return None
    groups = [[each for name in group for each in own_names.parts(name) if each in dense] for group in names]
    experts: _Groups = [[part for part in of_rank if group_of[first[part]] == index] for index in range(len(names))]
    groups = groups + experts if len(names) < number else [a + b for a, b in zip(groups, experts, strict=True)]
    return [group for group in groups if group]
