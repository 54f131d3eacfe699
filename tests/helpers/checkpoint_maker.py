"""Small checkpoints without an engine: two ranks' files and a manifest, written and committed as a save does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import directory
from shoal.checkpoint.blocks import FilePlan, TensorEntry, plan_file, write_file
from shoal.checkpoint.commit import Commit, Phase, Retention
from shoal.checkpoint.manifest import Manifest, ParameterRecord, TensorRecord, checksum
from shoal.checkpoint.reader import CheckpointReader
from shoal.checkpoint.storage import LocalStorage, Storage

ROWS, COLUMNS = 6, 5
SHARED = "w"  # half of it in each rank's file


def values(step: int) -> torch.Tensor:
    """What ``w`` is in the checkpoint of a step."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + 1000 * step


def plans(step: int) -> list[FilePlan]:
    half = ROWS // 2
    return [plan_file([_entry(f"model/w[{rank}]", values(step)[rank * half :][:half])]) for rank in range(2)]


def _entry(key: str, tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(key, tensor.dtype, tuple(tensor.shape), lambda: (tensor.reshape(-1),))


def describe(step: int, tag: str, files: list[Any], made: list[FilePlan], **more: Any) -> Manifest:
    half = ROWS // 2
    fields: dict[str, Any] = {
        "tag": tag,
        "step": step,
        "created": f"2030-01-01T00:00:{step:02d}.000000+00:00",
        "versions": {"shoal": "0"},
        "parameters": [ParameterRecord(name=SHARED, dtype="float32", shape=(ROWS, COLUMNS))],
        "tensors": [
            TensorRecord(
                kind="model",
                name=SHARED,
                dtype="float32",
                shape=(ROWS, COLUMNS),
                chunks=[(rank, made[rank].offsets[0], (rank * half, 0), (half, COLUMNS)) for rank in range(2)],
            )
        ],
        "files": files,
    }
    return Manifest(**{**fields, **more})


def make(
    storage: Storage,
    step: int,
    tag: str | None = None,
    *,
    on_phase: Phase = lambda phase: None,
    retention: Retention | None = None,
    save_latest: bool = True,
    **more: Any,
) -> list[str]:
    """Save one. Returns: what failed after the commit."""
    tag = tag or f"step{step}"
    made = plans(step)
    commit = Commit(storage, tag, on_phase)
    try:
        commit.begin(sum(plan.nbytes for plan in made))
        names = [f"rank-{rank:05d}{commit.suffix}.safetensors" for rank in range(2)]
        files = [write_file(storage, commit.folder, name, plan)[0] for name, plan in zip(names, made, strict=True)]
        manifest = describe(step, tag, files, made, **more)
        return commit.publish(manifest, retention or Retention(), save_latest=save_latest)
    finally:
        commit.end()


def read(storage: Storage, folder: str) -> torch.Tensor:
    """``w``, as a load would read it. Raises: CheckpointError."""
    return CheckpointReader(storage, folder, directory.inspect(storage, folder)).tensor("model", SHARED)


def newest(storage: Storage) -> torch.Tensor:
    """``w`` of the newest checkpoint that is whole by name and size, fully read."""
    for found in directory.list_checkpoints(storage):
        if found.manifest is not None and not directory.verify(storage, found.folder):
            return read(storage, found.folder)
    raise AssertionError("no complete checkpoint")


def seal(body: bytes) -> bytes:
    """A manifest of hostile text: its checksum is right. ``body`` begins with ``{``."""
    return b'{"checksum":"xxh3:' + checksum(body[1:]).encode() + b'",\n' + body[1:]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a manifest says, and seal it again."""
    import json

    path = folder / "manifest.json"
    raw = json.loads(path.read_bytes())
    del raw["checksum"]
    changed = change(raw)
    body = changed if isinstance(changed, bytes) else json.dumps(raw).encode()
    path.write_bytes(seal(body))


def local(folder: Path) -> LocalStorage:
    return LocalStorage(folder)
