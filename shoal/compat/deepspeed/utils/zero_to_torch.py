"""``deepspeed.utils.zero_to_torch``: whole weights out of a checkpoint; `shoal convert` does it."""

from __future__ import annotations

from shoal.compat.absent import absent_function

main = absent_function("deepspeed.utils.zero_to_torch.main", "run `shoal convert CHECKPOINT OUT`.")

__all__ = ["main"]
