"""The step of an optimizer that updates the model's own parameters, whole, all in one call: as without Shoal.

For optimizers that ranges of flat weights do not suit: torch's SparseAdam, one that holds others and has them step, and
every class that Shoal does not know. Every rank holds everything (stage 0, or one rank), so every rank makes the same
step.

Between steps the state of each parameter is kept by part, flat, as every other optimizer's is: that is what
checkpoints and accessors know. The optimizer that steps a parameter has the same memory in the parameter's shape.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.errors import OptimizerError
from shoal.optim.elementwise import inner_optimizers
from shoal.running.import_state import has_parameter_shape
from shoal.running.step import Gather, HasGrad, ShardedStep
from shoal.sharding.encoded_state import is_elementwise
from shoal.sharding.param_group import ParameterGroup, ParameterRange
from shoal.sharding.unit import Unit

logger = logging.getLogger("shoal")


class DirectStep(ShardedStep):
    """Runs one torch optimizer on the model's parameters, or on master weights in their shapes.

    Args:
        states: every trained group; their gradients are views (``is_view``).

    Raises: OptimizerError: an optimizer that it holds steps parameters that are in none of its own groups: no rank
        would exchange their gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[ParameterGroup]) -> None:
        super().__init__(optimizer, groups, block_numel=None)
        inner = inner_optimizers(optimizer)
        self._holders = [*inner, optimizer]
        self._home = {
            id(parameter): holder
            for holder in reversed(self._holders)
            for group in holder.param_groups
            for parameter in group["params"]
        }
        self._left: dict[int, dict[str, Any]] = {}  # by a parameter's id: what its optimizer was left with
        self._others: dict[str, Any] = {}  # by key, a state that is no element per element and no number
        self._check_known(inner)
        self._lift()

    def _extents(self, group: ParameterGroup, index: int) -> list[tuple[int, int]]:
        """One extent per parameter: each is updated by itself."""
        return [(s.offset, s.offset + s.numel) for s in group.buffer.layout.specs if s.group == index]

    def _check_known(self, inner: Sequence[torch.optim.Optimizer]) -> None:
        known = {id(parameter) for _, _, parameter, _ in self._placed()}
        unknown = [
            parameter
            for holder in inner
            for group in holder.param_groups
            for parameter in group["params"]
            if id(parameter) not in known and parameter.requires_grad and parameter.numel()
        ]
        if unknown:
            raise OptimizerError(
                f"{type(self.optimizer).__name__} holds optimizers of {len(unknown)} parameters that are not in its own"
                f" groups (the first has shape {tuple(unknown[0].shape)}).",
                do="list every parameter in super().__init__(params, ...), too.",
                code="optimizer-groups",
            )

    def _lift(self) -> None:
        """State of steps that were taken before goes to where ``import_state`` finds it."""
        for _, _, parameter, _ in self._placed():
            holder = self._home.get(id(parameter), self.optimizer)
            if holder is not self.optimizer and parameter in holder.state:
                self.optimizer.state[parameter] = dict(holder.state.pop(parameter))

    def update(self, units: Sequence[Unit], gradient_scale: float, has_grad: HasGrad) -> list[Gather]:
        targets: dict[int, nn.Parameter] = {}
        for slot, group, parameter, part in self._placed():
            group.gradient.take_back()
            target = parameter
            if group.has_own_main:
                target = nn.Parameter(part.param.detach().view(group.buffer.layout.specs[slot].shape))
            targets[id(parameter)] = target
            target.grad = None
            if has_grad[group][slot]:
                gradient = group.gradient.value(slot)
                target.grad = _scaled(gradient, group.main.dtype, gradient_scale)
        for group in self.groups:
            group.wait_for_readers()
        with self._swapped(targets):
            self._hand_state(targets)
            self.optimizer.step()
            self._take_state(targets)
        for _, group, parameter, part in self._placed():
            targets[id(parameter)].grad = None
            if group.has_own_main:
                group.buffer.shard[part.start : part.stop].copy_(part.param.detach())
        return []

    def _placed(self) -> Iterator[tuple[int, ParameterGroup, nn.Parameter, ParameterRange]]:
        """Each trained parameter with its part, as they are now: a load makes parts anew."""
        for group in self.groups:
            for part in group.ranges:
                slot = part.segments[0].slot
                yield slot, group, group.parameters[slot], part

    @contextmanager
    def _swapped(self, targets: Mapping[int, nn.Parameter]) -> Iterator[None]:
        """Put the targets in the place of the parameters in all groups, for the length of a step."""
        groups = [group for holder in self._holders for group in holder.param_groups]
        replaced = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [targets.get(id(parameter), parameter) for parameter in group["params"]]
        try:
            yield
        finally:
            for group, parameters in zip(groups, replaced, strict=True):
                group["params"] = parameters

    # optimizer state

    def _hand_state(self, targets: Mapping[int, nn.Parameter]) -> None:
        """Give each parameter's optimizer its state, in the parameter's shape."""
        for _, _, parameter, part in self._placed():
            holder = self._home.get(id(parameter), self.optimizer)
            target = targets[id(parameter)]
            loaded = holder.state.get(parameter)
            if loaded is not None and not _is_same(loaded, self._left.get(id(parameter), {})):
                continue  # the script has loaded it there
            state = self.optimizer.state.get(part.param, {})
            if target is not parameter:
                holder.state.pop(parameter, None)
            if state:
                holder.state[target] = {
                    key: value.view(target.shape)
                    if is_elementwise(value, part.param.numel()) and key not in self._others
                    else value
                    for key, value in state.items()
                }
            else:
                holder.state.pop(target, None)

    def _take_state(self, targets: Mapping[int, nn.Parameter]) -> None:
        """Keep what the step made of it, flat."""
        for _, _, parameter, part in self._placed():
            target = targets[id(parameter)]
            for holder in self._holders:
                state = holder.state.get(target)
                if not state:
                    continue
                self._note_others(state, target)
                self.optimizer.state[part.param] = {
                    key: _flat(value) if has_parameter_shape(key, value, target) else value
                    for key, value in state.items()
                }
                if target is not parameter:
                    del holder.state[target]
                else:
                    self._left[id(parameter)] = dict(state)
                break

    def _note_others(self, state: Mapping[str, Any], target: nn.Parameter) -> None:
        """Say in the first step that a checkpoint cannot hold the state, not hours later when it is saved."""
        others = {
            key: list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            for key, value in state.items()
            if key not in self._others
            and not isinstance(value, int | float | bool | str | None)
            and not (
                isinstance(value, torch.Tensor) and (value.numel() == 1 or has_parameter_shape(key, value, target))
            )
        }
        if others and not self._others and self.groups[0].buffer.comm.rank == 0:
            logger.warning(
                "%s keeps state that is neither one number nor one element per element (%s, for a parameter of shape"
                " %s): it trains as in plain PyTorch, but save_checkpoint() cannot save it. Save the weights with"
                " save_16bit_model().",
                type(self.optimizer).__name__,
                ", ".join(f"{key!r}: {what}" for key, what in others.items()),
                tuple(target.shape),
            )
        self._others |= others

    def release_state(self) -> None:
        for _, _, parameter, _ in self._placed():
            for holder in self._holders:
                holder.state.pop(parameter, None)
        self._left.clear()

    def free(self) -> None:
        super().free()
        self._left, self._home = {}, {}


def _scaled(gradient: torch.Tensor, dtype: torch.dtype, gradient_scale: float) -> torch.Tensor:
    if gradient.is_sparse or gradient.dtype != dtype:
        gradient = gradient.to(dtype)
        return gradient * gradient_scale if gradient_scale != 1.0 else gradient
    return gradient.mul_(gradient_scale) if gradient_scale != 1.0 else gradient


def _flat(value: torch.Tensor) -> torch.Tensor:
    """SGD's momentum of a sparse gradient begins as a sparse tensor; from here on it is a dense one."""
    return (value.to_dense() if value.is_sparse else value).reshape(-1)


def _is_same(state: Mapping[str, Any], left: Mapping[str, Any]) -> bool:
    return state.keys() == left.keys() and all(state[key] is left[key] for key in state)
