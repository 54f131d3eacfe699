"""Tensors that the ranks hold in parts, and that the loss reads as if they were whole.

    embedding --split--> layers.0 --> layers.1 --gather--> head --logits of a range--> cross entropy --> loss
                             |                               |                                            ^
                             +-- block.aux, a hook's list    +-- a loss of the script's own --------------+

Between layers that split the sequence a statistic over the tokens is of this rank's part of it. A loss of split logits
other than the one that the model computes is of a range of the vocabulary. The graph of the loss shows both. The search
ends at the gather and at the cross entropy, so that it visits the nodes of the head and of the loss.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.comm.autograd import is_gather
from shoal.errors import ShoalError, UsageError
from shoal.parallel.cross_entropy import token_losses
from shoal.parallel.tensor.layers import LayerSplit

_SEQUENCE = (
    "the loss reads activations between layers that split the sequence, other than through the output of the last"
    " layer: they, and a mean or an attribute that is made of them, are of this rank's part of the sequence.",
    "return the tensor, [B, L, width] or [B * L, width], from the module around the layers, which hands it out whole,"
    " and compute the loss from it; or turn parallel.tp_sequence_parallel off.",
)
_LOGITS = (
    "the loss is computed from this rank's part of the logits, other than by the model's loss_function.",
    "pass labels to the model, or compute the loss by shoal.parallel.tensor.vocab_parallel_cross_entropy; or turn"
    " parallel.tp_loss_parallel off.",
)


class SplitTensors:
    """Knows a model's tensors of which each tensor-parallel rank holds a part."""

    def __init__(self, model: nn.Module) -> None:
        found = (getattr(module, "tensor_split", None) for module in model.modules())
        splits = [split for split in found if isinstance(split, LayerSplit)]
        self.region = next((split.region for split in splits if split.region.stacks), None)
        stacks = [] if self.region is None else self.region.stacks
        self._sequences = tuple(f"{name}{after}" for name in stacks for after in (".", " in"))
        self._heads = tuple(f"{split.name} in" for split in splits if split.keeps_logits)

    def refuse(self, loss: torch.Tensor) -> None:
        """Raises: UsageError: the loss reads such a tensor as if it were whole."""
        region = self.region
        if region is not None:
            _search(loss, self._sequences, lambda node: is_gather(node, region.comm), *_SEQUENCE)
        if self._heads:
            _search(loss, self._heads, _is_loss, *_LOGITS)

    def explain(self, error: Exception) -> None:
        """Raises: UsageError: ``error`` left the sequence split, or a module around the layers raised it."""
        if self.region is None or isinstance(error, ShoalError):
            return
        if self.region.unfinished is not None:
            raise self.region.unfinished from error
        selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        module = next((each for each in reversed(selves) if isinstance(each, nn.Module)), None)
        inner = [] if module is None else [name for name, _ in module.named_modules() if name]
        is_around = any(f".{stack}".endswith(f".{name}") for stack in self.region.stacks for name in inner)
        if is_around and isinstance(error, RuntimeError | ValueError | IndexError):
            raise UsageError(
                f"{type(module).__name__} raised {type(error).__name__}: {str(error)[:300].rstrip('.')}. The layers of"
                f" {', '.join(self.region.stacks)} split the sequence: what the module reads between them is this"
                " rank's part.",
                do="if one rank raises it too, it is the model's own. Else read the output of the last layer only,"
                " return the others' from the module around the layers, or turn parallel.tp_sequence_parallel off.",
                code="tensor-parallel",
            ) from error


def _is_loss(node: Any) -> bool:
    """True for the cross entropy of split logits, and for functions of the script, which may communicate."""
    source = getattr(getattr(type(node), "_forward_cls", None), "__module__", "torch")
    return source == token_losses.__module__ or not source.startswith(("shoal.", "torch"))


def _search(loss: torch.Tensor, labels: tuple[str, ...], is_end: Callable[[Any], bool], what: str, do: str) -> None:
    """Raises: UsageError: a node with a label that begins so is reached, by no node at which the search ends."""
    nodes = [loss.grad_fn]  # the nearest first
    seen = set(nodes)
    for node in nodes:
        if node is None or is_end(node):
            continue
        label = getattr(node, "label", None)
        if isinstance(label, str) and label.startswith(labels):
            raise UsageError(what, where=label.rpartition(" ")[0], do=do, code="tensor-parallel")
        for before, _ in node.next_functions:
            if before not in seen:
                seen.add(before)
                nodes.append(before)
