"""Models with embeddings, their data, and the same training in plain PyTorch: for the tests of sparse gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

import shoal
from shoal.comm.world import current_world

ROWS, WIDTH = 50, 6
BATCH = 4  # samples of one rank's micro-batch


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


class Both(torch.optim.Optimizer):
    """Tables to one optimizer, other parameters to another; each steps by groups of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter], tables: Any = None, rest: Any = None) -> None:
        listed = list(parameters)
        super().__init__(listed, {})
        is_table = [tuple(p.shape) == (ROWS, WIDTH) for p in listed]
        self.tables = (tables or partial(torch.optim.SparseAdam, lr=0.05))(
            [p for p, yes in zip(listed, is_table, strict=True) if yes]
        )
        self.rest = (rest or partial(torch.optim.Adam, lr=0.05))(
            [p for p, yes in zip(listed, is_table, strict=True) if not yes]
        )

    def step(self, closure: Any = None) -> Any:
        self.tables.step()
        self.rest.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.tables.zero_grad()
        self.rest.zero_grad()


class TablesOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        return (self.words(found).sum(dim=1) + self.bag(found)).square().mean()


def only_tables() -> TablesOnly:
    torch.manual_seed(0)
    return TablesOnly()


def head_of() -> Tables:
    model = model_of()
    model.head = nn.Linear(WIDTH, 7, bias=False)  # not of a table's shape
    return model


def sparse_adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters), lr=0.05)


with_momentum = partial(
    Both, tables=partial(torch.optim.SGD, lr=0.1, momentum=0.9), rest=partial(torch.optim.Adagrad, lr=0.05)
)


CASES: list[tuple[Callable[[], nn.Module], Callable[..., Any]]] = [
    (head_of, Both),
    (only_tables, sparse_adam),
    (head_of, with_momentum),
]


IDS = ["two optimizers", "SparseAdam", "momentum of rows"]
