"""An engine's checkpoints: what is saved and loaded, when, and with which of the config's settings."""

from __future__ import annotations

import atexit
import os
import re
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from shoal.checkpoint import catalogue, open_gradients, tree
from shoal.checkpoint.choose import candidates
from shoal.checkpoint.commit import Retention
from shoal.checkpoint.holdings import Holdings, buffers_of, names_of
from shoal.checkpoint.load import Chosen, Load, Wanted, agree
from shoal.checkpoint.manifest import MODEL, ParameterRecord, collecting_nothing, versions
from shoal.checkpoint.reader import StateReader
from shoal.checkpoint.save import Options, Save, State
from shoal.checkpoint.storage import Storage, open_storage
from shoal.device import host_empty
from shoal.engine import run_state
from shoal.engine.log import logger, say_on_rank_0
from shoal.engine.weights import holdings_of
from shoal.errors import CheckpointError, CommError, UsageError

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,150}")


# Prepares, on rank 0, what goes beside a checkpoint: of an engine, in a storage, by a tag, with a client state, perhaps
# without what is frozen. What it returns is called once the checkpoint is committed.
Beside = Callable[["Engine", Storage, str, Mapping[str, Any], bool], Callable[[], None]]


class TagsDifferError(CheckpointError, AssertionError):
    """Ranks gave different tags. DeepSpeed asserts that they are the same, so an AssertionError too."""

    code = "checkpoint-tag"


class Checkpointing:
    """Saves and loads one engine.

    ``on_phase`` is called by name as a save goes on (``"snapshot"``, ``"shard_write"``, ...).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = cast(Any, weakref.proxy(engine))
        self.on_phase: Callable[[str], None] = lambda phase: None
        self._in_flight: Save | None = None
        self._host: torch.Tensor | None = None
        self._farewell: Callable[[], None] | None = None
        self.beside: Beside | None = None
        self._after: Callable[[], None] | None = None
        self.loaded_size: int | None = None  # ranks of the run that saved what was loaded last

    @property
    def _settings(self) -> Any:
        return self._engine._config_object.checkpoint

    # save

    @collecting_nothing()
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
        self.finish()
        engine = self._engine
        engine.sharded.finish_backward()
        storage = open_storage(folder)
        settings = self._settings
        tag = self._agreed_tag(tag if tag is not None else f"global_step{engine.global_steps}")
        options = Options(save_latest, settings.async_save, Retention(settings.keep_last, settings.keep_every))
        holdings = holdings_of(self._engine)
        wanted = list(holdings.model(exclude_frozen=exclude_frozen)) + list(holdings.optimizer())
        problem: Exception | None = None
        state: Any = None
        try:
            state = self._state(holdings, client_state, exclude_frozen=exclude_frozen)
        except (CheckpointError, UsageError, TypeError, ValueError) as error:
            problem = error
        agree(engine.axes.all, problem, None, "checkpoint: own state")
        try:
            save = Save(
                engine.axes.all,
                storage,
                tag,
                [holding for holding in wanted if holding.numel],
                state,
                options,
                self.on_phase,
                self._host_memory,
                engine.device,
            )
        except CheckpointError as error:
            return self._report(error)
        finally:
            holdings.leave()
        if self.beside is not None and engine.axes.all.rank == 0:
            self._after = self.beside(engine, storage, tag, client_state or {}, exclude_frozen)
        if save.is_done:
            self._write_beside()
            self._meet()
        else:
            self._in_flight = save
            for bucket_state in engine.bucket_states:
                bucket_state.before_change = save.wait_taken
            self._say_goodbye()
        return True

    def _write_beside(self) -> None:
        """The checkpoint is committed; what goes with it cannot undo that."""
        after, self._after = self._after, None
        if after is None:
            return
        try:
            after()
        except (OSError, CheckpointError) as error:
            logger.warning(
                "the checkpoint is saved, but not all that goes beside it for DeepSpeed's clients: %s", error
            )

    def _meet(self) -> None:
        """No rank goes on before what rank 0 wrote beside the checkpoint is there."""
        if self.beside is not None:
            agree(self._engine.axes.all, None, None, "checkpoint: beside")

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
                raise TagsDifferError(
                    f"the ranks save under different tags: {', '.join(sorted(set(tags))[:5])}.",
                    do="give every rank the same tag.",
                )
            if validation == "Warn" and comm.rank == 0:
                logger.warning("the ranks' tags differ (%s); rank 0's is taken.", ", ".join(sorted(set(tags))[:5]))
        return str(tags[0])

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        """One buffer for all snapshots: asking the system for its pages costs more than the copy."""
        if self._host is None or self._host.numel() < nbytes:
            self._host = None
            self._host = host_empty(nbytes, torch.uint8, self._engine.device)
        return self._host

    def _state(self, holdings: Holdings, client_state: Any, *, exclude_frozen: bool) -> State:
        engine = self._engine
        if client_state is not None and not isinstance(client_state, Mapping):
            raise CheckpointError(
                f"client_state is of type {type(client_state).__name__}, not a dict.",
                do="pass a dict whose values are numbers, text, lists, dicts and tensors.",
                code="checkpoint-state",
            )
        settings = engine._config_object
        buffers = buffers_of(engine.module)
        tensors = {(MODEL, name): buffer for name, buffer in buffers.items()} if engine.axes.all.rank == 0 else {}
        optimizer = engine.sharded_optimizer
        groups = []
        if optimizer is not None:
            groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return State(
            step=engine.global_steps,
            parameters=self._parameters(),
            versions=versions(),
            world={"size": engine.axes.all.size, "dp_shard": engine.axes.inner.size, "stage": engine.plan.zero.stage},
            table=engine.sharded.table.as_dict(),
            config=lambda: _plain(settings.effective()),
            groups=groups,
            optimizer=type(optimizer.optimizer).__name__ if optimizer is not None else None,
            engine=run_state.shared(engine, exclude_frozen=exclude_frozen),
            client_state=dict(client_state or {}),
            tensors=tensors,
            own=run_state.own(engine, buffers),
            scalars=holdings.scalars(),
        )

    def _parameters(self) -> Callable[[], list[ParameterRecord]]:
        engine = self._engine
        names, aliases = names_of(engine.module)
        parameters = list(engine.module.parameters())
        group_of = {}
        if engine.sharded_optimizer is not None:
            group_of = {id(p): i for i, g in enumerate(engine.sharded_optimizer.param_groups) for p in g["params"]}

        def describe() -> list[ParameterRecord]:
            return [
                ParameterRecord(
                    name=names[id(parameter)],
                    aliases=list(aliases.get(names[id(parameter)], ())),
                    dtype=tree.name_of(parameter.dtype),
                    shape=tuple(parameter.shape),
                    group=group_of.get(id(parameter)),
                )
                for parameter in parameters
            ]

        return describe

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
            self._write_beside()

    def finish(self) -> None:
        """Wait for a save that is under way. Every rank calls. Raises: CheckpointError: as ``poll``."""
        if self._in_flight is None:
            return
        save, self._in_flight = self._in_flight, None
        try:
            save.finish()
        except CheckpointError as error:
            self._report(error)
            return
        self._write_beside()
        self._meet()

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
        holdings = holdings_of(self._engine)
        names = names_of(engine.module)[0]
        groups: list[list[str]] = []
        optimizer = None
        if engine.sharded_optimizer is not None:
            groups = [[names[id(p)] for p in g["params"]] for g in engine.sharded_optimizer.param_groups]
            optimizer = type(engine.sharded_optimizer.optimizer).__name__
        has_optimizer = has_optimizer and not is_module_only and engine.sharded_optimizer is not None
        wanted = Wanted(is_strict, has_optimizer, is_checked, groups, optimizer)
        load = Load(comm, holdings, buffers_of(engine.module), wanted)
        folders = candidates(comm, storage, tag, is_universal=bool(self._settings.load_universal))
        for index, name in enumerate(folders):
            try:
                chosen, reader = load.open(storage, name)
                notes = [*reader.notes, *load.compare(chosen, groups, optimizer)]
                trees = self._read_trees(chosen, reader)
                if not is_module_only:
                    notes += self._compare_own(chosen, trees, is_strict=is_strict, has_schedule=has_schedule)
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
            engine.weights.with_whole_parameters(lambda: custom_load_fn(src=values, dst=engine.module))
            if wanted.has_optimizer:
                logger.warning("custom_load_fn was given, so only the model was loaded.")
        else:
            load.apply(chosen, reader)
        if not is_module_only and custom_load_fn is None:
            if wanted.has_optimizer and chosen.manifest.optimizer is not None and engine.sharded_optimizer is not None:
                for group, values in zip(engine.sharded_optimizer.param_groups, trees["groups"], strict=True):
                    group.update(values)
            self._restore(chosen, trees, has_schedule=has_schedule)
        self.loaded_size = chosen.manifest.world.get("size")
        for note in (*notes, *self._config_changes(chosen)):
            say_on_rank_0(engine.global_rank, note)
        agree(comm, None, None, "checkpoint: loaded")
        return f"{storage.url}/{chosen.folder}", trees["client_state"]

    def load_if_there(self, folder: str | os.PathLike[str], tag: str | None, **wishes: Any) -> tuple[str | None, Any]:
        """As ``load``; where the folder names no checkpoint and none lies in it, that is no error.

        Returns: the checkpoint's path and the client state; or None and None.
        """
        try:
            return self.load(folder, tag, **wishes)
        except CheckpointError as error:
            is_missing = tag is None and error.code == "checkpoint-missing"
            if not is_missing or catalogue.hint(open_storage(folder)) is not None:
                raise
            logger.warning("nothing was loaded, as in DeepSpeed: %s", error.what)
            return None, None

    def _restore(self, chosen: Chosen, trees: dict[str, Any], *, has_schedule: bool) -> None:
        """Raises: CheckpointError: on every rank, if some rank could not set its state; its tensors are loaded then."""
        problem: Exception | None = None
        try:
            run_state.restore(
                self._engine,
                trees["engine"],
                trees["own"],
                chosen.folder,
                has_schedule=has_schedule,
                num_ranks=len(chosen.manifest.engine.get("ranks", ())),
            )
        except (CheckpointError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            problem = CheckpointError(
                f"the parameters are loaded, but not what belongs to them: {type(error).__name__}: {error}.",
                where=chosen.where,
                do="load another checkpoint, or the weights alone (load_module_only=True).",
                code="checkpoint-damaged",
            )
        agree(self._engine.axes.all, problem, None, "checkpoint: restored")

    def _compare_own(self, chosen: Chosen, trees: dict[str, Any], *, is_strict: bool, has_schedule: bool) -> list[str]:
        """Returns: notes. Raises: CheckpointError: on every rank, what does not fit beside the tensors."""
        engine = self._engine
        problems, notes = run_state.compare(engine, trees["engine"], is_strict=is_strict, has_schedule=has_schedule)
        problem = None
        if problems:
            lines = "".join(f"\n    {text}" for text in problems)
            problem = CheckpointError(
                f"the checkpoint does not fit this run:{lines}",
                where=chosen.where,
                do="build the run that was saved, or load in part.",
                code="checkpoint-mismatch",
            )
        agree(engine.axes.all, problem, None, "checkpoint: fit")
        return notes

    def _read_trees(self, chosen: Chosen, reader: StateReader) -> dict[str, Any]:
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
            run_state.check(trees["engine"], trees["own"])
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
