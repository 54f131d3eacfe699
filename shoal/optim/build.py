"""Optimizers and schedules by name, as the sections ``optimizer`` and ``scheduler`` of a configuration ask for them.

    "Adam"     -> torch.optim.AdamW, or Adam with "adam_w_mode": false      "Lion" -> shoal.optim.lion.Lion
    "AdamW"    -> torch.optim.AdamW                                         "Lamb" -> shoal.optim.lamb.Lamb
    "Adagrad"  -> torch.optim.Adagrad                                       "Muon" -> shoal.optim.muon.Muon
    "OneBitAdam", "ZeroOneAdam", "OneBitLamb" -> shoal.optim.one_bit, one_bit_lamb
    "MuAdam", "MuAdamW", "MuSGD" -> torch's, with rates by width (``scaled_groups``)
    any other  -> the class of that name in torch.optim

Names may be in any case. Defaults are DeepSpeed's; parameters that have no effect here are accepted and noted. Loading
the configuration has checked names and values (``shoal.config.optimizer``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shoal.compiler import make_optimizer
from shoal.config.optimizer import BY_WIDTH, NOT_ELEMENTWISE, SUMS_VALUES, torch_optimizers
from shoal.errors import OptimizerError
from shoal.optim.elementwise import refusal
from shoal.optim.lamb import Lamb
from shoal.optim.lion import Lion
from shoal.optim.muon import Muon
from shoal.optim.one_bit import OneBitAdam, ZeroOneAdam
from shoal.optim.one_bit_lamb import OneBitLamb
from shoal.optim.variants import AdamWithBias


def scaled_groups(groups: Iterable[dict[str, Any]], settings: dict[str, Any], *, is_sgd: bool) -> list[dict[str, Any]]:
    """The groups of mu-parametrization, each split by the factor of its rate: rates depend on each parameter's width.

        parameter                        Adam                          SGD
        two dims that grow (a matrix)    lr / width                    lr * fan_out growth / fan_in growth
        one dim that grows (a vector)    lr                            lr * width
        none                             lr                            lr

    A width is how many times wider a dim is than in the base model. ``mup.set_base_shapes(model, base)`` records it in
    each parameter's ``infshape``. Weight decay that multiplies the rate is scaled the other way, so that the product
    stays.

    Args:
        settings: of the optimizer; ``lr`` and ``weight_decay`` are those of groups that have none.

    Raises: OptimizerError: a parameter without ``infshape``, or with more than two dims that grow.
    Source: Tensor Programs V (arXiv:2203.03466), table 8.
    """
    is_decoupled = bool(settings.pop("decoupled_wd", False))
    made = []
    for group in groups:
        lr = group.get("lr", settings.get("lr", 1e-3))
        decay = group.get("weight_decay", settings.get("weight_decay", 0.0))
        by_factor: dict[float, list[Any]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(_factor(parameter, is_sgd=is_sgd), []).append(parameter)
        for factor, parameters in by_factor.items():
            scaled = decay if is_decoupled else decay / factor
            made.append({**group, "params": parameters, "lr": lr * factor, "weight_decay": scaled})
    return made


def _factor(parameter: torch.Tensor, *, is_sgd: bool) -> float:
    """What the rate of a parameter is multiplied by."""
    shape: Any = getattr(parameter, "infshape", None)
    if shape is None:
        raise OptimizerError(
            f"a parameter of shape {tuple(parameter.shape)} has no infshape: its width in the base model is not known.",
            where="optimizer.type",
            do="call mup.set_base_shapes(model, base) before initialize().",
            code="optimizer-mup",
        )
    num_growing = shape.ninf()
    if num_growing > 2:
        raise OptimizerError(
            f"a parameter of shape {tuple(parameter.shape)} has {num_growing} dims that grow with the width.",
            where="optimizer.type",
            do="use an optimizer without mu-parametrization for it.",
            code="optimizer-mup",
        )
    if num_growing == 2:
        return 1.0 / float(shape.fanin_fanout_mult_ratio() if is_sgd else shape.width_mult())
    return float(shape.width_mult()) if is_sgd and num_growing == 1 else 1.0


BETAS = (0.9, 0.999)


TORCH_DECAY = 0.01  # DeepSpeed's own Adam has none
ADAM_DEFAULTS = {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0}

# The class of each name, and defaults where they are not the class's.
RECIPES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.AdamW, ADAM_DEFAULTS),
    "AdamW": (torch.optim.AdamW, ADAM_DEFAULTS),
    "SGD": (torch.optim.SGD, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Lion": (Lion, {"lr": 1e-3, "betas": BETAS}),
    "Lamb": (Lamb, {}),
    "Muon": (Muon, {}),
    "OneBitAdam": (OneBitAdam, {}),
    "ZeroOneAdam": (ZeroOneAdam, {}),
    "OneBitLamb": (OneBitLamb, {}),
    "MuAdam": (torch.optim.Adam, ADAM_DEFAULTS),
    "MuAdamW": (torch.optim.AdamW, ADAM_DEFAULTS),
    "MuSGD": (torch.optim.SGD, {"lr": 1e-3}),
}

NO_EFFECT = {
    "torch_adam": "torch's kernels are used in either case",
    "fp32_optimizer_states": "set precision.state_dtype or bf16.bf16_optimizer_states instead",
    "set_grad_none": "gradients are always released after the step",
    "cuda_aware": "the mesh's own communicator is used",
    "comm_backend_name": "the mesh's own communicator is used",
}
EMBEDDING_WORDS = ("embed", "lm_head")  # anywhere in a parameter's name
EMBEDDING_MODULES = ("wte", "wpe", "head")  # a whole part of its name


def build(
    name: str,
    params: Mapping[str, Any],
    param_groups: Iterable[Any],
    *,
    names: Mapping[int, str] | None = None,
    has_master: bool = True,
) -> tuple[torch.optim.Optimizer, list[str]]:
    """Build the optimizer that a config names.

    Args:
        name: in any case.
        params: the constructor's keyword arguments, from JSON.
        param_groups: parameters, or groups as torch takes them; what a group sets itself wins over ``params``. Muon
            splits groups.
        names: parameter names by ``id(parameter)``, for Muon, which leaves embeddings and heads to AdamW.
        has_master: the optimizer updates fp32 main parameters; False: the 16-bit parameters themselves.

    Returns: the optimizer, and notes on what was accepted without effect.
    Raises: OptimizerError: an unknown name, an optimizer that cannot run on shards, or arguments that the constructor
        refuses.
    """
    canonical, factory, defaults = _find(name)
    given = {key: value for key, value in params.items() if key not in NO_EFFECT}
    notes = [
        f"optimizer.params.{key} = {params[key]} has no effect: {reason}."
        for key, reason in NO_EFFECT.items()
        if key in params
    ]
    for key in ("amsgrad", "eps_inside_sqrt") if canonical in SUMS_VALUES else ("amsgrad",):
        if canonical in ("Lamb", *SUMS_VALUES) and not given.get(key):
            given.pop(key, None)
    if canonical in ("Adam", "AdamW"):
        is_corrected = given.pop("bias_correction", True)
        decoupled = given.pop("adam_w_mode", True)
        if canonical == "AdamW" and not decoupled:
            notes.append("optimizer.params.adam_w_mode = False has no effect: AdamW's decay is always decoupled.")
        elif not decoupled:
            factory = torch.optim.Adam
        elif canonical == "Adam":
            notes.append('"Adam" is AdamW (decoupled weight decay), as in DeepSpeed; set "adam_w_mode": false for L2.')
        if not is_corrected:
            given |= {"bias_correction": False, "decoupled_weight_decay": factory is torch.optim.AdamW}
            factory = AdamWithBias
    settings = {**defaults, **given}
    if params.get("torch_adam") and factory is torch.optim.AdamW and "weight_decay" not in given:
        settings["weight_decay"] = TORCH_DECAY
        notes.append(f"optimizer.params.weight_decay is {TORCH_DECAY}, the default of torch's AdamW (torch_adam).")
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    groups = _as_groups(param_groups)
    if canonical == "Muon":
        groups, settings, more = _split_for_muon(groups, settings, names)
        notes += more
    if canonical in BY_WIDTH:
        groups = scaled_groups(groups, settings, is_sgd=canonical == "MuSGD")
    # torch's fused SGD for CPU leaves the last elements of a 16-bit tensor as they are, and their momentum unset.
    if has_master or factory is not torch.optim.SGD:
        settings.update(_fused(factory, settings, groups))
    try:
        return make_optimizer(factory, groups, **settings), notes
    except (TypeError, ValueError, RuntimeError, IndexError) as problem:
        if isinstance(problem, OptimizerError):
            raise
        where = f"optimizer.params of {canonical!r}"
        raise OptimizerError(str(problem), where=where, code="optimizer-params") from problem


def _find(name: str) -> tuple[str, type[torch.optim.Optimizer], dict[str, Any]]:
    classes = torch_optimizers()
    lowered = name.lower().replace("_", "")
    canonical = next((each for each in (*RECIPES, *classes) if each.lower() == lowered), None)
    if canonical in RECIPES:
        return canonical, *RECIPES[canonical]
    if canonical is None:
        raise OptimizerError(f"there is no optimizer {name!r}.", where="optimizer.type", code="optimizer-name")
    if canonical in NOT_ELEMENTWISE:
        raise refusal(canonical, NOT_ELEMENTWISE[canonical])
    return canonical, classes[canonical], {}


def _as_groups(param_groups: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups with their parameters in lists. The caller's dicts are used, so the caller sees later rates in them."""
    entries = list(param_groups)
    if not entries:
        raise OptimizerError(
            "the optimizer got no parameters.", do="pass parameters or groups.", code="optimizer-empty"
        )
    if not isinstance(entries[0], dict):
        return [{"params": entries}]
    for group in entries:
        members = group["params"]
        group["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
    return entries


def _fused(
    factory: type[torch.optim.Optimizer], settings: Mapping[str, Any], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """``fused=True`` where the class supports it on the parameters' device and the config names no implementation."""
    if "fused" not in inspect.signature(factory).parameters:
        return {}
    if any(settings.get(key) for key in ("fused", "foreach", "capturable", "differentiable")) or "fused" in settings:
        return {}
    params = [entry[1] if isinstance(entry, tuple) else entry for group in groups for entry in group["params"]]
    if not params or not all(param.is_floating_point() for param in params):
        return {}
    try:
        for device in {param.device for param in params}:
            make_optimizer(
                factory, [torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))], fused=True
            )
    except (RuntimeError, TypeError, ValueError):
        return {}
    return {"fused": True}


def _split_for_muon(
    groups: list[dict[str, Any]], settings: dict[str, Any], names: Mapping[int, str] | None
) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Split groups into one for Muon and one for AdamW each, unless they say ``use_muon`` themselves.

    Returns: groups, settings without the two rates, notes.
    """
    settings = dict(settings)
    if settings.get("adam_w_mode"):
        del settings["adam_w_mode"]  # which AdamW always has
    rates = {True: settings.pop("muon_lr", None), False: settings.pop("adam_lr", None)}
    halved: list[dict[str, Any]] = []
    counts = {True: 0, False: 0}
    for number, group in enumerate(groups):
        halves: dict[bool, list[Any]] = {True: [], False: []}
        for index, entry in enumerate(group["params"]):
            parameter = entry[1] if isinstance(entry, tuple) else entry
            if "use_muon" in group:
                is_matrix = bool(group["use_muon"])
            elif parameter.dim() < 2:
                is_matrix = False
            else:
                label = _name_of(entry, index, group, names)
                if label is None:
                    raise OptimizerError(
                        f"Muon got no name for parameter {index} of group {number} (shape {tuple(parameter.shape)}), "
                        "so it cannot tell an embedding from a hidden matrix.",
                        do='set "use_muon" in the group, or pass named parameters.',
                        code="optimizer-muon-names",
                    )
                is_matrix = not _is_embedding(label)
            halves[is_matrix].append(index)
        given = dict(group)
        for use_muon, members in halves.items():
            if not members and "use_muon" in given:
                continue
            # Both halves, also an empty one: a pipeline stage may have no matrix, and groups are alike on all stages.
            half = group if len(members) == len(given["params"]) and members else dict(given)
            half.update(_members(given, members), use_muon=use_muon)
            if not members and any(isinstance(entry, tuple) for entry in given["params"]):
                half["param_names"] = []  # torch wants names in all groups or in none
            if rates[use_muon] is not None:
                half.setdefault("lr", rates[use_muon])
            halved.append(half)
            counts[use_muon] += len(members)
    note = f"Muon updates {counts[True]} matrices; {counts[False]} other parameters get AdamW."
    return halved, settings, [note]


def _members(group: Mapping[str, Any], indices: list[int]) -> dict[str, list[Any]]:
    """The group's per-parameter lists, restricted to some of the parameters."""
    return {key: [group[key][i] for i in indices] for key in ("params", "param_names") if key in group}


def _name_of(entry: Any, index: int, group: Mapping[str, Any], names: Mapping[int, str] | None) -> str | None:
    if isinstance(entry, tuple):
        return str(entry[0])
    if "param_names" in group:
        return str(group["param_names"][index])
    return None if names is None else names.get(id(entry))


def _is_embedding(name: str) -> bool:
    lowered = name.lower()
    return any(word in lowered for word in EMBEDDING_WORDS) or any(
        part in EMBEDDING_MODULES for part in lowered.split(".")
    )
