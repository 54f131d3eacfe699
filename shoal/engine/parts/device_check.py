"""``device_check``: every N steps each rank tests its device, and one that is slow or computes wrong is named.

product    a product of matrices of -1, 0 and 1, exact in every order and precision: any other bits are a fault
copy       from one place of the device's memory to another
link       to the next rank and to the one before; a rank is slow where both links are

A rank is slow that takes longer than ``factor`` times the median of the others, in three measurements in a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Any

import torch

from shoal.comm.protocol import Communicator, Message
from shoal.config.schema import DeviceCheckSection
from shoal.engine.accumulation import Counters
from shoal.engine.log import logger
from shoal.engine.parts.part import Part
from shoal.engine.settings import Properties
from shoal.errors import DeviceError

_DEPTH = 1024  # of the product: its elements stay below 256, which bf16 holds exactly
_WIDTH = {"cuda": 4096}  # of both matrices
_COPY_NBYTES = {"cuda": 128 << 20}  # more than the cache of any GPU holds
_CPU_WIDTH, _CPU_COPY_NBYTES = 256, 8 << 20
_LINK_NBYTES = 1 << 20
_REPEATS = 4  # the shortest of which counts
_MEASUREMENTS = 3  # in a row, in which a rank is slow that is named
_LABEL = "device check"


class DeviceCheck(Part):
    """Tests the devices.

    Args:
        comm: of all ranks.
        hosts: by rank.

    Communicates: at a check 8 MiB of each rank with its two neighbours, and 32 bytes of each rank with all.
    Memory: at a check 304 MiB on a GPU, 20 MiB on a CPU; between two checks up to 16 MiB of host memory.
    Order: at a check the host waits for the device.
    """

    def __init__(self, comm: Communicator, properties: Properties, counters: Counters, hosts: Sequence[str]) -> None:
        self._comm = comm
        self._device = properties.device
        self._counters = counters
        self._hosts = hosts
        self._names: Sequence[str] = ()
        self._section: DeviceCheckSection = properties.config.device_check
        kind = self._device.torch_device.type
        width, dtype = _WIDTH.get(kind, _CPU_WIDTH), torch.float32 if kind == "cpu" else torch.bfloat16
        generator = torch.Generator().manual_seed(0)
        self._left, self._right = (
            torch.randint(-1, 2, shape, generator=generator, device="cpu").to(dtype)
            for shape in ((width, _DEPTH), (_DEPTH, width))
        )
        self._column_sums = self._left.double().sum(0) @ self._right.double()  # of the product: [width], whole numbers
        self._copied_nbytes = _COPY_NBYTES.get(kind, _CPU_COPY_NBYTES)

    def prepare(self, engine: Any) -> None:
        device, name = str(self._device.torch_device), self._device.name
        self._names = self._comm.gather_objects(device if name == device else f"{device} ({name})", label=_LABEL)
        self._measure()  # kernels are loaded and connections opened
        self._check("at the start")

    def after_step(self) -> None:
        """Raises: DeviceError: a device is slow or computes wrong, and the action is not "warn"."""
        step = self._counters.global_steps
        if self._section.every is not None and step % self._section.every == 0:
            self._check(f"step {step}")

    def _check(self, when: str) -> None:
        found = self._faults(self._measure())
        for _ in range(_MEASUREMENTS - 1):
            if not found or any("bits" in text for text in found.values()):
                break
            again = self._faults(self._measure())
            found = {rank: again[rank] for rank in found if rank in again}
        for rank, text in found.items():
            self._act(rank, f"rank {rank} on {self._hosts[rank]}, device {self._names[rank]}: {text}", when)

    def _act(self, rank: int, text: str, when: str) -> None:
        do = "test that device, and continue on others from the last checkpoint."
        match self._section.action:
            case "warn" if self._comm.rank == 0:
                logger.warning("%s: %s", when, text)
            case "stop":
                raise DeviceError(text, where=when, do=do, code="device-check")
            case "exclude" if self._comm.rank == rank:  # the launcher knows the machine by this error
                raise DeviceError(text, where=when, do=do, code="device-failed")

    def _faults(self, of_ranks: Sequence[Sequence[float]]) -> dict[int, str]:
        """What is wrong, by rank. ``of_ranks``: what ``_measure`` returns."""
        num_wrong, *columns = zip(*of_ranks, strict=True)
        found = {
            rank: f"{int(num)} of {_REPEATS} products have wrong bits" for rank, num in enumerate(num_wrong) if num
        }
        names = ("the product of matrices", "the copy of memory", "the link to its neighbours")
        for name, seconds in zip(names, columns, strict=True):
            for rank, mine, usual in slow(seconds, self._section.factor):
                text = f"{name} takes {1e3 * mine:.3g} ms, the median of the others is {1e3 * usual:.3g} ms"
                found.setdefault(rank, text)
        return found

    @torch.no_grad()
    def _measure(self) -> list[list[float]]:
        """Of each rank: products with wrong bits, and the seconds of a product, a copy and a link."""
        left, right = (each.to(self._device.torch_device) for each in (self._left, self._right))
        num_wrong, seconds = 0, []
        for _ in range(_REPEATS):
            took, product = self._timed(partial(self._product, left, right))
            seconds.append(took)
            num_wrong += not torch.equal(product.sum(0, dtype=torch.float64).cpu(), self._column_sums)
        mine = [num_wrong, min(seconds), self._copy_seconds(), self._link_seconds()]
        return self._comm.exchange_on_host(mine, label=_LABEL)

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right

    def _copy_seconds(self) -> float:
        source = torch.ones(self._copied_nbytes, dtype=torch.uint8, device=self._device.torch_device)
        copy = partial(torch.empty_like(source).copy_, source)
        return min(self._timed(copy)[0] for _ in range(_REPEATS))

    def _link_seconds(self) -> float:
        """Of the faster of both links; 0.0 with fewer than 3 ranks, of which none could be told from the other."""
        if self._comm.size < 3:
            return 0.0
        mine, theirs = (
            torch.zeros(_LINK_NBYTES, dtype=torch.uint8, device=self._device.torch_device) for _ in range(2)
        )
        links = []
        for peer in peers(self._comm.rank, self._comm.size):
            self._comm.barrier(label=_LABEL)
            if peer is None:
                continue
            messages = [Message("send", mine, peer, _LABEL), Message("recv", theirs, peer, _LABEL)]
            links.append(min(self._timed(partial(self._comm.blocking.batch, messages))[0] for _ in range(_REPEATS)))
        return min(links)

    def _timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        self._device.synchronize()
        began = time.perf_counter()
        result = run()
        self._device.synchronize()
        return time.perf_counter() - began, result


def slow(seconds: Sequence[float], factor: float) -> Iterator[tuple[int, float, float]]:
    """The ranks that take longer than ``factor`` times the median of the others, with both.

    >>> list(slow([1.0, 1.1, 4.0, 1.2], 1.5))
    [(2, 4.0, 1.1)]
    """
    for rank, mine in enumerate(seconds if len(seconds) > 1 else ()):
        usual = median_low([*seconds[:rank], *seconds[rank + 1 :]])
        if mine > factor * usual:
            yield rank, mine, usual


def peers(rank: int, size: int) -> list[int | None]:
    """The neighbour in a ring, in each of the rounds in which the links of the ring are measured; None: none.

    >>> [peers(rank, 4) for rank in range(4)], [peers(rank, 3) for rank in range(3)]
    ([[1, 3], [0, 2], [3, 1], [2, 0]], [[1, None, 2], [0, 2, None], [None, 1, 0]])
    """
    links = [(low, (low + 1) % size) for low in range(size)]
    rounds: Mapping[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    for low, high in links:
        rounds[2 if low == size - 1 and size % 2 else low % 2].append((low, high))
    chosen = [[link for link in each if rank in link] for each in rounds.values() if each]
    return [sum(each[0]) - rank if each else None for each in chosen]
