"""Embeddings with sparse gradients: their rows are exchanged, and the numbers are those of one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world

# Of torch's own optimizers, about torch's own sparse tensors.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ROWS, WIDTH = 50, 6
BATCH = 4  # samples of one rank's micro-batch
TABLE_NBYTES = ROWS * WIDTH * 4


class Tables(nn.Module):
    """Two tables, a bag, and a head: which tokens a micro-batch looks up is the data's matter."""

    def __init__(self, *, is_sparse: bool = True, is_tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=is_sparse)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=is_sparse)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, with_bag: bool = True) -> torch.Tensor:
        hidden = self.words(tokens).sum(dim=1)
        if with_bag:
            hidden = hidden + self.bag(tokens)
        return self.head(torch.tanh(self.middle(hidden))).logsumexp(dim=1).mean() + hidden.square().mean()


def tokens(index: int, rank: int, world: int) -> torch.Tensor:
    """Micro-batch ``index`` of one rank: 12 tokens of 6 different ones, so some are repeated."""
    return whole(index, world)[rank * BATCH : (rank + 1) * BATCH]


def whole(index: int, world: int) -> torch.Tensor:
    """Micro-batch ``index`` of all ranks."""
    drawn = torch.randint(0, 6, (BATCH * world, 3), generator=torch.Generator().manual_seed(index))
    return drawn * 8 + index % 3


def model_of(**kwargs: Any) -> Tables:
    torch.manual_seed(0)
    return Tables(**kwargs)


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adagrad(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def config(stage: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(
    model: nn.Module, optimizer: Callable[..., Any], settings: dict[str, Any], *, steps: int = 3, **forward: Any
) -> dict[str, torch.Tensor]:
    """Train a copy of ``model`` on this rank. Returns: the weights, whole."""
    world = current_world()
    own = copy.deepcopy(model)
    engine, *_ = shoal.initialize(model=own, optimizer=optimizer(list(own.parameters())), config=settings)
    for micro in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(tokens(micro, world.rank, world.size), **forward))
        engine.step()
    engine.destroy()
    return weights(own)


def alone(
    model: nn.Module,
    optimizer: Callable[..., Any],
    world: int,
    *,
    steps: int = 3,
    accumulation: int = 1,
    clip: float = 0.0,
) -> dict[str, torch.Tensor]:
    """The same in plain PyTorch over the whole batch."""
    own = copy.deepcopy(model)
    made = optimizer(list(own.parameters()))
    for step in range(steps):
        for micro in range(step * accumulation, (step + 1) * accumulation):
            (own(whole(micro, world)) / accumulation).backward()
        if clip:
            clip_sparse(own, clip)
        made.step()
        made.zero_grad()
    return weights(own)


def clip_sparse(model: nn.Module, limit: float) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.coalesce().values().norm() if g.is_sparse else g.norm() for g in gradients]).norm()
    if norm > limit:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * (limit / (norm + 1e-6))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: Any) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


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
