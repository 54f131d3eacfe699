"""``load_hf``: fills a model from Hugging Face safetensors; each rank reads only the ranges that it keeps.

parameter                         what a rank reads of it
of shoal.zero.Init                its shard: one range of bytes
of a live engine, sharded         what it owns of the bucket: one range of bytes
any other                         all of it
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.formats.huggingface import SafetensorsWeights
from shoal.checkpoint.local_shards import ParameterSpec, local_rectangles
from shoal.checkpoint.rectangles import whole
from shoal.comm.world import current_world
from shoal.errors import CheckpointError, UsageError
from shoal.memory.bucket import ParameterBucket, stand_in
from shoal.zero.early import EARLY, EarlyShard
from shoal.zero.init import Init
from shoal.zero.registry import OWNERS, Owner

_MAX_LISTED = 20  # names of each kind of difference


@dataclass(frozen=True)
class _Home:
    """A tensor of the model and its names (several where it is tied)."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The global one, where the parameter is a part of a larger tensor."""
        owner = OWNERS.get(self.tensor)
        if owner is None:
            return tuple(self.tensor.shape)
        bucket, index = _bucket_of(self.tensor, owner)
        return ParameterSpec.of(bucket.layout.slots[index]).global_shape


def load_hf(
    model_or_config: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> nn.Module:
    """Fill a model with the weights in a folder of safetensors (or one such file, or an fsspec URL).

    Values are cast to the parameter's dtype. Tied weights are read once. A model may be built under ``shoal.zero.Init``
    or be trained by a live engine already, whose master weights are then set too. Names may lack the model's
    ``base_model_prefix``, or have it where the model does not.

    Args:
        model_or_config: a module, or a configuration of ``transformers``, whose model is built under
            ``shoal.zero.Init``.
        dtype: cast the model's parameters of floating point to it first; None: leave them as they are.
        strict: a name that is in only one of model and folder is an error. A shape that differs always is.

    Returns: the model.
    Raises: CheckpointError: the folder cannot be read, or differs from the model: every difference is listed, and the
        model is as it was. UsageError: a model on the meta device, or ``dtype`` for one that an engine holds.
    Communicates: nothing; every rank calls it and reads the same folder, so all find the same differences. Building
        from a configuration communicates as ``shoal.zero.Init`` does.
    Memory: the largest range that this rank reads, once in the file's dtype.
    """
    with SafetensorsWeights(folder) as weights:
        model = model_or_config if isinstance(model_or_config, nn.Module) else _build(model_or_config, dtype)
        parameters, buffers = _homes(model)
        _refuse(parameters, dtype)
        found = _matched(model, [*parameters, *buffers], weights, strict)
        with torch.no_grad():
            for home in parameters:
                name = found.get(home.names)
                if name is not None:
                    _fill(home.tensor, weights, name, dtype)
            for home in buffers:
                name = found.get(home.names)
                if name is not None:
                    home.tensor.copy_(weights.read(name))
    return model


def _homes(model: nn.Module) -> tuple[list[_Home], list[_Home]]:
    """Parameters, and the buffers that a ``state_dict`` has."""
    skipped = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key in module._non_persistent_buffers_set
    }
    buffers = [(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name not in skipped]
    return _by_tensor(model.named_parameters(remove_duplicate=False)), _by_tensor(buffers)


def _by_tensor(named: Iterable[tuple[str, torch.Tensor]]) -> list[_Home]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        tensors[id(tensor)] = tensor
        names.setdefault(id(tensor), []).append(name)
    return [_Home(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def _refuse(parameters: Sequence[_Home], dtype: torch.dtype | None) -> None:
    meta = [home.names[0] for home in parameters if home.tensor.is_meta]
    if meta:
        raise UsageError(
            f"{len(meta)} parameters are on the meta device, {meta[0]!r} for one, so there is nothing to fill.",
            do="build the model under shoal.zero.Init(), or give load_hf the configuration.",
            code="load-hf-meta",
        )
    owned = [home.names[0] for home in parameters if OWNERS.get(home.tensor) is not None]
    if owned and dtype is not None:
        raise UsageError(
            f"load_hf(dtype={dtype}): an engine holds {owned[0]!r}, and its dtypes come from the config.",
            do="leave dtype out; values are cast to what the engine has.",
            code="load-hf-dtype",
        )
    whole = next((owner for home in parameters if (owner := _gathered(home.tensor)) is not None), None)
    if whole is not None:
        raise UsageError(
            "load_hf inside GatheredParameters would be undone at the block's end.",
            do="call it outside of the block.",
            code="load-hf-gathered",
        )


def _gathered(parameter: torch.Tensor) -> Owner | None:
    owner = OWNERS.get(parameter)
    if owner is None:
        return None
    unit = owner.sharded.unit_of[id(parameter)]
    return owner if any(bucket.is_sharded and bucket.is_full for bucket in unit.buckets) else None


# names


def _matched(
    model: nn.Module, homes: Sequence[_Home], weights: SafetensorsWeights, strict: bool
) -> dict[tuple[str, ...], str]:
    """The name in the folder of each tensor of the model.

    Raises: CheckpointError: listing every difference.
    """
    rename = _renaming(model, homes, weights.tensors)
    found: dict[tuple[str, ...], str] = {}
    used: set[str] = set()
    missing, shapes = [], []
    for home in homes:
        present = [name for name in map(rename, home.names) if name in weights.tensors]
        used.update(present)
        if not present:
            missing.append(home.names[0])
            continue
        found[home.names] = present[0]
        theirs, ours = weights.tensors[present[0]].shape, home.shape
        if theirs != ours:
            shapes.append(f"{home.names[0]} is {list(theirs)} in the folder and {list(ours)} in the model")
    unexpected = [name for name in weights.tensors if name not in used]
    missing = _unignored(missing, model, "_keys_to_ignore_on_load_missing")
    unexpected = _unignored(unexpected, model, "_keys_to_ignore_on_load_unexpected")
    lines = _listed("shapes differ", shapes)
    if strict:
        lines = _listed("missing in the folder", missing) + _listed("not in the model", unexpected) + lines
    if lines:
        raise CheckpointError(
            f"the weights are of another model than {type(model).__name__}:{''.join(lines)}",
            where=weights.url,
            do="load a folder of this model; strict=False passes over names that are missing or not in the model.",
            code="checkpoint-mismatch",
        )
    return found


def _renaming(model: nn.Module, homes: Sequence[_Home], present: Mapping[str, object]) -> Callable[[str], str]:
    """From the model's names to the folder's. A base model's weights fit a model with a head, and the reverse."""
    prefix = vars(type(model)).get("base_model_prefix") or next(
        (vars(cls)["base_model_prefix"] for cls in type(model).__mro__ if vars(cls).get("base_model_prefix")), ""
    )
    names = [name for home in homes for name in home.names]
    choices: list[Callable[[str], str]] = [lambda name: name]
    if prefix:
        choices += [lambda name: name.removeprefix(f"{prefix}."), lambda name: f"{prefix}.{name}"]
    return max(choices, key=lambda choice: sum(choice(name) in present for name in names))


def _unignored(names: list[str], model: nn.Module, attribute: str) -> list[str]:
    """Without those that the model itself says do not matter (transformers' patterns)."""
    patterns = next((vars(cls)[attribute] for cls in type(model).__mro__ if vars(cls).get(attribute)), None) or ()
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _listed(title: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f"\n    and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return [f"\n  {title} ({len(names)}):" + "".join(f"\n    {name}" for name in names[:_MAX_LISTED]) + more]


# values


def _fill(parameter: torch.Tensor, weights: SafetensorsWeights, name: str, dtype: torch.dtype | None) -> None:
    early, owner = EARLY.get(parameter), OWNERS.get(parameter)
    wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    if early is not None:
        _fill_shard(parameter, early, weights, name, wanted)
    elif owner is not None:
        _fill_owned(parameter, owner, weights, name)
    else:
        value = weights.read(name)
        if wanted != parameter.dtype:
            parameter.data = value.to(parameter.device, wanted)
        else:
            parameter.copy_(value)


def _fill_shard(
    parameter: torch.Tensor, early: EarlyShard, weights: SafetensorsWeights, name: str, dtype: torch.dtype
) -> None:
    """The range of a parameter of ``zero.Init``, which shards over all ranks of the world."""
    length = early.shard.numel()
    begin = min(current_world().rank * length, early.numel)
    end = min(begin + length, early.numel)
    if dtype != early.dtype:
        early.shard, early.dtype = early.shard.to(dtype), dtype
        parameter.data = stand_in(tuple(early.shape), dtype, early.shard.device)
    early.shard[: end - begin].copy_(weights.read_range(name, begin, end))


def _fill_owned(parameter: torch.Tensor, owner: Owner, weights: SafetensorsWeights, name: str) -> None:
    assert isinstance(parameter, nn.Parameter)
    bucket, index = _bucket_of(parameter, owner)
    slot = bucket.layout.slots[index]
    spec = ParameterSpec.of(slot)
    is_trained = owner.access.knows(parameter)
    if not bucket.is_sharded:
        value = read_local(weights, name, spec, 0, slot.numel).view(slot.shape)
        if is_trained:
            owner.access.set_full_parameter(parameter, value)
        else:
            bucket.comm.drain()
            bucket.views[index].copy_(value)
        return
    low, high = max(slot.offset, bucket.begin), min(slot.offset + slot.numel, bucket.end)
    if low < high:
        value = read_local(weights, name, spec, low - slot.offset, high - slot.offset)
        if is_trained:
            owner.access.set_local_parameter(parameter, value)
        else:
            bucket.comm.drain()
            with bucket.shard_at_hand():
                bucket.shard[low - bucket.begin : high - bucket.begin].copy_(value)


def _bucket_of(parameter: torch.Tensor, owner: Owner) -> tuple[ParameterBucket, int]:
    """The bucket that holds a parameter, and the parameter's index in it."""
    unit = owner.sharded.unit_of[id(parameter)]
    return next(
        (bucket, index)
        for bucket in unit.buckets
        for index, member in enumerate(bucket.parameters)
        if member is parameter
    )


def read_local(weights: SafetensorsWeights, name: str, spec: ParameterSpec, begin: int, end: int) -> torch.Tensor:
    """Elements ``[begin, end)`` of the flattened local part of a tensor, 1-D. Only their bytes are read."""
    runs: list[tuple[int, int]] = []
    for _, rectangle in local_rectangles(spec, begin, end):
        for at, numel in whole(spec.global_shape).runs_of(rectangle):
            first = runs.pop()[0] if runs and runs[-1][1] == at else at
            runs.append((first, at + numel))
    values = [weights.read_range(name, *run) for run in runs or [(0, 0)]]
    return values[0] if len(values) == 1 else torch.cat(values)


# building


def _build(config: Any, dtype: torch.dtype | None) -> nn.Module:
    """The model of a configuration of ``transformers``, built under ``zero.Init``."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"load_hf got a {type(config).__name__}, and building a model from a configuration needs transformers.",
            do="pip install transformers, or build the model yourself under shoal.zero.Init() and pass it.",
            code="load-hf-transformers",
        ) from error
    if not isinstance(config, transformers.PretrainedConfig):
        raise UsageError(
            f"load_hf takes a module or a configuration of transformers, got a {type(config).__name__}.",
            do="pass the model, or AutoConfig.from_pretrained(folder).",
            code="load-hf-transformers",
        )
    build: Callable[[Any], nn.Module] = transformers.AutoModel.from_config
    for name in config.architectures or ():
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            build = cls
            break
    with Init(dtype=dtype):
        return build(config)
