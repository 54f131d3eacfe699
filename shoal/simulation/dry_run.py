"""A dry run: the real engine as one rank of any number, without values, with the memory, traffic and time of its steps.

with shoal.dry_run(8, machine="h100") as run:
    engine, *_ = shoal.initialize(model=model(), optimizer=..., config=...)
    for _ in range(3):
        with run.step():
            engine.backward(engine(batch))
            engine.step()
    engine.destroy()
print(run.report())
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoal.comm.fake import FakeStages
from shoal.comm.recorder import Entry
from shoal.comm.world import World, fake_process_group, fake_stage_world, fake_world
from shoal.device import fake_tensors
from shoal.errors import UsageError
from shoal.simulation.accelerator import SimulatedAccelerator
from shoal.simulation.chakra import write_chakra
from shoal.simulation.collective_times import link_nbytes
from shoal.simulation.machines import GpuNode, machine_of
from shoal.simulation.memory import DeviceMemory, MemoryPeak
from shoal.simulation.modes import WithoutInitialValues, watching
from shoal.simulation.times import (
    COLLECTIVE_WAYS,
    COMMUNICATION,
    COMPUTE,
    COPY,
    DISK,
    HOST,
    KINDS,
    STAGES,
    UPDATE,
    StreamTimes,
    exposed,
)
from shoal.streams import simulated, simulation
from shoal.text import format_bytes, table

_ARROWS = (COMMUNICATION, STAGES, COPY, UPDATE, DISK)  # kinds that a trace has arrows from


@dataclass(frozen=True)
class StepTime:
    """One step of a dry run.

    Attributes: ``begin``: seconds since the dry run began. ``seconds``: on the compute stream. ``by_kind``: what these
    are: "compute" is its own work, everything else is what it waits for. ``host_seconds``: that the host needs to queue
    the step's work. ``busy``: what all streams do in this time. ``received``: bytes by collective; ``links``:
    those of ``received`` that are data, by "NVLink" (any link inside a node) and "the network". ``memory``: the most
    that the device had. ``peaks``: the most at each place, by operation and line.
    """

    begin: float
    seconds: float
    by_kind: dict[str, float]
    host_seconds: float
    busy: dict[str, float]
    received: dict[str, int]
    links: dict[str, int]
    memory: MemoryPeak
    peaks: dict[tuple[str, str], MemoryPeak] = field(repr=False, compare=False)

    def share(self, kind: str) -> float:
        """The part of the step in which the compute stream waits for this kind."""
        return self.by_kind[kind] / self.seconds if self.seconds else 0.0


class DryRun:
    """One rank of a dry run.

    Attributes: ``steps``: those that were measured, in order. The first ones differ: the order of the units is learnt.
    """

    def __init__(
        self, world: World, accelerator: SimulatedAccelerator, times: StreamTimes, memory: DeviceMemory
    ) -> None:
        self.world = world
        self.machine = times.machine
        self.steps: list[StepTime] = []
        self._accelerator, self._times, self._memory = accelerator, times, memory

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure what is inside as one step."""
        stream, first = self._accelerator.compute, len(self._times.operations)
        self._accelerator.end_kernel()
        self._accelerator.host.join(stream.clock)  # a step in which the host is slower must not use an earlier lead
        stream.join(self._accelerator.host.clock)
        begin = stream.clock.seconds
        self._memory.start()
        with self.world.recorder.recording() as entries:
            yield
        self._accelerator.end_kernel()
        stream.join(self._accelerator.host.clock)
        self.steps.append(self._measured(first, begin, stream.clock.seconds, entries))

    def _measured(self, first: int, begin: float, end: float, entries: list[Entry]) -> StepTime:
        operations = self._times.operations
        busy = dict.fromkeys(KINDS, 0.0)
        for operation in operations[first:]:
            busy[operation.kind] += operation.end - operation.start
        received: dict[str, int] = {}
        for entry in entries:
            received[entry.op] = received.get(entry.op, 0) + entry.nbytes
        links = dict.fromkeys(COLLECTIVE_WAYS, 0.0)
        for operation in operations[first:]:
            if operation.ranks:
                verb, per_node = operation.name.partition(" ")[0], self.machine.gpus_per_node
                for way, nbytes in zip(
                    links, link_nbytes(verb, operation.nbytes, operation.ranks, per_node), strict=True
                ):
                    links[way] += nbytes
        by_kind = exposed(operations, self._accelerator.compute, begin, end)
        peaks = self._memory.peaks()
        peak = max(peaks.values(), key=lambda each: each.allocated)
        return StepTime(
            begin,
            end - begin,
            by_kind,
            busy[HOST],
            busy,
            received,
            {way: round(nbytes) for way, nbytes in links.items()},
            peak,
            peaks,
        )

    @contextmanager
    def building(self) -> Iterator[None]:
        """What is made in the block is not on the device: a model that ``initialize`` then shards."""
        with self._accelerator.paused(), WithoutInitialValues():
            yield

    @property
    def without_formula(self) -> list[str]:
        """Operators that take flops, or may, of which no formula says how many: they are timed by their bytes."""
        return sorted(self._accelerator.without_formula)

    @property
    def out_of_memory(self) -> int | None:
        """The first step that needs more memory than the device has, from 1 (what is before it included), or None."""
        return next((number for number, step in enumerate(self.steps, 1) if step.memory.is_beyond), None)

    def report(self) -> str:
        """The last step as tables: by kind, milliseconds that count, their share, those of all streams; and memory."""
        if not self.steps:
            return "no step was measured: use `with run.step():`."
        last = self.steps[-1]
        rows = [
            [
                kind if kind == COMPUTE else f"waiting for {kind}",
                f"{1e3 * last.by_kind[kind]:.1f}",
                f"{100 * last.share(kind):.1f} %",
                f"{1e3 * last.busy[kind]:.1f}",
            ]
            for kind in KINDS
            if kind != STAGES or self.world.stages is not None
        ]
        rows.append(["step", f"{1e3 * last.seconds:.1f}", "", ""])
        traffic = ", ".join(f"{op} {format_bytes(nbytes)}" for op, nbytes in last.received.items() if nbytes)
        return (
            f"rank {self.world.rank} of {self.world.size}, {self.machine.name}, step {len(self.steps)}\n"
            + table(rows, ["compute stream", "ms", "share", "ms on all streams"])
            + f"\nreceived: {traffic or 'nothing'}\n\n"
            + last.memory.report(self.machine.gpu_nbytes)
            + ("" if self.out_of_memory is None else f"\nfirst in step {self.out_of_memory}")
            + (
                f"\ntimed by bytes, no formula for flops: {', '.join(self.without_formula)}"
                * bool(self.without_formula)
            )
        )

    def write_trace(self, path: str | Path) -> Path:
        """Write all operations as a Chrome trace (chrome://tracing, ui.perfetto.dev), a row for each stream.

        Arrows lead from a collective, copy or message to what waited for it; two counters have the device's memory.
        """
        return _write_trace(path, self.trace_events())

    def write_chakra(self, prefix: str | Path) -> Path:
        """Write all operations as a Chakra execution trace, for ASTRA-sim. Returns: its path, PREFIX.RANK.et."""
        return write_chakra(prefix, self._times.operations, self.world.rank)

    def trace_events(self) -> list[dict[str, object]]:
        """The events of the trace."""
        rows: dict[str, int] = {}
        events: list[dict[str, object]] = []
        for operation in self._times.operations:
            row = rows.setdefault(operation.stream.name, len(rows))
            events.append(
                {
                    "name": operation.name,
                    "cat": operation.kind,
                    "ph": "X",
                    "pid": self.world.rank,
                    "tid": row,
                    "ts": 1e6 * operation.start,
                    "dur": 1e6 * (operation.end - operation.start),
                }
            )
            if operation.before is not None and operation.before.kind in _ARROWS:
                before = operation.before
                if before.stream is not operation.stream:
                    flow = {"name": "waits", "cat": "waits", "pid": self.world.rank}
                    flow["id"] = self.world.rank << 32 | len(events)
                    start = {"ph": "s", "tid": rows[before.stream.name], "ts": 1e6 * before.start}
                    end = {"ph": "f", "bp": "e", "tid": row, "ts": 1e6 * operation.start}
                    events += [{**flow, **start}, {**flow, **end}]
        for seconds, allocated, reserved in self._memory.history:
            values = {"allocated": allocated, "reserved": reserved}
            counter = {"name": "memory", "ph": "C", "pid": self.world.rank, "ts": 1e6 * seconds, "args": values}
            events.append(counter)
        for name, row in rows.items():
            named = {"name": "thread_name", "ph": "M", "pid": self.world.rank, "tid": row, "args": {"name": name}}
            events.append(named)
        return events


class PipelineDryRun:
    """A rank of each pipeline stage of a dry run.

    Attributes: ``stages``: the dry run of each, in order.
    """

    def __init__(self, stages: Sequence[DryRun]) -> None:
        self.stages = tuple(stages)

    @property
    def seconds(self) -> float:
        """Of the last step, from the first stage's begin to the last stage's end."""
        return self.seconds_of(-1)

    def seconds_of(self, number: int) -> float:
        """Of a step, by its number."""
        last = [run.steps[number] for run in self.stages]
        return max(step.begin + step.seconds for step in last) - min(step.begin for step in last)

    def report(self) -> str:
        """The last step as a table: of each stage, what its compute stream did, in milliseconds."""
        if any(not run.steps for run in self.stages):
            return "no step was measured: use `with run.step():` on every stage."
        last = [run.steps[-1] for run in self.stages]
        kinds = [kind for kind in KINDS if any(step.by_kind[kind] >= 5e-5 for step in last)]
        rows = [
            [str(number), str(run.world.rank), f"{1e3 * step.seconds:.1f}"]
            + [f"{1e3 * step.by_kind[kind]:.1f}" for kind in kinds]
            for number, (run, step) in enumerate(zip(self.stages, last, strict=True))
        ]
        first = self.stages[0]
        heads = [kind if kind == COMPUTE else f"waits: {kind}" for kind in kinds]
        return (
            f"{len(self.stages)} pipeline stages on {first.world.size} ranks, {first.machine.name}, step"
            f" {len(first.steps)}: {1e3 * self.seconds:.1f} ms\n" + table(rows, ["stage", "rank", "ms", *heads])
        )

    def write_trace(self, path: str | Path) -> Path:
        """Write the operations of all stages as one Chrome trace, a process for each stage."""
        return _write_trace(path, [event for run in self.stages for event in run.trace_events()])

    def write_chakra(self, prefix: str | Path) -> list[Path]:
        """As of ``DryRun``, a file for each stage."""
        return [run.write_chakra(prefix) for run in self.stages]


def _write_trace(path: str | Path, events: list[dict[str, object]]) -> Path:
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return Path(path)


@contextmanager
def dry_run(
    num_ranks: int, rank: int = 0, *, machine: str | Path | GpuNode = "h100", is_fused: bool = False
) -> Iterator[DryRun]:
    """Be rank ``rank`` of ``num_ranks`` inside the block, on a simulated GPU: tensors have shapes and no values.

    Build the model, initialize, take a few steps in ``step()`` and destroy the engine inside the block.

    Args:
        machine: as of ``machines.machine_of``: a name, such as "h100" or "a100-80g@100gbe", a YAML file, or figures.
        is_fused: True: pointwise operators and reductions that follow each other count as one kernel, as
            ``torch.compile`` makes them.

    Memory: that of the model's objects; tensors have none.
    Raises: UsageError: inside another simulation; an unknown machine or rank.
    """
    _check_not_nested()
    with fake_world(num_ranks, rank) as world, _simulated_rank(world, machine_of(machine), is_fused) as run:
        yield run


def dry_run_pipeline(
    train: Callable[[DryRun], object],
    num_ranks: int,
    num_stages: int,
    *,
    stride: int | None = None,
    machine: str | Path | GpuNode = "h100",
    is_fused: bool = False,
) -> PipelineDryRun:
    """Run ``train(run)`` as the first rank of each of ``num_stages`` pipeline stages, on simulated GPUs.

    ``train`` builds the model, initializes with ``parallel.pp`` = ``num_stages``, and calls ``engine.train_batch()`` a
    few times, each in ``run.step()``, with the same micro-batches on every stage. It is called in threads, one of which
    runs at a time.

    Args:
        num_ranks: of all stages together.
        stride: ranks from one stage's first to the next one's; None: pipeline stages are the outermost axis.
        machine, is_fused: as of ``dry_run``.

    Memory: that of the model's objects, once for each stage.
    Raises: UsageError: inside another simulation; an unknown machine; stages that do not divide the ranks. What
        ``train`` raised on a stage.
    """
    _check_not_nested()
    stages, node = stages_of(num_ranks, num_stages, stride), machine_of(machine)
    runs: dict[int, DryRun] = {}

    def of_stage(rank: int) -> None:
        with fake_stage_world(num_ranks, rank, stages) as world, _simulated_rank(world, node, is_fused) as run:
            runs[rank] = run
            train(run)

    with fake_process_group(num_ranks, 0):
        run_stages(stages, of_stage)
    return PipelineDryRun([runs[rank] for rank in stages.ranks])


def stages_of(num_ranks: int, num_stages: int, stride: int | None = None) -> FakeStages:
    """The first rank of each pipeline stage. Raises: UsageError: stages that do not divide the ranks."""
    if num_stages < 1 or num_ranks % num_stages:
        raise UsageError(
            f"{num_ranks} ranks cannot be divided among {num_stages} pipeline stages.",
            do="give a number of stages that divides the number of ranks.",
            code="dry-run-pipeline",
        )
    stride = num_ranks // num_stages if stride is None else stride
    return FakeStages(range(0, num_stages * stride, stride))


def run_stages(stages: FakeStages, of_stage: Callable[[int], object]) -> None:
    """Call ``of_stage(rank)`` for each stage, in threads of which one runs at a time. Raises: what the first raised."""

    def guarded(rank: int) -> None:
        with suppress(BaseException), stages.running(rank):  # ``stages`` keeps the first error
            of_stage(rank)

    threads = [
        threading.Thread(target=guarded, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in stages.ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if stages.error is not None:
        raise stages.error


def _check_not_nested() -> None:
    if simulation() is not None:
        raise UsageError(
            "a dry run simulates an accelerator, and there is a simulated one already.",
            do="do not nest dry_run and check_streams.",
            code="stream-check",
        )


@contextmanager
def _simulated_rank(world: World, machine: GpuNode, is_fused: bool) -> Iterator[DryRun]:
    world.ranks_per_node = machine.gpus_per_node
    world.local_rank = world.rank % machine.gpus_per_node
    times = StreamTimes(machine.compiled() if is_fused else machine, world.size)
    memory = DeviceMemory(machine.gpu_nbytes, machine.context_nbytes, is_cpu=machine.is_cpu)
    accelerator = SimulatedAccelerator(times, memory, is_fused=is_fused)
    with fake_tensors(allow_non_fake_inputs=True), simulated(accelerator), watching(accelerator):
        memory.now = lambda: accelerator.compute.clock.seconds
        yield DryRun(world, accelerator, times, memory)
