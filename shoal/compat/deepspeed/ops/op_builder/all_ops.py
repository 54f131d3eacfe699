"""``deepspeed.ops.op_builder.all_ops``: every builder by its operator's name."""

from __future__ import annotations

from shoal.compat.deepspeed.ops import op_builder

__op_builders__ = [
    value()
    for value in vars(op_builder).values()
    if isinstance(value, type) and issubclass(value, op_builder.OpBuilder) and value is not op_builder.OpBuilder
]
ALL_OPS = {builder.name: builder for builder in __op_builders__ if builder.name != "deepspeed_not_implemented"}

__all__ = ["ALL_OPS", "__op_builders__"]
