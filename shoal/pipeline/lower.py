"""From what ranks compute to what they do: sends, receives, reductions, and gathered parameters."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipeline.schedule import Action, ActionKind, Orders, PipelineSchedule
from shoal.pipeline.simulate import simulate


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
        mine += gathers[rank][done[rank]]
        mine.append(action)
        to = stage + 1 if action.kind == "F" else stage - 1
        if action.kind != "W" and 0 <= to < schedule.num_stages and schedule.stage_ranks[to] != rank:
            send, receive = _SEND["F" if action.kind == "F" else "B"]
            mine.append(Action(stage, send, action.micro))
            orders[schedule.stage_ranks[to]].append(Action(to, receive, action.micro))
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
