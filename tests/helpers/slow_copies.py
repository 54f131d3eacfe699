"""Copies between a device and the host that run as late as on a slow stream: when the copy is waited for."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class SlowDone:
    def __init__(self, copies: SlowCopies, number: int, name: str) -> None:
        self._copies, self._number, self._name = copies, number, name

    def wait(self) -> None:
        self._copies.log.append(f"wait {self._name}")
        self._copies.carry_out(self._number)


class SlowCopies:
    """On the CPU, in order. Host memory is NaN, and targets are as they were, until the copy is carried out.

    Attributes: ``num_late``: copies whose source or target was given back before they were carried out.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_late = 0
        self._queue: list[Callable[[], None]] = []
        self._num_done = 0
        self._host_numbers: dict[int, int] = {}
        self._host_storages: list[StorageWeakRef] = []
        self._num_out = 0

    def is_host(self, cdata: int) -> bool:
        """Is this the number of a storage that stands for host memory (or for a value under way)?"""
        return any(ref.cdata == cdata for ref in self._host_storages)

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, SlowDone]:
        host = torch.zeros(source.shape, dtype=source.dtype)
        host.view(torch.uint8).fill_(0xFF) if host.dim() else host.fill_(-1)
        values = source.clone()
        storage = StorageWeakRef(source.untyped_storage())
        self._host_storages += [StorageWeakRef(each.untyped_storage()) for each in (host, values)]
        number, self._num_out = self._num_out, self._num_out + 1
        self._host_numbers[id(host)] = number

        def copy() -> None:
            self.num_late += storage.expired()
            host.copy_(values)

        self.log.append(f"out {number}")
        return host, self._queued(copy, f"out {number}")

    def to_device(self, host: torch.Tensor, target: torch.Tensor) -> SlowDone:
        ref, number = weakref.ref(target), self._host_numbers[id(host)]

        def copy() -> None:
            found = ref()
            if found is None:
                self.num_late += 1
            else:
                found.copy_(host)

        self.log.append(f"in {number}")
        return self._queued(copy, f"in {number}")

    def _queued(self, copy: Callable[[], None], name: str) -> SlowDone:
        self._queue.append(copy)
        return SlowDone(self, self._num_done + len(self._queue), name)

    def carry_out(self, number: int) -> None:
        while self._num_done < number and self._queue:
            self._queue.pop(0)()
            self._num_done += 1
