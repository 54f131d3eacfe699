"""Backward passes in threads of their own, as autograd runs them for GPUs: those threads know nothing of the caller's.

A rank that is a process has one world and one sequence context, which all of its threads see. Of ranks that are threads
the new thread is given these two.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from shoal.comm.world import current_world, has_scoped_world, use_world
from shoal.parallel.sequence import context as sequence
from shoal.streams import carried, simulation


def run_in_threads(patch: pytest.MonkeyPatch) -> None:
    """Each pass of autograd runs in a new thread, for which its caller waits."""
    run = torch.autograd._engine_run_backward

    def run_in_thread(*args: Any, **kwargs: Any) -> Any:
        # A compiler traces it, or the check of streams follows this thread, as if autograd's own thread was this one.
        if torch._guards.TracingContext.try_get() is not None or simulation() is not None:
            return run(*args, **kwargs)
        world = current_world() if has_scoped_world() else None
        setting = None if world is None else sequence._of_thread.get()
        results: list[Any] = []
        errors: list[BaseException] = []

        def work() -> None:
            sequence._of_thread.set(setting)
            try:
                with nullcontext() if world is None else use_world(world):
                    results.append(run(*args, **kwargs))
            except BaseException as error:
                errors.append(error)

        on_device, _ = carried(work, "autograd")  # autograd puts its threads on their devices
        thread = threading.Thread(target=on_device)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    patch.setattr(torch.autograd, "_engine_run_backward", run_in_thread)
