"""Tensor-parallel ranks: losses that read split tensors, errors of split modules, gradients of what is whole.

In the first step the gradients of parameters that all of these ranks hold whole are compared. Outside of the split
regions every rank computes the same gradient. Inside, each computes a summand, and the step sums them. Which of the two
holds follows from the plan, which does not know every model: a bias that a split module returns next to its output is
added outside of the region. Then the gradient would be counted once for each rank, or the ranks' copies would drift
apart, without an error.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.device import is_fake
from shoal.engine.log import logger
from shoal.engine.parts.part import Part
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import ShoalError
from shoal.parallel.tensor.hooks import SplitTensors
from shoal.sharding.axes import Axes
from shoal.sharding.param_group import ParameterGroup

_DIFFERS = 1e-2  # of the sum of absolute values; sums in another order differ by less
_IS_SAME = 1e-6


class TensorParallelChecks(Part):
    """Refuses a loss that reads split tensors, explains errors of split modules, and compares gradients once."""

    def __init__(self, sharding: Sharding, properties: Properties) -> None:
        self._module = sharding.module
        self._split_tensors = SplitTensors(sharding.module)
        self._whole_gradients = WholeGradients(
            sharding.groups,
            properties.axes,
            {id(parameter): name for name, parameter in sharding.module.named_parameters()},
            splits_sequence=properties.config.parallel.tp_sequence_parallel,
        )

    def before_backward(self, loss: torch.Tensor) -> None:
        self._split_tensors.refuse(loss)

    def before_step(self) -> None:
        self._whole_gradients.compare()

    def before_destroy(self) -> None:
        self._whole_gradients.remove()

    def explain(self, error: Exception) -> None:
        self._split_tensors.explain(error)
        explain_split_module(error, self._module)


class WholeGradients:
    """Sums of the gradients of one step, by parameter.

    Args:
        names: of parameters, by ``id``.
        splits_sequence: activations are split between the layers too: equal tokens then give equal summands.
    """

    def __init__(
        self,
        groups: Iterable[ParameterGroup],
        axes: Axes,
        names: Mapping[int, str],
        *,
        splits_sequence: bool,
    ) -> None:
        self._tp = tp = axes.get("tp")
        self._warns = tp is not None and tp.rank == axes.data.rank == 0
        self._is_summed: dict[str, bool] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []
        if tp is None:
            return
        for group in groups:
            is_summed = "tp" in group.axes.partial
            if tp not in group.axes.copies or (is_summed and splits_sequence):
                continue
            for parameter in group.parameters:
                name = names.get(id(parameter))
                if name is not None and parameter.requires_grad:
                    self._is_summed[name] = is_summed
                    self._hooks.append(parameter.register_hook(partial(self._add, name)))

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        if gradient.is_sparse or is_fake(gradient):
            return
        size = torch.linalg.vector_norm(gradient, 1, dtype=torch.float64)
        sums = torch.stack([gradient.sum(dtype=torch.float64), size])
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def compare(self) -> None:
        """Warn in the first step, on one rank of each pipeline stage, where gradients are not as the plan says.

        Communicates: once, 16 bytes a parameter over the tensor-parallel axis.
        """
        if not self._hooks or self._tp is None:
            return
        self.remove()
        sums = [self._sums[name].tolist() if name in self._sums else [0.0, 0.0] for name in self._is_summed]
        self._sums.clear()
        every = self._tp.gather_objects(sums, label="whole gradients")
        for (name, is_summed), ranks in zip(self._is_summed.items(), zip(*every, strict=True), strict=True):
            size = max(size for _, size in ranks)
            spread = max(max(column) - min(column) for column in zip(*ranks, strict=True))
            if not 0 < size < math.inf:
                continue  # there is no gradient yet, or the step is skipped
            if is_summed and spread <= _IS_SAME * size:
                self._warn(_COUNTED_TWICE, name)
            elif not is_summed and spread > _DIFFERS * size:
                self._warn(_DRIFTS, name)

    def remove(self) -> None:
        """Compare nothing from now on. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _warn(self, text: str, name: str) -> None:
        if self._warns and self._tp is not None:
            logger.warning(text.format(name=name, size=self._tp.size))


_COUNTED_TWICE = (
    "tensor parallelism: the gradient of {name} is the same on all {size} ranks, and they are summed: it is counted"
    " {size} times. The module around it is split, and uses the parameter after its output was summed. Leave that"
    ' module whole ("skip" in parallel.tp_plan).'
)
_DRIFTS = (
    "tensor parallelism: the gradient of {name} differs on the {size} ranks, which hold the parameter whole: their"
    " copies drift apart. It is used inside of a split region: give its module the style replicate_sum_gradient in"
    " parallel.tp_plan, or skip the module around it."
)


def explain_split_module(error: Exception, model: nn.Module) -> None:
    """Add a note to an error inside of a module of which layers are split over tensor-parallel ranks.

    What else the module has for every head or element is whole, and does not fit them.
    """
    if not isinstance(error, RuntimeError | ValueError | IndexError) or isinstance(error, ShoalError):
        return
    frames = traceback.walk_tb(error.__traceback__)
    selves = [frame.f_locals.get("self") for frame, _ in frames]
    names = {id(module): name for name, module in model.named_modules()}
    for module in reversed(selves):
        if not isinstance(module, nn.Module) or id(module) not in names:
            continue
        inner = {name: part for name, part in module.named_modules() if name}
        split = [name for name, part in inner.items() if hasattr(part, "tensor_split")]
        if split:
            if not any(isinstance(part, nn.ModuleList) for part in inner.values()):  # a layer or less
                error.add_note(
                    f"shoal: of {names[id(module)]} ({type(module).__name__}) {', '.join(split)} are split over"
                    " tensor-parallel ranks. If one rank (parallel.tp 1) does not raise this, the module has something"
                    ' beside them that fits all heads or elements only: leave these layers whole ("skip") in'
                    " parallel.tp_plan; shoal.parallel.tensor.plan_for(model) returns the plan that was used."
                )
            return
