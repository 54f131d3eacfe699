"""The axes of ranks, by name: those of one model, and what follows from them for one parameter group.

A parameter says what the ranks along an axis hold (the sets of ``ParameterSpec``). From these alone follow

    the axis that shards it   ``Axes.data``; of one that is split over an axis which is made of data-parallel ranks, or
                              has others along it, the ranks that are left (``Axes.left``)
    its gradient              averaged over the data-parallel ranks, and summed over ``summand_over``
    who holds the same range  ``dp_replicate``, ``summand_over`` and ``copies_over``: the global norm counts the range
                              at coordinate 0 of each, and a checkpoint divides it among them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shoal.comm.protocol import Communicator
from shoal.mesh import Mesh
from shoal.sharding.layout import ParameterSpec


@dataclass(frozen=True)
class DataAxes:
    """Names of axes along which ranks hold the same part of a parameter, and see other samples.

    Args:
        shard: the one that shards it, in the row.
        all: all of these ranks: its gradient is averaged over them.
        replicate: the one along which ranks hold the same shard.
    """

    shard: str
    all: str
    replicate: str = "dp_replicate"


@dataclass(frozen=True)
class GroupAxes:
    """The axes of one parameter group.

    Args:
        shard: the name of the axis that shards it, in the row.
        data: the ranks that hold the same part of the parameters, and see other samples.
        comms: by name in the row, the ranks along ``shard``, and along each further axis on which its gradient is
            Partial. Of an axis with one rank, nothing.
        replicate: the data-parallel ranks that hold the same range where state is sharded; None: there is one.
        copies: further axes along which ranks hold the same parameters.
        across: such axes whose ranks have other units besides. At most one.
        parts: the ranks that hold the other parts of each of its tensors; None: tensors are whole.
        is_apart: the ranks along ``replicate`` take steps of their own: no gradient is summed over it.
    """

    shard: str
    data: Communicator
    comms: Mapping[str, Communicator]
    replicate: Communicator | None = None
    copies: tuple[Communicator, ...] = ()
    across: tuple[Communicator, ...] = ()
    parts: Communicator | None = None
    is_apart: bool = False

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes over which the gradient is summed in addition to ``shard``."""
        return tuple(name for name in self.comms if name != self.shard)

    @property
    def replica(self) -> tuple[int, int]:
        """This rank's number among those that hold the same range of the buffer, and how many they are."""
        index, size = 0, 1
        for comm in (self.replicate, *self.copies, *self.across):
            if comm is not None:
                index, size = index * comm.size + comm.rank, size * comm.size
        return index, size

    @property
    def counts_norm(self) -> bool:
        """True on the first of the ranks that have the same range of one gradient."""
        same = (None if self.is_apart else self.replicate, *self.copies, *self.across)
        return all(comm is None or comm.rank == 0 for comm in same)


@dataclass(frozen=True)
class Axes:
    """The communicators of one model, and what the axes are that all parameters have in common.

    Args:
        mesh: of all ranks.
        comms: by name of the axis: ``world`` (every rank that takes the step together), ``batch`` (the ranks that see
            other samples), ``second`` (those of a second sharding), and the axes that the other fields, parameters and
            techniques name. An axis along which there is one rank may be left out.
        dense: the data-parallel axes of a parameter that names none of ``left``.
        left: by an axis that is made of data-parallel ranks: what is left of them for a parameter that is split over
            it, or that has others along it.
        units: the ranks along it have the same units: they issue the same collectives of parameters.
        names: the ranks along it have parameters of other names; None: all have the same.
        across: axes whose ranks have other units, and copies of some parameters.
        of_activations: axes over which neither parameters nor gradients nor status are exchanged.
        apart: the ranks along it take steps of their own, and are synchronised from time to time; None: all ranks take
            one step together.
    """

    mesh: Mesh
    comms: Mapping[str, Communicator]
    dense: DataAxes
    left: Mapping[str, DataAxes]
    units: str = "world"
    names: str | None = None
    across: frozenset[str] = frozenset()
    of_activations: frozenset[str] = frozenset()
    apart: str | None = None

    @property
    def world(self) -> Communicator:
        """Every rank that takes the step together: its status, start-up checks, errors."""
        return self.comms["world"]

    @cached_property
    def one_gradient(self) -> tuple[int, ...]:
        """The ranks of ``world`` that hold one gradient with this one: all, or those of its replica."""
        mesh, apart, ranks = self.mesh, self.apart, range(self.world.size)
        if apart is None:
            return tuple(ranks)
        mine = mesh.index(apart, self.world.rank)
        return tuple(rank for rank in ranks if mesh.index(apart, rank) == mine)

    @property
    def batch(self) -> Communicator:
        """The ranks that see other samples: batch sizes, the loader."""
        return self.comms["batch"]

    @property
    def data(self) -> Communicator:
        """The ranks that hold the same part of the model: gradients are averaged over them."""
        return self.comms[self.dense.all]

    @property
    def shard(self) -> Communicator:
        """The ranks that hold different shards."""
        return self.comms[self.dense.shard]

    @property
    def same_units(self) -> Communicator:
        """The ranks that have the same units."""
        return self.comms[self.units]

    @property
    def other_names(self) -> Communicator | None:
        """The ranks that have parameters of other names; None: all have the same."""
        return None if self.names is None else self.comms[self.names]

    def get(self, name: str) -> Communicator | None:
        """The ranks along an axis; None: there is one."""
        return self.comms.get(name)

    def crosses_units(self, spec: ParameterSpec) -> bool:
        """True if ranks with other units have copies of a parameter."""
        return bool((spec.summand_over | spec.copies_over) & self.across)

    def data_axes(self, spec: ParameterSpec) -> DataAxes:
        """The data-parallel axes of a parameter."""
        divided = spec.split_over | spec.others_over
        return next((axes for name, axes in self.left.items() if name in divided), self.dense)  # alike on all ranks

    def of_group(self, spec: ParameterSpec, *, is_state_sharded: bool) -> GroupAxes:
        """What follows from the sets of a group's parameters."""
        names = self.data_axes(spec)
        is_apart = names.replicate == self.apart
        has_replicate = is_state_sharded or is_apart
        comms = {names.shard: self.comms[names.shard if has_replicate else names.all]}
        replicate = self.comms.get(names.replicate) if has_replicate else None
        if replicate is not None and not is_apart:
            comms[names.replicate] = replicate
        same = {name: comm for name, comm in self.comms.items() if name in spec.summand_over | spec.copies_over}
        comms |= {name: comm for name, comm in same.items() if name in spec.summand_over}
        return GroupAxes(
            names.shard,
            self.comms[names.all],
            comms,
            replicate,
            tuple(comm for name, comm in same.items() if name not in self.across),
            tuple(comm for name, comm in same.items() if name in self.across),
            next((self.comms[name] for name in spec.split_over), None),
            is_apart,
        )

    def map(self, change: Callable[[Communicator], Communicator]) -> Axes:
        """The same axes with each communicator changed, once."""
        changed = {comm: change(comm) for comm in dict.fromkeys(self.comms.values())}
        return replace(self, comms={name: changed[comm] for name, comm in self.comms.items()})

    def drain(self) -> None:
        """Wait until no peer reads parameters or gradients of this rank."""
        without = self.of_activations | self.across
        for comm in dict.fromkeys(comm for name, comm in self.comms.items() if name not in without):
            comm.drain()
