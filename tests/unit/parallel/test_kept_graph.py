"""Attention as one operator of a compiled graph: its gradients, and how long it keeps what backward needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.parallel import kept_graph
from shoal.parallel.sequence import context as contexts
from shoal.parallel.sequence.huggingface import _in_graph
from tests.helpers.compiling import compiling, overwriting


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return shoal.attention(query, key, value, is_causal=True) * 2


def heads() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 4, 3, 8, generator=generator).transpose(1, 2).requires_grad_() for _ in range(3)]


def num_kept() -> int:
    gc.collect()
    return len(kept_graph._by_number)


@pytest.fixture(autouse=True)
def spread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where a context was set: compiled code cannot know that it is not spread over ranks."""
    monkeypatch.setattr(contexts._Known, "has_been_set", True)
    with compiling():
        yield


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_gradients_and_strides_are_those_of_uncompiled_attention(is_recomputed: bool) -> None:
    mine, theirs = heads(), heads()
    function = torch.compile(attend, backend=overwriting, fullgraph=True)
    out = checkpoint(function, *mine, use_reentrant=False) if is_recomputed else function(*mine)
    expected = attend(*theirs)
    assert torch.equal(out, expected)
    assert out.stride() == expected.stride()
    out.sum().backward()
    expected.sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    del out
    assert num_kept() == 0


def test_a_graph_is_kept_for_a_second_backward_and_no_longer_than_the_output() -> None:
    before, tensors = num_kept(), heads()
    function = torch.compile(attend, backend=overwriting, fullgraph=True)
    out = function(*tensors)
    assert num_kept() == before + 1
    out.sum().backward(retain_graph=True)
    first = tensors[0].grad
    assert first is not None
    first = first.clone()
    out.sum().backward()
    assert torch.equal(tensors[0].grad, 2 * first)
    out = function(*tensors)  # of which no backward comes
    del out
    assert num_kept() == before
    with torch.no_grad():
        function(*tensors)
    assert num_kept() == before


def test_two_equal_calls_have_a_graph_each() -> None:
    mine, theirs = heads(), heads()

    def twice(*tensors: Tensor) -> Tensor:
        return attend(*tensors).sin() + attend(*tensors).cos()

    function = torch.compile(twice, backend=overwriting, fullgraph=True)
    ours, expected = (torch.autograd.grad(each(*to).sum(), to) for each, to in ((function, mine), (twice, theirs)))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_under_autocast_the_operator_of_transformers_computes_in_its_dtype() -> None:
    query, key, value = heads()  # rotary embeddings may have made queries and keys fp32 again, of values 16 bits

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _in_graph(query, key, value.bfloat16(), None, True, {})[0] * 2

    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(function, backend=overwriting, fullgraph=True)(query, key, value)
        expected = attend(query, key, value).transpose(1, 2)
    assert torch.equal(out, expected)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert query.grad is not None and query.grad.dtype == torch.float32


def test_a_recomputation_in_compiled_code_draws_the_same_dropout() -> None:
    query, key, value = heads()

    def attend_with_dropout(*tensors: Tensor) -> Tensor:
        return shoal.attention(*tensors, dropout_p=0.5) * 2

    @torch.compile(backend=overwriting)
    def recomputed(*tensors: Tensor) -> Tensor:
        out: Tensor = checkpoint(attend_with_dropout, *tensors, use_reentrant=False)
        return out

    out = recomputed(query, key, value)
    out.sum().backward()
    assert value.grad is not None
    torch.testing.assert_close((value.grad * value).sum(), out.sum())  # it is linear in the values
