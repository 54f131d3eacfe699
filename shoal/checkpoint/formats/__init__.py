"""Checkpoints and weights of other programs, each read as a ``Source``, and recognised by the names in a folder.

In one folder a checkpoint may lie next to exported weights (``save_16bit_model``, ``Trainer``). The first row that fits
is read, so the checkpoint is:

    in the folder                                   format
    .metadata                                       dcp
    manifest.json                                   shoal
    files of a registered ``ForeignFormat``         its name
    a folder for each tag, of Shoal or such         what ``latest`` names; otherwise shoal before others
    *.safetensors                                   huggingface
    pytorch_model.bin                               state_dict
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from shoal.checkpoint import directory, foreign
from shoal.checkpoint.portable import Source
from shoal.checkpoint.storage import Storage, open_storage
from shoal.errors import CheckpointError

Format = str  # "shoal", "huggingface", "state_dict", "dcp", or the name of a ``ForeignFormat``
_SAFETENSORS = re.compile(r".+\.safetensors(\.index\.json)?")
_BIN = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")


def detect(path: str | os.PathLike[str], tag: str | None = None) -> Format:
    """The format of a file or folder, by the names in it.

    Args:
        tag: of several checkpoints in the folder, the one that is asked for.

    Raises: CheckpointError: nothing is there, or nothing that Shoal knows.
    """
    text = os.fspath(path)
    if "://" not in text and not Path(text).expanduser().exists():
        raise CheckpointError(f"{text} does not exist.", do="name a file or folder.", code="checkpoint-missing")
    if "://" not in text and Path(text).expanduser().is_file():
        return _of_file(Path(text).expanduser())
    if text.endswith(".safetensors"):
        return "huggingface"
    storage = open_storage(text)
    result = _of_folder(storage, tag)
    if result is None:
        names = storage.names()
        programs = " or ".join(["Shoal", *(each.program for each in foreign.FORMATS)])
        raise CheckpointError(
            f"{text} is in no format that Shoal reads: it contains"
            f" {', '.join(map(repr, names[:6])) + (' ...' if len(names) > 6 else '') if names else 'nothing'}.",
            do=f"name a checkpoint of {programs}, a folder of safetensors, one of torch.distributed.checkpoint, or a"
            " file of torch.save.",
            code="checkpoint-format",
        )
    return result


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
        f"{path} is neither a safetensors file nor a file of torch.save.",
        do="name a file that one of them wrote.",
        code="checkpoint-format",
    )


def _of_folder(storage: Storage, tag: str | None) -> Format | None:
    if tag is not None and directory.is_name(tag) and (result := _of_checkpoint(storage, tag)) is not None:
        return result
    names = storage.names()
    if ".metadata" in names:
        return "dcp"
    if (result := _of_checkpoint(storage, "")) is not None:
        return result
    if (theirs := directory.foreign_tag(storage)) is not None:
        return theirs[1].name
    tags = {_of_checkpoint(storage, name) for name in names if storage.is_folder(name)} - {None}
    if tags:
        return "shoal" if "shoal" in tags else tags.pop()
    if any(map(_SAFETENSORS.fullmatch, names)):
        return "huggingface"
    return "state_dict" if any(map(_BIN.fullmatch, names)) else None


def _of_checkpoint(storage: Storage, folder: str) -> Format | None:
    """The format of the checkpoint whose files lie in a folder. One of Shoal's that is damaged is one of Shoal's."""
    names = storage.names(folder)
    if "manifest.json" in names or directory.is_ours(storage, folder):
        return "shoal"
    theirs = foreign.format_of(names)
    return None if theirs is None else theirs.name


def unread_weights(path: str | os.PathLike[str], format: Format) -> list[str]:
    """Files of weights in a folder that are not read, because it is read as ``format``."""
    text = os.fspath(path)
    if format == "state_dict" or text.endswith(".safetensors") or ("://" not in text and Path(text).is_file()):
        return []
    storage = open_storage(text)
    kinds = [_BIN] if format == "huggingface" else [_SAFETENSORS, _BIN]
    return [
        name
        for name in storage.names()
        if any(kind.fullmatch(name) for kind in kinds) and not directory.is_our_file(name)
    ]


def open_source(path: str | os.PathLike[str], tag: str | None = None, format: Format | None = None) -> Source:
    """A file or folder as a ``Source``.

    Args:
        tag: of checkpoints that a folder has by tag; None: the newest.
        format: what it is; None: found out by ``detect``.

    Raises: CheckpointError: it is of no format that Shoal knows, damaged, or asks for more than data.
    """
    chosen = format if format is not None else detect(path, tag)
    theirs = next((each for each in foreign.FORMATS if each.name == chosen), None)
    if tag is not None and chosen != "shoal" and theirs is None:
        raise CheckpointError(
            f"tag {tag!r} was given, and {os.fspath(path)} is {chosen}, which has none.",
            do="leave the tag out.",
            code="checkpoint-format",
        )
    if chosen == "shoal":
        from shoal.checkpoint.native import ShoalSource

        return ShoalSource(path, tag)
    if theirs is not None:
        return theirs.opening()(path, tag)
    if chosen == "huggingface":
        from shoal.checkpoint.formats.huggingface import HuggingFaceSource

        return HuggingFaceSource(path)
    if chosen == "dcp":
        from shoal.checkpoint.formats.dcp import DcpSource

        return DcpSource(path)
    from shoal.checkpoint.formats.plain import PlainSource

    return PlainSource(path)
