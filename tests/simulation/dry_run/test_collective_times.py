"""Times of collectives: NCCL's algorithms and protocols, over the links of a node and between nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.simulation.collective_times import Links, collective_seconds

LINKS = Links(360e9, 45e9)
GIB = 1 << 30
NODE, TWO_NODES, ONE_A_NODE = tuple(range(8)), tuple(range(16)), tuple(range(0, 64, 8))
FOUR_AND_FOUR = (*range(0, 8, 2), *range(8, 16, 2))


def seconds(op: str, nbytes: int, ranks: tuple[int, ...], links: Links = LINKS) -> float:
    return collective_seconds(op, nbytes, ranks, 8, links)


def test_a_large_tensor_takes_the_time_of_its_bytes_over_the_slowest_link() -> None:
    def time_of(op: str, ranks: tuple[int, ...]) -> float:
        return seconds(op, 64 * GIB, ranks)

    assert time_of("all_gather", NODE) == pytest.approx(7 / 8 * 64 * GIB / 360e9, rel=1e-3)
    assert time_of("reduce_scatter", NODE) == time_of("all_gather", NODE)
    assert time_of("all_reduce", NODE) == pytest.approx(2 * time_of("all_gather", NODE), rel=1e-3)
    assert time_of("broadcast", NODE) == pytest.approx(64 * GIB / 360e9, rel=1e-3)
    assert time_of("all_gather", ONE_A_NODE) == pytest.approx(7 / 8 * 64 * GIB / 45e9, rel=1e-3)
    assert time_of("all_gather", FOUR_AND_FOUR) == pytest.approx(7 / 8 * 64 * GIB / (4 * 45e9), rel=1e-3)
    assert time_of("all_gather", TWO_NODES) == pytest.approx(15 / 16 * 64 * GIB / 360e9, rel=1e-3)
    assert time_of("all_to_all", NODE) == pytest.approx(7 / 8 * 64 * GIB / 360e9, rel=1e-3)
    assert time_of("all_to_all", TWO_NODES) == pytest.approx(8 / 16 * 64 * GIB / 45e9, rel=1e-3)
    assert time_of("send", (0, 8)) == pytest.approx(64 * GIB / 45e9, rel=1e-3)
    assert time_of("batch", (0, 8)) == time_of("send", (0, 8))  # both directions at once


def test_an_axis_with_one_rank_a_node_is_much_slower_than_one_inside_of_a_node() -> None:
    ratio = seconds("all_gather", GIB, ONE_A_NODE) / seconds("all_gather", GIB, NODE)
    assert ratio == pytest.approx(360 / 45, rel=0.02)


@pytest.mark.parametrize(("nbytes", "low", "high"), [(1024, 8e-6, 20e-6), (1 << 20, 15e-6, 45e-6)])
def test_a_small_all_reduce_takes_microseconds_by_the_protocol_of_low_latency(
    nbytes: int, low: float, high: float
) -> None:
    """nccl-tests on eight H100s: about 15 us for 1 KiB, 30 us for 1 MiB."""
    assert low < seconds("all_reduce", nbytes, NODE) < high


def test_a_tree_is_chosen_for_small_tensors_on_many_nodes() -> None:
    many = tuple(range(1024))
    tree = seconds("all_reduce", 64 * 1024, many)
    ring_steps = 2 * 1023
    assert tree < ring_steps * 0.6e-6  # a ring has a latency for each of its steps
    assert tree > 2 * 7 * 5e-6  # twice the depth of the tree of 128 nodes


def test_times_grow_with_bytes_ranks_and_latency() -> None:
    for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "exchange"):
        for ranks in (NODE, TWO_NODES, ONE_A_NODE):
            times = [seconds(op, 1 << power, ranks) for power in range(10, 34)]
            assert times == sorted(times), (op, ranks)
            assert all(time > 0 for time in times)
            slow = replace(LINKS, network_latency=1e-3)
            is_slower = seconds(op, 1024, ranks, slow) > seconds(op, 1024, ranks)
            assert is_slower == (ranks is not NODE)
    assert seconds("all_reduce", GIB, (3,)) == 0.0
    assert seconds("all_gather", GIB, NODE, replace(LINKS, latency_factor=0.0)) == pytest.approx(7 / 8 * GIB / 360e9)


def test_pcie_has_no_ll128_and_more_latency() -> None:
    pcie = Links(20e9, 10e9, kind="pcie")
    same = replace(pcie, kind="nvlink")
    assert seconds("all_gather", 1 << 16, NODE, pcie) > seconds("all_gather", 1 << 16, NODE, same)
