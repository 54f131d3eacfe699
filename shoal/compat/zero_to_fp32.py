"""``deepspeed.utils.zero_to_fp32`` and ``zero_to_torch``: whole weights in one process.

They read Shoal's checkpoints and DeepSpeed's.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from shoal.checkpoint import tree
from shoal.checkpoint.formats import open_source
from shoal.checkpoint.formats.huggingface import write_huggingface
from shoal.checkpoint.formats.plain import write_plain
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.portable import About, Source, TensorInfo
from shoal.checkpoint.watched import nbytes_of, watched
from shoal.compat.checkpoint_files import model_file
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.errors import CheckpointError
from shoal.text import counted, format_bytes, parse_bytes

Place = str | os.PathLike[str]

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def _dtype(wanted: torch.dtype | str) -> torch.dtype:
    dtype = _DTYPES.get(str(wanted).removeprefix("torch.").lower())
    if dtype is None:
        raise ValueError(f"Unsupported output dtype {wanted!r}: take one of {', '.join(_DTYPES)}")
    return dtype


class _ExportedWeights:
    """The model's tensors of a source; with ``exclude_frozen`` without the frozen parameters."""

    def __init__(self, source: Source, *, exclude_frozen: bool) -> None:
        self.about: About = source.about
        self._source = source
        trained = self.about.group_of
        self._left_out = {name for name in self.about.parameters if exclude_frozen and trained and name not in trained}

    def kinds(self) -> Iterable[str]:
        return (MODEL,)

    def tensors(self, kind: str) -> Mapping[str, TensorInfo]:
        return {name: info for name, info in self._source.tensors(kind).items() if name not in self._left_out}

    def read(self, kind: str, name: str) -> torch.Tensor:
        return self._source.read(kind, name)


def _open(checkpoint_dir: Place, tag: str | None, *, exclude_frozen: bool) -> _ExportedWeights:
    try:
        source = open_source(checkpoint_dir, tag)
    except CheckpointError as error:
        if error.code != "checkpoint-unnamed":
            raise
        # Stage 0 of DeepSpeed's, whose main parameters have no names: only the model's own weights can be read.
        source = DeepSpeedSource(checkpoint_dir, tag, names=())
    return _ExportedWeights(source, exclude_frozen=exclude_frozen)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Place,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> OrderedDict[str, torch.Tensor]:
    """The model's ``state_dict`` with every floating-point value in fp32.

    Args:
        checkpoint_dir: what was given to ``save_checkpoint``, or a tag's folder in it. ``tag`` None: the newest.
        lazy_mode: no effect: whole tensors are returned.

    Raises: CheckpointError: it is missing or damaged. Memory: the whole model in fp32.
    """
    weights = _open(checkpoint_dir, tag, exclude_frozen=exclude_frozen_parameters)
    values: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name in weights.tensors(MODEL):
        value = weights.read(MODEL, name)
        values[name] = value.float() if value.is_floating_point() else value
        for other in weights.about.aliases.get(name, ()):
            values[other] = values[name]
    return values


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Place,
    output_dir: Place,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """``convert_zero_checkpoint_to_state_dict`` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Place,
    output_dir: Place,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights as a folder that Transformers loads.

    Args:
        dtype: of tensors of floating point: fp32, fp16 or bf16, as torch's or by name.
        output_dir: a folder; a name that ends in ``.bin``, ``.pt`` or ``.pth`` is one file. Files of the same names
            are replaced when the new ones are complete.
        max_shard_size: begin another file before one gets larger; of safetensors only.
        safe_serialization: safetensors in place of ``pytorch_model.bin``.

    Raises: CheckpointError: the checkpoint is missing or damaged. ValueError: another dtype. Memory: one tensor.
    """
    wanted = _dtype(dtype)
    opened = _open(checkpoint_dir, tag, exclude_frozen=exclude_frozen_parameters)
    target = Path(output_dir)
    if not safe_serialization and target.suffix not in (".bin", ".pt", ".pth"):
        target.mkdir(parents=True, exist_ok=True)
        target = target / "pytorch_model.bin"
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    size = f"{counted(len(opened.tensors(MODEL)), 'tensor')}, {format_bytes(nbytes_of(opened, [MODEL]))}"
    console.print(f"{checkpoint_dir}: {size}, written as {tree.name_of(wanted)}", markup=False)
    with watched(opened, [MODEL], console) as weights, _replaced(target) as place:
        if safe_serialization:
            most = _nbytes(max_shard_size) if max_shard_size is not None else float("inf")
            write_huggingface(weights, place, dtype=wanted, max_file_nbytes=most)
        else:
            write_plain(weights, place, wanted)
    console.print(f"wrote {target}", markup=False)


@contextmanager
def _replaced(target: Place) -> Iterator[Place]:
    """Where to write: the target; where that exists, a place next to it whose files replace the target's at the end."""
    if "://" in os.fspath(target) or not Path(target).exists():
        yield target
        return
    place = Path(target).resolve()
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as folder:
        new = Path(folder) / place.name
        yield new
        if new.is_dir():
            for file in new.iterdir():
                os.replace(file, place / file.name)
        else:
            os.replace(new, place)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Place, tag: str | None = None) -> nn.Module:
    """Put the fp32 weights into a model, on the CPU. Returns: the model.

    Raises: CheckpointError: as ``get_fp32_state_dict_from_zero_checkpoint``. RuntimeError: a shape differs.
    """
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(values, strict=False)
    return model


def get_model_state_file(checkpoint_dir: Place, zero_stage: int) -> str:
    """Rank 0's model file of a tag's folder. Raises: CheckpointError: it is not there."""
    return _files(checkpoint_dir, re.escape(model_file(int(zero_stage))))[0]


def get_model_state_files(checkpoint_dir: Place) -> list[str]:
    """Every model file of a tag's folder, by rank. Raises: CheckpointError: there is none."""
    return _files(checkpoint_dir, r".*_model_states\.pt")


def get_optim_files(checkpoint_dir: Place) -> list[str]:
    """Every optimizer file of a tag's folder, by rank. Raises: CheckpointError: there is none."""
    return _files(checkpoint_dir, r".*_optim_states\.pt")


class _NoFileError(CheckpointError, FileNotFoundError):
    """DeepSpeed raises FileNotFoundError here, and clients catch it."""


def _files(folder: Place, pattern: str) -> list[str]:
    place = Path(folder)
    names = [entry.name for entry in place.iterdir()] if place.is_dir() else []
    matches = sorted((name for name in names if re.fullmatch(pattern, name)), key=_by_number)
    if not matches:
        raise _NoFileError(
            f"no file {pattern.replace(chr(92), '')!r} is in {place}.",
            do="name a tag's folder of a checkpoint that was saved while Shoal had DeepSpeed's name.",
            code="checkpoint-missing",
        )
    return [str(place / name) for name in matches]


def _by_number(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _nbytes(size: str | int) -> int:
    nbytes = int(size) if str(size).isdigit() else parse_bytes(str(size))
    if nbytes is None:
        raise CheckpointError(f"{size!r} is no size.", do='write "5GB" or "500MB".', code="checkpoint-format")
    return nbytes


def main(arguments: Sequence[str] | None = None) -> None:
    """The command ``zero_to_fp32.py``."""
    given = _parser("Write the fp32 weights of a checkpoint of Shoal's or DeepSpeed's.").parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(**_keywords(given))


def main_to_torch(arguments: Sequence[str] | None = None) -> None:
    """The command ``zero_to_torch.py``."""
    parser = _parser("Write the weights of a checkpoint of Shoal's or DeepSpeed's.")
    parser.add_argument("--dtype", default="fp32", choices=list(_DTYPES), help="of tensors of floating point")
    given = parser.parse_args(arguments)
    convert_zero_checkpoint_to_state_dict(**_keywords(given), dtype=given.dtype)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoint_dir", help="what was given to save_checkpoint")
    parser.add_argument("output_dir", help="the folder to write to")
    parser.add_argument("--max_shard_size", default="5GB", help="of one safetensors file")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors in place of pytorch_model.bin")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint; the newest where left out")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    return parser


def _keywords(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "checkpoint_dir": given.checkpoint_dir,
        "output_dir": given.output_dir,
        "max_shard_size": given.max_shard_size,
        "safe_serialization": given.safe_serialization,
        "tag": given.tag,
        "exclude_frozen_parameters": given.exclude_frozen_parameters,
    }


if __name__ == "__main__":
    main()
