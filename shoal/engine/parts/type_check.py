"""``shoal verify``: kinds of parameters by their specs, and of gradients that arrive against the group's row.

Along an axis a parameter is one of four things, each with what its gradient must be:

    split, or another on each rank   its own gradient: never partial, since each part needs the whole sum
    summed: the row says Partial     a summand on each rank: on an axis that is not averaged, never replicated
    copied                           equal on all ranks: replicated
    of a replica that steps alone    anything
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shoal.engine.parts.part import ForwardInputs, Part
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.unit import Unit
from shoal.simulation.spreads import PARTIAL, REPLICATED, VARIES, ZERO, Kind
from shoal.simulation.type_check import Types, current_types, storage_of, word


def checking_types() -> Sequence[Part]:
    """The part that checks, inside of ``shoal.verify``."""
    types = current_types()
    return () if types is None else (CheckTypes(types),)


class CheckTypes(Part):
    """Gives parameters and batches their kinds, and checks losses and gradients."""

    def __init__(self, types: Types) -> None:
        self._types = types
        self._engine: Any = None
        self._hooks: list[Any] = []
        self._units: Sequence[Unit] = ()
        self._names: dict[ParameterGroup, list[str]] = {}
        self._averaged: set[int] = set()  # digits over which losses are averaged
        self._apart: set[int] = set()

    def prepare(self, engine: Any) -> None:
        types, axes, self._units, self._engine = self._types, engine.axes, engine.sharded.units, engine
        types.begin(axes.mesh)
        self._averaged = types.of_comm(axes.data)
        if axes.apart is not None:
            self._apart = types.of_comm(axes.comms[axes.apart])
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        for unit in engine.sharded.units:
            for group in unit.groups:
                for parameter, spec in zip(group.parameters, group.buffer.layout.specs, strict=True):
                    name = names.get(id(parameter), spec.name)
                    split = {
                        digit
                        for axis in spec.split_over | spec.others_over
                        for digit in types.of_comm(axes.comms[axis])
                    }
                    part = _part(spec)
                    kinds = tuple(part if digit in split else REPLICATED for digit in range(len(types.digits)))
                    types.set_parameter(parameter, name, kinds)
                    self._names.setdefault(group, []).append(name)
                    types.table[name] = ["frozen"] * len(kinds)
                    if group.is_trained and parameter.requires_grad:
                        summed = self._summed(group)
                        types.table[name] = [
                            f"{word(kind)}, {self._duty(digit, split, summed)}" for digit, kind in enumerate(kinds)
                        ]
                        self._hooks.append(parameter.register_hook(partial(self._arrived, name, split, summed)))

    def _summed(self, group: ParameterGroup) -> set[int]:
        """The digits over which the row sums the gradient."""
        comms = group.axes.comms
        names = [axis for axis, _ in group.row.gradient.axes if axis in comms]
        return {digit for axis in names for digit in self._types.of_comm(comms[axis])}

    def _duty(self, digit: int, split: set[int], summed: set[int]) -> str:
        if digit in split:
            return "own gradient"
        if digit in summed:
            return "gradient averaged" if digit in self._averaged else "gradient summed"
        return "steps of its own" if digit in self._apart else "equal gradient"

    def _arrived(self, name: str, split: set[int], summed: set[int], gradient: torch.Tensor) -> None:
        types = self._types
        if types.is_paused or gradient.layout is not torch.strided:
            return
        kinds = types.kinds(gradient)
        operator, place = types.uses.get(name, ("", types.place()))
        for digit, kind in enumerate(kinds):
            fault = self._fault(digit, kind, split, summed)
            if fault:
                types.report(fault, [digit], operator, place, (name,))
        # What the row sums is a summand from here on, until a collective has summed it.
        is_summand = {digit for digit in summed - self._apart if kinds[digit] is not ZERO}
        is_summand -= {digit for digit in is_summand - self._averaged if kinds[digit] is REPLICATED}
        types.set(gradient, tuple(PARTIAL if n in is_summand else kind for n, kind in enumerate(kinds)), 1.0)

    def before_step(self) -> None:
        """Every gradient is reduced: over all axes that its row names, and divided by the ranks of averaged ones."""
        types = self._types
        averaged = self._averaged - self._apart if getattr(self._engine, "gradient_average", True) else ()
        mean = 1.0 / math.prod(types.digits[digit].size for digit in averaged)
        for group in (group for unit in self._units for group in unit.trained):
            gradient = group.gradient
            if gradient.is_left_partial or gradient.is_sparse or not any(gradient.has_grad):
                continue
            values = gradient.owned()
            kinds, factor = types.kinds(values), types.factor(values)
            names = tuple(name for name, has in zip(self._names[group], gradient.has_grad, strict=True) if has)
            missing = [digit for digit in self._summed(group) if kinds[digit] is PARTIAL]
            types.report(
                "its row sums the gradient, and no collective has before the step", missing, "", types.place(), names
            )
            if factor and not math.isclose(factor, mean, rel_tol=1e-3):
                what = (
                    f"the sum of the ranks' gradients is multiplied by {factor:.4g}, and their mean is {mean:.4g} of it"
                )
                types.report(what, sorted(self._averaged)[:1], "", types.place(), names)

    def _fault(self, digit: int, kind: Kind, split: set[int], summed: set[int]) -> str:
        if kind is ZERO or digit in self._apart:
            return ""
        if digit in split:
            if kind is PARTIAL:
                return (
                    "the gradient of a part is partial: a sum over the ranks is missing in the backward pass before it"
                )
        elif digit in summed:
            if kind is REPLICATED and digit not in self._averaged:
                return "the gradient is replicated, and its row sums it: it is counted once for each rank"
        elif kind is not REPLICATED:
            return (
                f"the gradient is {word(kind)}, and its row sums nothing: the ranks' copies drift apart. A sum over the"
                " ranks is missing, of this gradient or in the backward pass before it"
            )
        return ""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardInputs | None:
        groups = [group for unit in self._units for group in unit.groups]
        self._types.of_parameters = {storage_of(group.buffer.full) for group in groups}
        self._types.mark_inputs(args[2:] if self._types.is_stage else [args, kwargs])
        self._types.is_drawing = True
        return None

    def after_forward(self, output: Any) -> None:
        self._types.is_drawing = False

    def before_backward(self, loss: torch.Tensor) -> None:
        types = self._types
        types.losses.append((types.factor(loss), types.place()))
        kinds = types.kinds(loss)
        wrong = [digit for digit, kind in enumerate(kinds) if digit not in self._averaged and kind is not REPLICATED]
        for digit in wrong:
            types.report(
                f"the loss is {word(kinds[digit])} along an axis whose ranks compute one loss",
                [digit],
                "",
                types.place(),
            )

    def before_destroy(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _part(spec: ParameterSpec) -> Kind:
    """The dim along which a parameter is a part of a tensor."""
    pairs = zip(spec.shape, spec.global_shape, strict=False)
    dims = [dim for dim, (own, whole) in enumerate(pairs) if own != whole]
    return dims[0] if len(dims) == 1 else VARIES
