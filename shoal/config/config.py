"""``load``: from a file, a dict or a text to a checked, frozen configuration with the origin of each value."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import PrivateAttr

from shoal.config.base import Key, Section, keys_of, walk
from shoal.config.batch import MICRO, STEPS, TRAIN, Batch, BatchMismatch, solve
from shoal.config.checks import check_together, engine_problems
from shoal.config.elastic import ElasticBatch, ElasticityError, problems_error, shared_batch
from shoal.config.normalise import Normalised, Origin, normalise
from shoal.config.problems import HIDDEN, ConfigProblems, Problem, shown, warn
from shoal.config.ranks import batch_ranks, rank_problems
from shoal.config.resolve import check_types, put_old_defaults, resolve_types
from shoal.config.schema import Schema
from shoal.config.source import open_source
from shoal.config.supported import KeySupport, keys_with_support, unsupported_problems, unused_reasons
from shoal.errors import ConfigError
from shoal.processor import Format

PLANNED = ("zero_optimization.stage", "parallel")  # "auto" asks ``shoal.initialize`` for a plan


def keys_to_plan(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of ``PLANNED`` a raw configuration leaves to a plan.

    >>> keys_to_plan({"zero_optimization": {"stage": "auto"}, "parallel": {"tp": 2}})
    ('zero_optimization.stage',)
    """
    zero = values.get("zero_optimization")
    asked = (zero.get("stage") if isinstance(zero, Mapping) else None, values.get("parallel"))
    given = zip(PLANNED, asked, strict=True)
    return tuple(key for key, value in given if isinstance(value, str) and value.strip().lower() == "auto")


class Config(Schema):
    """A checked configuration. Every key is an attribute: ``config.zero_optimization.stage``.

    The three batch sizes are None until the data-parallel size is known: pass ``world_size`` to ``load``, or call
    ``with_world_size``.
    """

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)
    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)
    _keys: tuple[KeySupport, ...] = PrivateAttr(default=())
    _warnings: tuple[str, ...] = PrivateAttr(default=())
    _unresolved: tuple[str, ...] = PrivateAttr(default=())
    _name: str = PrivateAttr(default="")
    _elastic: ElasticBatch | None = PrivateAttr(default=None)

    @property
    def raw(self) -> dict[str, Any]:
        """The configuration as given."""
        return self._raw

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings: old names, unknown keys under ``strict: "warn"``, keys of other programs."""
        return self._warnings

    @property
    def unresolved_auto(self) -> tuple[str, ...]:
        """Paths of arguments that are still "auto": a client (Accelerate, Transformers) replaces them by values."""
        return self._unresolved

    def origin(self, path: str) -> Origin:
        """The origin of the value at a path; for a section, "user" where the file sets anything in it."""
        if path in self._origins:
            return self._origins[path]
        inside = [origin for place, origin in self._origins.items() if place.startswith(f"{path}.")]
        return "user" if inside else "default"

    def effective(self) -> dict[str, Any]:
        """Every key with its effective value, nested as in the file; secrets are hidden."""
        return cast(dict[str, Any], _as_json(self, keys_of(Schema)))

    def notes(self) -> list[str]:
        """Lines to log at start: what the file sets without effect, and the values that were derived."""
        reasons = unused_reasons(self)
        lines = [
            f"{each.path} = {shown(each.value)}: accepted, no effect: {each.support.reason}."
            for each in self._keys
            # The notes on the optimizer have ".params."; the note on a section stands for what is inside it.
            if each.support.kind == "no effect" and ".params." not in each.path and not each.is_inside
        ]
        lines += [
            f"{each.path} = {shown(each.value)}: no effect here: {why}."
            for each in self._keys
            if (why := self._why_unused(each, reasons))
        ]
        zero = self.zero_optimization
        if zero.offload_param.device != "none" and zero.stage != 3:
            lines.append(
                f'zero_optimization.offload_param.device = "{zero.offload_param.device}": no effect at stage'
                f" {zero.stage}, only stage 3 shards parameters."
            )
        planned = keys_to_plan(self._raw)
        lines += [f'{path} = "auto": shoal.initialize plans it for its model and the machine.' for path in planned]
        for path, origin in self._origins.items():
            if origin == "auto" and path not in (*self._unresolved, *planned) and ".params." not in path:
                lines.append(f'{path} = "auto": {shown(self._at(path))} is used.')
        if self.elasticity.enabled and (shared := self._shared()) is not None:
            lines.append(f"elasticity: {shared}.")
        elif self.origin(TRAIN) == "derived" and self.origin(MICRO) == "default" and self.train_batch_size is not None:
            lines.append(
                f"no batch size is given: micro-batch {self.train_micro_batch_size_per_gpu}, "
                f"global batch {self.train_batch_size}."
            )
        return lines

    def _shared(self) -> ElasticBatch | None:
        """The choice of elasticity; None where the section is wrong."""
        if self._elastic is not None:
            return self._elastic
        try:
            return shared_batch(self.elasticity)
        except ElasticityError:
            return None

    def _why_unused(self, key: KeySupport, reasons: Mapping[str, str]) -> str:
        """Why a key that is supported in general has no effect together with the others; empty where it has one."""
        if key.support.kind != "supported" or not key.schema_path:
            return ""
        is_on = not key.is_off or (self.offload == "auto" and key.schema_path.startswith("zero_optimization.offload_"))
        if is_on or key.support.stands_alone:
            return reasons.get(key.schema_path, "")
        return f"{key.off_switch} is not set" if key.off_switch else ""  # set in the file: it needs no line

    @property
    def low_precision_formats(self) -> tuple[Format, ...]:
        """The 16-bit formats in which forward and backward compute."""
        cast_to = self.torch_autocast.dtype or "bf16"
        asked: tuple[tuple[Format, bool], ...] = (
            ("fp16", self.fp16.enabled or (self.torch_autocast.enabled and cast_to == "fp16")),
            ("bf16", self.bf16.enabled or (self.torch_autocast.enabled and cast_to == "bf16")),
        )
        return tuple(name for name, is_asked in asked if is_asked)

    def params_of(self, section: str) -> dict[str, Any]:
        """The arguments of ``optimizer`` or ``scheduler``, for the constructor.

        Raises: ConfigError: some are still "auto", which Shoal cannot derive.
        """
        open_paths = [path for path in self._unresolved if path.startswith(f"{section}.")]
        if open_paths:
            raise ConfigError(
                f'{", ".join(open_paths)}: "auto" cannot be derived here.',
                where=self._name,
                do="write the values, or let Accelerate or Transformers replace them.",
                code="config-auto",
            )
        part = self.optimizer if section == "optimizer" else self.scheduler
        return dict(part.params) if part is not None else {}

    def with_world_size(self, ranks: int, reason: str | None = None) -> Config:
        """The same configuration with its batch sizes computed for a number of data-parallel ranks.

        Args:
            reason: how that number came about, for the message: "24 ranks / (tp 2 x pp 2)".

        Raises: ConfigError: the batch sizes do not fit it. ElasticityError: elasticity has none for it.
        """
        given = Batch(*(self._given(path) for path in (TRAIN, MICRO, STEPS)))
        shared = None
        try:
            if self.elasticity.enabled:
                shared = shared_batch(self.elasticity, ranks)
                given = Batch(None, None, None)
                batch = solve(Batch(shared.total, shared.micro, None), ranks, reason)
            else:
                batch = solve(given, ranks, reason)
        except BatchMismatch as mismatch:
            raise ConfigProblems([Problem(TRAIN, str(mismatch), mismatch.do)], self._name) from None
        except ElasticityError as error:
            raise problems_error(ConfigProblems([Problem("elasticity", error.what, error.do)], self._name)) from None
        made = self.model_copy(update={TRAIN: batch.train, MICRO: batch.micro, STEPS: batch.accumulation})
        made._origins = {**self._origins}
        made._elastic = shared
        for path, value in ((TRAIN, given.train), (MICRO, given.micro), (STEPS, given.accumulation)):
            is_assumed = shared is None and path != TRAIN and given.train is None and value is None
            is_assumed = is_assumed or (shared is None and path == STEPS and value is None and given.micro is None)
            if value is None and made._origins.get(path) != "auto" and not is_assumed:
                made._origins[path] = "derived"
        return made

    def _given(self, path: str) -> int | None:
        is_given = self._origins.get(path) in ("user", "deprecated alias")
        return cast("int | None", getattr(self, path)) if is_given else None

    def _at(self, path: str) -> Any:
        value: Any = self.effective()
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


@dataclass
class Examined:
    """The result of checking a configuration without raising: what `shoal doctor` prints."""

    name: str
    reading: Normalised
    keys: list[KeySupport]
    problems: list[Problem]
    config: Config | None


def load(
    source: object = None,
    *,
    args: object = None,
    world_size: int | None = None,
    check_supported: bool = True,
    replaced: Collection[str] = (),
    degrees: Mapping[str, int] | None = None,
    warns: bool = True,
) -> Config:
    """Read and check a configuration.

    Args:
        source: a dict, a path, JSON text, or urlsafe base64 of JSON text; None: ``args`` has it.
        args: an argparse namespace with ``deepspeed_config``.
        world_size: all ranks, to compute the batch sizes; None: the sizes stay None.
        check_supported: asking for a part that is not built yet, or for a type that does not exist, is an error.
        replaced: of ``optimizer`` and ``scheduler``, those for which the caller passes an object; their types are not
            checked.
        degrees: by axis of the mesh, what the caller gives in addition to the file.
        warns: False on all ranks but one: the others keep the warnings without showing them.

    Raises: ConfigError: all problems in one error.
    """
    seen = examine(
        source,
        args=args,
        world_size=world_size,
        check_supported=check_supported,
        replaced=replaced,
        degrees=degrees,
    )
    if seen.problems or seen.config is None:
        raise problems_error(ConfigProblems(seen.problems, seen.name))
    for text in seen.reading.warnings if warns else ():
        warn(text)
    return seen.config


def examine(
    source: object,
    *,
    args: object = None,
    world_size: int | None = None,
    check_supported: bool = True,
    replaced: Collection[str] = (),
    degrees: Mapping[str, int] | None = None,
) -> Examined:
    """Read and check, and return the problems instead of raising.

    Raises: ConfigError: there is nothing to check: no such file, or not JSON.
    """
    document, name = open_source(source, args)
    reading = normalise(document.value, document.lines)
    put_old_defaults(reading)
    unresolved = resolve_types(reading)
    if check_supported:
        check_types(reading, replaced)
    keys = keys_with_support(reading)
    problems = list(reading.problems)
    problems += unsupported_problems(keys, reading, ("refused", "not built") if check_supported else ("refused",))
    config = Config.model_validate(reading.values)
    for axis, degree in (degrees or {}).items():
        asked = getattr(config.parallel, axis)
        if asked not in ("auto", degree):
            what, do = f"{asked}, and initialize() was given a mesh with {axis} {degree}.", "leave one of them out."
            if axis == "ep":
                what, do = f"{asked}, and the model's layers have ep_size {degree}.", "leave parallel.ep out."
            problems.append(Problem(f"parallel.{axis}", what, do, code="mesh"))
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=degrees)})
    config._raw, config._origins, config._keys = document.value, reading.origins, tuple(keys)
    config._warnings, config._unresolved, config._name = tuple(reading.warnings), tuple(unresolved), name
    together = [*check_together(config, reading), *(engine_problems(config) if check_supported else ())]
    if world_size is not None:
        mismatches = [*rank_problems(config, world_size)] if check_supported else []
        if "ep" in (degrees or {}):
            mismatches = [
                replace(each, path="ep_size of the model's layers") if each.path == "parallel.ep" else each
                for each in mismatches
            ]
        together += mismatches
        try:
            ranks, because = batch_ranks(config, world_size)
            config = config if mismatches else config.with_world_size(ranks, because)
        except ConfigProblems as error:
            together += error.problems
    # A wrong key has its default in ``config``: problems that follow from the default are not the file's.
    doubtful = {name for path in reading.wrong for name in path.split(".")}
    problems += [
        replace(each, line=reading.line(each.path))
        for each in together
        if not doubtful.intersection(re.findall(r"\w+", f"{each.path.rpartition('.')[2]} {each.what} {each.do}"))
    ]
    problems = list({(each.path, each.what): each for each in problems}.values())
    problems.sort(key=lambda problem: (problem.line is None, problem.line or 0))
    return Examined(name, reading, keys, problems, None if reading.wrong else config)


def _as_json(value: Any, keys: Mapping[str, Key] | None = None) -> Any:
    if isinstance(value, Section):
        keys = keys_of(type(value)) if keys is None else keys
        shown_values = {}
        for name, key in keys.items():
            inner = getattr(value, name)
            shown_values[name] = HIDDEN if key.is_secret and inner else _as_json(inner)
        return {**shown_values, **(value.model_extra or {})}
    if isinstance(value, Mapping):
        return {name: _as_json(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_as_json(inner) for inner in value]
    return value


def schema_paths() -> list[str]:
    """The path of every leaf of the schema; ``[]`` and ``<name>`` stand for indices and for names that users choose."""
    return [path for path, key in walk(Schema) if key.model is None]
