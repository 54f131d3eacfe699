"""What every test stands on: fixed seeds, one thread, ranks as threads or Gloo processes, and nothing left behind."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.helpers.gloo_pool import GlooPools

LINGER_SECONDS = 5.0  # what a test's threads and processes get to end by themselves
SERVICE_THREADS = ("pytest_timeout", "Thread-timeout", "execnet", "QueueFeederThread")


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
    """Processes that outlive a test by design: multiprocessing's resource tracker."""
    pid = getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)
    return set() if pid is None else {pid}


def _children() -> dict[int, str]:
    """Live child processes of this one: pid to command line."""
    found: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                command = stat.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(stat.parent.name)] = command.strip()[:200]
        except OSError:
            continue  # it ended while we looked
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator where there is none."""
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
