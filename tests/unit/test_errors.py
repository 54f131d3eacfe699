"""Errors survive pickling and copying, as a process pool, Ray or a test harness needs."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shoal
from shoal.config.batch import BatchMismatch
from shoal.config.elastic import ElasticProblems
from shoal.config.problems import ConfigProblems, Problem
from shoal.errors import RankFailedError, RankLeftError, ShoalError
from shoal.launch.remote import _StoppedError

PROBLEMS = (Problem("a.b", "1 is not text.", "write text.", 3), Problem("c", "missing."))

# Constructor arguments of the classes that do not take those of ``ShoalError`` or ``Exception``.
ARGUMENTS: dict[type[BaseException], tuple[Any, ...]] = {
    RankFailedError: (1, "Traceback ...\nValueError: a bad sample"),
    RankLeftError: (1, "rank 0 waits in barrier 'mine'; rank 1 left the world after nothing."),
    ConfigProblems: (PROBLEMS, "ds.json"),
    ElasticProblems: (PROBLEMS[:1], "ds.json"),
    BatchMismatch: ("7 does not divide by 2.", "write 8."),
    _StoppedError: (15,),
}


def exception_classes() -> Iterator[type[BaseException]]:
    """Every exception class that a module of the package defines."""
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if module.name.endswith(".__main__"):
            continue
        if module.name.startswith("shoal.kernels."):
            continue  # they need Triton, and have no errors of their own
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == module.name:
                yield value


CLASSES = list(exception_classes())


def make(kind: type[BaseException]) -> BaseException:
    if kind in ARGUMENTS:
        return kind(*ARGUMENTS[kind])
    if issubclass(kind, ShoalError):
        return kind("x is 3.", where="rank 1", do="set x to 2.", code="some-code")
    return kind("x is 3.")


def test_the_walk_finds_the_classes_of_every_part() -> None:
    names = {kind.__name__ for kind in CLASSES}
    assert {"ShoalError", "ConfigProblems", "AbsentModuleError", "UnusedParametersError", "TagsDifferError"} <= names
    assert len(CLASSES) >= 35


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])  # noqa: S301
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_exception_of_the_package_is_copied_and_pickled_whole(
    kind: type[BaseException], copied: Callable[[BaseException], BaseException]
) -> None:
    error = make(kind)
    error.remark = "set by a caller"  # type: ignore[attr-defined]
    error.add_note("a note")
    again = copied(error)
    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    if isinstance(error, ShoalError):
        assert isinstance(again, ShoalError)
        assert (again.code, again.what, again.where, again.do) == (error.code, error.what, error.where, error.do)


def test_what_a_base_class_keeps_outside_of_the_dict_is_pickled_too() -> None:
    from shoal.compat.absent import AbsentModuleError

    error = AbsentModuleError("no such part.", do="leave it out.")
    error.name = "deepspeed.part"
    assert pickle.loads(pickle.dumps(error)).name == "deepspeed.part"  # noqa: S301


def test_an_error_that_was_made_an_assertion_error_is_pickled_as_one() -> None:
    from shoal.compat.assertions import be_assertion

    error = ConfigProblems(PROBLEMS, "ds.json")
    be_assertion(error)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is type(error)
    assert isinstance(again, AssertionError)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_an_error_of_a_process_pool_arrives_as_it_was_raised() -> None:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        error = pool.submit(load_wrong).exception(timeout=50)
    assert isinstance(error, ConfigProblems)
    assert [problem.path for problem in error.problems] == ["gradient_cliping", "fp16.enabled"]


def load_wrong() -> None:
    from shoal.config import load

    load({"gradient_cliping": 1, "fp16": {"enabled": "yes"}})
