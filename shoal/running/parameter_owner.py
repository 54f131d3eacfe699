"""What holds the shards of a parameter: an engine, or ``zero.Init`` until an engine takes the parameter over.

``GatheredParameters``, the safe accessors and ``load_hf`` are given bare parameters. They look up the owner here, and
call the same methods of either.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.comm.protocol import Communicator

ParameterState = Literal["sharded", "gathering", "gathered"]


class ParameterOwner(ABC):
    """Holds this rank's shards of parameters.

    Args:
        comm: all ranks, which gather parameters together.
        stage: of ZeRO.
        checks_changes: a change in ``GatheredParameters`` that would be lost is an error.
    """

    _serials: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, comm: Communicator, stage: int, *, checks_changes: bool) -> None:
        self.comm = comm
        self.stage = stage
        self.checks_changes = checks_changes
        self.serial = next(self._serials)  # owners are made in one order on every rank
        self.num_written = 0  # parameters whose changes were broadcast
        self._num_writers: Counter[int] = Counter()  # open blocks that will broadcast a parameter, by its id

    @contextmanager
    def gathered(self, parameters: Sequence[torch.Tensor], source: int | None) -> Iterator[None]:
        """Keep parameters gathered inside the block. Blocks may be nested.

        Args:
            parameters: in the same order on every rank.
            source: the rank whose changes all ranks keep; None: changes of sharded parameters are lost. Of nested
                blocks with a source, the outermost broadcasts. After an exception none does.

        Communicates: an all_gather of each unit; a broadcast of each parameter.
        """
        with self._resident(parameters):
            writers = [id(parameter) for parameter in parameters if source is not None]
            self._num_writers.update(writers)
            is_kept = False
            try:
                yield
                is_kept = True
            finally:
                self._num_writers.subtract(writers)
                if source is not None and is_kept:
                    with torch._C.DisableTorchFunction(), torch.no_grad():
                        for parameter in parameters:
                            if not self._num_writers[id(parameter)]:
                                self.write_through(parameter, source)
                                self.num_written += 1
                self._num_writers += Counter()  # drops zeros

    @abstractmethod
    def _resident(self, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Gather the parameters on entry; on exit, release those that no other block holds."""

    @abstractmethod
    def write_through(self, parameter: torch.Tensor, source: int) -> None:
        """Set all shards of a gathered parameter to rank ``source``'s value. Communicates: a broadcast of it."""

    @abstractmethod
    def number_of(self, parameter: torch.Tensor) -> int:
        """Parameters are gathered in this order. The same on every rank."""

    @abstractmethod
    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """True if each rank holds only its shard between uses."""

    @abstractmethod
    def state_of(self, parameter: torch.Tensor) -> ParameterState: ...

    @abstractmethod
    def shard_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's shard, 1-D, not a copy."""

    @abstractmethod
    def num_shards(self, parameter: torch.Tensor) -> int:
        """The number of ranks that hold a shard of it."""

    @abstractmethod
    def load(self, parameter: nn.Parameter, read: Callable[[int, int], torch.Tensor]) -> None:
        """Set what this rank holds of a parameter; every rank calls, and nothing is communicated.

        Args:
            read: returns the values of a range of the flattened parameter, 1-D.
        """

    @abstractmethod
    def share(self, module: nn.Module, parameter: torch.Tensor, *, is_shared: bool) -> None:
        """Gather the parameter for every forward of ``module``, from now on or no longer."""


class _Owners:
    """The owner of each parameter. Keeps neither alive."""

    def __init__(self) -> None:
        self._owners = WeakTensorKeyDictionary()
        self._of_other_stages = WeakTensorKeyDictionary()

    def put_elsewhere(self, parameters: Iterable[torch.Tensor]) -> None:
        """These are on other pipeline stages alone."""
        self._of_other_stages.update(dict.fromkeys(parameters))

    def is_elsewhere(self, parameter: torch.Tensor) -> bool:
        """True if only other pipeline stages have the parameter."""
        return parameter in self._of_other_stages

    def put(self, parameter: torch.Tensor, owner: ParameterOwner) -> None:
        self._owners[parameter] = weakref.ref(owner)

    def get(self, parameter: torch.Tensor) -> ParameterOwner | None:
        reference = self._owners.get(parameter)
        return None if reference is None else reference()

    def pop(self, parameter: torch.Tensor, owner: ParameterOwner) -> None:
        """Remove the parameter, if ``owner`` is its owner."""
        if self.get(parameter) is owner:
            del self._owners[parameter]

    def grouped(self, parameters: Sequence[torch.Tensor]) -> list[tuple[ParameterOwner, list[torch.Tensor]]]:
        """Those of the parameters that have an owner, by owner; in the same order on every rank."""
        groups: dict[ParameterOwner, list[torch.Tensor]] = {}
        for parameter in parameters:
            owner = self.get(parameter)
            if owner is not None:
                groups.setdefault(owner, []).append(parameter)
        ordered = sorted(groups.items(), key=lambda item: item[0].serial)
        return [(owner, sorted(members, key=owner.number_of)) for owner, members in ordered]


OWNERS = _Owners()
