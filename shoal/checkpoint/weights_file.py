"""Writes whole tensors by name as one file, atomically: safetensors, or what ``torch.save`` writes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from shoal.checkpoint.blocks import TensorEntry, plan_file, write_file
from shoal.checkpoint.formats.torch_writing import write_tensors
from shoal.checkpoint.portable import TensorInfo
from shoal.checkpoint.storage import Storage

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
            metadata = {"format": "pt"} | {alias: key for key, names in aliases.items() for alias in names}
            write_file(storage, "", staging, plan_file(entries, metadata))
        if staging != name:
            storage.move_over(staging, name)
    except BaseException:
        storage.remove(staging)
        raise


def _flat(value: torch.Tensor) -> tuple[torch.Tensor]:
    return (value.reshape(-1),)
