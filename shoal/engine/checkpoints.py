"""What an engine saves beside its tensors: counters, schedule, loss scale, generators, the place in the data.

``checkpoint`` moves tensors and commits files; here is what the engine knows about itself.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from shoal.checkpoint import open_gradients, tree
from shoal.checkpoint.commit import Retention
from shoal.checkpoint.holdings import Holdings, buffers_of, names_of
from shoal.checkpoint.load import Chosen, Load, Wanted, agree, candidates
from shoal.checkpoint.manifest import MODEL, ParameterRecord, versions
from shoal.checkpoint.reader import CheckpointReader
from shoal.checkpoint.save import Options, Save, State
from shoal.checkpoint.storage import Storage, open_storage
from shoal.engine.log import logger, say_on_rank_0
from shoal.errors import CheckpointError, CommError, UsageError

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,150}")
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Checkpoints:
    """Saves and loads one engine.

    ``on_phase`` is called by name as a save goes on (``"snapshot"``, ``"shard_write"``, ...).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = cast(Any, weakref.proxy(engine))
        self.on_phase: Callable[[str], None] = lambda phase: None
        self._in_flight: Save | None = None
        self._host: torch.Tensor | None = None
        self._farewell: Callable[[], None] | None = None

    @property
    def _settings(self) -> Any:
        return self._engine._config_object.checkpoint

    def _holdings(self) -> Holdings:
        engine = self._engine
        return Holdings(engine.sharded, engine.bucket_states, engine._optimizer_step, engine.axes)

    # save

    def save(
        self,
        folder: str | os.PathLike[str],
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        *,
        save_latest: bool,
        exclude_frozen: bool,
    ) -> bool:
        """Save. Returns: was it? (False only with ``checkpoint.on_save_error`` ``"warn"``.)"""
        engine = self._engine
        self.finish()
        engine.sharded.finish_backward()
        storage = open_storage(folder)
        settings = self._settings
        tag = self._agreed_tag(tag if tag is not None else f"global_step{engine.global_steps}")
        options = Options(save_latest, settings.async_save, Retention(settings.keep_last, settings.keep_every))
        holdings = self._holdings()
        wanted = list(holdings.model(exclude_frozen=exclude_frozen)) + list(holdings.optimizer())
        try:
            save = Save(
                engine.axes.all,
                storage,
                tag,
                [holding for holding in wanted if holding.numel],
                self._state(holdings, client_state, exclude_frozen=exclude_frozen),
                options,
                self.on_phase,
                self._host_memory,
                engine.device,
            )
        except CheckpointError as error:
            return self._report(error)
        if not save.is_done:
            self._in_flight = save
            self._say_goodbye()
        return True

    def _report(self, error: CheckpointError) -> bool:
        if self._settings.on_save_error == "warn":
            logger.error("%s", error)
            return False
        raise error

    def _agreed_tag(self, tag: str) -> str:
        if not _TAG.fullmatch(str(tag)):
            raise CheckpointError(
                f"{tag!r} cannot be the name of a folder.",
                do="use letters, digits, '.', '_', '-', '=' and '+'.",
                code="checkpoint-tag",
            )
        comm = self._engine.axes.all
        tags = [str(tag)] if comm.size == 1 else list(comm.gather_objects(str(tag), label="checkpoint: tag"))
        if len(set(tags)) > 1:
            validation = self._settings.tag_validation
            if validation == "Fail":
                raise CheckpointError(
                    f"the ranks save under different tags: {', '.join(sorted(set(tags))[:5])}.",
                    do="give every rank the same tag.",
                    code="checkpoint-tag",
                )
            if validation == "Warn" and comm.rank == 0:
                logger.warning("the ranks' tags differ (%s); rank 0's is taken.", ", ".join(sorted(set(tags))[:5]))
        return str(tags[0])

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        """One buffer for all snapshots: asking the system for its pages costs more than the copy."""
        if self._host is None or self._host.numel() < nbytes:
            self._host = None
            self._host = self._engine._device.host_memory(nbytes)
        return self._host

    def _state(self, holdings: Holdings, client_state: Any, *, exclude_frozen: bool) -> State:
        engine = self._engine
        records = self._parameters()
        buffers = buffers_of(engine.module)
        tensors = {(MODEL, name): buffer for name, buffer in buffers.items()} if engine.axes.all.rank == 0 else {}
        optimizer = engine.optimizer
        groups = []
        if optimizer is not None:
            groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        loader = engine.training_dataloader
        is_stateful = self._engine._config_object.data.stateful and hasattr(loader, "state_dict")
        return State(
            step=engine.global_steps,
            parameters=records,
            versions=versions(),
            world={"size": engine.axes.all.size, "dp_shard": engine.axes.inner.size, "stage": engine.plan.zero.stage},
            table=engine.sharded.table.as_dict(),
            config=_plain(engine._config_object.effective()),
            groups=groups,
            optimizer=type(optimizer.optimizer).__name__ if optimizer is not None else None,
            engine={
                "counters": {name: getattr(engine, name) for name in _COUNTERS},
                "micro_in_step": engine._micro_in_step,
                "accumulation_steps": engine.gradient_accumulation_steps(),
                "micro_batch": engine.train_micro_batch_size_per_gpu(),
                "schedule": _schedule_state(engine.lr_scheduler),
                "loss_scale": engine._loss_scale.state_dict() if engine._loss_scale is not None else None,
                "data": loader.state_dict() if is_stateful else None,
                "excludes_frozen": exclude_frozen,
                "layout": open_gradients.layout_of(engine.bucket_states),
                "extra_state": _extra_state(engine.module),
            },
            client_state=dict(client_state or {}),
            tensors=tensors,
            own={
                "generators": self._generators(),
                "buffers": self._differing_buffers(buffers),
                "gradients": open_gradients.take(engine.bucket_states),
                "losses": [float(loss) for loss in engine._losses],
                "styles": sorted(engine._styles),
            },
            scalars=holdings.scalars(),
        )

    def _parameters(self) -> list[ParameterRecord]:
        engine = self._engine
        names, aliases = names_of(engine.module)
        group_of = {}
        if engine.optimizer is not None:
            group_of = {id(p): i for i, g in enumerate(engine.optimizer.param_groups) for p in g["params"]}
        return [
            ParameterRecord(
                name=names[id(parameter)],
                aliases=list(aliases.get(names[id(parameter)], ())),
                dtype=tree.name_of(parameter.dtype),
                shape=tuple(parameter.shape),
                group=group_of.get(id(parameter)),
            )
            for parameter in engine.module.parameters()
        ]

    def _generators(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state()
        return {
            "torch": torch.get_rng_state(),
            **self._engine._device.generator_states(),
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": {
                "kind": kind,
                "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
                "rest": [position, has_gauss, float(cached)],
            },
        }

    def _set_generators(self, saved: dict[str, Any]) -> None:
        torch.set_rng_state(saved["torch"])
        self._engine._device.set_generator_states({k: v for k, v in saved.items() if k == "cuda"})
        python = saved["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        numpy = saved["numpy"]
        keys = numpy["keys"].numpy().astype(np.uint32)
        np.random.set_state((numpy["kind"], keys, *numpy["rest"]))

    def _differing_buffers(self, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's buffers that are not what rank 0's are (running statistics, say)."""
        comm = self._engine.axes.all
        if comm.size == 1 or not buffers:
            return {}
        from shoal.checkpoint.manifest import checksum

        sums = {
            name: checksum(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, buffer in buffers.items()
        }
        first = comm.gather_objects(sums, label="checkpoint: buffers")[0]
        return {name: buffer for name, buffer in buffers.items() if first.get(name) != sums[name]}

    # an asynchronous save that is under way

    def poll(self) -> None:
        """At the end of a step. Raises: CheckpointError: a writer failed, on every rank."""
        if self._in_flight is None:
            return
        save = self._in_flight
        try:
            save.poll()
        except CheckpointError as error:
            self._in_flight = None
            self._report(error)
        if save.is_done:
            self._in_flight = None

    def finish(self) -> None:
        """Wait for a save that is under way. Every rank calls. Raises: CheckpointError: as ``poll``."""
        if self._in_flight is None:
            return
        save, self._in_flight = self._in_flight, None
        try:
            save.finish()
        except CheckpointError as error:
            self._report(error)

    def _say_goodbye(self) -> None:
        """A process that ends in good order waits for what it is writing."""
        if self._farewell is not None:
            return
        mine = weakref.ref(self)

        def finish() -> None:
            checkpoints = mine()
            if checkpoints is None:
                return
            try:
                checkpoints.finish()
            except CommError as error:
                logger.error("the last checkpoint may not be committed: %s", error)

        self._farewell = finish
        atexit.register(finish)

    def close(self) -> None:
        """Wait, and forget."""
        self.finish()
        if self._farewell is not None:
            atexit.unregister(self._farewell)
            self._farewell = None
        self._host = None

    # load

    def load(
        self,
        folder: str | os.PathLike[str],
        tag: str | None,
        *,
        is_strict: bool,
        has_optimizer: bool,
        has_schedule: bool,
        is_module_only: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> tuple[str, Any]:
        """Load. Returns: the checkpoint's path and the client state."""
        engine = self._engine
        self.finish()
        storage = open_storage(folder)
        comm = engine.axes.all
        is_checked = bool(self._settings.verify)
        wanted = Wanted(is_strict, has_optimizer and not is_module_only and engine.optimizer is not None, is_checked)
        holdings = self._holdings()
        load = Load(comm, holdings, buffers_of(engine.module), wanted)
        names = names_of(engine.module)[0]
        groups: list[list[str]] = []
        optimizer = None
        if engine.optimizer is not None:
            groups = [[names[id(p)] for p in g["params"]] for g in engine.optimizer.param_groups]
            optimizer = type(engine.optimizer.optimizer).__name__
        folders = candidates(comm, storage, tag)
        for index, name in enumerate(folders):
            try:
                chosen, reader = load.open(storage, name)
                notes = load.compare(chosen, groups, optimizer)
                trees = self._read_trees(chosen, reader)
                if is_checked:
                    load.check(chosen, reader)
            except CheckpointError as error:
                if error.code not in ("checkpoint-damaged", "checkpoint-unsafe") or index + 1 == len(folders):
                    raise
                logger.warning("%s is damaged, so %s is loaded instead: %s", name, folders[index + 1], error)
                continue
            break
        engine.sharded.recover()
        if custom_load_fn is not None:
            values = {t.name: reader.tensor(MODEL, t.name) for t in chosen.manifest.tensors if t.kind == MODEL}
            self._with_whole_parameters(lambda: custom_load_fn(src=values, dst=engine.module))
            if wanted.has_optimizer:
                logger.warning("custom_load_fn was given, so only the model was loaded.")
        else:
            load.apply(chosen, reader)
        if not is_module_only and custom_load_fn is None:
            self._restore(chosen, trees, has_schedule=has_schedule, has_optimizer=wanted.has_optimizer)
        for note in (*notes, *self._config_changes(chosen)):
            say_on_rank_0(engine.global_rank, note)
        agree(comm, None, None, "checkpoint: loaded")
        return f"{storage.url}/{chosen.folder}", trees["client_state"]

    def _read_trees(self, chosen: Chosen, reader: CheckpointReader) -> dict[str, Any]:
        """The nested values, whole, before anything is changed."""
        manifest = chosen.manifest
        rank = self._engine.axes.all.rank
        ranks = manifest.engine.get("ranks", [])
        kind = f"rank/{rank}"
        problem: Exception | None = None
        trees: dict[str, Any] = {}
        try:
            extra = lambda name: reader.tensor("extra", name)  # noqa: E731
            engine_tree = {k: v for k, v in manifest.engine.items() if k != "ranks"}
            trees = {
                "engine": tree.decode(engine_tree, extra),
                "groups": tree.decode(manifest.groups, extra),
                "client_state": tree.decode(manifest.client_state, extra),
                "own": tree.decode(ranks[rank], lambda name: reader.tensor(kind, name)) if rank < len(ranks) else None,
            }
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            problem = (
                error
                if isinstance(error, CheckpointError)
                else CheckpointError(
                    f"the state beside the tensors cannot be read: {type(error).__name__}: {error}.",
                    where=chosen.where,
                    code="checkpoint-damaged",
                )
            )
        agree(self._engine.axes.all, problem, None, "checkpoint: state")
        saved = trees["engine"].get("layout")
        own = trees["own"]
        has_open = bool(own and own["gradients"])
        if any(agree(self._engine.axes.all, None, has_open, "checkpoint: open gradients")):
            same_size = len(ranks) == self._engine.axes.all.size
            if not same_size or saved != open_gradients.layout_of(self._engine.bucket_states):
                open_gradients.put([], [None], saved)
        return trees

    def _restore(self, chosen: Chosen, trees: dict[str, Any], *, has_schedule: bool, has_optimizer: bool) -> None:
        engine = self._engine
        saved = trees["engine"]
        for name, value in saved.get("counters", {}).items():
            if name in _COUNTERS:
                setattr(engine, name, int(value))
        if has_optimizer and chosen.manifest.optimizer is not None and engine.optimizer is not None:
            for group, values in zip(engine.optimizer.param_groups, trees["groups"], strict=True):
                group.update(values)
        if has_schedule and saved.get("schedule") is not None and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(saved["schedule"])
        if saved.get("loss_scale") is not None and engine._loss_scale is not None:
            engine._loss_scale.load_state_dict(saved["loss_scale"])
            if engine.optimizer is not None:
                engine.optimizer.loss_scale = engine._loss_scale.scale
        for name, value in (saved.get("extra_state") or {}).items():
            module = engine.module.get_submodule(name)
            module.set_extra_state(value)
        loader = engine.training_dataloader
        if saved.get("data") is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(saved["data"])
        engine._forget_losses()
        engine._has_backward = False
        engine._micro_in_step = int(saved.get("micro_in_step", 0))
        own = trees["own"]
        if own is None:
            logger.warning(
                "rank %d was not there when %s was saved: its generators start anew.",
                engine.axes.all.rank,
                chosen.folder,
            )
            torch.manual_seed(int(torch.initial_seed()) + engine.axes.all.rank)
            open_gradients.put(engine.bucket_states, [], None)
            return
        self._set_generators(own["generators"])
        buffers = buffers_of(engine.module)
        with torch.no_grad():
            for name, value in own["buffers"].items():
                buffers[name].copy_(value)
        open_gradients.put(engine.bucket_states, own["gradients"], saved.get("layout"))
        if own["gradients"]:
            engine._has_backward = True
            engine._losses = [torch.tensor(loss, device=engine.device) for loss in own["losses"]]
            engine._styles = set(own["styles"])

    def _config_changes(self, chosen: Chosen) -> list[str]:
        """Which settings are not what they were when the checkpoint was saved."""
        if not chosen.manifest.config:
            return []  # it was converted from another format
        before, now = _flat(chosen.manifest.config), _flat(_plain(self._engine._config_object.effective()))
        changes = [
            f"{key}: {before.get(key)!r} when saved, {now.get(key)!r} now"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if not changes:
            return []
        return [f"{len(changes)} settings differ from the checkpoint's: {'; '.join(changes[:12])}."]

    # weights alone

    def _with_whole_parameters(self, use: Callable[[], Any]) -> Any:
        """Run ``use`` while every parameter is whole; what it writes into them counts, on every rank alike."""
        engine = self._engine
        with engine.sharded.gathered(engine.sharded.sharded):
            result = use()
            with torch.no_grad():
                for bucket, state in self._holdings().buckets():
                    if state is not None and state.has_own_master:
                        own = bucket.full[bucket.begin : bucket.end]
                        was = state.master.to(own.device)
                        changed = was.to(own.dtype) != own
                        state.master.copy_(torch.where(changed, own.to(was.dtype), was))
                    bucket.write_back()
        return result

    def module_state_dict(self, *, exclude_frozen: bool) -> dict[str, Any]:
        """Whole values by name, on the host, on every rank.

        Communicates: where parameters are sharded, an all_gather of each unit, in turn.
        Memory: the whole model on the host, and one unit on the device.
        """
        engine = self._engine
        engine.sharded.finish_backward()
        values: dict[str, torch.Tensor] = {}
        names = names_of(engine.module)[0]
        for unit in engine.sharded.units:
            with engine.sharded.gathered([unit] if unit.is_sharded else []):
                for bucket in unit.buckets:
                    if exclude_frozen and not any(p.requires_grad for p in bucket.parameters):
                        continue
                    for parameter in bucket.parameters:
                        values[names[id(parameter)]] = parameter.detach().to("cpu", copy=True)
        found: dict[str, Any] = {}
        buffers = buffers_of(engine.module)
        first = dict(engine.module.named_parameters(remove_duplicate=False))
        for name, parameter in first.items():
            if names[id(parameter)] in values:
                found[name] = values[names[id(parameter)]]
        found |= {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}
        return found

    def load_module_state_dict(
        self, state_dict: Mapping[str, Any], *, is_strict: bool, custom_load_fn: Callable[..., Any] | None
    ) -> None:
        """Set the model's values from whole ones, the same on every rank. Master weights follow."""
        engine = self._engine
        module: nn.Module = engine.module
        if custom_load_fn is not None:
            self._with_whole_parameters(lambda: custom_load_fn(src=state_dict, dst=module))
            return
        own = {**dict(module.named_parameters(remove_duplicate=False)), **buffers_of(module)}
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own and not name.endswith("_extra_state")]
        shapes = [
            f"{name} {list(state_dict[name].shape)}, the model has {list(tensor.shape)}"
            for name, tensor in own.items()
            if name in state_dict and tuple(state_dict[name].shape) != tuple(tensor.shape)
        ]
        problems = [f"of another shape: {'; '.join(shapes[:8])}"] if shapes else []
        if is_strict:
            problems += [f"missing: {', '.join(missing[:8])}"] if missing else []
            problems += [f"unexpected: {', '.join(unexpected[:8])}"] if unexpected else []
        if problems:
            raise CheckpointError(
                f"the state_dict is not one of this model; {'; '.join(problems)}.",
                do="pass the values of this model; strict=False takes what fits.",
                code="checkpoint-mismatch",
            )
        done: set[int] = set()
        with torch.no_grad():
            for name, tensor in own.items():
                if name not in state_dict or id(tensor) in done:
                    continue
                done.add(id(tensor))
                if isinstance(tensor, nn.Parameter) and engine.access.knows(tensor):
                    engine.access.set_full_parameter(tensor, state_dict[name].to(engine.device))
                elif isinstance(tensor, nn.Parameter):
                    self._set_frozen(tensor, state_dict[name])
                else:
                    tensor.copy_(state_dict[name])

    def _set_frozen(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        unit = self._engine.sharded.unit_of[id(parameter)]
        for bucket in unit.buckets:
            for slot, member in zip(bucket.layout.slots, bucket.parameters, strict=True):
                if member is not parameter:
                    continue
                bucket.comm.drain()
                flat = value.reshape(-1).to(bucket.full.device, bucket.dtype)
                if bucket.is_sharded:
                    low, high = max(slot.offset, bucket.begin), min(slot.offset + slot.numel, bucket.end)
                    if low < high:
                        bucket.shard[low - bucket.begin : high - bucket.begin] = flat[
                            low - slot.offset : high - slot.offset
                        ]
                else:
                    bucket.views[bucket.parameters.index(member)].copy_(flat.view(slot.shape))

    def save_16bit_model(self, folder: str | os.PathLike[str], name: str, *, exclude_frozen: bool) -> bool:
        """Write the weights alone, in the parameters' dtype, as one safetensors file; rank 0 writes."""
        from shoal.checkpoint.blocks import Entry, plan_file, write_file

        engine = self._engine
        engine.sharded.finish_backward()
        storage: Storage = open_storage(folder)
        comm = engine.axes.all
        values = self.module_state_dict(exclude_frozen=exclude_frozen)
        problem: Exception | None = None
        if comm.rank == 0:
            try:
                storage.make_folder("")
                first = names_of(engine.module)[0]
                kept = {*first.values(), *buffers_of(engine.module)}
                entries = [
                    Entry(key, value.dtype, tuple(value.shape), lambda value=value: (value.reshape(-1),))  # type: ignore[misc]
                    for key, value in values.items()
                    if key in kept
                ]
                storage.remove(name)
                write_file(storage, "", name, plan_file(entries))
            except (OSError, CheckpointError) as error:
                problem = error
        agree(comm, problem, None, "checkpoint: weights")
        return True


def _plain(value: Any) -> Any:
    """A config as JSON holds it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return value
    return str(value)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{path}.{key}" if path else key).items()}
    return {path: value}


def _schedule_state(schedule: Any) -> Any:
    if schedule is None or not hasattr(schedule, "state_dict"):
        return None
    state = schedule.state_dict()
    if not isinstance(state, Mapping):
        raise UsageError(f"{type(schedule).__name__}.state_dict() is no dict.", code="schedule-state")
    # What a schedule computes with (functions) comes from the script again.
    return {key: value for key, value in state.items() if not callable(value)}


def _extra_state(module: nn.Module) -> dict[str, Any]:
    return {
        name: part.get_extra_state()
        for name, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }
