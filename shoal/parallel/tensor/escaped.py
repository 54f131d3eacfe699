"""Activations between layers that split the sequence, read by the loss other than through the last layer's output.

    embedding --split--> layers.0 --> layers.1 --gather--> head --> loss
                             |                                       ^
                             +-- block.aux, a hook's list -----------+     of this rank's part of the sequence

A statistic over the tokens of such a tensor is of a part of them, another on each rank. The graph of the loss shows it:
behind the gather nothing is looked at, so that the search ends after the head and the loss.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

from shoal.comm.autograd import is_gather
from shoal.errors import UsageError
from shoal.parallel.tensor.layers import LayerSplit
from shoal.parallel.tensor.region import TensorRegion


def sequence_region(model: nn.Module) -> TensorRegion | None:
    """The region of the model's layers that split the sequence; None: there are none."""
    splits = (getattr(module, "tensor_split", None) for module in model.modules())
    return next((split.region for split in splits if isinstance(split, LayerSplit) and split.region.stacks), None)


def refuse_escaped(loss: torch.Tensor, region: TensorRegion) -> None:
    """Raises: UsageError: the loss reads activations of this rank's part of the sequence."""
    inside = tuple(f"{name}{after}" for name in region.stacks for after in (".", " in"))
    nodes = dict.fromkeys([loss.grad_fn])  # an ordered set: the nearest node is named
    waiting = deque(nodes)
    while waiting:
        node = waiting.popleft()
        label = getattr(node, "label", None)
        if node is None or is_gather(node, region.comm):
            continue
        if isinstance(label, str) and label.startswith(inside):
            raise UsageError(
                "the loss reads activations between layers that split the sequence, other than through the output of"
                " the last layer: they, and a mean or an attribute that is made of them, are of this rank's part of"
                " the sequence.",
                where=label.rpartition(" ")[0],
                do="return the tensor, [B, L, width] or [B * L, width], from the module around the layers, which hands"
                " it out whole, and compute the loss from it; or turn parallel.tp_sequence_parallel off.",
                code="tensor-parallel",
            )
        before = [each for each, _ in node.next_functions if each not in nodes]
        nodes.update(dict.fromkeys(before))
        waiting.extend(dict.fromkeys(before))
