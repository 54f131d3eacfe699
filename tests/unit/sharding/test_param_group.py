"""The parameters of a group are views of its buffer while it is gathered, and placeholders while it is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.storage import DeviceStorage, placeholder
from tests.helpers.param_groups import gathered_group


def on_two_ranks(job: Callable[[ParameterGroup, list[nn.Parameter]], Any]) -> list[Any]:
    """Run ``job`` on a sharded buffer of a 3 x 5 matrix of ones and a vector of twos, gathered, with views attached."""

    def run() -> Any:
        world = current_world()
        parameters = [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.full((7,), 2.0))]
        return job(gathered_group(parameters, world.communicator("dp", Mesh.of(2)), DeviceStorage), parameters)

    return run_ranks(2, run)


def test_a_placeholder_has_shape_and_dtype_reads_as_nan_refuses_writes_and_stores_one_element() -> None:
    substitute = placeholder((3, 5), torch.bfloat16, torch.device("cpu"))
    assert (substitute.shape, substitute.dtype) == ((3, 5), torch.bfloat16)
    assert substitute.isnan().all()
    assert substitute.untyped_storage().nbytes() == 2
    with pytest.raises(RuntimeError, match="single memory location"):
        substitute.add_(1)
    assert placeholder((2,), torch.int64, torch.device("cpu")).tolist() == [0, 0]


def test_releasing_and_gathering_keeps_the_parameter_objects_and_their_values() -> None:
    def job(group: ParameterGroup, parameters: list[nn.Parameter]) -> list[Any]:
        def nbytes() -> int:
            return group.buffer.full.untyped_storage().nbytes()

        seen: list[Any] = [group.buffer.nbytes_stored]
        group.release()
        seen.append(
            (
                not group.buffer.placement.is_sharded,
                group.buffer.full.untyped_storage().nbytes(),
                bool(parameters[0].isnan().all()),
            )
        )
        group.gather().wait()
        group.attach_views()
        seen.append((not group.buffer.placement.is_sharded, nbytes()))
        seen.append([parameters[0].sum().item(), parameters[1].sum().item()])
        return seen

    assert on_two_ranks(job) == [[256, (False, 0, True), (True, 512), [15.0, 14.0]]] * 2


def test_a_view_that_autograd_saved_is_valid_again_after_the_next_gather() -> None:
    def job(group: ParameterGroup, parameters: list[nn.Parameter]) -> list[float]:
        x = torch.ones(2, 5, requires_grad=True)
        y = (x @ parameters[0].t()).square().sum()
        group.release()
        group.gather().wait()
        group.attach_views()
        y.backward()
        assert x.grad is not None
        assert parameters[0].grad is not None
        return [x.grad.sum().item(), parameters[0].grad.sum().item()]

    # y = sum of 6 squares of 5: dx = 2 x 5 x 3 for 10 elements, dw = 2 x 5 x 2 for 15.
    assert on_two_ranks(job) == [[300.0, 300.0]] * 2


def test_each_rank_keeps_its_range_and_what_is_written_back_into_it() -> None:
    def job(group: ParameterGroup, parameters: list[nn.Parameter]) -> list[float]:
        with torch.no_grad():
            parameters[0].fill_(3.0)
            parameters[1].fill_(4.0)
        group.buffer.write_back()
        shard_sum = group.buffer.shard.sum().item()
        group.release()
        group.gather().wait()
        group.attach_views()
        return [shard_sum, parameters[0].sum().item(), parameters[1].sum().item()]

    assert on_two_ranks(job) == [[45.0, 45.0, 28.0], [28.0, 45.0, 28.0]]


def test_gaps_and_padding_are_zero() -> None:
    def job(group: ParameterGroup, parameters: list[nn.Parameter]) -> list[float]:
        return [
            group.buffer.full[15:64].abs().sum().item(),
            group.buffer.full[71:].abs().sum().item(),
            group.buffer.full.sum().item(),
        ]

    assert on_two_ranks(job) == [[0.0, 0.0, 29.0]] * 2


def test_after_detach_the_parameters_have_memory_of_their_own() -> None:
    def job(group: ParameterGroup, parameters: list[nn.Parameter]) -> list[float]:
        group.detach()
        return [parameters[0].untyped_storage().nbytes(), parameters[0].sum().item()]

    assert on_two_ranks(job) == [[60, 15.0]] * 2
