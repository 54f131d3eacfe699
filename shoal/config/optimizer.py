"""``optimizer`` and ``scheduler``: the sections, and what is to be known of the arguments of each type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from shoal.config.base import Section, key
from shoal.config.tables import types_of_arguments


class TypeAndParams(Section):
    """A type's name and the arguments of its constructor; unpacks as ``type, params = section``."""

    type: str | None = key(None, "name, in any case")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of its constructor")

    # pydantic's own goes over (name, value); a section of two is unpacked as its values.
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter((self.type, self.params))


class Optimizer(TypeAndParams):
    """The optimizer to build, if none is passed to ``initialize``."""

    type: str | None = key(None, "Adam, AdamW, SGD, Adagrad, Lion, Lamb, Muon, or any name of torch.optim; in any case")
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
    if kind == "Muon" and params.get("adam_w_mode") is False:
        yield "adam_w_mode", "false, but the parameters that are not matrices always get AdamW.", "leave it out."
    if kind == "SGD" and params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        yield "nesterov", "true, which needs a momentum and no dampening.", "set momentum, or leave nesterov out."
    if params.get("foreach") and params.get("fused"):
        yield "fused", "true, and so is foreach: torch takes one of them.", "leave one out."
