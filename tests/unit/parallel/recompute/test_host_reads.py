"""What the host reads in a recomputed function is read once, whatever recomputes it and what its policy saves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shoal.parallel import host_reads, kept_graph
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.held import ExpertsHeld
from shoal.parallel.host_reads import read_once
from shoal.parallel.segment import Recompute, RecomputeSettings

Runs = Callable[..., torch.Tensor]

TORCHS = partial(checkpoint, use_reentrant=False)
REENTRANT = partial(checkpoint, use_reentrant=True)
SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.add.Tensor])
WAYS: dict[str, Runs] = {
    "torch's": TORCHS,
    "torch's selective": partial(TORCHS, context_fn=SELECTIVE),
    "reentrant": REENTRANT,
    "block": Recompute().checkpoint,
    "operations": Recompute(RecomputeSettings(operations=("aten::add", "aten::ones"))).checkpoint,
    "timed": Recompute(RecomputeSettings(has_times=True)).checkpoint,
    "host": Recompute(RecomputeSettings(is_offloaded=True)).checkpoint,
}


class Reader:
    """Multiplies by what it reads, another number each time."""

    def __init__(self) -> None:
        self.num_reads = 0

    def read(self) -> float:
        self.num_reads += 1
        return (torch.ones(1) + (self.num_reads - 1)).item()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + 1) * read_once(self.read)).sin() + ((x + 2) * read_once(self.read)).sin()

    @staticmethod
    def gradient(x: torch.Tensor, first: int) -> torch.Tensor:
        """Of a call that begins with that number."""
        return (first * (first * (x + 1)).cos() + (first + 1) * ((first + 1) * (x + 2)).cos()).detach()


def test_outside_of_a_recomputed_function_each_call_reads() -> None:
    reader = Reader()
    reader(torch.ones(1))
    with torch.no_grad():
        reader(torch.ones(1))
    assert reader.num_reads == 4


@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_has_the_values_of_its_own_forward(way: str) -> None:
    reader, x, y = Reader(), torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    of_x, of_y = WAYS[way](reader, x).sum(), WAYS[way](reader, y).sum()
    of_y.backward()
    of_x.backward()
    assert reader.num_reads == 4
    torch.testing.assert_close(x.grad, Reader.gradient(x, 1))
    torch.testing.assert_close(y.grad, Reader.gradient(y, 3))


@pytest.mark.parametrize("way", ["torch's", "reentrant", "block"])
def test_each_backward_pass_through_a_function_has_the_values_of_its_forward(way: str) -> None:
    reader, x = Reader(), torch.rand(3, requires_grad=True)
    result = WAYS[way](reader, x).sum()
    result.backward(retain_graph=True)
    result.backward()
    assert reader.num_reads == 2
    torch.testing.assert_close(x.grad, 2 * Reader.gradient(x, 1))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("outer", ["torch's", "reentrant", "block"])
@pytest.mark.parametrize("inner", ["torch's", "reentrant", "block"])
def test_functions_inside_of_each_other_read_once(outer: str, inner: str) -> None:
    reader, x = Reader(), torch.rand(3, requires_grad=True)

    def both(x: torch.Tensor) -> torch.Tensor:
        return read_once(reader.read) * WAYS[inner](reader, x + 1)

    WAYS[outer](both, x).sum().backward()
    assert reader.num_reads == 3
    torch.testing.assert_close(x.grad, Reader.gradient(x + 1, 2))


def test_what_was_read_lives_as_long_as_the_graph() -> None:
    gc.collect()
    before = len(host_reads._of_call), len(host_reads._left), len(kept_graph._by_number)
    for way in WAYS.values():
        result = way(Reader(), torch.rand(3, requires_grad=True)).sum()
        result.backward()
    del result
    gc.collect()
    assert (len(host_reads._of_call), len(host_reads._left), len(kept_graph._by_number)) == before


def test_experts_that_get_other_tokens_in_recomputation_are_an_error() -> None:
    """As with random routing and ``preserve_rng_state=False``."""
    tokens = iter([[[0], [1]], [[0], [0]]])
    held = ExpertsHeld(2)

    def layer(x: torch.Tensor) -> torch.Tensor:
        index = torch.tensor(next(tokens))
        return run_experts(x, index, torch.ones(2, 1), lambda rows, counts: rows * sum(counts), held)

    result: Any = TORCHS(layer, torch.rand(2, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="recomputed experts got other tokens"):
        result.sum().backward()
