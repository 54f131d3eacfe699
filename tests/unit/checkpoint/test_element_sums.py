"""The checksum of a global tensor: the same for every division of it, another one for every change."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from shoal.checkpoint.element_sums import NOTHING, added, element_sums
from shoal.checkpoint.rectangles import Rectangle, rectangles


def slowly(tensor: torch.Tensor) -> tuple[int, int]:
    """The definition, element by element."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.reshape(-1).view(size).tolist()
    return sum(bits) % 2**32, sum(index * each for index, each in enumerate(bits)) % 2**32


def whole(tensor: torch.Tensor) -> tuple[int, int]:
    shape = tuple(tensor.shape)
    return element_sums(tensor.reshape(-1), Rectangle((0,) * len(shape), shape), shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (5000,), (7, 3), (3, 1, 4), (2, 5, 3, 4), (600, 700)])
def test_it_is_the_sum_of_the_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    assert whole(tensor) == slowly(tensor)


@pytest.mark.parametrize("shape", [(37,), (12, 10), (6, 4, 5), (4, 3, 2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_parts_of_any_division_add_up_to_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator, choose = torch.Generator().manual_seed(1), random.Random(1)
    tensor = torch.randn(shape, generator=generator, dtype=dtype)
    numel = tensor.numel()
    for _ in range(10):  # ranges of the flattened tensor, as ranks have them
        cuts = sorted({0, numel, *(choose.randrange(numel) for _ in range(3))})
        sums = NOTHING
        for begin, end in itertools.pairwise(cuts):
            for part in rectangles(shape, begin, end):
                sums = added(sums, element_sums(tensor[part.slices()].reshape(-1).contiguous(), part, shape))
        assert sums == whole(tensor)
    for dim, size in enumerate(shape):  # columns, as tensor-parallel ranks have them
        cut = choose.randrange(1, size)
        sums = NOTHING
        for low, high in ((0, cut), (cut, size)):
            start = tuple(low if each == dim else 0 for each in range(len(shape)))
            part = Rectangle(start, tuple(high - low if each == dim else n for each, n in enumerate(shape)))
            sums = added(sums, element_sums(tensor[part.slices()].reshape(-1).contiguous(), part, shape))
        assert sums == whole(tensor)


def test_a_changed_bit_and_two_elements_that_changed_places_are_seen() -> None:
    tensor = torch.randn(33, 17, generator=torch.Generator().manual_seed(2))
    for index in range(0, tensor.numel(), 11):
        changed = tensor.clone()
        changed.view(-1).view(torch.int32)[index] ^= 1 << (index % 31)
        assert whole(changed) != whole(tensor)
        swapped = tensor.clone().view(-1)
        swapped[[index, (index + 5) % tensor.numel()]] = swapped[[(index + 5) % tensor.numel(), index]]
        assert whole(swapped.view_as(tensor)) != whole(tensor)
    assert whole(tensor.t().contiguous()) != whole(tensor)
