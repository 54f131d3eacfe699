"""Brings parameters into being as their unit is built.

They come from ordinary tensors, from the meta device, or from the shards that ``zero.Init`` made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.errors import ModelError
from shoal.zero.parameter_access import ParameterAccessMode
from shoal.zero.parameter_owner import OWNERS
from shoal.zero.sharded_at_init import ChunkedTransfer, ShardedAtInit


class Materializer:
    """Gives each parameter its value when it is asked for.

    Modules on the meta device are made and initialised in module order, so that the random numbers fall as if the
    model had been built directly.

    Args:
        is_sharded: no rank has room for the whole model.
    """

    def __init__(self, model: nn.Module, device: torch.device, comm: Communicator, *, is_sharded: bool) -> None:
        self._model = model
        self._device = device
        self._comm = comm
        self.transfer = ChunkedTransfer(comm, device)
        self._is_sharded = is_sharded and comm.size > 1
        self._modules = list(model.named_modules())
        self._next = 0
        self._initialisers: dict[int, Callable[[nn.Module], Any]] = {
            id(module): initialise
            for _, module in self._modules
            if callable(initialise := getattr(module, "_init_weights", None))
        }
        self.sharded_at_init: set[int] = set()  # ids of parameters that came from zero.Init or the meta device
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

    def copy_value(self, name: str, parameter: nn.Parameter, target: torch.Tensor) -> bool:
        """Write the parameter's value into ``target``.

        Returns: have all ranks written the same?
        Raises: ModelError: it is on the meta device and its module cannot initialise itself.
        Communicates: for a parameter that is sharded already (``zero.Init``), one all_gather of it.
        """
        if parameter.is_meta:
            self.sharded_at_init.add(id(parameter))
            self._materialize_up_to(self._position[name])
        owner = OWNERS.get(parameter)
        if not isinstance(owner, ShardedAtInit):
            target.copy_(parameter.data)
            return False
        self.sharded_at_init.add(id(parameter))
        owner.hand_over(parameter, target)
        return True

    def _materialize_up_to(self, position: int) -> None:
        if self._initialisers and not self._next:
            self._materialize_with_initialisers()
            self._next = len(self._modules)
        while self._next <= position:
            name, module = self._modules[self._next]
            self._check_filled(name, module, self._make(name, module))
            self._next += 1

    def _materialize_with_initialisers(self) -> None:
        """Initialise a model in which some module has ``_init_weights``, as Hugging Face does: every module by
        itself, then, children first, by the nearest module around it that has one.

        An initialiser may set parameters of the modules below (a residual projection by depth, say), so what has been
        made stays within its reach to the end: where no rank has room for the model, as shards, which are made whole
        when they are touched.

        Communicates: then a broadcast of each parameter as it is made, and an all_gather and a broadcast of what an
            initialiser touches.
        Memory: the whole model; or its shards and the parameters of one module, or of one initialiser.
        """
        came_as_meta = {id(parameter) for parameter in self._model.parameters() if parameter.is_meta}
        unfilled: dict[int, tuple[str, nn.Module, str, int]] = {}  # by id of the tensor

        def check(parameter: nn.Parameter) -> None:
            if id(parameter) in unfilled and not _is_unfilled(parameter, unfilled[id(parameter)][3]):
                del unfilled[id(parameter)]

        at_init = ShardedAtInit(self.transfer, before_release=check) if self._is_sharded else None
        is_made: set[int] = set()
        for name, module in self._modules:
            for key, version in self._make(name, module).items():
                tensor = _tensor_of(module, key)
                is_made.add(id(module))
                if _is_unfilled(tensor, version):
                    unfilled[id(tensor)] = (name, module, key, version)
                if at_init is not None and isinstance(tensor, nn.Parameter):
                    at_init.shard(tensor)
        seen: set[int] = set()

        def visit(module: nn.Module, initialise: Callable[[nn.Module], Any] | None) -> None:
            if id(module) in seen:
                return
            seen.add(id(module))
            initialise = self._initialisers.get(id(module), initialise)
            for child in module.children():
                visit(child, initialise)
            below = [id(parameter) in came_as_meta for parameter in module.parameters()]
            if initialise is None or not (id(module) in is_made or (below and all(below))):
                return
            if at_init is None:
                initialise(module)
                return
            with ParameterAccessMode(at_init.gather_accessed):
                initialise(module)
            at_init.release_accessed()

        with torch.no_grad():
            visit(self._model, None)
        for name, module, key, version in unfilled.values():
            self._check_filled(name, module, {key: version})

    def _make(self, name: str, module: nn.Module) -> dict[str, int]:
        """Give the module's own tensors memory, and let it initialise itself.

        Returns: the tensors that were on the meta device, each with its version before anything was written to it.
        """
        tensors = itertools.chain(module._parameters.items(), module._buffers.items())
        missing = [key for key, tensor in tensors if tensor is not None and tensor.is_meta]
        if not missing:
            return {}
        for key in missing:
            parameter = module._parameters.get(key)
            if parameter is not None:
                # The same Parameter object goes on, so that optimizer groups and tied modules still hold it. Tensors
                # of the meta device refuse `.data = ...`.
                made = nn.Parameter(torch.empty_like(parameter, device=self._device), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, made)
            else:
                module._buffers[key] = torch.empty_like(_tensor_of(module, key), device=self._device)
        before = {}
        for key in missing:
            tensor = _tensor_of(module, key)
            if tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))  # to find what nobody fills
            before[key] = tensor._version
        initialise = getattr(module, "reset_parameters", None)
        if initialise is not None:
            with torch.no_grad():
                initialise()
        return before

    def _check_filled(self, name: str, module: nn.Module, before: dict[str, int]) -> None:
        empty = [key for key, version in before.items() if _is_unfilled(_tensor_of(module, key), version)]
        if empty:
            raise ModelError(
                f"module {name or type(self._model).__name__!r} ({type(module).__name__}) is on the meta device and"
                f" neither its reset_parameters() nor an _init_weights() of a module around it gives a value to"
                f" {', '.join(map(repr, empty))}.",
                do="give it a reset_parameters() that does, or build the model under shoal.zero.Init() in place of"
                " torch.device('meta').",
                code="model-meta",
            )

    def finish(self, formats: Mapping[str, torch.dtype]) -> None:
        """Materialize what no parameter asked for, move buffers to the device, cast and broadcast them.

        Args:
            formats: of the buffers that are cast, by full name.
        """
        if any(t.is_meta for t in itertools.chain(self._model.parameters(), self._model.buffers())):
            self._materialize_up_to(len(self._modules) - 1)
        for name, module in self._model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                moved = buffer.to(self._device, formats.get(f"{name}.{key}" if name else key, buffer.dtype))
                if moved.numel() and self._comm.size > 1:
                    flat = moved.detach().reshape(-1).clone()
                    sent = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
                    self._comm.broadcast(sent, 0, label="buffers").drain()
                    moved = flat.view(buffer.shape)
                module._buffers[key] = moved
        self.transfer.free()


def _tensor_of(module: nn.Module, key: str) -> torch.Tensor:
    tensor = module._parameters.get(key) if key in module._parameters else module._buffers[key]
    assert tensor is not None
    return tensor


def _is_unfilled(tensor: torch.Tensor, version: int) -> bool:
    """Did nothing write to the tensor since ``version``? Writes through ``.data`` leave the version as it was."""
    if tensor._version != version or not tensor.numel():
        return False
    return not tensor.is_floating_point() or bool(tensor.detach().isnan().any())
