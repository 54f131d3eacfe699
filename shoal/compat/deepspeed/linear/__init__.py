"""``deepspeed.linear``: a linear layer with LoRA and quantized weights of its own; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class, absent_function

_DO = "use torch.nn.Linear, and PEFT for LoRA: its adapters train under every stage."

OptimizedLinear = absent_class("deepspeed.linear.OptimizedLinear", _DO)
LoRAConfig = absent_class("deepspeed.linear.LoRAConfig", _DO)
QuantizationConfig = absent_class("deepspeed.linear.QuantizationConfig", _DO)
Init = absent_class("deepspeed.linear.Init", _DO)
init_lora = absent_function("deepspeed.linear.init_lora", _DO)

__all__ = ["Init", "LoRAConfig", "OptimizedLinear", "QuantizationConfig", "init_lora"]
