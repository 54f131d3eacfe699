"""What every test stands on: fixed seeds, one thread, ranks as threads or Gloo processes, and nothing left behind."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.helpers.forking import server_pid
from tests.helpers.gloo_pool import GlooPools

# A busy machine is slow; random examples are the same ones each time, but in the nightly run.
settings.register_profile(
    "few", max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("thorough", parent=settings.get_profile("few"), max_examples=2000, derandomize=False)
if settings.get_current_profile_name() != "thorough":
    settings.load_profile("few")

LINGER_SECONDS = 5.0  # what a test's threads and processes get to end by themselves
SERVICE_THREADS = ("pytest_timeout", "Thread-timeout", "execnet", "QueueFeederThread", "tqdm_monitor")
# Files that take longest, the longest first: test workers begin with them, so that at the end none runs alone.
LONG_FILES = (
    "tests/ranks/test_composition.py",
    "tests/simulation/ranks/test_stream_matrix.py",
    "tests/unit/test_benchmarks.py",
    "tests/ranks/checkpoint/test_resume.py",
    "tests/jobs/cli/test_planning.py",
    "tests/ranks/checkpoint/test_faults.py",
    "tests/ranks/parallel/expert/test_parallel_folding.py",
    "tests/ranks/engine/test_models.py",
    "tests/unit/test_docs.py",
    "tests/jobs/launch/test_jobs.py",
    "tests/jobs/launch/test_clusters.py",
    "tests/jobs/launch/test_hang.py",
    "tests/jobs/launch/test_elastic.py",
    "tests/jobs/test_scripts.py",
    "tests/jobs/launch/test_machines.py",
    "tests/unit/compat/checkpoints/test_deepspeed_damage.py",
    "tests/unit/compat/test_finder.py",
    "tests/ranks/running/test_wire_formats.py",
    "tests/jobs/launch/test_launch.py",
    "tests/jobs/cli/test_autotuning.py",
)
LONG_SHARE = 0.015  # of all tests' time: a file that takes more is one of them
CORES = pytest.StashKey[list[int]]()  # what this process could run on when it began
STDERR = pytest.StashKey[int]()  # of this process, while tests write theirs elsewhere
LOCK_SECONDS = 60.0  # after the time limit: pytest cannot end a test that holds Python's lock, so its process ends
MANY_SECONDS = 300.0  # a run that is shorter is of some tests
NUM_FILES_SHOWN = 15


@pytest.fixture
def ranks() -> Callable[..., Any]:
    """``ranks(size, fn, *args, timeout=60)``: run ``fn(*args)`` on ``size`` ranks that are threads of this process.

    Each finds its rank by ``shoal.comm.world.current_world()``.
    """
    from shoal.comm.threads import run_ranks

    return run_ranks


@pytest.fixture
def deepspeed_classes() -> Iterator[None]:
    """``shoal.initialize`` makes engines with all of DeepSpeed's names, as after ``import deepspeed``."""
    from shoal.compat.entry import CLASSES, use_classes
    from shoal.engine.entry import EngineClasses

    use_classes(CLASSES)
    yield
    use_classes(EngineClasses())


@pytest.fixture
def all_cores(pytestconfig: pytest.Config) -> Iterator[None]:
    """The processes that the test starts run on any core."""
    if (cores := pytestconfig.stash.get(CORES, None)) is None:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    yield
    os.sched_setaffinity(0, own)


@pytest.fixture(scope="session")
def _gloo_pools() -> Iterator[GlooPools]:
    pools = GlooPools()
    yield pools
    pools.close()


@pytest.fixture
def gloo(_gloo_pools: GlooPools) -> Callable[..., list[Any]]:
    """``gloo(size, fn, *args, timeout=45)``: run ``fn(rank, size, *args)`` in ``size`` processes joined over Gloo.

    ``fn`` is a function at the top of its module; arguments and results are tensors, numbers, strings, lists and dicts.
    The processes are kept for the next test: ``fn`` leaves the default process group as it found it.
    """
    return _gloo_pools.call


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _imported_modules_are_no_garbage() -> None:
    """A full collection visits what the tests of a module have made, not what was imported: that would take 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """An engine sets the level that its config asks for, for the whole process; the next test has its own."""
    logger = logging.getLogger("shoal")
    level, handlers = logger.level, list(logger.handlers)
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logging.disable(logging.NOTSET)  # the mains of benchmarks turn messages off


@pytest.fixture(autouse=True)
def _nothing_left_behind(_gloo_pools: GlooPools) -> Iterator[None]:
    """Fail a test that leaves threads, child processes or a process group behind."""
    threads_before = set(threading.enumerate())
    children_before = set(_children())
    yield
    deadline = time.monotonic() + LINGER_SECONDS
    while True:
        threads = [
            thread
            for thread in threading.enumerate()
            if thread not in threads_before
            and not isinstance(thread, threading._DummyThread)  # torch's own C++ threads, seen from a Python hook
            and not thread.name.startswith(SERVICE_THREADS)
        ]
        allowed = children_before | _gloo_pools.pids | _service_children()
        children = {pid: command for pid, command in _children().items() if pid not in allowed}
        if not threads and not children:
            break
        if time.monotonic() > deadline:
            pytest.fail(
                f"left behind: threads {[thread.name for thread in threads]}, processes {children}", pytrace=False
            )
        time.sleep(0.01)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("left behind: the default process group of torch.distributed", pytrace=False)


def _service_children() -> set[int]:
    """Processes that outlive a test by design: multiprocessing's resource tracker, and the server that forks ranks."""
    tracker = getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)
    return {pid for pid in (tracker, server_pid()) if pid is not None}


def _children() -> dict[int, str]:
    """Live child processes of this one: pid to command line. Linux lists them by the thread that started them."""
    result: dict[int, str] = {}
    for children in Path("/proc/self/task").glob("*/children"):
        try:
            pids = children.read_text().split()
        except OSError:
            continue  # the thread ended while we looked
        for child in (Path("/proc", pid) for pid in pids):
            try:
                if child.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    command = child.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    result[int(child.name)] = command.strip()[:200]
            except OSError:
                continue  # it ended while we looked
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """End the process of a test whose time limit cannot be kept, with the stacks of its threads."""
    marker, option = item.get_closest_marker("timeout"), item.config.getoption("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout") if option is None else option)
    if limit and not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit + LOCK_SECONDS, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _read_random_states_whole() -> None:
    """Keep the garbage collector out of torch while it copies its random state, under a lock of its own.

    Python 3.11 collects where an object is made. Its finalizers give Python's lock to another thread, which waits for
    torch's with it: ranks that are threads would stand still.
    """
    read, lock, readers = torch.random.get_rng_state, threading.Lock(), list[bool]()

    def get_rng_state() -> torch.Tensor:
        with lock:
            readers.append(gc.isenabled())
            gc.disable()
        try:
            return read()
        finally:
            with lock:
                if readers.pop():  # the first reader's is the last to go
                    gc.enable()

    torch.random.get_rng_state = torch.get_rng_state = get_rng_state


def pytest_configure(config: pytest.Config) -> None:
    """Keep a process that runs tests on one core, each test worker on its own.

    Ranks that are threads run one at a time, and to wake one on another core takes longer than most of what it does.
    Tests of clients start jobs of processes, which take all cores.
    """
    config.stash[STDERR] = os.dup(2)
    if sys.version_info < (3, 12):
        _read_random_states_whole()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")  # "gw0"
    has_workers = not worker and config.getoption("numprocesses", None)
    is_of_clients = any("tests/clients" in argument for argument in config.args)
    if hasattr(os, "sched_setaffinity") and not has_workers and not is_of_clients:
        config.stash[CORES] = cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(int(worker[2:]) if worker else os.getpid()) % len(cores)]})


def _place_of(name: str) -> int:
    """Of the file of a test in ``LONG_FILES``; the others come after them, in their order."""
    file = name.partition("::")[0]
    return LONG_FILES.index(file) if file in LONG_FILES else len(LONG_FILES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first; skip what needs an accelerator where there is none."""
    items.sort(key=lambda item: _place_of(item.nodeid))
    if torch.accelerator.is_available():
        return
    for item in items:
        if "device" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; there is none here"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if "needs an accelerator" in str(getattr(report, "longrepr", ""))
    ]
    terminalreporter.write_line(f"device tests skipped for want of an accelerator: {len(skipped)}")
    seconds: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        seconds[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "duration", 0.0)
    if (total := sum(seconds.values())) > MANY_SECONDS:
        terminalreporter.section("the files that took longest")
        for name, taken in seconds.most_common(NUM_FILES_SHOWN):
            is_late = taken > LONG_SHARE * total and _place_of(name) == len(LONG_FILES)
            hint = "  <- shorten it, or add it to LONG_FILES of tests/conftest.py" if is_late else ""
            terminalreporter.write_line(f"{taken:6.0f} s {100 * taken / total:5.1f} %  {name}{hint}")
