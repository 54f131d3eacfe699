"""A unit's parameters of one dtype in one flat tensor, of which each parameter is a view.

At rest a sharded bucket holds this rank's range only. Gathering fills ``full`` in place; releasing empties its storage
but keeps every tensor object alive, so a view that autograd saved is valid again after the next gather. Reading a view
of an emptied storage would crash the process, so at rest a parameter's data is a stand-in: one NaN expanded to the true
shape (4 bytes, reads as NaN, refuses writes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.memory.layout import BucketLayout
from shoal.memory.shelf import Place, Shelf


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a parameter shows at rest: its true shape and dtype, one element of memory."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


class ParameterBucket:
    """The parameters of one unit that share a dtype.

    Args:
        layout: where each parameter lies; one slot per entry of ``parameters``.
        comm: the axis that shards. Its size is ``layout.num_shards`` where ``is_sharded``.
        is_sharded: at rest each rank holds its range (stage 3), not the whole (stages 0 to 2).
        is_state_sharded: this rank's optimizer owns its range (``begin`` to ``end``), not the whole (stage 0).
        secondary: the inner axis of a second sharding that the backward pass gathers from (ZeRO++ hpZ,
            arXiv:2306.10209), or None.
        host: makes the shard's memory where it rests apart from the device; None: on the device.
        shelf: where the shard rests on a disk; ``shard`` is then a stand-in, but inside ``shard_at_hand()`` and, until
            ``store_shard()`` is called for the first time, after construction.
    """

    def __init__(
        self,
        label: str,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        comm: Communicator,
        parameters: Sequence[torch.nn.Parameter],
        *,
        is_sharded: bool,
        is_state_sharded: bool = True,
        secondary: Communicator | None = None,
        host: Callable[[int, torch.dtype], torch.Tensor] | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self.label = label
        self.layout = layout
        self.dtype = dtype
        self.comm = comm
        self.parameters = list(parameters)
        self.is_sharded = is_sharded
        self.is_full = True
        self._secondary_comm = secondary
        self._secondary: torch.Tensor | None = None
        begin, end = layout.owned(comm.rank) if is_state_sharded else (0, layout.numel)
        self.begin, self.end = begin, end
        self.full = (
            torch.empty(layout.numel, dtype=dtype, device=device)
            if is_sharded
            else comm.empty(layout.numel, dtype, device)
        )
        self.full.zero_()
        self._storage = self.full.untyped_storage()
        self._full_nbytes = layout.numel * self.full.element_size()
        self.views = [self.full[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in layout.slots]
        self.stand_ins = [stand_in(slot.shape, dtype, device) for slot in layout.slots] if is_sharded else []
        self._shelf = shelf if is_sharded else None
        self._place: Place | None = None  # of the shard, on the shelf
        self._is_changed = False  # since it was taken from the shelf
        self.is_moved = False  # for a while, by ``move_to_host``
        self.is_shard_apart = is_sharded and (host is not None or shelf is not None)
        if not is_sharded:
            self.shard = self.full[begin:end]
        elif shelf is not None:
            self._place = shelf.make(label, self.nbytes_of_shard)
            self._place.num_holders = 1
            self.shard = self._shelved()
        else:
            self.shard = host(end - begin, dtype) if host is not None else comm.empty(end - begin, dtype, device)

    @property
    def nbytes_of_shard(self) -> int:
        return (self.end - self.begin) * self.full.element_size()

    @property
    def nbytes_at_rest(self) -> int:
        """Bytes of parameters held between steps, on whatever tier."""
        held = self.shard if self.is_sharded else self.full
        return held.numel() * held.element_size()

    @property
    def is_on_disk(self) -> bool:
        """Does the shard rest on a disk?"""
        return self._place is not None

    @property
    def nbytes_secondary(self) -> int:
        return 0 if self._secondary is None else self._secondary.numel() * self._secondary.element_size()

    def adopt(self) -> None:
        """Make the parameters views of ``full``."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def gather(self, *, from_secondary: bool = False) -> Work:
        """Shard -> Replicate. The parameters may be read after ``Work.wait()`` and ``adopt()``.

        Communicates: one all_gather on the axis that shards (on the inner one, ``from_secondary``).
        Memory: the whole bucket on the device until ``release()``.
        """
        self._storage.resize_(self._full_nbytes)
        self.is_full = True
        if from_secondary and self._secondary_comm is not None and self._secondary is not None:
            return self._secondary_comm.all_gather(self.full, self._secondary, label=self.label)
        return self.comm.all_gather(self.full, self._shard_on_device(), label=self.label)

    def _shard_on_device(self) -> torch.Tensor | None:
        """The shard where it can be sent from; None: in the full bucket itself."""
        if not self.is_shard_apart:
            return self.shard
        is_alone = self.comm.size == 1
        # A tensor of its own: peers may read it after the full bucket was released.
        staged = self.full if is_alone else self.comm.empty(self.shard.numel(), self.dtype, self.full.device)
        with self.shard_at_hand(is_read_only=True):
            staged.copy_(self.shard, non_blocking=True)
        return None if is_alone else staged

    # a shard on a disk

    def start_fetch(self, *, from_secondary: bool = False) -> None:
        """Begin to read what ``gather(from_secondary=...)`` needs from the disk. Returns at once."""
        if self._shelf is not None and self._place is not None and not (from_secondary and self._secondary is not None):
            self._shelf.start_fetch(self._place)

    def fetch(self, *, from_secondary: bool = False) -> None:
        """Have read it. Raises: TierError: it could not be."""
        if self._shelf is not None and self._place is not None and not (from_secondary and self._secondary is not None):
            self._shelf.bring(self._place)

    def can_fetch_ahead(self) -> bool:
        """Is there room to read the shard ahead of its use?"""
        return self._shelf is None or self._shelf.can_fetch_ahead(self.nbytes_of_shard)

    def hold_shard(self, *, is_overwritten: bool = False) -> None:
        """Have the shard in memory until ``store_shard()``.

        Args:
            is_overwritten: all of it will be, so it is not read: it is zero.

        Raises: TierError: it could not be read.
        """
        if self._shelf is None or self._place is None:
            return
        if is_overwritten and not self._place.num_holders:
            self._shelf.blank(self._place)
        else:
            self._shelf.bring(self._place)
        self._place.num_holders += 1
        self.shard = self._shelved()

    def store_shard(self, *, is_read_only: bool = False) -> None:
        """It is no longer needed: the disk gets it, unless it was only read. Raises: TierError."""
        if self._shelf is None or self._place is None:
            return
        self._place.num_holders -= 1
        self._is_changed |= not is_read_only
        if self._place.num_holders:
            return
        self.shard = stand_in((self.end - self.begin,), self.dtype, torch.device("cpu"))
        is_changed, self._is_changed = self._is_changed, False
        if is_changed:
            self._shelf.put_away(self._place)
        else:
            self._shelf.let_go(self._place)

    @contextmanager
    def shard_at_hand(self, *, is_overwritten: bool = False, is_read_only: bool = False) -> Iterator[None]:
        """Hold the shard in memory, wherever it rests; what changes in it is kept, unless ``is_read_only``."""
        self.hold_shard(is_overwritten=is_overwritten)
        try:
            yield
        finally:
            self.store_shard(is_read_only=is_read_only)

    def _shelved(self) -> torch.Tensor:
        assert self._place is not None
        if self._place.buffer is None:  # nothing is owned
            return torch.empty(0, dtype=self.dtype)
        return self._place.buffer[: self.nbytes_of_shard].view(self.dtype)

    def keep_secondary(self) -> None:
        """Keep this rank's range of the inner axis for the backward pass, while the bucket is full."""
        if self._secondary_comm is None:
            return
        inner = self._secondary_comm
        numel = self.layout.numel // inner.size
        if self._secondary is None:
            self._secondary = inner.empty(numel, self.dtype, self.full.device)
        inner.drain()
        self._secondary.copy_(self.full[inner.rank * numel : (inner.rank + 1) * numel])

    def release(self, *, keeps_others: bool = False) -> None:
        """Replicate -> Shard: stand-ins take the parameters' place and the storage is emptied. Communicates nothing.

        Args:
            keeps_others: tensors that somebody else has made of the memory (``parameter.detach()``) keep it, and the
                bucket takes new memory at the next gather.
        """
        for parameter, substitute in zip(self.parameters, self.stand_ins, strict=True):
            parameter.data = substitute
        if keeps_others and torch._C._storage_Use_Count(self._storage._cdata) > self._num_own:
            self._take_other_memory()
        self._storage.resize_(0)
        self.is_full = False

    @property
    def _num_own(self) -> int:
        """Tensors and handles of the bucket's own on its storage."""
        return len(self.views) + 2

    def _take_other_memory(self) -> None:
        self.full = torch.empty_like(self.full)
        self._storage = self.full.untyped_storage()
        self.views = [self.full[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self.layout.slots]

    def move_to_host(self, empty: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        """Rest in other memory for a while; the bucket is at rest and no peer reads it. Communicates nothing.

        Gathering works from there. Parameters that rest whole become views of that memory.

        Args:
            empty: makes it.
        """
        self._secondary = None  # made anew by the next forward pass
        if self.is_sharded:
            self.shard = empty(self.shard.numel(), self.dtype).copy_(self.shard, non_blocking=True)
            self.is_shard_apart = True
        else:
            self._replace_full(empty(self.full.numel(), self.dtype))
        self.is_moved = True

    def move_to_device(self, device: torch.device) -> None:
        """Undo ``move_to_host``."""
        if self.is_sharded:
            shard = self.comm.empty(self.shard.numel(), self.dtype, device)
            self.shard = shard.copy_(self.shard, non_blocking=True)
            self.is_shard_apart = False
        else:
            self._replace_full(self.comm.empty(self.full.numel(), self.dtype, device))
        self.is_moved = False

    def _replace_full(self, full: torch.Tensor) -> None:
        self.full = full.copy_(self.full, non_blocking=True)
        self._storage = full.untyped_storage()
        self.views = [full[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self.layout.slots]
        self.shard = full[self.begin : self.end]
        self.adopt()

    def write_back(self) -> None:
        """Copy this rank's range of a full bucket into its shard, after the parameters were changed in place."""
        if self.is_sharded:
            self.comm.drain()
            with self.shard_at_hand(is_overwritten=True):
                self.shard.copy_(self.full[self.begin : self.end])

    def detach(self) -> None:
        """Give the parameters tensors of their own, and the bucket's memory back (the bucket must be full)."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view.clone()
        nothing = self.full.new_empty(0)
        self.full, self.shard, self.views, self._secondary = nothing, nothing, [], None
        self._shelf = self._place = None
        self._storage = nothing.untyped_storage()
