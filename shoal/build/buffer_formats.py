"""Which format each floating-point buffer of a model has, where its parameters are 16-bit.

    buffer                                                                   format
    named by the model (transformers' _keep_in_fp32_modules_strict, and      fp32
    under fp16 _keep_in_fp32_modules too), or by a list in their place
    any, where data_types.buffer_dtype is set                                that
    statistics of a batch or instance norm                                   the parameters': torch's kernels want one
    any other                                                                its own

A buffer's rounding is not made up for by master weights: rotary frequencies, or the routing biases of a mixture, are
other numbers in bf16. ``*`` in a name is any text, and a name fits anywhere in a buffer's full name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NARROW = (torch.float16, torch.bfloat16)


def buffer_formats(
    model: nn.Module,
    parameter: torch.dtype | None,
    buffer: torch.dtype | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, torch.dtype]:
    """The format of each buffer that is to be cast, by its full name.

    Args:
        parameter: what parameters are cast to; None: nothing.
        buffer: what buffers are to be cast to; None: nothing.
        names: of buffers that stay in fp32, in place of those that the modules name; None: theirs.
    """
    wide = _wide(model, parameter, names)
    found: dict[str, torch.dtype] = {}
    for module, full, value in _floating(model):
        if any(full.startswith(prefix) and name.search(full.removeprefix(prefix)) for prefix, name in wide):
            if value.dtype in _NARROW:
                found[full] = torch.float32
        elif buffer is not None:
            found[full] = buffer
        elif parameter is not None and isinstance(module, _NormBase):
            found[full] = parameter
    return found


def widen(model: nn.Module, parameter: torch.dtype | None, names: Sequence[str] | None = None) -> None:
    """Turn buffers that stay in fp32, and are in a 16-bit format, into fp32, in place. Arguments as above."""
    wide = _wide(model, parameter, names)
    for _, full, value in _floating(model):
        fits = (full.startswith(prefix) and name.search(full.removeprefix(prefix)) for prefix, name in wide)
        if value.dtype in _NARROW and any(fits):
            value.data = value.data.float()


def _floating(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, value in module._buffers.items():
            if value is not None and value.is_floating_point():
                yield module, f"{prefix}.{key}" if prefix else key, value


def _wide(
    model: nn.Module, parameter: torch.dtype | None, names: Sequence[str] | None
) -> list[tuple[str, re.Pattern[str]]]:
    """Names of buffers that stay in fp32, each with the prefix below which it counts."""
    if parameter not in _NARROW:
        return []
    if names is not None:
        return [("", _pattern(name)) for name in names]
    return [
        (f"{prefix}." if prefix else "", _pattern(name))
        for prefix, module in model.named_modules()
        for name in _named_by(module, parameter)
    ]


def _named_by(module: nn.Module, parameter: torch.dtype | None) -> Iterator[str]:
    yield from getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    if parameter == torch.float16:
        yield from getattr(module, "_keep_in_fp32_modules", None) or ()


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, name.split("*"))))
