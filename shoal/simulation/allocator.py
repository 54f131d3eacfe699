"""The caching allocator of PyTorch for CUDA, as arithmetic: where each tensor would lie, and what is reserved for it.

    request       rounded up to 512 bytes
    up to 1 MiB   from segments of 2 MiB
    below 10 MiB  from segments of 20 MiB
    larger        from a segment of its own size, rounded up to 2 MiB
    free block    the smallest that fits, of the same stream; what is left of it is split off, where it is worth it
    free          neighbours that are free become one block; segments stay reserved

Where the device has no room for a segment, segments that are free as a whole are given back first.
Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11, with its default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_MIN_BLOCK = 512
_SMALL = 1 << 20  # the largest request that is served from small segments
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_MIN_OWN_SEGMENT = 10 << 20
_ROUND_SEGMENT = 2 << 20


@dataclass(eq=False)
class Block:
    """A part of a segment. Addresses are made up, and grow with each segment."""

    nbytes: int
    address: int
    pool: tuple[object, bool]  # the stream, and True for small requests
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None

    def __lt__(self, other: Block) -> bool:
        return (self.nbytes, self.address) < (other.nbytes, other.address)

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None


@dataclass
class CachingAllocator:
    """The memory of one device.

    Args:
        capacity: bytes that segments may have in all; None: no limit.

    Attributes: ``allocated``, ``reserved``: bytes in blocks in use, and in segments. ``has_failed``: a segment had no
    room; it was made in spite of that, so that what is missing can be told.
    """

    capacity: int | None = None
    allocated: int = 0
    reserved: int = 0
    has_failed: bool = False
    _free: dict[tuple[object, bool], list[Block]] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, nbytes: int, stream: object) -> Block:
        """A block of at least ``nbytes``, more than 0, for what ``stream`` computes."""
        size = max(-(-nbytes // _MIN_BLOCK) * _MIN_BLOCK, _MIN_BLOCK)
        pool = (stream, size <= _SMALL)
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, Block(size, -1, pool))
        block = free.pop(at) if at < len(free) else self._segment(size, pool)
        block.is_free = False
        self._split(block, size)
        self.allocated += block.nbytes
        return block

    def free(self, block: Block) -> None:
        """Give a block back."""
        self.allocated -= block.nbytes
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                block = self._joined(*sorted((block, other), key=lambda each: each.address))
        block.is_free = True
        insort(self._free[block.pool], block)

    def release_cached(self) -> None:
        """Give free segments back to the device, as ``torch.cuda.empty_cache()`` does."""
        for free in self._free.values():
            self.reserved -= sum(block.nbytes for block in free if block.is_segment)
            free[:] = [block for block in free if not block.is_segment]

    def _segment(self, size: int, pool: tuple[object, bool]) -> Block:
        nbytes = _segment_size(size)
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            self.release_cached()
            self.has_failed = self.has_failed or self.reserved + nbytes > self.capacity
        self.reserved += nbytes
        block = Block(nbytes, self._next_address, pool)
        self._next_address += nbytes
        return block

    def _split(self, block: Block, size: int) -> None:
        left = block.nbytes - size
        is_small = block.pool[1]
        if left < _MIN_BLOCK if is_small else left <= _SMALL:
            return
        rest = Block(left, block.address + size, block.pool, is_free=True, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.nbytes, block.after = size, rest
        insort(self._free[block.pool], rest)

    def _joined(self, first: Block, second: Block) -> Block:
        first.nbytes += second.nbytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _remove(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, block)]


def _segment_size(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _MIN_OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
