"""``deepspeed.runtime.comm.coalesced_collectives``: several tensors in one collective."""

from __future__ import annotations

from shoal.compat.absent import absent_function
from shoal.compat.coalesced import reduce_scatter_coalesced

all_to_all_quant_reduce = absent_function(
    "deepspeed.runtime.comm.coalesced_collectives.all_to_all_quant_reduce",
    "communication_data_type in the config sends gradients in 16 bit.",
)

__all__ = ["all_to_all_quant_reduce", "reduce_scatter_coalesced"]
