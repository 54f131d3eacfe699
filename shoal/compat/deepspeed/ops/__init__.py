"""``deepspeed.ops``: optimizers and the builders of operators. Nothing is compiled: torch's kernels are used."""

from __future__ import annotations

from shoal.compat.deepspeed.ops import adagrad, adam, lamb, lion
from shoal.compat.deepspeed.ops.op_builder.all_ops import ALL_OPS

__compatible_ops__ = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
__compatible_ops__["deepspeed_not_implemented"] = False

__all__ = ["__compatible_ops__", "adagrad", "adam", "lamb", "lion"]
