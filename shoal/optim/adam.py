"""torch's Adam with one option more: running means that are not corrected for their start at zero.

corrected       m / (1 - b1^t), v / (1 - b2^t)        as torch's Adam, and its default here
uncorrected     m, v                                  the same with an infinite t
"""

from __future__ import annotations

import math
from typing import Any

import torch


class AdamWithBias(torch.optim.Adam):
    """Adam, or AdamW with ``decoupled_weight_decay``, whose groups may have ``bias_correction: False``.

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, section 3 (arXiv:1412.6980).
    """

    def __init__(self, params: Any, *, bias_correction: bool = True, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    # torch's step() calls it, and computes with the counts that it puts into ``state_steps``.
    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        result = super()._init_group(group, *lists)
        state_steps: list[torch.Tensor] = lists[-1]
        if not group.get("bias_correction", True) and state_steps:
            torch._foreach_add_(state_steps, 1)
            state_steps[:] = [torch.full_like(step, math.inf) for step in state_steps]
        return result
