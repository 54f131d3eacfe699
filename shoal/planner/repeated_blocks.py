"""Equal blocks and equal micro-batches are run a few times each, and what they take is extended to all of them.

A step of ``n`` equal blocks and ``m`` equal micro-batches takes ``a + b n + c m + d n m``, once there are so many that
each additional one does what the one before did. Four steps give the four numbers, for each figure of a step: seconds
by kind, bytes by collective, memory at each place where it has a maximum. A wait that more blocks hide is not negative,
and the peak is the place that has most in the whole model, which need not be that of a few blocks. Of gathered
parameters and of buffers in flight no place has more than the one that has most, extended too: one place may have those
of one block more in the larger run, which each further block does not add. What the allocator adds varies with sizes,
not with blocks: the mean over the steps that are run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean
from typing import Any

from torch import nn

from shoal.parallel.tensor.plan import join
from shoal.pipeline.blocks import find_blocks
from shoal.simulation.dry_run import StepTime
from shoal.simulation.memory import GATHERED, ROUNDING, MemoryPeak, kept_by_graphs
from shoal.simulation.times import HOST

_LONGEST_PERIOD = 8  # blocks, such as dense and expert layers in turn
_NUMBER_OF_BLOCK = re.compile(r"_?(layer|block|index|number|id)(_?(idx|index|id|number|num))?")

_OF_MEMORY = ("kind", "most")
_OF_FEW_UNITS = (GATHERED, "buffers in flight")

Values = dict[tuple[Hashable, ...], float]
RunKey = tuple[int, int, int | None]  # repetitions, micro-batches, memory_budget


@dataclass(frozen=True)
class Repeats:
    """Blocks of a model that repeat.

    Attributes: ``container``: name of their list. ``first``: the first of them. ``period``: blocks until they repeat.
    ``count``: how often. ``numel``: parameters of one period.
    """

    container: str
    first: int
    period: int
    count: int
    numel: int

    @classmethod
    def of(cls, model: nn.Module) -> Repeats:
        """The longest repetition. Raises: ModelError: the model has no list of blocks."""
        blocks = find_blocks(model)
        modules = [model.get_submodule(blocks.name(at)) for at in range(len(blocks.names))]
        kinds = [_kind_of(module, at) for at, module in enumerate(modules)]
        best = (0, 0, 1, 0)  # blocks in it, minus its period, period, first
        for period in range(1, min(_LONGEST_PERIOD, len(kinds) // 2) + 1):
            first = 0
            for at in range(len(kinds)):
                if at - period >= first and kinds[at] != kinds[at - period]:
                    first = at - period + 1
                best = max(best, ((at - first + 1) // period * period, -period, period, first))
        length, _, period, first = best
        numel = sum(p.numel() for module in modules[first : first + period] for p in module.parameters())
        return cls(blocks.container, first, period, length // period, numel)

    def spans(self, bounds: Sequence[int]) -> list[tuple[int, int]]:
        """Of each pipeline stage: its first repeated block, and how often the blocks repeat there.

        Args:
            bounds: the first block of each stage, and the number of blocks.
        """
        stop = self.first + self.count * self.period
        begins = [(max(begin, self.first), min(end, stop)) for begin, end in pairwise(bounds)]
        return [(begin, max(end - begin, 0) // self.period) for begin, end in begins]

    def remove(self, model: nn.Module, bounds: Sequence[int], num: int) -> list[str]:
        """Remove ``num`` repetitions of each stage. Returns: the names of the blocks at which later stages begin."""
        container: Any = model.get_submodule(self.container)
        for begin, _ in reversed(self.spans(bounds)):
            del container[begin : begin + num * self.period]
        starts = (begin - stage * num * self.period for stage, begin in enumerate(bounds[:-1]))
        return [join(self.container, str(start)) for start in starts][1:]


def _kind_of(block: nn.Module, number: int) -> object:
    """What must be equal for two blocks to do the same: classes, settings and shapes; not which block it is."""
    parts: list[object] = []
    for name, module in block.named_modules():
        settings = {
            key: value - number if isinstance(value, int) and _NUMBER_OF_BLOCK.fullmatch(key) else value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None)
        }
        shapes = [(key, p.shape, p.dtype, p.requires_grad) for key, p in module._parameters.items() if p is not None]
        parts.append((name, type(module), settings, shapes))
    return parts


@dataclass(frozen=True)
class RunGrid:
    """The numbers of repetitions and of micro-batches that are run, and those that are asked for.

    Attributes: ``fills``: memory grows with the micro-batches; else it is that of the most that are run. ``budgets``:
    of runs with each ``memory_budget``, the part of the blocks that does what it does there.
    """

    blocks: tuple[int, int]
    micro: tuple[int, int]
    num_blocks: int
    num_micro: int
    fills: bool = False
    budgets: Mapping[int | None, float] = field(default_factory=lambda: {None: 1.0})

    @property
    def largest(self) -> RunKey:
        """The run of the most of each."""
        return self.blocks[1], self.micro[1], next(iter(self.budgets))

    def extended(self, runs: Mapping[RunKey, Values]) -> Values:
        """What all of them take. Args: ``runs``: by repetitions, micro-batches and budget."""
        by_block = _shares(self.blocks, self.num_blocks)
        by_micro = _shares(self.micro, self.num_micro)
        of_memory = by_micro if self.fills else {self.micro[1]: 1.0}
        keys = dict.fromkeys(key for values in runs.values() for key in values)
        return {
            key: sum(
                part * block_share * micro_share * runs[block, micro, budget].get(key, 0.0)
                for budget, part in self.budgets.items()
                for block, block_share in by_block.items()
                for micro, micro_share in (of_memory if key[0] in _OF_MEMORY else by_micro).items()
            )
            for key in keys
        }

    def step(self, runs: Mapping[RunKey, StepTime], capacity: int | None) -> StepTime:
        """The step of all of them. Args: ``capacity``: bytes of the device."""
        values = self.extended({at: values_of(step) for at, step in runs.items()})

        def of(name: str) -> dict[Any, float]:
            return {key[1]: max(value, 0.0) for key, value in values.items() if key[0] == name}

        most = of("most")
        moments: dict[Any, dict[str, float]] = {}
        for (name, *key), value in values.items():
            if name == "kind":
                place, kind = key[0], str(key[1])
                moments.setdefault(place, {})[kind] = min(max(value, 0.0), most.get(kind, math.inf))
        at: Any = max(moments, key=lambda place: sum(moments[place].values()))
        by_kind = {kind: round(nbytes) for kind, nbytes in moments[at].items()}
        peaks = [step.memory for step in runs.values()]
        rounding = mean(peak.by_kind.get(ROUNDING, 0) / max(peak.allocated, 1) for peak in peaks)
        by_kind[ROUNDING] = round(sum(by_kind.values()) * rounding / (1 - rounding))
        allocated = sum(by_kind.values())
        reserved = allocated + round(mean(peak.reserved - peak.allocated for peak in peaks))
        largest = runs[self.largest]
        peak = MemoryPeak(allocated, reserved, by_kind, at[0], at[1], outside=largest.memory.outside)
        if largest.memory.in_graphs:
            peak = replace(peak, in_graphs=kept_by_graphs(moments.values()))
        peak = replace(peak, is_beyond=capacity is not None and peak.device_nbytes > capacity)
        kinds, host_seconds = of("by_kind"), values["host_seconds",]
        # In few blocks a host that is slower falls less behind: it queues them while the GPU does what is around them.
        kinds[HOST] = kinds.get(HOST, 0.0) + max(host_seconds - sum(kinds.values()), 0.0)
        return replace(
            largest,
            seconds=sum(kinds.values()),
            by_kind=kinds,
            host_seconds=host_seconds,
            busy=of("busy"),
            received={op: round(nbytes) for op, nbytes in of("received").items()},
            links={way: round(nbytes) for way, nbytes in of("links").items()},
            memory=peak,
            peaks={at: peak},
        )


def _shares(run: tuple[int, int], wanted: int) -> dict[int, float]:
    """Of the line through two runs, what each counts at ``wanted``."""
    low, high = run
    if low == high:
        return {low: 1.0}
    return {low: (high - wanted) / (high - low), high: (wanted - low) / (high - low)}


def values_of(step: StepTime) -> Values:
    """The figures of a step that are extended, without the allocator's."""
    values: Values = {("host_seconds",): step.host_seconds}
    for name in ("by_kind", "busy", "received", "links"):
        values |= {(name, key): float(value) for key, value in getattr(step, name).items()}
    for at, peak in step.peaks.items():
        values |= {("kind", at, kind): float(nbytes) for kind, nbytes in peak.by_kind.items() if kind != ROUNDING}
    for kind in _OF_FEW_UNITS:
        values["most", kind] = float(max(peak.by_kind.get(kind, 0) for peak in step.peaks.values()))
    return values
