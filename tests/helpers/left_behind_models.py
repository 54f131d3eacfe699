"""Models whose loss reads what their blocks return and leave behind, in all ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Router(nn.Module):
    """Leaves an auxiliary loss, and a count without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)
        self.probabilities: Any = None
        self.counts: Any = None
        self.of_pass: list[Tensor] | None = None
        self.log: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.probabilities = self.linear(hidden).softmax(-1).mean(0)
        self.counts = (hidden.detach() > 0).float().sum()
        return hidden * self.probabilities.max()


class Block(nn.Module):
    """Leaves a value wherever a test looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.router = Router()
        self.aux: Any = 0.0
        self.sink: list[Tensor] | None = None
        self.returns_aux = False

    def forward(self, hidden: Tensor, losses: list[Tensor] | None = None, skip: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.linear(self.router(hidden)))
        if skip is not None:
            hidden = hidden * skip
        self.aux = hidden.pow(2).mean()
        self.router.of_pass = [self.aux * 2]
        self.router.of_pass.append(self.aux * 3)
        self.router.log.clear()
        self.router.log.append(self.aux * 5)
        for kept in (self.sink, losses):
            if kept is not None:
                kept.append(self.aux)
        return (hidden, self.aux) if self.returns_aux else hidden


class Features:
    """An object with forward hooks that collect outputs."""

    def __init__(self) -> None:
        self.of: list[Tensor] = []

    def collect(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.of.append(output)


class Stem(nn.Linear):
    """A module before the blocks that leaves an auxiliary loss, too."""

    aux: Any = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        self.aux = hidden.pow(2).mean()
        return hidden


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.sink: list[Tensor] = []
        self.features = Features()
        self.embedding = Stem(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, hidden: Tensor) -> Tensor:
        self.sink.clear()
        self.features.of.clear()
        return self.run(self, self.embedding(hidden))


def attributes(model: Any, hidden: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden)
    return hidden.sum() + sum(block.aux for block in model.blocks)


def attributes_of_modules(model: Any, hidden: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert len(routers) == 6
    return hidden.sum() + sum(router.probabilities.pow(2).sum() * router.counts for router in routers)


def lists_of_blocks(model: Any, hidden: Tensor) -> Tensor:
    """Lists that a block's forward makes or empties, which only the last stage reads."""
    for block in model.blocks:
        hidden = block(hidden)
    return hidden.sum() + sum(sum(block.router.of_pass) + sum(block.router.log) for block in model.blocks)


def shared_list(model: Any, hidden: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden)
    return hidden.sum() + torch.stack(model.sink).sum()


def list_among_arguments(model: Any, hidden: Tensor) -> Tensor:
    losses: list[Tensor] = []
    for block in model.blocks:
        hidden = block(hidden, losses)
    return hidden.sum() + sum(loss * at for at, loss in enumerate(losses))


def hooks(model: Any, hidden: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden)
    return sum((feature.pow(at + 1).mean() for at, feature in enumerate(model.features.of)), hidden.sum())


def further_outputs(model: Any, hidden: Tensor) -> Tensor:
    total: Any = 0.0
    for block in model.blocks:
        hidden, aux = block(hidden)
        total = total + aux
    return hidden.sum() + total


def hidden_states(model: Any, hidden: Tensor) -> Tensor:
    states = []
    for block in model.blocks:
        hidden = block(hidden)
        states.append(hidden)
    return sum((state.pow(at + 1).mean() for at, state in enumerate(states)), hidden.new_zeros(()))


def embedding(model: Any, hidden: Tensor) -> Tensor:
    states = [hidden]
    for block in model.blocks:
        hidden = block(hidden)
        states.append(hidden)
    return torch.stack(states).pow(2).sum() + model.embedding.aux


def hidden_states_in_a_tuple(model: Any, hidden: Tensor) -> Tensor:
    states = (torch.ones_like(hidden),)
    for block in model.blocks:
        hidden = block(hidden)
        states = (*states, hidden)
    return sum((state.pow(at + 1).mean() for at, state in enumerate(states)), hidden.sum())


def skips(model: Any, hidden: Tensor) -> Tensor:
    kept = []
    for at, block in enumerate(model.blocks):
        if at < 3:
            hidden = block(hidden)
            kept.append(hidden)
        else:
            hidden = block(hidden + 2 * kept.pop(), skip=None)
    return hidden.sum()


def skips_as_arguments(model: Any, hidden: Tensor) -> Tensor:
    kept = []
    for at, block in enumerate(model.blocks):
        hidden = block(hidden) if at < 3 else block(hidden, skip=kept.pop())
        kept.append(hidden)
    return hidden.sum()


def checkpointed(model: Any, hidden: Tensor) -> Tensor:
    states = []
    for block in model.blocks:
        hidden = checkpoint(block.__call__, hidden, use_reentrant=False)
        states.append(hidden)
    return torch.stack(states).pow(2).sum() + sum(block.aux for block in model.blocks)


def build(run: Callable[[Any, Tensor], Tensor], of: Any = None) -> Model:
    """Args: of: one of the above, as which blocks are made; None: ``run``."""
    model = Model(run)
    for block in model.blocks:
        block.returns_aux = run is further_outputs
        block.sink = model.sink if (of or run) is shared_list else None
    if (of or run) is hooks:
        for module in (model.embedding, *(block.router for block in model.blocks)):
            module.register_forward_hook(model.features.collect)
    return model


ALL = [
    attributes,
    attributes_of_modules,
    lists_of_blocks,
    shared_list,
    list_among_arguments,
    hooks,
    further_outputs,
    hidden_states,
]
ALL += [hidden_states_in_a_tuple, embedding, skips, skips_as_arguments, checkpointed]
