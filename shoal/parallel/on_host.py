"""Saved inputs in host memory: they leave while the forward pass goes on, and return one segment ahead of the backward.

    forward    segment 0   segment 1   segment 2   segment 3
    copies     [0 leaves]  [1 leaves]  [2 leaves]  [3 leaves]
    backward                                                   segment 3   segment 2   segment 1   segment 0
    copies                                                                 [1 returns] [0 returns]

A segment that begins waits, on the device, until what the last but one sent is gone. So the device holds the inputs of
two segments, however many there are, and those of the last two are used as they are. In the backward pass it holds
those of the segment that runs and of the one before it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from shoal.device import is_fake
from shoal.errors import UsageError
from shoal.parallel.kept import Form, Kept, KeptInPlace, Segment, input_changed, version_of
from shoal.sharding.placement import Tier


class Done(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """What is told to the device from now on comes after it. Does not block the host."""
        ...


class Copies(Protocol):
    """Copies between one device and the host, in order, beside the device's work."""

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, Done]:
        """Start a copy. The caller keeps ``source`` until it is done.

        Returns: host memory of the same shape and dtype, contiguous; its values are there when the copy is done.
        """
        ...

    def to_device(self, host: torch.Tensor, target: torch.Tensor) -> Done:
        """Start a copy into ``target``, which the caller keeps until it is done."""
        ...


CopiesOf = Callable[[torch.device], Copies | None]


class KeptOnHost:
    """Values in host memory, beside what is still, or already, on the device."""

    tier = Tier.HOST

    def __init__(self, source: torch.Tensor, copies: Copies, segment: Segment) -> None:
        self._source: torch.Tensor | None = None  # until it has left
        self._changed: UsageError | None = None
        self._back: tuple[torch.Tensor, Done | None] | None = None  # None: waited for
        self.form = Form.of(source)
        self.nbytes = self.form.nbytes
        self.number = segment.number
        self._version = version_of(source)
        self._copies = copies
        self._host, self._gone = copies.to_host(self.form.compact(source))
        self._source = source

    @property
    def resting(self) -> Kept:
        return self

    def leave(self) -> None:
        """Give back the device's memory of what was sent, once it is gone."""
        if self._source is None:
            return
        self._gone.wait()
        if version_of(self._source) != self._version:
            self._changed = input_changed(self._source)  # perhaps before it was copied
        self._source = None

    def start(self) -> None:
        """Start to return, unless it is there."""
        if self._source is None and self._back is None:
            target = self.form.empty()
            self._back = target, self._copies.to_device(self._host, target)

    def get(self) -> torch.Tensor:
        """Raises: UsageError: it was changed in place before it was gone."""
        if self._source is not None and version_of(self._source) != self._version:
            raise input_changed(self._source)
        if self._changed is not None:
            raise self._changed
        if self._source is not None:
            return self._source
        self.start()
        assert self._back is not None
        target, done = self._back
        if done is not None:
            done.wait()
            self._back = target, None
        return self.form.expand(target)

    def __del__(self) -> None:
        # Its graph is gone while a copy is under way: what comes to lie in the memory next must come after the copy.
        if sys.is_finalizing():
            return
        if self._source is not None:
            self._gone.wait()
        self.drop()

    def drop(self) -> None:
        """Give back the device's memory of what has returned."""
        if self._back is not None and self._back[1] is not None:
            self._back[1].wait()  # else the copy would write into what comes to lie there next
        self._back = None


class OnHost:
    """Keeps saved inputs in host memory. Those of the CPU are there already: no copy, counted as the host's.

    Args:
        copies_of: makes the copies of a device; None for a device whose memory is the host's.
    """

    def __init__(self, copies_of: CopiesOf) -> None:
        self._copies_of = copies_of
        self._copies: dict[torch.device, Copies | None] = {}
        self._number = 0
        self._segments: dict[int, weakref.ref[Segment]] = {}
        self._leaving: deque[weakref.ref[KeptOnHost]] = deque()
        self._running: weakref.ref[Segment] | None = None  # the one that was brought last
        self._ahead: weakref.ref[Segment] | None = None  # the one that is expected next

    def begin(self) -> Segment:
        self._number += 1
        self._let_go(before=self._number - 1)
        segment = Segment(self._number, [])
        self._segments[self._number] = weakref.ref(segment)
        return segment

    def _let_go(self, before: int) -> None:
        """Give back the device's memory of what segments before number ``before`` sent."""
        while self._leaving:
            kept = self._leaving[0]()
            if kept is not None:
                if kept.number >= before:
                    return
                kept.leave()
            self._leaving.popleft()

    def keep(self, tensor: torch.Tensor, segment: Segment) -> Kept:
        copies = None if is_fake(tensor) else self._copies_for(tensor.device)
        if copies is None:
            return KeptInPlace(tensor, Tier.HOST)
        if not Form.of(tensor).can_move:
            return KeptInPlace(tensor, Tier.DEVICE)
        kept = KeptOnHost(tensor, copies, segment)
        self._leaving.append(weakref.ref(kept))
        return kept

    def _copies_for(self, device: torch.device) -> Copies | None:
        if device not in self._copies:
            self._copies[device] = self._copies_of(device)
        return self._copies[device]

    def bring(self, kept: Kept, segment: Segment) -> torch.Tensor:
        assert isinstance(kept, KeptOnHost)
        if self._running is None or self._running() is not segment:
            self._running = weakref.ref(segment)
            for each in _on_host(segment):
                each.start()
        tensor = kept.get()
        previous = self._before(segment)
        self._bring_ahead(previous, segment)
        if not _is_in(kept, previous):
            kept.drop()
        return tensor

    def _before(self, segment: Segment) -> Segment | None:
        """The segment that ran last before this one, of those whose backward is still to come."""
        self._segments = {number: ref for number, ref in self._segments.items() if ref() is not None}
        earlier = [ref for number, ref in self._segments.items() if number < segment.number]
        return earlier[-1]() if earlier else None

    def _bring_ahead(self, coming: Segment | None, running: Segment) -> None:
        last = self._ahead() if self._ahead is not None else None
        if last is coming and coming is not None:
            return
        if last is not None and last is not running:
            for each in _on_host(last):  # it was not what came next
                if not _is_in(each, running) and not _is_in(each, coming):
                    each.drop()
        self._ahead = weakref.ref(coming) if coming is not None else None
        if coming is not None:
            for each in _on_host(coming):
                each.start()

    def reset(self) -> None:
        self._let_go(before=self._number + 1)
        last = self._ahead() if self._ahead is not None else None
        for each in _on_host(last) if last is not None else ():
            each.drop()
        self._ahead = None


def _on_host(segment: Segment) -> list[KeptOnHost]:
    return [kept.resting for kept in segment.kept if isinstance(kept.resting, KeptOnHost)]


def _is_in(kept: KeptOnHost, segment: Segment | None) -> bool:
    return segment is not None and any(kept is other for other in _on_host(segment))
