"""The layers that DeepSpeed's AutoEP put in the place of a model's mixtures of experts: which rank has which experts.

    layer_0_expert_3_mp_rank_00_model_states.pt     stages 0 to 2: model.layers.1.mlp.experts.w1.3, .w2.3, .w3.3
    expp_rank_1_mp_rank_00_optim_states.pt          stage 0: the whole optimizer of expert-parallel rank 1
    zero_pp_rank_3_mp_rank_00_optim_states.pt       stages 1 to 3: rank 3's part of its experts

A rank's experts lie one behind the other in three tensors, gate, down and up. Here they get a name for each expert, the
one that the files of weights have:

    4 experts, 2 expert-parallel ranks     rank 0                     rank 1
    mlp.experts.w1 [2, I, D]               mlp.experts.w1@0           mlp.experts.w1@1
    as it is read [I, D]                   mlp.experts.w1.0, .w1.1    mlp.experts.w1.2, .w1.3

``autoep_names`` gives them the names that the model had.

In a tensor-parallel run experts are whole, and expert-parallel ranks are consecutive ones, so the files of one
tensor-parallel rank have those of every n-th expert-parallel rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.compat.checkpoints.files import not_built
from shoal.compat.checkpoints.state import FlatRange, FlatState, Holders, damaged, entry

WEIGHTS = ("w1", "w2", "w3")  # gate, down, up
_VERSION = 1  # of the placement
_PART = re.compile(r"mp_rank_(\d+)_model_states\.pt$")
_KEYS = ("ds_autoep_layers", "autoep_layers")


@dataclass(frozen=True)
class AutoEpLayer:
    """A layer with experts.

    Args:
        path: of the module, which is ``AutoEPMoELayer`` in DeepSpeed.
        experts_of: of each expert-parallel rank, the numbers of its experts in the order in which they lie.
        ep_rank: of the rank whose file says this.
        step: number of the tensor-parallel ranks.
    """

    path: str
    experts_of: tuple[tuple[int, ...], ...]
    ep_rank: int
    step: int = 1

    @property
    def ep_size(self) -> int:
        return len(self.experts_of)

    @property
    def num_experts(self) -> int:
        return sum(map(len, self.experts_of))

    @property
    def ranks(self) -> range:
        """The expert-parallel ranks whose experts the files of one tensor-parallel rank have."""
        return range(self.ep_rank % self.step, self.ep_size, self.step)

    @property
    def experts(self) -> list[int]:
        """Those experts."""
        return [expert for rank in self.ranks for expert in self.experts_of[rank]]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names on each rank."""
        return tuple(f"{under(self.path)}experts.{weight}" for weight in WEIGHTS)


def under(path: str) -> str:
    """What the names in a module begin with.

    >>> under("model.layers.1.mlp"), under("")
    ('model.layers.1.mlp.', '')
    """
    return f"{path}." if path else ""


def layers_of(state: Mapping[str, Any], file: str, num_parts: int) -> list[AutoEpLayer]:
    """The layers in the order of the numbers in the files' names; none: AutoEP has replaced none.

    Args:
        num_parts: the tensor-parallel ranks.

    Raises: CheckpointError: the metadata lacks an entry, or its entries contradict each other. NotBuiltError: ranks
        have different numbers of experts, or there are layers of ``moe.layer.MoE`` too.
    """
    metadata = next((state[key] for key in _KEYS if state.get(key) is not None), ())
    if not isinstance(metadata, list | tuple):
        raise damaged(f"the metadata of AutoEP is a {type(metadata).__name__}, not a list", file)
    numbered = {_integer(each, "moe_layer_id", file): _layer(each, file, num_parts) for each in metadata}
    if sorted(numbered) != list(range(len(metadata))):
        numbers = sorted(_integer(each, "moe_layer_id", file) for each in metadata)
        raise damaged(f"AutoEP's layers have the numbers {numbers}, not 0 to {len(metadata) - 1}", file)
    layers = [numbered[number] for number in range(len(metadata))]
    if len({layer.path for layer in layers}) < len(layers):
        raise damaged("two of AutoEP's layers have the same module_path", file)
    if len({(layer.ep_size, layer.ep_rank) for layer in layers}) > 1:
        raise damaged("AutoEP's layers have several ep_size or ep_rank", file)
    part = _PART.search(file)
    if layers and part is not None and int(part[1]) != layers[0].ep_rank % num_parts:
        raise damaged(f"it is said to be of expert-parallel rank {layers[0].ep_rank}", file)
    counts = state.get("num_experts")
    if layers and isinstance(counts, list) and len(counts) > len(layers):
        raise not_built("layers of AutoEP and of moe.layer.MoE in one model", file)
    if layers and counts != [layer.num_experts for layer in layers]:
        what = f"num_experts is {counts}, and AutoEP's layers have {[layer.num_experts for layer in layers]} experts"
        raise damaged(what, file)
    return layers


def _layer(metadata: Any, file: str, num_parts: int) -> AutoEpLayer:
    path, prefix = (entry(metadata, key, file) for key in ("module_path", "expert_key_prefix"))
    if not isinstance(path, str) or prefix != f"{under(path)}experts":
        raise damaged(f"the experts of AutoEP's layer {path!r} are called {prefix!r}", file)
    number, ep_size = (_integer(metadata, key, file) for key in ("num_experts", "ep_size"))
    ep_rank = _integer({"ep_rank": 0, **metadata}, "ep_rank", file)  # of older releases it is the first one's
    local = _integer(metadata, "num_local_experts", file)
    placement = metadata.get("expert_placement")
    if placement is None:
        order = tuple(tuple(range(rank * local, (rank + 1) * local)) for rank in range(min(ep_size, number)))
    else:
        order = _placed(placement, path, file)
    if sorted(expert for experts in order for expert in experts) != list(range(number)) or len(order) != ep_size:
        what = f"{number} experts of {path} on {ep_size} expert-parallel ranks are placed as {order}"
        raise damaged(f"{what}: each has to have one place", file)
    if not 0 <= ep_rank < ep_size or len(order[ep_rank]) != local:
        raise damaged(f"{path} has {local} experts on rank {ep_rank} of {ep_size}, and is placed as {order}", file)
    if len({len(experts) for experts in order}) > 1:
        raise not_built("another number of experts on each rank of AutoEP", file)
    if ep_size % num_parts:
        raise not_built(f"an autoep_size ({ep_size}) that is no multiple of the tensor-parallel ranks", file)
    return AutoEpLayer(path, order, ep_rank, num_parts)


def _placed(placement: Any, path: str, file: str) -> tuple[tuple[int, ...], ...]:
    """The experts of each rank, as ``expert_placement`` says."""
    version = entry(placement, "version", file)
    if version != _VERSION:
        raise damaged(f"the placement of the experts of {path} is of version {version!r}, not {_VERSION}", file)
    ranks = entry(placement, "ranks", file)
    by_rank = {_integer(each, "rank", file): tuple(map(int, entry(each, "experts", file))) for each in ranks}
    if sorted(by_rank) != list(range(len(ranks))):
        raise damaged(f"the experts of {path} are placed on the ranks {sorted(by_rank)}", file)
    return tuple(by_rank[rank] for rank in range(len(ranks)))


def _integer(metadata: Any, key: str, file: str) -> int:
    value = entry(metadata, key, file)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise damaged(f"{key!r} of AutoEP is {value!r}", file)
    return value


def without_copies(module: Mapping[str, Any], layers: Sequence[AutoEpLayer]) -> dict[str, Any]:
    """A model file's tensors without a router's other names.

    DeepSpeed keeps the router a second time, as the attribute from which Transformers records its logits.
    """
    kept = ("router", "experts", "shared_experts", "shared_experts_gate")
    starts = tuple(under(layer.path) for layer in layers)

    def is_copy(name: str) -> bool:
        start = next((start for start in starts if name.startswith(start)), None)
        if start is None or name.removeprefix(start).split(".")[0] in kept:
            return False
        return name.removeprefix(start).split(".", 1)[-1] in _ROUTER_TENSORS

    return {name: value for name, value in module.items() if not is_copy(name)}


_ROUTER_TENSORS = ("gate.weight", "gate.bias", "e_score_correction_bias")


def on_rank(tensor: str, ep_rank: int) -> str:
    """The name of a rank's experts of one weight."""
    return f"{tensor}@{ep_rank}"


def of_expert(tensor: str, expert: int) -> str:
    """The name of one expert's weight."""
    return f"{tensor}.{expert}"


def rank_names(layers: Sequence[AutoEpLayer]) -> list[dict[str, str]]:
    """Of each expert-parallel rank of these files, the names of what it has by those that it has there."""
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    return [{tensor: on_rank(tensor, rank) for tensor in tensors} for rank in layers[0].ranks]


def rank_tensors(layers: Sequence[AutoEpLayer], experts: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Of each expert-parallel rank of these files, its tensors by name, stacked. Memory: the experts of these ranks.

    Args:
        experts: the weights by expert, from their files.
    """
    return [
        {
            on_rank(tensor, rank): torch.stack(
                [experts[of_expert(tensor, expert)] for expert in layer.experts_of[rank]]
            )
            for layer in layers
            for tensor in layer.tensors
            if of_expert(tensor, layer.experts_of[rank][0]) in experts
        }
        for rank in layers[0].ranks
    ]


def spread_holders(
    states: Sequence[Mapping[str, Any]], of_ranks: Sequence[Sequence[AutoEpLayer]], files: Sequence[str]
) -> Holders:
    """Who holds the parameters of each flat tensor at stage 3.

    Args:
        states: ``optimizer_state_dict`` of each rank.
        of_ranks: the layers as each rank's model file has them.
    """
    names = rank_names(of_ranks[0])
    eps = of_ranks[0][0].ranks
    ranks_of = [[rank for rank, layers in enumerate(of_ranks) if layers[0].ep_rank == ep] for ep in eps]

    def holders(
        index: int, members: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[dict[str, Sequence[int]], Sequence[int]]]:
        is_experts = {name in names[0] for name in members}
        if len(is_experts) > 1:
            raise damaged(f"flat group {index} has parameters of experts and others", files[0])
        wanted: Iterable[Sequence[int]] = ranks_of if is_experts == {True} else [range(len(states))]
        for number, ranks in enumerate(wanted):
            for at, rank in enumerate(ranks):
                group = _partition(states[rank], index, files[rank])
                part = tuple(_integer(group, key, files[rank]) for key in ("partition_count", "partition_rank"))
                if part != (len(ranks), at):
                    what = f"flat group {index} is part {part[1]} of {part[0]}, expected part {at} of {len(ranks)}"
                    raise damaged(what, files[rank])
            global_names = names[number] if is_experts == {True} else {name: name for name in members}
            yield {global_names[name]: shape for name, shape in members.items()}, ranks

    return holders


def _partition(state: Mapping[str, Any], index: int, file: str) -> Any:
    groups = entry(state, "ds_zero_partition_groups", file)
    partition = next((each for each in groups if entry(each, "sub_group", file) == index), None)
    if partition is None:
        raise damaged(f"entry 'ds_zero_partition_groups' lacks flat group {index}", file)
    return partition


def split_into_experts(state: FlatState, layers: Sequence[AutoEpLayer], file: str) -> None:
    """Give each expert's part of the ranks' tensors a name of its own. Frozen ones are not there.

    Raises: CheckpointError: a rank has another number of experts than the metadata says.
    """
    for layer in layers:
        for tensor in layer.tensors:
            for rank, experts in enumerate(layer.experts_of):
                name = on_rank(tensor, rank)
                if name not in state.shapes:
                    continue
                (number, *shape), flat_ranges, group, scalars = state.take(name)
                if number != len(experts):
                    raise damaged(f"{tensor} has {number} experts on rank {rank}, expected {len(experts)}", file)
                places, numel = list(flat_ranges), math.prod(shape)
                for at, expert in enumerate(experts):
                    ranges = _between(places, at * numel, (at + 1) * numel)
                    state.add(of_expert(tensor, expert), shape, group, ranges, scalars)


def _between(places: Iterable[FlatRange], begin: int, end: int) -> list[FlatRange]:
    """Where elements ``begin`` to ``end`` of what lies in ``places`` are.

    >>> _between([FlatRange(0, 2, 10, 4), FlatRange(1, 2, 0, 4)], 3, 6)
    [FlatRange(rank=0, flat=2, start=13, numel=1), FlatRange(rank=1, flat=2, start=0, numel=2)]
    """
    ranges, at = [], 0
    for place in places:
        first, last = max(begin - at, 0), min(end - at, place.numel)
        if first < last:
            ranges.append(FlatRange(place.rank, place.flat, place.start + first, last - first))
        at += place.numel
    return ranges
