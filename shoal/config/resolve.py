"""From the file's values to effective values: an older version's defaults, types by name, "auto"."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from shoal.config.base import Section
from shoal.config.normalise import Normalised, coerce, read_params
from shoal.config.optimizer import (
    AUTO_IS_DEFAULT,
    OPTIMIZERS,
    REQUIRED,
    SCHEDULERS,
    SUMS_FORMATS,
    SUMS_VALUES,
    argument_problems,
    canonical_type,
    sums_format,
    sums_stage,
    type_problems,
)
from shoal.config.problems import Problem, shown

# Defaults that an older DeepSpeed had: the newest version to which each set applies.
OLD_DEFAULTS: dict[tuple[int, int], dict[str, Any]] = {(0, 18): {"gradient_clipping": 0.0}}


def put_old_defaults(reading: Normalised) -> None:
    """Apply the defaults of the DeepSpeed version that ``compat`` names."""
    compat = reading.values.get("compat")
    if compat is None:
        return
    numbers = str(compat).removeprefix("ds-").split(".")[:2]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        reading.problem("compat", f"{shown(compat)} is not a version of DeepSpeed.", 'write it as "ds-0.18".')
        return
    version = (int(numbers[0]), int(numbers[1]))
    for newest, defaults in OLD_DEFAULTS.items():
        if version <= newest:
            reading.values.update({name: value for name, value in defaults.items() if name not in reading.values})


def resolve_types(reading: Normalised) -> list[str]:
    """Check the arguments of the optimizer and the schedule; return the paths of those that stay "auto"."""
    return [*_resolve("optimizer", OPTIMIZERS, reading), *_resolve("scheduler", SCHEDULERS, reading)]


def check_types(reading: Normalised, replaced: Collection[str]) -> None:
    """Check that the optimizer and the schedule can be built: their types, and arguments that go together.

    Args:
        replaced: of the two sections, those for which the caller passes an object.
    """
    for kind in ("optimizer", "scheduler"):
        part = reading.values.get(kind)
        name = part.get("type") if isinstance(part, dict) else None
        if kind in replaced or not isinstance(part, dict) or not isinstance(name, str) or not name:
            continue
        params = part.get("params")
        params = params if isinstance(params, Mapping) else {}
        given = {key: value for key, value in params.items() if not _is_auto(value)}
        if name not in (OPTIMIZERS if kind == "optimizer" else SCHEDULERS):
            reading.problems += [
                replace(problem, line=reading.line(problem.path)) for problem in type_problems(kind, name, given)
            ]
            continue
        for key, what, do in argument_problems(name, given):
            reading.problem(f"{kind}.params.{key}", what, do)
        if name in SUMS_VALUES:
            _check_sums(name, reading)
        for key in REQUIRED.get(name, ()):
            if params.get(key) is None:
                reading.problem(f"{kind}.params.{key}", f"missing, and {name} needs it.", "write it.")


def _check_sums(name: str, reading: Normalised) -> None:
    """An optimizer that sums values of its own needs whole state, and decides the format itself."""
    zero = reading.values.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else 0
    set_formats = [path for path in SUMS_FORMATS if path in reading.given and reading.given[path].value]
    wrong = [("zero_optimization.stage", sums_stage(name, stage))] if stage in (1, 2, 3) else []
    wrong += [(path, sums_format(name, shown(reading.given[path].value))) for path in set_formats[:1]]
    for path, (what, do) in wrong:
        reading.problems.append(Problem(path, what, do, reading.line(path), code="optimizer-sums"))


def _resolve(
    kind: Literal["optimizer", "scheduler"], known: Mapping[str, type[Section]], reading: Normalised
) -> list[str]:
    part = reading.values.get(kind)
    if not isinstance(part, dict):
        return []
    if isinstance(part.get("type"), str):
        part["type"] = canonical_type(part["type"], known)
        reading.given[f"{kind}.type"] = replace(reading.given[f"{kind}.type"], value=part["type"])
    params = part.get("params")
    if not isinstance(params, Mapping):
        return []
    if kind == "optimizer" and "max_grad_norm" in params:
        params = _without_clipping(params, reading)
    part["params"] = dict(params)
    auto = [name for name, value in params.items() if _is_auto(value)]
    model = known.get(part["type"]) if isinstance(part.get("type"), str) else None
    if model is not None:
        read_params(kind, model, reading)
    else:
        for name in auto:
            del part["params"][name]
            reading.origins[f"{kind}.params.{name}"] = "auto"
    return _fill_in(kind, auto, reading)


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() == "auto"


def _without_clipping(params: Mapping[str, Any], reading: Normalised) -> dict[str, Any]:
    """The arguments without ``max_grad_norm``, the oldest name of ``gradient_clipping``."""
    norm = coerce(params["max_grad_norm"], float)
    clip = reading.values.setdefault("gradient_clipping", norm) if isinstance(norm, float) and norm > 0 else norm
    if clip != norm:
        reading.problem(
            "optimizer.params.max_grad_norm",
            f"{shown(norm)}, but gradient_clipping is {shown(clip)}, and gradients are clipped once.",
            "leave it out.",
        )
    elif norm not in (None, 0, "auto"):
        reading.warnings.append(
            f"optimizer.params.max_grad_norm is deprecated; write gradient_clipping = {shown(norm)}."
        )
    return {name: value for name, value in params.items() if name != "max_grad_norm"}


def _fill_in(kind: str, auto: list[str], reading: Normalised) -> list[str]:
    """Derive values of "auto" arguments where possible; return the paths of those that stay "auto"."""
    params, unresolved = reading.values[kind]["params"], []
    rate = ((reading.values.get("optimizer") or {}).get("params") or {}).get("lr")
    for name in auto:
        path = f"{kind}.params.{name}"
        if path not in reading.origins:
            continue  # not a name of this type: a problem already
        if name in AUTO_IS_DEFAULT:
            continue
        if name == "warmup_max_lr" and isinstance(rate, int | float):
            params[name] = float(rate)
            continue
        params[name] = "auto"
        unresolved.append(path)
    return unresolved
