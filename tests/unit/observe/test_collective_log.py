"""The log of collectives by itself, and under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.comm.world import current_world
from shoal.compat import finder
from shoal.observe.collectives import CollectiveLog, bandwidths, collective_log, trimmed_mean


@pytest.fixture(autouse=True)
def deepspeed_alias() -> Iterator[None]:
    finder.install(children=False)
    yield
    finder.uninstall()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", (64.0, 48.0)),  # 2 MB of each of 4 ranks in 1 ms: 8 MB, of which 6 over the slowest link
        ("all_gather_into_tensor", (64.0, 48.0)),
        ("reduce_scatter_tensor", (64.0, 48.0)),
        ("all_reduce", (32.0, 24.0)),
        ("all_to_all_single", (16.0, 12.0)),
        ("broadcast", (16.0, 16.0)),
        ("isend", (16.0, 16.0)),
    ],
)
def test_rates_are_those_of_what_all_ranks_put_in(kind: str, expected: tuple[float, float]) -> None:
    assert bandwidths(kind, 2_000_000, 1.0, 4) == expected


def test_a_clock_that_did_not_move_gives_no_rate() -> None:
    assert bandwidths("all_reduce", 2_000_000, 0.0, 4) == (0.0, 0.0)


def test_means_leave_out_a_tenth_at_each_end_and_change_nothing() -> None:
    values = [3.0, 1.0, 2.0]
    assert trimmed_mean(values) == 2.0
    assert values == [3.0, 1.0, 2.0]
    assert trimmed_mean([*[1.0] * 9, 100.0]) == 1.0
    assert trimmed_mean([]) == 0.0
    assert trimmed_mean([1.0, 3.0], 0.5) == 2.0


@pytest.mark.parametrize(
    ("takes_all", "kinds", "wanted"),
    [
        (True, (), {"all_reduce", "all_gather"}),
        (False, ("all_reduce",), {"all_reduce"}),
        (False, ("all_gather_into_tensor",), {"all_gather"}),
        (False, ("gradient",), {"all_reduce"}),
        (False, (), set()),
    ],
)
def test_a_log_takes_all_kinds_or_those_that_are_named(
    takes_all: bool, kinds: tuple[str, ...], wanted: set[str]
) -> None:
    log = CollectiveLog()
    log.takes_all, log.kinds = takes_all, kinds
    calls = {"all_reduce": "gradient", "all_gather": "blocks.0"}
    assert {kind for kind, label in calls.items() if log.wants(kind, label)} == set()
    log.is_on = True
    assert {kind for kind, label in calls.items() if log.wants(kind, label)} == wanted


def test_the_summary_is_by_name_and_size() -> None:
    log = CollectiveLog()
    for milliseconds in (1.0, 3.0):
        log.add("all_reduce", 2048, milliseconds, size=2)
    log.add("all_reduce", 1024, 2.0, size=2)
    log.names_callers = True
    log.add("barrier", 0, 0.5, size=2, caller="start")
    found = log.summary()
    assert list(found) == ["all_reduce", "barrier | [Caller Func: start]"]
    assert list(found["all_reduce"]) == [1024, 2048]
    assert found["all_reduce"][2048] == {
        "count": 2,
        "total_latency_ms": 4.0,
        "avg_latency_ms": 2.0,
        "tput_avg_gbps": pytest.approx((2 * 2048 * 8 / 1e6 + 2 * 2048 * 8 / 3e6) / 2),
        "busbw_avg_gbps": pytest.approx((2048 * 8 / 1e6 + 2048 * 8 / 3e6) / 2),
        "msg_size_bytes": 2048,
        "msg_size_str": "2 KiB",
    }
    assert log.table().splitlines()[2].split() == ["all_reduce", "1", "KiB", "1", "2.00", "2.000", "0.01", "0.00"]
    log.clear()
    assert log.summary() == {}


def test_deepspeeds_helpers_give_sizes_and_rates() -> None:
    from deepspeed.utils.comms_logging import calc_bw_log, convert_size

    assert convert_size(1024) == "1 KiB"
    assert calc_bw_log("all_reduce", 1_000_000, 1.0) == (16.0, 0.0)


def test_the_log_is_printed_or_returned(capsys: pytest.CaptureFixture[str]) -> None:
    import deepspeed.comm as dist

    log = collective_log(current_world())
    log.clear()
    log.add("all_reduce", 1024, 2.0, size=1)
    found = dist.log_summary(show_straggler=True, return_dict=True)
    assert found is not None
    assert found["summary"]["all_reduce"][1024]["count"] == 1
    assert found["straggler_analysis"]["all_reduce"][1024]["total_straggler_ms"] == 0.0
    assert sorted(found["metadata"]) == ["rank", "timestamp", "world_size"]
    out = capsys.readouterr().out
    assert "collective  size   count  total ms" in out
    assert "waiting for late ranks" in out
    assert dist.log_summary() is None
    assert "waiting" not in capsys.readouterr().out
    dist.reset_log()
    assert not log.records
