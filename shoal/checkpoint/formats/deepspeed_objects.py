"""Stand-ins for the few classes of DeepSpeed's that its checkpoints are pickled with. They hold what they are given and
can do nothing; DeepSpeed itself is never imported.

    deepspeed.runtime.fp16.loss_scaler.LossScaler, DynamicLossScaler       a loss scale's numbers
    deepspeed.runtime.zero.config.ZeroStageEnum                            an integer, 0 to 3
    deepspeed.utils.tensor_fragment.fragment_address                       numel and start, of a rank's part
    deepspeed.checkpoint.universal_checkpoint.SubparamShape                sizes of parameters that lie in one
"""

from __future__ import annotations

from typing import Any, Self


class PickledRecord:
    """What was an object: its attributes, as ``values``."""

    __slots__ = ("values",)

    values: dict[str, Any]

    def __new__(cls) -> Self:
        record = super().__new__(cls)  # pickle calls no __init__
        record.values = {}
        return record

    def __setstate__(self, state: object) -> None:
        self.values = dict(state) if type(state) is dict else {}


class LossScaler(PickledRecord):
    """A static loss scale: ``cur_scale``."""

    __slots__ = ()


class DynamicLossScaler(PickledRecord):
    """A dynamic loss scale: ``cur_scale``, ``cur_iter``, ``last_overflow_iter``, ``cur_hysteresis``, ..."""

    __slots__ = ()


class FragmentAddress(PickledRecord):
    """Where a rank's flat partition holds a part of a parameter: ``start`` and ``numel``, in elements."""

    __slots__ = ()


class SubparamShape(PickledRecord):
    """Sizes of parameters that lie in one tensor: ``shape``, ``partition_dim``."""

    __slots__ = ()


class ZeroStage(int):
    """The ZeRO stage."""


# What torch.serialization.safe_globals takes: an object, and the name under which a file asks for it.
STAND_INS: tuple[tuple[Any, str], ...] = (
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
    (SubparamShape, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
)
