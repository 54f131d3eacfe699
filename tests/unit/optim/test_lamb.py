"""LAMB: the update written out, and the same bits however many ranks share a parameter."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.fake import SingleCommunicator
from shoal.errors import OptimizerError
from shoal.optim.lamb import Lamb
from shoal.optim.tree_sum import PartialSums, node_keys, plan_sums
from shoal.optim.whole import OwnedRange, ParameterPart
from tests.helpers.optim_sharding import Case, step_sharded, step_whole

CPU = torch.device("cpu")


def test_first_step_is_the_one_worked_out_by_hand() -> None:
    # m = 0.1 g, v = 0.001 g^2, so u = 0.1 g / (sqrt(0.001) |g|) = sqrt(10) sign(g) and |u| = sqrt(20); |w| = 5.
    # r = 5 / sqrt(20); the step is lr sqrt(0.001) / 0.1 = lr / sqrt(10), so w moves by lr r = 0.01 * 1.1180340.
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([0.5, -2.0])
    Lamb([weight], lr=0.01, eps=0.0).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([2.98881966, 4.01118034]), rtol=0, atol=1e-6)


def test_without_bias_correction_the_step_is_the_rate_itself() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([0.5, -2.0])
    Lamb([weight], lr=0.01, eps=0.0, bias_correction=False).step()
    # 0.01 * 1.1180340 * sqrt(10)
    torch.testing.assert_close(weight.detach(), torch.tensor([2.96464466, 4.03535534]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("weight", "ratio"), [(100.0, 10.0), (1e-4, 0.01), (0.0, 1.0)])
def test_trust_ratio_is_clamped_and_one_for_zero_weights(weight: float, ratio: float) -> None:
    param = torch.nn.Parameter(torch.tensor([weight]))
    param.grad = torch.tensor([1.0])
    Lamb([param], lr=1e-3, eps=0.0).step()  # u = sqrt(10), the step lr / sqrt(10), so w moves by lr * ratio
    torch.testing.assert_close(param.detach(), torch.tensor([weight - 1e-3 * ratio]), rtol=1e-6, atol=1e-9)


def test_weight_decay_is_part_of_the_direction() -> None:
    param = torch.nn.Parameter(torch.tensor([2.0]))
    param.grad = torch.tensor([0.0])
    Lamb([param], lr=0.1, weight_decay=0.5, bias_correction=False).step()
    # u = 0.5 * 2 = 1, ratio 2 / 1, w = 2 - 0.1 * 2 * 1
    torch.testing.assert_close(param.detach(), torch.tensor([1.8]))


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    moved, kept = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    moved.grad = torch.ones(3)
    optimizer = Lamb([moved, kept], weight_decay=0.1)
    optimizer.step()
    assert torch.equal(kept.detach(), torch.ones(3))
    assert kept not in optimizer.state


def test_a_transposed_parameter_steps_like_a_contiguous_one() -> None:
    start, grad = torch.arange(6.0).view(2, 3), torch.tensor([[1.0, -2, 3], [4, -5, 6]])
    plain = torch.nn.Parameter(start.clone())
    transposed = torch.nn.Parameter(start.t().contiguous().t())
    assert not transposed.is_contiguous()
    for param in (plain, transposed):
        param.grad = grad.clone()
        Lamb([param]).step()
    assert torch.equal(plain.detach(), transposed.detach())


def test_all_wrong_numbers_are_one_error() -> None:
    with pytest.raises(OptimizerError) as caught:
        Lamb([torch.nn.Parameter(torch.ones(1))], lr=-1.0, betas=(0.9, 1.5), min_coeff=3.0, max_coeff=2.0)
    assert "lr is -1.0" in str(caught.value)
    assert "betas are (0.9, 1.5)" in str(caught.value)
    assert "min_coeff is 3.0 and max_coeff 2.0" in str(caught.value)


UNIT = Case(
    groups=[[(17, 9), (9,), (40, 3), (0,), (1,)], [(), (5, 5)]],
    settings=[{"weight_decay": 0.1}, {"lr": 0.05}],
    untouched=((), (1, 2), (5,), ()),
    num_steps=4,
)


@pytest.mark.parametrize("knows_layout", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_shards_give_the_bits_of_whole_parameters(size: int, knows_layout: bool) -> None:
    whole = step_whole(UNIT, lambda groups: Lamb(groups, lr=0.02))
    shards = step_sharded(UNIT, lambda groups: Lamb(groups, lr=0.02), size, knows_layout=knows_layout)
    for expected, found in zip(whole, shards, strict=True):
        assert torch.equal(expected, found)


def test_a_parameter_of_many_chunks_gives_the_same_bits_on_three_ranks() -> None:
    case = Case(groups=[[(300, 400), (7,)]], settings=[{}], num_steps=2)
    whole = step_whole(case, Lamb)
    shards = step_sharded(case, Lamb, 3, knows_layout=True)
    assert torch.equal(whole[0], shards[0])
    assert torch.equal(whole[1], shards[1])


shapes = st.lists(st.lists(st.integers(0, 13), min_size=0, max_size=3).map(tuple), min_size=1, max_size=5)


@settings(max_examples=30)
@given(groups=st.lists(shapes, min_size=1, max_size=2), size=st.integers(2, 5), alignment=st.sampled_from([1, 4, 64]))
def test_any_unit_gives_the_same_bits_on_any_number_of_ranks(
    groups: list[list[tuple[int, ...]]], size: int, alignment: int
) -> None:
    case = Case(groups=groups, settings=[{"weight_decay": 0.1}] * len(groups), num_steps=2, alignment=alignment)
    whole = step_whole(case, Lamb)
    shards = step_sharded(case, Lamb, size, knows_layout=True)
    for expected, found in zip(whole, shards, strict=True):
        assert torch.equal(expected, found)


@settings(max_examples=60)
@given(
    numel=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
    levels=st.integers(1, 4),
    most=st.integers(1, 3000),
)
def test_the_tree_sum_does_not_depend_on_the_ranks_ranges(numel: int, cuts: list[int], levels: int, most: int) -> None:
    values = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) * 10
    edges = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    parts = [(low, high) if low < high else (0, 0) for low, high in pairwise(edges)]

    def sums_of(part: tuple[int, int], levels: int, most: int) -> torch.Tensor:
        sums = PartialSums([(*part, numel)], [0], most, CPU, levels=levels, width=plan.width)
        found = []
        for batch in sums.batches:
            memory = batch.layers.empty(1, CPU)
            for (_, begin, end), place in zip(batch.pieces, batch.places, strict=True):
                memory[0, place : place + end - begin] = values[begin:end]
            found.append(batch.sums_of(memory))
        return sums.finish(found, 1)

    plan = plan_sums([[part] for part in parts], [numel], CPU)
    vectors = torch.stack([sums_of(part, levels, most) for part in parts])
    whole = values
    while len(whole) > 1:
        whole = torch.cat([whole, whole.new_zeros(len(whole) % 2)])
        whole = whole[0::2] + whole[1::2]
    assert torch.equal(plan.finish(vectors)[0], whole)
    torch.testing.assert_close(whole[0], values.double().sum().float(), rtol=1e-5, atol=0)


def test_parts_that_do_not_join_up_are_refused() -> None:
    with pytest.raises(ValueError, match="no rank owns elements"):
        plan_sums([[(0, 3)], [(4, 8)]], [8], torch.device("cpu"))


def test_nodes_of_a_part_are_its_largest_subtrees() -> None:
    assert node_keys(0, 8, 8) == [(3, 0)]
    assert node_keys(1, 7, 8) == [(0, 1), (0, 6), (1, 1), (1, 2)]
    assert node_keys(4, 6, 6) == [(2, 1)]  # beyond the end there is nothing, so this is the right half


def test_a_part_of_a_parameter_on_a_single_rank_is_refused() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    optimizer = Lamb([torch.nn.Parameter(torch.ones(2, 4))])
    shape = torch.Size((2, 4))
    piece = OwnedRange(param, optimizer.param_groups[0], (ParameterPart(0, shape, 0, 4, 0),), (shape,), ("w",))
    with pytest.raises(OptimizerError, match=r"parameter 'w' has 8 elements, but one rank.* owns 4"):
        next(optimizer.step_ranges([piece], SingleCommunicator("dp_shard")))
