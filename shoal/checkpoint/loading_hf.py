"""``load_hf``: fills a model from Hugging Face safetensors; each rank reads the ranges that it keeps, nothing else.

parameter                         what a rank reads of it
of shoal.zero.Init                its shard: one range of bytes
of a live engine, sharded         what it owns of the buffer: one range of bytes
split over tensor parallel ranks  its part: ranges of bytes, or of rows where it is split by columns
of experts                        those that it holds
any other                         all of it

Experts that the folder has one by one are stacked where the model has them so.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.access.engine_parameters import EngineParameters
from shoal.access.init import Init, suspended
from shoal.checkpoint.formats.huggingface import SafetensorsWeights
from shoal.checkpoint.formats.model_weights import DEQUANTIZE, DequantizedWeights, ExpertWeights
from shoal.checkpoint.reader import reported
from shoal.checkpoint.tree import name_of
from shoal.comm.world import current_world
from shoal.errors import CheckpointError, UsageError
from shoal.mesh import Mesh
from shoal.optional import import_optional
from shoal.parallel.expert.held import global_names, modules_with_experts
from shoal.pipeline.cut import CutModel
from shoal.pipeline.stage import StageModule
from shoal.running.parameter_owner import OWNERS
from shoal.running.sharded_at_init import ShardedAtInit
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parts import read_part
from shoal.text import counted, listed

logger = logging.getLogger("shoal")

_MAX_LISTED = 20  # names of each kind of difference


@dataclass(frozen=True)
class _Home:
    """A tensor of the model: its names (several where it is tied), and whether a gradient can reach it."""

    names: tuple[str, ...]
    tensor: torch.Tensor


def load_hf(
    model_or_config: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    parts: Mapping[str, ParameterSpec] | None = None,
) -> nn.Module:
    """Fill a model with the weights in a folder of safetensors (or one such file, or an fsspec URL).

    Values are cast to the parameter's dtype; quantised ones (fp8, mxfp4) are dequantised. Tied weights are read once. A
    model may be built under ``shoal.zero.Init`` or be trained by a live engine already, whose main parameters are then
    set too. Names may lack the model's ``base_model_prefix``, or have it where the model does not, or be old ones that
    Transformers renames. Of a model in pipeline stages each rank fills its own.

    Args:
        model_or_config: a module, or a configuration of ``transformers``, whose model is built under
            ``shoal.zero.Init``.
        dtype: cast the model's floating-point parameters to it first; None: keep their dtype.
        strict: raise for a name that is in only one of model (all its pipeline stages) and folder; False: rank 0 logs a
            warning. A different shape always raises.
        parts: of a model that ``shoal.parallel.tensor`` has split: the ``parts`` of what ``parallelize`` returned, or
            what ``parallelize_grid`` returned. Those of a live engine's model are known.

    Returns: the model.
    Raises: CheckpointError: the folder cannot be read, is quantised in a format that is not read, or differs from the
        model: every difference is listed, and the model is as it was. UsageError: a model on the meta device, or
        ``dtype`` for one that an engine holds.
    Communicates: of pipeline stages, the names that differ; else nothing, since every rank calls it and reads the same
        folder, so all find the same differences. Building from a configuration communicates as ``shoal.zero.Init``
        does; inside an open context of it, parameters that code has accessed are broadcast first.
    Memory: the largest range that this rank reads, once in the file's dtype; of quantised weights also once in fp32.
    """
    with suspended(), SafetensorsWeights(folder) as stored:
        given = model_or_config if isinstance(model_or_config, nn.Module) else _build(model_or_config, dtype)
        model = _stages_of(given) or given
        parameters, buffers = _homes(model)
        names = [name for home in (*parameters, *buffers) for name in home.names]
        whole = model.whole_model if isinstance(model, CutModel) else model
        weights = ExpertWeights(DequantizedWeights(stored), names, _library_renaming(whole, names))
        _refuse(parameters, dtype)
        known = {**_parts_of_engines(parameters), **(parts or {})}
        matches = _matched(model, [*parameters, *buffers], weights, strict, known)
        with torch.no_grad():
            for home in reported(parameters, f"reading weights of {folder}"):
                name = matches.get(home.names)
                if name is not None:
                    _fill(home.tensor, weights, name, dtype, known.get(home.names[0]))
            for home in buffers:
                name = matches.get(home.names)
                if name is not None:
                    home.tensor.copy_(weights.read(name))
    _remove_quantization(model)
    return given


def _stages_of(model: nn.Module) -> CutModel | None:
    """This rank's pipeline stages of a model that a live engine has cut; None: none has."""
    owners = (OWNERS.get(parameter) for parameter in model.parameters())
    owner = next((owner for owner in owners if isinstance(owner, EngineParameters)), None)
    stages = None if owner is None else getattr(owner.engine, "module", None)
    return stages if isinstance(stages, CutModel) and stages.whole_model is model else None


def _remove_quantization(model: nn.Module) -> None:
    """Remove ``quantization_config`` from the model's configuration: its parameters are not quantised."""
    config = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        if hasattr(each, "__dict__"):
            vars(each).pop("quantization_config", None)


def _parts_of_engines(homes: Sequence[_Home]) -> dict[str, ParameterSpec]:
    """By the first name, the parts of parameters that engines have split over tensor-parallel ranks."""
    owners = ((home, OWNERS.get(home.tensor)) for home in homes)
    specs = {home.names[0]: owner.spec_of(home.tensor) for home, owner in owners if isinstance(owner, EngineParameters)}
    return {name: spec for name, spec in specs.items() if spec.is_part}


def _homes(model: nn.Module) -> tuple[list[_Home], list[_Home]]:
    """Parameters, and the buffers that a ``state_dict`` has."""
    skipped = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key in module._non_persistent_buffers_set
    }
    buffers = [(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name not in skipped]
    rename = global_names(model)
    named = [(rename(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    return _by_tensor(named), _by_tensor((rename(name), buffer) for name, buffer in buffers)


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
    owned = [home.names[0] for home in parameters if isinstance(OWNERS.get(home.tensor), EngineParameters)]
    if owned and dtype is not None:
        raise UsageError(
            f"load_hf(dtype={dtype}): an engine holds {owned[0]!r}, and its dtypes come from the config.",
            do="leave dtype out; values are cast to the engine's dtypes.",
            code="load-hf-dtype",
        )
    if any(_is_gathered(home.tensor) for home in parameters):
        raise UsageError(
            "load_hf inside GatheredParameters would be undone at the block's end.",
            do="call it outside of the block.",
            code="load-hf-gathered",
        )


def _is_gathered(parameter: torch.Tensor) -> bool:
    owner = OWNERS.get(parameter)
    return owner is not None and owner.is_sharded(parameter) and owner.state_of(parameter) != "sharded"


# names


def _matched(
    model: nn.Module,
    homes: Sequence[_Home],
    weights: ExpertWeights,
    strict: bool,
    parts: Mapping[str, ParameterSpec],
) -> dict[tuple[str, ...], str]:
    """The name in the folder of each tensor of the model. Raises: CheckpointError: listing every difference."""
    whole = model.whole_model if isinstance(model, CutModel) else model
    rename = _choose(_prefix_changes(whole), homes, weights.tensors)
    matches: dict[tuple[str, ...], str] = {}
    used: set[str] = set()
    missing, shapes = [], []
    narrow: list[tuple[_Home, torch.dtype]] = []
    for home in homes:
        present = [name for name in map(rename, home.names) if name in weights.tensors]
        used.update(present)
        if not present:
            missing.append(home.names[0])
            continue
        matches[home.names] = present[0]
        part = parts.get(home.names[0])
        ours = tuple(home.tensor.shape) if part is None else part.global_shape
        stored = weights.tensors[present[0]]
        if stored.shape != ours:
            shapes.append(f"{home.names[0]} is {list(stored.shape)} in the folder and {list(ours)} in the model")
        narrow.append((home, stored.dtype))
    is_elsewhere = _experts_elsewhere(model)
    unexpected = [name for name in weights.tensors if name not in used and not is_elsewhere(name)]
    kept, left_out = list(missing), list(unexpected)
    missing = _unignored(missing, whole, "_keys_to_ignore_on_load_missing")
    unexpected = _unignored(unexpected, whole, "_keys_to_ignore_on_load_unexpected")
    if isinstance(model, StageModule):
        comm = current_world().communicator("world", Mesh.of(current_world().size), max_ctas=0)
        left = [stored for name in unexpected for stored in weights.stored_names(name)]
        every = comm.gather_objects([missing, shapes, left], label="load_hf: names")
        missing, shapes = (list(dict.fromkeys(n for each in every for n in each[kind])) for kind in (0, 1))
        unexpected = [name for name in left if all(name in each[2] for each in every)]
        kept, left_out = missing, unexpected
    lines = _listed("shapes differ", shapes)
    skipped = _listed("missing in the folder", missing) + _listed("not in the model", unexpected)
    if strict:
        lines = skipped + lines
    elif skipped and current_world().rank == 0:
        logger.warning("load_hf(strict=False) skips names of %s:%s", weights.url, "".join(skipped))
    if lines:
        raise CheckpointError(
            f"the weights are of another model than {type(model).__name__}:{''.join(lines)}",
            where=weights.url,
            do="load a folder of this model; strict=False skips names that are missing or not in the model.",
            code="checkpoint-mismatch",
        )
    for home, dtype in narrow:
        _check_dtype(home, dtype, weights.url)
    if current_world().rank == 0:
        done = [f"loaded {counted(len(matches), 'tensor')} of {type(whole).__name__} from {weights.url}"]
        done += [f"{len(kept)} of the model keep their values: {listed(kept)}"] if kept else []
        done += [f"{len(left_out)} of the folder are left out: {listed(left_out)}"] if left_out else []
        logger.info("%s.", "; ".join(done))
    return matches


def _check_dtype(home: _Home, stored: torch.dtype, url: str) -> None:
    """Raises: CheckpointError: values of a quantised parameter that have no scales, or integers."""
    is_narrow = stored.itemsize == 1 or not (stored.is_floating_point or stored.is_complex)
    ours = home.tensor.dtype
    if is_narrow and isinstance(home.tensor, nn.Parameter) and ours.is_floating_point and ours.itemsize > 1:
        raise CheckpointError(
            f"{home.names[0]!r} is {name_of(stored)} in the folder, without scales that Shoal knows, and"
            f" {name_of(ours)} in the model.",
            where=url,
            do=DEQUANTIZE,
            code="checkpoint-quantized",
        )


def _prefix_changes(model: nn.Module) -> list[Callable[[str], str]]:
    """From the model's names to the folder's. A base model's weights fit a model with a head, and the reverse."""
    prefix = vars(type(model)).get("base_model_prefix") or next(
        (vars(cls)["base_model_prefix"] for cls in type(model).__mro__ if vars(cls).get("base_model_prefix")), ""
    )
    if not prefix:
        return [str]
    return [str, lambda name: name.removeprefix(f"{prefix}."), lambda name: f"{prefix}.{name}"]


def _choose(
    choices: Sequence[Callable[[str], str]], homes: Sequence[_Home], present: Mapping[str, object]
) -> Callable[[str], str]:
    names = [name for home in homes for name in home.names]
    return max(choices, key=lambda choice: sum(choice(name) in present for name in names))


def _library_renaming(model: nn.Module, names: Sequence[str]) -> Callable[[str], str]:
    """How Transformers renames what old folders have, where the model has the new name and not the old one."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return str
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # Transformers 4 has the names of its folders
        return str
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    known = {choice(name) for name in names for choice in _prefix_changes(model)}

    def rename(name: str) -> str:
        new = name
        for renaming in renamings:
            new = renaming.rename_source_key(new)[0]
        return new if new in known and name not in known else name

    return rename


def _experts_elsewhere(model: nn.Module) -> Callable[[str], bool]:
    """True for a name in the folder of an expert in a list whose other experts this rank holds."""
    lists = {name: held for name, _, held in modules_with_experts(model) if held.form == "listed"}

    def is_elsewhere(name: str) -> bool:
        for prefix, held in lists.items():
            match = re.search(rf"(?:^|\.){re.escape(prefix)}\.(\d+)\.", name)
            if match and int(match[1]) < held.num_experts:
                return int(match[1]) not in held.ids
        return False

    return is_elsewhere


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


def _fill(
    parameter: torch.Tensor,
    weights: ExpertWeights,
    name: str,
    dtype: torch.dtype | None,
    part: ParameterSpec | None,
) -> None:
    owner = OWNERS.get(parameter)

    offset = None if part is None else _first_element(part)

    def read() -> torch.Tensor:
        return weights.read(name) if part is None else read_part(part, partial(weights.read_range, name))

    def read_range(begin: int, end: int) -> torch.Tensor:
        if part is None:
            return weights.read_range(name, begin, end)
        if offset is not None:
            return weights.read_range(name, offset + begin, offset + end)
        return read().view(-1)[begin:end]

    wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    if owner is not None:
        assert isinstance(parameter, nn.Parameter)
        if isinstance(owner, ShardedAtInit) and wanted != parameter.dtype:
            owner.cast(parameter, wanted)
        owner.load(parameter, read_range)
    elif wanted != parameter.dtype:
        parameter.data = read().to(parameter.device, wanted)
    else:
        parameter.copy_(read())


def _first_element(part: ParameterSpec) -> int | None:
    """Where a part begins in the flattened tensor, if its elements are neighbours there: rows, as those of experts."""
    is_whole = [own == ((0, size),) for own, size in zip(part.local, part.global_shape, strict=True)]
    if not part.local or len(part.local[0]) != 1 or not all(is_whole[1:]):
        return None
    return part.local[0][0][0] * math.prod(part.global_shape[1:])


# building


def _build(config: Any, dtype: torch.dtype | None) -> nn.Module:
    """The model of a configuration of ``transformers``, built under ``zero.Init``."""
    user, otherwise = f"load_hf of a {type(config).__name__}", "build the model under shoal.zero.Init() and pass it"
    transformers = import_optional("transformers", user, "transformers", otherwise, code="load-hf-transformers")
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
