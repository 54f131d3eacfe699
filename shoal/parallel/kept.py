"""One saved input of a recomputed segment, where it rests until the backward pass, and how it comes back.

A ``Place`` says where: left where it is (``InPlace``), in host memory (``on_host``), or in parts on an axis's ranks
(``in_parts``). Whatever the place, what comes back has the same values, shape, strides and device, so that the
recomputation takes the same kernels and gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.errors import UsageError
from shoal.sharding.placement import Tier


class Kept(Protocol):
    """A saved input. ``nbytes`` is what this rank holds of it, on ``tier``."""

    tier: Tier
    nbytes: int

    @property
    def resting(self) -> Kept:
        """What lies at the innermost place: this, or the part of it that is this rank's."""
        ...


@dataclass(eq=False)
class Segment:
    """One call of a recomputed function: its saved inputs, in order."""

    number: int
    kept: list[Kept]


class Place(Protocol):
    """Where saved inputs rest. Called by one thread at a time; tensors carry no gradient."""

    def begin(self) -> Segment:
        """A segment's forward begins."""
        ...

    def keep(self, tensor: torch.Tensor, segment: Segment) -> Kept:
        """Take over a saved input of this segment."""
        ...

    def bring(self, kept: Kept, segment: Segment) -> torch.Tensor:
        """The saved input, for this segment's recomputation. May be asked for again."""
        ...

    def reset(self) -> None:
        """Give back what was brought ahead of its use, and what is on its way."""
        ...


@dataclass(frozen=True)
class Form:
    """A tensor's shape in memory. An expanded tensor is its distinct elements: ``compact_size``.

    >>> form = Form.of(torch.zeros(3, 1).expand(3, 4))
    >>> form.compact_size, form.nbytes
    ((3, 1), 12)
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def compact_size(self) -> tuple[int, ...]:
        return tuple(1 if stride == 0 else size for size, stride in zip(self.size, self.stride, strict=True))

    @property
    def numel(self) -> int:
        """Distinct elements."""
        count = 0 if 0 in self.size else 1
        for size in self.compact_size:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def can_move(self) -> bool:
        """Has each element a place of its own, so that a copy can have the same strides?"""
        span = 1
        for stride, size in sorted((t, s) for t, s in zip(self.stride, self.size, strict=True) if t and s > 1):
            if stride < span:
                return False
            span = stride * (size - 1) + span
        return self.numel > 0

    def compact(self, tensor: torch.Tensor) -> torch.Tensor:
        """The distinct elements of a tensor of this form: a view, of ``compact_size``."""
        for dim, (stride, size) in enumerate(zip(self.stride, self.size, strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor

    def empty(self) -> torch.Tensor:
        """Memory for the distinct elements, with this form's strides. Shape: ``compact_size``."""
        return torch.empty_strided(self.compact_size, self.stride, dtype=self.dtype, device=self.device)

    def expand(self, compact: torch.Tensor) -> torch.Tensor:
        """A tensor of this form from what ``empty`` made."""
        return compact.as_strided(self.size, self.stride)


class KeptInPlace:
    """The tensor itself.

    Args:
        tier: what it is counted as.
    """

    def __init__(self, tensor: torch.Tensor, tier: Tier) -> None:
        self.tier = tier
        self.nbytes = Form.of(tensor).nbytes if is_plain(tensor) else tensor.numel() * tensor.element_size()
        self._tensor = tensor
        self._version = version_of(tensor)

    @property
    def resting(self) -> Kept:
        return self

    def get(self) -> torch.Tensor:
        """Raises: UsageError: it was changed in place since."""
        if version_of(self._tensor) != self._version:
            raise input_changed(self._tensor)
        return self._tensor


class InPlace:
    """Leaves saved inputs where they are.

    Args:
        tier: what they are counted as.
    """

    def __init__(self, tier: Tier = Tier.DEVICE) -> None:
        self._tier = tier
        self._number = 0

    def begin(self) -> Segment:
        self._number += 1
        return Segment(self._number, [])

    def keep(self, tensor: torch.Tensor, segment: Segment) -> Kept:
        return KeptInPlace(tensor, self._tier)

    def bring(self, kept: Kept, segment: Segment) -> torch.Tensor:
        assert isinstance(kept, KeptInPlace)
        return kept.get()

    def reset(self) -> None:
        return None


def input_changed(tensor: torch.Tensor) -> UsageError:
    """A saved input is not what it was."""
    return UsageError(
        f"an input of a recomputed segment was changed in place after the segment ran ({tensor.dtype}, "
        f"shape {tuple(tensor.shape)}). The recomputation would not give what the forward pass gave.",
        do="write x = x + y instead of x += y for an input of a recomputed segment, or hand x.clone() to it.",
        code="recompute-input-changed",
    )


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place; what was made in inference mode does not count it."""
    return -1 if tensor.is_inference() else tensor._version


def is_plain(tensor: torch.Tensor) -> bool:
    """Is this strided memory and nothing else? (No DTensor, no sparse tensor, no nested one.)"""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
