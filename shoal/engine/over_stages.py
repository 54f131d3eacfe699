"""What ranks with other parameters hold together: the names of the whole model, its weights, the optimizer's groups.

``ranks`` are those that hold parameters of other names: the pipeline stages, or all ranks where experts are in lists;
None: all hold the same names, and nothing is communicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.checkpoint import tree
from shoal.checkpoint.local_shards import buffers_of, named_parameters_of, names_of
from shoal.checkpoint.manifest import ParameterRecord
from shoal.comm.protocol import Communicator


def from_stages(ranks: Communicator | None, value: Any, label: str) -> list[Any]:
    """Every stage's value, anything that JSON can hold, in the order of the stages."""
    return [value] if ranks is None else list(ranks.gather_objects(value, label=label))


def aliases_of(ranks: Communicator | None, module: nn.Module) -> dict[str, tuple[str, ...]]:
    """The other names of tied parameters of the whole model, by the first name."""
    aliases: dict[str, tuple[str, ...]] = {}
    for of_stage in from_stages(ranks, {k: list(v) for k, v in names_of(module)[1].items()}, "names of tied weights"):
        for name, others in of_stage.items():
            aliases[name] = tuple(dict.fromkeys((*aliases.get(name, ()), *others)))
    return aliases


def names_elsewhere(ranks: Communicator | None, module: nn.Module) -> frozenset[str]:
    """The names of parameters and buffers that only other stages have, those of tied weights included."""
    own = [*dict(named_parameters_of(module, remove_duplicate=False)), *buffers_of(module)]
    everywhere = {name for names in from_stages(ranks, own, "names of parameters") for name in names}
    return frozenset(everywhere - set(own))


def own_buffers(ranks: Communicator | None, module: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers that no earlier stage has too."""
    buffers = buffers_of(module)
    if ranks is None:
        return buffers
    earlier = {n for names in from_stages(ranks, list(buffers), "names of buffers")[: ranks.rank] for n in names}
    return {name: buffer for name, buffer in buffers.items() if name not in earlier}


def joined_groups(ranks: Communicator | None, groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """The names in each of the optimizer's groups, over all stages."""
    joined: list[dict[str, None]] = []
    for stage in from_stages(ranks, [list(group) for group in groups], "groups of the optimizer"):
        joined += [{} for _ in range(len(stage) - len(joined))]
        for names, more in zip(joined, stage, strict=False):
            names.update(dict.fromkeys(more))
    return [list(names) for names in joined]


def joined_records(ranks: Communicator | None, records: Sequence[ParameterRecord]) -> list[ParameterRecord]:
    """The parameters of the whole model: a tied one once, with all its names."""
    if ranks is None:
        return list(records)
    joined: dict[str, ParameterRecord] = {}
    for stage in from_stages(ranks, [record.model_dump(mode="json") for record in records], "parameters"):
        for record in map(ParameterRecord.model_validate, stage):
            first = joined.setdefault(record.name, record)
            names = list(dict.fromkeys([*first.aliases, *record.aliases]))
            group = record.group if first.group is None else first.group
            joined[record.name] = first.model_copy(update={"aliases": names, "group": group})
    return list(joined.values())


def joined_values(
    ranks: Communicator | None, values: Mapping[str, torch.Tensor], device: torch.device, *, is_kept: bool
) -> dict[str, torch.Tensor]:
    """The values of all stages by name, on the host, on every stage.

    Args:
        values: of this stage, on the host.
        is_kept: False: this rank takes part and keeps none.

    Communicates: a broadcast of each value that this stage does not have, from the first that has it.
    Memory: one value on the device.
    """
    if ranks is None:
        return dict(values)
    forms = [[name, tree.name_of(value.dtype), list(value.shape)] for name, value in values.items()]
    joined: dict[str, torch.Tensor] = {}
    of_stages = from_stages(ranks, forms, "values of the stages")
    num_holders = Counter(name for stage in of_stages for name, _, _ in stage)
    for source, stage in enumerate(of_stages):
        for name, dtype, shape in stage:
            if name in joined:
                continue
            if num_holders[name] == ranks.size:
                joined[name] = values[name]
                continue
            if source == ranks.rank:
                sent = values[name].to(device)
            else:
                sent = torch.empty(shape, dtype=tree.dtype_of(dtype), device=device)
            if sent.numel():
                ranks.blocking.broadcast(sent.view(-1), source, label=name)
            if not is_kept:
                sent = torch.empty(0, dtype=torch.float32, device="cpu")  # the name alone: it is not sent again
            joined[name] = values[name] if source == ranks.rank else sent.to("cpu")
    return joined if is_kept else {}
