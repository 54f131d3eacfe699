"""State of optimizers that step the model's own parameters: accessors, checkpoints, other memory, other engines."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.build.settings import ZeroSettings
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.zero import (
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.helpers.sparse_models import (
    CASES,
    IDS,
    ROWS,
    WIDTH,
    Both,
    alone,
    assert_close,
    config,
    head_of,
    only_tables,
    sparse_adam,
    tokens,
    weights,
)

# Of torch's own optimizers, about torch's own sparse tensors.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def test_accessors_read_and_set_gradients_and_state_of_a_table() -> None:
    def job() -> None:
        rank, own = current_world().rank, copy.deepcopy(model)
        engine, optimizer, *_ = shoal.initialize(
            model=own, optimizer=sparse_adam(own.parameters()), config=config(0, gradient_accumulation_steps=2)
        )
        table = own.words.weight
        assert safe_get_full_grad(table) is None
        for micro in range(2):
            engine.backward(engine(tokens(micro, rank, 2)))
            if micro == 0:
                engine.step()
        gradient = safe_get_full_grad(table)
        assert gradient.shape == (ROWS, WIDTH)
        torch.testing.assert_close(gradient, table.grad.to_dense())
        wanted = torch.zeros(ROWS, WIDTH)
        wanted[7] = 1.0
        safe_set_full_grad(table, wanted)
        assert torch.equal(safe_get_full_grad(table), wanted)
        assert table.grad.indices().tolist() == [[7]]
        before = table.detach().clone()
        engine.step()
        assert (table != before).any(dim=1).nonzero().flatten().tolist() == [7]
        moment = safe_get_full_optimizer_state(table, "exp_avg")
        torch.testing.assert_close(moment, wanted * 0.1)
        assert optimizer.state[table]["step"] == 1
        safe_set_full_optimizer_state(table, torch.zeros(ROWS, WIDTH), "exp_avg")
        assert not optimizer.optimizer.state[table]["exp_avg"].any()
        engine.destroy()

    model = only_tables()
    run_ranks(2, job)


@pytest.mark.parametrize("worlds", [(2, 2), (2, 1), (1, 3)])
@pytest.mark.parametrize(("make", "optimizer"), CASES, ids=IDS)
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(
    make: Any, optimizer: Any, worlds: tuple[int, int], tmp_path: Path
) -> None:
    model = make()

    def job(steps: range, save: bool) -> dict[str, torch.Tensor]:
        world, own = current_world(), copy.deepcopy(model)
        engine, *_ = shoal.initialize(model=own, optimizer=optimizer(list(own.parameters())), config=config(0))
        if not save:
            engine.load_checkpoint(tmp_path)
        for step in steps:
            whole = [tokens(step, rank, 6) for rank in range(6)]
            share = torch.cat(whole[world.rank * 6 // world.size : (world.rank + 1) * 6 // world.size])
            engine.backward(engine(share))
            engine.step()
        if save:
            engine.save_checkpoint(tmp_path)
        engine.destroy()
        return weights(own)

    run_ranks(worlds[0], lambda: job(range(2), True))
    expected = alone(model, optimizer, 6, steps=4)
    for found in run_ranks(worlds[1], lambda: job(range(2, 4), False)):
        assert_close(found, expected)


@pytest.mark.parametrize("num_micro", [1, 2])
def test_a_checkpoint_in_the_middle_of_a_step_keeps_the_rows(num_micro: int, tmp_path: Path) -> None:
    model = head_of()

    def engine_of() -> tuple[Any, Any]:
        own = copy.deepcopy(model)
        settings = config(0, gradient_accumulation_steps=2)
        return own, shoal.initialize(model=own, optimizer=Both(own.parameters()), config=settings)[0]

    def first() -> None:
        rank = current_world().rank
        _, engine = engine_of()
        for micro in range(num_micro):
            engine.backward(engine(tokens(micro, rank, 2)))
            if micro == 0:
                engine.step()
        engine.save_checkpoint(tmp_path)
        engine.destroy()

    def second() -> dict[str, torch.Tensor]:
        rank = current_world().rank
        own, engine = engine_of()
        engine.load_checkpoint(tmp_path)
        for micro in range(num_micro, 2):
            engine.backward(engine(tokens(micro, rank, 2)))
        engine.step()
        engine.destroy()
        return weights(own)

    run_ranks(2, first)
    for found in run_ranks(2, second):
        assert_close(found, alone(model, Both, 2, steps=1, accumulation=2))


def test_state_of_an_inner_optimizer_is_visible_and_may_be_loaded_there() -> None:
    def job() -> None:
        rank, own = current_world().rank, copy.deepcopy(model)
        made = Both(own.parameters())
        engine, *_ = shoal.initialize(model=own, optimizer=made, config=config(0))
        engine.backward(engine(tokens(0, rank, 2)))
        engine.step()
        saved = copy.deepcopy(made.tables.state_dict())
        assert saved["state"][0]["exp_avg"].shape == (ROWS, WIDTH) and saved["state"][0]["step"] == 1
        engine.backward(engine(tokens(1, rank, 2)))
        engine.step()
        made.tables.load_state_dict(saved)
        engine.backward(engine(tokens(1, rank, 2)))
        engine.step()
        assert made.tables.state_dict()["state"][0]["step"] == 2
        assert engine.optimizer.state[own.words.weight]["step"] == 2
        assert engine.optimizer.state[own.head.weight]["step"] == 3
        engine.destroy()

    model = head_of()
    run_ranks(2, job)


def test_state_goes_along_when_a_model_is_initialized_again() -> None:
    model = head_of()

    def job() -> dict[str, torch.Tensor]:
        rank, own = current_world().rank, copy.deepcopy(model)
        made = Both(own.parameters())
        for step in range(2):
            engine, *_ = shoal.initialize(model=own, optimizer=made, config=config(0))
            engine.backward(engine(tokens(step, rank, 2)))
            engine.step()
            engine.destroy()
        return weights(own)

    for found in run_ranks(2, job):
        assert_close(found, alone(model, Both, 2, steps=2))


def test_offloaded_states_are_fetched_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.settings.ZeroSettings", partial(ZeroSettings, is_host_separate=True))
    model = head_of()

    def job(*, is_moved: bool) -> dict[str, torch.Tensor]:
        rank, own = current_world().rank, copy.deepcopy(model)
        made = Both(own.parameters())
        settings = config(0, gradient_accumulation_steps=2)
        engine, *_ = shoal.initialize(model=own, optimizer=made, config=settings)
        for micro in range(4):
            engine.backward(engine(tokens(micro, rank, 2)))
            if is_moved:
                engine.offload_states()
                assert not made.tables.state and not made.rest.state
                engine.reload_states()
            engine.step()
        engine.destroy()
        return weights(own)

    for one, other in zip(*(run_ranks(2, partial(job, is_moved=yes)) for yes in (False, True)), strict=True):
        assert_close(one, other, rtol=0, atol=0)
