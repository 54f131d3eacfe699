"""Collectives under autograd: forward and backward against one process with every rank's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.comm import autograd
from shoal.comm.protocol import Communicator
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.mesh import Mesh
from tests.helpers.comm_cases import current_dp
from tests.ranks.comm.test_processes import own_world

Gloo = Callable[..., list[Any]]
Together = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def inputs(size: int, shape: tuple[int, ...], same: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(size)]
    return [(tensors[0] if same else tensor).clone().requires_grad_() for tensor in tensors]


def check(
    comm: Communicator,
    function: Callable[[torch.Tensor], torch.Tensor],
    together: Together,
    shape: tuple[int, ...],
    *,
    same_input: bool = False,
    same_use: bool = False,
) -> None:
    """Compare with ``together``, which maps all ranks' inputs to all ranks' outputs in one process.

    Args:
        same_input: every rank has the same input, as one tensor; its gradient is the whole one.
        same_use: every rank computes the same from the output, which counts once.
    """
    size, rank = comm.size, comm.rank
    reference = inputs(size, shape, same_input)
    if same_input:
        reference = [reference[0]] * size
    outputs = together(reference)
    generator = torch.Generator().manual_seed(6)
    weights = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    if same_use:
        outputs, used = outputs[:1], weights[:1]
    else:
        used = weights
    loss = sum((output * weight).sum() for output, weight in zip(outputs, used, strict=True))
    assert isinstance(loss, torch.Tensor)
    expected = torch.autograd.grad(loss, reference[0] if same_input else reference[rank])[0]

    mine = inputs(size, shape, same_input)[rank]
    output = function(mine)
    assert torch.allclose(output, together(reference)[rank])
    output_data = output.detach()
    (output * used[0 if same_use else rank]).sum().backward()
    output_data.zero_()  # results are the caller's
    mine.data.zero_()
    assert mine.grad is not None
    assert torch.allclose(mine.grad, expected)


def check_pairs(comm: Communicator) -> None:
    for dim in (0, 1, -1):
        check_pairs_along(comm, dim)
        for concat_dim in (0, 1, 2):
            check_all_to_all(comm, dim, concat_dim)
    together: Together = lambda xs: [torch.stack(xs).sum(0)] * len(xs)  # noqa: E731
    check(comm, lambda x: autograd.all_reduce(x, comm, label="all_reduce"), together, (3, 5), same_use=True)
    check(comm, lambda x: autograd.copy(x, comm, label="copy"), lambda xs: xs, (3, 5), same_input=True)
    comm.drain()


def check_pairs_along(comm: Communicator, dim: int) -> None:
    size, shape = comm.size, (2 * comm.size, 3 * comm.size, comm.size)

    def concatenated(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(xs, dim)] * size

    check(comm, lambda x: autograd.all_gather(x, comm, dim=dim, label="all_gather"), concatenated, (2, 3, 5))
    check(comm, lambda x: autograd.gather(x, comm, dim=dim, label="gather"), concatenated, (2, 3, 5), same_use=True)
    check(
        comm,
        lambda x: autograd.reduce_scatter(x, comm, dim=dim, label="reduce_scatter"),
        lambda xs: list(torch.stack(xs).sum(0).chunk(size, dim)),
        shape,
    )
    check(
        comm,
        lambda x: autograd.split(x, comm, dim=dim, label="split"),
        lambda xs: list(xs[0].chunk(size, dim)),
        shape,
        same_input=True,
    )


def check_all_to_all(comm: Communicator, split_dim: int, concat_dim: int) -> None:
    size = comm.size

    def together(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat([x.chunk(size, split_dim)[rank] for x in xs], concat_dim) for rank in range(size)]

    def function(x: torch.Tensor) -> torch.Tensor:
        return autograd.all_to_all(x, comm, split_dim=split_dim, concat_dim=concat_dim, label="all_to_all")

    check(comm, function, together, (2 * size, 3 * size, size))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_pair_has_the_gradient_of_one_process_with_all_ranks_data(size: int) -> None:
    run_ranks(size, lambda: check_pairs(current_dp()))


def pairs_among_processes(rank: int, size: int, shared_memory: bool) -> None:
    world = own_world(rank, size, "pairs", shared_memory)
    check_pairs(world.communicator("dp", Mesh.of(size)))
    world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_every_pair_works_among_processes(gloo: Gloo, shared_memory: bool) -> None:
    gloo(2, pairs_among_processes, shared_memory)


def test_a_column_and_a_row_parallel_layer_make_a_whole_one() -> None:
    """Megatron's block: copy, column-parallel, row-parallel, all_reduce; the same over a split sequence."""

    def run() -> None:
        comm = current_dp()
        torch_inputs = torch.Generator().manual_seed(1)
        first, second = (torch.randn(shape, generator=torch_inputs) for shape in ((8, 4), (4, 8)))
        x = torch.randn(6, 4, generator=torch_inputs)
        whole = [tensor.clone().requires_grad_() for tensor in (x, first, second)]
        loss = (torch.relu(whole[0] @ whole[1].T) @ whole[2].T).square().sum()
        loss.backward()
        own = slice(4 * comm.rank, 4 * comm.rank + 4)
        for is_sequence in (False, True):
            rows = slice(3 * comm.rank, 3 * comm.rank + 3) if is_sequence else slice(None)
            mine = [tensor.clone().requires_grad_() for tensor in (x[rows], first[own], second[:, own])]
            enter = autograd.all_gather if is_sequence else autograd.copy
            leave = autograd.reduce_scatter if is_sequence else autograd.all_reduce
            hidden = torch.relu(enter(mine[0], comm, label="in") @ mine[1].T)
            out = leave(hidden @ mine[2].T, comm, label="out")
            out.square().sum().backward()
            for got, tensor, index in zip(mine, whole, (rows, own, (slice(None), own)), strict=True):
                assert got.grad is not None
                assert tensor.grad is not None
                assert torch.allclose(got.grad, tensor.grad[index], rtol=1e-4)

    run_ranks(2, run)


def test_backward_collectives_are_recorded_under_their_forwards_label() -> None:
    def run() -> list[tuple[str, str]]:
        comm = current_dp()
        with current_world().recorder.recording() as entries:
            autograd.all_gather(torch.ones(2, requires_grad=True), comm, label="x").sum().backward()
        return [(entry.op, entry.label) for entry in entries]

    assert run_ranks(2, run)[0] == [("all_gather", "x"), ("reduce_scatter", "x backward")]


def test_a_dim_that_does_not_divide_is_refused() -> None:
    def run() -> None:
        with pytest.raises(UsageError, match=r"dim 1 of a tensor of shape \(2, 3\) does not divide by 2 ranks"):
            autograd.split(torch.ones(2, 3), current_dp(), dim=1, label="x")

    run_ranks(2, run)


@pytest.mark.parametrize("move", [autograd.gather, autograd.all_gather, autograd.reduce_scatter])
def test_the_result_of_one_rank_is_a_tensor_of_its_own(move: Callable[..., torch.Tensor]) -> None:
    def job() -> None:
        comm = current_world().communicator("dp", Mesh.of(1))
        source = torch.ones(2, 3, requires_grad=True)
        result = move(source.unsqueeze(0), comm, dim=0, label="x")
        result.add_(1)  # torch refuses it for a view that a function of autograd returned
        result.sum().backward()
        assert torch.equal(source, torch.ones(2, 3))
        assert torch.equal(source.grad, torch.ones(2, 3))

    run_ranks(1, job)
