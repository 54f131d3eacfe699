"""``deepspeed.sequence.fpdt_layer``: attention over sequences in parts that rest on the host; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class

_DO = (
    "sequence parallelism is not built yet: use activation checkpointing for long sequences, or a smaller micro-batch."
)

FPDT_Attention = absent_class("deepspeed.sequence.fpdt_layer.FPDT_Attention", _DO)
FPDT_FFN = absent_class("deepspeed.sequence.fpdt_layer.FPDT_FFN", _DO)
FPDT_InputConstruct = absent_class("deepspeed.sequence.fpdt_layer.FPDT_InputConstruct", _DO)
FPDT_LogitsLoss = absent_class("deepspeed.sequence.fpdt_layer.FPDT_LogitsLoss", _DO)

__all__ = ["FPDT_Attention", "FPDT_FFN", "FPDT_InputConstruct", "FPDT_LogitsLoss"]
