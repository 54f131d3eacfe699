"""A model split over thread ranks, compared with the same model whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.comm.recorder import Entry
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.parallel.tensor import TensorParallelModel, parallelize
from shoal.sharding.parts import cut

Outputs = dict[str, torch.Tensor]
Forward = Callable[[nn.Module], Outputs]


def tp_communicator() -> Communicator:
    world = current_world()
    return world.communicator("tp", Mesh.of(world.size, tp=world.size))


def randomize(model: nn.Module) -> nn.Module:
    """Larger weights, and biases and norms that are not constant: so that every mistake changes the loss."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data + 0.1 * noise if parameter.dim() == 1 else 0.15 * noise
    return model.train()


def compare(model: nn.Module, forward: Forward, size: int, **options: Any) -> list[list[Entry]]:
    """Compare outputs, loss and every gradient on ``size`` ranks with those of the whole model.

    Args:
        forward: outputs by name; that called "loss" is differentiated.
        options: of ``parallelize``.

    Returns: what each rank communicated.
    """
    copies = [copy.deepcopy(model) for _ in range(size)]
    expected = forward(model)
    expected["loss"].backward()

    def on_a_rank() -> list[Entry]:
        world, comm = current_world(), tp_communicator()
        mine = copies[comm.rank]
        split = parallelize(mine, comm, **options)
        with world.recorder.recording() as entries:
            outputs = forward(mine)
            outputs["loss"].backward()
        calls = list(entries)
        assert outputs.keys() == expected.keys()
        for name, output in outputs.items():
            assert difference(output, expected[name]) < 1e-5, name
        check_gradients(model, mine, split, comm)
        return calls

    results: list[list[Entry]] = run_ranks(size, on_a_rank)
    return results


def check_gradients(whole: nn.Module, mine: nn.Module, split: TensorParallelModel, comm: Communicator) -> None:
    expected = dict(whole.named_parameters())
    names = [name for name, _ in mine.named_parameters()]
    assert names == list(expected)
    # The gradient of a key's bias is zero but for rounding: softmax does not change when all scores do.
    floor = 0.03 * max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    for name, parameter in mine.named_parameters():
        want, gradient = expected[name].grad, parameter.grad
        if want is None:
            assert gradient is None, name
            continue
        gradient = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        if name in split.partial:
            comm.all_reduce(gradient.view(-1), label="partial").drain()
        if name in split.parts:
            want = cut(want, split.parts[name])
        assert gradient.shape == want.shape == parameter.shape, name
        assert difference(gradient, want, floor) < 1e-5, name


def difference(tensor: torch.Tensor, expected: torch.Tensor, floor: float = 1e-12) -> float:
    """The largest difference, relative to the largest expected value, or to ``floor`` where that is less."""
    return float((tensor - expected).detach().abs().max()) / max(float(expected.detach().abs().max()), floor)
