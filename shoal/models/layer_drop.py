"""Progressive layer drop: the share of its layers that a model runs, by step.

    theta(step) = (1 - theta) exp(-gamma step) + theta        from 1 down to theta

The engine passes the share to the model's forward; the model draws which layers it skips.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class ProgressiveLayerDrop:
    """The schedule, with DeepSpeed's names.

    >>> drop = ProgressiveLayerDrop(theta=0.5, gamma=0.001)
    >>> drop.update_state(1000)
    >>> round(drop.get_theta(), 3)
    0.684

    Args:
        theta: share of layers that run at the end, 0 to 1.
        gamma: how fast that share is reached, by step.

    Source: Zhang and He 2020 (arXiv:2010.13369), section 4.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def update_state(self, global_step: int) -> None:
        """Set the share to that of a step, counted from 0."""
        self.current_theta = float((1.0 - self.theta) * np.exp(-self.gamma * global_step) + self.theta)

    def get_theta(self) -> float:
        """The share now; 1 before the first step."""
        return self.current_theta

    def get_state(self) -> dict[str, Any]:
        """What a forward gets: ``progressive_layer_drop`` (True) and ``pld_theta``."""
        return {"progressive_layer_drop": True, "pld_theta": self.current_theta}
