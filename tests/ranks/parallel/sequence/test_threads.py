"""A process that trains in another thread than its main one, as under Ray Train; on GPUs backward has a third one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.parallel.sequence.attention import attention
from shoal.parallel.sequence.context import SequenceContext, set_sequence_context
from tests.helpers.backward_threads import run_in_threads


def gradient_of(context: SequenceContext) -> torch.Tensor:
    """Of a weight, through attention that is computed again in backward."""
    weight = torch.linspace(-1.0, 1.0, 64).view(8, 8).requires_grad_()
    hidden = context.shard(torch.linspace(-1.0, 2.0, 512).sin().view(1, 4, 16, 8), 2)

    def block(x: torch.Tensor) -> torch.Tensor:
        heads = x @ weight
        return attention(heads, heads, heads, is_causal=True)

    before = set_sequence_context(context)
    try:
        checkpoint(block, hidden, use_reentrant=False).square().sum().backward()  # type: ignore[union-attr]
    finally:
        set_sequence_context(before)
    assert weight.grad is not None
    return weight.grad


def train_in_threads(rank: int, size: int, kind: str) -> bool:
    context = SequenceContext(**{kind: current_world().communicator("dp", Mesh.of(size))})
    expected, found = gradient_of(context), []
    with pytest.MonkeyPatch.context() as patch:
        run_in_threads(patch)
        thread = threading.Thread(target=lambda: found.append(gradient_of(context)))
        thread.start()
        thread.join()
    return torch.equal(found[0], expected)


@pytest.mark.parametrize("kind", ["sp", "cp"])
def test_attention_that_is_recomputed_in_a_thread_of_autograds_is_spread_over_the_ranks(
    gloo: Callable[..., list[Any]], kind: str
) -> None:
    assert gloo(2, train_in_threads, kind) == [True, True]
