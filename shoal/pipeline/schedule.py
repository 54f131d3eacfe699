"""Pipeline schedules as data: for each rank the actions that it runs, in order, and the rank of each pipeline stage.

    >>> print(build_schedule("1f1b", num_ranks=2, num_micro=3).text())
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

``2F0`` is the forward of pipeline stage 2 on micro-batch 0, ``2B0`` its backward. A split backward is ``2I0``, the
gradient of the stage's input, and later ``2W0``, the gradients of its weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

from shoal.config.parallel import SCHEDULES, schedule_name, virtual_stages_problem
from shoal.errors import ConfigError, UsageError

ActionKind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "UNSHARD", "RESHARD"]
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")  # torch's form of a forward and a backward in one action
_TORCH_CLASSES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def schedule_error(what: str, do: str) -> ConfigError:
    return ConfigError(what, do=do, code="pipeline-schedule")


class Action(NamedTuple):
    """One step of a rank: ``2F0``, ``1SEND_B3``, ``0REDUCE_GRAD``.

    Args:
        stage: the pipeline stage that computes, sends or receives; of all stages, virtual ones included.
        micro: the micro-batch; None where the action is for all of them.
    """

    stage: int
    kind: ActionKind
    micro: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.micro is None else self.micro}"


Orders = tuple[tuple[Action, ...], ...]  # by rank


@dataclass(frozen=True)
class PipelineSchedule:
    """What each rank computes, in order.

    Args:
        actions: by rank: F, B, I and W.
        stage_ranks: by pipeline stage: the rank that runs it.
    """

    name: str
    actions: Orders
    stage_ranks: tuple[int, ...]
    num_micro: int

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @cached_property
    def is_forward_only(self) -> bool:
        return all(action.kind == "F" for order in self.actions for action in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The pipeline stages of a rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def text(self) -> str:
        """One line a rank, as ``read_schedule`` takes it."""
        return "\n".join(" ".join(map(str, order)) for order in self.actions)


def build_schedule(name: str, num_ranks: int, num_micro: int, *, virtual_stages: int = 1) -> PipelineSchedule:
    """The schedule of a name, or of the file of a path, for ``num_micro`` micro-batches.

    Any number of micro-batches has a schedule: where the published order wants whole rounds of them (or at least twice
    the ranks), the order for the next number that fits is taken, without the micro-batches that are not there.

    Args:
        name: one of ``SCHEDULES``, ``zero_bubble``, or the path of a file.
        virtual_stages: pipeline stages of one rank; ``zbv`` and ``dualpipev`` always have two.
    Raises: ConfigError: no such schedule, or no such schedule with these numbers.
    """
    for number, what in ((num_ranks, "ranks"), (num_micro, "micro-batches"), (virtual_stages, "virtual stages")):
        if number < 1:
            raise schedule_error(f"a pipeline schedule for {number} {what}", f"give at least 1 of the {what}.")
    known = name if name == "forward" else schedule_name(name)
    if known is None:
        return _of_file(Path(name), num_ranks, num_micro, virtual_stages)
    if known != "forward" and (problem := virtual_stages_problem(known, virtual_stages)):
        raise schedule_error(f"the schedule {known} has {problem[0]}", problem[1])
    depth = 2 if known in ("zbv", "dualpipev") else virtual_stages
    stage_ranks = tuple(stages_to_ranks("v" if known in ("zbv", "dualpipev") else "loop", num_ranks, depth))
    if known == "forward":
        return forward_schedule(stage_ranks, num_micro)
    if known in _TORCH_CLASSES:
        actions = _of_torch(known, num_ranks, num_micro, depth)
    else:
        make = _gpipe if known == "gpipe" else _one_forward_one_backward
        actions = tuple(
            tuple(make([s for s, r in enumerate(stage_ranks) if r == rank], num_ranks, num_micro))
            for rank in range(num_ranks)
        )
    return PipelineSchedule(known, actions, stage_ranks, num_micro)


def stages_to_ranks(order: str | Sequence[int], num_ranks: int, virtual_stages: int) -> list[int]:
    """The rank of each pipeline stage.

    >>> stages_to_ranks("loop", 3, 2), stages_to_ranks("v", 3, 2)
    ([0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])

    Raises: UsageError: an order that gives ranks other numbers of stages than ``virtual_stages``.
    """
    if order == "loop":
        return list(range(num_ranks)) * virtual_stages
    if order == "v":
        down = list(range(num_ranks))
        return [rank for turn in range(virtual_stages) for rank in (down if turn % 2 == 0 else down[::-1])]
    if isinstance(order, str) or sorted(order) != sorted(list(range(num_ranks)) * virtual_stages):
        raise UsageError(
            f"stage_to_rank={order!r} for {num_ranks} ranks with {virtual_stages} stages each.",
            do='use "loop", "v", or a list that has each rank as often as it has stages.',
            code="pipeline-partition",
        )
    return list(order)


def forward_schedule(stage_ranks: Sequence[int], num_micro: int) -> PipelineSchedule:
    """The forward of every micro-batch and no backward, for the ``stage_ranks`` of any schedule.

    A rank with several stages prefers the last one that can run, so that few outputs wait.
    """
    num_ranks, num_stages = max(stage_ranks) + 1, len(stage_ranks)
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    done = [0] * num_stages  # by stage, micro-batches
    while done[-1] < num_micro:
        ready = {}
        for stage, rank in enumerate(stage_ranks):  # the last one wins
            if done[stage] < (done[stage - 1] if stage else num_micro):
                ready[rank] = stage
        for rank, stage in ready.items():
            orders[rank].append(Action(stage, "F", done[stage]))
            done[stage] += 1
    return PipelineSchedule("forward", tuple(map(tuple, orders)), tuple(stage_ranks), num_micro)


def _gpipe(stages: list[int], num_ranks: int, num_micro: int) -> Iterable[Action]:
    """All forwards, then all backwards. Source: GPipe, arXiv:1811.06965; with several stages, arXiv:2211.05953."""
    yield from (Action(stage, "F", micro) for stage in stages for micro in range(num_micro))
    yield from (Action(stage, "B", micro) for stage in reversed(stages) for micro in range(num_micro))


def _one_forward_one_backward(stages: list[int], num_ranks: int, num_micro: int) -> Iterable[Action]:
    """A forward for each stage that follows, then forward and backward in turn. Source: arXiv:2006.09503."""
    (stage,) = stages
    ahead = min(num_ranks - 1 - stage, num_micro)
    yield from (Action(stage, "F", micro) for micro in range(ahead))
    for micro in range(num_micro):
        if ahead + micro < num_micro:
            yield Action(stage, "F", ahead + micro)
        yield Action(stage, "B", micro)


def _of_torch(name: str, num_ranks: int, num_micro: int, depth: int) -> Orders:
    """The order that a class of torch.distributed.pipelining computes. It reads three numbers of the stages."""
    from torch.distributed.pipelining import schedules

    fitting = _fitting(name, num_ranks, num_micro)
    stage = SimpleNamespace(num_stages=num_ranks * depth, group_size=num_ranks, group_rank=0, submod=None)
    order = getattr(schedules, _TORCH_CLASSES[name])([stage] * depth, fitting).pipeline_order
    actions = ([leaf for each in order[rank] for leaf in _leaves(each)] for rank in range(num_ranks))
    return tuple(tuple(each for each in rank if cast(int, each.micro) < num_micro) for rank in actions)


def _fitting(name: str, num_ranks: int, num_micro: int) -> int:
    """The least number of micro-batches, from ``num_micro``, for which the published order exists."""
    if name == "dualpipev":
        return max(num_micro, 2 * num_ranks)
    while name != "zbv" and num_micro % max(1, num_micro // num_ranks):  # rounds of equal length, of at least num_ranks
        num_micro += 1
    return num_micro


def _leaves(action: Any) -> Iterable[Action]:
    """torch's action as ours; an overlapped pair as its two parts; None as nothing."""
    for leaf in (getattr(action, "sub_actions", None) or (action,)) if action is not None else ():
        yield Action(leaf.stage_index, leaf.computation_type.value, leaf.microbatch_index)


def read_schedule(text: str, *, name: str = "text") -> PipelineSchedule:
    """The schedule of a text: one line a rank, ``0F0 0F1 0B0``; commas, empty lines and comments after # are allowed.

    Raises: ConfigError: what is not an action; a stage on two ranks, or on none.
    """
    actions: list[tuple[Action, ...]] = []
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = _OVERLAPPED.sub(lambda pair: pair[1].replace(";", " "), line.partition("#")[0])
        matches = [(word, _ACTION.fullmatch(word)) for word in words.replace(",", " ").split()]
        problems += [f"line {number}: {word!r} is no action" for word, match in matches if match is None]
        if matches:
            parts = [match.groups() for _, match in matches if match is not None]
            actions.append(tuple(Action(int(s), cast(ActionKind, kind), int(m)) for s, kind, m in parts))
    owners: dict[int, set[int]] = {}
    for rank, order in enumerate(actions):
        for action in order:
            owners.setdefault(action.stage, set()).add(rank)
    num_actions = sum(map(len, actions))
    num_micro = 1 + max((cast(int, action.micro) for order in actions for action in order), default=0)
    if num_micro > max(num_actions, 1):
        problems.append(f"micro-batch {num_micro - 1}, but only {num_actions} actions: some micro-batches are missing")
    for stage in range(min(max(owners, default=0), num_actions) + 1):
        ranks = sorted(owners.get(stage, ()))
        if len(ranks) != 1:
            where = f"the lines of ranks {' and '.join(map(str, ranks))}" if ranks else "no line"
            problems.append(f"pipeline stage {stage} is on {where}")
    if problems:
        raise schedule_error(
            f"the pipeline schedule {name} cannot be read:\n    " + "\n    ".join(problems[:20]),
            "write one line a rank, of actions such as 0F0 (stage 0, forward, micro-batch 0), 0B0, or 0I0 and 0W0.",
        )
    stage_ranks = tuple(min(owners[stage]) for stage in sorted(owners))
    return PipelineSchedule(name, tuple(actions), stage_ranks, num_micro)


def _of_file(path: Path, num_ranks: int, num_micro: int, virtual_stages: int) -> PipelineSchedule:
    """The schedule of a file, if it is one for these numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        names = ", ".join(SCHEDULES)
        raise schedule_error(
            f"{str(path)!r} is neither a pipeline schedule nor a readable file: {error}",
            f"write one of {names}, or the path of a file with one line a rank.",
        ) from error
    schedule = read_schedule(text, name=str(path))
    differences = [
        f"{there} {what}, and the run has {wanted}"
        for there, wanted, what in (
            (schedule.num_ranks, num_ranks, "ranks"),
            (schedule.num_micro, num_micro, "micro-batches"),
        )
        if there != wanted
    ]
    if virtual_stages not in (1, schedule.num_stages / schedule.num_ranks):
        differences.append(f"{schedule.num_stages} stages, and virtual_stages is {virtual_stages}")
    if schedule.is_forward_only:
        differences.append("no backward")
    if differences:
        raise schedule_error(
            f"the pipeline schedule of {path} has {'; '.join(differences)}",
            f"change the run, or write a file for {num_ranks} ranks and {num_micro} micro-batches.",
        )
    return schedule
