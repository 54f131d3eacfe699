"""Checkpoints and weights of others, each read as a ``Source``, and found out by what lies there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from shoal.checkpoint.portable import Source
from shoal.checkpoint.storage import Storage, open_storage
from shoal.errors import CheckpointError

Format = Literal["shoal", "deepspeed", "huggingface", "state_dict", "dcp"]
_DEEPSPEED = re.compile(r"(mp_rank_\d+|(bf16_)?zero_pp_rank_\d+_mp_rank_\d+|layer_\d+.*)_(model|optim)_states\.pt")


def detect(path: str | os.PathLike[str]) -> Format:
    """The format of a file or folder, by the names in it.

    Raises: CheckpointError: nothing is there, or nothing that Shoal knows.
    """
    text = os.fspath(path)
    if "://" not in text and not Path(text).expanduser().exists():
        raise CheckpointError(f"{text} is not there.", do="name a file or folder.", code="checkpoint-missing")
    if "://" not in text and Path(text).expanduser().is_file():
        return _of_file(Path(text).expanduser())
    if text.endswith(".safetensors"):
        return "huggingface"
    found = _of_folder(open_storage(text))
    if found is None:
        names = open_storage(text).names()
        raise CheckpointError(
            f"{text} is of no format that Shoal knows: it holds"
            f" {', '.join(map(repr, names[:6])) + (' ...' if len(names) > 6 else '') if names else 'nothing'}.",
            do="name a Shoal or DeepSpeed checkpoint, a folder of safetensors, one of torch.distributed.checkpoint, or"
            " a file of torch.save.",
            code="checkpoint-format",
        )
    return found


def _of_file(path: Path) -> Format:
    if path.name.endswith(".safetensors"):
        return "huggingface"
    if path.name == "manifest.json" or path.name == ".metadata":
        raise CheckpointError(f"{path} is one file of a checkpoint.", do="name its folder.", code="checkpoint-format")
    with path.open("rb") as file:
        first = file.read(4)
    # A zip file, or the first bytes of Python's object format, which PyTorch used before 1.6.
    if first == b"PK\x03\x04" or first[:1] == b"\x80":
        return "state_dict"
    raise CheckpointError(
        f"{path} is no safetensors file and no file of torch.save.",
        do="name a file that one of them wrote.",
        code="checkpoint-format",
    )


def _of_folder(storage: Storage) -> Format | None:
    names = set(storage.names())
    if ".metadata" in names:
        return "dcp"
    if "manifest.json" in names:
        return "shoal"
    if any(_DEEPSPEED.fullmatch(name) for name in names):
        return "deepspeed"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "huggingface"
    if names & {"pytorch_model.bin", "pytorch_model.bin.index.json"}:
        return "state_dict"
    # A folder of checkpoints: each tag has a folder of its own.
    for name in sorted(names):
        if not storage.is_folder(name):
            continue
        below = storage.names(name)
        if "manifest.json" in below:
            return "shoal"
        if any(_DEEPSPEED.fullmatch(other) for other in below):
            return "deepspeed"
    return None


def open_source(path: str | os.PathLike[str], tag: str | None = None, format: Format | None = None) -> Source:
    """A file or folder as a ``Source``.

    Args:
        tag: of Shoal's and DeepSpeed's checkpoints; None: the newest.
        format: what it is; None: found out by ``detect``.

    Raises: CheckpointError: it is of no format that Shoal knows, damaged, or asks for more than data.
    """
    found = format if format is not None else detect(path)
    if tag is not None and found not in ("shoal", "deepspeed"):
        raise CheckpointError(
            f"tag {tag!r} was given, and {os.fspath(path)} is {found}, which has none.",
            do="leave the tag out.",
            code="checkpoint-format",
        )
    if found == "shoal":
        from shoal.checkpoint.native import ShoalSource

        return ShoalSource(path, tag)
    if found == "deepspeed":
        from shoal.checkpoint.formats.deepspeed import DeepSpeedSource

        return DeepSpeedSource(path, tag)
    if found == "huggingface":
        from shoal.checkpoint.formats.huggingface import HuggingFaceSource

        return HuggingFaceSource(path)
    if found == "dcp":
        from shoal.checkpoint.formats.dcp import DcpSource

        return DcpSource(path)
    from shoal.checkpoint.formats.plain import PlainSource

    return PlainSource(path)
