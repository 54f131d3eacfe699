"""Experts with a capacity on an accelerator: equal rows for every expert, so that no host reads their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.parallel.expert.held import ExpertsHeld
from shoal.parallel.expert.route import route
from tests.fixtures.experts.cases import WIDTH
from tests.helpers.expert_dispatch_cases import NUM_EXPERTS, DispatchCase, Values, assert_close, train
from tests.helpers.simulated_nccl import nccl_in_simulation
from tests.helpers.training import make, start_with
from tests.ranks.compat.test_moe_layer import EXPERTS, OPTIONS, RANKS, layer_of, on_ranks, summed, with_all_experts
from tests.ranks.parallel.expert.test_dispatch import moved
from tests.ranks.parallel.expert.test_hierarchical import two_axes
from tests.ranks.parallel.expert.test_tensor_parallel import STEPS, Model, alone, settings
from tests.ranks.parallel.expert.test_tensor_parallel import assert_close as assert_parameters_close
from tests.ranks.parallel.expert.test_tensor_parallel import train as train_steps


@pytest.fixture(autouse=True)
def nccl() -> Iterator[None]:
    with nccl_in_simulation():
        yield


def case_of(*, score_before: bool = False, tokens: tuple[int, ...] = (12, 7, 1, 12)) -> DispatchCase:
    """No token has an expert twice; some have one or none. Ranks have other numbers of tokens, so other capacities."""
    generator = torch.Generator().manual_seed(2)
    chosen = [[torch.randperm(NUM_EXPERTS, generator=generator)[:2] for _ in range(rows)] for rows in tokens]
    index = [torch.stack(of_rank) if of_rank else torch.empty(0, 2, dtype=torch.int64) for of_rank in chosen]
    dropped = [torch.rand(each.shape, generator=generator) < 0.2 for each in index]
    index = [each.masked_fill(is_dropped, -1) for each, is_dropped in zip(index, dropped, strict=True)]
    return DispatchCase(tokens, index=index, score_before=score_before)


@contextmanager
def accelerator() -> Iterator[None]:
    """A simulated one, whose host reads no numbers of rows."""
    with shoal.check_streams() as check:
        yield
    assert not any("route" in line for line in check.host_reads), check.host_reads


def with_capacity(case: DispatchCase, held: ExpertsHeld, *given: Any, more: int = 0, **options: Any) -> Values:
    """``train`` with ``more`` than the smallest capacity."""
    index = given[-1]
    capacity = int(torch.bincount(index[index >= 0], minlength=NUM_EXPERTS).max()) + more
    return train(case, held, *given, capacity=capacity, **options)


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("score_before", [False, True])
@pytest.mark.parametrize("more", [0, 3])
def test_outputs_and_all_gradients_are_those_of_one_rank(ep: int, overlap: int, score_before: bool, more: int) -> None:
    case = case_of(score_before=score_before)
    found = case.found(ep, partial(with_capacity, overlap=overlap, more=more), around=accelerator)
    assert_close(found, case.expected())


def test_ranks_may_have_no_tokens_and_experts_any_place() -> None:
    for case in (case_of(tokens=(0, 5, 0, 0)), case_of()):
        assert_close(case.found(4, with_capacity, moved, accelerator), case.expected())


def test_recomputed_experts_give_the_same_gradients() -> None:
    def wrap(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)

    case = case_of()
    assert_close(case.found(2, partial(with_capacity, wrap=wrap), around=accelerator), case.expected())


def test_rows_sent_in_two_steps_are_those_of_one() -> None:
    def run(case: DispatchCase, held: ExpertsHeld, *given: Any) -> Values:
        held.comm, *axes = two_axes()
        held.hierarchy = axes[0], axes[1]
        return with_capacity(case, held, *given)

    case = case_of()
    assert_close(case.found(4, run, around=accelerator), case.expected())


def test_the_route_is_that_of_the_module_and_drops_what_is_beyond_the_capacity() -> None:
    index = torch.tensor([[2, 0], [0, 3], [2, -1]])
    (found,) = route(index, ExpertsHeld(4), capacity=2)
    assert found.order.tolist() == [1, 2, 6, 6, 0, 4, 3, 6]
    assert found.token_of.tolist() == [0, 1, 3, 3, 0, 2, 1, 3]
    assert found.row_of.tolist() == [[4, 0], [1, 6], [5, 8]]
    assert list(found.counts) == [2, 2, 2, 2]
    (found,) = route(index, ExpertsHeld(4), capacity=1)
    assert found.order.tolist() == [1, 6, 0, 3]
    assert found.row_of.tolist() == [[2, 0], [4, 3], [4, 4]]


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("case", [name for name, options in OPTIONS.items() if options.get("drop_tokens", True)])
def test_deepspeeds_layers_drop_the_same_tokens_and_give_the_same(case: str, ep_size: int) -> None:
    expected, expected_gradients = with_all_experts(OPTIONS[case])

    def rank() -> Any:
        with shoal.check_streams():
            return on_ranks(ep_size, OPTIONS[case])

    found = run_ranks(RANKS, rank)
    for (result, _), one in zip(found, expected, strict=True):
        assert torch.equal(result["counts"], one["counts"])
        for name in ("out", "l_aux", "input"):
            torch.testing.assert_close(result[name], one[name], rtol=1e-5, atol=1e-5, msg=name)
    total = summed([each for _, each in found])
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(total[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(("is_accelerator", "rows"), [(True, 2 * 4), (False, 3)])
def test_an_accelerator_sends_the_capacity_of_every_expert_and_a_cpu_the_tokens(
    is_accelerator: bool, rows: int
) -> None:
    """12 tokens of each of 2 ranks, 4 experts, a factor of 1.2: a capacity of 4, 2 experts on the other rank."""

    def rank() -> tuple[list[Any], list[Any]]:
        layer = layer_of(2, {"k": 1, "capacity_factor": 1.2, "min_capacity": 1, "use_rts": False})
        with torch.no_grad():
            layer.deepspeed_moe.gate.wg.weight.copy_(torch.eye(EXPERTS, WIDTH) * 10)
        # Of this rank's tokens 9 choose one of its own experts, of which 4 are kept, and 3 one of the other rank's.
        mine = current_world().rank * 2
        x = torch.eye(EXPERTS, WIDTH)[[mine] * 9 + [2 - mine] * 3].requires_grad_()
        with current_world().recorder.recording() as entries:
            layer(x)[0].sum().backward()
        sent = [(entry.op, entry.label, entry.nbytes) for entry in entries]
        return [entry for entry in sent if entry[0] == "all_to_all"], [e for e in sent if e[0] == "exchange"]

    def simulated() -> tuple[list[Any], list[Any]]:
        with shoal.check_streams():
            return rank()

    nbytes = rows * WIDTH * 4
    for data, control in run_ranks(2, simulated if is_accelerator else rank):
        labels = ("experts dispatch", "experts combine", "experts combine backward", "experts dispatch backward")
        assert data == [("all_to_all", label, nbytes) for label in labels]
        exchanged = ("experts' capacity", 8) if is_accelerator else ("experts' rows", 4 * 8)
        assert control == [("exchange", *exchanged)]


@pytest.mark.parametrize(("ep", "asks"), [(1, True), (2, True), (2, False), (4, False)])
def test_tensor_parallel_ranks_train_as_one_process_and_wait_once_a_step(ep: int, asks: bool) -> None:
    """Ranks with the same tokens have parts of each expert (asks), or other experts, whole."""
    expected, norm = alone("listed", 2)

    def rank() -> tuple[dict[str, Any], float, Counter[str]]:
        with shoal.check_streams() as check:
            made = settings("listed", 1, ep)
            engine = start_with(make(partial(Model, "listed", ep, asks=asks)), made)
            train_steps(engine, range(STEPS))
            values, found_norm = engine.module_state_dict(), engine.get_global_grad_norm()
            train_steps(engine, range(STEPS, 4))  # the batches of the first three are compared
            before = check.host_reads
            train_steps(engine, range(4, 5))
            found = check.host_reads - before
            engine.destroy()
        return values, found_norm, found

    for values, found_norm, waits in run_ranks(4, rank):
        assert_parameters_close(values, expected)
        assert found_norm == pytest.approx(norm, rel=1e-6)
        assert waits.total() == 1, waits


def test_other_routes_of_the_same_tokens_are_an_error_in_the_first_step() -> None:
    def rank() -> str:
        with shoal.check_streams():
            engine = start_with(make(partial(Model, "listed", 2, asks=False)), settings("listed", 1, 2))
            gate = engine.module.experts.layers[0].moe.deepspeed_moe.gate.wg
            with torch.no_grad():
                gate.weight.mul_(1.0 if current_world().rank % 2 else -1.0)
            with pytest.raises(UsageError, match="expert-routing") as found:
                train_steps(engine, range(1))
            engine.destroy()
        return str(found.value)

    for message in run_ranks(4, rank):
        assert "chose different experts" in message
