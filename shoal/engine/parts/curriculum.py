"""Keyword arguments that the config adds to every training forward, chosen by the step.

    section                  a forward gets
    curriculum_learning      curriculum_seqlen=N
    progressive_layer_drop   progressive_layer_drop=True, pld_theta=share

Add a section as one more ``CurriculumSection`` in ``Curriculum``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from shoal.data.curriculum import CurriculumScheduler
from shoal.device import in_transform
from shoal.engine.accumulation import Counters
from shoal.engine.parts.part import ForwardInputs, Part
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import UsageError
from shoal.models.layer_drop import ProgressiveLayerDrop


class CurriculumSection(Protocol):
    """One section. Steps are those done so far; ``names`` are the arguments of a forward."""

    names: tuple[str, ...]

    @property
    def schedule(self) -> dict[str, Any]:
        """The settings, for a checkpoint, which reports other settings when it is loaded."""

    @property
    def place(self) -> Any:
        """The position that does not follow from the step alone, for a checkpoint."""

    def arguments(self, num_steps: int) -> dict[str, Any]:
        """For a forward."""

    def go_to(self, num_steps: int, place: Any = None) -> None:
        """A step is done, or a checkpoint is loaded."""


class LayerDrop:
    """Progressive layer drop. As in DeepSpeed a forward gets the share of the step before; the first one gets 1."""

    names: tuple[str, ...] = ("progressive_layer_drop", "pld_theta")
    place = None

    def __init__(self, drop: ProgressiveLayerDrop) -> None:
        self.drop = drop
        self.schedule = {"theta": drop.theta, "gamma": drop.gamma}

    def arguments(self, num_steps: int) -> dict[str, Any]:
        return self.drop.get_state()

    def go_to(self, num_steps: int, place: Any = None) -> None:
        self.drop.update_state(max(num_steps - 1, 0))


class SequenceLength:
    """The older form of curriculum learning: a sequence length; the model or the script truncates to it."""

    def __init__(self, scheduler: CurriculumScheduler, kind: str) -> None:
        self.scheduler = scheduler
        self.kind = kind
        self.names: tuple[str, ...] = ("curriculum_seqlen",) if kind == "seqlen" else ()

    @property
    def schedule(self) -> dict[str, Any]:
        return {key: value for key, value in self.scheduler.get_state().items() if key != "current_difficulty"}

    @property
    def place(self) -> int:
        return self.scheduler.get_current_difficulty()

    def arguments(self, num_steps: int) -> dict[str, Any]:
        length = self.scheduler.update_difficulty(num_steps + 1)
        return dict.fromkeys(self.names, length)

    def go_to(self, num_steps: int, place: Any = None) -> None:
        if place is not None:
            self.scheduler.set_current_difficulty(int(place))


class Curriculum(Part):
    """The sources that a configuration switches on. ``RunState`` saves their state."""

    def __init__(self, sharding: Sharding, properties: Properties, counters: Counters) -> None:
        self._sharding, self._counters = sharding, counters
        self.layer_drop: ProgressiveLayerDrop | None = None
        self.scheduler: CurriculumScheduler | None = None
        self._sources: dict[str, CurriculumSection] = {}
        config = properties.config
        drop, curriculum = config.progressive_layer_drop, config.curriculum_learning
        if drop.enabled:
            self.layer_drop = ProgressiveLayerDrop(float(drop.theta), float(drop.gamma))
            self._sources["progressive_layer_drop"] = LayerDrop(self.layer_drop)
        if curriculum.enabled:
            self.scheduler = CurriculumScheduler(curriculum.model_dump(exclude_none=True))
            self._sources["curriculum_learning"] = SequenceLength(self.scheduler, curriculum.curriculum_type)

    def __bool__(self) -> bool:
        """True if there are sources."""
        return bool(self._sources)

    def arguments(self) -> dict[str, Any]:
        """What the next training forward gets."""
        arguments: dict[str, Any] = {}
        for source in self._sources.values():
            arguments |= source.arguments(self._counters.global_steps)
        return arguments

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardInputs | None:
        if not self._sharding.module.training or in_transform():
            return None
        return args, {**kwargs, **self.arguments()}  # which win over the script's

    def at_step(self, was_applied: bool) -> None:
        for source in self._sources.values():
            source.go_to(self._counters.global_steps)

    def explain(self, error: Exception) -> None:
        for name, source in self._sources.items() if isinstance(error, TypeError) else ():
            if any(repr(argument) in str(error) for argument in source.names):
                error.add_note(
                    f'shoal: "{name}" in the config passes {", ".join(source.names)} to every training forward: accept'
                    " it as a keyword argument of the model's forward and use it, or disable the section."
                )

    def set_custom_schedule(self, functions: Callable[[int], int] | Mapping[str, Callable[[int], int]]) -> None:
        """Raises: UsageError: there is no curriculum with a ``custom`` schedule, or no function for it."""
        source = self._sources.get("curriculum_learning")
        if not isinstance(source, SequenceLength) or source.schedule["schedule_type"] != "custom":
            raise UsageError(
                "a function for the curriculum's schedule was given, and the config has no curriculum that takes one.",
                do='write "curriculum_learning": {"enabled": true, "schedule_type": "custom", ...}.',
                code="curriculum-custom",
            )
        function = functions.get(source.kind) if isinstance(functions, Mapping) else functions
        if function is None:
            raise UsageError(
                f"no function for curriculum_type {source.kind!r} was given.",
                do=f"pass {{{source.kind!r}: function}}, or the function alone.",
                code="curriculum-custom",
            )
        source.scheduler.set_custom_get_difficulty(function)

    # to and from a checkpoint

    def by_section(self) -> dict[str, Any]:
        """What a checkpoint saves, by section."""
        return {name: {"schedule": s.schedule, "place": s.place} for name, s in self._sources.items()}

    def changes(self, saved: Mapping[str, Any]) -> list[str]:
        """How the schedules differ from the saved ones."""
        notes = [
            f"the checkpoint's run had {name}, this one has not." for name in sorted(set(saved) - set(self._sources))
        ]
        for name, source in self._sources.items():
            if name not in saved:
                notes.append(f"the checkpoint has no {name}; this run's starts at the checkpoint's step.")
            elif not _is_same(saved[name], source):
                notes.append(f"{name} differs from the checkpoint's; this run's starts at the checkpoint's step.")
        return notes

    def restore(self, saved: Mapping[str, Any], num_steps: int) -> None:
        """Continue from a checkpoint's step; from its exact position where the schedule is the same."""
        for name, source in self._sources.items():
            is_same = name in saved and _is_same(saved[name], source)
            source.go_to(num_steps, saved[name]["place"] if is_same else None)


def _is_same(saved: Mapping[str, Any], source: CurriculumSection) -> bool:
    return bool(_plain(saved["schedule"]) == _plain(source.schedule))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
