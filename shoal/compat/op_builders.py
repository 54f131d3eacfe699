"""DeepSpeed's builders of compiled operators. They compile nothing: torch's and Shoal's classes are the operators.

CPUAdamBuilder().load()                       succeeds, as scripts call it in order to compile before the start
AsyncIOBuilder().load().aio_handle()          reads and writes files: ``shoal.compat.async_io``
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.compat.absent import not_built
from shoal.compat.async_io import AsyncIoHandle, PinHandle


class _Functions(SimpleNamespace):
    """The functions of an operator. Raises: NotBuiltError: a function that Shoal does not have is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_built(f"the compiled operators' function {name}()", _USE)


_USE = "use the optimizer classes of deepspeed.ops themselves, or torch's functions: nothing is compiled here."
_OF_OPTIMIZERS = ("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion")
# operator -> what its builder loads
MODULES: dict[str, SimpleNamespace] = {
    **dict.fromkeys(_OF_OPTIMIZERS, _Functions()),
    "async_io": _Functions(aio_handle=AsyncIoHandle),
    "pin_memory": _Functions(pin_handle=PinHandle),
}


class OpBuilder:
    """One operator, by name."""

    NAME = "none"
    IS_THERE = False

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """True if Shoal has the operator's function."""
        return self.IS_THERE

    def load(self, verbose: bool = True) -> Any:
        """The operator's functions. Nothing is compiled. Raises: NotBuiltError: Shoal does not have them."""
        if self.NAME in MODULES:
            return MODULES[self.NAME]
        raise not_built(f"the compiled operator {self.name!r}", _USE)

    def jit_load(self, verbose: bool = True) -> Any:
        """As ``load``."""
        return self.load(verbose)


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
BUILDERS: dict[str, type[OpBuilder]] = {
    name: type(name, (OpBuilder,), {"NAME": operator, "IS_THERE": operator in MODULES, "__module__": __name__})
    for name, operator in _OPERATORS.items()
}
globals().update(BUILDERS)

__op_builders__ = [builder() for builder in BUILDERS.values()]
ALL_OPS = {builder.name: builder for builder in __op_builders__ if builder.name != "deepspeed_not_implemented"}
__compatible_ops__ = {builder.name: builder.is_compatible() for builder in __op_builders__}
