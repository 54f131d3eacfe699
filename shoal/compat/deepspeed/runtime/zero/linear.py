"""``deepspeed.runtime.zero.linear``: torch's linear layer; no parameter is kept for the backward pass in any case."""

from __future__ import annotations

from torch.nn import Linear as LinearModuleForZeroStage3
from torch.nn.functional import linear as zero3_linear_wrap

__all__ = ["LinearModuleForZeroStage3", "zero3_linear_wrap"]
