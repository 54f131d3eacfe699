"""Muon: the iteration and the update written out, the assignment of matrices, and shards against whole parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import OptimizerError
from shoal.mesh import Mesh
from shoal.optim.muon import Muon, num_operations, orthogonalize, share_out
from shoal.optim.whole import OwnedRange, ParameterPart
from tests.helpers.optim_sharding import Case, step_sharded, step_whole

# Another rank may multiply a matrix in another order; five iterations multiply what that rounds.
BOUND = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_diagonal_matrix_goes_through_the_polynomial(method: str) -> None:
    # |diag(3, 4)| = 5; x = 0.6 and 0.8 go five times through 3.4445 x - 4.7750 x^3 + 2.0315 x^5
    found = orthogonalize(torch.diag(torch.tensor([3.0, 4.0])), method)  # type: ignore[arg-type]
    expected = torch.diag(torch.tensor([0.72287617, 1.11920393]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16), (3, 12, 5)])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, ...], method: str) -> None:
    matrix = torch.randn(shape)
    found = orthogonalize(matrix, method)  # type: ignore[arg-type]
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = left.mT @ found @ right.mT
    diagonal = torch.diagonal(values, dim1=-2, dim2=-1)
    assert found.shape == matrix.shape
    assert diagonal.max().item() < 1.3
    assert diagonal.median().item() > 0.68
    torch.testing.assert_close(values, torch.diag_embed(diagonal), rtol=0, atol=1e-3)


def test_gram_is_the_standard_iteration_done_with_smaller_products() -> None:
    matrix = torch.randn(12, 40)
    torch.testing.assert_close(orthogonalize(matrix, "gram"), orthogonalize(matrix, "standard"), rtol=1e-3, atol=1e-4)


def test_zero_stays_zero() -> None:
    assert torch.equal(orthogonalize(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_two_steps_are_those_worked_out_by_hand() -> None:
    # One row has one singular value, so orthogonalize gives the unit vector times the polynomial's image of 1.
    image = orthogonalize(torch.tensor([[1.0]])).item()
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
    optimizer = Muon([weight], lr=0.1, momentum=0.5, weight_decay=0.2)
    weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer.step()  # direction (0.6, 0.8); w = 0.98 w - 0.1 * image * direction
    first = torch.tensor([[0.98 - 0.06 * image, 1.96 - 0.08 * image]])
    torch.testing.assert_close(weight.detach(), first)
    weight.grad = torch.tensor([[0.0, -8.0]])
    optimizer.step()
    # m = 0.5 * (1.5, 2) + 0.5 * (0, -8) = (0.75, -3); d = 0.5 m + 0.5 g = (0.375, -5.5)
    direction = torch.tensor([[0.375, -5.5]]) / (0.375**2 + 5.5**2) ** 0.5
    torch.testing.assert_close(weight.detach(), 0.98 * first - 0.1 * image * direction)


def test_a_tall_matrix_steps_further_by_the_root_of_its_aspect() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 1))
    weight.grad = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    Muon([weight], lr=0.1).step()
    image = orthogonalize(torch.tensor([[1.0]])).item()
    torch.testing.assert_close(weight.detach(), torch.tensor([[-0.2 * image], [0.0], [0.0], [0.0]]))


def test_other_groups_get_adamw() -> None:
    mine, theirs = torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.zeros(5))
    theirs.data.copy_(mine.data)
    muon = Muon([{"params": [mine], "use_muon": False}], lr=0.01, weight_decay=0.1)
    adamw = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    for _ in range(4):
        mine.grad = torch.randn(5)
        theirs.grad = mine.grad.clone()
        muon.step()
        adamw.step()
    torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)


def test_a_vector_in_a_muon_group_is_refused() -> None:
    with pytest.raises(OptimizerError, match="1 parameters of fewer than two dims"):
        Muon([torch.nn.Parameter(torch.zeros(4, 4)), torch.nn.Parameter(torch.zeros(4))])


def test_costly_matrices_are_shared_out_first_to_the_rank_with_least_to_do() -> None:
    shapes = [torch.Size(s) for s in [(8, 8), (16, 16), (8, 8), (8, 8)]]
    holders = [[(0, 0, 64)], [(0, 0, 100), (1, 100, 256)], [(1, 0, 64)], [(1, 0, 64)]]
    first, second = (share_out(holders, shapes, (0, 0), rank) for rank in (0, 1))
    assert first.owners == second.owners == (1, 0, 1, 1)
    assert first.sent == ((1, 0, 0, 100), (0, 0, 0, 64))  # to rank 0, to rank 1
    assert second.sent == ((1, 1, 100, 256), (2, 1, 0, 64), (3, 1, 0, 64))
    assert (first.sent_splits, second.sent_splits) == ((100, 64), (156, 128))
    assert (first.own, first.received) == ((1,), ((1, 0, 0, 100), (1, 1, 100, 256)))
    assert (second.own, second.received) == ((0, 2, 3), ((0, 0, 0, 64), (2, 1, 0, 64), (3, 1, 0, 64)))
    assert (first.received_splits, second.received_splits) == ((100, 156), (64, 128))
    small, large = num_operations(8, 8), num_operations(16, 16)
    assert first.loads == second.loads == (large, 3 * small)
    # the next call begins with the rank that has had less to do
    assert share_out(holders[:1], shapes[:1], first.loads, 0).owners == (1,)


UNIT = Case(
    groups=[[(24, 10), (10, 30), (6, 6), (2, 5, 3)], [(10,), (31,), ()]],
    settings=[{"use_muon": True, "lr": 0.05}, {"use_muon": False, "lr": 0.01}],
    untouched=((), (1, 5), (0, 1, 2, 3)),
    num_steps=4,
)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("knows_layout", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_shards_agree_with_whole_parameters(size: int, knows_layout: bool, method: str) -> None:
    def make(groups: list[dict[str, object]]) -> Muon:
        return Muon(groups, weight_decay=0.1, ns_method=method)  # type: ignore[arg-type]

    whole = step_whole(UNIT, make)
    shards = step_sharded(UNIT, make, size, knows_layout=knows_layout)
    for expected, found in zip(whole, shards, strict=True):
        torch.testing.assert_close(expected, found, **BOUND)


matrices = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5)


@settings(max_examples=25)
@given(shapes=matrices, size=st.integers(2, 5))
def test_any_matrices_agree_on_any_number_of_ranks(shapes: list[tuple[int, int]], size: int) -> None:
    case = Case(groups=[shapes], settings=[{}], num_steps=2)
    whole = step_whole(case, Muon)
    shards = step_sharded(case, Muon, size, knows_layout=True)
    for expected, found in zip(whole, shards, strict=True):
        torch.testing.assert_close(expected, found, rtol=1e-4, atol=1e-5)


def half(param: torch.nn.Parameter, optimizer: Muon, rank: int) -> OwnedRange:
    """Of an 8 x 8 matrix that two ranks hold."""
    part = ParameterPart(0, torch.Size((8, 8)), 0, 32, 32 * rank)
    return OwnedRange(param, optimizer.param_groups[0], (part,), (part.shape,), ("w",), (0,), 32)


def test_a_call_sends_each_matrix_to_its_owner_and_the_results_back() -> None:
    def on_rank() -> list[tuple[str, str, int]]:
        world = current_world()
        comm = world.communicator("dp_shard", Mesh.of(2))
        param = torch.nn.Parameter(torch.ones(32))
        param.grad = torch.ones(32)
        optimizer = Muon([torch.nn.Parameter(torch.zeros(8, 8))])
        with world.recorder.recording() as entries:
            steps = optimizer.step_ranges([half(param, optimizer, comm.rank)], comm)
            for _ in range(2):
                next(steps)
                assert (param == 1).all()  # written when the results are there
            assert next(steps, "end") == "end"
        assert (param < 1).all()
        return [(entry.op, entry.label, entry.nbytes) for entry in entries]

    there, back = (("all_to_all", f"muon.{what}", 4 * 32) for what in ("updates", "results"))
    nothing_there, nothing_back = ((op, label, 0) for op, label, _ in (there, back))
    assert run_ranks(2, on_rank) == [[there, nothing_back], [nothing_there, back]]
