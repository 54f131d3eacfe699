"""Do rectangles hold every element of a tensor exactly once? In time that grows with their number, whoever chose them.

A rectangle is known by its corners: +1 at its start, -1 just past its end, and so on with alternating signs over the
2^dims of them. Summed up along every dim they give the rectangle back, so parts add up to the whole tensor exactly
where their corners add up to the whole's.

    +---+-----+        the corners at (0, 2) are + and -, those at (3, 2) too: they cancel,
    |   |     |        and what remains are the four of the whole
    +---+-----+
"""

from __future__ import annotations

import math
from itertools import product

from shoal.checkpoint.rectangles import Rectangle

_FEW_DIMS = 5  # in which parts may be cut, however many they are
_MAX_CORNERS = 1 << 18  # of a tensor that is cut in more dims


def cover_problem(shape: tuple[int, ...], parts: list[Rectangle]) -> str | None:
    """What is wrong, in words, if ``parts`` do not hold every element of a tensor exactly once; else None."""
    for part in parts:
        if len(part.start) != len(shape) or len(part.shape) != len(shape):
            return f"a part has {len(part.shape)} dims, the tensor {len(shape)}"
        bounds = zip(part.start, part.shape, shape, strict=True)
        if any(low < 0 or size < 1 or low + size > full for low, size, full in bounds):
            return f"the part at {list(part.start)} of shape {list(part.shape)} is not inside {list(shape)}"
    held, numel = sum(part.numel for part in parts), math.prod(shape)
    if held != numel:
        return f"{held} of {numel} elements are there"
    dims = [dim for dim, full in enumerate(shape) if any(part.shape[dim] != full for part in parts)]
    if len(dims) > _FEW_DIMS and len(parts) << len(dims) > _MAX_CORNERS:
        return f"it is cut in {len(dims)} dims into {len(parts)} parts"
    signs = [math.prod(choice) for choice in product((1, -1), repeat=len(dims))]
    corners: dict[tuple[int, ...], int] = {}
    for part, factor in (*((part, 1) for part in parts), (Rectangle((0,) * len(shape), shape), -1)):
        sides = [(part.start[dim], part.start[dim] + part.shape[dim]) for dim in dims]
        for corner, sign in zip(product(*sides), signs, strict=True):
            corners[corner] = corners.get(corner, 0) + sign * factor
    return "parts of it overlap" if dims and any(corners.values()) else None
