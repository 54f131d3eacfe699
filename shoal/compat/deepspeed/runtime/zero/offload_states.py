"""``deepspeed.runtime.zero.offload_states``: where an engine's states are now."""

from __future__ import annotations

import torch

from shoal.compat.deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from shoal.compat.parameters import part_of
from shoal.engine.engine import Engine
from shoal.zero import safe_get_local_fp32_param, safe_get_local_optimizer_state


def get_state_devices(model: Engine, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices that this rank's part of a kind of state lies on; where it has none, where it would lie."""
    trained = [parameter for parameter in model.module.parameters() if model.access.knows(parameter)]
    if state == OffloadStateTypeEnum.hp_params:
        parts = [safe_get_local_fp32_param(parameter) for parameter in trained]
    elif state == OffloadStateTypeEnum.optim_states:
        parts = [
            safe_get_local_optimizer_state(parameter, key) for parameter in trained for key in ("exp_avg", "exp_avg_sq")
        ]
    elif state == OffloadStateTypeEnum.lp_params:
        parts = [part_of(parameter) for parameter in model.module.parameters()]
    else:
        parts = []
    home = torch.device("cpu") if model.offloaded.is_away(state.value) else model.device
    return {part.device for part in parts if part is not None} or {home}


__all__ = ["get_state_devices"]
