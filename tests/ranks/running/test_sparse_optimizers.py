"""Optimizers of sparse gradients, and those that hold others: stage 0 steps them on the model's own parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import OptimizerError
from shoal.zero import (
    safe_get_full_grad,
)
from tests.helpers.sparse_models import (
    CASES,
    IDS,
    ROWS,
    WIDTH,
    Both,
    TablesOnly,
    alone,
    assert_close,
    config,
    head_of,
    model_of,
    only_tables,
    sparse_adam,
    tokens,
    train,
    weights,
)

# Of torch's own optimizers, about torch's own sparse tensors.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.mark.parametrize(("make", "optimizer"), CASES, ids=IDS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_lazy_optimizers_train_as_on_one_rank_over_the_whole_batch(make: Any, optimizer: Any, world: int) -> None:
    model = make()
    ranks = run_ranks(world, lambda: train(model, optimizer, config(0)))
    for found in ranks:
        assert_close(found, alone(model, optimizer, world))
        assert_close(found, ranks[0], rtol=0, atol=0)


@pytest.mark.parametrize(("make", "optimizer"), CASES, ids=IDS)
def test_clipping_and_accumulation_with_lazy_optimizers_are_those_of_one_rank(make: Any, optimizer: Any) -> None:
    model = make()
    settings = config(0, gradient_accumulation_steps=3, gradient_clipping=0.05)
    for found in run_ranks(2, lambda: train(model, optimizer, settings)):
        assert_close(found, alone(model, optimizer, 2, accumulation=3, clip=0.05))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("make", "optimizer"), CASES, ids=IDS)
def test_in_bf16_lazy_optimizers_step_fp32_main_parameters(make: Any, optimizer: Any, accumulation: int) -> None:
    model = make()
    settings = config(0, gradient_accumulation_steps=accumulation, bf16={"enabled": True})
    one, two = (run_ranks(world, lambda: masters_of(model, optimizer, settings)) for world in (1, 2))
    wide = alone(model, optimizer, 2, accumulation=accumulation)
    for found in two:
        assert_close(found, wide, rtol=0, atol=0.06)
        assert_close(found, two[0], rtol=0, atol=0)
        assert all(value.dtype == torch.float32 for value in found.values())
    assert_close(one[0], alone(model, optimizer, 1, accumulation=accumulation), rtol=0, atol=0.06)


def masters_of(model: nn.Module, optimizer: Any, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    world, own = current_world(), copy.deepcopy(model)
    engine, *_ = shoal.initialize(model=own, optimizer=optimizer(list(own.parameters())), config=settings)
    for micro in range(3 * engine.gradient_accumulation_steps()):
        engine.backward(engine(tokens(micro, world.rank, world.size)))
        engine.step()
    found = {name: engine.access.full_parameter(parameter).clone() for name, parameter in own.named_parameters()}
    held = weights(own)
    assert all(torch.equal(value.to(torch.bfloat16), held[name]) for name, value in found.items())
    engine.destroy()
    return found


def test_a_row_that_was_looked_up_is_stepped_though_its_gradient_is_zero_and_others_are_not() -> None:
    start = only_tables()

    class Masked(TablesOnly):
        def forward(self, found: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return super().forward(found) * factor

    model = Masked()
    model.load_state_dict(start.state_dict())

    def job() -> dict[str, torch.Tensor]:
        rank, own = current_world().rank, copy.deepcopy(model)
        engine, *_ = shoal.initialize(model=own, optimizer=sparse_adam(own.parameters()), config=config(0))
        engine.backward(engine(torch.tensor([[1, 2]])))
        engine.step()
        first = weights(own)
        # Rank 0 looks row 1 up and gives it nothing; rank 1 looks row 3 up.
        engine.backward(engine(torch.tensor([[1, 1]] if rank == 0 else [[3, 3]]), 0.0 if rank == 0 else 1.0))
        engine.step()
        engine.destroy()
        changed = (first["words.weight"] != weights(own)["words.weight"]).any(dim=1).nonzero().flatten()
        assert changed.tolist() == [1, 3]
        return weights(own)

    one, two = run_ranks(2, job)
    assert_close(one, two, rtol=0, atol=0)


def test_a_table_that_one_rank_or_none_uses() -> None:
    class Lopsided(TablesOnly):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Embedding(ROWS, WIDTH, sparse=True)

        def forward(self, found: torch.Tensor, with_bag: bool = True) -> torch.Tensor:
            hidden = self.words(found).sum(dim=1)
            return (hidden + self.bag(found) if with_bag else hidden).square().mean()

    model = Lopsided()

    def job() -> dict[str, torch.Tensor]:
        world, own = current_world(), copy.deepcopy(model)
        engine, *_ = shoal.initialize(model=own, optimizer=sparse_adam(own.parameters()), config=config(0))
        for micro in range(2):
            engine.backward(engine(tokens(micro, world.rank, 2), world.rank == 1))
            assert own.unused.weight.grad is not None and own.unused.weight.grad._nnz() == 0
            engine.step()
        assert own.unused.weight not in engine.optimizer.state
        engine.destroy()
        return weights(own)

    own = copy.deepcopy(model)
    made = sparse_adam(own.parameters())
    for micro in range(2):
        torch.stack([own(tokens(micro, rank, 2), rank == 1) for rank in range(2)]).mean().backward()
        made.step()
        made.zero_grad()
    for found in run_ranks(2, job):
        assert_close(found, weights(own))


def test_a_table_that_is_the_head_too_gets_a_dense_gradient_on_all_ranks() -> None:
    model = model_of(is_tied=True)
    both = partial(Both, tables=partial(torch.optim.SGD, lr=0.1))
    for found in run_ranks(2, lambda: train(model, both, config(0))):
        assert_close(found, alone(model, both, 2))


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_gradients_read_before_the_step_are_the_optimizers_and_may_be_changed(clip: float) -> None:
    model = head_of()

    def job(change: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        world, own = current_world(), copy.deepcopy(model)
        settings = config(0, gradient_clipping=clip)
        engine, *_ = shoal.initialize(model=own, optimizer=Both(own.parameters()), config=settings)
        for micro in range(2):
            engine.backward(engine(tokens(micro, world.rank, world.size)))
            assert own.words.weight.grad.is_sparse and own.words.weight.grad.is_coalesced()
            for parameter in own.parameters():
                parameter.grad = change(parameter.grad)
            engine.step()
            assert all(parameter.grad is None for parameter in own.parameters())
        engine.destroy()
        return weights(own)

    same = run_ranks(2, lambda: job(lambda gradient: gradient))[0]
    assert_close(same, alone(model, Both, 2, steps=2, clip=clip))
    assert_close(run_ranks(2, lambda: job(lambda gradient: gradient * 1.0))[0], same, rtol=0, atol=0)
    assert_close(run_ranks(2, lambda: job(lambda _: None))[0], weights(model), rtol=0, atol=0)


def test_what_a_script_keeps_of_a_gradient_stays_as_it_was() -> None:
    def job() -> None:
        rank, own = current_world().rank, copy.deepcopy(model)
        engine, *_ = shoal.initialize(model=own, optimizer=Both(own.parameters()), config=config(0))
        kept = []
        for micro in range(3):
            engine.backward(engine(tokens(micro, rank, 2)))
            kept.append([(p.grad, p.grad.to_dense().clone()) for p in own.parameters()])
            if micro == 1:
                for parameter in own.parameters():
                    parameter.grad = None
                engine.backward(engine(tokens(micro, rank, 2)))
                for parameter, (_, value) in zip(own.parameters(), kept[1], strict=True):
                    torch.testing.assert_close(parameter.grad.to_dense(), value, rtol=0, atol=0)
            engine.step()
        for gradient, value in [pair for pairs in kept for pair in pairs]:
            assert torch.equal(gradient.to_dense(), value)
        engine.destroy()

    model = head_of()
    run_ranks(2, job)


@pytest.mark.usefixtures("deepspeed_classes")
def test_gradient_average_false_gives_the_sum_over_the_ranks() -> None:
    def job(optimizer: Any) -> None:
        rank, own = current_world().rank, copy.deepcopy(model)
        engine, *_ = shoal.initialize(model=own, optimizer=optimizer(own.parameters()), config=config(0))
        found = []
        for is_mean in (True, False, True):
            engine.gradient_average = is_mean
            assert engine.gradient_average is is_mean
            engine.backward(engine(tokens(0, rank, 2)))
            found.append([safe_get_full_grad(p).clone() for p in own.parameters()])
            engine.zero_grad()
        for mean, total, again in zip(*found, strict=True):
            torch.testing.assert_close(mean * 2, total)
            assert torch.equal(mean, again)
        engine.destroy()

    model = head_of()
    run_ranks(2, lambda: job(Both))
    run_ranks(2, lambda: job(partial(torch.optim.SGD, lr=0.1)))


def test_passes_without_communication_are_exchanged_by_the_next() -> None:
    model = head_of()

    def job() -> dict[str, torch.Tensor]:
        rank, own = current_world().rank, copy.deepcopy(model)
        settings = config(0, managed_gradient_accumulation=False)
        engine, *_ = shoal.initialize(model=own, optimizer=Both(own.parameters()), config=settings)
        with engine.no_sync():
            engine.backward(engine(tokens(0, rank, 2)) / 2)
        engine.backward(engine(tokens(1, rank, 2)) / 2)
        engine.step()
        engine.destroy()
        return weights(own)

    for found in run_ranks(2, job):
        assert_close(found, alone(model, Both, 2, steps=1, accumulation=2))


def test_a_schedule_of_an_inner_optimizer_is_used() -> None:
    def job() -> None:
        own = copy.deepcopy(model)
        made = Both(own.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(made.rest, step_size=1, gamma=0.5)
        engine, *_ = shoal.initialize(model=own, optimizer=made, lr_scheduler=schedule, config=config(0))
        engine.backward(engine(tokens(0, 0, 1)))
        engine.step()
        assert made.rest.param_groups[0]["lr"] == 0.025
        assert engine.get_lr() == [0.0]  # its own group has none
        engine.destroy()

    model = head_of()
    run_ranks(1, job)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_stages_refuse_them_and_say_what_to_do(stage: int) -> None:
    model = head_of()

    def job() -> None:
        shoal.initialize(model=model, optimizer=Both(model.parameters()), config=config(stage))

    with pytest.raises(
        OptimizerError, match=r"\[optimizer-of-optimizers\] Both holds .*SparseAdam, Adam(.|\n)*stage 0"
    ):
        run_ranks(2, job)
    only = only_tables()
    made = sparse_adam(only.parameters())
    with pytest.raises(OptimizerError, match=r"sparse gradients only, which stages 1 to 3 (.|\n)*with stage 0"):
        run_ranks(2, lambda: shoal.initialize(model=only, optimizer=made, config=config(stage)))


class Wrapper(torch.optim.Optimizer):
    """Steps what it was given after counting; its groups are those of what it wraps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.inner = inner
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return self.inner.step()


@pytest.mark.filterwarnings("ignore:Wrapper is not known to be elementwise")
@pytest.mark.parametrize("stage", [0, 2])
def test_a_wrapper_that_shares_the_groups_of_what_it_wraps_is_stepped_as_before(stage: int) -> None:
    model = head_of()

    def optimizer(parameters: Iterable[Any]) -> Wrapper:
        return Wrapper(torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9))

    settings = config(stage, zero_allow_untested_optimizer=True)
    for found in run_ranks(2, lambda: train(model, optimizer, settings)):
        assert_close(found, alone(model, optimizer, 2))


def test_parameters_of_an_inner_optimizer_alone_are_an_error() -> None:
    class Hidden(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters[:1], {})
            self.held = [torch.optim.SGD(parameters, lr=0.1)]

        def step(self, closure: Any = None) -> Any:
            self.held[0].step()

    model = head_of()
    with pytest.raises(OptimizerError, match="holds optimizers of 4 parameters that are not in its own groups"):
        shoal.initialize(model=model, optimizer=Hidden(list(model.parameters())), config=config(0))


def test_what_is_sent_for_a_table_are_indices_and_rows() -> None:
    model = only_tables()

    def job() -> list[tuple[str, int, str]]:
        world, own = current_world(), copy.deepcopy(model)
        engine, *_ = shoal.initialize(model=own, optimizer=sparse_adam(own.parameters()), config=config(0))
        with world.recorder.recording() as calls:
            engine.backward(engine(torch.tensor([[1, 1, 2]]) if world.rank == 0 else torch.tensor([[2, 2, 2]])))
        held = [entry for entry in engine.memory_report().entries if entry.kind == "gradient"]
        assert [(entry.nbytes, entry.formula) for entry in held] == [(2 * (8 + WIDTH * 4),) * 2] * 2
        engine.destroy()
        return [(call.op, call.nbytes) for call in calls if call.label.startswith("root")]

    for calls in run_ranks(2, job):
        assert calls == [("exchange", 8), ("all_gather", 16), ("all_gather", 2 * WIDTH * 4)] * 2


def job_on_gloo(rank: int, size: int) -> dict[str, torch.Tensor]:
    shoal.init_distributed()
    return train(head_of(), Both, config(0, gradient_accumulation_steps=2))


@pytest.mark.gloo
def test_processes_exchange_rows_as_threads_do(gloo: Callable[..., list[Any]]) -> None:
    expected = alone(head_of(), Both, 2, accumulation=2)
    for found in gloo(2, job_on_gloo):
        assert_close(found, expected)


@pytest.mark.parametrize("is_quiet", [False, True])
def test_two_passes_before_a_step_add_up(is_quiet: bool) -> None:
    model = head_of()

    def job() -> dict[str, torch.Tensor]:
        rank, own = current_world().rank, copy.deepcopy(model)
        engine, *_ = shoal.initialize(model=own, optimizer=Both(own.parameters()), config=config(0))
        engine.backward(engine(tokens(0, rank, 2)))
        with engine.no_sync() if is_quiet else nullcontext():
            engine.backward(engine(tokens(1, rank, 2)))
        engine.step()
        engine.destroy()
        return weights(own)

    own = copy.deepcopy(model)
    made = Both(own.parameters())
    for micro in range(2):
        own(torch.cat([tokens(micro, rank, 2) for rank in range(2)])).backward()
    made.step()
    for found in run_ranks(2, job):
        assert_close(found, weights(own))


class Own(nn.Module):
    """A table that is no module of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(found, self.table, sparse=True).square().mean()


@pytest.mark.parametrize("optimizer", [sparse_adam, partial(torch.optim.SGD, lr=0.1)])
@pytest.mark.parametrize("world", [1, 2])
def test_a_sparse_gradient_of_any_parameter_is_taken(world: int, optimizer: Any) -> None:
    model = Own()
    for found in run_ranks(world, lambda: train(model, optimizer, config(0))):
        assert_close(found, alone(model, optimizer, world))


def test_sparse_gradients_are_reduced_in_the_format_that_the_config_names() -> None:
    model = head_of()

    def job(settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[torch.dtype]]:
        world, own = current_world(), copy.deepcopy(model)
        engine, *_ = shoal.initialize(model=own, optimizer=Both(own.parameters()), config=settings)
        with world.recorder.recording() as calls:
            engine.backward(engine(tokens(0, world.rank, 2)))
        engine.step()
        engine.destroy()
        return weights(own), [call.dtype for call in calls if call.op == "all_gather"]

    wide, _ = run_ranks(2, lambda: job(config(0)))[0]
    for found, formats in run_ranks(2, lambda: job(config(0, communication_data_type="bf16"))):
        assert formats == [torch.int64, torch.bfloat16] * 2
        assert_close(found, wide, rtol=0, atol=2e-3)
