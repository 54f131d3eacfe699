"""The step of an optimizer that chooses what the ranks sum (``SumsValues``): gradients, its own values, or nothing.

    after a step        ``sums()`` of the next one: whether backward sums gradients, or leaves each rank its own
    backward            gradients are summed as they are, or accumulated
    engine.step()       norm and overflow of what is there: of own gradients the ranks' mean square
                        own gradients are unscaled and clipped, ``to_sum`` makes values of them, the ranks sum these
                        the optimizer's step

A step that is skipped has sent nothing, so errors and state are as before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shoal.errors import OptimizerError
from shoal.optim.sums_values import OwnValues, SumsValues
from shoal.running.step import Gather, HasGrad, ShardedStep
from shoal.sharding.param_group import ParameterGroup, ParameterRange
from shoal.sharding.sparse_sum import SparseSum
from shoal.sharding.unit import Unit


class SummingStep(ShardedStep):
    """As ``ShardedStep``, of groups whose optimizer state every rank holds whole.

    Raises: OptimizerError: a sparse gradient, or sums in 16 bits.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[ParameterGroup], **settings: Any) -> None:
        super().__init__(optimizer, groups, **settings)
        assert isinstance(optimizer, SumsValues)
        self._choice = optimizer
        for group in groups:
            self._check(group)
        self._plan()

    def _check(self, group: ParameterGroup) -> None:
        name, gradient = type(self.optimizer).__name__, group.gradient
        if self.is_whole_tensor and self._parts_comm(group) is not None:
            raise OptimizerError(
                f"{name} has norms of whole parameters, and other ranks hold parts of those of {group.label!r}.",
                do="use it without tensor-parallel ranks, or OneBitAdam.",
                code="optimizer-sums",
            )
        if gradient.is_sparse or any(isinstance(axis, SparseSum) for axis in gradient.axes.values()):
            raise OptimizerError(
                f"{name} sums values for each element, but the gradient of {group.label!r} is sparse.",
                do="use sparse=False for the embedding, and leave sparse_gradients out.",
                code="optimizer-sums",
            )
        if gradient.sum_dtype not in (torch.float32, torch.float64):
            dtype = str(gradient.sum_dtype).removeprefix("torch.")
            raise OptimizerError(
                f"{name} sums momenta where gradients are summed, and those of {group.label!r} are summed in {dtype}.",
                do="keep main parameters in fp32, and leave data_types.grad_accum_dtype out or set it to fp32.",
                code="optimizer-sums",
            )

    def _plan(self) -> None:
        """Prepare the gradients for the next step."""
        self._sums = self._choice.sums()
        for group in self.groups:
            gradient = group.gradient
            gradient.is_left_partial = self._sums != "gradients" and not gradient.is_alone
            gradient.sent.is_on = self._sums == "values"
            if self._choice.drops_errors():
                gradient.sent.forget()

    def update(self, units: Sequence[Unit], gradient_scale: float, has_grad: HasGrad) -> list[Gather]:
        """As ``ShardedStep.update``.

        Communicates: where values are summed, the all_reduce of each group, encoded as its row says.
        """
        if self._sums != "gradients":
            groups = [group for unit in units for group in unit.trained if any(has_grad[group])]
            ranges: list[OwnValues] = []
            for group in groups:
                group.wait_for_readers()
                ranges += self._own_values(group, group.gradient.own(gradient_scale), has_grad[group])
            gradient_scale = 1.0
            if self._sums == "values":
                self._choice.to_sum(ranges)
                for group in groups:
                    group.gradient.average()
                for group in groups:
                    group.gradient.wait(at_step=True)
        gathers = super().update(units, gradient_scale, has_grad)
        for group in self.groups:
            group.gradient.sent.saved = {}  # the update has waited for a save that read it
        self._choice.num_steps += 1
        self._plan()
        return gathers

    def _own_values(self, group: ParameterGroup, values: torch.Tensor, has_grad: bytes) -> Iterator[OwnValues]:
        if not self.is_whole_tensor:
            for part in self._with_grad(group, has_grad):
                yield OwnValues(part.param, self._options(part), values[part.start : part.stop])
            return
        for part, owned in zip(group.ranges, self._owned_ranges(group, has_grad), strict=True):
            own = values[part.start : part.stop]
            yield OwnValues(part.param, self._options(part), own, owned.parts, len(owned.shapes))

    def _options(self, part: ParameterRange) -> dict[str, Any]:
        options: dict[str, Any] = self.optimizer.param_groups[part.group]
        return options

    def _round(self, ranges: Sequence[tuple[ParameterGroup, ParameterRange]]) -> None:
        super()._round(ranges)
        for group, part in ranges:
            offset = self._choice.offset(part.param, self._options(part))
            if offset is not None:
                group.buffer.shard[part.start : part.stop].copy_(part.param.detach() - offset)

    # checkpoints

    def state_was_loaded(self) -> None:
        steps = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        self._choice.num_steps = int(max(map(float, steps), default=0))
        self._plan()

    @torch.no_grad()
    def before_save(self) -> None:
        """Sum what the ranks have not summed yet, as it is: a checkpoint has one value for each element.

        Communicates: where steps have summed nothing, an all_reduce of each group.
        """
        for group in self.groups:
            mine = {part: own for part in group.ranges if (own := self._choice.pending(part.param)) is not None}
            if not mine:
                continue
            mean = torch.zeros(group.buffer.layout.numel, dtype=group.main.dtype, device=group.buffer.device)
            for part, own in mine.items():
                mean[part.start : part.stop] = own
            gradient = group.gradient
            group.buffer.sum_like(mean, gradient.axes, group.row.gradient, 1 / gradient.num_summed)
            for part in mine:
                self._choice.settle(part.param, self._options(part), mean[part.start : part.stop])
            group.buffer.shard.copy_(group.main)
