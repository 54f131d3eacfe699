"""The files that a parameter passes in ``initialize``, and a gather and a reduction from their hook to the wire."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from torch import nn

import shoal
from shoal.comm.protocol import Call, Communicator
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers.models import Plain
from tests.helpers.training import adamw, batch, config, run_steps, start

MOST_OF_INITIALIZE = 20
MOST_TO_THE_WIRE = 8
HOOKS = ("running/hooks.py", "running/runtime.py")  # hooks of modules and parameters, and of tensors
ROOT = shoal.__path__[0] + "/"


def file_of(frame: FrameType) -> str | None:
    """The file of Shoal's that a frame runs; None: it is another's."""
    name = frame.f_code.co_filename
    return name.removeprefix(ROOT) if name.startswith(ROOT) else None


def files_that_take(kinds: tuple[type, ...], call: Callable[[], Any]) -> tuple[Any, set[str]]:
    """What ``call`` returns, and the files with a function that was called with an argument of these kinds."""
    found: set[str] = set()

    def called(frame: FrameType, event: str, _: Any) -> None:
        code, name = frame.f_code, file_of(frame)
        if event == "call" and name is not None and name not in found:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(isinstance(frame.f_locals.get(each), kinds) for each in names):
                found.add(name)

    sys.setprofile(called)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, found


def test_initialize_leads_a_parameter_through_few_files() -> None:
    def job() -> set[str]:
        engine, found = files_that_take((nn.Parameter, nn.Module), lambda: start(Plain, config(3), adamw))
        engine.destroy()
        return found

    (found,) = run_ranks(1, job)
    found = {name for name in found if not name.startswith("compat/")}
    assert len(found) <= MOST_OF_INITIALIZE, sorted(found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_from_a_hook_to_the_wire_are_few_files(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    routes: dict[str, set[tuple[str, ...]]] = {}
    before = Communicator.issue

    def issue(comm: Communicator, call: Call) -> Any:
        frame: FrameType | None = sys._getframe(1)
        route: list[str] = []
        while frame is not None:
            name = file_of(frame)
            if name is not None and name not in route:
                route.append(name)
            frame = frame.f_back
        hooks = [place for place, name in enumerate(route) if name in HOOKS]
        if hooks:
            routes.setdefault(call.verb, set()).add(tuple(reversed(route[: hooks[-1] + 1])))
        return before(comm, call)

    def job() -> None:
        engine = start(Plain, config(stage), adamw)
        run_steps(engine, 1)
        engine.backward(engine(*batch(1, current_world().rank, 2)))
        engine.destroy()

    monkeypatch.setattr(Communicator, "issue", issue)
    run_ranks(2, job)
    assert routes
    for verb, found in routes.items():
        assert all(len(route) <= MOST_TO_THE_WIRE for route in found), (verb, found)
    expected = {0: {"all_reduce"}, 1: {"reduce_scatter"}, 2: {"reduce_scatter"}, 3: {"all_gather", "reduce_scatter"}}
    assert expected[stage] <= routes.keys()
