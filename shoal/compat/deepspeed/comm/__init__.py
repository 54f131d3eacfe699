"""``deepspeed.comm``: torch.distributed under DeepSpeed's names, with the few functions that torch does not have."""

from __future__ import annotations

from shoal.compat.deepspeed.comm.comm import *  # noqa: F403
from shoal.compat.deepspeed.comm.comm import __all__ as __all__
