"""Deletes the waits of the library, one after the other, and looks whether the check of streams reports it.

    python -m tests.helpers.stream_mutants [--only cases] [--sites TEXT] [--part 0/2] [--most 4] [--out FILE]

A *site* is a call in the library's source by which something waits or may be waited for: ``METHODS`` and ``FUNCTIONS``,
found in the syntax tree. The library is imported with each site wrapped, in memory. To delete a site, the orders are
left out that its call would have made between streams and threads, and everything else is done: so values are right,
and only the missing order can be noticed.

For each order that was left out, the stream that has not waited *owes* the knowledge. A later wait may give it the
same knowledge before anybody conflicts: then the deletion is redundant, and the wait that covers it is known.

``--out`` is written after each site. If the file is there, the sites in it are not repeated: so a run can be stopped
and go on, and parts (``--part``) can run side by side.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.util
import json
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from tests.helpers.places import ROOT

METHODS = frozenset(
    [
        "wait",
        "wait_stream",
        "wait_event",
        "block",
        "drain",
        "synchronize",
        "record",
        "record_stream",
        "follow",
        "result",
        "_joined",
        "_see_taken",
    ]
)
FUNCTIONS = frozenset({"mark", "host_mark", "waited", "joined"})

# Where nothing is a stream: the simulation itself, what is below a simulated communicator, other processes, and what
# the simulation takes the place of.
OUTSIDE = {
    "shoal/simulation/": "the simulation itself",
    "shoal/streams.py": "calls the simulation, or torch",
    "shoal/comm/direct.py": "below the simulated communicator: host threads and shared memory",
    "shoal/comm/threads.py": "below the simulated communicator",
    "shoal/comm/gloo.py": "below the simulated communicator",
    "shoal/comm/process_group.py": "torch's functions among ranks that are threads; NCCL has groups of torch's own",
    "shoal/comm/failure.py": "a thread that watches processes",
    "shoal/launch/": "processes",
    "shoal/hang.py": "threads that watch processes",
    "shoal/heartbeat.py": "a thread that tells a launcher",
    "shoal/data/sources/build.py": "processes that tokenise",
    "shoal/cli/": "programs, which call the engine",
    "shoal/comm/fake.py": "dry runs: nothing is sent",
    "shoal/comm/waiting.py": "a thread that logs long waits",
    "shoal/observe/": "measures times",
    "shoal/engine/parts/device_check.py": "measures times",
    "shoal/engine/parts/experiment.py": "measures times",
    "shoal/planner/": "measures times; processes",
    "shoal/pipeline/costs.py": "measures times",
    "shoal/compat/async_io.py": "threads and files of the host; what is on a device is copied by copies that block",
    "shoal/compat/accelerator.py": "torch's accelerators under DeepSpeed's names",
    "shoal/compat/collectives.py": "torch's collectives under DeepSpeed's names",
    "shoal/compat/timer.py": "measures times",
    "shoal/checkpoint/formats/": "not streams: words of pickle and of torch's checkpoints",
    "shoal/checkpoint/lock.py": "a thread that renews a file",
    "shoal/pipeline/cut.py": "not a wait: a block of a model",
    "shoal/pipeline/one_forward.py": "not a wait: a block of a model",
    "shoal/memory/io_threads.py": "the threads of the disk: below ``Ticket.wait``",
}


# Sites that no scenario runs, or that make no order in any of them: "file text", and why.
_HOST = "waits for other ranks or threads of the host, which a stream does not see"
_AGAIN = "a second wait for what its caller has waited for"
_REPLICAS = "replicas that come and go are processes; nightly tests kill them"
_ON_CURRENT = "of an operator that runs on the current stream; a test of tests/simulation/ranks checks what follows"
_NOTHING_LEFT = "where the scenarios come here nothing is pending"
UNREACHED = {
    "shoal/checkpoint/blocks.py self._is_taken.wait()": "the host's own event; the order is ``_see_taken``",
    "shoal/memory/disk.py super().wait()": "of a transfer that ``finish`` has ended",
    "shoal/checkpoint/blocks.py self.block(number)": "not a wait: a block of a file",
    "shoal/checkpoint/reader.py reader.block(number)": "not a wait: a block of a file",
    "shoal/checkpoint/load.py axes.drain()": _HOST,
    "shoal/engine/sharding.py self._axes.drain()": _HOST,
    "shoal/engine/offload_states.py self._axes.drain()": _HOST,
    "shoal/engine/offload_states.py group.synchronize()": _NOTHING_LEFT,
    "shoal/engine/parts/experts.py self._axes.drain()": _HOST,
    "shoal/sharding/axes.py comm.drain()": _HOST,
    "shoal/sharding/buffer.py self.comm.drain()": _HOST,
    "shoal/sharding/buffer.py self.reader.drain()": _AGAIN,
    "shoal/sharding/gradient.py work.drain()": _AGAIN,
    "shoal/comm/protocol.py self.backend.drain()": _HOST,
    "shoal/comm/protocol.py self.size, label)).wait()": _HOST,
    "shoal/comm/interface.py store.wait(": _HOST,
    "shoal/comm/protocol.py work.drain()": _AGAIN,
    "shoal/comm/protocol.py work.wait()": "of a batch between hosts; on NCCL a batch is one call",
    "shoal/comm/encoded.py .drain()": "measures times",
    "shoal/compat/entry.py mark(made, resolved)": "not a wait: marks an optimizer as DeepSpeed's",
    "shoal/comm/nccl.py self._host.drain()": _HOST,
    "shoal/comm/nccl.py self.backend.issue(exchange).wait()": _HOST,
    "shoal/comm/nccl.py work.wait()": _HOST,
    "shoal/parallel/saved_tensors.py work.drain()": _AGAIN,
    "shoal/parallel/segment.py Device(device).synchronize()": "measures times",
    "shoal/sharding/copied_gather.py self._work.drain()": _AGAIN,
    "shoal/sharding/buffer.py self._works[-1].drain()": _AGAIN,
    "shoal/parallel/sequence/ring.py work.drain()": _AGAIN,
    "shoal/parallel/sequence/ring.py works[step - 2].drain()": _AGAIN,
    "shoal/parallel/sequence/ring.py self._under_way.wait()": _AGAIN,
    "shoal/sharding/outer_state.py .wait()": _AGAIN,
    "shoal/sharding/param_group.py self.synchronize()": _NOTHING_LEFT,
    "shoal/running/ranges.py group.synchronize()": _NOTHING_LEFT,
    "shoal/comm/parts.py operator=operator)).wait()": _ON_CURRENT,
    "shoal/comm/parts.py self.issue(call).wait()": _ON_CURRENT,
    "shoal/comm/parts.py work.drain()": _AGAIN,
    "shoal/engine/parts/experts.py self._sharding.wait()": _NOTHING_LEFT,
    "shoal/engine/parts/replicas.py group.synchronize()": _REPLICAS,
    "shoal/engine/parts/replicas.py sharding.wait()": _REPLICAS,
    "shoal/engine/parts/fault_tolerance.py summed.redistribute": _REPLICAS,
    "shoal/engine/parts/fault_tolerance.py gradient.copied.wait()": _REPLICAS,
    "shoal/engine/parts/fault_tolerance.py self._device.synchronize()": _REPLICAS,
    "shoal/engine/parameter_check.py self.follow()": "not a wait: notes versions of parameters",
    "shoal/engine/sharding.py self.check.follow()": "not a wait: notes versions of parameters",
    "shoal/access/engine_parameters.py self._sharded.deferred.wait()": _NOTHING_LEFT,
    "shoal/offload/cpu_optimizer.py self.synchronize(group)": _NOTHING_LEFT,
    "shoal/offload/cpu_optimizer.py .wait()": "threads of one update on the host, which is one operation here",
    "shoal/sharding/gradient.py self.wait(at_step=True)": "on one rank a sum is no collective",
    "shoal/sharding/shown_gradient.py self.wait(at_step=True)": "on one rank a sum is no collective",
    "shoal/checkpoint/save.py _SHARE": "a pause of the writing thread; the order is ``_joined``",
    "shoal/optim/host.py .wait()": "threads of one update on the host, which is one operation here",
    "shoal/optim/host.py done.result()": "threads of one update on the host, which is one operation here",
    "shoal/device.py torch.cuda.synchronize": "needs CUDA; ``synchronize`` of the simulation takes its place",
}


# Reasons that hold only of a call that was run, and made no order.
RAN = (_AGAIN, _NOTHING_LEFT)


def reason_of(site: str) -> str | None:
    """The entry of ``UNREACHED`` that a site has."""
    file, _, text = site.partition(":")
    return next((part for part in UNREACHED if part.split(" ", 1)[0] == file and part.split(" ", 1)[1] in text), None)


def reason(site: str) -> str | None:
    """Why a site needs no order; None: it is not known."""
    found = reason_of(site)
    return None if found is None else UNREACHED[found]


@dataclass
class Site:
    """A call in the library's source."""

    file: str
    line: int
    text: str
    is_run: bool = False
    runs: set[int] = field(default_factory=set)  # scenarios in which it makes an order
    teaches: set[int] = field(default_factory=set)  # in which one of its orders told something new
    known_from: Counter[str] = field(default_factory=Counter)  # where it told nothing new: who had told it

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.text}"


SITES: list[Site] = []


def outside(file: str) -> str | None:
    """Why a file's calls are no sites; None: they are."""
    return next((why for part, why in OUTSIDE.items() if file.startswith(part)), None)


class _Wrap(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self._file = file

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = ast.unparse(node)
        self.generic_visit(node)
        called = node.func
        is_site = (isinstance(called, ast.Attribute) and called.attr in METHODS) or (
            isinstance(called, ast.Name) and called.id in FUNCTIONS
        )
        if not is_site:
            return node
        SITES.append(Site(self._file, node.lineno, text if len(text) < 70 else f"...{text[-66:]}"))
        wrapper = ast.copy_location(ast.Name("__at_site__", ast.Load()), node)
        number = ast.copy_location(ast.Constant(len(SITES) - 1), node)
        return ast.copy_location(ast.Call(wrapper, [number, called, *node.args], node.keywords), node)


class _Loader(importlib.abc.SourceLoader):
    def __init__(self, name: str, path: str) -> None:
        self._name, self._path = name, path

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data)
        file = str(Path(str(path)).relative_to(ROOT))
        if outside(file) is None:
            tree = ast.fix_missing_locations(_Wrap(file).visit(tree))
        return compile(tree, str(path), "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self._path), self._path)  # never from or to a .pyc


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] != "shoal":
            return None
        base = ROOT.joinpath(*name.split("."))
        package, module = base / "__init__.py", base.with_suffix(".py")
        if package.exists():
            loader = _Loader(name, str(package))
            return importlib.util.spec_from_file_location(
                name, package, loader=loader, submodule_search_locations=[str(base)]
            )
        return (
            importlib.util.spec_from_file_location(name, module, loader=_Loader(name, str(module)))
            if module.exists()
            else None
        )


class _Thread(threading.local):
    def __init__(self) -> None:
        self.sites: list[int] = []


class Deletion:
    """What is left out of the run, and what the run tells of it. One at a time in the process."""

    def __init__(self) -> None:
        self.thread = _Thread()
        self.deleted: int | None = None
        self.scenario = -1
        self.unattributed: Counter[str] = Counter()
        self.covered_by: Counter[str] = Counter()
        self.owed: dict[Any, dict[Any, int]] = {}  # by stream: of which stream it has not been told what
        self.taught: dict[tuple[Any, Any], str] = {}  # stream, of another: where it learned the most
        self.num_left_out = 0

    def begin(self, scenario: int, deleted: int | None) -> None:
        self.scenario, self.deleted = scenario, deleted
        self.covered_by.clear()
        self.owed.clear()
        self.taught.clear()
        self.num_left_out = 0

    @property
    def is_deleted(self) -> bool:
        return self.deleted is not None and self.deleted in self.thread.sites

    def at_site(self, number: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        SITES[number].is_run = True
        sites = self.thread.sites
        sites.append(number)
        try:
            return call(*args, **kwargs)
        finally:
            sites.pop()

    def seen(self, *, is_new: bool, known_from: Sequence[str] = ()) -> None:
        """An order is made by the calls under way."""
        if self.deleted is not None:
            return
        if not self.thread.sites:
            self.unattributed[place()] += 1
        for number in self.thread.sites:
            site = SITES[number]
            site.runs.add(self.scenario)
            if is_new:
                site.teaches.add(self.scenario)
            else:
                site.known_from.update(known_from)


def not_imported() -> None:
    """Add the sites of files that no scenario has imported."""
    known = {site.file for site in SITES}
    for path in sorted(ROOT.glob("shoal/**/*.py")):
        file = str(path.relative_to(ROOT))
        if file not in known and outside(file) is None and file[:-3].replace("/", ".") not in sys.modules:
            _Wrap(file).visit(ast.parse(path.read_bytes()))


def place() -> str:
    """The innermost line of the library, outside of the simulation."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/shoal/" in name and "/shoal/simulation/" not in name and not name.endswith("/shoal/streams.py"):
            return f"{name.rpartition('/shoal/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "the script"


def install() -> Deletion:
    """Import the library with its sites wrapped, and let the simulation ask before it makes an order."""
    found = Deletion()
    builtins.__at_site__ = found.at_site  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder())
    from shoal.comm.nccl import NcclWork
    from shoal.simulation import clocks
    from shoal.simulation.accelerator import SimulatedAccelerator
    from shoal.simulation.collectives import SimulatedWork

    class Withheld(clocks.Clock):
        """The clock of an event that was not recorded: ``real`` would be told."""

        real: Any = None

    def owe(stream: Any, clock: Any) -> None:
        found.num_left_out += 1
        known_from = []
        for other, number in clock.items():
            if number > stream.clock.get(other, 0):
                owed = found.owed.setdefault(stream, {})
                owed[other] = max(number, owed.get(other, 0))
            elif (stream, other) in found.taught:
                known_from.append(found.taught[stream, other])
        found.covered_by.update(f"{at} (before)" for at in set(known_from))

    def join(stream: Any, clock: Any) -> None:
        owed = found.owed.get(stream, {})
        raised = [other for other, number in clock.items() if number > stream.clock.get(other, 0)]
        if raised:
            at = place()
            for other in raised:
                found.taught[stream, other] = at
                if other in owed and clock[other] >= owed[other]:
                    del owed[other]
                    found.covered_by[f"{at} (later)"] += 1
        original_join(stream, clock)

    def wait_clock(stream: Any, clock: Any) -> None:
        if isinstance(clock, Withheld):
            owe(stream, clock.real)
            return
        news = [other for other, number in clock.items() if number > stream.clock.get(other, 0)]
        if found.is_deleted:
            owe(stream, clock)
            return
        known_from = {found.taught[stream, other] for other in clock if (stream, other) in found.taught}
        found.seen(is_new=bool(news), known_from=sorted(known_from) if not news else ())
        stream.join(clock)

    def record(event: Any, stream: Any) -> None:
        found.seen(is_new=True)
        original_record(event, stream)
        if found.is_deleted:
            withheld = Withheld()
            withheld.real, event.clock = event.clock, withheld

    def record_stream(accelerator: Any, tensor: Any, stream: Any) -> None:
        found.seen(is_new=True)
        if found.is_deleted:
            found.num_left_out += 1
            with accelerator._lock:
                accelerator._storage_of(tensor).__dict__.setdefault("withheld", set()).add(stream)
        else:
            original_record_stream(accelerator, tensor, stream)

    def free(accelerator: Any, storage: Any, how: str) -> None:
        freeing = storage.stream if storage.stream is not None else accelerator.compute
        for stream in storage.__dict__.pop("withheld", ()):
            at = found.taught.get((freeing, stream)) or found.taught.get(
                (accelerator.host, stream), "nothing was freed early"
            )
            found.covered_by[f"{at} (before)"] += 1
        original_free(accelerator, storage, how)

    def host_mark(accelerator: Any) -> Callable[[], None]:
        found.seen(is_new=True)
        reached = accelerator.host.clock.copy()
        if not found.is_deleted:
            return lambda: accelerator.host.wait_clock(reached)
        withheld = Withheld()
        withheld.real = reached
        return lambda: accelerator.host.wait_clock(withheld)

    def wait(work: Any) -> Any:
        was_waited = work._is_waited
        result = original_wait(work)
        if found.is_deleted and not was_waited and not isinstance(work._event.clock, Withheld):
            # The values are there; the next wait would be the first.
            work._is_waited, work._deliver, work._land = False, lambda: None, None
        return result

    def wait_nccl(work: Any) -> Any:
        was_waited = work._is_waited
        result = original_wait_nccl(work)
        if found.is_deleted and not was_waited:
            # As above; what the current stream writes after the wait is written.
            work._is_waited, work._after, work._accumulate = False, None, False
        return result

    original_wait_nccl = NcclWork.wait
    # What is put in place of methods has their types; mypy wants no method to be assigned.
    NcclWork.wait = wait_nccl  # type: ignore[method-assign]
    original_join, original_record = clocks.SimulatedStream.join, clocks.SimulatedEvent.record
    original_record_stream, original_free = SimulatedAccelerator.record_stream, SimulatedAccelerator._free
    original_wait = SimulatedWork.wait
    clocks.SimulatedStream.join = join  # type: ignore[method-assign]
    clocks.SimulatedStream.wait_clock = wait_clock  # type: ignore[method-assign]
    clocks.SimulatedEvent.record = record  # type: ignore[method-assign]
    SimulatedAccelerator.record_stream = record_stream  # type: ignore[method-assign]
    SimulatedAccelerator._free = free  # type: ignore[method-assign]
    SimulatedAccelerator.host_mark = host_mark  # type: ignore[method-assign]
    SimulatedWork.wait = wait  # type: ignore[method-assign]
    return found


@dataclass(frozen=True)
class Outcome:
    """What became of the deletion of one site."""

    site: str
    verdict: str  # found, error, covered, known, open, orders nothing, not reached
    because: str

    def __str__(self) -> str:
        return f"{self.verdict:15} {self.site}\n{'':15}   {self.because}"


class Mutants:
    def __init__(self, deletion: Deletion) -> None:
        self.deletion = deletion
        self._scenarios: list[Scenario] = []
        self._seconds: dict[int, float] = {}
        self._began = 0.0

    def _begin(self, name: str, run: Callable[[], Any]) -> None:
        self._end()
        self._scenarios.append((name, run))
        self.deletion.begin(len(self._scenarios) - 1, None)
        self._began = time.monotonic()

    def _end(self) -> None:
        self._seconds[len(self._scenarios) - 1] = time.monotonic() - self._began

    def run_all(self, scenarios: Sequence[Scenario]) -> Iterator[str]:
        """Run scenarios as they are. Yields: what is reported, which should be nothing."""
        for name, run in scenarios:
            self._begin(name, run)
            if told := _told(run):
                yield f"{name}: {told[1]}"
        self._end()

    def run_tests(self, files: Sequence[str]) -> Iterator[str]:
        """Run the tests as they are. Yields: what is reported, tests that fail, and files that say nothing of waits."""
        runs = TestRuns(lambda name: self._begin(name, partial(of_test, name)), leave_out=LEFT_OUT)
        runs.run(files)
        self._end()
        yield from (f"{name}: fails: {message.splitlines()[0]}" for name, message in runs.errors.items())
        for file in files:
            if not any(name.startswith(file) for name in runs.passed):
                yield f"{file}: no test has ranks that are threads"
        for number, (name, _) in enumerate(self._scenarios):
            checks = runs.of_test.get(name, [])
            told = _told(lambda checks=checks: checks)
            if told:
                yield f"{name}: {told[1]}"
            if told or name in runs.errors:
                for site in SITES:
                    site.runs.discard(number)
                    site.teaches.discard(number)

    def outcome(self, number: int, most: int) -> Outcome:
        """Delete a site in the cheapest scenarios that reach it, at most so many of them, until it is noticed."""
        site = SITES[number]
        if not site.is_run:
            return Outcome(str(site), "not reached", "no scenario runs it")
        if not site.runs:
            return Outcome(str(site), "orders nothing", "it makes no order between streams or threads in any scenario")
        if not site.teaches:
            by = ", ".join(at for at, _ in site.known_from.most_common(2))
            return Outcome(
                str(site), "known", f"what it waits for was known in all {len(site.runs)} scenarios, by {by}"
            )
        covered: Counter[str] = Counter()
        is_open = False
        chosen = sorted(site.teaches, key=lambda each: self._seconds.get(each, 0.0))[:most]
        for each in chosen:
            self.deletion.begin(each, number)
            told = _told(self._scenarios[each][1])
            if told and (told[0] == "found" or self._passes(each)):
                return Outcome(str(site), *told)
            covered += self.deletion.covered_by
            is_open = is_open or any(self.deletion.owed.values())
        by = ", ".join(at for at, _ in covered.most_common(3))
        if covered:
            return Outcome(
                str(site),
                "covered",
                f"in {len(chosen)} scenarios, by {by}"
                + (" and at times by nothing that came later" if is_open else ""),
            )
        return Outcome(str(site), "open", f"in {len(chosen)} scenarios nothing uses the order")

    def _passes(self, scenario: int) -> bool:
        """True if a scenario that raised with a deletion raises nothing without it, three times."""
        self.deletion.begin(scenario, None)
        return not any(_told(self._scenarios[scenario][1]) for _ in range(3))


def _told(run: Callable[[], Any]) -> tuple[str, str] | None:
    """The verdict and its first lines; None: nothing is reported."""
    try:
        checks = run()
    except UsageError:
        raise  # the scenario itself is wrong: it says nothing about a wait
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).splitlines()[0] if str(error) else ""
        return "error", f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"
    for check in checks:
        for finding in check.findings:
            return "found", str(finding).splitlines()[0]
    return None


def main(args: Sequence[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", default="")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--only", choices=["cases", "matrix", "tests"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(args)
    logging.getLogger("shoal").setLevel(logging.ERROR)
    mutants = Mutants(DELETION)
    scenarios = list(CASES.items()) if options.only == "cases" else matrix() if options.only != "tests" else []
    faults = list(mutants.run_all(scenarios))
    faults += list(mutants.run_tests(TEST_FILES)) if options.only in (None, "tests") else []
    print("reported without a deletion:", *faults, sep="\n  ", flush=True)
    kept = json.loads(options.out.read_text())["outcomes"] if options.out and options.out.exists() else []
    done = {each["site"] for each in kept}
    part, parts = map(int, options.part.split("/"))
    not_imported()
    order = sorted(range(len(SITES)), key=lambda number: (SITES[number].file, SITES[number].line))
    chosen = [number for at, number in enumerate(order) if at % parts == part and options.sites in str(SITES[number])]
    summary = {"faults": faults, "unattributed": dict(mutants.deletion.unattributed), "outcomes": kept}
    for number in chosen:
        if str(SITES[number]) in done:
            continue
        found = mutants.outcome(number, options.most)
        kept.append(found.__dict__)
        print(found, flush=True)
        if options.out:
            options.out.write_text(json.dumps(summary, indent=1))
    print(json.dumps({**summary, "outcomes": Counter(each["verdict"] for each in kept)}, indent=1))


if __name__ == "__main__":
    DELETION = install()
    from shoal.errors import UsageError
    from tests.helpers.simulated_nccl import nccl_in_simulation
    from tests.helpers.stream_cases import CASES
    from tests.helpers.stream_scenarios import LEFT_OUT, TEST_FILES, Scenario, TestRuns, matrix, of_test

    with nccl_in_simulation():
        main(sys.argv[1:])
