"""Products that gather and scatter by parts: the values of whole products, and the bytes of one collective.

Values are small integers, so that a sum has the same bits in any order.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from shoal.comm import nccl, parts
from shoal.comm.failure import FirstError
from shoal.comm.nccl import ComparedCommunicator, NcclCommunicator
from shoal.comm.parts import PartsCommunicator
from shoal.comm.protocol import Communicator, shapes_only
from shoal.comm.recorder import Recorder
from shoal.comm.threads import run_ranks
from shoal.mesh import Mesh
from shoal.parallel.tensor.overlap import column_linears, row_linear
from tests.helpers.tensor_cases import tp_communicator
from tests.ranks.comm.test_processes import Gloo, own_world

LENGTH, WIDTH, SPLIT = 3, 5, (2, 4)  # of a rank's part of the sequence; of activations; of a rank's columns
CPU = torch.device("cpu")


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def check_layers(comm: PartsCommunicator, num_rows: tuple[int, ...]) -> Counter[tuple[str, str]]:
    """Columns and a row, forward and backward. Returns: bytes by verb and label."""
    size, rank = comm.size, comm.rank
    length = LENGTH * size

    def own(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(size, -2)[rank].clone().requires_grad_()

    x, of_sum = (integers(*num_rows, length, WIDTH, seed=seed) for seed in (1, 2))
    weights = [[integers(m, WIDTH, seed=10 * each + m) for m in SPLIT] for each in range(size)]
    gradients = [[integers(*num_rows, length, m, seed=10 * each + m + 1) for m in SPLIT] for each in range(size)]
    inputs = [integers(*num_rows, length, SPLIT[0], seed=10 * each + 7) for each in range(size)]
    last = [integers(WIDTH, SPLIT[0], seed=10 * each + 8) for each in range(size)]

    def of_weight(gradient: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        return gradient.flatten(0, -2).t() @ read.flatten(0, -2)

    with comm.recorder.recording() as entries:
        part = own(x)
        mine = [weight.clone().requires_grad_() for weight in weights[rank]]
        whole, outputs = column_linears(part, mine, comm, splits_sequence=True, label="in")
        assert torch.equal(whole, x)
        for output, weight in zip(outputs, weights[rank], strict=True):
            assert output.is_contiguous() and torch.equal(output, x @ weight.t())
        torch.autograd.backward(outputs, gradients[rank])
        pairs = [zip(*each, strict=True) for each in zip(gradients, weights, strict=True)]
        assert torch.equal(part.grad, own(sum(g @ w for each in pairs for g, w in each)))  # type: ignore[arg-type]
        for weight, gradient in zip(mine, gradients[rank], strict=True):
            assert torch.equal(weight.grad, of_weight(gradient, x))  # type: ignore[arg-type]

        read, weight = inputs[rank].clone().requires_grad_(), last[rank].clone().requires_grad_()
        output = row_linear(read, weight, comm, splits_sequence=True, label="out")
        assert torch.equal(output, own(sum(i @ w.t() for i, w in zip(inputs, last, strict=True))))  # type: ignore[arg-type]
        output.backward(own(of_sum))
        assert torch.equal(read.grad, of_sum @ last[rank])  # type: ignore[arg-type]
        assert torch.equal(weight.grad, of_weight(of_sum, inputs[rank]))  # type: ignore[arg-type]
    found = Counter[tuple[str, str]]()
    for entry in entries:
        found[entry.op, entry.label] += entry.nbytes
    return found


def expected(size: int, gather: str, scatter: str, num_rows: int) -> dict[tuple[str, str], int]:
    nbytes = (size - 1) * num_rows * LENGTH * WIDTH * 4
    by_verb = [(gather, "in"), (scatter, "in backward"), (scatter, "out"), (gather, "out backward")]
    by_verb.append(("all_gather", "in again backward"))  # of the weights' gradients
    return dict.fromkeys(by_verb, nbytes)


@pytest.mark.parametrize("num_rows", [(), (1,), (2,)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_in_batches_give_whole_products(size: int, num_rows: tuple[int, ...]) -> None:
    def rank() -> Counter[tuple[str, str]]:
        return check_layers(PartsCommunicator(tp_communicator(), CPU), num_rows)

    for found in run_ranks(size, rank):
        assert +found == +Counter(expected(size, "recv", "recv", sum(num_rows) or 1))


def test_a_stage_that_only_needs_shapes_communicates_nothing() -> None:
    def rank() -> None:
        comm = PartsCommunicator(tp_communicator(), CPU)
        with shapes_only(), comm.recorder.recording() as entries:
            out = row_linear(torch.ones(2, 4, 3), torch.ones(5, 3), comm, splits_sequence=True, label="out")
        assert out.shape == (2, 2, 5) and not list(entries)

    run_ranks(2, rank)


def over_torchs_operators(rank: int, size: int, is_compared: bool) -> list[Any]:
    """``shoal.comm.nccl`` over a Gloo group, and torch's operators as torch computes them without symmetric memory."""
    world = own_world(rank, size, f"symmetric/{is_compared}", False)
    group = dist.group.WORLD
    assert group is not None
    host: Any = world.communicator("tp", Mesh.of(size, tp=size)).backend
    failures: Any = None
    workspaces = []
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        library = stack.enter_context(torch.library._scoped_library("symm_mem", "IMPL"))
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
        for module in (nccl, parts):  # bytes are what ranks compare
            patch.setattr(module, "is_in_host_memory", lambda tensor: tensor.dtype == torch.uint8)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
        patch.setattr(symmetric_memory, "get_symm_mem_workspace", lambda *args, **keys: workspaces.append(args))
        comm = Communicator(NcclCommunicator("tp", group, host, failures, FirstError()), Recorder())
        comm = PartsCommunicator(ComparedCommunicator(comm) if is_compared else comm, torch.device("cuda", rank))
        found = [check_layers(comm, num_rows) for num_rows in ((), (2,))]
    assert workspaces == [(group.group_name,)]
    world.close()
    return [[[*key, nbytes] for key, nbytes in each.items()] for each in found]


@pytest.mark.parametrize("is_compared", [False, True])
def test_torchs_operators_give_the_same(gloo: Gloo, is_compared: bool) -> None:
    for found in gloo(2, over_torchs_operators, is_compared):
        for num_rows, each in zip((1, 2), found, strict=True):
            by_verb = {(verb, label): nbytes for verb, label, nbytes in each}
            assert by_verb == expected(2, "all_gather", "reduce_scatter", num_rows)
