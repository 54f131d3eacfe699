"""Attention over ranks that hold parts of a sequence: the numbers of one rank, the collectives, and the memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.mesh import Mesh
from shoal.parallel.sequence.attention import attention
from shoal.parallel.sequence.context import SequenceContext, sequence_parallel
from shoal.parallel.sequence.documents import Documents
from tests.ranks.test_comm_processes import own_world

E = 8
HEADS = [(8, 8), (7, 7), (6, 3), (4, 1)]  # of queries, and of keys and values


def context_of(kind: str, **options: Any) -> SequenceContext:
    """``ulysses``, ``ring``, or ``both`` on half the ranks each."""
    world = current_world()
    if kind == "both":
        mesh = Mesh(dp_shard=2, sp=world.size // 2)
        return SequenceContext(
            sp=world.communicator("sp", mesh), cp=world.communicator("dp_shard", mesh), **options
        )
    comm = world.communicator("dp", Mesh.of(world.size))
    return SequenceContext(**({"sp": comm} if kind == "ulysses" else {"cp": comm}), **options)


def tensors(heads: int, key_heads: int, length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(heads + length)
    return [
        torch.randn(2, some, length, E, generator=generator, dtype=dtype) for some in (heads, key_heads, key_heads, heads)
    ]


def allowed(documents: Documents | None, length: int, is_causal: bool) -> torch.Tensor:
    """[2, 1, L, L]: may a position attend to another?"""
    position = torch.arange(length)
    causal = position[:, None] >= position if is_causal else torch.ones(length, length, dtype=torch.bool)
    if documents is None:
        return causal.expand(2, 1, length, length)
    begins = [torch.tensor(row) for row in documents.begins * (2 // len(documents.begins))]
    ids = torch.stack([torch.searchsorted(row, position, right=True) for row in begins])
    return (causal & (ids[:, :, None] == ids[:, None, :])).unsqueeze(1)


def expected(whole: list[torch.Tensor], documents: Documents | None, is_causal: bool) -> list[torch.Tensor]:
    """The output and three gradients on one rank, in fp64."""
    query, key, value, gradient = (tensor.double() for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    mask = allowed(documents, query.shape[2], is_causal)
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def check(context: SequenceContext, heads: int, key_heads: int, length: int, **options: Any) -> None:
    whole = tensors(heads, key_heads, length)
    documents = options.get("documents")
    wanted = expected(whole, documents, options.get("is_causal", False))
    query, key, value, gradient = (context.shard(tensor, 2) for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    with sequence_parallel(context):
        out = attention(*leaves, **options)
    found = [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
    for name, mine, theirs in zip(("output", "query", "key", "value"), found, wanted, strict=True):
        assert mine.dtype == torch.float32
        error = (mine - context.shard(theirs, 2)).norm() / theirs.norm()
        assert error < 1e-6, f"{name}: {error}"


PACKED = {24: Documents.of_lengths([[5, 1, 11, 7], [12, 12]]), 21: Documents.of_lengths([[3, 18], [2, 2, 8, 9]])}


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_attention_over_ranks_has_the_output_and_gradients_of_one_rank(kind: str, size: int, exchange: str) -> None:
    if kind == "ulysses" and exchange == "all_gather":
        pytest.skip("Ulysses has one exchange")

    def run() -> None:
        for (heads, key_heads), is_causal, length in itertools.product(HEADS, (True, False), (24, 21)):
            context = context_of(kind, exchange=exchange, length=length)
            for documents in (None, PACKED[length]):
                check(context, heads, key_heads, length, is_causal=is_causal, documents=documents)

    run_ranks(size, run)
