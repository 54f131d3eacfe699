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

    parameters, on the device    written in the stream of copies: updates of the host, important columns over them. The
                                 next use of the unit waits for the last write (``CpuOptimizer.finish``).
    sums, on the host            one thread adds; with ``overlap_step`` another one updates, and the two have two sums
                                 in turn.

With ``overlap_step`` an update is waited for, and its parameters are copied, in the step in which the next one starts:
a point of the program, so the numbers do not depend on time. A checkpoint before the step has ``zenflow_shown``, the
parameters without it, and with an interval of ``auto`` ``zenflow_due``: the next step has to update.

Source: ZenFlow (arXiv:2505.12242).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shoal.comm.side_stream import CopyDone
from shoal.config.zero import ZenFlowSection
from shoal.device import host_empty, is_fake
from shoal.offload.cpu_optimizer import CpuOptimizer, RangeUpdate, offloaded_gradient
from shoal.optim.columns import have_grown, in_important_columns, sizes_of
from shoal.sharding.param_group import ParameterGroup, ParameterRange
from shoal.streams import ThreadResult, host_access, host_memory, keep_for_current_stream, name_memory, simulation

_BLOCK_NUMEL = 256 * 1024  # elements of a gradient that are scaled and added at once, in the cache
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(eq=False)
class _ImportantColumns:
    """The important columns of one group, gathered: range after range, and in each in the order of its elements."""

    parts: dict[ParameterRange, slice]  # where each range lies in the tensors
    positions: torch.Tensor  # in the owned range, on the device. Shape: [numel]
    on_host: torch.Tensor  # the same
    tensors: list[torch.Tensor]  # main parameters and moments, fp32. Each [numel]
    gradient: torch.Tensor | None = None  # of the backward passes so far, where the sum is on the host
    stored: CopyDone = field(default_factory=CopyDone)  # the last copy to ``tensors`` in host memory


@dataclass(eq=False)
class _Flow:
    """What one group has in addition to optimizer state."""

    columns: _ImportantColumns | None = None  # None: all state is on the host
    chosen: int | None = None  # the number of the step in which they were chosen; -1: never; None: not known
    addition: ThreadResult[torch.Tensor] | None = None  # of the last gradient to the sums; gives ``sizes_of``
    late: list[ParameterRange] = field(default_factory=list)  # the model does not see their last update yet
    late_work: ThreadResult[None] | None = None  # None: it is done, and main parameters may have changed since
    was_due: bool = False  # as ``_is_due`` was in the run that saved what was loaded
    spare: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)  # sums that late updates read


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
        self._interval = math.inf if section.update_interval == "auto" else section.update_interval
        self._step_number = step_number
        self._flows: defaultdict[ParameterGroup, _Flow] = defaultdict(_Flow)

    def _tensors(self, *, is_on_host: bool) -> Iterator[torch.Tensor]:
        for flow in self._flows.values():
            yield from flow.spare.values() if is_on_host else ()
            if flow.columns is not None:
                yield flow.columns.on_host if is_on_host else flow.columns.positions
                yield from flow.columns.tensors if self._section.offload is is_on_host else ()

    @property
    def host_nbytes(self) -> int:
        return super().host_nbytes + sum(tensor.nbytes for tensor in self._tensors(is_on_host=True))

    @property
    def device_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors(is_on_host=False))

    # the step

    def start(self, group: ParameterGroup, ranges: Sequence[ParameterRange], gradient_scale: float) -> bool:
        number, flow = self._step_number(), self._flows[group]
        if is_fake(group.main) and simulation() is None:
            return False
        if number < self._section.full_warm_up_rounds:
            return super().start(group, ranges, gradient_scale)
        interval = 1 if self._is_due(group) else self._interval
        for part in ranges:
            self._make_state(part)
        if self._must_choose(group, number):
            self._choose(group, ranges, number)
        if flow.columns is None or not flow.columns.parts.keys() >= set(ranges):
            self.synchronize(group)
            flow.columns = self._load(group)
        self._add_up(group, ranges, gradient_scale)
        self._update_rest(group, interval)
        self._update_columns(group, flow.columns, ranges, gradient_scale)
        return True

    def _state(self, part: ParameterRange) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(part.param, {})
        return state

    def _make_state(self, part: ParameterRange) -> None:
        state, zeros = self._optimizer.state[part.param], partial(torch.zeros_like, part.param.detach())
        if "exp_avg" not in state:
            state |= {
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                **{name: zeros() for name in _MOMENTS},
            }
        if "zenflow_sum" not in state:
            # Where a parameter's first gradient comes after a choice, none of it is important until the next one.
            state |= {"zenflow_selected": zeros(dtype=torch.bool), "zenflow_sum": zeros()}
            count = 0 if is_fake(state["step"]) else int(state["step"])
            state |= {"zenflow_rest": count, "zenflow_count": 0, "zenflow_chosen": -1}
        for key in ("zenflow_shown", "zenflow_due"):
            state.pop(key, None)

    # the other columns

    def _add_up(self, group: ParameterGroup, ranges: Sequence[ParameterRange], scale: float) -> None:
        """Add the scaled gradient to the sums, on the thread of the additions."""
        transfer, specs, targets = self._transfers[group], group.buffer.layout.specs, []
        for part in ranges:
            state = self._state(part)
            targets.append((part, state["zenflow_sum"], state["zenflow_selected"], not state["zenflow_count"]))
            state["zenflow_count"] += 1
        is_auto = self._interval == math.inf and not is_fake(group.main)

        def run() -> torch.Tensor:
            gradient = transfer.values()
            sizes = host_memory(torch.zeros(len(specs), 4, dtype=torch.float64, device="cpu"), is_pinned=False)
            with torch.no_grad():
                for part, total, mask, is_first in targets:
                    values = gradient[part.start : part.stop]
                    _add(total, values, scale, is_first=is_first)
                    for segment in part.segments if is_auto else ():
                        of_segment = slice(segment.start, segment.stop)
                        sizes[segment.slot] += sizes_of(total[of_segment], values[of_segment], mask[of_segment])
                sizes[:, 2] *= scale
            return sizes

        self._flows[group].addition = self._on_thread(run)

    def _is_due(self, group: ParameterGroup) -> bool:
        """With an interval of ``auto``: True if the sums, as the last step left them, have to be applied.

        Order, Communicates: as ``have_grown``.
        """
        flow, buffer = self._flows[group], group.buffer
        if self._interval != math.inf or flow.addition is None:
            return flow.was_due
        return have_grown(flow.addition.result(), self._section.auto_ratio, buffer.comm, buffer.device)

    def _update_rest(self, group: ParameterGroup, interval: float) -> None:
        """Start to update the other columns of ranges whose sums have this many gradients, with their mean."""
        flow, is_late, updates = self._flows[group], self._section.overlap_step, []
        for part in group.ranges:
            state = self._state(part)
            if (count := state.get("zenflow_count", 0)) < interval:
                continue
            total, number = state["zenflow_sum"], state["zenflow_rest"] + 1
            if is_late:
                if (spare := flow.spare.get(part.param)) is None:
                    spare = host_memory(torch.zeros(total.numel(), dtype=torch.float32, device="cpu"), is_pinned=False)
                state["zenflow_sum"], flow.spare[part.param] = spare, total
            state |= {"zenflow_count": 0, "zenflow_rest": number}
            updates.append(RangeUpdate(part, self._rule(part, state, number), state, total, 1 / count))
        if not updates:
            return
        self._merge(group)
        thread = "zenflow" if is_late else "cpu-optimizer"
        update = self._submit(group, updates, after=flow.addition, thread=thread)
        if is_late:
            flow.late, flow.late_work = [update.range for update in updates], update.work
        else:
            self._transfers[group].update = update

    def _merge(self, group: ParameterGroup) -> None:
        """Let the model see the last update of the other columns, if it does not yet; not the columns over them."""
        self.finish(group)
        flow = self._flows[group]
        if flow.late_work is not None:
            self._wait(flow.late_work)
        for part in flow.late if flow.late_work is None else ():
            self.rounded(group)[part.start : part.stop].copy_(part.param.detach())
        super().copy_back(group, flow.late)
        flow.late, flow.late_work = [], None

    def copy_back(self, group: ParameterGroup, ranges: Sequence[ParameterRange]) -> None:
        super().copy_back(group, ranges)
        if columns := self._flows[group].columns:
            self._show(group, columns, self._on_device(group, columns.tensors[:1])[0])

    # the choice

    def steps_between_choices(self) -> int | None:
        """Steps after which the columns are chosen anew; None: never."""
        return self._section.steps_between_choices(self._section.steps_per_epoch or self.steps_per_epoch())

    def _must_choose(self, group: ParameterGroup, number: int) -> bool:
        flow = self._flows[group]
        if flow.chosen is None:  # ranks may have no range
            own = max((self._state(part).get("zenflow_chosen", -1) for part in group.ranges), default=-1)
            flow.chosen = max(group.buffer.comm.gather_objects(own, label="choice of columns"))
        between = self.steps_between_choices()
        return flow.chosen < 0 or (between is not None and not 0 <= number - flow.chosen < between)

    def _choose(self, group: ParameterGroup, ranges: Sequence[ParameterRange], number: int) -> None:
        """Choose the important columns by this step's gradient.

        Order: blocks the host until the gradient is there; sums of the steps before are applied first.
        """
        self._update_rest(group, 1)
        self.synchronize(group)
        self._merge(group)
        buffer, share = group.buffer, self._section.topk_ratio
        masks = in_important_columns(
            ranges, self.gradient(group), buffer.layout.specs, share, buffer.comm, buffer.device
        )
        for part, mask in zip(ranges, masks, strict=True):
            state = self._state(part)
            self._convert(part, state, mask)
            state |= {"zenflow_selected": mask, "zenflow_chosen": number}
        self._flows[group].chosen = number

    def _convert(self, part: ParameterRange, state: dict[str, Any], mask: torch.Tensor) -> None:
        """Multiply the moments of elements that change the part, so that their corrected values stay the same."""
        if is_fake(mask):
            return
        was, own = state["zenflow_selected"], self._rule(part, state, float(state["step"]))
        rest = self._rule(part, state, state["zenflow_rest"])
        for name, beta in zip(_MOMENTS, (own.beta1, own.beta2), strict=True):
            if own.step != rest.step:
                ratio = (1 - beta**own.step) / (1 - beta**rest.step)
                state[name][mask & ~was] *= ratio
                state[name][was & ~mask] *= 1 / ratio

    # the important columns

    def _load(self, group: ParameterGroup) -> _ImportantColumns:
        """Gather the important columns of the host."""
        parts, positions, values, end = {}, [group.main.new_zeros(0, dtype=torch.int64)], [[group.main[:0]] * 3], 0
        for part in group.ranges:
            if "zenflow_selected" in (state := self._state(part)):
                index = self._index(part, state["zenflow_selected"])
                values.append([source.index_select(0, index) for source in self._sources(part)])
                positions.append(index + part.start)
                parts[part] = slice(end, end := end + len(index))
        on_host = torch.cat(positions)
        keep = self._on_host if self._section.offload else partial(self._uploaded, group)
        tensors = [
            name_memory(keep(torch.cat(of_name)), f"important columns of unit {group.label!r}")
            for of_name in zip(*values, strict=True)
        ]
        return _ImportantColumns(parts, self._uploaded(group, on_host), on_host, tensors)

    def _sources(self, part: ParameterRange) -> list[torch.Tensor]:
        """Main parameters and moments of a range, on the host."""
        return [part.param.detach(), *(self._state(part)[name] for name in _MOMENTS)]

    def _index(self, part: ParameterRange, mask: torch.Tensor) -> torch.Tensor:
        """Where the mask is true; and padding, which a checkpoint does not have, so that vectors keep their length."""
        if is_fake(mask):
            numel = int(self._section.topk_ratio * mask.numel())  # parameters of one dim, which are whole, are small
            return host_memory(torch.zeros(numel, dtype=torch.int64, device="cpu"), is_pinned=False)
        whole = torch.ones_like(mask)
        for each in part.segments:
            whole[each.start : each.stop] = mask[each.start : each.stop]
        return whole.nonzero().view(-1)

    def _store(self, group: ParameterGroup) -> None:
        """Store the important columns on the host, where all state is then."""
        columns, self._flows[group].columns = self._flows[group].columns, None
        if columns is None:
            return
        columns.stored.block()
        tensors = columns.tensors if self._section.offload else [self._on_host(tensor) for tensor in columns.tensors]
        for part, where in columns.parts.items():
            index = columns.on_host[where] - part.start
            for target, values in zip(self._sources(part), tensors, strict=True):
                target.index_copy_(0, index, values[where])

    def _update_columns(
        self, group: ParameterGroup, columns: _ImportantColumns, ranges: Sequence[ParameterRange], scale: float
    ) -> None:
        """Update the important columns on the device. Does not block the host, unless they were chosen just now."""
        gradient = self._column_gradient(group, columns).float().mul_(scale)
        tensors = self._on_device(group, columns.tensors)
        for part in ranges:
            state, where = self._state(part), columns.parts[part]
            if where.start < where.stop:
                main, *moments = (tensor[where] for tensor in tensors)
                self._rule(part, state).kernel(group.buffer.device)(main, gradient[where], moments, None)
            state["step"] += 1
        for new, old in zip(tensors, columns.tensors, strict=True):
            if new is not old:
                columns.stored = self._copy(new, old, is_source_freed=True)
        self._show(group, columns, tensors[0])

    def _show(self, group: ParameterGroup, columns: _ImportantColumns, main: torch.Tensor) -> None:
        """Round the important columns into the parameters, after the copies to these."""
        values = main.to(group.buffer.dtype)
        with torch.no_grad(), self._queued() as done:
            keep_for_current_stream(values)
            group.buffer.shard.index_copy_(0, columns.positions, values)
        self._transfers[group].returned = done

    # gradients

    def send_gradient(self, group: ParameterGroup, *, at_step: bool) -> None:
        offloaded, columns = offloaded_gradient(group), self._flows[group].columns
        if offloaded is not None and columns is not None:  # the device's memory is freed once it has been copied
            if offloaded.part is None:
                columns.gradient = offloaded.owned().index_select(0, columns.positions)
            elif columns.gradient is not None:
                columns.gradient.add_(offloaded.part.index_select(0, columns.positions))
        super().send_gradient(group, at_step=at_step)

    def _before_write(self, group: ParameterGroup) -> None:
        self.finish(group)
        if (addition := self._flows[group].addition) is not None:
            addition.result()

    def _column_gradient(self, group: ParameterGroup, columns: _ImportantColumns) -> torch.Tensor:
        """The gradient of the important columns, on the device. Shape: [numel]."""
        offloaded, (own, columns.gradient) = offloaded_gradient(group), (columns.gradient, None)
        if offloaded is None or not offloaded.is_on_host:
            return group.gradient.owned().index_select(0, columns.positions)
        return self._uploaded(group, self.gradient(group).index_select(0, columns.on_host)) if own is None else own

    # copies

    def _uploaded(self, group: ParameterGroup, host: torch.Tensor) -> torch.Tensor:
        """Values of the host on the device."""
        target = torch.empty(host.shape, dtype=host.dtype, device=group.buffer.device)
        self._copy(host, target).wait()
        return target

    def _on_device(self, group: ParameterGroup, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Tensors of important columns, where the device computes with them."""
        return [self._uploaded(group, each) for each in tensors] if self._section.offload else tensors

    def _on_host(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory. Order: blocks the host."""
        host = host_empty(values.numel(), values.dtype, values.device, is_pinned=self._is_pinned)
        self._copy(values, host).block()
        return host

    # consistency

    def synchronize(self, group: ParameterGroup) -> None:
        flow = self._flows[group]
        for work in (flow.addition, flow.late_work):
            if work is not None:
                self._wait(work)
        flow.late_work = None
        super().synchronize(group)
        self._store(group)

    def before_save(self) -> None:
        for group, flow in self._flows.items():
            if self._interval == math.inf and flow.addition is not None:
                is_due = self._is_due(group)
                for part in group.ranges:
                    self._state(part)["zenflow_due"] = is_due
            self.finish(group)
            for part in flow.late:
                self._state(part)["zenflow_shown"] = self._on_host(group.buffer.shard[part.start : part.stop])

    def state_was_loaded(self, groups: Sequence[ParameterGroup]) -> None:
        self._flows.clear()
        for group in groups:
            states = {part: self._state(part) for part in group.ranges}
            late = [part for part, state in states.items() if "zenflow_shown" in state]
            was_due = any(state.get("zenflow_due", False) for state in states.values())
            self._flows[group] = _Flow(late=late, was_due=was_due and self._interval == math.inf)

    def parameters_of(self, group: ParameterGroup) -> torch.Tensor:
        late = self._flows[group].late
        values = group.main.clone() if late else group.main
        for part in late:
            values[part.start : part.stop] = self._state(part).get("zenflow_shown", part.param.detach())
        return values


def _add(total: torch.Tensor, gradient: torch.Tensor, scale: float, *, is_first: bool) -> None:
    """``total += scale * gradient`` in fp32; with ``is_first`` in place of what it had."""
    if is_fake(total):
        host_access("sum of gradients", reads=[gradient] if is_first else [gradient, total], writes=[total])
        return
    for target, source in zip(total.split(_BLOCK_NUMEL), gradient.split(_BLOCK_NUMEL), strict=True):
        values = source if scale == 1.0 else source.float() * scale
        target.copy_(values) if is_first else target.add_(values)
