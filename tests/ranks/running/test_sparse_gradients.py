"""Embeddings with sparse gradients: their rows are exchanged, and the numbers are those of one rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world, fake_world
from tests.helpers.sparse_models import (
    ROWS,
    WIDTH,
    Tables,
    adagrad,
    adam,
    alone,
    assert_close,
    config,
    model_of,
    sgd,
    tokens,
    train,
    weights,
)

# Of torch's own optimizers, about torch's own sparse tensors.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

TABLE_NBYTES = ROWS * WIDTH * 4


@pytest.mark.parametrize("optimizer", [sgd, adagrad])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sparse_embeddings_train_as_on_one_rank_over_the_whole_batch(stage: int, world: int, optimizer: Any) -> None:
    model = model_of()
    for found in run_ranks(world, lambda: train(model, optimizer, config(stage))):
        assert_close(found, alone(model, optimizer, world))


@pytest.mark.parametrize("extra", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_give_the_bits_that_dense_gradients_give(stage: int, extra: dict[str, Any]) -> None:
    settings = config(stage, gradient_accumulation_steps=2, **extra)
    model = model_of(is_sparse=False)
    dense = run_ranks(2, lambda: train(model, adam, settings))
    by_key = run_ranks(2, lambda: train(model, adam, {**settings, "sparse_gradients": True}))
    for one, other in zip(dense, by_key, strict=True):
        for name, value in one.items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_and_accumulation_count_rows_as_one_rank_does(stage: int) -> None:
    model = model_of()
    settings = config(stage, gradient_accumulation_steps=2, gradient_clipping=0.1)
    for found in run_ranks(2, lambda: train(model, sgd, settings)):
        assert_close(found, alone(model, sgd, 2, accumulation=2, clip=0.1))


@pytest.mark.parametrize("stage", [0, 2])
def test_an_embedding_that_is_the_head_too_is_summed_densely(stage: int) -> None:
    model = model_of(is_tied=True)
    for found in run_ranks(2, lambda: train(model, sgd, config(stage))):
        assert_close(found, alone(model, sgd, 2))


class Lopsided(Tables):
    """Rank 0 alone uses the bag; nobody uses the third table."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, tokens: torch.Tensor, with_bag: bool = True) -> torch.Tensor:
        return super().forward(tokens, with_bag=with_bag and current_world().rank == 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_table_may_be_used_by_one_rank_or_by_none(stage: int) -> None:
    torch.manual_seed(0)
    model = Lopsided()
    found, other = run_ranks(2, lambda: train(model, adagrad, config(stage), steps=2))
    own = copy.deepcopy(model)
    made = adagrad(own.parameters())
    for micro in range(2):
        losses = [Tables.forward(own, tokens(micro, rank, 2), with_bag=rank == 0) for rank in range(2)]
        torch.stack(losses).mean().backward()
        made.step()
        made.zero_grad()
    assert_close(found, weights(own))
    assert_close(other, found, rtol=0, atol=0)
    assert torch.equal(found["unused.weight"], model.unused.weight)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_passes_without_communication_are_exchanged_by_the_next(stage: int) -> None:
    model = model_of()

    def job() -> dict[str, torch.Tensor]:
        world = current_world()
        own = copy.deepcopy(model)
        settings = config(stage, managed_gradient_accumulation=False)
        engine, *_ = shoal.initialize(model=own, optimizer=sgd(list(own.parameters())), config=settings)
        with engine.no_sync():
            engine.backward(engine(tokens(0, world.rank, 2)) / 2)
        engine.backward(engine(tokens(1, world.rank, 2)) / 2)
        engine.step()
        engine.destroy()
        return weights(own)

    for found in run_ranks(2, job):
        assert_close(found, alone(model, sgd, 2, steps=1, accumulation=2))


def test_what_is_sent_are_indices_and_rows_of_the_most_that_a_rank_has() -> None:
    model = model_of()

    def job() -> list[tuple[str, int, str]]:
        world = current_world()
        own = copy.deepcopy(model)
        engine, *_ = shoal.initialize(model=own, optimizer=sgd(list(own.parameters())), config=config(0))
        looked_up = torch.tensor([[1, 1, 2]]) if world.rank == 0 else torch.tensor([[2, 2, 2]])
        with world.recorder.recording() as calls:
            engine.backward(engine(looked_up))
        engine.destroy()
        return [(call.op, call.nbytes, call.label) for call in calls if call.label.startswith("root") and call.nbytes]

    for calls in run_ranks(2, job):
        dense = [(op, nbytes) for op, nbytes, label in calls if op == "all_reduce"]
        rows = [(op, nbytes) for op, nbytes, label in calls if op != "all_reduce"]
        # of each of two tables: a count, two indices, two rows
        assert rows == [("exchange", 8), ("all_gather", 16), ("all_gather", 2 * WIDTH * 4)] * 2
        assert sum(nbytes for _, nbytes in dense) < TABLE_NBYTES * 2


@pytest.mark.usefixtures("deepspeed_classes")
def test_deepspeeds_engine_names_the_modules_with_sparse_gradients() -> None:
    def job() -> None:
        own = model_of()
        engine, *_ = shoal.initialize(model=own, optimizer=sgd(list(own.parameters())), config=config(0))
        assert engine.sparse_tensor_module_names == {"words.weight", "bag.weight"}
        with pytest.raises(AttributeError, match="sparse gradients are reduced by backward"):
            engine.sparse_allreduce()
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_table_with_offloaded_state_trains_alike(tier: str, tmp_path: Path) -> None:
    model = model_of()
    place = {"device": tier, "nvme_path": str(tmp_path)} if tier == "nvme" else {"device": tier}
    plain = config(2)["zero_optimization"]
    settings = config(2, zero_optimization={**plain, "offload_optimizer": place})
    kept = run_ranks(2, lambda: train(model, adam, config(2)))[0]
    for found in run_ranks(2, lambda: train(model, adam, settings)):
        assert_close(found, kept)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_of_tables_in_the_middle_of_a_step_goes_on(stage: int, tmp_path: Path) -> None:
    model = model_of()
    settings = config(stage, gradient_accumulation_steps=2)

    def job(*, is_first: bool) -> dict[str, torch.Tensor]:
        world, own = current_world(), copy.deepcopy(model)
        engine, *_ = shoal.initialize(model=own, optimizer=sgd(list(own.parameters())), config=settings)
        if not is_first:
            engine.load_checkpoint(tmp_path)
        for micro in range(3) if is_first else range(3, 4):
            engine.backward(engine(tokens(micro, world.rank, world.size)))
            engine.step()
        if is_first:
            engine.save_checkpoint(tmp_path)
        engine.destroy()
        return weights(own)

    for world in (1, 2):
        run_ranks(world, lambda: job(is_first=True))
        for found in run_ranks(world, lambda: job(is_first=False)):
            assert_close(found, alone(model, sgd, world, steps=2, accumulation=2))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding_sums_rows_within_a_group_and_shards_over_the_groups(stage: int) -> None:
    model = model_of()
    zero = {**config(stage)["zero_optimization"], "mics_shard_size": 2}
    settings = config(stage, zero_optimization=zero, gradient_accumulation_steps=2)
    for found in run_ranks(4, lambda: train(model, sgd, settings)):
        assert_close(found, alone(model, sgd, 4, accumulation=2))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_dry_run_counts_the_dense_exchange_since_it_knows_no_rows(stage: int) -> None:
    def received(*, is_sparse: bool) -> int:
        with fake_world(8, rank=3) as world, FakeTensorMode(allow_non_fake_inputs=True):
            own = model_of(is_sparse=is_sparse)
            engine, *_ = shoal.initialize(model=own, optimizer=sgd(own.parameters()), config=config(stage))
            with world.recorder.recording() as calls:
                engine.backward(engine(torch.zeros(4, 3, dtype=torch.int64)))
                engine.step()
            engine.destroy()
        return sum(call.nbytes for call in calls if call.op in ("all_reduce", "reduce_scatter"))

    assert received(is_sparse=True) == received(is_sparse=False) > 0
