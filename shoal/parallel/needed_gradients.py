"""Which gradients of an autograd function a backward pass takes: the halves of a split backward take some of them."""

from __future__ import annotations

from typing import Any

import torch


def needed_gradients(ctx: Any) -> tuple[bool, ...]:
    """By argument of ``forward``, True if the backward pass that runs takes the gradient.

    ``ctx.needs_input_grad`` is True for every tensor that requires one. A pass for the stage's inputs alone (I of the
    zero-bubble schedules), one for its weights (W) and ``torch.autograd.grad`` leave others out.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_dynamo_compiling():  # a traced backward has no nodes, and is one pass for all
        return needs
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])  # of the tensors that require one
    return tuple(is_required and _is_executed(next(nodes)) for is_required in needs)


def _is_executed(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the pass is torch.autograd.grad of this leaf
        return True
