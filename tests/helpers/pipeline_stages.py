"""Pipeline stages run one after the other in one process, and compared with the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.pipeline.cut import CutModel, cut

Gradients = dict[str, torch.Tensor | None]


def run_whole(model: nn.Module, batches: list[Any], loss_of: Callable[[Any, Any], torch.Tensor]) -> Any:
    """Losses and gradients of the model in one piece."""
    losses = []
    for batch in batches:
        loss = loss_of(model(**batch) if isinstance(batch, dict) else model(*batch), batch)
        losses.append(loss.detach().clone())
        if torch.is_grad_enabled():
            loss.backward()
    return losses, {name: p.grad for name, p in model.named_parameters()}


def cut_over(model: nn.Module, ranks: list[tuple[int, ...]], **options: Any) -> list[CutModel]:
    """The stages of each rank, each cut from a copy of the model."""
    num_stages = sum(len(stages) for stages in ranks)
    return [cut(copy.deepcopy(model), num_stages, stages_of_rank=stages, **options) for stages in ranks]


def run_stages(parts: list[CutModel], batches: list[Any]) -> tuple[list[torch.Tensor], Gradients]:
    """Losses and gradients of the stages: all forwards of all micro-batches before the first backward.

    The gradient of a tied parameter is summed over the ranks that hold it.
    """
    rank_of = {stage: part for part in parts for stage in part.stages}
    losses, runs = [], []
    for batch in batches:
        received: Any = None
        run = []
        for stage in range(parts[0].num_stages):
            sent = rank_of[stage](stage, received, batch)
            if stage == parts[0].num_stages - 1:
                sent = rank_of[stage].loss(sent, batch)
                losses.append(sent.detach().clone())
            run.append((received, sent))
            received = tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), sent)
        runs.append(run)
    if torch.is_grad_enabled():
        for run in runs:
            backward(run)
    gradients: Gradients = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if gradients.get(name) is not None and parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad
            elif gradients.get(name) is None:
                gradients[name] = parameter.grad
    return losses, gradients


def tensors_of(message: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(message) if isinstance(leaf, torch.Tensor)]


def backward(run: list[tuple[Any, Any]]) -> None:
    grads: list[torch.Tensor | None] = [None]
    for received, sent in reversed(run):
        outputs = tensors_of(sent)
        pairs = [
            (o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad and (g is not None or o is sent)
        ]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        if received is not None:
            grads = [t.grad for t in tensors_of(received)]


def assert_same(whole: Any, stages: Any) -> None:
    """Losses and gradients are equal, bit for bit."""
    for one, other in zip(whole[0], stages[0], strict=True):
        assert torch.equal(one, other)
    assert whole[1].keys() == stages[1].keys()
    for name, grad in whole[1].items():
        other = stages[1][name]
        assert (grad is None) == (other is None), name
        assert grad is None or torch.equal(grad, other), name
