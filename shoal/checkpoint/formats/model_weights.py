"""The weights of a Hugging Face folder as a model has them: quantised ones in fp32, experts stacked.

Quantised weights; only the blocks that a range needs are read:

    quant_method        values                              scales                               one scale for
    fp8                 W: float8_e4m3fn [..., R, C]        W_scale_inv [..., R / 128, C / 128]  a block, or the tensor
    compressed-tensors  W: float8_e4m3fn [R, C]             W_scale [R, 1], [1], or by block     a row, tensor, block
    mxfp4               W_blocks: uint8 [E, R, C / 32, 16]  W_scales: uint8 [E, R, C / 32]       32 values of a row

A byte of ``W_blocks`` has two values, the first in its lower half. The model's tensor is ``[E, C, R]``: each expert's
matrix transposed.

Checkpoints on the Hub have the experts one by one, also where Transformers 5 stacks them. Flattened, the stacked tensor
is its parts one after the other, so a range of it is read from few of them:

    in the folder                              in the model
    block_sparse_moe.experts.0.w1.weight  [I, D]
    block_sparse_moe.experts.0.w3.weight  [I, D]      mlp.experts.gate_up_proj  [E, 2 I, D]
    block_sparse_moe.experts.1.w1.weight  [I, D]
    ...
    block_sparse_moe.experts.0.w2.weight  [D, I]      mlp.experts.down_proj     [E, D, I]

Source: OCP Microscaling Formats 1.0, sections 5.3.3 (e2m1) and 5.4.1 (e8m0); DeepSeek-V3 (arXiv:2412.19437), 3.3.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.formats.huggingface import SafetensorsWeights, StoredTensor
from shoal.errors import CheckpointError

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign
DEQUANTIZE = (
    "load the model with transformers, call model.dequantize() (or pass a quantization_config with dequantize=True),"
    " save it, and load that folder. If the files hold plain weights, remove quantization_config from config.json."
)
_CHUNK_NUMEL = 1 << 20  # that are converted together


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor of the model, and what the folder has of it.

    Args:
        shape: in the model.
        block: of fp8: rows and columns that have one scale; None: mxfp4.
    """

    shape: tuple[int, ...]
    values: str
    scales: str
    block: tuple[int, int] | None
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class DequantizedWeights:
    """The tensors of a folder, the quantised ones in fp32, under their names without quantisation.

    Raises: CheckpointError: ``config.json`` names a quantisation that Shoal does not read, or scales do not fit.
    Memory: of a range, its elements in fp32; of mxfp4 also the last expert that was read.
    """

    def __init__(self, weights: SafetensorsWeights) -> None:
        self.url = weights.url
        self._weights = weights
        self._expert: tuple[str, int, torch.Tensor] | None = None
        self.tensors: dict[str, StoredTensor | QuantizedTensor] = dict(weights.tensors)
        block_size = _block_size(quantization_of(weights.config()), self.url)
        for name, stored in weights.tensors.items():
            if name.endswith("_blocks") and stored.dtype is torch.uint8:
                self._add_mxfp4(name.removesuffix("_blocks"), stored.shape)
            elif stored.dtype in _FP8:
                scales = next((name + end for end in ("_scale_inv", "_scale") if name + end in weights.tensors), None)
                if scales is not None:
                    self._add_fp8(name, scales, block_size)

    def _add_mxfp4(self, name: str, shape: tuple[int, ...]) -> None:
        values, scales = f"{name}_blocks", f"{name}_scales"
        stored = self._weights.tensors.get(scales)
        if (
            len(shape) != 4
            or shape[-1] != 16
            or stored is None
            or (stored.dtype, stored.shape) != (torch.uint8, shape[:-1])
        ):
            theirs = "missing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            raise _refused(
                f"{values!r} is uint8 {list(shape)}, and {scales!r} is {theirs}; mxfp4 has uint8 [E, R, C / 32, 16] and"
                " uint8 [E, R, C / 32].",
                self.url,
            )
        del self.tensors[values], self.tensors[scales]
        self.tensors[name] = QuantizedTensor((shape[0], 32 * shape[2], shape[1]), values, scales, None)

    def _add_fp8(self, name: str, scales: str, block_size: tuple[int, int] | None) -> None:
        shape, grid = self._weights.tensors[name].shape, self._weights.tensors[scales].shape
        del self.tensors[scales]
        for unused in ("activation_scale", "input_scale"):  # of the matrix product's other factor
            self.tensors.pop(name.removesuffix("weight") + unused, None)
            self.tensors.pop(f"{name}_{unused}", None)
        block = _block(shape, grid, block_size)
        if block is None:
            raise _refused(
                f"{name!r} is {list(shape)}, and its scales {list(grid)}, which blocks of {block_size} do not give.",
                self.url,
            )
        self.tensors[name] = QuantizedTensor(shape, name, scales, block)

    def read_range(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of the flattened tensor, 1-D. Raises: CheckpointError: the file cannot be read."""
        stored = self.tensors[name]
        if not isinstance(stored, QuantizedTensor):
            return self._weights.read_range(name, begin, end)
        if begin == end:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        return self._read_mxfp4(stored, begin, end) if stored.block is None else self._read_fp8(stored, begin, end)

    def _read_fp8(self, stored: QuantizedTensor, begin: int, end: int) -> torch.Tensor:
        assert stored.block is not None
        (height, width), (num_rows, num_columns) = stored.block, stored.shape[-2:]
        first, last = begin // num_columns, -(-end // num_columns)
        rows = torch.arange(first, last, device="cpu")
        in_grid = rows // num_rows * -(-num_rows // height) + rows % num_rows // height  # the row of its scales
        grid_first, grid_width = int(in_grid[0]), -(-num_columns // width)
        scales = self._weights.read_range(stored.scales, grid_first * grid_width, (int(in_grid[-1]) + 1) * grid_width)
        scales = _as_fp32(scales).view(-1, grid_width)
        values = self._weights.read_range(stored.values, first * num_columns, last * num_columns).view(-1, num_columns)
        out = torch.empty(values.shape, dtype=torch.float32, device="cpu")
        step = max(1, _CHUNK_NUMEL // num_columns)
        for at in range(0, len(values), step):
            chunk = slice(at, at + step)
            by_element = scales[in_grid[chunk] - grid_first].repeat_interleave(width, 1)[:, :num_columns]
            torch.mul(values[chunk].float(), by_element, out=out[chunk])
        return out.view(-1)[begin - first * num_columns : end - first * num_columns]

    def _read_mxfp4(self, stored: QuantizedTensor, begin: int, end: int) -> torch.Tensor:
        size = stored.numel // stored.shape[0]
        out = torch.empty(end - begin, dtype=torch.float32, device="cpu")
        for expert in range(begin // size, -(-end // size)):
            at = expert * size
            start, stop = max(begin, at), min(end, at + size)
            out[start - begin : stop - begin] = self._expert_of(stored, expert)[start - at : stop - at]
        return out

    def _expert_of(self, stored: QuantizedTensor, expert: int) -> torch.Tensor:
        """One expert of mxfp4, flattened."""
        if self._expert is not None and self._expert[:2] == (stored.values, expert):
            return self._expert[2]
        _, num_columns, num_rows = stored.shape
        size = num_rows * num_columns
        read = self._weights.read_range
        codes = read(stored.values, expert * size // 2, (expert + 1) * size // 2).view(num_rows, -1)
        scales = _as_fp32(read(stored.scales, expert * size // 32, (expert + 1) * size // 32)).view(num_rows, -1, 1)
        pairs = _pairs()
        out = torch.empty(num_columns, num_rows, dtype=torch.float32, device="cpu")
        step = max(1, _CHUNK_NUMEL // num_columns)
        for at in range(0, num_rows, step):
            chunk = slice(at, at + step)
            values = pairs[codes[chunk].int()].view(-1, num_columns // 32, 32) * scales[chunk]
            out[:, chunk] = values.view(-1, num_columns).t()
        self._expert = stored.values, expert, out.view(-1)
        return self._expert[2]


def quantization_of(config: dict[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of a ``config.json``, or of its text model; empty: there is none."""
    text = config.get("text_config")
    section = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    return section if isinstance(section, dict) else {}


def _block_size(section: dict[str, Any], url: str) -> tuple[int, int] | None:
    """The block that one scale is of, where the config says it.

    Raises: CheckpointError: the quantisation is none that is read here.
    """
    if not section:
        return None
    method, kind = section.get("quant_method"), section.get("format")
    if method == "compressed-tensors":
        method = f"compressed-tensors, format {kind}"
    if method not in ("fp8", "mxfp4", "compressed-tensors, format float-quantized"):
        raise _refused(
            f"the weights are quantised as {method}; Shoal reads fp8 (with scales of blocks or of a tensor), mxfp4, and"
            " compressed-tensors of format float-quantized.",
            url,
        )
    size = section.get("weight_block_size")
    if isinstance(size, list) and len(size) == 2 and all(isinstance(each, int) and each > 0 for each in size):
        return size[0], size[1]
    return None


def _block(shape: tuple[int, ...], grid: tuple[int, ...], block_size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns that have one scale; None: the scales do not fit."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    num_rows, num_columns = shape[-2:]
    if math.prod(grid) == 1 and len(shape) == 2:
        return num_rows, num_columns
    if len(grid) != len(shape) or grid[:-2] != shape[:-2]:
        return None
    if block_size is not None and grid[-2:] == tuple(
        -(-size // block) for size, block in zip(shape[-2:], block_size, strict=True)
    ):
        return block_size
    if not all(grid[-2:]) or num_rows % grid[-2] or num_columns % grid[-1]:
        return None
    return num_rows // grid[-2], num_columns // grid[-1]


def _as_fp32(scales: torch.Tensor) -> torch.Tensor:
    """Scales of any dtype; bytes are exponents (e8m0)."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales).float()


def _pairs() -> torch.Tensor:
    """[256, 2]: by byte, its two values of e2m1."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device="cpu")
    codes = torch.arange(256, device="cpu")
    return torch.stack([values[codes & 15], values[codes >> 4]], dim=1)


def _refused(what: str, url: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=url,
        do=DEQUANTIZE,
        code="checkpoint-quantized",
    )


_PART = re.compile(r"(?P<prefix>(?:.+\.)?experts)\.(?P<expert>\d+)\.(?P<weight>\w+)\.weight")
# The stacked parameter, and the weights of one expert that it is made of, as two families name them.
_STACKS = (
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("up_proj", ("up_proj",)),
    ("down_proj", ("down_proj",)),
    ("down_proj", ("w2",)),
)
_RENAMED = (".block_sparse_moe.", ".mlp.")  # of Mixtral and MiniMax, in the Hub's checkpoints and in Transformers 5


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor that the folder has in parts of equal size, one after the other."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class ExpertWeights:
    """The weights of a folder, by the names of a model.

    Args:
        names: of the model's parameters, with or without a prefix.
        rename: gives a name in the folder as the model's library reads it.
    """

    def __init__(self, weights: DequantizedWeights, names: Collection[str], rename: Callable[[str], str] = str) -> None:
        self.url = weights.url
        self._weights = weights
        old, new = _RENAMED
        is_renamed = not any(old in name for name in names)
        self._names = {rename(name.replace(old, new) if is_renamed else name): name for name in weights.tensors}
        self.tensors: dict[str, StoredTensor | QuantizedTensor | JoinedTensor] = {
            name: weights.tensors[stored] for name, stored in self._names.items()
        }
        self._join({name.rpartition("experts.")[2] for name in names if "experts." in name})

    def _join(self, wanted: Collection[str]) -> None:
        """Put stacked tensors, of those that the model has, in the place of their parts."""
        counts: dict[str, int] = {}
        for name in self._names:
            if match := _PART.fullmatch(name):
                counts[match["prefix"]] = max(counts.get(match["prefix"], 0), int(match["expert"]) + 1)
        for prefix, num_experts in counts.items():
            for stack, weights in _STACKS:
                parts = tuple(f"{prefix}.{e}.{weight}.weight" for e in range(num_experts) for weight in weights)
                shapes = {self.tensors[part].shape if part in self.tensors else () for part in parts}
                if stack in wanted and len(shapes) == 1 and len(shape := shapes.pop()) == 2:
                    dtype = min((self.tensors[part].dtype for part in parts), key=lambda dtype: dtype.itemsize)
                    for part in parts:
                        del self.tensors[part]
                    shape = (num_experts, len(weights) * shape[0], shape[1])
                    self.tensors[f"{prefix}.{stack}"] = JoinedTensor(shape, parts, dtype)

    def stored_names(self, name: str) -> list[str]:
        """What the folder has of a tensor."""
        stored = self.tensors[name]
        return [self._names[part] for part in (stored.parts if isinstance(stored, JoinedTensor) else (name,))]

    def read(self, name: str) -> torch.Tensor:
        """One tensor, whole."""
        stored = self.tensors[name]
        return self.read_range(name, 0, stored.numel).view(stored.shape)

    def read_range(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of the flattened tensor, 1-D. Only their bytes are read."""
        stored = self.tensors[name]
        if not isinstance(stored, JoinedTensor):
            return self._weights.read_range(self._names[name], begin, end)
        size = max(stored.numel // len(stored.parts), 1)
        first = min(begin // size, len(stored.parts) - 1)
        pieces = [
            self._weights.read_range(self._names[part], max(begin - at, 0), min(end - at, size))
            for at, part in zip(range(0, stored.numel, size), stored.parts, strict=False)
            if first * size <= at < max(end, first * size + 1)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
