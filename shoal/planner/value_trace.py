"""What the steps of a run compute, as sketches: numbers that are close where values are close, in any layout.

A sketch of a tensor is the sum of its rows of 64 elements, each with a random sign: a linear map to 64 numbers. The
expected value of the squared norm of a difference of sketches is that of the difference of the tensors, so two runs are
compared without storing a tensor.
Source: Charikar, Chen, Farach-Colton, Finding frequent items in data streams (2002), section 3.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shoal.device import in_backward
from shoal.engine.parts.part import Part

Phase = Literal["forward", "loss", "gradient", "parameter"]
_WIDTH = 64


@dataclass(frozen=True)
class Value:
    """A tensor of a step. ``micro``: of all micro-batches of the step, of all ranks; None: of the whole step."""

    step: int
    phase: Phase
    name: str
    micro: int | None
    shape: tuple[int, ...]
    sketch: tuple[float, ...]

    @property
    def key(self) -> tuple[int, Phase, str, int | None]:
        return self.step, self.phase, self.name, self.micro


def sketch(tensor: torch.Tensor) -> tuple[float, ...]:
    """Memory: the tensor in float64. Order: blocks the host until its values are there."""
    flat = tensor.detach().reshape(-1).double()
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % _WIDTH)).view(-1, _WIDTH)
    signs = torch.randint(0, 2, (len(rows),), generator=torch.Generator().manual_seed(len(rows))) * 2 - 1
    return tuple((signs.to(rows) @ rows).tolist())


class ValueTrace(Part):
    """Records the outputs of layers and blocks, the losses, the reduced gradients and the updated parameters.

    Attributes:
        values: those of this rank, in the order in which they were computed.

    Communicates: what ``safe_get_full_grad`` and ``safe_get_full_fp32_param`` do, for each parameter and step.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._calls: Counter[str] = Counter()  # of the step, by name
        self._hooks: list[Any] = []
        self._engine: Any = None

    def prepare(self, engine: Any) -> None:
        self._engine = engine
        for name, module in engine.module.named_modules():
            is_block = name.rpartition(".")[2].isdecimal()  # in a ModuleList or a Sequential
            if is_block or next(iter(module.parameters(recurse=False)), None) is not None:
                self._hooks.append(module.register_forward_hook(self._watch(name)))

    def _watch(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            is_first = torch.is_grad_enabled() and not in_backward()  # not the evaluation, nor a recomputation
            if is_first and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self._add("forward", name, tensor, self._micro(name))

        return hook

    def _micro(self, name: str) -> int:
        """The number of the micro-batch that calls ``name`` now, among those of all ranks."""
        number = self._calls[name]
        self._calls[name] += 1
        batch = self._engine.axes.batch
        return int(number * batch.size + batch.rank)

    def _add(self, phase: Phase, name: str, tensor: torch.Tensor, micro: int | None = None) -> None:
        step = self._engine.global_steps + (phase != "parameter")
        self.values.append(Value(step, phase, name, micro, tuple(tensor.shape), sketch(tensor)))

    def before_backward(self, loss: torch.Tensor) -> None:
        self._add("loss", "loss", loss, self._micro("loss"))

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        homes = self._engine.sharding.model.home_of
        for parameter in self._engine.module.parameters():
            if self._engine.access.knows(parameter):
                group, slot = homes[id(parameter)]
                yield group.buffer.layout.specs[slot].name, parameter

    def before_step(self) -> None:
        for name, parameter in reversed(list(self._trained())):  # about the order of backward
            gradient = self._engine.access.full_gradient(parameter)
            if gradient is not None:
                self._add("gradient", name, gradient)

    def at_step(self, was_applied: bool) -> None:
        for name, parameter in self._trained():
            self._add("parameter", name, self._engine.access.full_parameter(parameter))
        self._calls.clear()

    def before_destroy(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def write(self, path: Path) -> None:
        path.write_text("".join(json.dumps(asdict(value)) + "\n" for value in self.values))


def read_values(path: Path) -> list[Value]:
    made = [json.loads(line) for line in path.read_text().splitlines()]
    return [Value(**{**each, "shape": tuple(each["shape"]), "sketch": tuple(each["sketch"])}) for each in made]
