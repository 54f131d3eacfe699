"""The ranges that an optimizer updates, and their optimizer state: how they are cut, and filled with a loaded state.

A range is a contiguous part of the flat main parameters, within one parameter group of Shoal's and one of the
optimizer's. On CPU it is at most one block. A range that holds parameters with and without a gradient is cut, its
optimizer state with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from shoal.comm.protocol import Communicator
from shoal.device import Device, read_vector
from shoal.errors import OptimizerError
from shoal.offload.cpu_optimizer import CpuOptimizer
from shoal.optim.whole import OwnedRange, ParameterPart, WholeTensorOptimizer
from shoal.sharding.encoded_state import decoded, is_elementwise
from shoal.sharding.param_group import ParameterGroup, ParameterRange
from shoal.sharding.stochastic_rounding import round_stochastically
from shoal.streams import optimizer_step

HOST_RANGE_NUMEL = 16 * 1024 * 1024  # of state that is updated on the host: one call's overhead is negligible
VECTOR_NUMEL = 32  # most elements that torch's fused optimizers update at once on a CPU; the rest go one by one

_Run = tuple[int, int, int]  # start and stop in the owned range, and the slot of the first parameter


class OptimizerRanges:
    """The ranges of one torch optimizer.

    Args:
        block_numel: most elements of one range of what is stored on the device.
        cpu_optimizer: updates the state that is on the host; None: there is none.
        state_dtype: of optimizer state; None: that of the main parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        block_numel: int,
        cpu_optimizer: CpuOptimizer | None,
        state_dtype: torch.dtype | None,
    ) -> None:
        self.optimizer = optimizer
        self.is_whole_tensor = isinstance(optimizer, WholeTensorOptimizer)  # needs whole parameters (LAMB, Muon)
        self.cpu_optimizer = cpu_optimizer
        self.state_dtype = state_dtype
        self._block_numel = block_numel

    def _ranges_of(self, group: ParameterGroup) -> Iterator[ParameterRange]:
        layout = group.buffer.layout
        block = self._block_of(group)
        for index in layout.groups:
            for start, stop in self._extents(group, index):
                if start == stop and not self.is_whole_tensor:
                    continue
                step = block or max(stop - start, 1)
                for low in range(start, max(stop, start + 1), step):
                    yield self._range(group, index, low, min(low + step, stop))

    def _extents(self, group: ParameterGroup, index: int) -> list[tuple[int, int]]:
        """What of this rank's range belongs to one optimizer group; one rank cuts it to have plain PyTorch's bits."""
        if group.gradient.is_alone and not self.is_whole_tensor:
            specs = [spec for spec in group.buffer.layout.specs if spec.group == index]
            cuts = [0, *(i for i, spec in enumerate(specs, 1) if spec.numel % VECTOR_NUMEL or spec is specs[-1])]
            return [(specs[i].offset, specs[j - 1].offset + specs[j - 1].numel) for i, j in pairwise(cuts)]
        return [group.buffer.layout.group_range(index, group.buffer.begin, group.buffer.end)]

    def _block_of(self, group: ParameterGroup) -> int | None:
        """Most elements of one range."""
        if self.is_whole_tensor:
            return None
        if group.updates is None:
            return self._block_numel
        # The CPU optimizer cuts blocks by itself; another optimizer's are cut here, so that its casts stay in cache.
        assert self.cpu_optimizer is not None
        cuts_by_itself = self.cpu_optimizer.kind is not None and self.state_dtype is None
        return HOST_RANGE_NUMEL if cuts_by_itself else Device(torch.device("cpu")).step_block_numel

    def _range(self, group: ParameterGroup, index: int, start: int, stop: int) -> ParameterRange:
        begin = group.buffer.begin
        segments = group.buffer.layout.segments_in(begin + start, begin + stop)
        return ParameterRange(torch.nn.Parameter(group.main[start:stop]), index, start, stop, segments)

    def _split(self, group: ParameterGroup, whole: ParameterRange, has_grad: bytes) -> list[ParameterRange]:
        """Cut a range into runs of parameters that did, and did not, get a gradient."""
        group.synchronize()
        old = decoded(self.optimizer.state.pop(whole.param, {}))
        parts = self._replace(group, whole, _runs(whole, has_grad))
        for part in parts if old else ():
            low, high = part.start - whole.start, part.stop - whole.start
            state = {key: _cut(value, whole.stop - whole.start, low, high) for key, value in old.items()}
            self.optimizer.state[part.param] = group.encoded(part, state)
        return parts

    def _replace(self, group: ParameterGroup, whole: ParameterRange, runs: Sequence[_Run]) -> list[ParameterRange]:
        """Put one range for each run in the place of a range."""
        parts = [self._range(group, whole.group, start, stop) for start, stop, _ in runs]
        index = group.ranges.index(whole)
        group.ranges[index : index + 1] = parts
        return parts

    def _with_grad(self, group: ParameterGroup, has_grad: bytes) -> list[ParameterRange]:
        """The ranges of which some rank has a gradient; a range that is so in part is cut."""
        if all(has_grad):
            return list(group.ranges)
        ranges: list[ParameterRange] = []
        for part in list(group.ranges):
            flags = {bool(has_grad[segment.slot]) for segment in part.segments}
            if len(flags) > 1:
                ranges += [cut for cut in self._split(group, part, has_grad) if has_grad[cut.segments[0].slot]]
            elif flags == {True}:
                ranges.append(part)
        return ranges

    @staticmethod
    def _parts_comm(group: ParameterGroup) -> Communicator | None:
        return group.axes.parts if any(spec.is_part for spec in group.buffer.layout.specs) else None

    def _owned_ranges(self, group: ParameterGroup, has_grad: bytes) -> list[OwnedRange]:
        """The ranges of a group as an optimizer of whole tensors takes them."""
        buffer, has_parts = group.buffer, self._parts_comm(group) is not None
        whole = []
        for part in group.ranges:
            members = [i for i, spec in enumerate(buffer.layout.specs) if spec.group == part.group]
            index_of = {slot: index for index, slot in enumerate(members)}
            specs = [buffer.layout.specs[i] for i in members]
            parts = tuple(
                ParameterPart(
                    index_of[s.slot],
                    torch.Size(buffer.layout.specs[s.slot].shape),
                    s.start,
                    s.stop,
                    s.offset,
                )
                for s in part.segments
                if s.slot in index_of and has_grad[s.slot]
            )
            whole.append(
                OwnedRange(
                    param=part.param,
                    group=self.optimizer.param_groups[part.group],
                    parts=parts,
                    shapes=tuple(torch.Size(spec.shape) for spec in specs),
                    names=tuple(spec.name for spec in specs),
                    offsets=tuple(spec.offset for spec in specs) if all(has_grad) else None,
                    shard_numel=group.owned_numel,
                    specs=tuple(specs) if has_parts else (),
                )
            )
        return whole

    # loading

    def allocate_state(
        self, group: ParameterGroup, scalars: Sequence[Mapping[str, Any]], dtypes: Sequence[Mapping[str, torch.dtype]]
    ) -> None:
        """Drop one group's optimizer state and allocate a loaded one's, its elements zero.

        Args:
            scalars: by slot, state that is one value for the whole parameter.
            dtypes: by slot, the keys of state of one element per element.

        A range is cut where its parameters' scalars or keys differ (they did not take the same steps).
        """
        for part in group.ranges:
            self.optimizer.state.pop(part.param, None)
        group.ranges = list(self._ranges_of(group))
        if self.is_whole_tensor:
            for part in group.ranges:
                self._fill_whole(group, part, scalars, dtypes)
            return
        labels = [_label(s, d) for s, d in zip(scalars, dtypes, strict=True)]
        for part in list(group.ranges):
            runs = _runs(part, labels)
            cuts = self._replace(group, part, runs) if len(runs) > 1 else [part] * len(runs)
            for cut, (_, _, slot) in zip(cuts, runs, strict=True):
                self._fill_range(cut, scalars[slot], dtypes[slot])

    def _fill_whole(
        self,
        group: ParameterGroup,
        part: ParameterRange,
        scalars: Sequence[Mapping[str, Any]],
        dtypes: Sequence[Mapping[str, torch.dtype]],
    ) -> None:
        """One range holds several whole parameters, which count their steps one by one."""
        slots = [segment.slot for segment in part.segments if scalars[segment.slot]]
        if not slots:
            return
        members = [i for i, spec in enumerate(group.buffer.layout.specs) if spec.group == part.group]
        steps = [float(scalars[index].get("step", 0)) for index in members]
        step = max(float(scalars[index].get("step", 0)) for index in slots)
        keys = {key: dtype for index in slots for key, dtype in dtypes[index].items()}
        self._fill_range(
            part, {**scalars[slots[0]], "step": torch.tensor(step, dtype=torch.float32, device="cpu")}, keys
        )
        if len(part.segments) > 1 or part.segments[0].stop - part.segments[0].start < part.stop - part.start:
            # A range of one parameter counts in "step" alone.
            self.optimizer.state[part.param]["steps"] = torch.tensor([steps], dtype=torch.float32, device="cpu")
        for key, first in self.by_parameter.items():
            if any(key in scalars[index] for index in members):
                values = [float(scalars[index].get(key, first)) for index in members]
                self.optimizer.state[part.param][key] = torch.tensor(
                    [values], dtype=torch.float32, device=part.param.device
                )

    @property
    def by_parameter(self) -> Mapping[str, float]:
        """State of one number for each parameter of a range, and what it begins with."""
        return self.optimizer.by_parameter if isinstance(self.optimizer, WholeTensorOptimizer) else {}

    @optimizer_step()
    def _fill_range(self, part: ParameterRange, scalars: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> None:
        if not scalars and not dtypes:
            return
        options = self.optimizer.param_groups[part.group]
        is_on_device = bool(options.get("fused") or options.get("capturable"))
        state: dict[str, Any] = {}
        for key, value in scalars.items():
            is_moved = isinstance(value, torch.Tensor) and is_on_device
            state[key] = value.to(part.param.device, copy=True) if is_moved else copy.copy(value)
            if isinstance(value, torch.Tensor) and not is_moved:
                state[key] = value.clone()
        for key, dtype in dtypes.items():
            state[key] = torch.zeros_like(part.param.detach(), dtype=dtype)
        self.optimizer.state[part.param] = state


def _runs(whole: ParameterRange, labels: Sequence[Any]) -> list[_Run]:
    """The parts of a range whose neighbouring parameters have equal labels. ``labels``: by slot."""
    runs: list[_Run] = []
    for segment in whole.segments:
        start, slot = whole.start + segment.start, segment.slot
        if runs and labels[runs[-1][2]] == labels[slot]:
            start, _, slot = runs.pop()
        runs.append((start, whole.start + segment.stop, slot))
    return runs


def _label(scalars: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> tuple[Any, ...]:
    """Equal where two parameters may lie in one range. (A tensor's ``repr`` shows four digits only.)"""
    numbers = {
        key: read_vector(value.reshape(-1), when_fake=0.0) if isinstance(value, torch.Tensor) else value
        for key, value in scalars.items()
    }
    return sorted((key, repr(number)) for key, number in numbers.items()), sorted(dtypes.items(), key=str)


def _cut(value: Any, numel: int, low: int, high: int) -> Any:
    """The part of one state entry that belongs to ``[low, high)`` of its range."""
    if is_elementwise(value, numel) and numel != 1:
        return value[low:high]
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return value.clone()
        raise OptimizerError(
            f"optimizer state of shape {tuple(value.shape)} cannot be cut for a parameter range of {numel} elements.",
            do="use an elementwise optimizer, or make sure that every parameter gets a gradient in every step.",
            code="optimizer-state-shape",
        )
    return value


# State in another format than the main parameters: a step computes in fp32, and rounds what it has computed.
#
#    main parameter (bf16)     -> fp32 \
#    gradient                  -> fp32  > the optimizer's step -> main parameter and state, each in its format
#    state (bf16, int8, fp8)   -> fp32 /


def in_fp32(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """For each parameter one in fp32 that has its optimizer state, in fp32; the parameter itself where it is fp32.

    Memory: 4 bytes for each element of a 16-bit parameter or state, or of a state in blocks, until ``round_back``.
    """
    wide = [p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float()) for p in params]
    for param, computed in zip(params, wide, strict=True):
        if state := optimizer.state.pop(param, None):
            numel = param.numel()
            optimizer.state[computed] = {k: _cast(v, numel, torch.float32) for k, v in decoded(state).items()}
    return wide


@torch.no_grad()
def round_back(
    optimizer: torch.optim.Optimizer,
    ranges: Sequence[tuple[ParameterGroup, ParameterRange]],
    wide: Sequence[torch.nn.Parameter],
    dtype: torch.dtype,
    step_number: int | None = None,
) -> None:
    """After the step: give the ranges what ``in_fp32`` returned, and their state back, in ``dtype`` and its format.

    Args:
        step_number: round parameters to bf16 stochastically, with this step's random bits; None: to the nearest.
    """
    for (group, part), computed in zip(ranges, wide, strict=True):
        if computed is not part.param and step_number is not None:
            specs = group.buffer.layout.specs
            round_stochastically(computed.detach(), part.param, part.segments, specs, step_number)
        elif computed is not part.param:
            part.param.copy_(computed)
        if state := optimizer.state.pop(computed, None):
            state = {key: _cast(value, computed.numel(), dtype) for key, value in state.items()}
            optimizer.state[part.param] = group.encoded(part, state)


def _cast(value: Any, numel: int, dtype: torch.dtype) -> Any:
    """An entry of the state; in ``dtype`` where it has one floating-point number for each element of its range."""
    return value.to(dtype) if is_elementwise(value, numel) and value.is_floating_point() else value
