"""Writes a folder that ``torch.distributed.checkpoint.load`` reads, one tensor at a time.

PyTorch plans the folder and writes its ``.metadata``; the data file is ours, since PyTorch's writer holds every tensor
until the file is done.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shoal.checkpoint.formats.target import new_folder
from shoal.checkpoint.formats.torch_file_writing import write_values
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.portable import Source
from shoal.checkpoint.storage import LocalStorage, Sink
from shoal.errors import CheckpointError


def write_dcp(source: Source, folder: str | os.PathLike[str]) -> None:
    """Write model and optimizer as FSDP2's users save them: ``{"model": ..., "optim": {"state", "param_groups"}}``.

    Every name of a tied weight is there; they share their bytes. Counters, schedule and the client's state have no
    place in this format.

    Raises: CheckpointError: the folder is there already, or is no folder of a file system.
    Memory: one tensor.
    """
    tree, homes = _tree(source)
    with new_folder(folder) as (storage, staging):
        if not isinstance(storage, LocalStorage):
            raise CheckpointError(
                f"{os.fspath(folder)} is not on a file system, and torch.distributed.checkpoint writes nowhere else.",
                do="convert into a folder and copy it.",
                code="checkpoint-storage",
            )
        _run(_LazyPlanner(source, homes), _StreamingWriter(storage.root / staging), tree)


def _run(planner: Any, writer: Any, tree: dict[str, Any]) -> None:
    """The steps of ``torch.distributed.checkpoint.save`` on one rank (which warns where there is no process group)."""
    planner.set_up_planner(tree, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def _tree(source: Source) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """The tree with tensors of the meta device, and by flat key the kind and name to read."""
    homes: dict[str, tuple[str, str]] = {}
    model: dict[str, Any] = {}
    aliases = source.about.aliases
    for name, info in source.tensors(MODEL).items():
        for other in (name, *aliases.get(name, ())):
            model[other] = torch.empty(info.shape, dtype=info.dtype, device="meta")
            homes[f"model.{other}"] = MODEL, name
    tree: dict[str, Any] = {"model": model}
    state: dict[str, dict[str, Any]] = {}
    for kind in source.kinds():
        if kind == MODEL:
            continue
        key = kind.partition("/")[2]
        for name, info in source.tensors(kind).items():
            state.setdefault(name, {})[key] = torch.empty(info.shape, dtype=info.dtype, device="meta")
            homes[f"optim.state.{name}.{key}"] = kind, name
    for name, scalars in source.about.scalars.items():
        for key, value in scalars.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            state.setdefault(name, {})[key] = (
                torch.tensor(float(value), dtype=torch.float32, device="cpu") if is_number else value
            )
    groups = [
        {**group, "params": [name for name, at in source.about.group_of.items() if at == index]}
        for index, group in enumerate(source.about.groups)
    ]
    if state or groups:
        tree["optim"] = {"state": state, "param_groups": groups}
    return tree, homes


class _LazyPlanner(DefaultSavePlanner):
    """Reads a tensor when its turn comes."""

    def __init__(self, source: Source, homes: dict[str, tuple[str, str]]) -> None:
        super().__init__()
        self._source, self.homes = source, homes

    def lookup_object(self, index: Any) -> Any:
        home = self.homes.get(index.fqn)
        return super().lookup_object(index) if home is None else self._source.read(*home)


class _StreamingWriter(FileSystemWriter):
    """Drops each tensor when it is written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the path that it has while it is written

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results: list[WriteResult] = []
        written: dict[tuple[str, str], _StorageInfo] = {}
        with LocalStorage(self._folder).create(name) as sink:
            stream = _Counting(sink)
            for item in plan.items:
                home = planner.homes.get(item.index.fqn)
                info = written.get(home) if home is not None else None
                if info is None:
                    begin = stream.position
                    data = planner.resolve_data(item)
                    if isinstance(data, torch.Tensor):
                        write_values(stream, data)
                    else:
                        stream.write(data.getbuffer())
                    info = _StorageInfo(name, begin, stream.position - begin)
                    if home is not None:
                        written[home] = info
                results.append(WriteResult(item.index, info.length, info))
            sink.flush()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _Counting:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.position = 0

    def write(self, data: memoryview) -> None:
        self._sink.write(data)
        self.position += data.nbytes
