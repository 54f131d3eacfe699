"""Brings parameters into being as their unit is built:

from ordinary tensors, from the meta device, or from the shards that ``zero.Init`` made.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.errors import ModelError
from shoal.zero.early import EARLY


class Materializer:
    """Gives each parameter its value when it is asked for.

    Modules on the meta device are made and initialised in module order, so that the random numbers fall as if the
    model had been built directly.
    """

    def __init__(self, model: nn.Module, device: torch.device, comm: Communicator) -> None:
        self._model = model
        self._device = device
        self._comm = comm
        self._modules = list(model.named_modules())
        self._next = 0
        self.born_sharded: set[int] = set()  # ids of parameters that came from zero.Init or the meta device
        self._position: dict[str, int] = {}
        seen: set[int] = set()
        owner: dict[int, int] = {}
        for index, (_, module) in enumerate(self._modules):
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    owner[id(parameter)] = index
        for name, parameter in model.named_parameters():
            self._position[name] = owner[id(parameter)]

    def module_positions(self) -> dict[str, int]:
        """For each parameter the position of its module: units are filled in the order of their last one."""
        return self._position

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        return parameter.dtype

    def copy_value(self, name: str, parameter: nn.Parameter, target: torch.Tensor) -> None:
        """Write the parameter's value into ``target``.

        Raises: ModelError: it is on the meta device and its module cannot initialise itself.
        Communicates: for a parameter of ``zero.Init``, one all_gather of it.
        """
        early = EARLY.get(parameter)
        if early is not None:
            self.born_sharded.add(id(parameter))
            target.copy_(early.whole())
            EARLY.pop(parameter)
            return
        if parameter.is_meta:
            self.born_sharded.add(id(parameter))
            while self._next <= self._position[name]:
                self._materialize(*self._modules[self._next])
                self._next += 1
        target.copy_(parameter.data)

    def _materialize(self, name: str, module: nn.Module) -> None:
        tensors = itertools.chain(module._parameters.items(), module._buffers.items())
        missing = [key for key, tensor in tensors if tensor is not None and tensor.is_meta]
        if not missing:
            return
        for key in missing:
            parameter = module._parameters.get(key)
            if parameter is not None:
                # The same Parameter object goes on, so that optimizer groups and tied modules still hold it. Tensors
                # of the
                # meta device refuse `.data = ...`.
                made = nn.Parameter(torch.empty_like(parameter, device=self._device), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, made)
            else:
                module._buffers[key] = torch.empty_like(module._buffers[key], device=self._device)  # type: ignore[arg-type]
        initialise = getattr(module, "reset_parameters", None)
        if initialise is None and hasattr(self._model, "_init_weights"):
            hint: Any = self._model._init_weights
            if not any(module._buffers.get(key) is not None for key in missing):

                def initialise() -> None:
                    hint(module)

        if initialise is None:
            raise ModelError(
                f"module {name or type(self._model).__name__!r} ({type(module).__name__}) is on the meta device"
                f" and has no reset_parameters(), so {', '.join(repr(key) for key in missing)} cannot be given values.",
                do="add reset_parameters() to it, or build the model under shoal.zero.Init() in place of"
                " torch.device('meta').",
                code="model-meta",
            )
        with torch.no_grad():
            initialise()

    def finish(self, buffer_dtype: torch.dtype | None) -> None:
        """Materialize what no parameter asked for, move buffers to the device, cast and broadcast them."""
        if any(t.is_meta for t in itertools.chain(self._model.parameters(), self._model.buffers())):
            while self._next < len(self._modules):
                self._materialize(*self._modules[self._next])
                self._next += 1
        for module in self._model.modules():
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                dtype = buffer_dtype if buffer_dtype is not None and buffer.is_floating_point() else buffer.dtype
                moved = buffer.to(self._device, dtype)
                if moved.numel() and self._comm.size > 1:
                    flat = moved.detach().reshape(-1).clone()
                    sent = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
                    self._comm.broadcast(sent, 0, label="buffers").drain()
                    moved = flat.view(buffer.shape)
                module._buffers[key] = moved
