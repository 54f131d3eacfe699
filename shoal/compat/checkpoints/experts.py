"""The experts of a DeepSpeed checkpoint: which file and which rank has which of them.

    layer_0_expert_5_mp_rank_00_model_states.pt     weights of expert 5 of the first MoE layer, under their global names
    expp_rank_1_mp_rank_00_optim_states.pt          stage 0: the whole optimizer of expert-parallel rank 1
    zero_pp_rank_3_mp_rank_00_optim_states.pt       stages 1 and 2: rank 3's part of its groups of experts

Only rank 0 writes down the names of what an optimizer holds, and it counts its own experts from 0:

    8 experts, 2 expert-parallel ranks       rank 0        rank 1        rank 2        rank 3
    experts                                  0 1 2 3       4 5 6 7       0 1 2 3       4 5 6 7
    under the names                          0 1 2 3       0 1 2 3       0 1 2 3       0 1 2 3
    its part of a group (stages 1, 2)        first half    first half    second half   second half

Of a tensor-parallel run each rank has a part of every expert (``enable_expert_tensor_parallelism``) and files of it; or
experts are whole, and expert-parallel ranks are consecutive ones. Then the files of one tensor-parallel rank have every
n-th expert-parallel rank's experts, and by themselves look like those of a model with these experts alone:

    8 experts, 4 expert-parallel ranks       rank 0        rank 1        rank 2        rank 3
    tensor-parallel rank                     0             1             0             1
    experts                                  0 1           2 3           4 5           6 7
    under the names                          0 1           0 1           0 1           0 1
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.checkpoint.problems import damaged_copy
from shoal.compat.checkpoints.autoep import AutoEpLayer, of_expert
from shoal.compat.checkpoints.files import CheckpointFiles, Turns, not_built, open_file
from shoal.compat.checkpoints.layout import DeepSpeedSettings, FlatLayout, divided
from shoal.compat.checkpoints.state import Holders, NamedState, check_stored, damaged, entry, merged
from shoal.compat.checkpoints.unnamed import read_unnamed

_FOLDING = "folding"  # AutoEP's, of tensor-parallel runs: which rank has saved the file
_NAME = re.compile(r"(?P<layer>.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(?P<expert>\d+)(?P<rest>\..*)")


def read_experts(
    files: CheckpointFiles, num_experts: Any, turns: Turns, autoep: Sequence[AutoEpLayer] = ()
) -> dict[str, torch.Tensor]:
    """The weights of one tensor-parallel rank's experts by global name, mapped from their files.

    Args:
        num_experts: of each MoE layer, from the model file.
        autoep: the layers, if they are AutoEP's.

    Raises: CheckpointError: a file is missing, or holds something else.
    """
    counts = num_experts if isinstance(num_experts, list) else []
    for layer, count in enumerate(counts):
        here = files.experts.keys() | files.elsewhere
        absent = [expert for expert in range(int(count)) if (layer, expert) not in here]
        if absent:
            of_rank = "*" if files.elsewhere else re.sub(r".*mp_rank_(\d+).*", r"\1", files.model[0].name)
            names = [f"layer_{layer}_expert_{expert}_mp_rank_{of_rank}_model_states.pt" for expert in absent[:4]]
            what = f"files of {len(absent)} experts of layer {layer} are missing: {', '.join(names)}."
            raise damaged_copy(what, str(files.folder))
    tensors: dict[str, torch.Tensor] = {}
    for (layer, expert), path in sorted(files.experts.items()):
        if layer >= len(counts) or expert >= int(counts[layer]):
            raise damaged(f"the model has no expert {expert} in layer {layer}", str(path))
        content = {name: each for name, each in open_file(path, verify=turns.take()).items() if name != _FOLDING}
        expected = [of_expert(tensor, expert) for tensor in autoep[layer].tensors] if autoep else list(content)
        for name in dict.fromkeys([*content, *expected]):
            match, tensor = _NAME.fullmatch(name), entry(content, name, str(path))
            is_known = name in expected if autoep else match is not None and int(match["expert"]) == expert
            if not is_known or not isinstance(tensor, torch.Tensor):
                raise not_built(f"{name[:200]!r} as a parameter of expert {expert}", str(path))
            check_stored(name, tensor, str(path))
            tensors[name] = tensor
    return tensors


def is_experts(name: str) -> bool:
    """True for a parameter of ``moe.layer.MoE``'s experts."""
    return _NAME.fullmatch(name) is not None


def holders_of(
    names_on: Callable[[int], Sequence[Mapping[str, str]]],
    is_expert: Callable[[str], bool],
    size: int,
    counts: Sequence[int],
    *,
    data_first: bool,
) -> Holders:
    """Who holds the parameters of each group at stages 1 and 2.

    Args:
        names_on: of each of so many expert-parallel ranks, the global names of its parameters by those that it has.
        is_expert: True for the name of experts' parameters.
        size: the ranks that saved.
        counts: of each group, into how many parts it is cut.
        data_first: ranks that hold the same experts are neighbours (``use_data_before_expert_parallelism``).
    """

    def holders(
        group: int, members: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[dict[str, Sequence[int]], Sequence[int]]]:
        count = counts[group]
        if not any(map(is_expert, members)):
            yield dict(members), range(size)
            return
        ep_size = size // count
        names = names_on(ep_size)
        if len(names) != ep_size:
            raise damaged(f"{len(names)} ranks divide the experts, and {size} hold {count} parts", f"group {group}")
        for rank in range(ep_size):
            ranks = range(rank * count, (rank + 1) * count) if data_first else range(rank, size, ep_size)
            global_names = names[rank]
            unknown = next((name for name in members if name not in global_names), None)
            if unknown is not None:
                raise damaged(f"{unknown} of expert-parallel rank {rank} is in no expert's file", f"group {group}")
            yield {global_names[name]: shape for name, shape in members.items()}, ranks

    return holders


def read_unnamed_experts(
    states: Sequence[Any],
    dense: Mapping[str, torch.Tensor],
    experts: Mapping[str, torch.Tensor],
    names: Sequence[Sequence[str]] | None,
    files: Sequence[str],
) -> NamedState:
    """Stage 0: what each expert-parallel rank's optimizer holds; of the other parameters what the first one's does.

    Args:
        states: ``optimizer`` of the expert-parallel ranks.
        dense: the parameters that are not experts'.
        names: of each group of the whole model, its parameters, where the caller knows them.
    """
    parts = []
    for state, local, file in zip(states, local_names(experts, len(states)), files, strict=True):
        of_rank = {name: experts[name] for name in local.values()}
        number = len(entry(state.get("optimizer_state_dict", state), "param_groups", file))
        parts.append(read_unnamed(state, {**dense, **of_rank}, _named(names, number, of_rank.keys()), file))
    return merged(parts)


def _named(names: Sequence[Sequence[str]] | None, number: int, experts: Collection[str]) -> list[list[str]] | None:
    """The parameters of each of one rank's ``number`` groups; None: the names given do not say them.

    Where there are more groups than the caller has, the experts of each have a group of their own, after all others.
    Experts are in the order of their numbers: with another expert-parallel size the caller has them in another order.
    """
    if names is None or not set(experts) <= {name for group in names for name in group}:
        return None
    order = {_expert_of(name): index for index, name in reversed(list(enumerate(experts)))}
    names = [sorted(group, key=lambda name: order.get(_expert_of(name), -1)) for group in names]
    groups = [[name for name in group if name in experts or not _NAME.fullmatch(name)] for group in names]
    if len(groups) < number:
        split = [[name for name in group if name in experts] for group in groups]
        groups = [[name for name in group if name not in experts] for group in groups] + split
    return [group for group in groups if group]


def _expert_of(name: str) -> str:
    """The name up to the number of the expert; all of it where it is no expert's."""
    match = _NAME.fullmatch(name)
    return name if match is None else name[: match.start("rest")]


def ep_sizes(groups: Any) -> set[int]:
    """The expert-parallel sizes of an optimizer's groups, of which DeepSpeed writes down the name of their ranks."""
    names = [str(group.get("name", "")) for group in groups if isinstance(group, Mapping) and group.get("moe")]
    return {int(match[1]) for name in names if (match := re.fullmatch(r"ep_size_(\d+)", name))}


def layout_of_experts(
    group: int,
    members: Mapping[str, tuple[int, ...]],
    numbers: Mapping[str, Any],
    experts: Collection[str],
    settings: DeepSpeedSettings,
) -> FlatLayout | None:
    """Where the flat tensors of stages 1 and 2 hold a group of experts.

    Args:
        members: of the group.
        numbers: its hyperparameters; its name has the expert-parallel size.
        experts: the parameters of all experts.

    Returns: None: the group is not one of DeepSpeed's, or the ranks cannot share it.
    """
    ep_size = next(iter(ep_sizes([numbers])), 0)
    if not ep_size or settings.num_ranks % ep_size:
        return None
    names = local_names(experts, ep_size)
    shapes = [{name: members[name] for name in members if name in set(of_rank.values())} for of_rank in names]
    local = {name: each for of_rank in names for each, name in of_rank.items()}
    kinds = {tuple((local[name], shape) for name, shape in of_rank.items()) for of_rank in shapes}
    if sum(map(len, shapes)) != len(members) or len(kinds) > 1:
        return None
    return divided(
        group,
        shapes,
        local,
        settings.num_ranks,
        is_data_first=settings.is_data_first,
        param_alignment=settings.param_alignment,
        is_round_robin=settings.is_round_robin,
    )


def of_first_expert(name: str) -> str:
    """The same parameter of the layer's first expert, which every rank has under this name.

    >>> of_first_expert("moe.deepspeed_moe.experts.deepspeed_experts.3.up.weight")
    'moe.deepspeed_moe.experts.deepspeed_experts.0.up.weight'
    >>> of_first_expert("norm.weight")
    'norm.weight'
    """
    match = _NAME.fullmatch(name)
    return name if match is None else f"{match['layer']}0{match['rest']}"


def in_order_of_experts(names: Iterable[str]) -> list[str]:
    """Other parameters, then those of experts by number of the MoE layer and of the expert."""
    names = list(names)
    files = files_of_experts(names)
    return [name for name in names if not _NAME.fullmatch(name)] + [
        name for key in sorted(files) for name in files[key]
    ]


def files_of_experts(names: Iterable[str]) -> dict[tuple[int, int], list[str]]:
    """The parameters of each expert, by number of the MoE layer, in the model's order, and of the expert."""
    layers: dict[str, int] = {}
    files: dict[tuple[int, int], list[str]] = {}
    for match in filter(None, map(_NAME.fullmatch, names)):
        layer = layers.setdefault(match["layer"], len(layers))
        files.setdefault((layer, int(match["expert"])), []).append(match[0])
    return files


def local_names(experts: Iterable[str], ep_size: int) -> list[dict[str, str]]:
    """Of each expert-parallel rank, the global names of its parameters by their names on that rank.

    Args:
        experts: the parameters of all experts, or of those that one tensor-parallel rank has whole.
        ep_size: number of the ranks that divide these experts.
    """
    numbers: dict[str, set[int]] = {}
    matches = [match for match in map(_NAME.fullmatch, experts) if match is not None]
    for match in matches:
        numbers.setdefault(match["layer"], set()).add(int(match["expert"]))
    places = {layer: {number: at for at, number in enumerate(sorted(of_layer))} for layer, of_layer in numbers.items()}
    names: list[dict[str, str]] = [{} for _ in range(ep_size)]
    for match in matches:
        place = places[match["layer"]]
        if len(place) % ep_size == 0:  # else the layer has another expert-parallel size
            rank, local = divmod(place[int(match["expert"])], len(place) // ep_size)
            names[rank][f"{match['layer']}{local}{match['rest']}"] = match[0]
    return names
