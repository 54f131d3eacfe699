"""An engine's checkpoints: what is saved and loaded, when, and under which settings of the config."""

from __future__ import annotations

import atexit
import json
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from shoal.checkpoint import directory, open_gradients, tree
from shoal.checkpoint.commit import Retention
from shoal.checkpoint.load import Chosen, Load, LoadOptions
from shoal.checkpoint.local_shards import LocalShards, buffers_of, names_of
from shoal.checkpoint.manifest import MODEL, ParameterRecord, collecting_nothing, versions
from shoal.checkpoint.problems import agree
from shoal.checkpoint.reader import StateReader
from shoal.checkpoint.save import Save, SavedState, SaveOptions
from shoal.checkpoint.storage import Storage, open_storage
from shoal.config import Config
from shoal.device import host_empty
from shoal.engine import run_state
from shoal.engine.accumulation import Accumulation
from shoal.engine.generators import share_generator_states
from shoal.engine.log import logger, say_on_rank_0
from shoal.engine.over_stages import joined_groups, joined_records, names_elsewhere, own_buffers
from shoal.engine.run_state import RunState
from shoal.engine.settings import Properties, flat
from shoal.engine.sharding import Sharding
from shoal.engine.weights import Weights
from shoal.errors import CheckpointError, CommError, UsageError
from shoal.memory.host import PAGE
from shoal.observe.placement_table import Table
from shoal.running.optimizer import ShardedOptimizer
from shoal.text import counted

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,150}")


# Called on rank 0 with the storage, the tag, the client state and whether frozen parameters are left out. It takes what
# other files next to the checkpoint will hold, and returns the function that writes them after the commit.
ExtraFiles = Callable[[Storage, str, Mapping[str, Any], bool], Callable[[], None]]


class TagsDifferError(CheckpointError, AssertionError):
    """Ranks gave different tags. DeepSpeed asserts that they are the same, so an AssertionError too."""

    code = "checkpoint-tag"


class Checkpointing:
    """Saves and loads one engine.

    ``on_phase`` is called with the name of each phase of a save (``"snapshot"``, ``"shard_write"``, ...).
    """

    def __init__(
        self,
        sharding: Sharding,
        properties: Properties,
        accumulation: Accumulation,
        run: RunState,
        weights: Weights,
        optimizer: ShardedOptimizer | None,
    ) -> None:
        self._sharding = sharding
        self._module = sharding.module
        self._properties = properties
        self._settings = properties.config.checkpoint
        self._comm = properties.axes.world
        self._accumulation = accumulation
        self._run = run
        self._weights = weights
        self._optimizer = optimizer
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.extra_files: ExtraFiles | None = None
        self.allows_missing = False  # loading from a folder without a checkpoint is no error
        self.folder: str | os.PathLike[str] | None = None  # of the last save or load
        self.last: tuple[str | os.PathLike[str], str] | None = None  # folder and tag of the last one of the whole state
        self.loaded_size: int | None = None  # ranks of the run that saved the checkpoint loaded last
        self._in_flight: Save | None = None
        self._has_warned_open = False
        self._host: torch.Tensor | None = None
        self._at_exit: Callable[[], None] | None = None
        self._after: Callable[[], None] | None = None
        self._tokenizer_at = ""  # where it was saved last

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
        """Save. Returns: False if it was not saved, which is only with ``checkpoint.on_save_error`` ``"warn"``."""
        self.folder = folder
        self.finish()
        self._sharding.model.finish_backward()
        storage = open_storage(folder)
        if self._comm.rank == 0:
            self._save_tokenizer(storage)
        settings = self._settings
        tag = self._agreed_tag(tag if tag is not None else f"global_step{self._accumulation.counters.global_steps}")
        options = SaveOptions(save_latest, settings.async_save, Retention(settings.keep_last, settings.keep_every))
        shards = self._sharding.local_shards()
        if self._sharding.step is not None:
            self._sharding.step.before_save()
        for group in self._sharding.groups:
            for kept in group.kept:
                kept.share()
            if group.row.sent.is_difference:
                group.publish(is_exact=True)  # as a run is that is continued from the checkpoint
        wanted = list(shards.model(exclude_frozen=exclude_frozen)) + list(shards.optimizer())
        with self._on_all_ranks("checkpoint: own state"):
            state = self._state(shards, client_state, exclude_frozen=exclude_frozen)
        if state.own["gradients"] and not self._has_warned_open:
            self._has_warned_open = True
            if self._properties.rank == 0:
                logger.warning(
                    "checkpoint %r is saved in the middle of an accumulation, after %d of %d micro-batches: another"
                    " layout (ranks, stage, units) that loads it drops their gradients and begins the step again. Save"
                    " right after a step, where engine.global_steps has changed.",
                    tag,
                    self._accumulation.num_open,
                    self._accumulation.num_micro,
                )
        try:
            save = Save(
                self._comm,
                storage,
                tag,
                [shard for shard in wanted if shard.numel],
                state,
                options,
                self.on_phase,
                self._host_memory,
                self._properties.device.torch_device,
            )
        except CheckpointError as error:
            return self._report(error)
        finally:
            shards.leave()
        self.last = None if exclude_frozen else (folder, tag)
        if self.extra_files is not None and self._comm.rank == 0:
            self._after = self.extra_files(storage, tag, client_state or {}, exclude_frozen)
        if save.is_done:
            self._write_extra_files()
            self._wait_for_extra_files()
        else:
            self._in_flight = save
            for group in self._sharding.groups:
                group.before_change = save.wait_taken
            self._finish_at_exit()
        return True

    def _write_extra_files(self) -> None:
        """Write the files next to a committed checkpoint. Their failure does not undo the commit."""
        after, self._after = self._after, None
        if after is None:
            return
        try:
            after()
        except (OSError, CheckpointError) as error:
            logger.warning("the checkpoint is saved, but not all additional files for DeepSpeed's clients: %s", error)

    def _wait_for_extra_files(self) -> None:
        """Every rank waits until rank 0 has written the files next to the checkpoint."""
        if self.extra_files is not None:
            agree(self._comm, None, None, "checkpoint: extra files")

    def _save_tokenizer(self, storage: Storage) -> None:
        """Write the files of the data's tokenizer next to the checkpoints, once for each folder; a failure warns."""
        source = getattr(getattr(self._run.training_dataloader, "dataset", None), "tokenizer_folder", None)
        if source is None or storage.url == self._tokenizer_at:
            return
        self._tokenizer_at = storage.url
        try:
            for file in sorted(each for each in source.rglob("*") if each.is_file()):
                path = f"tokenizer/{file.relative_to(source).as_posix()}"
                storage.make_folder(path.rpartition("/")[0])
                storage.replace(path, file.read_bytes())
        except (OSError, CheckpointError) as error:
            logger.warning("the tokenizer %s is not saved with the checkpoints: %s", source, error)

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
        comm = self._comm
        tags = list(comm.gather_objects(str(tag), label="checkpoint: tag"))
        if len(set(tags)) > 1:
            validation = self._settings.tag_validation
            if validation == "Fail":
                raise TagsDifferError(
                    f"the ranks save under different tags: {', '.join(sorted(set(tags))[:5])}.",
                    do="give every rank the same tag.",
                )
            if validation == "Warn" and comm.rank == 0:
                logger.warning("the ranks' tags differ (%s); rank 0's tag is used.", ", ".join(sorted(set(tags))[:5]))
        return str(tags[0])

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        """One buffer for all snapshots: asking the system for its pages costs more than the copy.

        It begins on a page, so that it can be written past the page cache.
        """
        if self._host is None or self._host.numel() < nbytes:
            self._host = None
            memory = host_empty(nbytes + PAGE, torch.uint8, self._properties.device.torch_device)
            skipped = -memory.data_ptr() % PAGE
            self._host = memory[skipped : skipped + nbytes]
        return self._host

    def _state(self, shards: LocalShards, client_state: Any, *, exclude_frozen: bool) -> SavedState:
        if client_state is not None and not isinstance(client_state, Mapping):
            raise CheckpointError(
                f"client_state is of type {type(client_state).__name__}, not a dict.",
                do="pass a dict whose values are numbers, text, lists, dicts and tensors.",
                code="checkpoint-state",
            )
        settings, axes = self._properties.config, self._properties.axes
        buffers, whole = buffers_of(self._module), own_buffers(axes.other_names, self._module)
        optimizer = self._optimizer
        groups = []
        if optimizer is not None:
            groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return SavedState(
            step=self._accumulation.counters.global_steps,
            parameters=self._parameters(shards),
            versions=versions(),
            world={
                "size": axes.world.size,
                "dp_shard": axes.shard.size,
                "stage": self._properties.stage,
                **{axis: axes.comms[axis].size for axis in ("pp", "tp", "sp", "cp", "ep") if axis in axes.comms},
            },
            table=Table.of(group.row for group in self._sharding.model.groups).as_dict(),
            config=lambda: _plain(settings),
            groups=groups,
            optimizer=type(optimizer.optimizer).__name__ if optimizer is not None else None,
            engine=self._run.shared(exclude_frozen=exclude_frozen),
            client_state=dict(client_state or {}),
            tensors={(MODEL, name): buffer for name, buffer in whole.items()}
            if axes.names == "world" or axes.same_units.rank == 0
            else {},
            own=self._run.own(buffers),
            scalars=shards.scalars(),
        )

    def _parameters(self, shards: LocalShards) -> Callable[[], list[ParameterRecord]]:
        names, aliases = names_of(self._module)
        shapes = shards.global_shapes()
        parameters = list(self._module.parameters())
        groups = enumerate(self._optimizer.param_groups) if self._optimizer is not None else ()
        group_of = {id(parameter): index for index, group in groups for parameter in group["params"]}
        # The order of pipeline stages' optimizers is not that of the whole model.
        position = {key: index for index, key in enumerate(group_of)} if self._properties.axes.names is None else {}

        def describe() -> list[ParameterRecord]:
            return [
                ParameterRecord(
                    name=names[id(parameter)],
                    aliases=list(aliases.get(names[id(parameter)], ())),
                    dtype=tree.name_of(parameter.dtype),
                    shape=shapes.get(names[id(parameter)], tuple(parameter.shape)),
                    group=group_of.get(id(parameter)),
                    position=position.get(id(parameter)),
                )
                for parameter in parameters
            ]

        if self._properties.axes.names is not None:
            joined = joined_records(self._properties.axes.other_names, describe())
            return lambda: joined
        return describe

    # an asynchronous save in progress

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
            self._write_extra_files()

    def finish(self) -> None:
        """Wait for a save in progress. Every rank calls. Raises: CheckpointError: as ``poll``."""
        if self._in_flight is None:
            return
        save, self._in_flight = self._in_flight, None
        try:
            save.finish()
        except CheckpointError as error:
            self._report(error)
            return
        self._write_extra_files()
        self._wait_for_extra_files()

    def _finish_at_exit(self) -> None:
        """Let a process that exits normally wait for the checkpoint that it is writing."""
        if self._at_exit is not None:
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

        self._at_exit = finish
        atexit.register(finish)

    def close(self) -> None:
        """Wait for a save in progress and free the host memory of snapshots."""
        self.finish()
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None
        self._host = None

    # load

    def load(self, folder: str | os.PathLike[str], tag: str | None, **wishes: Any) -> tuple[str | None, Any]:
        """Load. Returns: the checkpoint's path and the client state. ``wishes``: as ``_load``.

        Under ``allows_missing`` both are None where the folder names no checkpoint and holds none.
        """
        self.folder = folder
        try:
            return self._load(folder, tag, **wishes)
        except CheckpointError as error:
            is_missing = tag is None and error.code == "checkpoint-missing"
            if not (self.allows_missing and is_missing) or directory.read_latest(open_storage(folder)) is not None:
                raise
            if self._comm.rank == 0:
                logger.warning("nothing was loaded, as in DeepSpeed: %s", error.what)
            return None, None

    def _load(
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
        self.finish()
        storage = open_storage(folder)
        comm, ranks = self._comm, self._properties.axes.other_names
        is_checked = bool(self._settings.verify)
        names = names_of(self._module)[0]
        groups: list[list[str]] = []
        optimizer = None
        if self._optimizer is not None:
            groups = [[names[id(p)] for p in g["params"]] for g in self._optimizer.param_groups]
            groups = joined_groups(ranks, groups)
            optimizer = type(self._optimizer.optimizer).__name__
        has_optimizer = has_optimizer and not is_module_only and self._optimizer is not None
        elsewhere = names_elsewhere(ranks, self._module)
        wanted = LoadOptions(is_strict, has_optimizer, is_checked, groups, optimizer, elsewhere)
        load = Load(comm, self._sharding.local_shards(), buffers_of(self._module), wanted)
        step_again = ""
        folders = directory.candidates(comm, storage, tag, is_universal=bool(self._settings.load_universal))
        for index, name in enumerate(folders):
            try:
                chosen, reader = load.open(storage, name)
                with self._on_all_ranks("checkpoint: compared") if ranks is not None else nullcontext():
                    notes = [*reader.notes, *load.compare(chosen, groups, optimizer)]
                trees = self._read_trees(chosen, reader)
                if not is_module_only:
                    step_again = self._fit_open_gradients(chosen, trees)
                    notes += self._compare_own(chosen, trees, is_strict=is_strict, has_schedule=has_schedule)
                if is_checked:
                    load.check(chosen, reader)
            except CheckpointError as error:
                if error.code not in ("checkpoint-damaged", "checkpoint-unsafe") or index + 1 == len(folders):
                    raise
                if self._comm.rank == 0:
                    logger.warning("%s is damaged, so %s is loaded instead: %s", name, folders[index + 1], error)
                continue
            break
        if step_again and self._properties.rank == 0:
            logger.warning("%s: %s", chosen.folder, step_again)
        self._sharding.model.recover()
        if custom_load_fn is not None:
            values = {t.name: reader.tensor(MODEL, t.name) for t in chosen.manifest.tensors if t.kind == MODEL}
            self._weights.with_gathered_parameters(lambda: custom_load_fn(src=values, dst=self._module))
            if wanted.has_optimizer and self._comm.rank == 0:
                logger.warning("custom_load_fn was given, so only the model was loaded.")
        else:
            load.apply(chosen, reader)
            say_on_rank_0(self._properties.rank, load.summary(chosen))
        restored: set[str] = set()  # hyperparameters, and settings
        if not is_module_only and custom_load_fn is None:
            if wanted.has_optimizer and chosen.manifest.optimizer is not None and self._optimizer is not None:
                for group, values in zip(self._optimizer.param_groups, trees["groups"], strict=True):
                    group.update(values)
                    restored.update(values)
            self._restore(chosen, trees, has_schedule=has_schedule)
            restored |= self._run.loaded_settings(trees["engine"])
        self.loaded_size = chosen.manifest.world.get("size")
        if wanted.has_optimizer and has_schedule and custom_load_fn is None and trees["engine"].get("data"):
            self.last = folder, chosen.folder
        for note in (*notes, *self._config_changes(chosen, restored)):
            say_on_rank_0(self._properties.rank, note)
        agree(comm, None, None, "checkpoint: loaded")
        return f"{storage.url}/{chosen.folder}", trees["client_state"]

    def _restore(self, chosen: Chosen, trees: dict[str, Any], *, has_schedule: bool) -> None:
        """Raises: CheckpointError: on every rank, if some rank could not set its state; its tensors are loaded then.

        Communicates: on a tensor-parallel axis, the random states too.
        """
        with self._on_all_ranks(
            "checkpoint: restored",
            "the parameters are loaded, but not what belongs to them",
            where=chosen.where,
            do="load another checkpoint, or the weights alone (load_module_only=True).",
        ):
            num_ranks = len(chosen.manifest.engine.get("ranks", ()))
            own = trees["own"]
            self._run.restore(trees["engine"], own, chosen.folder, has_schedule=has_schedule, num_ranks=num_ranks)
        if (tp := self._properties.axes.get("tp")) is not None:  # the run that saved may have had other ranks
            share_generator_states(tp, self._properties.device)
        scale = self._accumulation.loss_scale
        if self._optimizer is not None and scale is not None:
            self._optimizer.loss_scale = scale.scale

    def _compare_own(self, chosen: Chosen, trees: dict[str, Any], *, is_strict: bool, has_schedule: bool) -> list[str]:
        """Returns: notes. Raises: CheckpointError: on every rank, what does not fit, apart from the tensors."""
        problems, notes = self._run.compare(trees["engine"], is_strict=is_strict, has_schedule=has_schedule)
        lines = "".join(f"\n    {text}" for text in problems)
        problem = CheckpointError(
            f"the checkpoint does not fit this run:{lines}",
            where=chosen.where,
            do="configure the run as it was saved, or load a part of the checkpoint.",
            code="checkpoint-mismatch",
        )
        agree(self._comm, problem if problems else None, None, "checkpoint: fit")
        return notes

    @contextmanager
    def _on_all_ranks(self, label: str, what: str = "", *, where: str = "", do: str = "") -> Iterator[None]:
        """What the block raises on one rank is raised as a CheckpointError on every rank.

        Args:
            what: begins the message of an error that is no CheckpointError; empty: the message is as it is.
        """
        problem: Exception | None = None
        try:
            yield
        except CommError:
            raise  # reported to the other ranks by ``comm``
        except (CheckpointError, UsageError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            problem = error
            if what and not isinstance(error, CheckpointError):
                text = f"{what}: {type(error).__name__}: {error}."
                problem = CheckpointError(text, where=where, do=do, code="checkpoint-damaged")
        agree(self._comm, problem, None, label)

    def _read_trees(self, chosen: Chosen, reader: StateReader) -> dict[str, Any]:
        """Read all nested values before anything is changed."""
        manifest, rank = chosen.manifest, self._comm.rank
        ranks = manifest.engine.get("ranks", [])
        extra, mine = partial(reader.tensor, "extra"), partial(reader.tensor, f"rank/{rank}")
        what = "what belongs to the tensors cannot be read"
        with self._on_all_ranks("checkpoint: state", what, where=chosen.where):
            trees = {
                "engine": tree.decode({k: v for k, v in manifest.engine.items() if k != "ranks"}, extra),
                "groups": tree.decode(manifest.groups, extra),
                "client_state": tree.decode(manifest.client_state, extra),
                "own": tree.decode(ranks[rank], mine) if rank < len(ranks) else None,
            }
            run_state.check(trees["engine"], trees["own"])
        return trees

    def _fit_open_gradients(self, chosen: Chosen, trees: dict[str, Any]) -> str:
        """Where a saved unfinished step cannot go on here, let it begin again. Returns: a warning, or an empty text."""
        ranks = chosen.manifest.engine.get("ranks", [])
        if not any(own.get("gradients") for own in ranks):
            return ""
        can_go_on = len(ranks) == self._comm.size and self._run.can_go_on(trees["engine"])
        if all(agree(self._comm, None, can_go_on, "checkpoint: open gradients")):
            return ""
        if trees["own"] is not None:
            trees["own"]["gradients"] = []
        return open_gradients.begin_again(trees["engine"])

    def _config_changes(self, chosen: Chosen, restored: set[str]) -> list[str]:
        """Which settings are not what they were when the checkpoint was saved, and which of the two is used.

        Args:
            restored: the hyperparameters and settings that were loaded.
        """
        if not chosen.manifest.config:
            return []  # it was converted from another format
        config = self._properties.config
        before, now = flat(chosen.manifest.config), flat(_plain(config))
        if config.scheduler is not None:
            restored = restored - {"lr"}  # the scheduler of this config sets it
        changes, do = [], set()
        for key in sorted({*before, *now}):
            old, new = before.get(key), now.get(key)
            if old == new:
                continue
            if key.removeprefix("optimizer.params.") in restored:
                is_of_optimizer = key.startswith("optimizer.params.")
                how = "change optimizer.param_groups after loading to use others"
                do.add(how if is_of_optimizer else "set data.stateful to false to begin the data anew")
                changes.append(f"{key}: {old!r} when saved, which is used, {new!r} in this config")
            else:
                changes.append(f"{key}: {old!r} when saved, {new!r} now")
        if not changes:
            return []
        num = counted(len(changes), "setting differs", "settings differ")
        return ["; ".join([f"{num} from the checkpoint's: {'; '.join(changes[:12])}", *sorted(do)]) + "."]


def _plain(config: Config) -> Any:
    """The effective settings as strict JSON holds them: a number that is not finite is a text."""
    text = json.dumps(config.effective(), default=str)
    return json.loads(text, parse_constant=lambda constant: str(float(constant)))
