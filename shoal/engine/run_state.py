"""What a checkpoint saves in addition to tensors: where the run is.

Counters, the learning-rate schedule, the loss scale, the position in the data, each rank's RNG states, buffers that
differ between ranks, gradients of an unfinished step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from shoal.checkpoint import open_gradients
from shoal.checkpoint.local_shards import buffers_of
from shoal.checkpoint.manifest import checksum
from shoal.comm.protocol import Communicator
from shoal.data.curriculum_loader import CurriculumLoader
from shoal.data.loading import Loader
from shoal.engine.accumulation import Accumulation
from shoal.engine.generators import generator_states, set_generator_states
from shoal.engine.log import logger
from shoal.engine.parts.curriculum import Curriculum
from shoal.engine.parts.part import Part, stateful
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import UsageError


class RunState:
    """Where one engine's run is.

    Args:
        schedule: of the learning rate; None: the engine steps none.
        parts: of the engine; those with a state are saved by their names.
    """

    def __init__(
        self,
        sharding: Sharding,
        properties: Properties,
        accumulation: Accumulation,
        curriculum: Curriculum,
        schedule: Any = None,
        parts: Sequence[Part] = (),
    ) -> None:
        self.lr_scheduler = schedule
        self.training_dataloader: Any = None  # set by ``initialize``; None: the script has its own
        self.curriculum = curriculum
        self._parts = stateful(parts)
        self._sharding = sharding
        self._module = sharding.module
        self._accumulation = accumulation
        self._comm = properties.axes.world
        self._same_buffers = properties.axes.same_units  # the ranks that have the same buffers
        self._device = properties.device
        if sharding.step is not None and sharding.step.cpu_optimizer is not None:
            sharding.step.cpu_optimizer.steps_per_epoch = self.steps_per_epoch
        self._count: Any = None  # the schedule's own count of steps after the engine's last step of it
        self._num_moved = 0  # steps in a row before which the script had stepped the schedule
        self._has_warned = False
        self._is_data_stateful = bool(properties.config.data.stateful)
        self._step_start: dict[str, Any] = {}
        self.begin_step()

    def steps_per_epoch(self) -> int | None:
        """Steps in one pass over ``training_dataloader``; None: there is no loader, or its length is not known."""
        try:
            return max(len(self.training_dataloader) // self._accumulation.num_micro, 1)
        except TypeError:
            return None

    def close(self) -> None:
        """End the workers of the engine's loader."""
        if isinstance(self.training_dataloader, Loader | CurriculumLoader):
            self.training_dataloader.close()

    def begin_step(self) -> None:
        """Remember where the step begins: another layout cannot go on in its middle."""
        loader = self.training_dataloader
        if isinstance(loader, Loader):
            loader.begin_step(self._accumulation.counters.global_steps)
        self._step_start = {
            "counters": asdict(self._accumulation.counters),
            "taken": loader.position if isinstance(loader, Loader) else None,
            "data": loader.state_dict() if isinstance(loader, CurriculumLoader) else None,
        }

    def step_schedule(self, arguments: dict[str, Any], rank: int) -> None:
        """Step the schedule, if there is one.

        Warns once, on rank 0, where the script stepped it between two steps, twice in a row.

        Args:
            arguments: of the schedule's own ``step``.

        Raises: UsageError: a schedule by a metric got none.
        """
        schedule = self.lr_scheduler
        if schedule is None:
            return
        count = _count_of(schedule)
        # A single change may be a loaded checkpoint.
        self._num_moved = self._num_moved + 1 if self._count is not None and count != self._count else 0
        if self._num_moved == 2 and not self._has_warned and rank == 0:
            self._has_warned = True
            logger.warning(
                "the script calls step() of the learning-rate schedule (%s), and engine.step() does so too: it runs"
                " twice as fast. Leave the call out, or do not pass the schedule to initialize().",
                type(schedule).__name__,
            )
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) and "metrics" not in arguments:
            raise UsageError(
                "ReduceLROnPlateau.step() needs a metric, and engine.step() was given none.",
                do='call engine.step(lr_kwargs={"metrics": loss}); or do not pass it to initialize(), and call its'
                " step(metric) yourself.",
                code="schedule-metric",
            )
        schedule.step(**arguments)
        self._count = _count_of(schedule)

    def shared(self, *, exclude_frozen: bool) -> dict[str, Any]:
        """What is the same on every rank."""
        accumulation, loader = self._accumulation, self.training_dataloader
        is_stateful = self._is_data_stateful and hasattr(loader, "state_dict")
        scale = accumulation.loss_scale
        return {
            "counters": asdict(accumulation.counters),
            "micro_in_step": accumulation.micro_in_step,
            "step_start": {**self._step_start, "num_done": accumulation.num_open},
            "accumulation_steps": accumulation.num_micro,
            "micro_batch": accumulation.micro_batch,
            "schedule": _schedule_state(self.lr_scheduler),
            "schedule_class": _schedule_class(self.lr_scheduler),
            "loss_scale": scale.state_dict() if scale is not None else None,
            "data": loader.state_dict() if is_stateful else None,
            "by_step": self.curriculum.by_section(),
            **({"parts": {name: dict(part.state()) for name, part in self._parts.items()}} if self._parts else {}),
            "excludes_frozen": exclude_frozen,
            "layout": open_gradients.layout_of(self._sharding.groups),
            "extra_state": {name: part.get_extra_state() for name, part in _with_extra_state(self._module).items()},
        }

    def own(self, buffers: dict[str, torch.Tensor]) -> dict[str, Any]:
        """What only this rank has. Communicates: the checksums of the buffers."""
        return {
            "generators": generator_states(self._device),
            "buffers": _differing(self._same_buffers, buffers),
            "gradients": open_gradients.take(self._sharding.groups),
            **self._accumulation.own_state(),
        }

    def can_go_on(self, saved: Mapping[str, Any]) -> bool:
        """True if this engine's gradients of an unfinished step mean the same as the saved run's."""
        steps = self._accumulation.num_micro
        is_same = saved.get("accumulation_steps", steps) == steps
        return is_same and saved.get("layout") == open_gradients.layout_of(self._sharding.groups)

    def _data_of(self, saved: Mapping[str, Any]) -> dict[str, Any] | None:
        """The saved position in the data, where it is to be loaded."""
        is_loaded = self._is_data_stateful and hasattr(self.training_dataloader, "load_state_dict")
        return saved.get("data") if is_loaded else None

    def loaded_settings(self, saved: Mapping[str, Any]) -> set[str]:
        """The keys of the config whose values are those of the saved run after ``restore``."""
        kind = type(self.training_dataloader)
        keys = {Loader: "data.seed", CurriculumLoader: "data_efficiency.seed"}
        return {keys[kind]} if kind in keys and self._data_of(saved) is not None else set()

    def compare(self, saved: Mapping[str, Any], *, is_strict: bool, has_schedule: bool) -> tuple[list[str], list[str]]:
        """What of a saved state does not fit this engine: problems, and notes on what is harmless or was allowed."""
        problems: list[str] = []
        notes: list[str] = []
        mine, theirs = _schedule_class(self.lr_scheduler), saved.get("schedule_class")
        if has_schedule and theirs is not None and mine is not None and theirs != mine:
            problems.append(
                f"its schedule is {theirs}, this one is {mine} (load_lr_scheduler_states=False keeps this one)"
            )
        elif has_schedule and (theirs is None) != (mine is None) and "schedule_class" in saved:
            notes.append(
                f"the checkpoint has a schedule ({theirs}), this run has none."
                if mine is None
                else f"the checkpoint has no schedule; {mine} starts at its beginning."
            )
        data, loader = self._data_of(saved), self.training_dataloader
        if data is not None and isinstance(loader, Loader | CurriculumLoader):
            problems += loader.problems(data)
        if "by_step" in saved:
            notes += self.curriculum.changes(saved["by_step"] or {})
        if lost := sorted(set(saved.get("parts") or {}) - set(self._parts)):
            notes.append(f"the checkpoint has the state of parts that this run has not: {', '.join(lost)}.")
        gone = sorted(set(saved.get("extra_state") or {}) - set(_with_extra_state(self._module)))
        if gone:
            text = f"modules with a state of their own are gone: {', '.join(gone[:8])}"
            (problems if is_strict else notes).append(text)
        return problems, notes

    def restore(
        self,
        saved: Mapping[str, Any],
        own: Mapping[str, Any] | None,
        name: str,
        *,
        has_schedule: bool,
        num_ranks: int,
    ) -> None:
        """Set what ``shared`` and ``own`` returned.

        Args:
            own: None: the saving run had no such rank.
            name: of the checkpoint, for a warning.
            num_ranks: that saved a state of their own; 0, as in every other format: RNG states stay as they are.
        """
        accumulation, counters = self._accumulation, self._accumulation.counters
        for counter, value in saved.get("counters", {}).items():
            if counter in vars(counters):
                setattr(counters, counter, int(value))
        if has_schedule and saved.get("schedule") is not None and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(saved["schedule"])
        if saved.get("loss_scale") is not None and accumulation.loss_scale is not None:
            accumulation.loss_scale.load_state_dict(saved["loss_scale"])
        parts = _with_extra_state(self._module)
        for part, value in (saved.get("extra_state") or {}).items():
            if part in parts:
                parts[part].set_extra_state(value)
        if (data := self._data_of(saved)) is not None:
            self.training_dataloader.load_state_dict(data)
        self.curriculum.restore(saved.get("by_step") or {}, counters.global_steps)
        for part_name, part in self._parts.items():
            if part_name in (saved.get("parts") or {}):
                part.load_state(saved["parts"][part_name])
        accumulation.reset()
        accumulation.micro_in_step = int(saved.get("micro_in_step", 0))
        self.begin_step()
        if accumulation.micro_in_step:
            self._step_start = saved.get("step_start", self._step_start)
        self._sharding.model.num_plain_passes = 0
        if own is None:
            if num_ranks:
                rank = self._comm.rank
                logger.warning("%s has no RNG state of rank %d, which starts from its seed.", name, rank)
                torch.manual_seed(int(torch.initial_seed()) + rank)
            open_gradients.put(self._sharding.groups, [])
            return
        set_generator_states(self._device, own["generators"])
        buffers = buffers_of(self._module)
        with torch.no_grad():
            for buffer, value in own["buffers"].items():
                if buffer in buffers and not torch.equal(buffers[buffer].cpu(), value):
                    buffers[buffer].copy_(value)
        open_gradients.put(self._sharding.groups, own["gradients"])
        if own["gradients"]:
            accumulation.load_own_state(own, self._device.torch_device)


def check(saved: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    """Raises: TypeError, KeyError: these are not what ``RunState.shared`` and ``RunState.own`` return."""
    for name, value in dict(saved.get("counters", {})).items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"counter {name!r} is {value!r}")
    for name in ("schedule", "loss_scale", "data", "extra_state", "by_step", "parts"):
        if not isinstance(saved.get(name), dict | None):
            raise TypeError(f"{name} is {type(saved[name]).__name__}")
    for part in dict(saved.get("by_step") or {}).values():
        if not isinstance(part["schedule"], dict) or not isinstance(part["place"], int | None):
            raise TypeError(f"by_step: {part}")
    if own is None:
        return
    generators = own["generators"]
    _ = generators["torch"], generators["python"]["words"], generators["numpy"]["keys"], own["buffers"]
    for entry in own["gradients"]:
        if not 0 <= entry["bucket"] < len(saved.get("layout") or ()):
            raise KeyError(f"gradients of bucket {entry['bucket']}")


def _count_of(schedule: Any) -> Any:
    """How often it was stepped, under torch's or DeepSpeed's name; None: it has neither."""
    return getattr(schedule, "last_epoch", getattr(schedule, "last_batch_iteration", None))


def _schedule_class(schedule: Any) -> str | None:
    return type(schedule).__name__ if schedule is not None and hasattr(schedule, "state_dict") else None


def _schedule_state(schedule: Any) -> Any:
    if _schedule_class(schedule) is None:
        return None
    state = schedule.state_dict()
    if not isinstance(state, Mapping):
        raise UsageError(f"{type(schedule).__name__}.state_dict() is no dict.", code="schedule-state")
    # What a schedule computes with (functions) comes from the script again.
    return {key: value for key, value in state.items() if not callable(value)}


def _with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    return {
        name: part
        for name, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def _differing(comm: Communicator, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's buffers that differ from rank 0's (running statistics, for example)."""
    if not buffers:
        return {}
    sums = {
        name: checksum(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, buffer in buffers.items()
    }
    first = comm.gather_objects(sums, label="checkpoint: buffers")[0]
    return {name: buffer for name, buffer in buffers.items() if first.get(name) != sums[name]}
