"""Loads the checkpoint of any layout into this one. The running state does not change before all ranks have checked it.

open      all ranks read the manifest of the chosen checkpoint, or another program's files
compare   with the model and the optimizer: every difference is listed; no tensor is read yet
check     every rank reads the blocks that it needs and compares their checksums
apply     every rank copies its ranges, whose sums are compared with those of the save; unsharded parameters are
          gathered
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from shoal.checkpoint import directory, tree
from shoal.checkpoint.element_sums import NOTHING, added
from shoal.checkpoint.foreign import ForeignFormat
from shoal.checkpoint.local_shards import LocalShard, LocalShards, names_of
from shoal.checkpoint.manifest import MODEL, OPTIMIZER, Manifest
from shoal.checkpoint.native import SourceReader
from shoal.checkpoint.problems import agree, damaged
from shoal.checkpoint.reader import CheckpointReader, StateReader
from shoal.checkpoint.storage import Storage
from shoal.comm.protocol import Communicator
from shoal.errors import CheckpointError, NotBuiltError
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.outer_state import OUTER
from shoal.sharding.sent_gradient import ERRORS
from shoal.text import counted, listed

_KEPT = (*ERRORS, *OUTER)  # kinds of optimizer state that no optimizer has


@dataclass(frozen=True)
class LoadOptions:
    """What to load, and how.

    Args:
        is_strict: the model's and the checkpoint's parameters must be the same.
        has_optimizer: optimizer state and the groups' hyperparameters too.
        is_checked: compare checksums before anything is changed.
        names: of each of the optimizer's groups, its parameters, in order, for a format that has none of its own.
        optimizer: its class, where another format does not say which one it was.
        elsewhere: names that other pipeline stages hold.
    """

    is_strict: bool = True
    has_optimizer: bool = True
    is_checked: bool = True
    names: Sequence[Sequence[str]] = ()
    optimizer: str | None = None
    elsewhere: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Chosen:
    """A checkpoint that all ranks have agreed on."""

    storage: Storage
    folder: str
    manifest: Manifest

    @property
    def where(self) -> str:
        return f"checkpoint {self.folder} in {self.storage.url}"


class Load:
    """One load into one engine's model and optimizer, on one rank."""

    def __init__(
        self, comm: Communicator, shards: LocalShards, buffers: dict[str, torch.Tensor], wanted: LoadOptions
    ) -> None:
        self._comm = comm
        self._shards = shards
        self._buffers = buffers
        self._wanted = wanted
        self._apart: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers that are not contiguous, and their values
        self.num_compared = 0  # tensors whose values after ``apply`` have the sums that were saved

    def open(self, storage: Storage, folder: str) -> tuple[Chosen, StateReader]:
        """Read the manifest on every rank. Raises: CheckpointError: damaged, or not the same everywhere."""
        problem: Exception | None = None
        reader: StateReader | None = None
        try:
            if (theirs := directory.foreign_format(storage, folder)) is not None:
                reader = self._open_foreign(theirs, storage, folder)
            else:
                manifest = directory.inspect(storage, folder)
                reader = CheckpointReader(storage, folder, manifest, is_checked=self._wanted.is_checked)
        except (CheckpointError, OSError) as error:
            problem = error
        except NotBuiltError as error:  # raised on every rank as one of a checkpoint's
            problem = CheckpointError(error.what, where=error.where, do=error.do, code=error.code)
        stamps = agree(self._comm, problem, reader.manifest.created if reader else None, "checkpoint: manifest")
        if len(set(stamps)) > 1:
            raise CheckpointError(
                f"the ranks see different checkpoints under {folder!r} (written at {', '.join(sorted(set(stamps)))}).",
                where=storage.url,
                do="load from a folder that all nodes share.",
                code="checkpoint-storage",
            )
        assert reader is not None
        return Chosen(storage, folder, with_groups(reader.manifest, len(self._wanted.names))), reader

    def _open_foreign(self, format: ForeignFormat, storage: Storage, folder: str) -> StateReader:
        """Each rank compares the checksums in its share of the files."""
        wanted, comm = self._wanted, self._comm
        names = wanted.names if wanted.has_optimizer else ()
        model: dict[str, tuple[int, ...] | None] = dict.fromkeys(wanted.elsewhere)
        model.update(self._shards.global_shapes())
        model.update((name, tuple(buffer.shape)) for name, buffer in self._buffers.items())
        source = format.opening()(
            storage.url, folder, names=names, verify=wanted.is_checked, rank=comm.rank, size=comm.size, model=model
        )
        if source.about.optimizer is None and any(kind != MODEL for kind in source.kinds()):
            source.about.optimizer = wanted.optimizer
        return SourceReader(source, folder)

    # compare

    def compare(self, chosen: Chosen, groups: Sequence[Sequence[str]], optimizer: str | None) -> list[str]:
        """Compare a checkpoint with the model and the optimizer.

        Args:
            groups: names of the parameters of each of the optimizer's groups.

        Returns: notes on differences that are allowed.
        Raises: CheckpointError: lists all differences that are not.
        """
        manifest, strict = chosen.manifest, self._wanted.is_strict
        notes: list[str] = []
        problems: list[str] = []
        # A parameter without elements has no tensor.
        saved = {parameter.name: parameter.shape for parameter in manifest.parameters if 0 in parameter.shape}
        saved |= {tensor.name: tensor.shape for tensor in manifest.tensors if tensor.kind == MODEL}
        expected: dict[str, tuple[int, ...]] = {name: tuple(buffer.shape) for name, buffer in self._buffers.items()}
        frozen: set[str] = set()
        for group in self._shards.sharded.groups:
            for slot in group.buffer.layout.specs:
                expected[slot.name] = slot.global_shape
                if not group.is_trained:
                    frozen.add(slot.name)
        missing = [name for name in expected if name not in saved]
        left_out = [name for name in missing if name in frozen]
        if left_out and manifest.engine.get("excludes_frozen"):
            notes.append(f"{len(left_out)} frozen parameters are not in the checkpoint and keep their values.")
            missing = [name for name in missing if name not in frozen]
        # A format without aliases holds a tied weight under each of its names.
        aliases = {alias for names in names_of(self._shards.sharded.model)[1].values() for alias in names}
        unexpected = [name for name in saved if name not in expected and name not in aliases | self._wanted.elsewhere]
        for kind, result, names in (
            ("the checkpoint does not have", "keep their values", missing),
            ("the model does not have", "are left out", unexpected),
        ):
            if names:
                text = f"{kind} {len(names)}: {listed(names)}"
                (problems if strict else notes).append(text if strict else f"{text}; these {result}.")
        shapes = [
            f"{name} {list(saved[name])} in the checkpoint, {list(shape)} in the model"
            for name, shape in expected.items()
            if name in saved and saved[name] != tuple(shape)
        ]
        if shapes:
            problems.append(f"{len(shapes)} of another shape: {listed(shapes)}")
        if self._wanted.has_optimizer and self._shards.step is not None:
            named = {*missing, *unexpected} if strict else set()
            problems += self._compare_optimizer(manifest, groups, optimizer, notes, named)
        if problems:
            lines = "".join(f"\n    {problem}" for problem in problems)
            raise CheckpointError(
                f"the checkpoint does not fit this model and optimizer:{lines}",
                where=chosen.where,
                do="build the model and optimizer that were saved; load_module_strict=False loads what fits,"
                " load_optimizer_states=False leaves the optimizer out.",
                code="checkpoint-mismatch",
            )
        return notes

    def _compare_optimizer(
        self,
        manifest: Manifest,
        groups: Sequence[Sequence[str]],
        optimizer: str | None,
        notes: list[str],
        named: set[str],
    ) -> list[str]:
        """The differences between the optimizers, without those of parameters in ``named``."""
        if manifest.optimizer is None:
            notes.append("the checkpoint has no optimizer state; the optimizer state starts from zero.")
            return []
        problems = []
        if optimizer is not None and manifest.optimizer != optimizer:
            problems.append(f"its optimizer is {manifest.optimizer}, this one is {optimizer}")
        saved_groups: dict[int, set[str]] = {index: set() for index in range(len(manifest.groups))}
        for parameter in manifest.parameters:
            if parameter.group is not None:
                saved_groups.setdefault(parameter.group, set()).add(parameter.name)
        if len(saved_groups) != len(groups):
            problems.append(f"its optimizer has {len(saved_groups)} parameter groups, this one {len(groups)}")
        else:
            for index, names in enumerate(groups):
                here, there = set(names) - named, saved_groups[index] - named
                only_here, only_there = here - there, there - here
                if only_here or only_there:
                    problems.append(
                        f"group {index}: {listed(sorted(only_there)) or 'none'} only in the checkpoint's,"
                        f" {listed(sorted(only_here)) or 'none'} only in this optimizer's"
                    )
        wide = {t.name: tree.dtype_of(t.dtype) for t in manifest.tensors if t.kind == MODEL}
        narrowed = [
            slot.name
            for group in self._shards.sharded.trained_groups
            for slot in group.buffer.layout.specs
            if slot.name in wide and wide[slot.name].itemsize > group.main.dtype.itemsize
        ]
        if narrowed:
            problems.append(
                f"its main parameters have more precision than this run's, which would lose it: {listed(narrowed)}"
            )
        return problems

    # read

    def _targets(self, chosen: Chosen, *, is_real: bool) -> list[LocalShard]:
        targets = list(self._shards.model())
        self._apart.clear()
        for name, buffer in self._buffers.items():
            flat = buffer.detach().view(-1) if buffer.is_contiguous() else buffer.detach().reshape(-1).clone()
            if not buffer.is_contiguous():
                self._apart.append((buffer, flat))
            targets.append(LocalShard(MODEL, ParameterSpec.whole(name, tuple(buffer.shape)), 0, (flat,)))
        if self._wanted.has_optimizer and self._shards.step is not None and chosen.manifest.optimizer is not None:
            targets += list(self._shards.optimizer()) if is_real else list(self._expected_state(chosen.manifest))
        return [target for target in targets if target.numel]

    def _expected_state(self, manifest: Manifest) -> Any:
        """The optimizer state as it will be after the load, on the meta device."""
        kinds = sorted({tensor.kind for tensor in manifest.tensors if tensor.kind.startswith(OPTIMIZER)})
        for shard in self._shards.model():
            for kind in kinds:
                if manifest.find(kind, shard.name) is not None:
                    nothing = torch.empty(shard.numel, dtype=torch.float32, device="meta")
                    yield LocalShard(kind, shard.spec, shard.begin, (nothing,))

    def check(self, chosen: Chosen, reader: StateReader) -> None:
        """Read and compare, on every rank. Raises: CheckpointError: on every rank, the damage that was found."""
        problem: Exception | None = None
        try:
            reader.check(reader.plan(self._targets(chosen, is_real=False)))
        except (CheckpointError, OSError) as error:
            problem = error
        agree(self._comm, problem, None, "checkpoint: check")

    @torch.no_grad()
    def apply(self, chosen: Chosen, reader: StateReader) -> None:
        """Copy the values into parameters and optimizer state.

        Communicates: where parameters are not sharded and their owned ranges are: one all_gather of each buffer.
        """
        axes = self._shards.axes
        axes.drain()  # peers may still read what is about to change
        if self._wanted.has_optimizer and self._shards.step is not None and chosen.manifest.optimizer is not None:
            self._allocate_state(chosen.manifest)
        problem: Exception | None = None
        try:
            reader.run(reader.plan(self._targets(chosen, is_real=True)))
            self._shards.leave()
        except (CheckpointError, OSError) as error:
            problem = error
        agree(self._comm, problem, None, "checkpoint: applied")
        if self._shards.step is not None:
            self._shards.step.state_was_loaded()
        if self._wanted.is_checked:
            self.num_compared = self._compare_sums(chosen)
        for kept in [kept for group in self._shards.states for kept in group.kept]:
            kept.restore()
        for buffer, flat in self._apart:
            _set(buffer, flat.view(buffer.shape))
        self._apart.clear()
        self.publish()

    def _compare_sums(self, chosen: Chosen) -> int:
        """Compare what all ranks have now with the sums that were saved. Returns: the number of tensors compared.

        Not compared: values that are rounded when they are set, and state that no optimizer has.
        Raises: CheckpointError: on every rank, the tensors that differ.
        Communicates: one all_reduce of 24 bytes for each tensor of the checkpoint.
        """
        records = [record for record in chosen.manifest.tensors if record.sums is not None]
        at = {(record.kind, record.name): index for index, record in enumerate(records)}
        found = [[0, 0, 0] for _ in records]
        kinds = [self._shards.model()]
        if self._wanted.has_optimizer and chosen.manifest.optimizer is not None:
            kinds.append(self._shards.optimizer())
        for shard in chain.from_iterable(kinds):
            index = at.get((shard.kind, shard.name))
            if index is None or shard.kind.removeprefix(OPTIMIZER) in _KEPT:
                continue
            sums, numel = shard.sums_of_share(tree.dtype_of(records[index].dtype))
            found[index] = [old + new for old, new in zip(found[index], (*sums, numel), strict=True)]
        self._shards.leave()
        if not records:
            return 0
        # Numbers below 2^32 of any number of ranks have exact sums in float64.
        vector = torch.tensor(found, dtype=torch.float64, device="cpu").flatten().to(self._shards.sharded.device)
        self._comm.all_reduce(vector, label="checkpoint: sums").wait()
        num_compared, differ = 0, []
        for record, (total, weighted, numel) in zip(records, vector.view(-1, 3).long().tolist(), strict=True):
            if numel != record.numel or not numel:
                continue
            num_compared += 1
            if added((total, weighted), NOTHING) != record.sums:
                differ.append(f"{record.kind} {record.name!r}")
        if differ:
            raise CheckpointError(
                f"{len(differ)} of {num_compared} tensors are not what was saved, although every block of the files is:"
                f" {listed(differ)}.",
                where=chosen.where,
                do="do not continue this run. Load the checkpoint on as many ranks as saved it, and report this: it is"
                " a fault of Shoal, or of a machine's memory.",
                code="checkpoint-sums",
            )
        return num_compared

    def summary(self, chosen: Chosen) -> str:
        """A sentence on what ``apply`` has loaded, by this rank's model."""
        manifest = chosen.manifest
        names = {*self._shards.global_shapes(), *self._buffers}
        number = Counter(record.kind == MODEL for record in manifest.tensors if record.name in names)
        ranks = manifest.world.get("size")
        saved = "" if ranks is None else f", saved by {counted(ranks, 'rank')}"
        if self._wanted.has_optimizer and self._shards.step is not None and manifest.optimizer is not None:
            state = f"{counted(number[False], 'tensor')} of optimizer state"
        else:
            state = "no optimizer state"
        values = counted(number[True], "parameter or buffer", "parameters and buffers")
        checked = f"; {self.num_compared} have the checksums of the save" if self.num_compared else ""
        return f"loaded {chosen.folder}{saved}: {values}, {state}{checked}."

    def _allocate_state(self, manifest: Manifest) -> None:
        step = self._shards.step
        assert step is not None
        scalars = {p.name: tree.decode(p.scalars, _no_tensor) for p in manifest.parameters}
        saved: dict[str, dict[str, str]] = {}
        for tensor in manifest.tensors:
            if tensor.kind.startswith(OPTIMIZER) and tensor.kind.removeprefix(OPTIMIZER) not in _KEPT:
                saved.setdefault(tensor.name, {})[tensor.kind.removeprefix(OPTIMIZER)] = tensor.dtype
        for group in self._shards.states:
            slots, own = group.buffer.layout.specs, step.state_dtype or group.main.dtype
            dtypes = []
            for slot in slots:
                master = manifest.find(MODEL, slot.name)
                # State in its master weight's dtype gets that of this engine's state.
                dtypes.append(
                    {
                        key: own if master is not None and dtype == master.dtype else tree.dtype_of(dtype)
                        for key, dtype in saved.get(slot.name, {}).items()
                    }
                )
            found = {
                key for key in _KEPT if any(manifest.find(OPTIMIZER + key, slot.name) is not None for slot in slots)
            }
            for kept in group.kept:
                kept.expect(found)
            with group.resident():
                step.allocate_state(group, [scalars.get(slot.name, {}) for slot in slots], dtypes)

    def publish(self) -> None:
        """Copy main parameters to parameters, and gather those that are not sharded."""
        for group in self._shards.sharded.groups:
            group.publish()


def _set(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Copy into a view of any strides. An expanded dim has one element in memory and is written once."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim] > 1:
            buffer, value = buffer.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    buffer.copy_(value)


def _no_tensor(name: str) -> torch.Tensor:
    raise damaged(f"tensor {name!r} where a number was expected.", "")


def with_groups(manifest: Manifest, number: int) -> Manifest:
    """The manifest of ``number`` groups: each group of experts joined to the first one with the same hyperparameters.

        the script      [embed, up 0, up 1, ...] lr 0.1    [bias, ...] lr 0.2
        as saved        [embed, ...] lr 0.1    [bias, ...] lr 0.2    [up 0, up 1, ...] lr 0.1, moe: true

    Where it has ``number`` groups already, or joining does not give ``number``, it stays as it is.
    """
    plain = [
        {key: value for key, value in group.items() if key not in ("name", "moe")} if isinstance(group, dict) else group
        for group in manifest.groups
    ]
    kept: list[int] = []
    new: dict[int | None, int] = {}
    for index, group in enumerate(manifest.groups):
        is_experts = isinstance(group, dict) and bool(group.get("moe"))
        same = next((first for first in kept if plain[first] == plain[index]), None) if is_experts else None
        if same is None:
            kept.append(index)
        new[index] = kept.index(index if same is None else same)
    if len(manifest.groups) == number or len(kept) != number:
        return manifest
    parameters = [record.model_copy(update={"group": new.get(record.group)}) for record in manifest.parameters]
    groups = [manifest.groups[index] for index in kept]
    return manifest.model_copy(update={"groups": groups, "parameters": parameters})
