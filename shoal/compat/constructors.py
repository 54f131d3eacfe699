"""What the constructors of DeepSpeed's optimizers have in common."""

from __future__ import annotations

from typing import Any

import torch

from shoal.errors import OptimizerError


def fused_where_possible(params: Any) -> tuple[Any, bool | None]:
    """The parameters or groups, and whether torch's fused step supports them (None: let torch choose).

    Group dicts are not copied, so the caller sees later changes of the rate in them.
    """
    entries = list(params)
    tensors: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            members = entry["params"]
            entry["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
            tensors += entry["params"]
        else:
            tensors.append(entry)
    plain = [entry[1] if isinstance(entry, tuple) else entry for entry in tensors]
    can = all(tensor.is_floating_point() and tensor.device.type in ("cpu", "cuda") for tensor in plain)
    return entries, True if can and plain else None


def adam_arguments(
    name: str, params: Any, *, bias_correction: bool, betas: Any, is_adamw: bool, **others: Any
) -> dict[str, Any]:
    """The arguments of ``torch.optim.Adam`` for DeepSpeed's class ``name``: fused where possible.

    Raises: OptimizerError: ``bias_correction`` is False.
    """
    only_true(name, "bias_correction", bias_correction)
    params, is_fused = fused_where_possible(params)
    betas = tuple(betas)  # JSON gives a list
    return {"params": params, "betas": betas, "fused": is_fused, "decoupled_weight_decay": is_adamw, **others}


def only_true(name: str, option: str, value: bool) -> None:
    """Raises: OptimizerError: the option is false, which torch's kernels do not have."""
    if not value:
        raise OptimizerError(
            f"{name}({option}={value}): torch's kernels do not have it.", do="leave it out.", code="optimizer-params"
        )


def only_false(name: str, option: str, value: Any, do: str = "leave it out.") -> None:
    """Raises: OptimizerError: the option asks for something that Shoal does not have."""
    if value:
        raise OptimizerError(f"{name}({option}={value}): there is no such option.", do=do, code="optimizer-params")
