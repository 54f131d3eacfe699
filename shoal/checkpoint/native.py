"""Shoal's own checkpoints, as a source that conversions read, and as a target that they write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import torch

from shoal.checkpoint import catalogue, tree
from shoal.checkpoint.blocks import Entry, plan_file, write_file
from shoal.checkpoint.commit import Commit, Retention
from shoal.checkpoint.manifest import EXTRA, MODEL, OPTIMIZER, Manifest, ParameterRecord, TensorRecord, versions
from shoal.checkpoint.portable import About, Source, TensorInfo
from shoal.checkpoint.reader import CheckpointReader
from shoal.checkpoint.storage import open_storage
from shoal.errors import CheckpointError


class ShoalSource:
    """A checkpoint of Shoal's.

    Args:
        folder: of the checkpoints, or of one.
        tag: None: the newest that is whole.
    """

    def __init__(self, folder: str | os.PathLike[str], tag: str | None = None) -> None:
        storage = open_storage(folder)
        name = ""
        if tag is not None:
            name = catalogue.find_tag(storage, tag)
        elif not storage.exists("manifest.json"):
            whole = [found for found in catalogue.look(storage) if found.manifest is not None]
            if not whole:
                raise CheckpointError(
                    f"no whole checkpoint of Shoal's in {storage.url}.",
                    do="name the folder that was saved to, or one checkpoint in it.",
                    code="checkpoint-missing",
                )
            name = whole[0].folder
        self.manifest: Manifest = catalogue.inspect(storage, name)
        self._reader = CheckpointReader(storage, name, self.manifest)
        self.about = self._about()

    def _about(self) -> About:
        manifest = self.manifest
        extra = self._extra
        engine = {key: value for key, value in manifest.engine.items() if key != "ranks"}
        state = tree.decode(engine, extra)
        return About(
            parameters={p.name: TensorInfo(tree.dtype_of(p.dtype), p.shape) for p in manifest.parameters},
            aliases={p.name: tuple(p.aliases) for p in manifest.parameters if p.aliases},
            group_of={p.name: p.group for p in manifest.parameters if p.group is not None},
            groups=tree.decode(manifest.groups, extra),
            scalars={p.name: tree.decode(p.scalars, extra) for p in manifest.parameters if p.scalars},
            optimizer=manifest.optimizer,
            schedule=state.get("schedule"),
            counters=state.get("counters", {}),
            loss_scale=state.get("loss_scale"),
            client_state=tree.decode(manifest.client_state, extra) or {},
        )

    def _extra(self, name: str) -> torch.Tensor:
        return self._reader.tensor(EXTRA, name)

    def kinds(self) -> Iterable[str]:
        found = sorted({t.kind for t in self.manifest.tensors if t.kind.startswith(OPTIMIZER)})
        return [MODEL, *found]

    def tensors(self, kind: str) -> Mapping[str, TensorInfo]:
        found = {t.name: TensorInfo(tree.dtype_of(t.dtype), t.shape) for t in self.manifest.tensors if t.kind == kind}
        return found if kind != MODEL else {**found, **self._without_elements()}

    def _without_elements(self) -> dict[str, TensorInfo]:
        """Parameters that no rank holds a part of, since there is none."""
        there = {t.name for t in self.manifest.tensors if t.kind == MODEL}
        return {name: info for name, info in self.about.parameters.items() if 0 in info.shape and name not in there}

    def read(self, kind: str, name: str) -> torch.Tensor:
        info = self._without_elements().get(name) if kind == MODEL else None
        return self._reader.tensor(kind, name) if info is None else torch.empty(info.shape, dtype=info.dtype)


def write_shoal(
    source: Source,
    folder: str | os.PathLike[str],
    tag: str | None = None,
    *,
    on_tensor: Callable[[str, str, int], None] = lambda kind, name, nbytes: None,
) -> str:
    """Write a state as a checkpoint that any engine loads.

    Args:
        tag: None: ``global_step`` and the source's number of steps.
        on_tensor: called with kind, name and bytes of each tensor as it is read.

    Returns: the tag.
    Raises: CheckpointError, OSError: nothing is left behind.
    Memory: one tensor.
    """
    about = source.about
    step = about.counters.get("global_steps", 0)
    tag = tag if tag is not None else f"global_step{step}"
    storage = open_storage(folder)
    entries: list[Entry] = []
    owner: dict[str, tuple[str, str]] = {}

    def reading(kind: str, name: str, nbytes: int) -> Callable[[], tuple[torch.Tensor, ...]]:
        def read() -> tuple[torch.Tensor, ...]:
            on_tensor(kind, name, nbytes)
            return (source.read(kind, name).reshape(-1),)

        return read

    records: dict[tuple[str, str], dict[str, Any]] = {}

    def add(kind: str, name: str, info: TensorInfo, read: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        records[kind, name] = {
            "kind": kind,
            "name": name,
            "dtype": tree.name_of(info.dtype),
            "shape": tuple(info.shape),
            "chunks": [],
        }
        entry = Entry(f"{kind}/{name}", info.dtype, tuple(info.shape), read)
        if entry.nbytes:
            entries.append(entry)
            owner[entry.key] = (kind, name)

    for kind in source.kinds():
        for name, info in source.tensors(kind).items():
            numel = torch.Size(info.shape).numel()
            add(kind, name, info, reading(kind, name, numel * info.dtype.itemsize))
    aside: dict[str, torch.Tensor] = {}
    engine = tree.encode(
        {
            "counters": about.counters,
            "schedule": about.schedule,
            "loss_scale": about.loss_scale,
        },
        aside,
        "engine",
        what="the engine's state",
    )
    groups = tree.encode([dict(group) for group in about.groups], aside, "groups", what="the optimizer's groups")
    client_state = tree.encode(about.client_state, aside, "client_state")
    for name, tensor in aside.items():
        add(EXTRA, name, TensorInfo(tensor.dtype, tuple(tensor.shape)), _just(tensor))
    scalars = {name: tree.encode(values, None, name) for name, values in about.scalars.items()}
    plan = plan_file(entries)
    commit = Commit(storage, tag)
    try:
        commit.begin(plan.nbytes)
        file = write_file(storage, commit.folder, f"rank-00000{commit.suffix}.safetensors", plan)
        for entry, offset in zip(plan.entries, plan.offsets, strict=True):
            start = (0,) * len(entry.shape)
            records[owner[entry.key]]["chunks"].append((0, offset, start, entry.shape))
        manifest = Manifest(
            tag=tag,
            step=step,
            created=datetime.now(UTC).isoformat(timespec="microseconds"),
            versions=versions(),
            groups=groups,
            optimizer=about.optimizer,
            parameters=[
                ParameterRecord(
                    name=name,
                    aliases=list(about.aliases.get(name, ())),
                    dtype=tree.name_of(info.dtype),
                    shape=tuple(info.shape),
                    group=about.group_of.get(name),
                    scalars=scalars.get(name, {}),
                )
                for name, info in about.parameters.items()
            ],
            tensors=[TensorRecord(**record) for record in records.values()],
            files=[file],
            engine={**engine, "ranks": []},
            client_state=client_state,
        )
        commit.publish(manifest, Retention(), save_latest=True)
    finally:
        commit.end()
    return tag


def _just(tensor: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (tensor.reshape(-1),)
