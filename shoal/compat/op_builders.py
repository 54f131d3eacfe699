"""DeepSpeed's builders of compiled operators. They build nothing: ``load()`` gives torch's functions under its names.

The optimizers' operators, files and pinned memory are there (``operators``); what a builder of another operator would
load is not.
"""

from __future__ import annotations

from typing import Any

from shoal.compat.absent import not_built
from shoal.compat.operators import MODULES


class OpBuilder:
    """One operator, by name."""

    NAME = "none"
    IS_THERE = False

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{FOLDERS.get(self.NAME, 'comm')}.{self.name}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """True if Shoal has the operator's function."""
        return self.IS_THERE

    def load(self, verbose: bool = True) -> Any:
        """The operator's functions. Nothing is compiled.

        Raises: NotBuiltError: Shoal does not have them.
        """
        if self.NAME in MODULES:
            return MODULES[self.NAME]
        raise not_built(
            f"the compiled operator {self.name!r}",
            "use the optimizer classes of deepspeed.ops themselves, or torch's functions: nothing is compiled here.",
        )

    def jit_load(self, verbose: bool = True) -> Any:
        """As ``load``."""
        return self.load(verbose)


# Where DeepSpeed has an operator, below ``deepspeed.ops``.
FOLDERS = {
    "cpu_adam": "adam",
    "cpu_adagrad": "adagrad",
    "cpu_lion": "lion",
    "fused_adam": "adam",
    "async_io": "aio",
    "pin_memory": "pin_memory",
}
CUDAOpBuilder = CPUOpBuilder = OpBuilder

# The operator that each class is for.
_OPERATORS = {
    "CPUAdamBuilder": "cpu_adam",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "AsyncIOBuilder": "async_io",
    "GDSBuilder": "gds",
    "UtilsBuilder": "utils",
    "TransformerBuilder": "transformer",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "QuantizerBuilder": "quantizer",
    "FPQuantizerBuilder": "fp_quantizer",
    "RandomLTDBuilder": "random_ltd",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "SpatialInferenceBuilder": "spatial_inference",
    "EvoformerAttnBuilder": "evoformer_attn",
    "SparseAttnBuilder": "sparse_attn",
    "DeepCompileBuilder": "dc",
    "PinMemoryBuilder": "pin_memory",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "NotImplementedBuilder": "deepspeed_not_implemented",
}
_THERE = {*MODULES, "fused_lamb", "fused_lion"}
BUILDERS: dict[str, type[OpBuilder]] = {
    name: type(name, (OpBuilder,), {"NAME": operator, "IS_THERE": operator in _THERE, "__module__": __name__})
    for name, operator in _OPERATORS.items()
}
globals().update(BUILDERS)

__op_builders__ = [builder() for builder in BUILDERS.values()]
ALL_OPS = {builder.name: builder for builder in __op_builders__ if builder.name != "deepspeed_not_implemented"}
__compatible_ops__ = {builder.name: builder.is_compatible() for builder in __op_builders__}
