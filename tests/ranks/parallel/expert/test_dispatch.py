"""Tokens sent to their experts over ranks: outputs and gradients beside one tensor that holds all experts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shoal.comm.fake import FakeTransport
from shoal.comm.protocol import shapes_only
from shoal.comm.threads import run_ranks
from shoal.comm.world import World, current_world
from shoal.errors import UsageError
from shoal.mesh import Mesh
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.grouped import grouped_linear
from shoal.parallel.expert.held import ExpertsHeld, RouterCheck
from shoal.parallel.expert.route import RowCounts
from tests.helpers.expert_dispatch_cases import (
    NUM_EXPERTS,
    TOKENS,
    WIDTH,
    DispatchCase,
    K,
    Values,
    assert_close,
    experts_of_this_rank,
    train,
)

Gloo = Callable[..., list[Any]]


def moved(held: ExpertsHeld) -> None:
    """The experts placed anew, as after rebalancing, in no order."""
    order = [3, 6, 0, 5, 7, 1, 4, 2]
    held.place([order[first : first + held.num_local] for first in range(0, NUM_EXPERTS, held.num_local)])


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("overlap", [1, 2, 5])
@pytest.mark.parametrize("score_before", [False, True])
def test_outputs_and_all_gradients_are_those_of_one_rank_with_all_experts(
    ep: int, overlap: int, score_before: bool
) -> None:
    case = DispatchCase(score_before=score_before)
    found = case.found(ep, lambda *given: train(*given, overlap=overlap))
    assert_close(found, case.expected())


def routed_to(*experts: int, tokens: Sequence[int] = (TOKENS,) * 4) -> DispatchCase:
    return DispatchCase(tokens, len(experts), [torch.tensor(experts).expand(rows, -1) for rows in tokens])


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(routed_to(5, 2), id="all tokens to two experts"),
        pytest.param(routed_to(-1, 3), id="every first choice dropped"),
        pytest.param(routed_to(-1, -1), id="everything dropped"),
        pytest.param(routed_to(6, tokens=(0, 0, 1, 0)), id="one token in all"),
        pytest.param(routed_to(0, 7, tokens=(5, 0, 3, 0)), id="ranks without tokens"),
        pytest.param(DispatchCase(k=8), id="more choices than experts of a rank"),
    ],
)
def test_any_distribution_of_tokens_works(case: DispatchCase, ep: int) -> None:
    for overlap in (1, 2):
        found = case.found(ep, lambda *given, parts=overlap: train(*given, overlap=parts))
        assert_close(found, case.expected())


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_may_be_on_any_rank_in_any_order(ep: int) -> None:
    case = DispatchCase()
    assert_close(case.found(ep, train, place=moved), case.expected())


def test_two_all_to_alls_forward_and_two_backward_move_the_formulas_bytes() -> None:
    tokens, ep = 16, 4

    def traffic() -> tuple[list[tuple[str, str, int]], list[str]]:
        held, world = experts_of_this_rank(), current_world()
        # Each token goes to two experts, and as many rows to each expert.
        index = torch.arange(tokens * K).view(tokens, K) % NUM_EXPERTS
        hidden = torch.randn(tokens, WIDTH, requires_grad=True)
        with world.recorder.recording() as entries:
            output = run_experts(hidden, index, torch.ones(tokens, K), lambda rows, counts: rows * 2, held)
            output.sum().backward()
        return [(entry.op, entry.label, entry.nbytes) for entry in entries if entry.kind == "data"], [
            entry.op for entry in entries if entry.kind == "control"
        ]

    nbytes = tokens * K * WIDTH * 4 * (ep - 1) // ep
    for data, control in run_ranks(ep, traffic):
        assert data == [
            ("all_to_all", "experts dispatch", nbytes),
            ("all_to_all", "experts combine", nbytes),
            ("all_to_all", "experts combine backward", nbytes),
            ("all_to_all", "experts dispatch backward", nbytes),
        ]
        assert control.count("exchange") == 1


def test_one_rank_communicates_nothing_and_reads_no_counts_where_nothing_is_dropped() -> None:
    held = ExpertsHeld(NUM_EXPERTS)
    index = torch.randint(NUM_EXPERTS, (TOKENS, K))
    seen: list[Any] = []

    def compute(rows: Tensor, counts: Sequence[int]) -> Tensor:
        assert isinstance(counts, RowCounts)
        seen.append(counts._on_host)
        seen.append(counts.ends(rows.device).tolist())
        assert list(counts) == torch.bincount(index.flatten(), minlength=NUM_EXPERTS).tolist()
        return rows

    hidden = torch.randn(TOKENS, WIDTH)
    output = run_experts(hidden, index, torch.ones(TOKENS, K), compute, held, may_drop=False)
    assert torch.equal(output, 2 * hidden)
    assert seen == [None, torch.bincount(index.flatten(), minlength=NUM_EXPERTS).cumsum(0).tolist()]


def test_every_rank_issues_the_backward_collectives_also_where_hidden_needs_no_gradient() -> None:
    def run() -> None:
        held, is_frozen = experts_of_this_rank(), current_world().rank == 0
        hidden = torch.randn(TOKENS, WIDTH, requires_grad=not is_frozen)
        index, weights = torch.randint(NUM_EXPERTS, (TOKENS, K)), torch.rand(TOKENS, K)

        def compute(rows: Tensor, counts: Sequence[int]) -> Tensor:
            return torch.ones_like(rows) if is_frozen else 3 * rows  # ones do not depend on the rows

        run_experts(hidden, index, weights, compute, held).sum().backward()
        if is_frozen:
            assert hidden.grad is None
        else:
            expected = (3 * weights * (index >= NUM_EXPERTS // 2)).sum(1, keepdim=True).expand_as(hidden)
            assert hidden.grad is not None and torch.allclose(hidden.grad, expected)

    run_ranks(2, run)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_experts_give_the_same_gradients(use_reentrant: bool) -> None:
    case = DispatchCase()

    def wrap(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recomputed(*args: Tensor) -> Tensor:
            output: Tensor = checkpoint(run, *args, use_reentrant=use_reentrant, preserve_rng_state=False)
            return output

        return recomputed

    assert_close(case.found(2, lambda *given: train(*given, overlap=2, wrap=wrap)), case.expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_over_choices_are_rounded_once(dtype: torch.dtype) -> None:
    case = DispatchCase(dtype=dtype)
    alone, divided = (case.found(ep, train) for ep in (1, 2))
    for name, value in alone.items():
        assert value.dtype == dtype and torch.equal(value, divided[name]), name
    assert_close(alone, case.expected(), 1e-12 if dtype == torch.float64 else 3e-2)
    # The sum over the choices itself: one rounding of the sum in fp32.
    hidden, index, weights = torch.randn(50, WIDTH).to(dtype), torch.randint(4, (50, 3)), torch.rand(50, 3)
    output = run_experts(hidden, index, weights, lambda rows, counts: rows, ExpertsHeld(4))
    exact = sum(hidden.to(torch.promote_types(dtype, torch.float32)) * weights[:, at, None] for at in range(3))
    assert isinstance(exact, Tensor) and torch.equal(output, exact.to(dtype))


def test_under_autocast_the_result_has_the_dtype_of_hidden() -> None:
    case = DispatchCase()

    def run(case: DispatchCase, held: ExpertsHeld, *given: Any) -> Values:
        with torch.autocast("cpu", torch.bfloat16):
            return train(case, held, *given)

    assert_close(case.found(2, run), case.expected(), 3e-2)


def test_parts_are_sent_before_the_experts_run_on_earlier_ones() -> None:
    def order() -> list[str]:
        held, world = experts_of_this_rank(), current_world()
        events: list[str] = []
        hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)

        class Mark(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, rows: Tensor, name: str) -> Tensor:
                ctx.name = name
                note(name)
                return rows.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
                note(f"{ctx.name} backward")
                return gradient, None

        shared: list[Tensor] = []
        with world.recorder.recording() as entries:

            def note(name: str) -> None:
                events.extend(entry.label for entry in entries if entry.op == "all_to_all")
                entries.clear()
                events.append(name)

            output = run_experts(
                hidden,
                torch.randint(NUM_EXPERTS, (TOKENS, K)),
                torch.ones(TOKENS, K),
                lambda rows, counts: Mark.apply(rows, "compute"),
                held,
                overlap=2,
                meanwhile=lambda: shared.append(Mark.apply(hidden, "beside")),
            )
            (output + shared[0]).sum().backward()
            note("end")
        return [event.removeprefix("experts ") for event in events]

    for events in run_ranks(2, order):
        assert events == [
            *["dispatch", "dispatch", "beside", "compute", "combine", "compute", "combine"],
            *["combine backward", "combine backward", "compute backward", "dispatch backward"],
            *["compute backward", "dispatch backward", "beside backward", "end"],
        ]


def test_a_dry_run_sends_an_even_share_to_every_expert() -> None:
    world = World(1, 4, 1, torch.device("cpu"), "fake", FakeTransport(1))
    held = ExpertsHeld(NUM_EXPERTS, 4)
    held.set_ranks(world.communicator("dp", Mesh.of(4)))
    with FakeTensorMode(), world.recorder.recording() as entries:
        hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
        weight = torch.randn(held.num_local, WIDTH, WIDTH, requires_grad=True)
        index = torch.zeros(TOKENS, K, dtype=torch.int64)

        def compute(rows: Tensor, counts: Sequence[int]) -> Tensor:
            return grouped_linear(rows, weight, counts)

        output = run_experts(hidden, index, torch.ones(TOKENS, K), compute, held)
        output.sum().backward()
        assert output.shape == hidden.shape
        assert weight.grad is not None and weight.grad.shape == weight.shape
    nbytes = TOKENS * K * WIDTH * 4 * 3 // 4
    assert [entry.nbytes for entry in entries if entry.kind == "data"] == [nbytes] * 4
    world.close()


def test_tensors_without_data_find_the_shape_and_send_nothing() -> None:
    def run() -> None:
        held = experts_of_this_rank()
        with current_world().recorder.recording() as entries, shapes_only():
            index = torch.zeros(TOKENS, K, dtype=torch.int64, device="meta")
            weights, hidden = (torch.ones(TOKENS, width, device="meta") for width in (K, WIDTH))
            output = run_experts(hidden, index, weights, lambda rows, counts: rows[:, :4], held)
        assert output.is_meta and output.shape == (TOKENS, 4) and not entries

    run_ranks(2, run)


def test_recomputed_experts_keep_nothing_but_their_input() -> None:
    held, kept = ExpertsHeld(NUM_EXPERTS), []
    index, weights = torch.randint(NUM_EXPERTS, (TOKENS, K)), torch.rand(TOKENS, K)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def run(hidden: Tensor) -> Tensor:
        def compute(rows: Tensor, counts: Sequence[int]) -> Tensor:
            kept.append(weakref.ref(rows))
            return rows.exp()

        output = run_experts(hidden, index, weights, compute, held)
        function: Any = output.grad_fn
        assert not function.chunks[0].route.order.numel()
        return output

    output: Tensor = checkpoint(run, hidden, use_reentrant=False)
    assert kept[0]() is None
    output.sum().backward()
    expected = torch.autograd.grad((hidden.exp() * weights.sum(1, keepdim=True)).sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at each input
def test_a_compiled_layer_runs_its_experts_uncompiled() -> None:
    held = ExpertsHeld(NUM_EXPERTS)
    linear = torch.nn.Linear(WIDTH, NUM_EXPERTS)

    def layer(hidden: Tensor) -> Tensor:
        weights, index = linear(hidden).softmax(1).topk(K, 1)
        return hidden + run_experts(hidden, index, weights, lambda rows, counts: rows.sin(), held)

    compiled = torch.compile(layer, backend="eager")
    for tokens in (TOKENS, TOKENS + 1):
        hidden = torch.randn(tokens, WIDTH, requires_grad=True)
        found, expected = compiled(hidden), layer(hidden)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(output.square().sum(), hidden)[0] for output in (found, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("score_before", [False, True])
def test_tensors_in_any_layout_get_their_gradients(score_before: bool) -> None:
    weights = torch.rand(K, TOKENS, dtype=torch.float64).t().requires_grad_()
    hidden = torch.randn(WIDTH, TOKENS, dtype=torch.float64).t().requires_grad_()
    index = torch.randint(-1, 4, (K, TOKENS)).t()

    def run(hidden: Tensor, weights: Tensor) -> Tensor:
        return run_experts(
            hidden, index, weights, lambda rows, counts: rows.sin(), ExpertsHeld(4), score_before=score_before
        )

    assert torch.autograd.gradcheck(run, (hidden, weights))
    run(hidden, weights).sum().backward()  # a gradient that is one number, expanded


def test_a_router_that_chooses_an_expert_that_is_not_there_is_an_error() -> None:
    held = ExpertsHeld(4)
    for chosen in (3, 4, -2):  # also after a forward that was right
        index = torch.tensor([[0], [chosen], [-1]])
        is_wrong = chosen != 3
        match = rf"the router chose expert {chosen}, and the layer has experts 0 to 3"
        with pytest.raises(UsageError, match=match) if is_wrong else nullcontext():
            run_experts(torch.ones(3, 2), index, torch.ones(3, 1), lambda rows, counts: rows, held)


@pytest.mark.parametrize("overlap", [1, 2])
def test_choices_that_are_not_of_the_layer_are_found_by_the_counts_of_a_rank(
    overlap: int, ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        RouterCheck, "check_index", lambda self, index, num_experts, label: None
    )  # later forwards on a GPU

    def rank(is_wrong: bool) -> None:
        held = ExpertsHeld(4, 2)
        held.set_ranks(current_world().communicator("dp", Mesh.of(2)))
        index = torch.tensor([[0, 2], [3, 4 if is_wrong and current_world().rank else 1], [1, 2]])
        weights = torch.ones(3, 2)
        run_experts(torch.ones(3, 2), index, weights, lambda rows, _: rows, held, overlap=overlap, may_drop=False)

    ranks(2, rank, False)
    with pytest.raises(UsageError, match=r"1 of 6 choices of a router are none of the layer's experts 0 to 3"):
        ranks(2, rank, True)


def test_experts_without_ranks_say_what_to_do() -> None:
    held = ExpertsHeld(NUM_EXPERTS, 2)
    index = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(UsageError, match="divided among 2 ranks, and 1 are set") as caught:
        run_experts(torch.ones(1, 2), index, torch.ones(1, 1), lambda rows, counts: rows, held)
    assert caught.value.code == "experts-without-ranks"


def in_processes(rank: int, size: int) -> Tensor:
    from tests.ranks.comm.test_processes import own_world

    world = own_world(rank, size, "experts", True)
    held = ExpertsHeld(NUM_EXPERTS, size)
    held.set_ranks(world.communicator("dp", Mesh.of(size)))
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    index = torch.randint(NUM_EXPERTS, (TOKENS, K), generator=generator)
    for _ in range(3):
        output = run_experts(hidden, index, torch.ones(TOKENS, K), lambda rows, counts: 2 * rows, held, overlap=2)
        output.sum().backward()
    assert hidden.grad is not None and torch.equal(hidden.grad, torch.full_like(hidden, 3 * 2 * K))
    assert torch.equal(output, 4 * hidden)
    world.close()
    return torch.ones(1)


def test_processes_exchange_rows_through_shared_memory(gloo: Gloo) -> None:
    gloo(2, in_processes)
