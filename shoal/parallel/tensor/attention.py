"""Split the heads of an attention module: the ranges of its projections, and what else in it depends on its heads.

H query heads attend to K key-value heads in groups of H / K. With K >= ranks every rank gets whole groups, unevenly
where K does not divide. With fewer, query heads are split evenly, and a rank needs the key-value heads that its query
heads attend to, which other ranks need too: the rows of key-value heads are shared (``parts.SharedRows``).

>>> local_heads(num_heads=6, num_kv_heads=3, size=2, rank=1)  # whole groups: heads 2 to 5, key-value heads 1 and 2
LocalHeads(query=(2, 3, 4, 5), kv=(1, 2), is_kv_shared=False)
>>> local_heads(num_heads=8, num_kv_heads=2, size=4, rank=1)  # two query heads of one group
LocalHeads(query=(2, 3), kv=(0,), is_kv_shared=True)
>>> local_heads(num_heads=6, num_kv_heads=2, size=4, rank=1)  # heads 1 and 2 are of one group
LocalHeads(query=(1, 2), kv=(0,), is_kv_shared=True)
>>> local_heads(num_heads=9, num_kv_heads=3, size=4, rank=1)  # heads 2 and 3 are of two groups: one kv head for each
LocalHeads(query=(2, 3), kv=(0, 1), is_kv_shared=True)
>>> local_heads(num_heads=12, num_kv_heads=3, size=4, rank=1)  # groups of unequal sizes: a kv head for each query head
LocalHeads(query=(3, 4, 5), kv=(0, 1, 1), is_kv_shared=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.parallel.tensor.families import (
    ATTENTION_RULES,
    HEAD_ATTRIBUTES,
    HEAD_PARAMETERS,
    HEAD_SIZE_ATTRIBUTES,
    AttentionRule,
    Layout,
    base_of,
    is_conv1d,
)
from shoal.parallel.tensor.parts import Ranges, SharedRows, as_ranges, even_range, length
from shoal.parallel.tensor.plan import ParallelStyle, join, plan_error, split_error


@dataclass(frozen=True)
class LocalHeads:
    """The heads that one rank computes."""

    query: tuple[int, ...]
    kv: tuple[int, ...]  # one for every group of local query heads; repeated where groups would have unequal sizes
    is_kv_shared: bool  # there are fewer key-value heads than ranks

    @property
    def groups(self) -> int:
        """Local query heads per local key-value head."""
        return len(self.query) // len(self.kv)


def local_heads(*, num_heads: int, num_kv_heads: int, size: int, rank: int) -> LocalHeads:
    """The heads of ``rank``; the caller has checked that there are at least ``size`` query heads."""
    group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        start, stop = even_range(num_kv_heads, size, rank)
        return LocalHeads(tuple(range(start * group, stop * group)), tuple(range(start, stop)), False)
    query = tuple(range(*even_range(num_heads, size, rank)))
    kv_of_query = tuple(head // group for head in query)
    distinct = sorted(set(kv_of_query))
    if len({kv_of_query.count(kv) for kv in distinct}) == 1:
        return LocalHeads(query, tuple(distinct), True)
    return LocalHeads(query, kv_of_query, True)


def projection_ranges(
    layout: Layout, index: int, numel: int, heads: LocalHeads, num_heads: int, num_kv_heads: int
) -> tuple[Ranges, Ranges]:
    """The output elements of projection number ``index`` that the rank needs; and those of all heads that ranks share.

    Args:
        numel: output elements of the whole projection.
    """
    if layout == "heads" or (layout == "separate" and index == 0):
        return as_ranges(heads.query, unit=numel // num_heads), ()
    if layout == "separate":
        return as_ranges(heads.kv, unit=numel // num_kv_heads), ((0, numel),) if heads.is_kv_shared else ()
    unit = numel // (num_heads + 2 * num_kv_heads)
    if layout == "blocks":
        units = [*heads.query]
        units += [num_heads + head for head in heads.kv]
        units += [num_heads + num_kv_heads + head for head in heads.kv]
        return as_ranges(units, unit=unit), ((num_heads * unit, numel),) if heads.is_kv_shared else ()
    group = num_heads // num_kv_heads
    units, width = [], (group + 2) * unit
    for position, kv in enumerate(heads.kv):
        first = kv * (group + 2)
        queries = heads.query[position * heads.groups : (position + 1) * heads.groups]
        units += [first + query % group for query in queries] + [first + group, first + group + 1]
    shared = tuple((kv * width + group * unit, (kv + 1) * width) for kv in range(num_kv_heads))
    return as_ranges(units, unit=unit), shared if heads.is_kv_shared else ()


class LocalConfig:
    """A config in which some values are this rank's; every other one is read from the model's config."""

    def __init__(self, config: Any, values: Mapping[str, Any]) -> None:
        self._config = config
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_config"], name)


@dataclass(frozen=True)
class AttentionSplit:
    """The heads of one attention module on this rank.

    Args:
        ranges: by module name, the elements of the split dim on this rank.
        shared: by module name, the heads of a projection that other ranks need too.
        core_name: of ``core``, in the model.
        are_equal: True if every rank has as many heads.
    """

    rule: AttentionRule
    core: nn.Module
    heads: LocalHeads
    num_heads: int
    head_size: int
    ranges: Mapping[str, Ranges]
    shared: Mapping[str, SharedRows]
    core_name: str
    are_equal: bool

    @property
    def head_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the module itself with one value per query head, by their names in it."""
        parameters = {name: self.core._parameters.get(name) for name in HEAD_PARAMETERS}
        return {name: p for name, p in parameters.items() if p is not None and p.shape == (self.num_heads,)}

    def apply(self) -> None:
        """Change the attributes that count heads, and take this rank's heads of arguments that have one entry each."""
        values = {
            "heads": len(self.heads.query),
            "kv_heads": len(self.heads.kv),
            "groups": self.heads.groups,
            "width": len(self.heads.query) * self.head_size,
        }
        changed_config = {}
        for name, value in {**HEAD_ATTRIBUTES, **self.rule.attributes}.items():
            owner, _, attribute = name.rpartition(".")
            if owner == "config":
                changed_config[attribute] = values[value]
            elif isinstance(vars(self.core).get(name), int):
                setattr(self.core, name, values[value])
        if changed_config:
            # nn.Module declares tensors and modules as attributes; a config of transformers is neither.
            self.core.config = LocalConfig(self.core.config, changed_config)  # type: ignore[assignment]
        if self.rule.head_arguments:
            self.core.register_forward_pre_hook(self._own_heads, with_kwargs=True)

    def _own_heads(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = {
            name: self._own(value)
            for name, value in kwargs.items()
            if name in self.rule.head_arguments and isinstance(value, torch.Tensor)
        }
        return args, {**kwargs, **changed}

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's heads of [B, H, ...] or [B * H, 1, L]; a tensor that is the same for all heads as it is."""
        start, stop = self.heads.query[0], self.heads.query[-1] + 1
        if tensor.dim() == 4 and tensor.shape[1] == self.num_heads:
            return tensor[:, start:stop]
        if tensor.dim() == 3 and tensor.shape[0] % self.num_heads == 0:
            by_head = tensor.view(-1, self.num_heads, *tensor.shape[1:])
            return by_head[:, start:stop].flatten(0, 1)
        return tensor


def split_heads(
    name: str, module: nn.Module, styles: Mapping[str, ParallelStyle], size: int, rank: int
) -> AttentionSplit | None:
    """How the heads of ``module`` are split, or None where it is no attention that the plan splits.

    Raises: ModelError: fewer heads than ranks, or projections of which the plan names only some.
    """
    rule = next((rule for rule in ATTENTION_RULES if rule.describes(module)), None)
    if rule is None:
        return None
    names = [join(name, child) for child in (*rule.projections, rule.out)]
    split = [child for child in names if child in styles and styles[child].kind in ("column", "row")]
    if not split:
        return None
    if split != names:
        raise plan_error(
            f"the tensor parallel plan splits {', '.join(split)}, but not all projections of this attention.",
            where=name,
            do=f"split all of {', '.join(names)}, or none.",
        )
    core = module.get_submodule(rule.core) if rule.core else module
    *projections, out = (module.get_submodule(child) for child in (*rule.projections, rule.out))
    in_numel = numel_of(out, is_output=False)
    num_heads, num_kv_heads = _count(core, rule, in_numel, [numel_of(child, is_output=True) for child in projections])
    if num_heads < size:
        raise split_error(
            f"{name} has {num_heads} attention heads, too few for {size} tensor parallel ranks.",
            do=f"take at most {num_heads} tensor parallel ranks.",
        )
    of_ranks = [
        local_heads(num_heads=num_heads, num_kv_heads=num_kv_heads, size=size, rank=each) for each in range(size)
    ]
    heads, are_equal = of_ranks[rank], len({(len(each.query), len(each.kv)) for each in of_ranks}) == 1
    ranges: dict[str, Ranges] = {names[-1]: as_ranges(heads.query, unit=in_numel // num_heads)}
    shared: dict[str, SharedRows] = {}
    for index, (child, projection) in enumerate(zip(names, projections, strict=False)):
        numel = numel_of(projection, is_output=True)
        ranges[child], of_shared = projection_ranges(rule.layout, index, numel, heads, num_heads, num_kv_heads)
        if of_shared:
            num_shared = length(of_shared)
            if num_shared < size:
                raise plan_error(
                    f"{child} cannot be split over {size} ranks: its key-value heads have {num_shared} elements.",
                    do="correct its key in the plan, or take fewer tensor parallel ranks.",
                )
            shared[child] = SharedRows.of(ranges[child], of_shared, size=size, rank=rank)
            ranges[child] = shared[child].held
    head_size, core_name = in_numel // num_heads, join(name, rule.core)
    return AttentionSplit(rule, core, heads, num_heads, head_size, ranges, shared, core_name, are_equal)


def numel_of(module: nn.Module, *, is_output: bool) -> int:
    """The input or output elements of a linear layer."""
    base = base_of(module)
    weight = base.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[int(is_output == is_conv1d(base))]


def _count(core: nn.Module, rule: AttentionRule, in_numel: int, out_numels: list[int]) -> tuple[int, int]:
    """The numbers of query heads and of key-value heads."""
    head_size = next((vars(core)[name] for name in HEAD_SIZE_ATTRIBUTES if name in vars(core)), 0)
    counts = [vars(core)[name] for name, what in HEAD_ATTRIBUTES.items() if what == "heads" and name in vars(core)]
    num_heads = in_numel // head_size if head_size else counts[0] if counts else 0
    if num_heads < 1 or in_numel % num_heads:
        raise split_error(
            f"the number of heads of {type(core).__name__} is not known: it has none of "
            f"{', '.join((*HEAD_SIZE_ATTRIBUTES, 'num_heads'))}.",
            do="set one of these attributes, or skip the module in the plan.",
        )
    if rule.layout == "heads":
        return num_heads, num_heads
    if rule.layout == "separate":
        return num_heads, num_heads * out_numels[1] // out_numels[0]
    head_size = in_numel // num_heads
    return num_heads, (out_numels[0] // head_size - num_heads) // 2
