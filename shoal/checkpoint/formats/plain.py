"""A plain ``state_dict``: one file of ``torch.save``, or several with an index, as Hugging Face wrote in its time.

model.pt                                                {"layers.0.weight": tensor, ...}
model.pt                                                {"state_dict": {...}, "epoch": 3, ...}
pytorch_model-00001-of-00002.bin, ..., pytorch_model.bin.index.json

``write_weights`` writes one too, of tensors that are in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.blocks import TensorEntry, plan_file, write_plan
from shoal.checkpoint.formats.huggingface import cast_dtypes
from shoal.checkpoint.formats.target import new_file
from shoal.checkpoint.formats.torch_file import load
from shoal.checkpoint.formats.torch_file_writing import write_tensors
from shoal.checkpoint.formats.untrusted_files import UntrustedFolder, check_name
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.portable import Source, TensorInfo, WeightsSource
from shoal.checkpoint.problems import damaged_copy
from shoal.checkpoint.storage import LocalStorage, Storage
from shoal.errors import CheckpointError

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
_NESTED = ("state_dict", "model_state_dict", "model", "module")
_MAX_INDEX_NBYTES = 64 << 20


class PlainSource(WeightsSource):
    """A file that ``torch.save`` made of a ``state_dict`` (or of a dict with one in it), or a folder of such files.

    Files are mapped, so a tensor is read when it is asked for. Tensors that share their memory are one tensor with
    several names.

    Raises: CheckpointError: no such file, it asks for more than tensors, or no ``state_dict`` is in it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, tuple[str, ...]] = {}
        first: dict[tuple[object, ...], str] = {}
        notes: list[str] = []
        for file in _files(path):
            for name, tensor in _state_dict(load(file), str(file), notes).items():
                identity = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
                same = first.setdefault(identity, name) if tensor.numel() else name
                if same != name:
                    aliases[same] = (*aliases.get(same, ()), name)
                else:
                    self._tensors[name] = tensor
        infos = {name: TensorInfo(value.dtype, tuple(value.shape)) for name, value in self._tensors.items()}
        super().__init__(infos, os.fspath(path), aliases, notes)

    def read(self, kind: str, name: str) -> torch.Tensor:
        assert kind == MODEL, kind
        return self._tensors[name].contiguous()


def _files(path: str | os.PathLike[str]) -> list[Path]:
    place = Path(path).expanduser()
    if not place.is_dir():
        return [place]
    folder = UntrustedFolder(place)
    assert isinstance(folder.storage, LocalStorage)
    present = folder.names()
    if INDEX in present:
        try:
            named = sorted(set(json.loads(folder.read(INDEX, _MAX_INDEX_NBYTES))["weight_map"].values()))
            for name in named:
                check_name(name, f"{INDEX} in {place}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged_copy(f"{INDEX} cannot be read: {type(error).__name__}: {error}.", str(place)) from error
    else:
        named = [SINGLE]
    result = []
    for name in named:
        with folder.open(name):  # it is there, and no link out of the folder
            result.append((place / name).resolve())
    return result


def _state_dict(content: Any, where: str, notes: list[str]) -> dict[str, torch.Tensor]:
    if isinstance(content, Mapping):
        for key in _NESTED:
            if isinstance(content.get(key), Mapping) and any(_is_tensor(v) for v in content[key].values()):
                left = [str(other) for other in content if other != key]
                if left:
                    notes.append(f"the file holds {', '.join(map(repr, left))} beside {key!r}; left out.")
                content = content[key]
                break
        result = {name: value for name, value in content.items() if isinstance(name, str) and _is_tensor(value)}
        if result:
            left = [str(name) for name in content if name not in result]
            if left:
                notes.append(f"{', '.join(map(repr, left[:5]))} in the state_dict: not a plain tensor; left out.")
            return result
    raise CheckpointError(
        f"there is no state_dict in it, but a {type(content).__name__}"
        + (f" with {', '.join(repr(key) for key in list(content)[:5])}" if isinstance(content, Mapping) else "")
        + ".",
        where=where,
        do=f"save model.state_dict(), or a dict with it under {', '.join(map(repr, _NESTED))}.",
        code="checkpoint-format",
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized


def write_plain(source: Source, path: str | os.PathLike[str], dtype: torch.dtype | None = torch.float32) -> None:
    """Write the model's tensors as ``torch.save(model.state_dict())`` would. With the default dtype they are
    the master weights; every name of a tied weight is there.

    Args:
        path: the file.
        dtype: cast tensors of floating point to it; None: the dtype that the model computes in.

    Raises: CheckpointError: it is there already, or a tensor has a dtype that the format lacks.
    Memory: one tensor.
    """
    chosen = cast_dtypes(source, dtype)
    tensors = {name: TensorInfo(chosen[name], info.shape) for name, info in source.tensors(MODEL).items()}

    def read(name: str) -> torch.Tensor:
        return source.read(MODEL, name).to(chosen[name])

    with new_file(path) as sink:
        write_tensors(sink, tensors, read, source.about.aliases)


_TORCH_SUFFIXES = (".bin", ".pt", ".pth")


def write_weights(
    storage: Storage, name: str, values: Mapping[str, torch.Tensor], aliases: Mapping[str, tuple[str, ...]]
) -> None:
    """Write ``values`` to ``name`` in ``storage``; a file of that name is replaced once the new one is complete.

    Args:
        name: with a suffix of torch's (``.bin``, ``.pt``, ``.pth``) in torch's format, else safetensors.
        aliases: further names of a tensor. safetensors has each tensor once: there the metadata says
            ``{further name: name}``, as ``safetensors.torch.save_model`` writes it.
    """
    inside = Path(name).parent.as_posix()
    storage.make_folder("" if inside == "." else inside)
    with storage.replacing(name) as sink:
        if Path(name).suffix in _TORCH_SUFFIXES:
            infos = {key: TensorInfo(value.dtype, tuple(value.shape)) for key, value in values.items()}
            write_tensors(sink, infos, values.__getitem__, aliases)
        else:
            entries = [TensorEntry(key, v.dtype, tuple(v.shape), partial(_flat, v)) for key, v in values.items()]
            metadata = {"format": "pt"} | {alias: key for key, names in aliases.items() for alias in names}
            write_plan(sink, plan_file(entries, metadata))


def _flat(value: torch.Tensor) -> tuple[torch.Tensor]:
    return (value.reshape(-1),)
