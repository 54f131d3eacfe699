"""Pipeline schedules as data: orders, text, validation, simulation, what lowering adds, pictures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.config.parallel import SCHEDULES
from shoal.errors import ConfigError
from shoal.pipeline.schedule import Action, PipelineSchedule, build_schedule, forward_schedule, read_schedule
from shoal.pipeline.simulate import lower, simulate, validate
from shoal.pipeline.timeline import TimedAction, Timeline, chrome_trace, grid, svg
from tests.helpers.places import ROOT

KINDS = [(name, depth) for name, allowed in SCHEDULES.items() for depth in ((1, 2, 3) if allowed == 0 else (allowed,))]
STOPPED = "0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0"


def text_of(name: str, num_ranks: int, num_micro: int, virtual_stages: int = 1) -> list[str]:
    return build_schedule(name, num_ranks, num_micro, virtual_stages=virtual_stages).text().splitlines()


@pytest.mark.parametrize(("name", "depth"), KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_schedule_exists_for_any_number_of_micro_batches_and_can_run(
    name: str, depth: int, num_ranks: int
) -> None:
    for num_micro in (1, 2, 3, 5, num_ranks, 2 * num_ranks + 1, 4 * num_ranks):
        schedule = build_schedule(name, num_ranks, num_micro, virtual_stages=depth)
        validate(schedule)
        kinds = Counter(action.kind for order in schedule.actions for action in order)
        assert kinds["F"] == kinds["B"] + kinds["I"] == kinds["B"] + kinds["W"] == num_ranks * depth * num_micro
        assert read_schedule(schedule.text(), name=schedule.name) == schedule
        validate(forward_schedule(schedule.stage_ranks, num_micro))


def test_orders_are_those_of_the_papers() -> None:
    assert text_of("gpipe", 2, 2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert text_of("1F1B", 3, 4)[0] == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert text_of("interleaved_1f1b", 2, 2, 2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert text_of("zb_h1", 2, 2) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
    assert text_of("zbv", 1, 1) == ["0F0 1F0 1I0 1W0 0I0 0W0"]
    assert text_of("forward", 2, 2, 2) == ["0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1"]
    assert text_of("zero_bubble", 4, 8) == text_of("zb-h1", 4, 8)


@pytest.mark.parametrize(("num_ranks", "num_micro"), [(2, 2), (3, 7), (4, 8)])
def test_gpipe_and_1f1b_are_torchs(num_ranks: int, num_micro: int) -> None:
    from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

    stage: Any = SimpleNamespace(num_stages=num_ranks, group_size=num_ranks, group_rank=0, has_backward=True)
    for name, kind in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        order: Any = kind(stage, num_micro)._get_pipeline_order()
        by_torch = [
            [str(each) for each in order[rank] if each is not None and "REDUCE" not in str(each)]
            for rank in range(num_ranks - 1)  # torch numbers the last rank's forwards from 1 in this form
        ]
        assert [line.split() for line in text_of(name, num_ranks, num_micro)[:-1]] == by_torch


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_micro", [4, 8, 16])
@pytest.mark.parametrize(("name", "depth"), [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved_1f1b", 2)])
def test_the_bubble_is_that_of_the_formula(name: str, depth: int, num_micro: int, num_ranks: int) -> None:
    timeline = simulate(build_schedule(name, num_ranks, num_micro, virtual_stages=depth))
    assert timeline.bubble == pytest.approx((num_ranks - 1) / (depth * num_micro + num_ranks - 1))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_micro", [8, 16])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.1, 0.9)])
def test_zero_bubble_schedules_have_the_bubbles_of_their_papers(
    num_ranks: int, num_micro: int, times: tuple[float, float, float]
) -> None:
    forward, grad_input, grad_weight = times
    one = sum(times)
    h1 = simulate(build_schedule("zb_h1", num_ranks, num_micro), forward, one - 1, grad_input, grad_weight)
    lost = (num_ranks - 1) * (forward + grad_input - grad_weight)
    assert h1.end - h1.start == pytest.approx(num_micro * one + lost, rel=0.03)
    assert h1.bubble == pytest.approx(lost / (num_micro * one + lost), rel=0.1)
    assert h1.bubble < 0.5 * simulate(build_schedule("1f1b", num_ranks, num_micro)).bubble
    v = simulate(build_schedule("zbv", num_ranks, num_micro), forward, one - 1, grad_input, grad_weight)
    assert v.own_bubble == pytest.approx(0.0, abs=1e-9 if times == (1.0, 1.0, 1.0) else 0.05)


def test_peak_activations_are_those_of_the_schedule() -> None:
    def peaks(name: str, depth: int = 1) -> tuple[int, ...]:
        return simulate(build_schedule(name, 4, 8, virtual_stages=depth)).peak_activations

    assert peaks("gpipe") == (8, 8, 8, 8)
    assert peaks("1f1b") == (4, 3, 2, 1)
    assert peaks("interleaved_1f1b", 2) == (11, 9, 7, 5)  # (v - 1) p + 2 (p - 1 - rank) + 1
    assert peaks("zb_h1") == (4, 4, 4, 4)
    assert peaks("zbv", 2) == (8, 8, 8, 8)  # of two stages: as much as 1F1B's first rank
    assert peaks("dualpipev", 2) == (9, 9, 9, 9)


def test_a_transfer_delays_the_receiver_and_not_the_sender() -> None:
    timeline = simulate(read_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"), send=0.5)
    assert [timed.start for timed in timeline.ranks[0]] == [0.0, 1.0, 5.0, 8.0]
    assert [timed.start for timed in timeline.ranks[1]] == [1.5, 2.5, 4.5, 5.5]


def run_with_blocking_transfers(orders: tuple[tuple[Action, ...], ...], schedule: PipelineSchedule) -> None:
    """Run lowered orders where a send ends only with its receive, and each rank does one thing at a time."""
    at = [0] * len(orders)
    done: set[Action] = set()
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        before = list(at)
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and not order[at[rank]].kind.startswith(("SEND", "RECV")):
                stage, kind, micro = order[at[rank]]
                before_it, after_it = stage - 1, stage + 1
                if kind == "F" and stage and schedule.stage_ranks[before_it] != rank:
                    assert Action(stage, "RECV_F", micro) in done
                if kind in ("B", "I") and after_it < schedule.num_stages and schedule.stage_ranks[after_it] != rank:
                    assert Action(stage, "RECV_B", micro) in done
                done.add(order[at[rank]])
                at[rank] += 1
            if at[rank] == len(order) or not order[at[rank]].kind.startswith("SEND"):
                continue
            stage, kind, micro = order[at[rank]]
            to = stage + 1 if kind == "SEND_F" else stage - 1
            peer = schedule.stage_ranks[to]
            receive = Action(to, "RECV_F" if kind == "SEND_F" else "RECV_B", micro)
            if at[peer] < len(orders[peer]) and orders[peer][at[peer]] == receive:
                done.add(receive)
                at[rank] += 1
                at[peer] += 1
        assert at != before, [str(order[place]) for place, order in zip(at, orders, strict=True) if place < len(order)]


def receive_of(send: Action) -> Action:
    to = send.stage + (1 if send.kind == "SEND_F" else -1)
    return Action(to, "RECV_F" if send.kind == "SEND_F" else "RECV_B", send.micro)


def seconds_of(
    orders: Sequence[Sequence[Action]],
    schedule: PipelineSchedule,
    send: float,
    *,
    num_communicators: int = 2,
    backward: float = 2.0,
    slow: Mapping[int, float] | None = None,
) -> float:
    """A step in which the transfers of a rank run next to what it computes, as on NCCL.

    Those of one communicator run one after the other. A message moves when both ranks have begun it, in ``send``.

    Args:
        slow: by rank, how much longer it computes.
    """
    lengths = {"F": 1.0, "B": backward, "I": backward - 1.0, "W": 1.0}
    at, host = [0] * len(orders), [0.0] * len(orders)  # the host queues all in order; the compute stream
    queued: dict[tuple[int, str], list[tuple[float, Action]]] = {}  # by rank and communicator, what has not ended
    free: dict[tuple[int, str], float] = {}  # when a communicator has ended what was queued
    ended: dict[Action, float] = {}
    going_on = True
    while going_on:
        going_on = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                stage, kind, micro = action = order[at[rank]]
                if kind in lengths:
                    receive = Action(stage, "RECV_F" if kind == "F" else "RECV_B", micro)
                    if kind != "W" and receive in order:
                        assert receive in order[: at[rank]]
                        if receive not in ended:
                            break
                        host[rank] = max(host[rank], ended[receive])
                    host[rank] += lengths[kind] * (slow or {}).get(rank, 1.0)
                elif kind.startswith(("SEND", "RECV")):
                    comm = kind[-1] if num_communicators == 2 else ""
                    queued.setdefault((rank, comm), []).append((host[rank], action))
                at[rank] += 1
                going_on = True
        begun = {each[0][1]: (key, max(free.get(key, 0.0), each[0][0])) for key, each in queued.items() if each}
        for send_action in [each for each in begun if each.kind.startswith("SEND")]:
            receive = receive_of(send_action)
            if receive in begun:
                end = max(begun[send_action][1], begun[receive][1]) + send
                for each in (send_action, receive):
                    key = begun[each][0]
                    queued[key].pop(0)
                    free[key] = ended[each] = end
                going_on = True
    waiting = [str(order[place]) for place, order in zip(at, orders, strict=True) if place < len(order)]
    assert not waiting and not any(queued.values()), f"these wait for ever: {waiting}"
    return max(*host, *free.values(), 0.0)


@pytest.mark.parametrize(("name", "depth"), KINDS)
def test_with_a_communicator_for_each_direction_no_rank_waits_for_ever_or_longer_than_with_one(
    name: str, depth: int
) -> None:
    for num_ranks, num_micro in ((2, 5), (3, 6), (4, 9)):
        schedule = build_schedule(name, num_ranks, num_micro, virtual_stages=depth)
        orders = lower(schedule)
        for send in (0.0, 0.2, 1.5):
            for slow in ({}, {0: 1.1}, {num_ranks - 1: 1.1}):
                one = seconds_of(orders, schedule, send, num_communicators=1, slow=slow)
                assert seconds_of(orders, schedule, send, slow=slow) <= one + 1e-9
    evaluation = forward_schedule(schedule.stage_ranks, num_micro)
    assert seconds_of(lower(evaluation), evaluation, 0.2) > 0


def test_an_order_in_which_ranks_wait_for_each_other_is_seen() -> None:
    """Rank 1 receives two outputs in the other order."""
    schedule = build_schedule("1f1b", 2, 4)
    first, second = lower(schedule)
    one, other = Action(1, "RECV_F", 1), Action(1, "RECV_F", 2)
    swapped = tuple({one: other, other: one}.get(action, action) for action in second)
    with pytest.raises(AssertionError):
        seconds_of((first, swapped), schedule, 0.1)


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_micro", "depth", "backward", "slow", "expected"),
    [
        ("1f1b", 2, 8, 1, 2.0, {}, (29.8, 28.8)),
        ("interleaved_1f1b", 4, 16, 2, 2.0, {}, (128.2, 116.4)),
        ("1f1b", 8, 32, 1, 3.0, {0: 1.1}, (181.4, 176.8)),
        ("1f1b", 8, 32, 1, 3.0, {7: 1.1}, (171.6, 171.6)),
    ],
)
def test_how_long_a_step_takes_with_one_communicator_and_with_two(
    name: str,
    num_ranks: int,
    num_micro: int,
    depth: int,
    backward: float,
    slow: dict[int, float],
    expected: tuple[float, float],
) -> None:
    schedule = build_schedule(name, num_ranks, num_micro, virtual_stages=depth)
    seconds = [
        seconds_of(lower(schedule), schedule, 0.2, num_communicators=number, backward=backward, slow=slow)
        for number in (1, 2)
    ]
    assert seconds == pytest.approx(expected)


@pytest.mark.parametrize(("name", "depth"), KINDS)
def test_lowered_orders_run_even_where_every_transfer_blocks_both_ranks(name: str, depth: int) -> None:
    for num_ranks, num_micro in ((1, 2), (2, 5), (3, 6), (4, 9)):
        schedule = build_schedule(name, num_ranks, num_micro, virtual_stages=depth)
        orders = lower(schedule)
        run_with_blocking_transfers(orders, schedule)
        computed = tuple(tuple(each for each in order if each.kind in ("F", "B", "I", "W")) for order in orders)
        assert computed == schedule.actions
        kinds = Counter(action.kind for order in orders for action in order)
        crossings = sum(a != b for a, b in zip(schedule.stage_ranks, schedule.stage_ranks[1:], strict=False))
        assert kinds["SEND_F"] == kinds["RECV_F"] == kinds["SEND_B"] == kinds["RECV_B"] == crossings * num_micro
        for order in orders:
            for place, action in enumerate(order):
                if action.kind == "REDUCE_GRAD":
                    assert not any(each.stage == action.stage and each.kind in "BIW" for each in order[place:])
        assert kinds["REDUCE_GRAD"] == schedule.num_stages


def test_stages_are_gathered_before_their_use_and_at_most_so_many() -> None:
    schedule = build_schedule("interleaved_1f1b", 2, 4, virtual_stages=3)
    for limit in (1, 2, 3):
        for order in lower(schedule, max_active_stages=limit):
            active: set[int] = set()
            for action in order:
                if action.kind == "UNSHARD":
                    active.add(action.stage)
                elif action.kind == "RESHARD":
                    active.remove(action.stage)
                elif action.kind in ("F", "B", "REDUCE_GRAD"):
                    assert action.stage in active
                assert len(active) <= limit
            assert not active
    gathers = Counter(action.kind for action in lower(schedule, max_active_stages=3)[0])
    assert gathers["UNSHARD"] == gathers["RESHARD"] == 3


def test_a_schedule_that_waits_for_ever_is_drawn_with_the_places() -> None:
    schedule = read_schedule(STOPPED)
    for check in (validate, simulate):
        with pytest.raises(ConfigError, match="waits for ever: 2 of 2 ranks") as error:
            check(schedule)
        assert error.value.code == "pipeline-schedule"
        assert error.value.what.splitlines()[1:] == [
            "    step    0   1",
            "    rank 0  0F0 .    <- 0B0 waits for 1B0 of rank 1",
            "    rank 1  .   1F0  <- 1F1 waits for 0F1 of rank 0",
        ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0 0B0\n1F0", "stage 1 has 1F0 of micro-batch 0, and needs F and B, or F, I and W"),
        ("0F0 0B0 0F0", "rank 0 has 0F0 2 times"),
        ("0F0 0I0", "stage 0 has 0F0 and 0I0 of micro-batch 0"),
        ("0F0 0B0 0W0", "stage 0 has 0F0 and 0B0 and 0W0 of micro-batch 0"),
        ("0F0 0W0 0I0", "0W0 comes before 0I0"),
        ("0B0 0F0", "0B0 comes before 0F0"),
        ("0F0 0B0 0F2 0B2", "stage 0 has nothing of micro-batch 1"),
    ],
)
def test_wrong_counts_and_orders_are_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(read_schedule(text))
    assert said in error.value.what


def test_a_text_that_is_no_schedule_says_every_reason() -> None:
    with pytest.raises(ConfigError) as error:
        read_schedule("0F0 0X0\n\n0F1 2F0 0SEND_F0")
    for said in (
        "line 1: '0X0' is no action",
        "line 3: '0SEND_F0' is no action",
        "pipeline stage 0 is on the lines of ranks 0 and 1",
        "pipeline stage 1 is on no line",
    ):
        assert said in error.value.what


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "pipeline stage 0 is on no line"),
        ("0F0 0B0 999999999F0", "pipeline stage 1 is on no line"),
        ("0F0 0B0 0F999999999", "micro-batch 999999999, but only 3 actions"),
    ],
)
def test_a_text_with_gaps_is_refused_at_once(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_schedule(text)


def test_torchs_csv_with_overlapped_actions_is_read() -> None:
    schedule = read_schedule("0F0,,(0F1;0B0)OVERLAP_F_B,0B1,  # a rank\n")
    assert schedule.text() == "0F0 0F1 0B0 0B1"


def test_a_file_is_a_schedule_for_its_own_numbers(tmp_path: Path) -> None:
    path = tmp_path / "schedule.txt"
    path.write_text("# two ranks\n" + build_schedule("zbv", 2, 4).text())
    schedule = build_schedule(str(path), 2, 4, virtual_stages=2)
    assert schedule.actions == build_schedule("zbv", 2, 4).actions
    assert schedule.stage_ranks == (0, 1, 1, 0)
    with pytest.raises(ConfigError, match="2 ranks, and the run has 4; 4 micro-batches, and the run has 8"):
        build_schedule(str(path), 4, 8)
    path.write_text("0F0 0F1")
    with pytest.raises(ConfigError, match="no backward"):
        build_schedule(str(path), 1, 2)


def test_numbers_that_no_schedule_has_are_errors_that_say_what_fits(tmp_path: Path) -> None:
    for name, virtual_stages, said, do in (
        ("1f1b", 2, "1 pipeline stage a rank, and virtual_stages is 2", "or use the schedule interleaved_1f1b"),
        ("zbv", 3, "2 pipeline stages a rank, and virtual_stages is 3", "set virtual_stages to 2"),
        (str(tmp_path / "missing"), 1, "nor a readable file", "one of gpipe, 1f1b"),
    ):
        with pytest.raises(ConfigError) as error:
            build_schedule(name, 4, 8, virtual_stages=virtual_stages)
        assert said in error.value.what
        assert do in error.value.do
    with pytest.raises(ConfigError, match="a pipeline schedule for 0 micro-batches"):
        build_schedule("1f1b", 4, 0)


def test_the_grid_shows_the_last_steps() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 2), backward=1.0)
    assert grid(timeline).splitlines() == [
        "step    0   1   2   3   4   5",
        "rank 0  0F0 0F1 .   0B0 .   0B1",
        "rank 1  .   1F0 1B0 1F1 1B1 .",
    ]
    assert grid(timeline, last=2).splitlines() == ["step    4   5", "rank 0  .   0B1", "rank 1  1B1 ."]


def test_pictures_show_every_action_at_its_time() -> None:
    send = Action(0, "SEND_F", 0)
    measured = Timeline("measured", ((TimedAction(Action(0, "F", 0), 5.0, 6.0), TimedAction(send, 6.0, 6.5)), ()))
    for timeline, count in ((simulate(build_schedule("zbv", 2, 4)), 48), (measured, 2)):
        root = ElementTree.fromstring(svg(timeline))
        titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
        assert len(titles) == count
        assert titles[0] == f"{timeline.ranks[0][0].action}: {timeline.start:g} to {timeline.start + 1:g}"
        events = [each for each in json.loads(chrome_trace(timeline))["traceEvents"] if each["ph"] == "X"]
        assert len(events) == count
        assert events[0] == {
            "ph": "X", "name": "0F0", "cat": "forward", "pid": 0, "tid": 0, "ts": 0.0, "dur": 1e6,
            "args": {"stage": 0, "micro_batch": 0},
        }  # fmt: skip
    assert (measured.bubble, measured.peak_activations) == (pytest.approx(2 / 3), (1, 0))


def test_the_page_shows_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.txt").write_text(STOPPED)
    printed = CliRunner().invoke(app, ["schedule", "1f1b", "--ranks", "2", "--micro", "3"]).output
    stopped = CliRunner().invoke(app, ["schedule", "wrong.txt", "--ranks", "2", "--micro", "2"]).exception
    page = (ROOT / "docs" / "how-to" / "pipeline.md").read_text(encoding="utf-8")
    assert f"--micro 3\n{printed}```" in page
    assert f"shoal: {stopped}\n```" in page


def test_the_command_prints_and_draws_a_schedule(tmp_path: Path) -> None:
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    done = CliRunner().invoke(
        app, ["schedule", "1f1b", "--ranks", "4", "--micro", "8", "--svg", str(picture), "--trace", str(trace)]
    )
    assert done.exit_code == 0
    assert done.output.startswith("step    0   1 ")
    assert "bubble             27.3%" in done.output
    assert "peak activations   4, 3, 2, 1 micro-batches by rank" in done.output
    assert picture.read_text().startswith("<svg")
    assert len(json.loads(trace.read_text())["traceEvents"]) == 4 + 64
    path = tmp_path / "wrong.txt"
    path.write_text(STOPPED)
    failed = CliRunner().invoke(app, ["schedule", str(path), "-n", "2", "--micro", "2"])
    assert cast(ConfigError, failed.exception).code == "pipeline-schedule"
