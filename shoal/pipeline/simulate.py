"""A schedule run on paper: when each action starts and ends, whether the schedule is possible at all, and the order
with its sends, receives, reductions and gathered parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from shoal.errors import ConfigError
from shoal.pipeline.schedule import Action, ActionKind, Orders, PipelineSchedule, schedule_error
from shoal.pipeline.timeline import TimedAction, Timeline, grid

ONE_STEP = {"F": 1.0, "B": 1.0, "I": 1.0, "W": 1.0}


class Blocked(NamedTuple):
    """Where a rank waits for ever: before ``action``, for the end of ``needs``."""

    action: Action
    needs: Action


def simulate(
    schedule: PipelineSchedule,
    forward: float = 1.0,
    backward: float = 2.0,
    input: float = 1.0,
    weight: float = 1.0,
    send: float = 0.0,
) -> Timeline:
    """Run a schedule on ranks that each compute their actions in order and wait for each other.

    Args:
        forward, backward, input, weight: how long F, B, I and W of one pipeline stage take.
        send: from the end of an action until its output has reached another rank.
    Raises: ConfigError: the schedule waits for ever.
    """
    timeline, blocked = _run({"F": forward, "B": backward, "I": input, "W": weight}, schedule, send)
    if blocked:
        raise _waits_for_ever(schedule)
    return timeline


def validate(schedule: PipelineSchedule) -> None:
    """Check that each stage runs each micro-batch's F once, then B once (or I, then W), and no rank waits for ever.

    Raises: ConfigError: it does not; a schedule that waits is drawn, with the action before which each rank waits.
    """
    problems = _count_problems(schedule)
    if problems:
        raise schedule_error(
            f"the pipeline schedule {schedule.name} is wrong:\n    " + "\n    ".join(problems[:20]),
            "give each stage F once and then B once (or I and later W) of every micro-batch.",
        )
    if _run(ONE_STEP, schedule)[1]:
        raise _waits_for_ever(schedule)


def _run(
    durations: Mapping[str, float], schedule: PipelineSchedule, send: float = 0.0
) -> tuple[Timeline, dict[int, Blocked]]:
    """The timeline, as far as the schedule runs; and by rank, where it does not go on."""
    ended: dict[Action, float] = {}
    ranks: list[list[TimedAction]] = [[] for _ in schedule.actions]
    blocked: dict[int, Blocked] = {}
    waiting: dict[Action, list[int]] = {}  # by action that has not ended, the ranks that wait for it
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        blocked.pop(rank, None)
        timed = ranks[rank]
        for action in schedule.actions[rank][len(timed) :]:
            needed = _needs(action, schedule.num_stages)
            missing = next((each for each in needed if each not in ended), None)
            if missing is not None:
                blocked[rank] = Blocked(action, missing)
                waiting.setdefault(missing, []).append(rank)
                break
            arrived = [ended[each] + send * (schedule.stage_ranks[each.stage] != rank) for each in needed]
            start = max(timed[-1].end if timed else 0.0, *arrived, 0.0)
            timed.append(TimedAction(action, start, start + durations[action.kind]))
            ended[_backward(action)] = timed[-1].end
            ready += waiting.pop(_backward(action), [])
    return Timeline(schedule.name, tuple(map(tuple, ranks))), blocked


def _needs(action: Action, num_stages: int) -> list[Action]:
    """The actions that must end before this one; B in place of I."""
    stage, kind, micro = action
    if kind == "F":
        return [Action(stage - 1, "F", micro)] if stage else []
    if kind == "W":
        return [Action(stage, "B", micro)]
    return [Action(stage, "F", micro), *([Action(stage + 1, "B", micro)] if stage + 1 < num_stages else [])]


def _backward(action: Action) -> Action:
    """I as B: both give the gradient that the stage before needs."""
    return action._replace(kind="B") if action.kind == "I" else action


def _count_problems(schedule: PipelineSchedule) -> list[str]:
    problems = []
    for rank, order in enumerate(schedule.actions):
        counts = Counter(order)
        at = {action: index for index, action in enumerate(order)}
        problems += [f"rank {rank} has {action} {count} times" for action, count in counts.items() if count > 1]
        for action in at:
            if not 0 <= action.stage < schedule.num_stages or schedule.stage_ranks[action.stage] != rank:
                problems.append(f"rank {rank} has {action}, whose stage is not on this rank")
            elif action.kind not in ONE_STEP or action.micro not in range(schedule.num_micro):
                problems.append(
                    f"rank {rank} has {action}: not F, B, I or W of a micro-batch below {schedule.num_micro}"
                )
        for stage in schedule.stages_of(rank):
            for micro in range(schedule.num_micro):
                problems += _order_problems(at, stage, micro, schedule.is_forward_only)
    return problems


def _order_problems(at: Mapping[Action, int], stage: int, micro: int, is_forward_only: bool) -> list[str]:
    """What is wrong with one micro-batch of one stage. ``at`` gives the place of each action in the rank's order."""
    actions = [action for kind in ("F", "B", "I", "W") if (action := Action(stage, kind, micro)) in at]
    names = "".join(action.kind for action in actions)
    if names not in (("F",) if is_forward_only else ("FB", "FIW")):
        shown = " and ".join(map(str, actions)) or "nothing"
        wanted = "F" if is_forward_only else "F and B, or F, I and W"
        return [f"stage {stage} has {shown} of micro-batch {micro}, and needs {wanted}"]
    return [f"{later} comes before {first}" for first, later in pairwise(actions) if at[first] > at[later]]


def _waits_for_ever(schedule: PipelineSchedule) -> ConfigError:
    timeline, blocked = _run(ONE_STEP, schedule)
    there = {action for order in schedule.actions for action in order}
    marks = {}
    for rank, (action, needed) in blocked.items():
        split = needed._replace(kind="I")
        needed = split if needed.kind == "B" and split in there else needed
        owner = schedule.stage_ranks[needed.stage]
        marks[rank] = f"{action} waits for {needed}" + (
            f" of rank {owner}" if owner != rank else ", later in its order"
        )
    drawing = grid(timeline, marks, last=24).replace("\n", "\n    ")
    return schedule_error(
        f"the pipeline schedule {schedule.name} waits for ever: {len(marks)} of {schedule.num_ranks} ranks "
        f"cannot continue\n    {drawing}",
        "move the actions that the others wait for before those that wait.",
    )


def lower(schedule: PipelineSchedule, *, max_active_stages: int | None = None) -> Orders:
    """By rank, the actions of a schedule with those that its runtime adds.

    ``SEND_F`` and ``SEND_B`` follow the action whose output they send. A ``RECV_F`` or ``RECV_B`` is where the receiver
    is when the sender has that output, so it may come before other actions of the receiver. The transfers of all ranks
    have one common order, so ranks whose transfers run one by one cannot wait for each other in a circle.
    ``REDUCE_GRAD`` follows the last backward of a stage.

    Args:
        max_active_stages: add ``UNSHARD`` before and ``RESHARD`` after the use of a stage, so that a rank has the
            parameters of at most so many of its stages gathered: those that it needs next. None: neither action.
    Raises: ConfigError: the schedule waits for ever.
    """
    orders: list[list[Action]] = [[] for _ in schedule.actions]
    last = [_last_backwards(order) for order in schedule.actions]
    gathers = [_gathers(order, max_active_stages) for order in schedule.actions]
    done = [0] * schedule.num_ranks
    timed = [(each.end, rank, each.action) for rank, order in enumerate(simulate(schedule).ranks) for each in order]
    for _, rank, action in sorted(timed):
        mine, stage = orders[rank], action.stage
        to = stage + 1 if action.kind == "F" else stage - 1
        peer = schedule.stage_ranks[to] if action.kind != "W" and 0 <= to < schedule.num_stages else rank
        mine += gathers[rank][done[rank]]
        mine.append(action)
        if peer != rank:
            send, kind = _SEND["F" if action.kind == "F" else "B"]
            mine.append(Action(stage, send, action.micro))
            orders[peer].append(Action(to, kind, action.micro))
        if done[rank] in last[rank]:
            mine.append(Action(stage, "REDUCE_GRAD"))
        done[rank] += 1
    return tuple((*order, *gathers[rank][-1]) for rank, order in enumerate(orders))


_SEND: dict[str, tuple[ActionKind, ActionKind]] = {"F": ("SEND_F", "RECV_F"), "B": ("SEND_B", "RECV_B")}


def _last_backwards(order: Sequence[Action]) -> set[int]:
    """The places in a rank's order at which a stage has all its gradients."""
    return set({action.stage: place for place, action in enumerate(order) if action.kind in "BW"}.values())


def _gathers(order: Sequence[Action], max_active_stages: int | None) -> list[list[Action]]:
    """By place in a rank's order, what comes before it: RESHARD of stages not needed soon, UNSHARD of others."""
    before: list[list[Action]] = [[] for _ in range(len(order) + 1)]
    if max_active_stages is None:
        return before
    soon: list[list[int]] = [[]]  # by place, from the end: the next distinct stages
    for action in reversed(order):
        soon.append([action.stage, *(stage for stage in soon[-1] if stage != action.stage)])
    active: list[int] = []
    for place, stages in enumerate(reversed(soon)):
        wanted = stages[:max_active_stages]
        before[place] += [Action(stage, "RESHARD") for stage in active if stage not in wanted]
        before[place] += [Action(stage, "UNSHARD") for stage in wanted if stage not in active]
        active = wanted
    return before
