"""Nested state (a schedule's, the client's) as JSON, with its tensors stored separately. It holds no code.

{"lr": 0.1, "betas": (0.9, 0.99), "best": tensor}
-> {"lr": 0.1, "betas": {"__is__": "tuple", "items": [0.9, 0.99]}, "best": {"__is__": "tensor", "name": "best"}}
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shoal.errors import CheckpointError

_MARK = "__is__"
_MAX_DEPTH = 100
_SEQUENCES: dict[str, type[tuple[Any, ...]] | type[set[Any]] | type[frozenset[Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def encode(value: Any, tensors: dict[str, torch.Tensor] | None, path: str, *, what: str = "client_state") -> Any:
    """Convert ``value`` to JSON types; its tensors are put into ``tensors`` under their path.

    Args:
        tensors: None: tensors of one element are written as their number, and no others are taken.

    Raises: CheckpointError: a value that is neither, with its path.
    """
    if path.count("/") > _MAX_DEPTH:
        raise CheckpointError(f"{what} is nested deeper than {_MAX_DEPTH}.", where=path[:200], code="checkpoint-state")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_MARK: "float", "value": str(float(value))}
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, path, what=what)
    if isinstance(value, np.ndarray) and tensors is not None:
        try:
            copied = torch.from_numpy(np.array(value, order="C"))
        except TypeError:
            raise _refused(value, f" of {value.dtype}", path, what) from None
        return {_MARK: "array", "name": _put(copied, tensors, path)}
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        number = encode(value.item(), tensors, path, what=what)
        return {_MARK: "scalar", "dtype": name_of(value.dtype), "value": number}
    if isinstance(value, torch.Tensor) and tensors is None and value.numel() == 1:
        return {**encode(value.reshape(()), None, path, what=what), "shape": list(value.shape)}
    if isinstance(value, torch.Tensor) and tensors is not None:
        if value.layout is not torch.strided:
            raise _refused(value, f" of layout {value.layout}", path, what)
        return {_MARK: "tensor", "name": _put(value.detach(), tensors, path)}
    if isinstance(value, torch.dtype):
        return {_MARK: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_MARK: "device", "value": str(value)}
    if isinstance(value, Path):
        return {_MARK: "path", "value": str(value)}
    if isinstance(value, Namespace | SimpleNamespace):
        mark = "namespace" if isinstance(value, Namespace) else "simple namespace"
        return {_MARK: mark, "values": encode(vars(value), tensors, path, what=what)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(item, tensors, f"{path}/{key}", what=what) for key, item in value.items()}
        pairs = [
            [
                encode(key, tensors, f"{path}/key {index}", what=what),
                encode(item, tensors, f"{path}/{key}", what=what),
            ]
            for index, (key, item) in enumerate(value.items())
        ]
        return {_MARK: "map", "items": pairs}
    if isinstance(value, tuple | list | set | frozenset):
        items = [encode(item, tensors, f"{path}/{index}", what=what) for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        mark = next(name for name, kind in _SEQUENCES.items() if isinstance(value, kind))
        return {_MARK: mark, "items": items}
    raise _refused(value, "", path, what)


def _put(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], path: str) -> str:
    """Store a tensor. Returns: a unique name; two paths may be equal ({"a": {"b": ...}, "a/b": ...})."""
    name, number = path, 1
    while name in tensors:
        name, number = f"{path}~{number}", number + 1
    tensors[name] = tensor
    return name


def _refused(value: Any, more: str, path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} holds a {type(value).__module__}.{type(value).__qualname__}{more}, which a checkpoint cannot store.",
        where=path,
        do="keep numbers, text, lists, dicts, tensors and argparse.Namespace; of an object, its state_dict().",
        code="checkpoint-state",
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of ``encode``. ``tensor`` finds a tensor by its name.

    Raises: CheckpointError: a mark that this version does not know.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    mark = value.get(_MARK)
    if mark is None:
        return {key: decode(item, tensor) for key, item in value.items()}
    if mark == "tensor":
        return tensor(value["name"])
    if mark == "array":
        return tensor(value["name"]).numpy()
    if mark == "scalar":
        number = torch.tensor(decode(value["value"], tensor), dtype=dtype_of(value["dtype"]), device="cpu")
        return number.reshape(value.get("shape", ()))
    if mark == "float":
        return float(value["value"])
    if mark == "dtype":
        return dtype_of(value["value"])
    if mark == "device":
        return torch.device(value["value"])
    if mark == "path":
        return Path(value["value"])
    if mark in ("namespace", "simple namespace"):
        values = decode(value["values"], tensor)
        return Namespace(**values) if mark == "namespace" else SimpleNamespace(**values)
    if mark == "map":
        return {decode(key, tensor): decode(item, tensor) for key, item in value["items"]}
    kind = _SEQUENCES.get(mark) if isinstance(mark, str) else None
    if kind is None:
        raise CheckpointError(f"unknown mark {mark!r} in a checkpoint's state.", code="checkpoint-damaged")
    return kind(decode(item, tensor) for item in value["items"])


SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*SAFETENSORS_DTYPES.values(), torch.complex128)}


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``. Raises: CheckpointError: no dtype that a checkpoint holds."""
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is none of {', '.join(sorted(DTYPES))}.", code="checkpoint-damaged")
    return DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")
