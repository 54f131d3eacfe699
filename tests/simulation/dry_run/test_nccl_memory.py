"""What NCCL allocates for a communicator, against what was counted and measured on GPUs."""

from __future__ import annotations

import pytest

from shoal.simulation.nccl_memory import communicator_nbytes

MIB = 2**20
NODE = tuple(range(8))
TWO_NODES = tuple(range(16))


@pytest.mark.parametrize(
    ("ops", "ranks", "mib"),
    [
        ({"all_gather"}, NODE, 24 * 12),  # 10 MiB from the rank before, 2 MiB to the one after, of 24 channels
        ({"all_gather", "reduce_scatter", "broadcast"}, NODE, 24 * 12),  # the same rings
        ({"all_gather", "all_reduce"}, NODE, 2 * 24 * 12),
        ({"all_gather"}, TWO_NODES, 24 * 12 + 24 * 8 // 8),  # 24 channels leave a node, from 8 ranks
        ({"all_gather"}, (0, 8), 24 * 20),  # all of them leave the one rank
        ({"send"}, (0, 1), 32 * 2),
        ({"send", "recv"}, NODE, 32 * 12),  # from one rank, to another one
        ({"send", "recv"}, (0, 8), 2 * 32 * 2),  # one buffer of 2 MiB in each direction
        ({"all_gather"}, (3,), 0),
    ],
)
def test_bytes_by_operation_and_nodes(ops: set[str], ranks: tuple[int, ...], mib: int) -> None:
    assert communicator_nbytes(ops, ranks, 8, 24) == mib * MIB


def test_an_all_to_all_in_a_node_of_h100s_takes_what_was_measured() -> None:
    """NVIDIA/nccl issue 1685: 32 channels with each of seven peers; 1.06 GB before, 4.34 GB after the first."""
    assert communicator_nbytes({"all_to_all"}, NODE, 8, 24) == 32 * 7 * 12 * MIB
    assert communicator_nbytes({"all_to_all"}, NODE, 8, 24) == pytest.approx(4.34e9 - 1.06e9, rel=0.15)
