"""Reads another format with the methods of ``CheckpointReader``, so that an engine loads it without a conversion."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from shoal.checkpoint.local_shards import LocalShard
from shoal.checkpoint.long_reads import reported
from shoal.checkpoint.manifest import EXTRA, Manifest
from shoal.checkpoint.native import manifest_of
from shoal.checkpoint.portable import Source
from shoal.checkpoint.problems import damaged


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
        described, self._aside = manifest_of(source, tag, "")
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
        if kind == EXTRA and name in self._aside:
            return self._aside[name].clone()
        if self.manifest.find(kind, name) is None:
            raise damaged(f"the checkpoint has no tensor {name!r} of kind {kind!r}.", self.manifest.tag)
        return self._source.read(kind, name)
