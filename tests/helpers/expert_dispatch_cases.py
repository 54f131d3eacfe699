"""Tokens, routes and experts of four groups of tokens, and what they give by autograd on one rank in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.grouped import grouped_linear
from shoal.parallel.expert.held import ExpertsHeld

NUM_EXPERTS, WIDTH, INNER, TOKENS, K = 8, 6, 10, 12, 2
Values = dict[str, Tensor]


@dataclass
class DispatchCase:
    """The tokens of four groups, which 1, 2 or 4 ranks share, and their routes."""

    tokens: Sequence[int] = (TOKENS,) * 4
    k: int = K
    index: list[Tensor] = field(default_factory=list)
    score_before: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        self.inner, self.outer = randn(NUM_EXPERTS, WIDTH, INNER), randn(NUM_EXPERTS, INNER, WIDTH)
        self.hidden = [randn(tokens, WIDTH) for tokens in self.tokens]
        self.weights = [randn(tokens, self.k) for tokens in self.tokens]
        self.gradient = [randn(tokens, WIDTH) for tokens in self.tokens]
        if not self.index:
            self.index = [
                torch.randint(-1, NUM_EXPERTS, (tokens, self.k), generator=generator) for tokens in self.tokens
            ]

    def expected(self) -> Values:
        """One token and one expert at a time, by autograd, in fp64."""
        leaves = [self.inner, self.outer, torch.cat(self.hidden), torch.cat(self.weights)]
        inner, outer, hidden, weights = (leaf.double().requires_grad_() for leaf in leaves)
        outputs = []
        for token, experts in enumerate(torch.cat(self.index).tolist()):
            output = torch.zeros(WIDTH, dtype=torch.float64)
            for at, expert in enumerate(experts):
                if expert >= 0:
                    weight = weights[token, at]
                    row = hidden[token] * weight if self.score_before else hidden[token]
                    row = torch.relu(row @ inner[expert]) @ outer[expert]
                    output = output + (row if self.score_before else row * weight)
            outputs.append(output)
        output = torch.stack(outputs)
        named = {"inner": inner, "outer": outer, "hidden": hidden, "weights": weights}
        loss = (output * torch.cat(self.gradient)).sum() + 0 * sum(leaf.sum() for leaf in named.values())
        gradients = torch.autograd.grad(loss, list(named.values()))
        return {"output": output.detach(), **dict(zip(named, gradients, strict=True))}

    def found(
        self,
        ep: int,
        run: Callable[..., Values],
        place: Callable[[ExpertsHeld], None] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Values:
        """What ``run`` gives on ``ep`` ranks, each in a block of ``around``, put together."""

        def rank() -> tuple[Values, tuple[int, ...]]:
            with around():
                return self.on_rank(run, place)

        results = run_ranks(ep, rank)
        ids = [expert for _, held in results for expert in held]
        values = {name: torch.cat([result[name] for result, _ in results]) for name in results[0][0]}
        for name in ("inner", "outer"):
            values[name] = values[name][torch.tensor(ids).argsort()]
        return values

    def on_rank(
        self, run: Callable[..., Values], place: Callable[[ExpertsHeld], None] | None
    ) -> tuple[Values, tuple[int, ...]]:
        held = experts_of_this_rank()
        if place is not None:
            place(held)
        rank, each = current_world().rank, 4 // held.ep_size
        mine = slice(rank * each, (rank + 1) * each)
        tensors = [torch.cat(of[mine]).clone() for of in (self.hidden, self.weights, self.gradient, self.index)]
        experts = [leaf[list(held.ids)].clone().requires_grad_() for leaf in (self.inner, self.outer)]
        return run(self, held, experts, *tensors), held.ids


def experts_of_this_rank() -> ExpertsHeld:
    world = current_world()
    held = ExpertsHeld(NUM_EXPERTS, world.size)
    held.set_ranks(world.communicator("dp", Mesh.of(world.size)) if world.size > 1 else None)
    return held


def train(
    case: DispatchCase,
    held: ExpertsHeld,
    experts: list[Tensor],
    hidden: Tensor,
    weights: Tensor,
    gradient: Tensor,
    index: Tensor,
    *,
    wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda run: run,
    **options: Any,
) -> Values:
    inner, outer = experts

    def compute(rows: Tensor, counts: Sequence[int]) -> Tensor:
        return grouped_linear(torch.relu(grouped_linear(rows, inner, counts)), outer, counts)

    def run(hidden: Tensor, weights: Tensor) -> Tensor:
        return run_experts(hidden, index, weights, compute, held, score_before=case.score_before, **options)

    hidden.requires_grad_()
    weights.requires_grad_()
    output = wrap(run)(hidden, weights)
    assert output.shape == hidden.shape and output.dtype == hidden.dtype
    output.backward(gradient)
    values = {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}
    values |= {"inner": inner.grad, "outer": outer.grad}
    return {name: value for name, value in values.items() if value is not None}


def assert_close(found: Values, expected: Values, rtol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.shape == found[name].shape, name
        if value.numel():
            assert (found[name] - value).abs().max() <= rtol * max(value.abs().max(), 1e-3), name
