"""``optimizer`` and ``scheduler``: the sections, the types that they may name, and the arguments of each type.

Types that the schema does not have are classes of the installed torch, which is imported only for these.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from shoal.config.base import Section, key
from shoal.config.problems import Problem, shown
from shoal.config.tables import types_of_arguments
from shoal.text import nearest

Kind = Literal["optimizer", "scheduler"]


class TypeAndParams(Section):
    """A type's name and the arguments of its constructor; unpacks as ``type, params = section``."""

    type: str | None = key(None, "name, in any case")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of its constructor")

    # pydantic's own goes over (name, value); a section of two is unpacked as its values.
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter((self.type, self.params))


class Optimizer(TypeAndParams):
    """The optimizer to build, if none is passed to ``initialize``."""

    type: str | None = key(
        None,
        "Adam, AdamW, SGD, Adagrad, Lion, Lamb, Muon, OneBitAdam, ZeroOneAdam, OneBitLamb, or any name of torch.optim;"
        " in any case",
    )
    params: dict[str, Any] = key({}, "arguments of the optimizer's constructor")
    legacy_fusion: bool = key(False, "DeepSpeed's old flat fp16 optimizer")


class Scheduler(TypeAndParams):
    """The learning-rate schedule to build, if none is passed to ``initialize``."""

    type: str | None = key(
        None, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or any name of torch.optim.lr_scheduler"
    )
    params: dict[str, Any] = key({}, "arguments of the schedule's constructor")


_TYPES = types_of_arguments()
OPTIMIZERS, SCHEDULERS = _TYPES["optimizer"], _TYPES["scheduler"]

# Arguments without a default.
REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}

# Optimizers whose ranks sum other values than gradients, each rank for all parameters.
SUMS_VALUES = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
SUMS_FORMATS = (
    "wire.reduce",
    "wire.between_nodes",
    "wire.error_feedback",
    "zero_optimization.zero_quantized_gradients",
    "local_steps.every",
)


def sums_stage(name: str, stage: int) -> tuple[str, str]:
    """The problem of such an optimizer at a stage that shards, and the repair."""
    why = "gradients are summed in each micro-batch, before there is a momentum"
    if stage == 1:
        why = "each rank has a range of it, and gathers whole parameters after each step, which costs what is saved"
    what = f"{stage}, but {name} sums momenta, which each rank needs whole: at stage {stage} {why}."
    return what, 'use stage 0; or AdamW with "wire": {"reduce": "int4_hadamard"}, which fits every stage.'


def sums_format(name: str, value: str) -> tuple[str, str]:
    """The problem of a format of gradients with such an optimizer, and the repair."""
    return f"{value}, but {name} decides in which format and when the ranks sum.", "leave it out."


# What "auto" means in the parameters: the constructor's own default, or the value of another key.
AUTO_IS_DEFAULT = {"betas", "eps", "weight_decay", "momentum", "warmup_min_lr", "adam_w_mode", "torch_adam"}


def canonical_type(name: str, known: Mapping[str, type[Section]]) -> str:
    """The canonical spelling of a type given in any case; the name itself where the schema does not have it.

    >>> canonical_type("onebitadam", OPTIMIZERS)
    'OneBitAdam'
    """
    folded = name.casefold().replace("_", "")
    folded = "adam" if folded == "deepspeedadam" else folded  # of the first versions with offload
    return next((kind for kind in known if kind.casefold() == folded), name)


def argument_problems(kind: str, params: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The argument, its problem and the repair, for values that the keys of a type allow and the type does not.

    Args:
        params: without those that are "auto".
    """
    if kind == "Lamb" and params.get("amsgrad"):
        yield "amsgrad", "true, which Lamb does not have.", "leave it out."
    for name in ("amsgrad", "eps_inside_sqrt") if kind in SUMS_VALUES else ():
        if params.get(name) and (kind, name) != ("OneBitLamb", "eps_inside_sqrt"):
            yield name, f"true, which {kind} does not have.", "leave it out."
    if kind == "Muon" and params.get("adam_w_mode") is False:
        yield "adam_w_mode", "false, but the parameters that are not matrices always get AdamW.", "leave it out."
    if kind == "SGD" and params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        yield "nesterov", "true, which needs a momentum and no dampening.", "set momentum, or leave nesterov out."
    if params.get("foreach") and params.get("fused"):
        yield "fused", "true, and so is foreach: torch takes one of them.", "leave one out."


_IGNORING = threading.Lock()  # catch_warnings() changes filters that all threads share

# Optimizers of torch that cannot run on shards, and what to do instead.
NOT_ELEMENTWISE = {
    "LBFGS": "it searches along a direction made from all parameters, and runs the model again in its step",
    "SparseAdam": "it takes sparse gradients only, which stages 1 to 3 do not pass to optimizers",
    "Adafactor": "it factors a matrix's second moment into rows and columns",
    "Muon": "it orthogonalises whole matrices",
}
INSTEAD = {
    "SparseAdam": "pass it as optimizer= with stage 0, alone or in an optimizer that contains it and others.",
    "Muon": 'use Shoal\'s own: "optimizer": {"type": "Muon"} in the config, or shoal.optim.muon.Muon.',
}
# Schedules of torch whose arguments JSON cannot express.
NOT_FROM_JSON = {
    "LambdaLR": "its rate is a Python function",
    "MultiplicativeLR": "its rate is a Python function",
    "SequentialLR": "it is made of other schedules",
    "ChainedScheduler": "it is made of other schedules",
    "ReduceLROnPlateau": "its step() needs a metric",
}


def torch_optimizers() -> dict[str, type]:
    """The optimizers of the installed torch, by name."""
    import torch

    return _classes(torch.optim, torch.optim.Optimizer)


def torch_schedules() -> dict[str, type]:
    """The schedules of the installed torch, by name."""
    import torch

    return _classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)


def _classes(module: Any, base: type) -> dict[str, type]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not name.startswith("_")
    }


# mu-parametrization: the type, and torch's class whose arguments it takes in addition to ``decoupled_wd``.
BY_WIDTH = {"MuAdam": "Adam", "MuAdamW": "AdamW", "MuSGD": "SGD"}


def type_problems(section: Kind, name: str, params: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems of a type that the schema does not have, or of its arguments.

    Args:
        params: without those that are "auto".
    """
    own, classes = (OPTIMIZERS, torch_optimizers()) if section == "optimizer" else (SCHEDULERS, torch_schedules())
    if section == "optimizer":
        classes = classes | {name: classes[of] for name, of in BY_WIDTH.items()}
        if name.casefold().replace("_", "") in map(str.casefold, BY_WIDTH):
            params = {key: value for key, value in params.items() if key != "decoupled_wd"}
    chosen = next((each for each in classes if each.casefold() == name.casefold().replace("_", "")), None)
    path, code = f"{section}.type", "optimizer-name" if section == "optimizer" else "schedule-name"
    if chosen is None:
        names = [*own, *(each for each in classes if each not in BY_WIDTH)]
        names = [each for each in dict.fromkeys(names) if _is_offered(section, each)]
        near = nearest(name, names)
        do = f"did you mean {' or '.join(map(repr, near))}?" if near else f"use one of {', '.join(names)}."
        kind = "optimizer" if section == "optimizer" else "schedule"
        yield Problem(path, f"there is no {kind} {shown(name)}.", do, code=code)
    elif section == "optimizer" and chosen in NOT_ELEMENTWISE:
        do = INSTEAD.get(chosen, "use an elementwise optimizer, such as AdamW.")
        what = f"torch.optim.{chosen} is not elementwise: {NOT_ELEMENTWISE[chosen]}."
        yield Problem(path, what, do, code="optimizer-not-elementwise")
    elif section == "scheduler" and chosen in NOT_FROM_JSON:
        what = f"{shown(chosen)} cannot come from a configuration: {NOT_FROM_JSON[chosen]}."
        yield Problem(path, what, "create it in Python and pass it as lr_scheduler=.", code=code)
    else:
        code = "optimizer-params" if section == "optimizer" else "schedule-params"
        for where, what, do in _torch_argument_problems(section, classes[chosen], params):
            yield Problem(where, what, do, code=code)


def _is_offered(section: Kind, name: str) -> bool:
    if section == "scheduler":
        return name not in NOT_FROM_JSON
    return name in OPTIMIZERS or name not in NOT_ELEMENTWISE


def _torch_argument_problems(section: Kind, factory: type, params: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Names by the constructor's signature, values by a trial of the constructor on one parameter."""
    path = f"{section}.params"
    accepted = list(inspect.signature(factory).parameters.values())[1:]  # without the parameters, or the optimizer
    names = [each.name for each in accepted if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    unknown = [name for name in params if name not in names]
    for name in unknown:
        near = nearest(name, names)
        do = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it takes {', '.join(names)}."
        yield f"{path}.{name}", f"no such key in {path}.", do
    if unknown or (section == "scheduler" and any(isinstance(value, list | tuple) for value in params.values())):
        return  # a list has one value for each group: only the real optimizer knows the number of groups
    missing = [each.name for each in accepted if each.default is each.empty and each.name in names]
    missing = [name for name in missing if name not in params]
    for name in missing:
        yield f"{path}.{name}", f"missing, and {factory.__name__} needs it.", "write it."
    if not missing and (wrong := _trial(section, factory, params)):
        yield path, wrong, ""


def _trial(section: Kind, factory: Any, params: Mapping[str, Any]) -> str:
    """The constructor's error for its arguments; empty: none."""
    import torch

    from shoal.compiler import make_optimizer

    parameters = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))]
    with _IGNORING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if section == "optimizer":
                # A CPU parameter does not show whether the real device has the fused implementation.
                given = {name: value for name, value in params.items() if name != "fused"}
                make_optimizer(factory, parameters, **given)
            else:
                factory(make_optimizer(torch.optim.SGD, parameters, lr=0.1, momentum=0.9), **params)
        except (TypeError, ValueError, RuntimeError, ZeroDivisionError, KeyError) as error:
            return f"{type(error).__name__}: {error}."
    return ""
