"""Gives each parameter its value when its unit is built, and each buffer its value and format.

A parameter's value comes from an ordinary tensor, from an initialiser (meta device), or from the shards that
``zero.Init`` made.
"""

from __future__ import annotations

import inspect
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from shoal.build.plan import ModuleAsBuilt
from shoal.comm.protocol import Communicator
from shoal.device import is_fake
from shoal.errors import ModelError
from shoal.running.parameter_access import ParameterAccessMode
from shoal.running.parameter_owner import OWNERS
from shoal.running.sharded_at_init import ChunkedTransfer, ShardedAtInit
from shoal.sharding.axes import Axes
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parts import cut


class Materializer:
    """Copies each parameter's value to its buffer.

    Modules on the meta device are allocated and initialised in module order, so that each gets the same random numbers
    as if the model had been built directly.

    Args:
        specs: of each parameter, by name.
        is_sharded: parameters are sharded (stage 3), so the whole model may not fit on a rank.
        whole: the modules of the whole model, where ``model`` is a part of it: those of other parts draw their random
            numbers too, and are freed.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        axes: Axes,
        specs: Mapping[str, ParameterSpec],
        *,
        is_sharded: bool,
        whole: Sequence[ModuleAsBuilt] = (),
    ) -> None:
        comm = axes.data
        self._parts = {name: spec for name, spec in specs.items() if spec.is_divided}
        self._model = model
        self._device = device
        self._comm = comm
        self.transfer = ChunkedTransfer(comm, device)
        self._transfers = {comm.axis: self.transfer}
        self._is_sharded = is_sharded and comm.size > 1
        self._not_over_comm = {
            id(parameter)
            for name, parameter in model.named_parameters()
            if axes.data_axes(specs[name]) is not axes.dense
        }
        self._whole = whole
        self._as_built_parameters: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._modules = list(model.named_modules())
        self._own = {id(module) for _, module in self._modules}
        self._own_parameters = {id(parameter) for parameter in model.parameters()}
        if whole:
            self._own.add(id(whole[0].module))  # the model that was cut has the children and parameters of its stages
            known = {id(each.module) for each in whole} | {id(model)}
            self._modules = [(each.name, each.module) for each in whole] + [
                (name, module) for name, module in self._modules if id(module) not in known
            ]
        self._next = 0
        self._initialisers: dict[int, Callable[[nn.Module], Any]] = {
            id(module): initialise
            for _, module in self._modules
            if callable(initialise := getattr(module, "_init_weights", None))
        }
        self._has_lora = any(hasattr(module, "reset_lora_parameters") for _, module in self._modules)
        self.came_as_meta = {id(parameter) for parameter in model.parameters() if parameter.is_meta}
        # Of parameters of other stages copies are made, tied as they are, since they themselves may have weakrefs.
        copies: dict[int, nn.Parameter] = {}
        for each in whole:
            for key, parameter in each.parameters.items():
                if id(parameter) not in self._own_parameters:
                    copies.setdefault(id(parameter), nn.Parameter(parameter.detach(), parameter.requires_grad))
                    parameter = copies[id(parameter)]
                    self.came_as_meta.add(id(parameter))
                self._as_built_parameters.append((each.module, key, parameter))
                if id(each.module) not in self._own:
                    each.module._parameters[key] = parameter
        self._unmade = set(self.came_as_meta)
        self.sharded_at_init: set[int] = set()  # ids of parameters that came from zero.Init or the meta device
        first: dict[int, int] = {}  # position of the first module that has the parameter
        for index, (_, module) in enumerate(self._modules):
            for tensor in module._parameters.values() if id(module) in self._own else ():
                first.setdefault(id(tensor), index)
        # The position of each parameter's module. Units are filled in the order of their last module.
        self.positions = {name: first[id(parameter)] for name, parameter in model.named_parameters()}

    def transfer_over(self, comm: Communicator) -> ChunkedTransfer:
        """What copies parameters between the ranks of ``comm``, until :meth:`finish`."""
        if comm.axis not in self._transfers:
            self._transfers[comm.axis] = ChunkedTransfer(comm, self._device)
        return self._transfers[comm.axis]

    def copy_value(self, name: str, parameter: nn.Parameter, target: torch.Tensor) -> bool:
        """Copy the parameter's value to ``target``.

        Returns: True if it is the same on all ranks.
        Raises: ModelError: it is on the meta device and its module cannot initialise itself.
        Communicates: all_gathers of a parameter that ``zero.Init`` has sharded.
        """
        if parameter.is_meta:
            self.sharded_at_init.add(id(parameter))
            self._materialize_up_to(self.positions[name])
        owner = OWNERS.get(parameter)
        if not isinstance(owner, ShardedAtInit):
            target.copy_(parameter.data)
            return False
        self.sharded_at_init.add(id(parameter))
        owner.hand_over(parameter, target, self._parts.get(name))
        return True

    def _materialize_up_to(self, position: int) -> None:
        if (self._initialisers or self._has_lora) and not self._next:
            with self._as_built() as model:
                self._materialize_with_initialisers(model)
            self._next = len(self._modules)
        while self._next <= position:
            name, module = self._modules[self._next]
            made = self._make(name, module)
            if id(module) in self._own:
                self._check_filled(name, module, made)
            self._free_of_others(module, made)
            self._next += 1

    def _free_of_others(self, module: nn.Module, names: Iterable[str]) -> None:
        if id(module) not in self._own:
            _free(module, [name for name in names if id(_tensor_of(module, name)) not in self._own_parameters])

    @contextmanager
    def _as_built(self) -> Iterator[nn.Module]:
        """Inside the block, the model has the modules and ties of all pipeline stages, on the meta device."""
        now = [(each, dict(each.module._modules), dict(each.module._parameters)) for each in self._whole]
        for each in self._whole:
            each.module._modules.clear()
            each.module._modules.update(each.children)
        for module, key, parameter in self._as_built_parameters:
            module._parameters[key] = parameter
        try:
            yield self._whole[0].module if self._whole else self._model
        finally:
            for each, children, parameters in now:
                tables: Any = ((each.module._modules, children), (each.module._parameters, parameters))
                for table, before in tables:
                    table.clear()
                    table.update(before)

    def _materialize_with_initialisers(self, model: nn.Module) -> None:
        """Initialise a model of which a module has ``_init_weights``, as Hugging Face does.

        Each module runs its own ``reset_parameters``. Then, children first, the nearest module around it that has
        ``_init_weights`` initialises it. That may set parameters of modules further below (a residual projection, by
        depth), so all parameters stay available until the end: at stage 3 as shards, which an access gathers.

        Of a model that is split over tensor-parallel or expert-parallel ranks, each draws other numbers for its parts.
        Modules and parameters of other pipeline stages get memory while they are initialised, so that all stages draw
        the numbers of one process.

        Communicates: at stage 3, a broadcast of each parameter after it was allocated, and an all_gather and a
            broadcast of each parameter that an initialiser accesses.
        Memory: the whole model, or this rank's pipeline stages of it and the parameters of one module, or of one
            initialiser; at stage 3, of those the shards and this rank's experts.
        """
        unfilled: dict[int, tuple[str, nn.Module, str, int]] = {}  # by id of the tensor

        def check(parameter: nn.Parameter) -> None:
            if id(parameter) in unfilled and not _is_unfilled(parameter, unfilled[id(parameter)][3]):
                del unfilled[id(parameter)]

        at_init = ShardedAtInit(self.transfer, before_release=check) if self._is_sharded else None
        is_made: set[int] = set()
        for name, module in self._modules:
            made = self._make(name, module)
            is_made.update([id(module)] if made else [])
            self._free_of_others(module, made)
            for key, version in made.items():
                tensor = _tensor_of(module, key)
                if tensor.is_meta:
                    continue
                if _is_unfilled(tensor, version):
                    unfilled[id(tensor)] = (name, module, key, version)
                if at_init is not None and isinstance(tensor, nn.Parameter) and id(tensor) not in self._not_over_comm:
                    at_init.shard(tensor)
        seen: set[int] = set()
        of_others: list[nn.Parameter] = []

        def on_access(parameter: nn.Parameter) -> None:
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=self._device)
                _replace(parameter, nn.Parameter(empty, parameter.requires_grad))
                of_others.append(parameter)
            elif at_init is not None:
                at_init.gather_accessed(parameter)

        def visit(module: nn.Module, initialise: Callable[[nn.Module], Any] | None) -> None:
            if id(module) in seen:
                return
            seen.add(id(module))
            initialise = self._initialisers.get(id(module), initialise)
            for child in module.children():
                visit(child, initialise)
            below = [id(parameter) in self.came_as_meta for parameter in module.parameters()]
            calls: list[Callable[[], Any]] = []
            if initialise is not None and (id(module) in is_made or (below and all(below))):
                calls = [partial(initialise, module)]
            calls += self._lora_resets(module, configs)
            if not calls:
                return
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_meta:  # of which trunc_normal_ returns at once
                    on_access(parameter)
            with ParameterAccessMode(on_access) if at_init is not None or self._whole else nullcontext():
                for call in calls:
                    call()
            for parameter in of_others:
                _replace(parameter, nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad))
            of_others.clear()
            if at_init is not None:
                at_init.release_accessed()

        configs = next((c for m in model.modules() if isinstance(c := getattr(m, "peft_config", None), dict)), {})
        parts = sorted((name, spec.local) for name, spec in self._parts.items())
        with torch.random.fork_rng(enabled=bool(parts)), torch.no_grad():
            if parts:
                torch.manual_seed(torch.initial_seed() + zlib.crc32(repr(parts).encode()))
            visit(model, None)
        for name, module, key, version in unfilled.values():
            self._check_filled(name, module, {key: version})

    def _lora_resets(self, module: Any, configs: Mapping[str, Any]) -> list[Callable[[], Any]]:
        """What gives the adapters of a LoRA layer of PEFT's, which came on the meta device, their values.

        ``reset_parameters()`` of their matrices gives other ones.
        """
        found: list[Callable[[], Any]] = []
        reset: Any = getattr(module, "reset_lora_parameters", None)
        for adapter, config in configs.items() if reset is not None else ():
            matrices = (module.lora_A, module.lora_embedding_A)
            owned = [p for own in matrices for name, p in own.named_parameters() if name.split(".")[0] == adapter]
            if any(id(parameter) in self.came_as_meta for parameter in owned):
                given = (adapter, getattr(config, "init_lora_weights", True))  # AdaLoRA's takes the name alone
                found.append(partial(reset, *given[: len(inspect.signature(reset).parameters)]))
        return found

    def _make(self, name: str, module: nn.Module) -> dict[str, int]:
        """Allocate the module's own tensors, and call its ``reset_parameters``.

        Returns: the tensors that were on the meta device, each with its version before the first write.
        """
        tensors = itertools.chain(module._parameters.items(), module._buffers.items())
        missing = [
            key
            for key, tensor in tensors
            if tensor is not None and tensor.is_meta and (key in module._buffers or id(tensor) in self._unmade)
        ]
        self._unmade.difference_update(id(_tensor_of(module, key)) for key in missing)
        if not missing:
            return {}
        # Made whole where the module initialises itself: its bounds may depend on the shape, and all ranks draw alike.
        specs = {key: self._parts.get(f"{name}.{key}" if name else key) for key in missing}
        whole = {key: spec for key, spec in specs.items() if spec is not None and not self._initialisers}
        for key in missing:
            parameter = module._parameters.get(key)
            if parameter is not None:
                # Keep the Parameter object, since optimizer groups and tied modules hold it. Tensors of the meta device
                # refuse `.data = ...`.
                spec = whole.get(key)
                empty = torch.empty_like(parameter, device=self._device)
                if spec is not None:
                    empty = torch.empty(spec.global_shape, dtype=parameter.dtype, device=self._device)
                made = nn.Parameter(empty, parameter.requires_grad)
                _replace(parameter, made)
            else:
                module._buffers[key] = torch.empty_like(_tensor_of(module, key), device=self._device)
        before = {}
        for key in missing:
            tensor = _tensor_of(module, key)
            if tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))  # to find tensors that stay unfilled
            before[key] = tensor._version
        initialise = getattr(module, "reset_parameters", None)
        if initialise is not None:
            with torch.no_grad():
                initialise()
        for key, spec in whole.items():
            tensor = _tensor_of(module, key)
            tensor.data = cut(tensor.data, spec).clone()  # does not change the version
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
        """Materialize the remaining modules; move buffers to the device, cast and broadcast them.

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
                    self._comm.blocking.broadcast(sent, 0, label="buffers")
                    moved = flat.view(buffer.shape)
                module._buffers[key] = moved
        for transfer in self._transfers.values():
            transfer.free()


def _tensor_of(module: nn.Module, key: str) -> torch.Tensor:
    tensor = module._parameters.get(key) if key in module._parameters else module._buffers[key]
    assert tensor is not None
    return tensor


def _replace(tensor: torch.Tensor, made: nn.Parameter) -> None:
    """Give ``tensor``, which stays the same object, the memory of ``made``."""
    for fake in (tensor, made):
        if isinstance(fake, FakeTensor):  # torch swaps no tensor to which a dry run's records have a weak reference
            converter = fake.fake_mode.fake_tensor_converter.meta_converter
            for key in [key for key, known in converter.tensor_memo.items() if known is fake]:
                del converter.tensor_memo[key]
            converter.describer.lookup_tensor.pop(tensor, None)  # of a model that was made before the dry run
    torch.utils.swap_tensors(tensor, made)


def _is_unfilled(tensor: torch.Tensor, version: int) -> bool:
    """True if nothing has written to the tensor since ``version``. Writes through ``.data`` do not change it."""
    if tensor._version != version or not tensor.numel() or is_fake(tensor):
        return False
    return not tensor.is_floating_point() or bool(tensor.detach().isnan().any())


def _free(module: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        tensor = _tensor_of(module, name)
        empty = torch.empty_like(tensor, device="meta")
        if name in module._parameters:
            _replace(tensor, nn.Parameter(empty, tensor.requires_grad))
        else:
            module._buffers[name] = empty


# Buffers: which format each one with floating-point values has, where the model's parameters are 16-bit.
#
#     buffer                                                                  format
#     named by the model (transformers' _keep_in_fp32_modules_strict, and     fp32
#     under fp16 _keep_in_fp32_modules too), or by a list in their place
#     any, where data_types.buffer_dtype is set                               that
#     statistics of a batch or instance norm                                  the parameters': torch's kernels want one
#     any other                                                               its own
#
# A buffer's rounding is not made up for by master weights: rotary frequencies, or the routing biases of a mixture, are
# other numbers in bf16. ``*`` in a name is any text, and a name fits anywhere in a buffer's full name.

_NARROW = (torch.float16, torch.bfloat16)


def buffer_formats(
    model: nn.Module,
    parameter: torch.dtype | None,
    buffer: torch.dtype | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, torch.dtype]:
    """The format of each buffer that is to be cast, by its full name.

    Args:
        parameter: what parameters are cast to; None: nothing.
        buffer: what buffers are to be cast to; None: nothing.
        names: of buffers that stay in fp32, in place of those that the modules name; None: theirs.
    """
    stays_wide = _wide_names(model, parameter, names)
    formats: dict[str, torch.dtype] = {}
    for module, name, value in _floating_buffers(model):
        if stays_wide(name):
            if value.dtype in _NARROW:
                formats[name] = torch.float32
        elif buffer is not None:
            formats[name] = buffer
        elif parameter is not None and isinstance(module, _NormBase):
            formats[name] = parameter
    return formats


def widen(model: nn.Module, parameter: torch.dtype | None, names: Sequence[str] | None = None) -> None:
    """Turn buffers that stay in fp32, and are in a 16-bit format, into fp32, in place. Arguments as above."""
    stays_wide = _wide_names(model, parameter, names)
    for _, name, value in _floating_buffers(model):
        if value.dtype in _NARROW and stays_wide(name):
            value.data = value.data.float()


def _floating_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, value in module._buffers.items():
            if value is not None and value.is_floating_point():
                yield module, f"{prefix}.{key}" if prefix else key, value


def _wide_names(model: nn.Module, parameter: torch.dtype | None, names: Sequence[str] | None) -> Callable[[str], bool]:
    """What is true of the full names of buffers that stay in fp32."""
    patterns: list[tuple[str, re.Pattern[str]]] = []  # each with the prefix below which it counts

    def add(prefix: str, listed: Iterable[str]) -> None:
        patterns.extend((prefix, re.compile(".*".join(map(re.escape, name.split("*"))))) for name in listed)

    if parameter in _NARROW and names is not None:
        add("", names)
    elif parameter in _NARROW:
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            add(prefix, getattr(module, "_keep_in_fp32_modules_strict", None) or ())
            if parameter == torch.float16:
                add(prefix, getattr(module, "_keep_in_fp32_modules", None) or ())
    return lambda full: any(full.startswith(p) and pattern.search(full.removeprefix(p)) for p, pattern in patterns)
