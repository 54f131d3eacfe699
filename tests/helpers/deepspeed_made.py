"""The checkpoints in tests/fixtures/deepspeed, which the real DeepSpeed wrote."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

from shoal.checkpoint.portable import Source
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from tests.helpers.places import FIXTURES

MADE = FIXTURES / "deepspeed"


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


MATRICES = [
    "embed.weight", "blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight"
]  # fmt: skip


VECTORS = ["blocks.0.up.bias", "blocks.1.up.bias", "norm.weight", "norm.bias"]


def made(case: str) -> DeepSpeedSource:
    return DeepSpeedSource(MADE / case / "checkpoint")


def universal(case: str, folder: Path) -> Path:
    """What the real ds_to_universal made of a case. Returns: the tag's folder."""
    with zipfile.ZipFile(MADE / case / "universal.zip") as archive:
        archive.extractall(folder)
    return folder / "global_step3_universal"


def everything(source: Source) -> dict[str, torch.Tensor]:
    found = {}
    for kind in source.kinds():
        for name, info in source.tensors(kind).items():
            tensor = source.read(kind, name)
            assert (tensor.dtype, tuple(tensor.shape)) == (info.dtype, info.shape), (kind, name)
            found[f"{kind}/{name}"] = tensor
    return found
