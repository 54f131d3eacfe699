"""Optimizer state in one byte for each element and two for each block of 256, as in 8-bit Adam (arXiv:2110.02861).

    name    a moment, of either sign                   a mean of squares
    int8    root = 127 steps, with its sign            root = 255 steps
    fp8     e4m3                                       root = e4m3

``value = scale * decoded byte``. Squares spread over many orders of magnitude, and an update divides by their root: so
the root is what is rounded, and what is not zero does not become zero, in whose place eps would divide.

A block does not cross parameters, and begins at a multiple of its size in its parameter. So a range is cut between
parameters without loss, and layouts differ only in blocks that the edge of a shard cuts.

Encoding what was decoded gives the same bytes: a decoded byte has at most 16 bits and a scale 8, so products are exact,
and the largest value of a block has the largest byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.comm.formats import Float8
from shoal.device import numel_at_once
from shoal.sharding.layout import Segment

BLOCK = 256  # elements that share a scale
_CHUNK = 1 << 15  # elements that are encoded at once on a CPU
_SCALE = torch.bfloat16
_LEAST = 1e-30  # a block with a smaller scale is zero
_SQUARES = frozenset(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf"))


@dataclass(frozen=True)
class Code:
    """Numbers as bytes.

    Args:
        largest: that can be written.
        encode: fp32 of magnitudes up to ``largest``, and a little more -> uint8.
        decode: uint8 -> fp32.
    """

    largest: float
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


def _to_signed_root(values: torch.Tensor) -> torch.Tensor:
    roots = values.abs().sqrt_().clamp_min_(_LEAST)
    return torch.div(values, roots, out=roots).round_().to(torch.int8).view(torch.uint8)


def _of_signed_root(codes: torch.Tensor) -> torch.Tensor:
    roots = codes.view(torch.int8).float()
    return roots.abs().mul_(roots)


def _to_root(values: torch.Tensor) -> torch.Tensor:
    return values.sqrt().round_().clamp_min_(1.0).to(torch.uint8)


def _of_root(codes: torch.Tensor) -> torch.Tensor:
    return codes.float().square_()


def _to_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def _of_e4m3(codes: torch.Tensor) -> torch.Tensor:
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    Float8().dequantize(codes, codes.new_ones(len(codes), dtype=torch.float32), values)
    return values


def _to_root_e4m3(values: torch.Tensor) -> torch.Tensor:
    return _to_e4m3(values.sqrt()).clamp_min_(1)


def _of_root_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return _of_e4m3(codes).square_()


@dataclass(frozen=True)
class StateFormat:
    """How optimizer state is written. Args: codes of moments, and of means of squares."""

    name: str
    moments: Code
    squares: Code

    def of(self, key: str) -> Code:
        """The code of a state, by its name in the optimizer."""
        return self.squares if key in _SQUARES else self.moments


STATE_FORMATS: dict[str, StateFormat] = {
    "int8": StateFormat("int8", Code(127.0**2, _to_signed_root, _of_signed_root), Code(255.0**2, _to_root, _of_root)),
    "fp8": StateFormat("fp8", Code(448.0, _to_e4m3, _of_e4m3), Code(448.0**2, _to_root_e4m3, _of_root_e4m3)),
}


@dataclass(frozen=True)
class RangeBlocks:
    """Elements ``start`` to ``stop`` of a range, in blocks of ``width``; ``first``: the number of the first block."""

    start: int
    stop: int
    width: int
    first: int

    @property
    def number(self) -> int:
        return (self.stop - self.start) // self.width

    def chunks(self, numel: int) -> Iterator[RangeBlocks]:
        """The same as parts of at most ``numel`` elements, or of one block."""
        step = max(numel // self.width, 1) * self.width
        for start in range(self.start, self.stop, step):
            first = self.first + (start - self.start) // self.width
            yield RangeBlocks(start, min(start + step, self.stop), self.width, first)


def blocks_of(segments: Iterable[Segment]) -> tuple[RangeBlocks, ...]:
    """The blocks of a range: whole ones, and a shorter one where a parameter, or its part, begins or ends."""
    found: list[RangeBlocks] = []
    for segment in segments:
        begin = min(segment.start + -segment.offset % BLOCK, segment.stop)
        end = begin + (segment.stop - begin) // BLOCK * BLOCK
        for start, stop, width in ((segment.start, begin, 0), (begin, end, BLOCK), (end, segment.stop, 0)):
            last = found[-1] if found else RangeBlocks(0, 0, BLOCK, 0)
            if width and last.width == width and last.stop == start:  # encoded together with those before
                found[len(found) - 1 :] = [RangeBlocks(last.start, stop, width, last.first)]
            elif start < stop:
                found.append(RangeBlocks(start, stop, width or stop - start, last.first + last.number))
    return tuple(found)


def encoded_nbytes(numel: int, segments: Iterable[Segment]) -> int:
    """Bytes of one state of a range of ``numel`` elements."""
    return _scales_at(numel) + sum(blocks.number for blocks in blocks_of(segments)) * _SCALE.itemsize


def _scales_at(numel: int) -> int:
    """Where the scales begin, after the codes."""
    return -(-numel // _SCALE.itemsize) * _SCALE.itemsize


@dataclass(eq=False)
class EncodedState:
    """One state of a range: a code for each element, then a scale for each block.

    Args:
        memory: uint8. Shape: [``nbytes``].
    """

    code: Code
    blocks: tuple[RangeBlocks, ...]
    num_elements: int
    memory: torch.Tensor

    @classmethod
    def of(cls, code: Code, values: torch.Tensor, segments: Iterable[Segment]) -> EncodedState:
        """Encode the values of a range. What lies between its parameters becomes zero. ``values``: [numel]."""
        blocks, numel = blocks_of(segments), values.numel()
        scales_at = _scales_at(numel)
        nbytes = scales_at + sum(each.number for each in blocks) * _SCALE.itemsize
        encoded = cls(code, blocks, numel, torch.zeros(nbytes, dtype=torch.uint8, device=values.device))
        for codes, scales, part in encoded._parts(values):
            part = part.float()
            scale = (part.abs().amax(dim=1) / code.largest).to(_SCALE).float()
            scale = torch.where(scale.isfinite(), torch.where(scale < _LEAST, 0.0, scale), torch.nan)
            scales.copy_(scale)
            factor = torch.where(scale > 0.0, scale.reciprocal(), 0.0)
            codes.copy_(code.encode(part * factor[:, None]))
        return encoded

    def decode(self) -> torch.Tensor:
        """The values, fp32. Shape: [numel]."""
        values = torch.zeros(self.num_elements, dtype=torch.float32, device=self.memory.device)
        for codes, scales, part in self._parts(values):
            torch.mul(self.code.decode(codes), scales.float()[:, None], out=part)
        return values

    def numel(self) -> int:
        return self.num_elements

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def _parts(self, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The blocks in chunks: their codes, scales and values. Shapes: [blocks, width], [blocks], [blocks, width]."""
        scales = self.memory[_scales_at(self.num_elements) :].view(_SCALE)
        for all_blocks in self.blocks:
            for each in all_blocks.chunks(numel_at_once(values, _CHUNK)):
                codes, part = (flat[each.start : each.stop].view(-1, each.width) for flat in (self.memory, values))
                yield codes, scales[each.first : each.first + each.number], part


def encoded(
    state: Mapping[str, Any], form: StateFormat | None, segments: Iterable[Segment], numel: int
) -> dict[str, Any]:
    """State of a range in a format; None: as it is."""
    return {
        key: EncodedState.of(form.of(key), value, segments)
        if form is not None and is_elementwise(value, numel) and value.is_floating_point()
        else value
        for key, value in state.items()
    }


def decoded(state: Mapping[str, Any]) -> dict[str, Any]:
    """State of a range, in fp32 where it is encoded."""
    return {key: value.decode() if isinstance(value, EncodedState) else value for key, value in state.items()}


def is_elementwise(value: Any, numel: int) -> bool:
    """True if an entry of the optimizer state of a range has one element for each of the range's ``numel``."""
    if isinstance(value, EncodedState):
        return value.numel() == numel
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel
