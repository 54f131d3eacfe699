"""Processes forked, in tenths of seconds, from one that has imported everything; a spawned one imports for seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.helpers.places import ROOT

_PRELOADED = [
    "torch._dynamo",
    "shoal.compat.initialize",
    "shoal.engine.peer_state",
    "shoal.optim.build",
    "shoal.checkpoint.save",
    "tests.helpers.gloo_pool",
    "tests.helpers.resuming",
]


def forking(preloaded: Sequence[str] = _PRELOADED) -> ForkServerContext:
    """The server starts with the first process, imports ``preloaded`` and is kept for all tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    return context


def server_pid() -> int | None:
    return getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]  # private


def stop_server() -> None:
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # private, and the only way


def run_program(program: str, timeout: float = 50) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, in the repository's folder, as ``python -c`` runs it; torch is imported."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(program, encoding="utf-8")
        process = forking().Process(target=_run_program, args=(name,))
        process.start()
        process.join(timeout)
        is_late = process.is_alive()
        process.kill()
        process.join()
        assert not is_late, f"not done after {timeout:g} s: {program}"
        out, err = ((folder / stream).read_text(encoding="utf-8") for stream in ("out", "err"))
        return subprocess.CompletedProcess(["program.py"], process.exitcode or 0, out, err)


def _run_program(folder: str) -> None:
    for stream, descriptor in (("out", 1), ("err", 2)):
        with Path(folder, stream).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(ROOT)
    try:
        runpy.run_path(str(Path(folder, "program.py")), run_name="__main__")
    finally:
        sys.stdout.flush()
