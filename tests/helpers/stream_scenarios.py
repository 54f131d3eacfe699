"""The runs in which waits are deleted: small cases, pairs of the matrix of streams, and tests of the library."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest

import shoal
from shoal.comm import threads
from shoal.simulation.check import StreamCheck
from tests.helpers.composition import covering
from tests.helpers.stream_cases import CASES, ROWS
from tests.helpers.stream_matrix import STREAM_AXES, checks_of, named

Scenario = tuple[str, Callable[[], Any]]

_SECONDS = 300  # for a test, whose operations are all checked

# No emulated precision: each scenario runs many times.
AXES = {
    **STREAM_AXES,
    "precision": {name: STREAM_AXES["precision"][name] for name in ("fp32", "bf16")},
    "schedule": {"1f1b": STREAM_AXES["schedule"]["1f1b"]},
}

# What the matrix and the cases have not: tests whose ranks are threads.
TEST_FILES = tuple(
    f"tests/ranks/{name}.py"
    for name in (
        "parallel/tensor/test_overlap",
        "parallel/tensor/test_optimizers",
        "parallel/tensor/test_vocab_parallel_cross_entropy",
        "parallel/expert/test_hierarchical",
        "parallel/expert/test_balance",
        "parallel/expert/test_overlap",
        "comm/test_wire",
        "data/test_stream",
        "offload/test_states",
        "offload/test_zenflow",
        "running/test_overlap_param_gather",
        "pipeline/test_access",
        "parallel/sequence/test_attention",
        "parallel/sequence/test_options",
        "access/test_gathered",
        "access/test_init",
        "checkpoint/test_writers",
    )
)

# Tests of these files that cannot pass under the check, and why.
_COPIES = "counts bytes, and the simulation's copies of what is sent with them"
_REFERENCES = "counts references to memory, and the simulation has its own"
_SUMS = "counts on sums of bf16 in fp32, as the CPU takes them; NCCL takes them in bf16"
LEFT_OUT = {
    "test_an_exact_format_gives_the_bits_of_the_plain_collective[dtype1-2]": _SUMS,
    "test_an_exact_format_gives_the_bits_of_the_plain_collective[dtype1-3]": _SUMS,
    "test_ring_attention_holds_three_blocks_of_keys_and_values_and_no_scores": _COPIES,
    "test_keys_and_values_are_not_repeated_for_the_queries_that_share_them": _COPIES,
    "test_over_heads_too_keys_and_values_are_not_repeated": _COPIES,
    "test_gathered_parameters_use_the_same_memory_without_other_references": _REFERENCES,
}


def matrix() -> list[Scenario]:
    """The small cases, and the pairs."""
    return [
        *CASES.items(),
        *ROWS.items(),
        *((named(row), partial(checks_of, row)) for row in covering(2, AXES, most_ranks=4)),
    ]


class TestRuns:
    """Runs tests in this process, each rank that is a thread under ``check_streams``.

    Args:
        begin: called with the name of each test before it runs.
        has_all_parameters: run each test with all its parameters; else with the first and the last.
        leave_out: names of tests that do not run, with their parameters or without.

    Attributes:
        checks: of the test that ran last.
        passed: by name, of those that started ranks.
        errors: by name, the message of those that failed, and of files that cannot be imported.
    """

    __test__ = False

    def __init__(
        self,
        begin: Callable[[str], None] = lambda name: None,
        *,
        has_all_parameters: bool = False,
        leave_out: Iterable[str] = (),
    ) -> None:
        self.checks: list[StreamCheck] = []
        self.passed: dict[str, bool] = {}
        self.errors: dict[str, str] = {}
        self.of_test: dict[str, list[StreamCheck]] = {}
        self._begin = begin
        self._has_all_parameters = has_all_parameters
        self._leave_out = frozenset(leave_out)
        self._run_ranks = threads.run_ranks
        self._replaced: list[ModuleType] = []

    def run(self, names: Sequence[str]) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            # A short traceback does not print arguments: their memory may be freed.
            options = ["-q", "-n0", "-p", "no:cacheprovider", "--tb=short", f"--timeout={_SECONDS}"]
            pytest.main([*names, *options], plugins=[self])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        self.checks = []
        self._begin(item.nodeid)
        self._replaced = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("tests.") and hasattr(module, "run_ranks")
        ] + [threads]  # the fixture ``ranks`` looks the function up there
        for module in self._replaced:
            module.run_ranks = self._checked  # type: ignore[attr-defined]

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        for module in self._replaced:  # the cases and the matrix import helpers from tests
            module.run_ranks = self._run_ranks  # type: ignore[attr-defined]

    def _checked(self, size: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        def run(*args: Any) -> Any:
            with shoal.check_streams(raises=False) as check:
                self.checks.append(check)
                return fn(*args)

        seconds = kwargs.pop("timeout", _SECONDS)
        if seconds > 1:  # else the test is about the limit
            seconds = max(seconds, _SECONDS)
        return self._run_ranks(size, run, *args, timeout=seconds, **kwargs)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Without ranks that are processes; what "one process" computes is what threads are compared with."""
        with_threads = [
            item
            for item in items
            if "process" not in item.name.replace("one_process", "")
            and "gloo" not in item.fixturenames
            and self._leave_out.isdisjoint((item.name, getattr(item, "originalname", "")))
        ]
        for item in with_threads:
            item.add_marker(pytest.mark.timeout(_SECONDS), append=False)  # over its own
        if self._has_all_parameters:
            items[:] = with_threads
            return
        kept: dict[str, list[Any]] = {}
        for item in with_threads:
            kept.setdefault(f"{item.fspath}{getattr(item, 'originalname', item.name)}", []).append(item)
        items[:] = [item for some in kept.values() for item in dict.fromkeys((some[0], some[-1]))]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.pytest_collectreport(report)
        if report.when == "call" and self.checks:
            self.passed[report.nodeid] = report.passed
            self.of_test[report.nodeid] = self.checks

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.errors.setdefault(report.nodeid, str(report.longrepr if crash is None else crash.message))


def of_test(name: str) -> list[StreamCheck]:
    """The checks of a test's ranks; none of a test that has a check of its own. Raises: AssertionError: it fails."""
    runs = TestRuns(has_all_parameters=True)
    runs.run([name])
    assert not runs.errors, "; ".join(runs.errors.values())
    return runs.of_test.get(name, [])
