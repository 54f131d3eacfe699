"""``deepspeed.ops.op_builder``: builders that build nothing.

DeepSpeed's tests and scripts ask a builder whether an operator is there. The optimizers are (torch's kernels); what a
builder of another operator would load is not.
"""

from __future__ import annotations

from typing import Any

from shoal.compat.absent import not_built


class OpBuilder:
    """One operator, by name."""

    NAME = "none"
    IS_THERE = False

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Does Shoal do what the operator is for?"""
        return self.IS_THERE

    def load(self, verbose: bool = True) -> Any:
        """Raises: NotBuiltError: always: there is no compiled module."""
        raise not_built(
            f"the compiled operator {self.name!r}",
            "use the optimizer classes of deepspeed.ops themselves, or torch's functions: nothing is compiled here.",
        )

    jit_load = load


CUDAOpBuilder = CPUOpBuilder = OpBuilder


class NotImplementedBuilder(OpBuilder):
    NAME = "deepspeed_not_implemented"


class CPUAdamBuilder(OpBuilder):
    NAME = "cpu_adam"
    IS_THERE = True


class CPUAdagradBuilder(OpBuilder):
    NAME = "cpu_adagrad"
    IS_THERE = True


class CPULionBuilder(OpBuilder):
    NAME = "cpu_lion"
    IS_THERE = True


class FusedAdamBuilder(OpBuilder):
    NAME = "fused_adam"
    IS_THERE = True


class FusedLambBuilder(OpBuilder):
    NAME = "fused_lamb"
    IS_THERE = True


class FusedLionBuilder(OpBuilder):
    NAME = "fused_lion"
    IS_THERE = True


class AsyncIOBuilder(OpBuilder):
    NAME = "async_io"


class GDSBuilder(OpBuilder):
    NAME = "gds"


class UtilsBuilder(OpBuilder):
    NAME = "utils"


class TransformerBuilder(OpBuilder):
    NAME = "transformer"


class StochasticTransformerBuilder(OpBuilder):
    NAME = "stochastic_transformer"


class InferenceBuilder(OpBuilder):
    NAME = "transformer_inference"


class InferenceCoreBuilder(OpBuilder):
    NAME = "inference_core_ops"


class InferenceCutlassBuilder(OpBuilder):
    NAME = "cutlass_ops"


class QuantizerBuilder(OpBuilder):
    NAME = "quantizer"


class FPQuantizerBuilder(OpBuilder):
    NAME = "fp_quantizer"


class RandomLTDBuilder(OpBuilder):
    NAME = "random_ltd"


class RaggedOpsBuilder(OpBuilder):
    NAME = "ragged_device_ops"


class RaggedUtilsBuilder(OpBuilder):
    NAME = "ragged_ops"


class SpatialInferenceBuilder(OpBuilder):
    NAME = "spatial_inference"


class EvoformerAttnBuilder(OpBuilder):
    NAME = "evoformer_attn"


class SparseAttnBuilder(OpBuilder):
    NAME = "sparse_attn"


class DeepCompileBuilder(OpBuilder):
    NAME = "dc"


class PinMemoryBuilder(OpBuilder):
    NAME = "pin_memory"


class CCLCommBuilder(OpBuilder):
    NAME = "deepspeed_ccl_comm"


class ShareMemCommBuilder(OpBuilder):
    NAME = "deepspeed_shm_comm"


__all__ = [
    "AsyncIOBuilder",
    "CCLCommBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "CPUOpBuilder",
    "CUDAOpBuilder",
    "DeepCompileBuilder",
    "EvoformerAttnBuilder",
    "FPQuantizerBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "InferenceBuilder",
    "InferenceCoreBuilder",
    "InferenceCutlassBuilder",
    "NotImplementedBuilder",
    "OpBuilder",
    "PinMemoryBuilder",
    "QuantizerBuilder",
    "RaggedOpsBuilder",
    "RaggedUtilsBuilder",
    "RandomLTDBuilder",
    "ShareMemCommBuilder",
    "SparseAttnBuilder",
    "SpatialInferenceBuilder",
    "StochasticTransformerBuilder",
    "TransformerBuilder",
    "UtilsBuilder",
]
