"""Saving: every rank writes its share of every tensor into one file, and the commit makes the files a checkpoint.

A synchronous save returns when the checkpoint is committed. An asynchronous one returns when the part of this rank's
share that the user's code can change is copied to host memory. A thread copies the rest (main parameters, optimizer
state, shards; code that changes them waits for the copy) and writes it while training continues. The exchanges between
the ranks take place at the end of later steps, on the training thread.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from functools import partial, reduce
from typing import Any

import torch

from shoal.checkpoint import tree
from shoal.checkpoint.blocks import FilePlan, Snapshot, TensorEntry, plan_file, write_file
from shoal.checkpoint.commit import Commit, Phase, Retention
from shoal.checkpoint.element_sums import NOTHING, added
from shoal.checkpoint.local_shards import LocalShard
from shoal.checkpoint.manifest import EXTRA, FileRecord, Manifest, ParameterRecord, TensorRecord
from shoal.checkpoint.problems import share
from shoal.checkpoint.rectangles import Rectangle
from shoal.checkpoint.storage import Storage
from shoal.comm.protocol import Communicator
from shoal.errors import CheckpointError
from shoal.streams import carried
from shoal.text import listed

logger = logging.getLogger("shoal")


@dataclass
class SavedState:
    """What is saved besides the shards.

    Args:
        parameters: returns the records of the model's parameters. Called on rank 0 when the manifest is written, so
            that training does not wait for it.
        config: returns the effective settings; called at the same time.
        engine, client_state: nested values; rank 0's are saved.
        tensors: whole tensors that this rank alone writes: by (kind, name).
        own: nested values that only this rank has (its generators).
        scalars: this rank's optimizer state of one value per parameter.
    """

    step: int
    parameters: Callable[[], list[ParameterRecord]]
    versions: dict[str, str]
    world: dict[str, Any]
    table: list[dict[str, str]]
    config: Callable[[], dict[str, Any]]
    groups: Sequence[Mapping[str, Any]] = ()
    optimizer: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    client_state: Any = None
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved."""

    save_latest: bool = True
    is_async: bool = False
    retention: Retention = field(default_factory=Retention)


class _SaveState(Enum):
    WRITING = 0  # this rank's file
    COMMITTING = 1  # rank 0: the manifest and what follows
    DONE = 2


class Save:
    """One save, on one rank. Every rank creates one, in the same order.

    Args:
        comm: all ranks that save together.
        on_phase: called by name as the save goes on: ``"snapshot"``, ``"shard_write"``, ``"shard_fsync"``,
            ``"exchange"``, and rank 0's of the commit.
        host_memory: allocates memory for a snapshot: given its size in bytes, returns a flat uint8 tensor on the host.
        device: of small messages between the ranks.

    Raises: CheckpointError: on every rank, with each rank's cause.
    """

    def __init__(
        self,
        comm: Communicator,
        storage: Storage,
        tag: str,
        shards: Iterable[LocalShard],
        state: SavedState,
        options: SaveOptions,
        on_phase: Phase,
        host_memory: Callable[[int], torch.Tensor],
        device: torch.device,
    ) -> None:
        self.tag = tag
        self._device = device
        self._comm = comm
        self._storage = storage
        self._state = state
        self._options = options
        self._on_phase = on_phase
        self._progress = _SaveState.WRITING
        self._thread: threading.Thread | None = None
        self._joined: Callable[[], None] = lambda: None  # called when the thread has ended
        self._background = Background()
        self._snapshot: Snapshot | None = None
        self._outcome: Any = None  # of the part under way: what the record of the file needs, or an error
        self._record: dict[str, Any] = {}
        self._commit = Commit(storage, tag, on_phase)
        try:
            self._write(list(shards), host_memory)
            if not options.is_async:
                self.finish()
        except BaseException:
            self._end_commit()
            raise

    # the parts

    def _write(self, shards: list[LocalShard], host_memory: Callable[[int], torch.Tensor]) -> None:
        comm, state = self._comm, self._state
        problem: Exception | None = None
        plan: FilePlan | None = None
        described: dict[str, Any] = {}
        try:
            plan, described = _plan(shards, state, comm.rank)
        except Exception as error:
            problem = error
        sizes = self._agree(problem, plan.nbytes if plan is not None else 0, "checkpoint: begin")
        assert plan is not None
        if comm.rank == 0:
            try:
                self._commit.begin(sum(sizes))
            except Exception as error:
                problem = error
        where = self._agree(problem, [self._commit.folder, self._commit.suffix], "checkpoint: folder")
        folder, suffix = where[0]
        name = f"rank-{comm.rank:05d}{suffix}.safetensors"
        self._record = described

        def write(snapshot: Snapshot | None = None) -> dict[str, Any]:
            if snapshot is not None:
                snapshot.finish()  # the next step may wait for this
                self._background.enter()
            self._on_phase("shard_write")
            before_flush = partial(self._on_phase, "shard_fsync")
            pause = self._background.pause
            file, sums = write_file(self._storage, folder, name, plan, before_flush, snapshot, pause)
            at = {offset: sums[entry.key] for entry, offset in zip(plan.entries, plan.offsets, strict=True)}
            by_tensor = [[at[offset] for offset, _, _ in chunks] for *_, chunks in described["tensors"]]
            return {"file": file.model_dump(mode="json"), "sums": by_tensor}

        def take() -> Snapshot:
            self._on_phase("snapshot")
            return Snapshot(plan, host_memory, self._device)

        if not self._options.is_async:
            self._start(write)
            return
        snapshot = _attempt(take)
        if isinstance(snapshot, Exception):  # no memory: raised after the write, with the other ranks' errors
            self._outcome = snapshot
            return
        self._start(partial(write, snapshot))
        if self._thread is None:
            snapshot.finish()  # the next save may have its memory
        else:
            self._snapshot = snapshot

    def _start(self, run: Callable[[], Any]) -> None:
        """Keep what ``run`` returns or raises as the outcome. An asynchronous save runs it on a thread."""
        if not self._options.is_async:
            self._outcome = _attempt(run)
            return

        def guarded() -> None:
            try:
                self._outcome = run()
            except BaseException as error:
                self._outcome = error

        self._outcome = None
        guarded, self._joined = carried(guarded, "shoal-checkpoint")
        thread = threading.Thread(target=guarded, name="shoal-checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads: raised with the other ranks' errors
            self._outcome = error
            return
        self._thread = thread

    def _exchange(self) -> None:
        """Exchange the records of the written files, then start the commit on rank 0."""
        problem = self._problem() or _attempt(lambda: self._on_phase("exchange"))
        record = None if problem is not None else {**self._record, **self._outcome}
        records = self._agree(problem, record, "checkpoint: files")
        self._progress = _SaveState.COMMITTING
        self._outcome = None
        self._thread = None
        if self._comm.rank:
            return

        def run() -> list[str]:
            manifest = _manifest(self.tag, self._state, records, self._options)
            return self._commit.publish(manifest, self._options.retention, save_latest=self._options.save_latest)

        self._start(run)

    def _finish_commit(self) -> None:
        problem = self._problem()
        notes = self._agree(problem, None if problem is not None else self._outcome, "checkpoint: commit")[0]
        for note in notes:
            logger.warning("%s", note)
        self._end_commit()

    def _end_commit(self) -> None:
        self._progress = _SaveState.DONE
        if self._comm.rank == 0:
            self._commit.end()

    def _problem(self) -> BaseException | None:
        return self._outcome if isinstance(self._outcome, BaseException) else None

    def _agree(self, problem: BaseException | None, value: Any, label: str) -> list[Any]:
        """Every rank's value. Raises: CheckpointError: some rank has a problem; on every rank, with its text."""
        values, failed = share(self._comm, problem, value, label, code="checkpoint-write")
        if failed:
            if isinstance(problem, CheckpointError) and len(failed) == 1:
                raise problem
            first = failed[0][1]
            more = "".join(f"\n  rank {rank}: {other.what}" for rank, other in failed[1:4])
            raise CheckpointError(
                f"checkpoint {self.tag!r} was not saved: {first.what}{more}",
                where=f"rank {listed(str(rank) for rank, _ in failed)}, {first.where or self._storage.url}",
                do="older checkpoints are unchanged; fix the cause and save again.",
                code=first.code,
            ) from problem
        return values

    # while training continues

    def wait_taken(self) -> None:
        """Wait until optimizer state and shards are copied. Call it before they are changed."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None

    @property
    def is_done(self) -> bool:
        return self._progress is _SaveState.DONE

    def poll(self) -> None:
        """Do the next exchange if all ranks are ready. Every rank calls it at the end of a step. Does not block.

        Raises: CheckpointError: some rank could not write; on every rank.
        Communicates: one number per rank; once the records of the files, and once the result of the commit.
        """
        if self.is_done:
            return
        is_ready = self._thread is None or not self._thread.is_alive()
        sent = torch.tensor([float(is_ready)], dtype=torch.float32, device=self._device)
        ready = self._comm.exchange(sent, label="checkpoint").wait()
        if bool(ready.bool().all()):
            self._advance()

    def finish(self) -> None:
        """Wait until it is committed. Every rank calls. Raises: as ``poll``."""
        self._background.hurry()
        while not self.is_done:
            if self._thread is not None:
                self._thread.join()
            self._advance()

    def _advance(self) -> None:
        self._joined()
        try:
            if self._outcome is None and (self._progress is _SaveState.WRITING or self._comm.rank == 0):
                self._outcome = CheckpointError("the thread that writes the checkpoint has ended.")
            if self._progress is _SaveState.WRITING:
                self._exchange()
            else:
                self._finish_commit()
        except BaseException:
            self._end_commit()
            raise


def _attempt(run: Callable[[], Any]) -> Any:
    """What ``run`` returns, or the error that it raised."""
    try:
        return run()
    except Exception as error:
        return error


def _plan(shards: list[LocalShard], state: SavedState, rank: int) -> tuple[FilePlan, dict[str, Any]]:
    """This rank's file, and its record for the other ranks."""
    entries: list[TensorEntry] = []
    owners: dict[str, tuple[str, str, str, tuple[int, ...], tuple[int, ...]]] = {}

    def add(entry: TensorEntry, kind: str, name: str, shape: tuple[int, ...], start: tuple[int, ...]) -> None:
        entries.append(entry)
        owners[entry.key] = (kind, name, tree.name_of(entry.dtype), shape, start)

    described: list[tuple[str, str, str, tuple[int, ...]]] = []
    for shard in shards:
        shape = shard.spec.global_shape
        described.append((shard.kind, shard.name, tree.name_of(shard.dtype), shape))
        for entry, start in shard.entries():
            add(entry, shard.kind, shard.name, shape, start)
    whole: dict[tuple[str, str], torch.Tensor] = dict(state.tensors)
    own: dict[str, torch.Tensor] = {}
    own_tree = tree.encode(state.own, own, "own", what=f"the state of rank {rank}")
    whole |= {(f"rank/{rank}", name): tensor for name, tensor in own.items()}
    trees: dict[str, Any] = {}
    if rank == 0:
        extra: dict[str, torch.Tensor] = {}
        trees["engine"] = tree.encode(state.engine, extra, "engine", what="the engine's state")
        trees["groups"] = tree.encode(list(state.groups), extra, "groups", what="the optimizer's groups")
        trees["client_state"] = tree.encode(state.client_state, extra, "client_state")
        whole |= {(EXTRA, name): tensor for name, tensor in extra.items()}
    for (kind, name), tensor in whole.items():
        shape = tuple(tensor.shape)
        described.append((kind, name, tree.name_of(tensor.dtype), shape))
        if tensor.numel():
            start = (0,) * len(shape)
            read = _just(tensor.detach().reshape(-1))
            entry = TensorEntry(f"{kind}/{name}", tensor.dtype, shape, read, place=(Rectangle(start, shape), shape))
            add(entry, kind, name, shape, start)
    scalars = {
        name: tree.encode(values, None, name, what=f"the optimizer state of {name!r}")
        for name, values in state.scalars.items()
    }
    plan = plan_file(entries)
    chunks: dict[tuple[str, str], list[Any]] = {(kind, name): [] for kind, name, _, _ in described}
    for entry, offset in zip(plan.entries, plan.offsets, strict=True):
        kind, name, _, _, start = owners[entry.key]
        chunks[kind, name].append([offset, start, entry.shape])
    tensors = [[kind, name, dtype, shape, chunks[kind, name]] for kind, name, dtype, shape in dict.fromkeys(described)]
    return plan, {"tensors": tensors, "scalars": scalars, "own": own_tree, "trees": trees}


def _just(tensor: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
    return lambda: (tensor,)


def _manifest(tag: str, state: SavedState, records: Sequence[dict[str, Any]], options: SaveOptions) -> Manifest:
    """The manifest, from the records of all ranks."""
    tensors: dict[tuple[str, str], dict[str, Any]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, record in enumerate(records):
        for (kind, name, dtype, shape, chunks), sums in zip(record["tensors"], record["sums"], strict=True):
            made = {"kind": kind, "name": name, "dtype": dtype, "shape": tuple(shape), "chunks": [], "sums": NOTHING}
            entry = tensors.setdefault((kind, name), made)
            entry["chunks"] += [(number, offset, tuple(start), tuple(size)) for offset, start, size in chunks]
            entry["sums"] = reduce(added, sums, entry["sums"])
        for name, values in record["scalars"].items():
            scalars.setdefault(name, {}).update(values)
    trees = records[0]["trees"]
    parameters = state.parameters()
    return Manifest(
        tag=tag,
        step=state.step,
        created=datetime.now(UTC).isoformat(timespec="microseconds"),
        is_for_resuming=options.save_latest,
        versions=state.versions,
        world=state.world,
        table=state.table,
        config=state.config(),
        groups=trees["groups"],
        optimizer=state.optimizer,
        parameters=[
            parameter.model_copy(update={"scalars": scalars.get(parameter.name, {})}) for parameter in parameters
        ],
        tensors=[TensorRecord(**entry) for entry in tensors.values()],
        files=[FileRecord(**record["file"]) for record in records],
        engine={**trees["engine"], "ranks": [record["own"] for record in records]},
        client_state=trees["client_state"],
    )


_NICE = 10
_SHARE = 0.05  # of one core's time


class Background:
    """How one thread writes while training continues: at low priority, and on a small share of one core.

    Where training fills the cores, each second of the thread is taken from it; the share spreads these seconds over
    many steps. It also limits the memory bandwidth and the disk's that the thread takes. The priority lets it run where
    a core would be idle. The thread that trains creates it.
    """

    def __init__(self) -> None:
        self._trains = threading.get_ident()
        self._is_awaited = threading.Event()
        self._began: float | None = None  # when the thread did, if all its time was CPU time
        self._thread = self._nice = 0

    def enter(self) -> None:
        """Called by the thread that writes. Threads that it starts have its priority.

        What the thread did before is part of its share: after a copy at the priority of training it pauses.
        """
        if threading.get_ident() == self._trains:
            return
        if sys.platform == "linux":  # elsewhere a process has one priority
            self._nice = os.getpriority(os.PRIO_PROCESS, 0)
            self._thread = threading.get_native_id()
            if not self._is_awaited.is_set():
                self._set_priority(max(self._nice, _NICE))
        self._began = time.monotonic() - time.thread_time()

    def pause(self) -> None:
        """Called between two blocks. Order: blocks a thread that entered until its time is within the share."""
        if self._began is not None:
            self._is_awaited.wait(max(0.0, time.thread_time() / _SHARE - (time.monotonic() - self._began)))

    def hurry(self) -> None:
        """Training waits for the thread from now on: no pauses, and the first priority where the system allows it."""
        self._is_awaited.set()
        if self._thread:
            self._set_priority(self._nice)

    def _set_priority(self, nice: int) -> None:
        with suppress(OSError):  # not allowed, or the thread has ended
            os.setpriority(os.PRIO_PROCESS, self._thread, nice)
