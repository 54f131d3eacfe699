"""The weights alone: unsharded values by name, copied to the host, set from it, or saved as one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.formats.plain import write_weights
from shoal.checkpoint.local_shards import buffers_of, named_parameters_of, names_of
from shoal.checkpoint.problems import agree
from shoal.checkpoint.storage import open_storage
from shoal.engine.over_stages import aliases_of, joined_values, names_elsewhere
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import CheckpointError
from shoal.sharding.parts import cut, gather_parts
from shoal.sharding.unit import Unit


class Weights:
    """The weights of one engine."""

    def __init__(self, sharding: Sharding, properties: Properties) -> None:
        self._sharding = sharding
        self._module = sharding.module
        self._comm = properties.axes.world
        self._names = properties.axes.other_names
        self._device = properties.device.torch_device

    def with_gathered_parameters(self, use: Callable[[], Any]) -> Any:
        """Run ``use`` while every parameter is gathered; it writes the same values into them on every rank."""
        model = self._sharding.model
        with model.gathered(model.sharded):
            result = use()
            with torch.no_grad():
                for group in model.groups:
                    buffer = group.buffer
                    if group.is_trained:
                        group.update_main(0, buffer.owned_numel, buffer.full[buffer.begin : buffer.end])
                    buffer.write_back()
        self._restore_kept()
        return result

    def _restore_kept(self) -> None:
        """The weights were set: what groups keep for their next steps follows them."""
        for group in self._sharding.groups:
            for kept in group.kept:
                kept.restore()

    def module_state_dict(self, *, exclude_frozen: bool, is_kept: bool = True, prefix: str = "") -> dict[str, Any]:
        """Unsharded values by name, on the host, on every rank.

        Args:
            is_kept: False: this rank takes part in the gathering and returns no values.

        Communicates: where parameters are sharded, an all_gather of each unit, in turn; an all_reduce of each parameter
            that tensor-parallel or expert-parallel ranks have in parts;
            a broadcast of each value that some ranks do not have (of another pipeline stage, of other experts).
        Memory: the whole model on the host, and one unit on the device.
        """
        model = self._sharding.model
        model.finish_backward()
        values: dict[str, torch.Tensor] = {}
        names = names_of(self._module)[0]
        for unit in model.units:
            with model.gathered([unit] if unit.is_sharded else []), self._exact(unit):
                for group in unit.groups:
                    if exclude_frozen and not any(p.requires_grad for p in group.parameters):
                        continue
                    for spec, parameter in zip(group.buffer.layout.specs, group.parameters, strict=True):
                        value = parameter.detach()
                        if group.axes.parts is not None and spec.is_part:
                            value = gather_parts(value, spec, group.axes.parts)
                        if is_kept or self._names is not None:
                            values[names[id(parameter)]] = value.to("cpu", copy=True)
        result: dict[str, Any] = {}
        buffers = {name: b.detach().to("cpu", copy=True) for name, b in buffers_of(self._module).items()}
        if self._names is not None:
            whole = joined_values(self._names, values | buffers, self._device, is_kept=is_kept)
            first_of = {other: name for name, others in self.aliases().items() for other in others}
            for name in (*whole, *first_of):
                if first_of.get(name, name) in whole:
                    result[f"{prefix}{name}"] = whole[first_of.get(name, name)]
            return result
        for name, parameter in named_parameters_of(self._module, remove_duplicate=False):
            if names[id(parameter)] in values:
                result[f"{prefix}{name}"] = values[names[id(parameter)]]
        return result | {f"{prefix}{name}": buffer for name, buffer in buffers.items()}

    @contextmanager
    def _exact(self, unit: Unit) -> Iterator[None]:
        """Inside the block parameters are what main parameters round to, where a format of gathers leaves less.

        Communicates: of parameters that are stored whole, an all_gather.
        Memory: there, a copy of the unit inside the block.
        """
        groups = [group for group in unit.groups if group.is_trained and group.row.needs_main]
        sent = [group.buffer.full.clone() for group in groups]
        try:
            for group in groups:
                group.publish(is_exact=True)
            yield
        finally:
            with torch.no_grad():
                for group, values in zip(groups, sent, strict=True):
                    group.buffer.full.copy_(values)

    def aliases(self) -> dict[str, tuple[str, ...]]:
        """The other names of tied weights, by the first name. Communicates: names, between pipeline stages."""
        return aliases_of(self._names, self._module)

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any], *, is_strict: bool, custom_load_fn: Callable[..., Any] | None
    ) -> None:
        """Set the model's values, and the main parameters, from unsharded values that are the same on every rank."""
        module = self._module
        if custom_load_fn is not None:
            self.with_gathered_parameters(lambda: custom_load_fn(src=state_dict, dst=module))
            return
        tensors = {**dict(named_parameters_of(module, remove_duplicate=False)), **buffers_of(module)}
        home_of = self._sharding.model.home_of
        specs = {key: group.buffer.layout.specs[slot] for key, (group, slot) in home_of.items()}
        shape_of = {
            name: specs[id(tensor)].global_shape if id(tensor) in specs else tuple(tensor.shape)
            for name, tensor in tensors.items()
        }
        missing = [name for name in tensors if name not in state_dict]
        known = {*tensors, *names_elsewhere(self._names, module)}
        unexpected = [name for name in state_dict if name not in known and not name.endswith("_extra_state")]
        shapes = [
            f"{name} {list(state_dict[name].shape)}, the model has {list(shape)}"
            for name, shape in shape_of.items()
            if name in state_dict and tuple(state_dict[name].shape) != shape
        ]
        problems = [f"of another shape: {'; '.join(shapes[:8])}"] if shapes else []
        if is_strict:
            problems += [f"missing: {', '.join(missing[:8])}"] if missing else []
            problems += [f"unexpected: {', '.join(unexpected[:8])}"] if unexpected else []
        if problems:
            raise CheckpointError(
                f"the state_dict does not fit this model; {'; '.join(problems)}.",
                do="pass the values of this model; strict=False loads what fits.",
                code="checkpoint-mismatch",
            )
        done: set[int] = set()
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name not in state_dict or id(tensor) in done:
                    continue
                done.add(id(tensor))
                if isinstance(tensor, nn.Parameter):
                    self._set(tensor, cut(state_dict[name].to(self._device), specs[id(tensor)]).reshape(-1))
                else:
                    tensor.copy_(state_dict[name])
        self._restore_kept()

    def _set(self, parameter: nn.Parameter, flat: torch.Tensor) -> None:
        self._sharding.access.load(parameter, lambda start, stop: flat[start:stop])

    def save(self, folder: str | os.PathLike[str], name: str, *, exclude_frozen: bool) -> bool:
        """Write them, in the parameters' dtype, as one file; rank 0 writes.

        The file is safetensors, or for a name that ends in ``.bin``, ``.pt`` or ``.pth`` what ``torch.save`` of the
        ``state_dict`` gives. A file of that name is replaced when the new one is complete.
        """
        comm = self._comm
        values, aliases = self.module_state_dict(exclude_frozen=exclude_frozen), self.aliases()
        problem: Exception | None = None
        if comm.rank == 0:
            others = {alias for names in aliases.values() for alias in names}
            once = {key: value for key, value in values.items() if key not in others}
            try:
                write_weights(open_storage(folder), name, once, aliases)
            except CheckpointError as error:
                problem = error
            except OSError as error:
                problem = CheckpointError(
                    f"the weights were not written: {type(error).__name__}: {error}.",
                    where=f"{name} in {folder}",
                    do="older files are unchanged; fix the cause and save again.",
                    code="checkpoint-write",
                )
        agree(comm, problem, None, "checkpoint: weights")
        return True
