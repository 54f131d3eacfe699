"""Two processes that run a client's script, under Shoal as `deepspeed` or under DeepSpeed, and what they report."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = Path(__file__).resolve().parent / "scripts"
GOLDEN = ROOT / "tests" / "fixtures" / "clients"
AS_DEEPSPEED = ("-m", "shoal.compat.deepspeed")
TAIL = 6000  # characters of a rank's words that a failure shows
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}  # on every point of a curve, against DeepSpeed 0.19.8

Result = dict[str, Any]


class ClientRun:
    """What a script's processes said: RESULT lines by case, and all else for a failure's message."""

    def __init__(self, results: dict[str, Result], said: list[str], codes: list[int | None], seconds: float) -> None:
        self.results = results
        self.said = said
        self.codes = codes
        self.seconds = seconds

    def case(self, name: str) -> Result:
        """The case's result. Raises: AssertionError: it failed, or the processes ended before it."""
        found = self.results.get(name)
        assert found is not None, f"no RESULT of {name}; exit codes {self.codes}\n{self.tail()}"
        assert "error" not in found, f"{name}: {found['error']}\n{self.tail()}"
        return found

    def tail(self) -> str:
        return "\n".join(f"--- rank {rank}\n{text[-TAIL:]}" for rank, text in enumerate(self.said))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def environment(folder: Path, **more: str) -> dict[str, str]:
    """A script's environment: the repository importable, one thread, no network, a folder to write to."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "DS_", "PYTEST_"))}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "SHOAL_CASES_FOLDER": str(folder),
        **more,
    }


def run_script(
    script: str,
    *arguments: str,
    ranks: int = 2,
    timeout: float = 500,
    python: str = sys.executable,
    runner: Sequence[str] = AS_DEEPSPEED,
    env: Mapping[str, str] | None = None,
) -> ClientRun:
    """Run ``scripts/SCRIPT`` once a rank, each a process of its own with torchrun's variables.

    Args:
        runner: the arguments between Python and the script; empty under DeepSpeed itself.
        timeout: seconds for all; processes that are left are killed.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-clients-") as made:
        folder = Path(made)
        base = environment(folder, **(env or {}))
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        base |= {"LOCAL_WORLD_SIZE": str(ranks)}
        logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                processes.append(
                    subprocess.Popen(
                        [python, *runner, str(SCRIPTS / script), *arguments],
                        cwd=folder,
                        env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = _wait(processes, begin + timeout)
        said = [log.read_text(errors="replace") for log in logs]
    return ClientRun(results_of(said[0]), said, codes, time.monotonic() - begin)


def run_command(command: Sequence[str], script: str, *arguments: str, timeout: float = 400) -> ClientRun:
    """Run a launcher of ranks, which ``command`` says, on ``scripts/SCRIPT``."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-clients-") as made:
        folder = Path(made)
        log = folder / "launcher.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [*command, str(SCRIPTS / script), *arguments],
                cwd=folder,
                env=environment(folder, MASTER_PORT=str(free_port())),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = log.read_text(errors="replace")
    return ClientRun(results_of(said), [said], [code], time.monotonic() - begin)


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Exit codes; None: killed at the deadline, or because another rank died and this one waited for it."""
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed_at is None and any(process.poll() not in (None, 0) for process in processes):
            failed_at = now
        if now > deadline or (failed_at is not None and now > failed_at + 15):
            break
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    return codes


def results_of(said: str) -> dict[str, Result]:
    """RESULT lines by case."""
    lines = [line.partition("RESULT ")[2] for line in said.splitlines() if "RESULT {" in line]
    return {result["case"]: result for result in map(json.loads, lines)}


def golden(name: str) -> dict[str, Any]:
    """What DeepSpeed 0.19.8 gave: ``tests/fixtures/clients/NAME.json``."""
    read: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return read


def differences(ours: Result, theirs: Result, bound: float) -> list[str]:
    """Points of curves farther apart than the bound, lengths and facts that are not the same. Norms: relative."""
    found = []
    for key, wanted in theirs.get("curves", {}).items():
        got = ours.get("curves", {}).get(key, [])
        if len(got) != len(wanted):
            found.append(f"{key}: {len(got)} points against {len(wanted)}: {got} against {wanted}")
            continue
        for index, (mine, other) in enumerate(zip(got, wanted, strict=True)):
            if not abs(mine - other) <= bound * max(1.0, abs(other)):
                found.append(f"{key}[{index}]: {mine} against {other}")
    for key, wanted in theirs.get("weights", {}).items():
        got = ours.get("weights", {}).get(key)
        if got is None or not abs(got - wanted) <= bound * max(1.0, abs(wanted)):
            found.append(f"weights {key}: {got} against {wanted}")
    for key, wanted in theirs.get("facts", {}).items():
        got = ours.get("facts", {}).get(key)
        if got != wanted:
            found.append(f"{key}: {got!r} against {wanted!r}")
    return found
