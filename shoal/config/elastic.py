"""Elasticity: one global batch that many numbers of ranks share, and the micro-batch of each.

A number of ranks shares a global batch where the batch divides by that number times one of the micro-batches.
Candidates are multiples of each micro-batch, and of the least common multiple of all: by the largest highly composite
number (one that has more divisors than any smaller one) within ``max_train_batch_size``. The one that most numbers of
ranks share wins.

>>> section = Elasticity(enabled=True, max_train_batch_size=64, micro_batch_sizes=(2, 4), version=0.1)
>>> shared_batch(section, 6)
ElasticBatch(total=48, ranks=(1, 2, 3, 4, 6, 8, 12, 24), micro=4, is_shared=True)

Version 0.2 counts whole nodes of ``num_gpus_per_node`` ranks, and gives other numbers of ranks a batch of their own.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from shoal.config.problems import ConfigProblems, shown
from shoal.config.schema import Elasticity
from shoal.errors import ConfigError

VERSIONS = (0.1, 0.2)
SCHEDULERS_VARIABLE = "DEEPSPEED_ELASTICITY_CONFIG"  # the section with which the job's scheduler has planned
_REQUIRED = ("max_train_batch_size", "micro_batch_sizes")
_COMPARED = (*_REQUIRED, "version")
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)


class ElasticityError(ConfigError):
    code = "elasticity"


class ElasticityConfigError(ElasticityError):
    """The section is wrong, or missing."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The global batch cannot be divided among that number of ranks."""

    code = "elasticity-ranks"


class ElasticProblems(ConfigProblems, ElasticityError):
    """The problems of a configuration, those of ``elasticity`` included."""


def problems_error(problems: ConfigProblems) -> ConfigProblems:
    """The same, and an ElasticityError where they are about elasticity."""
    is_elastic = any(each.path.partition(".")[0] == "elasticity" for each in problems.problems)
    return ElasticProblems(problems.problems, problems.where) if is_elastic else problems


@dataclass(frozen=True)
class ElasticBatch:
    """The chosen global batch.

    Args:
        total: samples of one step, over all ranks.
        ranks: the numbers of data-parallel ranks that share it, ascending.
        micro: the micro-batch for the number that was asked about; None: none was.
        is_shared: False: this number of ranks has that batch for itself (version 0.2).
    """

    total: int
    ranks: tuple[int, ...]
    micro: int | None = None
    is_shared: bool = True

    def __str__(self) -> str:
        counts = ", ".join(map(str, self.ranks[:12])) + (", ..." if len(self.ranks) > 12 else "")
        if not self.is_shared:
            return f"global batch {self.total} for {counts} ranks alone, which do not share one with others"
        return f"global batch {self.total} on {counts} ranks ({len(self.ranks)} numbers, at most {max(self.ranks)})"


def elastic_problems(section: Elasticity, given: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """The key, what is wrong with it and what to do, for each thing that is wrong with a section that is on.

    Args:
        given: the keys that the file sets.
    """
    for name in _REQUIRED:
        if name not in given:
            yield name, "missing, and elasticity needs it.", "write it."
    if section.version not in VERSIONS:
        yield "version", f"{section.version:g} is none that is known.", "write 0.1 or 0.2."
        return
    if not section.micro_batch_sizes or min(section.micro_batch_sizes) < 1:
        yield "micro_batch_sizes", f"{shown(list(section.micro_batch_sizes))} are no sizes.", "write positive numbers."
        return
    if section.min_gpus > section.max_gpus:
        yield "min_gpus", f"{section.min_gpus}, which is more than max_gpus = {section.max_gpus}.", "swap them."
    per_node = 1
    if section.version == 0.2:
        if section.num_gpus_per_node % section.model_parallel_size:
            yield (
                "num_gpus_per_node",
                f"{section.num_gpus_per_node} does not divide by model_parallel_size {section.model_parallel_size}.",
                "change one of them.",
            )
            return
        per_node = _data_parallel_per_node(section)
    elif section.model_parallel_size > 1:
        yield "model_parallel_size", f"{section.model_parallel_size}, which version 0.1 does not know.", "write 0.2."
    if max(section.micro_batch_sizes) * per_node > section.max_train_batch_size:
        ranks = f" on each of the {per_node} data-parallel ranks of a node" if per_node > 1 else ""
        most = section.max_train_batch_size
        yield (
            "micro_batch_sizes",
            f"{max(section.micro_batch_sizes)}{ranks} is more than max_train_batch_size {most}.",
            "leave the larger sizes out, or allow a larger batch.",
        )


def shared_batch(section: Elasticity, num_ranks: int | None = None) -> ElasticBatch:
    """Choose the global batch, and the largest micro-batch that fits a number of data-parallel ranks.

    Args:
        num_ranks: None: any; what version 0.2 does with a number that shares no batch stays open.

    Raises: ElasticityConfigError: the section is wrong, or no number of ranks fits. ElasticityIncompatibleWorldSize:
        ``num_ranks`` does not.
    """
    for name, what, do in elastic_problems(section, _REQUIRED):
        raise ElasticityConfigError(f"elasticity.{name}: {what}", do=do)
    chosen = _chosen(section)
    if num_ranks is None or num_ranks in chosen.ranks:
        if not chosen.ranks:
            raise ElasticityConfigError(
                f"no number of ranks from {section.min_gpus} to {section.max_gpus} shares the global batch"
                f" {chosen.total}.",
                do="widen elasticity.min_gpus and max_gpus, or change the sizes.",
            )
    elif section.version == 0.2:
        chosen = _own(section, num_ranks)
    else:
        near = _near(chosen.ranks, num_ranks)
        raise ElasticityIncompatibleWorldSize(
            f"{num_ranks} ranks do not share the global batch {chosen.total}; {len(chosen.ranks)} numbers of ranks do.",
            do=f"start {near} ranks." if near else "widen elasticity.min_gpus and max_gpus.",
        )
    if num_ranks is None:
        return chosen
    micro = max(size for size in section.micro_batch_sizes if chosen.total // num_ranks % size == 0)
    return ElasticBatch(chosen.total, chosen.ranks, micro, chosen.is_shared)


def check_scheduler(section: Elasticity, text: str) -> None:
    """Raises: ElasticityConfigError: a job's scheduler has planned with another section than this run's.

    Args:
        text: JSON, the scheduler's ``elasticity``.
    """
    try:
        theirs = json.loads(text)
    except ValueError as error:
        raise ElasticityConfigError(f"{SCHEDULERS_VARIABLE} is no JSON: {error}.", where="the environment") from None
    for name in _COMPARED:
        mine = getattr(section, name)
        other = theirs.get(name, Elasticity.model_fields[name].default) if isinstance(theirs, dict) else None
        other = tuple(other) if isinstance(other, list) else other
        if other != mine:
            raise ElasticityConfigError(
                f"elasticity.{name} is {shown(mine)} here and {shown(other)} for the scheduler.",
                where=SCHEDULERS_VARIABLE,
                do="give both the same section.",
            )


def _data_parallel_per_node(section: Elasticity) -> int:
    return section.num_gpus_per_node // section.model_parallel_size


def _chosen(section: Elasticity) -> ElasticBatch:
    """In units of ranks (0.1), or of nodes whose ranks are all in (0.2)."""
    size, ranks = (section.num_gpus_per_node, _data_parallel_per_node(section)) if section.version == 0.2 else (1, 1)
    most = section.max_train_batch_size // ranks
    low = max(section.min_gpus // size, 1)
    high = section.max_gpus // size or most // min(section.micro_batch_sizes)
    candidates = [
        (total, _sharers(total, section.micro_batch_sizes, low, high))
        for total in sorted(_candidates(section.micro_batch_sizes, most))
    ]
    sign = 1 if section.prefer_larger_batch else -1
    total, sharers = max(candidates, key=lambda each: (len(each[1]), sign * each[0]))
    return ElasticBatch(total * ranks, tuple(number * ranks for number in sharers))


def _candidates(micros: Sequence[int], most: int) -> set[int]:
    bases = {base for base in (*micros, math.lcm(*micros)) if base <= most}
    return {base * _HIGHLY_COMPOSITE[bisect_right(_HIGHLY_COMPOSITE, most // base) - 1] for base in bases}


def _sharers(total: int, micros: Sequence[int], low: int, high: int) -> list[int]:
    numbers: set[int] = set()
    for micro in micros:
        if total % micro == 0:
            shares = total // micro
            numbers.update(number for number in range(low, min(high, shares) + 1) if shares % number == 0)
    return sorted(numbers)


def _own(section: Elasticity, num_ranks: int) -> ElasticBatch:
    most = section.max_train_batch_size
    totals = [most // (micro * num_ranks) * micro * num_ranks for micro in section.micro_batch_sizes]
    totals = [total for total in totals if total]
    if not totals:
        smallest = min(section.micro_batch_sizes) * num_ranks
        raise ElasticityIncompatibleWorldSize(
            f"the smallest global batch of {num_ranks} ranks is {smallest}, more than max_train_batch_size {most}.",
            do=f"start at most {most // min(section.micro_batch_sizes)} ranks, or allow a larger batch.",
        )
    total = max(totals) if section.prefer_larger_batch else min(totals)
    return ElasticBatch(total, (num_ranks,), is_shared=False)


def _near(numbers: Sequence[int], wanted: int) -> str:
    index = bisect_right(numbers, wanted)
    return " or ".join(map(str, numbers[max(index - 1, 0) : index + 1]))
