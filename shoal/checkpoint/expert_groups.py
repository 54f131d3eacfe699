"""The optimizer groups of experts, which DeepSpeed splits off the groups that a script makes.

the script    [embed, up 0, up 1, ...] lr 0.1    [bias, ...] lr 0.2
DeepSpeed     [embed, ...] lr 0.1    [bias, ...] lr 0.2    [up 0, up 1, ...] lr 0.1, moe: true
"""

from __future__ import annotations

from shoal.checkpoint.manifest import Manifest


def with_groups(manifest: Manifest, number: int) -> Manifest:
    """The manifest of ``number`` groups: each group of experts joined to the first one with the same hyperparameters.

    Where it has ``number`` groups already, or that does not make it so, it stays as it is.
    """
    plain = [
        {key: value for key, value in group.items() if key not in ("name", "moe")} if isinstance(group, dict) else group
        for group in manifest.groups
    ]
    kept: list[int] = []
    new: dict[int | None, int] = {}
    for index, group in enumerate(manifest.groups):
        is_experts = isinstance(group, dict) and bool(group.get("moe"))
        same = next((first for first in kept if plain[first] == plain[index]), None) if is_experts else None
        if same is None:
            kept.append(index)
        new[index] = kept.index(index if same is None else same)
    if len(manifest.groups) == number or len(kept) != number:
        return manifest
    parameters = [record.model_copy(update={"group": new.get(record.group)}) for record in manifest.parameters]
    groups = [manifest.groups[index] for index in kept]
    return manifest.model_copy(update={"groups": groups, "parameters": parameters})
