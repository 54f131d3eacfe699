"""The one formula for memory: bytes per rank of each kind of state, from layout, row and dtypes alone.

The ledger compares it with what is held, ``"offload": "auto"`` and the planner decide by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.sharding.encoded_state import encoded_nbytes
from shoal.sharding.layout import BufferLayout
from shoal.sharding.table import Row

ADAM_STATES = 2  # optimizer states of one element per element that are reckoned with before there is an optimizer


@dataclass(frozen=True)
class GroupMemory:
    """What one rank holds of one parameter group, in bytes. Padding is counted.

    Args:
        dtype: of the parameters; ``main_dtype``: of the main parameters; ``gradient_dtype``: of the sum.
        has_own_main: main parameters have memory of their own; else they are the parameters' memory.
        state_dtype: of optimizer state; None: that of the main parameters. ``is_state_encoded``: it has a byte for each
            element.
    """

    layout: BufferLayout
    row: Row
    dtype: torch.dtype
    is_trained: bool = True
    main_dtype: torch.dtype = torch.float32
    gradient_dtype: torch.dtype = torch.float32
    has_own_main: bool = True
    state_dtype: torch.dtype | None = None
    is_state_encoded: bool = False

    def _numel(self, is_sharded: bool) -> int:
        return self.layout.shard_numel if is_sharded else self.layout.numel

    @property
    def owned_numel(self) -> int:
        """Elements that this rank's optimizer owns."""
        return self._numel(self.row.state.is_sharded)

    @property
    def stored_numel(self) -> int:
        """Elements of parameters between uses."""
        return self._numel(self.row.parameter.is_sharded)

    @property
    def parameter(self) -> int:
        """Parameters between uses."""
        return self.stored_numel * self.dtype.itemsize

    @property
    def whole(self) -> int:
        """The whole buffer in the parameters' dtype: while it is gathered, or while its gradient is reduced."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def gradient(self) -> int:
        """The sum of gradients between micro-batches."""
        return self._numel(self.row.is_gradient_sharded) * self.gradient_dtype.itemsize

    @property
    def error(self) -> int:
        """What was lost in sending gradients: of the whole, and where all ranks get the sum, of this rank's range."""
        sent = self.row.sent
        if not sent.has_error or not sent.reduce:
            return 0
        numel = self.layout.numel + (0 if self.row.gradient_at_step.is_sharded else self.layout.shard_numel)
        return numel * torch.float32.itemsize

    @property
    def outer(self) -> int:
        """What replicas keep that take steps of their own."""
        itemsize = max(self.main_dtype.itemsize, torch.float32.itemsize)
        return self.owned_numel * self.row.num_outer_states * itemsize

    @property
    def main(self) -> int:
        """Main parameters that have memory of their own."""
        return self.owned_numel * self.main_dtype.itemsize if self.has_own_main else 0

    def state(self, num_states: int = ADAM_STATES, itemsize: int | None = None) -> int:
        """Optimizer state of one element per owned element; where it is encoded, of the first rank."""
        if self.is_state_encoded:
            owned = self.layout.segments_in(0, self.owned_numel)
            return num_states * encoded_nbytes(self.owned_numel, owned)
        return self.owned_numel * num_states * (itemsize or (self.state_dtype or self.main_dtype).itemsize)


@dataclass(frozen=True)
class UnitMemory:
    """What one rank needs for one unit, in bytes (``*_numel``: elements)."""

    name: str
    stored_numel: int = 0  # parameters between uses
    trained_numel: int = 0  # of them, those that this rank's optimizer owns
    parameter_nbytes: int = 0  # between uses
    gathered_nbytes: int = 0  # whole, while it computes; 0 where it is always whole
    gradient_nbytes: int = 0  # between micro-batches, on the device
    reduce_nbytes: int = 0  # staging buffers, while its gradient is reduced
    state_nbytes: int = 0  # main parameters and two states per element (what Adam keeps), on the device
    offloaded_state_nbytes: int = 0  # the same on another tier, where parameters cannot be their own main parameters
    # Gradients and parameters on the host, on their way to and from an update there, and what else stays there then.
    transfer_nbytes: int = 0
    can_move_parameters: bool = False  # they are sharded
    can_move_state: bool = True

    @classmethod
    def of(cls, name: str, groups: Sequence[GroupMemory]) -> UnitMemory:
        """The sum over the unit's groups."""
        trained = [group for group in groups if group.is_trained]
        return cls(
            name,
            stored_numel=sum(group.stored_numel for group in groups),
            trained_numel=sum(group.owned_numel for group in trained),
            parameter_nbytes=sum(group.parameter for group in groups),
            gathered_nbytes=sum(group.whole for group in groups if group.row.parameter.is_sharded),
            gradient_nbytes=sum(group.gradient + group.error for group in trained),
            reduce_nbytes=sum(group.whole for group in trained if group.row.is_gradient_sharded),
            state_nbytes=sum(group.main + group.state() + group.outer for group in trained),
            offloaded_state_nbytes=sum(
                group.owned_numel * group.main_dtype.itemsize + group.state() for group in trained
            ),
            transfer_nbytes=sum(
                group.owned_numel * (group.gradient_dtype.itemsize + group.dtype.itemsize) + group.outer
                for group in trained
            ),
            can_move_parameters=any(group.row.parameter.is_sharded for group in groups),
            can_move_state=any(group.row.state.is_sharded for group in groups),
        )
