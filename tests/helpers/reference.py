"""What a training run has to compute, in plain PyTorch on one process. Imports nothing of Shoal.

A step has micro-batches. Each gives a loss, which counts in the step's loss by its share: all alike, or by its number
of targets. The gradients are summed in the dtype of the main parameters, clipped by their norm, and the optimizer steps
the main parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]


@dataclass(frozen=True)
class Numbers:
    """How a run computes.

    Args:
        dtype: of the model's parameters and activations.
        main_dtype: of the parameters that the optimizer steps.
        autocast: the dtype of autocast around the model; None: no autocast.
        scale: factor on the loss before backward, which is taken out of the gradients.
        clip: maximum of the gradients' norm; 0: none.
        by_tokens: micro-batches count by their number of targets, not all alike.
    """

    dtype: torch.dtype = torch.float32
    main_dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scale: float = 1.0
    clip: float = 0.0
    by_tokens: bool = False


@dataclass
class Trained:
    """What a run returns: for each step the loss and the gradients' norm before clipping; the main parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    steps: Iterable[Sequence[Batch]],
    loss_of: Callable[[nn.Module, Batch], torch.Tensor],
    optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    count: Callable[[Batch], int] = lambda batch: 1,
    numbers: Numbers = Numbers(),
) -> Trained:
    """Train a copy of ``model``.

    Args:
        steps: the micro-batches of each step, of all data-parallel ranks.
        loss_of: the loss of one micro-batch.
        optimizer_of: the optimizer of the main parameters.
        count: the targets of a micro-batch.
    """
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = copy.deepcopy(model)
    for parameter in model.parameters():  # buffers keep their dtype
        parameter.data = parameter.data.to(numbers.dtype)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    main = {name: nn.Parameter(start[name].to(numbers.main_dtype)) for name in trained}
    optimizer = optimizer_of(list(main.values()))
    result = Trained()
    for batches in steps:
        weights = [count(batch) if numbers.by_tokens else 1 for batch in batches]
        total = 0.0
        for batch, weight in zip(batches, weights, strict=True):
            share = weight / sum(weights)
            inside = torch.autocast("cpu", dtype=numbers.autocast) if numbers.autocast else nullcontext()
            with inside:
                loss = loss_of(model, batch)
            (loss * (share * numbers.scale)).backward()
            total += float(loss.detach()) * share
            for name, parameter in trained.items():
                if parameter.grad is None:  # of no batch yet: no state is made for it, as in PyTorch
                    continue
                gradient = (parameter.grad.to(torch.float32) / numbers.scale).to(numbers.main_dtype)
                sum_so_far = main[name].grad
                main[name].grad = gradient if sum_so_far is None else sum_so_far + gradient
                parameter.grad = None
        maximum = numbers.clip or float("inf")
        result.norms.append(float(nn.utils.clip_grad_norm_(main.values(), maximum)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(main[name])
        result.losses.append(total)
    result.parameters = {name: value.detach().float() for name, value in main.items()}
    return result
