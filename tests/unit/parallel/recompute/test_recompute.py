"""Recomputed segments give the bits that the plain ones give, random numbers included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from shoal.errors import UsageError
from shoal.parallel import recompute
from shoal.parallel.recompute import Recompute, RecomputeSettings, recompute_blocks, use_recompute
from tests.helpers.recompute_models import (
    PLACES,
    X_NBYTES,
    Block,
    Chain,
    Mpu,
    Trained,
    assert_same,
    inputs,
    recomputed,
    run,
    unconfigure,
)
from tests.helpers.slow_copies import SlowCopies


@pytest.mark.parametrize("name", PLACES)
def test_loss_and_gradients_have_the_bits_of_the_plain_model_dropout_included(name: str) -> None:
    model, (x, mask) = Chain(), inputs()
    plain = run(model, x, mask)
    assert x.grad is not None
    x_gradient, x.grad = x.grad, None
    with recomputed(model, PLACES[name]) as made:
        assert_same(run(model, x, mask), plain)
    assert torch.equal(x.grad, x_gradient)
    assert made.num_segments == 4
    assert made.saved_bytes == 0


@pytest.mark.parametrize("name", PLACES)
def test_under_autocast_the_recomputation_is_autocast_too(name: str) -> None:
    model, (x, mask) = Chain(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(3)
        loss = model(x, mask)
    loss.backward()
    plain = Trained(loss.detach(), [p.grad for p in model.parameters()])
    model.zero_grad()
    with recomputed(model, PLACES[name]):
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(3)
            loss = model(x, mask)
        loss.backward()
    assert_same(Trained(loss.detach(), [p.grad for p in model.parameters()]), plain)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


def takes_and_gives_anything(
    pair: Pair, nested: tuple[Any, ...], many: list[torch.Tensor], *, named: dict[str, torch.Tensor], text: str
) -> dict[str, Any]:
    assert type(pair) is Pair and pair.right is None
    assert type(nested) is tuple and nested[0] == "kept" and nested[2] is None
    total = pair.left * nested[1][0] + many[0] * named["w"]
    return {"sum": total.sin(), "parts": (total.cos(), [total * 2]), "text": text, "none": None}


@pytest.mark.parametrize("name", PLACES)
def test_arguments_and_outputs_are_passed_as_they_are(name: str) -> None:
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(4)]

    def call(function: Callable[..., Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        a, b, c, d = (leaf * 1.0 for leaf in leaves)
        given = function(Pair(a, None), ("kept", (b,), None), [c], named={"w": d}, text="hello")
        loss = given["sum"].sum() + given["parts"][0].sum() + given["parts"][1][0].sum()
        return given, list(torch.autograd.grad(loss, leaves))

    plain, plain_gradients = call(takes_and_gives_anything)
    made = Recompute(PLACES[name])
    given, gradients = call(lambda *args, **kwargs: made.checkpoint(takes_and_gives_anything, *args, **kwargs))
    assert list(given) == ["sum", "parts", "text", "none"]
    assert (given["text"], given["none"], type(given["parts"])) == ("hello", None, tuple)
    assert torch.equal(given["sum"], plain["sum"])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, plain_gradients, strict=True))


def test_a_list_that_the_function_fills_is_the_callers() -> None:
    seen: list[str] = []

    def function(x: torch.Tensor, log: list[str]) -> torch.Tensor:
        log.append("run")
        return x.sin().sin()

    x = torch.randn(3, requires_grad=True)
    out = Recompute().checkpoint(function, x, seen)
    assert seen == ["run"]
    out.sum().backward()
    assert seen == ["run", "run"]


def test_nested_segments_save_only_the_inputs_of_the_outermost() -> None:
    model, (x, _) = Chain(), inputs()
    plain = run(model, x)
    made = Recompute(RecomputeSettings(is_offloaded=True))
    blocks = recompute_blocks(model, Block, recompute=made)
    torch.manual_seed(3)
    model.zero_grad()
    with use_recompute(made):
        loss = recompute.checkpoint(model, x)
    assert made.saved_bytes == X_NBYTES
    assert made.num_segments == 1
    loss.backward()
    blocks.remove()
    assert_same(Trained(loss.detach(), [p.grad for p in model.parameters()]), plain)
    assert made.peak_saved_bytes == X_NBYTES


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_retained_graph_can_run_backward_again(is_slow: bool) -> None:
    model, (x, _) = Chain(), inputs()
    slow = SlowCopies()
    with recomputed(model, RecomputeSettings(is_offloaded=True), copies_of=lambda _: slow if is_slow else None):
        loss = model(x)
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["in place", "on the host", "timed"])  # with kept operations torch refuses it
def test_a_gradient_of_a_gradient_is_the_same(name: str) -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh()

    def penalty(f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), weight)[0]

    made = Recompute(PLACES[name])
    assert torch.equal(penalty(lambda x: made.checkpoint(function, x)), penalty(function))


def test_without_gradients_the_function_just_runs() -> None:
    made = Recompute(RecomputeSettings(is_offloaded=True, has_times=True))
    with torch.no_grad():
        out = made.checkpoint(lambda x: x * 2, torch.ones(3, requires_grad=True))
    assert out.tolist() == [2.0, 2.0, 2.0]
    assert (made.num_segments, made.saved_bytes, made.times.take()) == (0, 0, {})


@pytest.mark.parametrize("settings", [RecomputeSettings(), RecomputeSettings(is_offloaded=True)], ids=["plain", "host"])
def test_compiled_blocks_are_recomputed(settings: RecomputeSettings) -> None:
    model, (x, _) = Chain(2), inputs()
    plain = run(model, x)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    made = Recompute(settings)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = made.checkpoint(block, x, 0.5)
        return x.sum()

    model.forward = forward  # type: ignore[method-assign]
    assert_same(run(model, x), plain)
    assert made.peak_saved_bytes == 2 * X_NBYTES


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own, at a break
def test_a_compiler_takes_plain_segments_into_its_graph_and_leaves_others_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, (x, _) = Chain(2), inputs()
    plain = run(model, x)
    with recomputed(model, RecomputeSettings()):
        assert_same(run(torch.compile(model, backend="aot_eager", fullgraph=True), x), plain)
    torch._dynamo.reset()
    with recomputed(model, RecomputeSettings(is_offloaded=True)) as made:
        assert_same(run(torch.compile(model, backend="aot_eager"), x), plain)
    assert made.peak_saved_bytes == 2 * X_NBYTES
    told = [record.getMessage() for record in caplog.records if "runs uncompiled" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("segment blocks.0 is inside compiled code and runs uncompiled")


# --- random states ---


def test_named_random_states_are_restored_for_the_recomputation() -> None:
    made = Recompute()
    made.rng.add("model-parallel-rng", 7)

    def function(x: torch.Tensor) -> torch.Tensor:
        with made.rng.fork():
            return torch.nn.functional.dropout(x.sin(), 0.5)

    x = torch.ones(64, requires_grad=True)
    (kept,) = torch.autograd.grad(made.checkpoint(function, x).sum(), x)
    made.rng.reset()
    made.rng.add("model-parallel-rng", 7)
    (plain,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(kept, plain)
    assert 0 < int((kept == 0).sum()) < 64


def test_a_fork_draws_from_its_own_state_and_leaves_the_generator_alone() -> None:
    recompute.model_parallel_cuda_manual_seed(11)
    tracker = recompute.get_cuda_rng_tracker()
    try:
        with tracker.fork():
            forked = torch.rand(3)
        plain = torch.rand(3)
        assert torch.equal(plain, torch.rand(3, generator=torch.Generator().manual_seed(11)))
        assert torch.equal(forked, torch.rand(3, generator=torch.Generator().manual_seed(11 + 2718)))
        with tracker.fork():
            assert not torch.equal(torch.rand(3), forked)
        with pytest.raises(UsageError, match=r"did you mean 'model-parallel-rng'"), tracker.fork("model-paralel-rng"):
            pass
        with pytest.raises(UsageError, match="tracked already"):
            tracker.add("other", 11 + 2718)
    finally:
        unconfigure()


def test_model_parallel_ranks_get_different_states() -> None:
    try:
        recompute.model_parallel_cuda_manual_seed(11, Mpu(4, 3))
        with recompute.get_cuda_rng_tracker().fork():
            assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(11 + 2718 + 3)))
    finally:
        unconfigure()
