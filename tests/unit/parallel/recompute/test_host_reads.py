"""What the host reads in a recomputed function is read once, also by functions inside of each other."""

from __future__ import annotations

import pytest
import torch

from shoal.parallel.host_reads import read_once
from shoal.parallel.segment import Recompute


class Reader:
    """Adds what it reads, another number each time."""

    def __init__(self) -> None:
        self.num_reads = 0

    def read(self) -> int:
        self.num_reads += 1
        return self.num_reads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x * read_once(self.read)).sin() + (x * read_once(self.read)).sin()


def expected(x: torch.Tensor, first: int = 1) -> torch.Tensor:
    return (first * (first * x).cos() + (first + 1) * ((first + 1) * x).cos()).detach()


def test_outside_of_a_recomputed_function_each_call_reads() -> None:
    reader = Reader()
    reader(torch.ones(1))
    assert reader.num_reads == 2


def test_a_recomputation_has_the_values_of_its_own_forward_each_time() -> None:
    reader, recompute = Reader(), Recompute()
    x, y = (torch.rand(3, requires_grad=True) for _ in range(2))
    of_x, of_y = recompute.checkpoint(reader, x).sum(), recompute.checkpoint(reader, y).sum()
    of_y.backward()
    of_x.backward(retain_graph=True)
    of_x.backward()
    assert reader.num_reads == 4
    torch.testing.assert_close(x.grad, 2 * expected(x))
    torch.testing.assert_close(y.grad, expected(y, 3))


@pytest.mark.parametrize("reads_around", [False, True])
def test_a_function_inside_another_has_what_the_outer_one_kept(reads_around: bool) -> None:
    reader, recompute = Reader(), Recompute()
    x = torch.rand(3, requires_grad=True)

    def outer(x: torch.Tensor) -> torch.Tensor:
        first = recompute.checkpoint(reader, x)
        number = read_once(reader.read) if reads_around else 0
        return first + number * recompute.checkpoint(reader, x)

    recompute.checkpoint(outer, x).sum().backward()
    assert reader.num_reads == 4 + reads_around
    torch.testing.assert_close(x.grad, expected(x) + (3 * expected(x, 4) if reads_around else 0))
