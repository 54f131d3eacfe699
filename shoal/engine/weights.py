"""The weights alone: whole values by name, to and from the host, and as one file."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shoal.checkpoint.blocks import TensorEntry, plan_file, write_file
from shoal.checkpoint.formats.torch_writing import write_tensors
from shoal.checkpoint.local_shards import LocalShards, buffers_of, names_of
from shoal.checkpoint.portable import TensorInfo
from shoal.checkpoint.problems import agree
from shoal.checkpoint.storage import Storage, open_storage
from shoal.errors import CheckpointError

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

_TORCH_SUFFIXES = (".bin", ".pt", ".pth")


def local_shards_of(engine: Engine) -> LocalShards:
    """What this rank holds of an engine's model and optimizer."""
    return LocalShards(engine.sharded, engine.trained_groups, engine._optimizer_step, engine.axes)


class Weights:
    """The weights of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = cast(Any, weakref.proxy(engine))

    def with_whole_parameters(self, use: Callable[[], Any]) -> Any:
        """Run ``use`` while every parameter is whole; what it writes into them counts, on every rank alike."""
        engine = self._engine
        with engine.sharded.gathered(engine.sharded.sharded):
            result = use()
            with torch.no_grad():
                for bucket, group in local_shards_of(engine).buckets():
                    if group is not None:
                        group.update_main(0, bucket.end - bucket.begin, bucket.full[bucket.begin : bucket.end])
                    bucket.write_back()
        return result

    def module_state_dict(self, *, exclude_frozen: bool, is_kept: bool = True) -> dict[str, Any]:
        """Whole values by name, on the host, on every rank.

        Args:
            is_kept: False: this rank only takes part in gathering, and its values are of no use.

        Communicates: where parameters are sharded, an all_gather of each unit, in turn.
        Memory: the whole model on the host, and one unit on the device.
        """
        engine = self._engine
        engine.sharded.finish_backward()
        values: dict[str, torch.Tensor] = {}
        names = names_of(engine.module)[0]
        for unit in engine.sharded.units:
            with engine.sharded.gathered([unit] if unit.is_sharded else []):
                for bucket in [group.buffer for group in unit.groups]:
                    if exclude_frozen and not any(p.requires_grad for p in bucket.parameters):
                        continue
                    for parameter in bucket.parameters if is_kept else ():
                        values[names[id(parameter)]] = parameter.detach().to("cpu", copy=True)
        found: dict[str, Any] = {}
        buffers = buffers_of(engine.module)
        first = dict(engine.module.named_parameters(remove_duplicate=False))
        for name, parameter in first.items():
            if names[id(parameter)] in values:
                found[name] = values[names[id(parameter)]]
        found |= {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}
        return found

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any], *, is_strict: bool, custom_load_fn: Callable[..., Any] | None
    ) -> None:
        """Set the model's values from whole ones, the same on every rank. Master weights follow."""
        engine = self._engine
        module: nn.Module = engine.module
        if custom_load_fn is not None:
            self.with_whole_parameters(lambda: custom_load_fn(src=state_dict, dst=module))
            return
        own = {**dict(module.named_parameters(remove_duplicate=False)), **buffers_of(module)}
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own and not name.endswith("_extra_state")]
        shapes = [
            f"{name} {list(state_dict[name].shape)}, the model has {list(tensor.shape)}"
            for name, tensor in own.items()
            if name in state_dict and tuple(state_dict[name].shape) != tuple(tensor.shape)
        ]
        problems = [f"of another shape: {'; '.join(shapes[:8])}"] if shapes else []
        if is_strict:
            problems += [f"missing: {', '.join(missing[:8])}"] if missing else []
            problems += [f"unexpected: {', '.join(unexpected[:8])}"] if unexpected else []
        if problems:
            raise CheckpointError(
                f"the state_dict is not one of this model; {'; '.join(problems)}.",
                do="pass the values of this model; strict=False takes what fits.",
                code="checkpoint-mismatch",
            )
        done: set[int] = set()
        with torch.no_grad():
            for name, tensor in own.items():
                if name not in state_dict or id(tensor) in done:
                    continue
                done.add(id(tensor))
                if isinstance(tensor, nn.Parameter) and engine.access.knows(tensor):
                    engine.access.set_full_parameter(tensor, state_dict[name].to(engine.device))
                elif isinstance(tensor, nn.Parameter):
                    self._set_frozen(tensor, state_dict[name])
                else:
                    tensor.copy_(state_dict[name])

    def _set_frozen(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        group, slot = self._engine.sharded.home_of[id(parameter)]
        buffer, part = group.buffer, group.buffer.owned_part(slot)
        buffer.comm.drain()
        flat = value.reshape(-1).to(buffer.full.device, buffer.dtype)
        if not buffer.is_sharded:
            buffer.views[slot].copy_(flat.view(buffer.layout.specs[slot].shape))
        elif part is not None:
            with buffer.resident_shard():
                buffer.shard[part.start : part.stop] = flat[part.offset : part.offset + part.stop - part.start]

    def save(self, folder: str | os.PathLike[str], name: str, *, exclude_frozen: bool) -> bool:
        """Write them, in the parameters' dtype, as one file; rank 0 writes.

        The file is safetensors, or for a name that ends in ``.bin``, ``.pt`` or ``.pth`` what ``torch.save`` of the
        ``state_dict`` gives. A file of that name is replaced once the new one is whole.
        """
        engine = self._engine
        comm = engine.axes.world
        values = self.module_state_dict(exclude_frozen=exclude_frozen)
        problem: Exception | None = None
        if comm.rank == 0:
            aliases = names_of(engine.module)[1]
            others = {alias for names in aliases.values() for alias in names}
            once = {key: value for key, value in values.items() if key not in others}
            try:
                _write(open_storage(folder), name, once, aliases)
            except CheckpointError as error:
                problem = error
            except OSError as error:
                problem = CheckpointError(
                    f"the weights were not written: {type(error).__name__}: {error}.",
                    where=f"{name} in {folder}",
                    do="older files are as they were; mend the cause and save again.",
                    code="checkpoint-write",
                )
        agree(comm, problem, None, "checkpoint: weights")
        return True


def _flat(value: torch.Tensor) -> tuple[torch.Tensor]:
    return (value.reshape(-1),)


def _write(
    storage: Storage, name: str, values: Mapping[str, torch.Tensor], aliases: Mapping[str, tuple[str, ...]]
) -> None:
    inside = Path(name).parent.as_posix()
    storage.make_folder("" if inside == "." else inside)
    staging = f"{name}.tmp-{secrets.token_hex(6)}" if storage.can_rename else name
    if not storage.can_rename:
        storage.remove(name)
    try:
        if Path(name).suffix in _TORCH_SUFFIXES:
            infos = {key: TensorInfo(value.dtype, tuple(value.shape)) for key, value in values.items()}
            with storage.create(staging) as sink:
                write_tensors(sink, infos, values.__getitem__, aliases)
                sink.flush()
        else:
            entries = [TensorEntry(key, v.dtype, tuple(v.shape), partial(_flat, v)) for key, v in values.items()]
            write_file(storage, "", staging, plan_file(entries))
        if staging != name:
            storage.move_over(staging, name)
    except BaseException:
        storage.remove(staging)
        raise
