"""ZenFlow: the important columns of each matrix are updated in every step on the device, the other ones on the host,
once for several gradients.

    with an interval of 2       step 1    step 2          step 3    step 4          step 5
    device                      columns   columns         columns   columns         columns
    host                        sum       sum, update 1   sum       sum, update 2   sum
    the model sees                        update 1                  update 2                  without ``overlap_step``
                                                                    update 1                  with it

Both parts have the optimizer's rule and hyperparameters, and each counts its own updates for the bias correction:
``step`` those of the important columns, ``zenflow_rest`` those of the others. An update of the others has the mean of
``zenflow_count`` scaled gradients, whose sum is ``zenflow_sum``. An element is in one part at a time
(``zenflow_selected``), so it has one moment of each kind. Where columns are chosen (in step ``zenflow_chosen``), those
that change the part take their moments along, multiplied by what the bias corrections of the two counts differ by.

Main parameters and moments of the important columns are on the device; on the host after ``synchronize()``. The host
sums and updates whole ranges, these columns included: what it writes there is overwritten before anything reads it. So
no kernel has masks, and all of it is optimizer state by element, which a checkpoint has and any layout loads.

With ``overlap_step`` an update is waited for, and its parameters are copied, in the step in which the next one starts:
a point of the program, so the numbers do not depend on time. Copies, and writes of important columns over them, are in
the stream of copies, and the next use of a unit waits for them. A checkpoint before the step has ``zenflow_shown``, the
parameters without it, and with an interval of ``auto`` ``zenflow_due``: the next step has to update.

Source: ZenFlow (arXiv:2505.12242).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.comm.side_stream import CopyDone
from shoal.config.zero import ZenFlowSection
from shoal.device import host_empty, is_fake
from shoal.offload.cpu_optimizer import CpuOptimizer, RangeUpdate, offloaded_gradient
from shoal.optim.columns import have_grown, important_columns, in_columns, no_sizes, num_columns, sizes_of
from shoal.optim.host_rules import Rule
from shoal.sharding.param_group import ParameterGroup, ParameterRange
from shoal.streams import (
    HostThread,
    ThreadResult,
    host_access,
    host_memory,
    keep_for_current_stream,
    name_memory,
    simulation,
)

_BLOCK_NUMEL = 256 * 1024  # elements of a gradient that are scaled and added at once, in the cache
_NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(eq=False)
class _ImportantColumns:
    """The important columns of one group, gathered: range after range, and in each in the order of its elements."""

    parts: dict[torch.nn.Parameter, slice]  # by the range's ``param``, where it lies in the tensors
    positions: torch.Tensor  # in the owned range, on the device. Shape: [numel]
    on_host: torch.Tensor  # the same
    tensors: list[torch.Tensor]  # main parameters and moments, fp32. Each [numel]
    gradient: torch.Tensor | None = None  # of the backward passes so far, where the device keeps no gradient
    version: tuple[int, int] | None = None  # of ``gradient``
    stored: CopyDone = field(default_factory=CopyDone)  # the last copy to ``tensors`` in host memory


@dataclass(eq=False)
class _LateUpdate:
    """An update of other columns that the model does not see yet."""

    ranges: list[ParameterRange]
    work: ThreadResult[None] | None  # None: it was loaded, done
    is_rounded: bool  # False: the main parameters may have changed since


class ZenFlow(CpuOptimizer):
    """See the module. The arguments are those of ``CpuOptimizer``, and:

    Args:
        section: of the config.
        step_number: counts the steps.

    Memory: on the device 20 bytes for each element of an important column (8 with ``offload``), on the host 5 for each
    element and 8 more for those, and 4 for each element with ``overlap_step``.
    Communicates: where columns are chosen, one all_reduce of 8 bytes a column; with ``update_interval`` auto in each
    step one of 32 bytes a parameter.
    """

    def __init__(self, *args: Any, section: ZenFlowSection, step_number: Callable[[], int], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._section = section
        self._is_auto = section.update_interval == "auto"
        self._step_number = step_number
        self._columns: dict[ParameterGroup, _ImportantColumns] = {}
        self._chosen: dict[ParameterGroup, int] = {}  # the number of the step in which they were chosen; -1: never
        self._sums: dict[ParameterGroup, ThreadResult[torch.Tensor]] = {}  # the last addition of a gradient
        self._late: dict[ParameterGroup, _LateUpdate] = {}
        self._late_thread: HostThread | None = None
        self._spare: dict[torch.nn.Parameter, torch.Tensor] = {}  # sums of the last interval, which an update reads
        self._returned: dict[ParameterGroup, CopyDone] = {}  # the last copy from the rounded parameters
        self._merged: dict[ParameterGroup, CopyDone] = {}  # the last write to the parameters in the stream of copies

    def _nbytes(self, *, is_on_host: bool) -> int:
        held = [columns.on_host if is_on_host else columns.positions for columns in self._columns.values()]
        if self._section.offload is is_on_host:
            held += [tensor for columns in self._columns.values() for tensor in columns.tensors]
        return sum(tensor.nbytes for tensor in held)

    @property
    def host_nbytes(self) -> int:
        spare = sum(tensor.nbytes for tensor in self._spare.values())
        return super().host_nbytes + spare + self._nbytes(is_on_host=True)

    @property
    def device_nbytes(self) -> int:
        return self._nbytes(is_on_host=False)

    # gradients

    def send_gradient(self, group: ParameterGroup, *, at_step: bool) -> None:
        offloaded, columns = offloaded_gradient(group), self._columns.get(group)
        if offloaded is not None and columns is not None:  # the device's memory is freed once it has been copied
            if offloaded.part is None:
                columns.gradient = offloaded.owned().index_select(0, columns.positions)
            elif columns.gradient is not None:
                columns.gradient.add_(offloaded.part.index_select(0, columns.positions))
        super().send_gradient(group, at_step=at_step)
        if columns is not None:
            columns.version = group.gradient.version

    def drop_gradient(self, group: ParameterGroup) -> None:
        super().drop_gradient(group)
        if group in self._columns:
            self._columns[group].gradient = None

    def _before_write(self, group: ParameterGroup) -> None:
        self.finish(group)
        if group in self._sums:
            self._sums[group].result()

    def _column_gradient(self, group: ParameterGroup, columns: _ImportantColumns) -> torch.Tensor:
        """The gradient of the important columns, on the device. Shape: [numel]."""
        own, columns.gradient = columns.gradient, None
        if offloaded_gradient(group) is None:
            return group.gradient.owned().index_select(0, columns.positions)
        if own is not None and columns.version == group.gradient.version:
            return own
        return self._uploaded(self.gradient(group).index_select(0, columns.on_host), group)

    def _uploaded(self, host: torch.Tensor, group: ParameterGroup, *, blocks: bool = True) -> torch.Tensor:
        """Values of the host on the device. Order: with ``blocks`` blocks the host, which may free them then."""
        target = torch.empty(host.shape, dtype=host.dtype, device=group.buffer.device)
        done = self._copy(host, target)
        done.wait()
        if blocks:
            done.block()
        return target

    def _on_host(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory. Order: blocks the host."""
        host = host_empty(values.numel(), values.dtype, values.device, is_pinned=self._is_pinned)
        self._copy(values, host).block()
        return host

    # the step

    def start(self, group: ParameterGroup, ranges: Sequence[ParameterRange], gradient_scale: float) -> bool:
        number, interval = self._step_number(), self._section.update_interval
        if is_fake(group.main) and simulation() is None:
            return False
        if number < self._section.full_warm_up_rounds:
            return super().start(group, ranges, gradient_scale)
        is_due = self._is_auto and self._is_due(group)
        for part in ranges:
            self._make_state(part)
        if self._must_choose(group, number):
            self._choose(group, ranges, number)
        columns = self._columns.get(group)
        if columns is None or any(part.param not in columns.parts for part in ranges):
            self.synchronize(group)
            columns = self._columns[group] = self._load(group)
        self._add_up(group, ranges, gradient_scale)
        due = []
        for part in group.ranges:
            state = self._state(part)
            count, was_due = state.get("zenflow_count", 0), state.pop("zenflow_due", False)
            if count and (is_due or was_due if interval == "auto" else count >= interval):
                due.append(part)
        if due:
            self._merge(group)
            self._start_rest(group, due)
        self._update_columns(group, columns, ranges, gradient_scale)
        return True

    def _state(self, part: ParameterRange) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(part.param, {})
        return state

    def _make_state(self, part: ParameterRange) -> None:
        state, main = self._optimizer.state[part.param], part.param.detach()
        if "exp_avg" not in state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(main) for name in _NAMES}
        if "zenflow_sum" not in state:
            # Where a parameter's first gradient comes after a choice, none of it is important until the next one.
            state["zenflow_selected"] = in_columns((), main.numel(), {}).zero_()
            state["zenflow_sum"] = torch.zeros_like(main)
            count = 0 if is_fake(state["step"]) else int(state["step"])
            state |= {"zenflow_rest": count, "zenflow_count": 0, "zenflow_chosen": -1}
        state.pop("zenflow_shown", None)

    # the other columns

    def _add_up(self, group: ParameterGroup, ranges: Sequence[ParameterRange], scale: float) -> None:
        """Add the scaled gradient to the sums, on the thread of the updates."""
        transfer = self._transfer(group)
        gradient, arrival = transfer.gradient, transfer.arrival
        assert gradient is not None and arrival is not None
        targets = []
        for part in ranges:
            state = self._state(part)
            targets.append((part, state["zenflow_sum"], state["zenflow_selected"], not state["zenflow_count"]))
            state["zenflow_count"] += 1
        specs, is_auto = group.buffer.layout.specs, self._is_auto and not is_fake(gradient)

        def run() -> torch.Tensor:
            arrival.block()
            sizes = no_sizes(specs)
            with torch.no_grad():
                for part, total, mask, is_first in targets:
                    values = gradient[part.start : part.stop]
                    _add(total, values, scale, is_first=is_first)
                    for segment in part.segments if is_auto else ():
                        sizes[segment.slot] += sizes_of(
                            *(t[segment.start : segment.stop] for t in (total, values, mask))
                        )
                sizes[:, 2] *= scale
            return sizes

        self._sums[group] = self._on_thread(run)

    def _is_due(self, group: ParameterGroup) -> bool:
        """With an interval of ``auto``: True if the sums, as the last step left them, have to be applied.

        Order, Communicates: as ``have_grown``.
        """
        buffer, share = group.buffer, self._section.auto_ratio
        sizes = self._sums[group].result() if group in self._sums else no_sizes(buffer.layout.specs)
        return have_grown(sizes, share, buffer.comm, buffer.device)

    def _start_rest(self, group: ParameterGroup, due: Sequence[ParameterRange]) -> None:
        """Start to update the other columns of ranges with the mean of what was summed."""
        assert self.kind is not None
        is_late, returned, summed = self._section.overlap_step, self._returned.get(group), self._sums.get(group)
        updates = []
        for part in due:
            state = self._state(part)
            total, count = state["zenflow_sum"], state["zenflow_count"]
            state |= {"zenflow_count": 0, "zenflow_rest": state["zenflow_rest"] + 1}
            if is_late:
                spare = self._spare.get(part.param)
                if spare is None:
                    spare = host_memory(torch.zeros(total.numel()), is_pinned=False)
                state["zenflow_sum"], self._spare[part.param] = spare, total
            rule = Rule.of(self.kind, self._optimizer.param_groups[part.group], state["zenflow_rest"])
            updates.append(RangeUpdate(part, rule, self._hyper(part), state, total, 1 / count))

        def before() -> None:
            if returned is not None:
                returned.block()
            if is_late and summed is not None:
                summed.result()

        if is_late and self._late_thread is None:
            self._late_thread = HostThread("shoal-zenflow")
        update = self._submit(group, updates, 1.0, is_ahead=False, before=before, thread=self._late_thread)
        if is_late:
            self._late[group] = _LateUpdate(list(due), update.work, is_rounded=True)
        else:
            self._transfer(group).update = update

    def _merge(self, group: ParameterGroup) -> None:
        """Let the model see the last update of the other columns, if it does not yet."""
        self.finish(group)
        late = self._late.pop(group, None)
        if late is None:
            return
        if late.work is not None:
            self._wait(late.work)
        for part in () if late.is_rounded else late.ranges:
            self.rounded(group)[part.start : part.stop].copy_(part.param.detach())
        self._returned[group] = self._merged[group] = self.copy_back(group, late.ranges)

    def finish(self, group: ParameterGroup) -> None:
        self._merged.pop(group, CopyDone()).wait()
        super().finish(group)

    def send_back(self, group: ParameterGroup, ranges: Sequence[ParameterRange]) -> CopyDone:
        done = self._returned[group] = super().send_back(group, ranges)
        self._show_again(group)
        return done

    def _show_again(self, group: ParameterGroup) -> None:
        """Round the important columns into the parameters as the last step has left them."""
        if columns := self._columns.get(group):
            self._show(group, columns, self._on_device(group, columns.tensors[:1])[0])

    # the important columns

    def steps_between_choices(self) -> int | None:
        """Steps after which the columns are chosen anew; None: never."""
        return self._section.steps_between_choices(self._section.steps_per_epoch or self.steps_per_epoch())

    def _must_choose(self, group: ParameterGroup, number: int) -> bool:
        if group not in self._chosen:  # the first step, or the first one after a load: ranks may have no range
            own = max((self._state(part).get("zenflow_chosen", -1) for part in group.ranges), default=-1)
            self._chosen[group] = max(group.buffer.comm.gather_objects(own, label="choice of columns"))
        chosen, between = self._chosen[group], self.steps_between_choices()
        return chosen < 0 or (between is not None and not 0 <= number - chosen < between)

    def _choose(self, group: ParameterGroup, ranges: Sequence[ParameterRange], number: int) -> None:
        """Choose the important columns by this step's gradient.

        Order: blocks the host until the gradient is there; sums of the steps before are applied first.
        """
        if due := [part for part in group.ranges if self._state(part).get("zenflow_count")]:
            self._merge(group)
            self._start_rest(group, due)
        self._merge(group)
        self._show_again(group)
        self._store(group)
        gradient, buffer = self.gradient(group), group.buffer
        parts = [
            (segment, gradient[part.start + segment.start : part.start + segment.stop])
            for part in ranges
            for segment in part.segments
        ]
        specs = buffer.layout.specs
        by_slot = enumerate(important_columns(parts, specs, self._section.topk_ratio, buffer.comm, buffer.device))
        chosen = {slot: columns for slot, columns in by_slot if num_columns(specs[slot])}
        for part in ranges:
            state, mask = self._state(part), in_columns(part.segments, part.stop - part.start, chosen)
            self._convert(part, state, mask)
            state |= {"zenflow_selected": mask, "zenflow_chosen": number}
        self._chosen[group] = number

    def _convert(self, part: ParameterRange, state: dict[str, Any], mask: torch.Tensor) -> None:
        """Multiply the moments of elements that change the part, so that their corrected values stay the same."""
        hyper, was = self._optimizer.param_groups[part.group], state["zenflow_selected"]
        if is_fake(mask) or not hyper.get("bias_correction", True):
            return
        step, rest = float(state["step"]), state["zenflow_rest"]
        for name, beta in zip(_NAMES, hyper["betas"], strict=True):
            ratio = (1 - beta**step) / (1 - beta**rest) if step != rest else 1.0
            for changed, factor in ((mask & ~was, ratio), (was & ~mask, 1 / ratio)):
                if factor != 1.0:
                    state[name][changed] *= factor

    def _load(self, group: ParameterGroup) -> _ImportantColumns:
        """Gather the important columns of the host."""
        parts, positions, values, end = {}, [], [], 0
        for part in group.ranges:
            if "zenflow_selected" not in (state := self._state(part)):
                continue
            index = self._index(group, part, state["zenflow_selected"])
            sources = (part.param.detach(), *(state[name] for name in _NAMES))
            values.append([source.index_select(0, index) for source in sources])
            positions.append(index + part.start)
            parts[part.param] = slice(end, end + len(index))
            end += len(index)
        on_host = torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64)
        gathered = [torch.cat(of_name) for of_name in zip(*values, strict=True)] or [group.main[:0]] * 3
        keep = self._on_host if self._section.offload else lambda values: self._uploaded(values, group)
        tensors = [name_memory(keep(each), f"important columns of unit {group.label!r}") for each in gathered]
        return _ImportantColumns(parts, self._uploaded(on_host, group), on_host, tensors)

    def _index(self, group: ParameterGroup, part: ParameterRange, mask: torch.Tensor) -> torch.Tensor:
        """Where the mask is true; and padding, which a checkpoint does not have, so that vectors keep their length."""
        if not is_fake(mask):
            whole = torch.ones_like(mask)
            for each in part.segments:
                whole[each.start : each.stop] = mask[each.start : each.stop]
            return whole.nonzero().view(-1)
        specs, ratio = group.buffer.layout.specs, self._section.topk_ratio
        shares = [(s.stop - s.start) * (ratio if num_columns(specs[s.slot]) else 1) for s in part.segments]
        return host_memory(torch.zeros(int(sum(shares)), dtype=torch.int64), is_pinned=False)

    def _store(self, group: ParameterGroup) -> None:
        """Store the important columns on the host, where all state is then."""
        columns = self._columns.pop(group, None)
        if columns is None:
            return
        self._merged.pop(group, CopyDone()).wait()
        columns.stored.block()
        tensors = columns.tensors if self._section.offload else [self._on_host(tensor) for tensor in columns.tensors]
        for part in group.ranges:
            if (where := columns.parts.get(part.param)) is not None:
                index, state = columns.on_host[where] - part.start, self._state(part)
                targets = (part.param.detach(), *(state[name] for name in _NAMES))
                for target, values in zip(targets, tensors, strict=True):
                    target.index_copy_(0, index, values[where])

    def _on_device(self, group: ParameterGroup, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Tensors of important columns, where the device computes with them."""
        return [self._uploaded(each, group, blocks=False) for each in tensors] if self._section.offload else tensors

    def _update_columns(
        self, group: ParameterGroup, columns: _ImportantColumns, ranges: Sequence[ParameterRange], scale: float
    ) -> None:
        """Update the important columns on the device. Does not block the host, unless they were chosen just now."""
        gradient, tensors = self._column_gradient(group, columns), self._on_device(group, columns.tensors)
        for part in ranges:
            state, where = self._state(part), columns.parts[part.param]
            if where.start < where.stop:
                main, *moments = (tensor[where] for tensor in tensors)
                values = gradient[where].float() if scale == 1.0 else gradient[where].float() * scale
                self._rule(part, state).kernel(group.buffer.device)(main, values, moments, None)
            state["step"] += 1
        for new, old in zip(tensors, columns.tensors, strict=True):
            if new is not old:
                columns.stored = self._copy(new, old, is_source_freed=True)
        self._show(group, columns, tensors[0])

    def _show(self, group: ParameterGroup, columns: _ImportantColumns, main: torch.Tensor) -> None:
        """Round the important columns into the parameters, after the copies to these."""
        values, copies = main.to(group.buffer.dtype), self._copies if group in self._merged else None
        with torch.no_grad(), nullcontext(CopyDone()) if copies is None else copies.queued() as done:
            keep_for_current_stream(values)
            group.buffer.shard.index_copy_(0, columns.positions, values)
        if copies is not None:
            self._merged[group] = done

    # consistency

    def synchronize(self, group: ParameterGroup) -> None:
        if group in self._sums:
            self._sums[group].result()
        if (late := self._late.get(group)) is not None:
            late.is_rounded = False
            if late.work is not None:
                self._wait(late.work)
        super().synchronize(group)
        self._store(group)

    def before_save(self) -> None:
        for group in self._sums if self._is_auto else ():
            is_due = self._is_due(group)
            for part in group.ranges:
                self._state(part)["zenflow_due"] = is_due
        for group, late in self._late.items():
            self.finish(group)
            for part in late.ranges:
                self._state(part)["zenflow_shown"] = self._on_host(group.buffer.shard[part.start : part.stop])

    def state_was_loaded(self, groups: Sequence[ParameterGroup]) -> None:
        for each in (self._columns, self._chosen, self._late, self._spare, self._sums):
            each.clear()
        for group in groups:
            if shown := [part for part in group.ranges if "zenflow_shown" in self._state(part)]:
                self._late[group] = _LateUpdate(shown, None, is_rounded=False)

    def parameters_of(self, group: ParameterGroup) -> torch.Tensor:
        if group not in self._late:
            return group.main
        values = group.main.clone()
        for part in self._late[group].ranges:
            values[part.start : part.stop] = self._state(part).get("zenflow_shown", part.param.detach())
        return values

    def close(self) -> None:
        if self._late_thread is not None:
            self._late_thread.close()
        super().close()


def _add(total: torch.Tensor, gradient: torch.Tensor, scale: float, *, is_first: bool) -> None:
    """``total += scale * gradient`` in fp32; with ``is_first`` in place of what it had."""
    if is_fake(total):
        host_access("sum of gradients", reads=[gradient] if is_first else [gradient, total], writes=[total])
        return
    for target, source in zip(total.split(_BLOCK_NUMEL), gradient.split(_BLOCK_NUMEL), strict=True):
        values = source if scale == 1.0 else source.float() * scale
        target.copy_(values) if is_first else target.add_(values)
