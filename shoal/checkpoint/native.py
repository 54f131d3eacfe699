"""Shoal's own checkpoints as the input and the output of conversions, and a source that is loaded like one."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from shoal.checkpoint import directory, tree
from shoal.checkpoint.blocks import TensorEntry, plan_file, write_file
from shoal.checkpoint.commit import Commit, Retention
from shoal.checkpoint.element_sums import NOTHING
from shoal.checkpoint.local_shards import LocalShard
from shoal.checkpoint.manifest import EXTRA, MODEL, OPTIMIZER, Manifest, ParameterRecord, TensorRecord, versions
from shoal.checkpoint.portable import About, Source, TensorInfo
from shoal.checkpoint.problems import damaged
from shoal.checkpoint.reader import CheckpointReader, reported
from shoal.checkpoint.rectangles import Rectangle
from shoal.checkpoint.storage import open_storage
from shoal.errors import CheckpointError
from shoal.text import counted, listed


class ShoalSource:
    """A checkpoint of Shoal's as a ``Source``.

    Args:
        folder: of the checkpoints, or of one.
        tag: None: the newest that is whole.
    """

    def __init__(self, folder: str | os.PathLike[str], tag: str | None = None) -> None:
        storage = open_storage(folder)
        name = ""
        if tag is not None:
            name = directory.find_tag(storage, tag)
        elif not storage.exists("manifest.json"):
            whole = [entry for entry in directory.list_checkpoints(storage) if entry.manifest is not None]
            if not whole:
                raise CheckpointError(
                    f"no complete Shoal checkpoint in {storage.url}.",
                    do="name the folder that was saved to, or one checkpoint in it; --from names another format.",
                    code="checkpoint-missing",
                )
            name = whole[0].folder
        self.manifest: Manifest = directory.inspect(storage, name)
        self.storage, self.folder = storage, name  # where it lies: its files are in this folder of that
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
            group_of={
                p.name: p.group
                for p in sorted(manifest.parameters, key=lambda p: p.position or 0)
                if p.group is not None
            },
            groups=tree.decode(manifest.groups, extra),
            scalars={p.name: tree.decode(p.scalars, extra) for p in manifest.parameters if p.scalars},
            optimizer=manifest.optimizer,
            schedule=state.get("schedule"),
            counters=state.get("counters", {}),
            loss_scale=state.get("loss_scale"),
            client_state=tree.decode(manifest.client_state, extra) or {},
            num_ranks=manifest.world.get("size"),
            config=manifest.config,
            notes=_not_kept(manifest, state),
            path=f"{self.storage.url}/{self.folder}".rstrip("/"),
        )

    def _extra(self, name: str) -> torch.Tensor:
        return self._reader.tensor(EXTRA, name)

    def kinds(self) -> Iterable[str]:
        kinds = sorted({t.kind for t in self.manifest.tensors if t.kind.startswith(OPTIMIZER)})
        return [MODEL, *kinds]

    def tensors(self, kind: str) -> Mapping[str, TensorInfo]:
        stored = {t.name: TensorInfo(tree.dtype_of(t.dtype), t.shape) for t in self.manifest.tensors if t.kind == kind}
        return stored if kind != MODEL else {**stored, **self._without_elements()}

    def _without_elements(self) -> dict[str, TensorInfo]:
        """Parameters of 0 elements, which are in no file."""
        there = {t.name for t in self.manifest.tensors if t.kind == MODEL}
        return {name: info for name, info in self.about.parameters.items() if 0 in info.shape and name not in there}

    def read(self, kind: str, name: str) -> torch.Tensor:
        info = self._without_elements().get(name) if kind == MODEL else None
        if info is None:
            return self._reader.tensor(kind, name)
        return torch.empty(info.shape, dtype=info.dtype, device="cpu")


def _not_kept(manifest: Manifest, state: Mapping[str, Any]) -> list[str]:
    """A sentence for each part of a run's state that no conversion keeps and that a model or a step may need."""
    notes = []
    if parts := state.get("extra_state"):
        names = listed([name or "the model" for name in parts], 4)
        notes.append(f"what get_extra_state() of {names} gave is not converted; left out.")
    if any(of_rank.get("gradients") for of_rank in manifest.engine.get("ranks") or ()):
        notes.append(
            f"gradients of the {counted(state.get('micro_in_step', 0), 'micro-batch', 'micro-batches')} since step"
            f" {manifest.step}, whose step was not complete: only the layout that saved them can use them; left out."
        )
    return notes


def manifest_of(source: Source, tag: str, created: str) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The manifest of a source, without files; and the tensors inside nested values, of kind ``extra``.

    Args:
        created: ISO 8601, UTC.

    Raises: CheckpointError: the client state, or other nested state, holds a value that a manifest cannot.
    """
    about = source.about
    tensors = [
        TensorRecord(kind=kind, name=name, dtype=tree.name_of(info.dtype), shape=tuple(info.shape), chunks=[])
        for kind in source.kinds()
        for name, info in source.tensors(kind).items()
    ]
    extra: dict[str, torch.Tensor] = {}
    values = {"counters": about.counters, "schedule": about.schedule, "loss_scale": about.loss_scale}
    engine = tree.encode(values, extra, "engine", what="the engine's state")
    groups = tree.encode([dict(group) for group in about.groups], extra, "groups", what="the optimizer's groups")
    client_state = tree.encode(about.client_state, extra, "client_state")
    tensors += [
        TensorRecord(kind=EXTRA, name=name, dtype=tree.name_of(value.dtype), shape=tuple(value.shape), chunks=[])
        for name, value in extra.items()
    ]
    position = {name: index for index, name in enumerate(about.group_of)}
    parameters = [
        ParameterRecord(
            name=name,
            aliases=list(about.aliases.get(name, ())),
            dtype=tree.name_of(info.dtype),
            shape=tuple(info.shape),
            group=about.group_of.get(name),
            position=position.get(name),
            scalars=tree.encode(about.scalars.get(name, {}), None, name),
        )
        for name, info in about.parameters.items()
    ]
    manifest = Manifest(
        tag=tag,
        step=about.counters.get("global_steps", 0),
        created=created,
        versions=versions(),
        world={} if about.num_ranks is None else {"size": about.num_ranks},
        groups=groups,
        optimizer=about.optimizer,
        parameters=parameters,
        tensors=tensors,
        files=[],
        engine={**engine, "ranks": []},
        client_state=client_state,
    )
    return manifest, extra


def write_shoal(
    source: Source,
    folder: str | os.PathLike[str],
    tag: str | None = None,
    *,
    is_for_resuming: bool = True,
) -> str:
    """Write a state as a checkpoint that any engine loads.

    Args:
        tag: None: ``global_step`` and the source's number of steps.
        is_for_resuming: False: ``latest`` does not name it, and it is loaded where its tag is asked for.

    Returns: the tag.
    Raises: CheckpointError, OSError: nothing is left behind.
    Memory: one tensor.
    """
    tag = tag if tag is not None else f"global_step{source.about.counters.get('global_steps', 0)}"
    manifest, extra = manifest_of(source, tag, datetime.now(UTC).isoformat(timespec="microseconds"))
    storage = open_storage(folder)

    def read(kind: str, name: str) -> tuple[torch.Tensor]:
        return ((extra[name] if kind == EXTRA else source.read(kind, name)).reshape(-1),)

    stored = {f"{record.kind}/{record.name}": record for record in manifest.tensors if record.numel}
    plan = plan_file(
        [
            TensorEntry(
                key,
                tree.dtype_of(record.dtype),
                record.shape,
                partial(read, record.kind, record.name),
                place=(Rectangle((0,) * len(record.shape), record.shape), record.shape),
            )
            for key, record in stored.items()
        ]
    )
    for entry, offset in zip(plan.entries, plan.offsets, strict=True):
        stored[entry.key].chunks.append((0, offset, (0,) * len(entry.shape), entry.shape))
    commit = Commit(storage, tag)
    try:
        commit.begin(plan.nbytes)
        file, sums = write_file(storage, commit.folder, f"rank-00000{commit.suffix}.safetensors", plan)
        tensors = [
            record.model_copy(update={"sums": sums.get(f"{record.kind}/{record.name}", NOTHING)})
            for record in manifest.tensors
        ]
        written = {"files": [file], "tensors": tensors, "is_for_resuming": is_for_resuming}
        commit.publish(manifest.model_copy(update=written), Retention(), save_latest=is_for_resuming)
    finally:
        commit.end()
    return tag


class SourceReader:
    """A source with a manifest.

    Args:
        source: opened, its checksums compared.
        tag: its name.

    Memory: a tensor is read whole, whatever part of it this rank keeps.
    """

    def __init__(self, source: Source, tag: str) -> None:
        self._source = source
        self.notes: Sequence[str] = tuple(source.about.notes)
        described, self._extra = manifest_of(source, tag, "")
        # Instead of a time: a value that is the same on all ranks that see the same files.
        stamp = hashlib.sha256(described.model_dump_json().encode()).hexdigest()[:16]
        self.manifest: Manifest = described.model_copy(update={"created": stamp})

    def plan(self, shards: Iterable[LocalShard]) -> dict[tuple[str, str], list[LocalShard]]:
        """The shards by tensor, so that each is read once."""
        wanted: dict[tuple[str, str], list[LocalShard]] = defaultdict(list)
        for shard in shards:
            if self.manifest.find(shard.kind, shard.name) is not None:  # the caller has compared the names before
                wanted[shard.kind, shard.name].append(shard)
        return dict(wanted)

    def check(self, plan: dict[tuple[str, str], list[LocalShard]]) -> None:
        """Does nothing: the checksums were compared when the source was opened."""

    @torch.no_grad()
    def run(self, plan: dict[tuple[str, str], list[LocalShard]]) -> None:
        """Raises: CheckpointError."""
        for (kind, name), shards in reported(list(plan.items()), "reading tensors"):
            values = self.tensor(kind, name)
            for shard in shards:
                for begin, rectangle in shard.rectangles():
                    flat = values[rectangle.slices()].reshape(-1)
                    for target in shard.part(begin, begin + rectangle.numel):
                        target.copy_(flat[: target.numel()])
                        flat = flat[target.numel() :]

    def tensor(self, kind: str, name: str) -> torch.Tensor:
        """One tensor, whole, on the host. Raises: CheckpointError: there is none, or it is damaged."""
        if kind == EXTRA and name in self._extra:
            return self._extra[name].clone()
        if self.manifest.find(kind, name) is None:
            raise damaged(f"the checkpoint has no tensor {name!r} of kind {kind!r}.", self.manifest.tag)
        return self._source.read(kind, name)
