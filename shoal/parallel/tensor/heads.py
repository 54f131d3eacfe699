"""Attention heads over ranks: which heads a rank computes, and which rows of each projection these are.

H query heads attend to K key-value heads in groups of H / K. With K >= ranks every rank gets whole groups, unevenly
where K does not divide. With fewer, query heads are split evenly, and a rank needs the key-value heads that its query
heads attend to, which other ranks need too: the rows of key-value heads are shared (``shared_heads``).

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

from dataclasses import dataclass
from typing import Literal

from shoal.parallel.tensor.parts import Range, as_ranges, even_range

Layout = Literal["heads", "separate", "blocks", "groups"]
"""How the output of an attention's projections is made of heads.

heads:     every projection: a block per query head (BLOOM, GPT-NeoX: [q k v]; MLA: what follows the latents)
separate:  the first projection: H query heads; the others: K key-value heads each (Llama, OPT, BERT)
blocks:    one projection: [H query heads | K key heads | K value heads] (GPT-2, Phi-3, Falcon with multi-query)
groups:    one projection: K groups [H / K query heads, key, value] (Falcon's new architecture)
"""


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
) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
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
