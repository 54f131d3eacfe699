"""Runs all checks, each in a process with a time limit, and writes one page that says what held and what did not.

python -m benchmarks.first_gpu --out runs/first-gpu.md                     # one GPU, less than 20 minutes
python -m benchmarks.first_gpu --device cpu --only nccl kernels --out x.md  # the logic, in small sizes
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.arena import ROOT


def missing_packages() -> list[str]:
    """What Shoal depends on and this Python does not have."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.split(r"[^A-Za-z0-9_-]", each)[0] for each in listed]
    return [name for name in names if importlib.util.find_spec({"pyyaml": "yaml"}.get(name, name)) is None]


if missing := missing_packages():
    sys.exit(
        f"{sys.executable} has no {', '.join(missing)}, which Shoal needs. With an index: pip install"
        f" {' '.join(missing)}; without one, copy their folders to the machine and add these to PYTHONPATH."
    )

# Below the check: these import what may be missing.
from benchmarks.first_gpu.common import Finding  # noqa: E402
from shoal.simulation.machines import nearest_machine  # noqa: E402

# By module: the longest that it may take, in seconds. The page is read from the top.
LIMITS = {
    "host_parameters": 90,
    "delays": 150,
    "synchronizations": 60,
    "nccl": 90,
    "memory": 60,
    "kernels": 60,
    "step_time": 300,
    "exposed": 120,
    "device_tests": 220,
}
# Three runs of less than ten minutes each, where a command may not take longer.
PARTS = (
    ("host_parameters", "delays", "synchronizations", "nccl", "memory", "kernels"),
    ("step_time", "exposed"),
    ("device_tests",),
)
ENVIRONMENTS = {"nccl": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}


@dataclass
class Outcome:
    """What one check found, and how it ended."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""  # it did not end by itself, or with an error
    output: str = ""


def command_of(name: str, device: str, limit: float) -> list[str]:
    """The program of a check."""
    return [
        sys.executable, "-m", f"benchmarks.first_gpu.{name}", "--device", device, "--seconds", f"{limit:.0f}",
    ]  # fmt: skip


def run(name: str, command: list[str], limit: float, folder: Path) -> Outcome:
    """Run one check; what it has found before its end counts, however it ends.

    Args:
        command: gets ``--out FILE``, where it writes findings.
    """
    path = folder / f"{name}.jsonl"
    begin, outcome = time.monotonic(), Outcome(name)
    with (folder / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(
            [*command, "--out", str(path)],
            cwd=ROOT,
            env=_environment(ENVIRONMENTS.get(name, {})),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            outcome.problem = "" if code == 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            outcome.problem = f"was ended after {limit:.0f} s"
        finally:
            _end(process)
        log.seek(0)
        outcome.output = log.read()
    outcome.seconds = time.monotonic() - begin
    if path.exists():
        outcome.findings = [Finding(**json.loads(line)) for line in path.read_text().splitlines() if line]
    return outcome


def _end(process: subprocess.Popen[Any]) -> None:
    """End a check and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(more: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | more


def page(outcomes: list[Outcome], predictions: dict[str, dict[str, Any]], machine: str) -> str:
    """The page, as Markdown."""
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    held = sum(finding.held is True for finding in findings)
    broken = [(outcome, finding) for outcome in outcomes for finding in outcome.findings if finding.held is False]
    ended = [outcome for outcome in outcomes if outcome.problem]
    lines = ["# The first day with a GPU", "", machine, ""]
    lines += [f"**{held} held, {len(broken)} did not, {len(ended)} of {len(outcomes)} checks did not end well.**", ""]
    missing = {str(each["missing"]) for each in predictions.values() if "missing" in each}
    if not predictions or missing:
        lines += [f"Predictions are missing: {'; '.join(sorted(missing)) or 'none was made'}.", ""]
    if broken or ended:
        lines += ["## What did not hold", ""]
        lines += [f"- {outcome.name}: {_cell(finding.what)}: {_cell(finding.measured)}" for outcome, finding in broken]
        lines += [f"- {outcome.name}: {outcome.problem}" for outcome in ended] + [""]
    for outcome in outcomes:
        text = (importlib.import_module(f"benchmarks.first_gpu.{outcome.name}").__doc__ or "").strip()
        lines += [f"## {outcome.name}", "", text, "", f"{outcome.seconds:.0f} s. {outcome.problem}".strip(), ""]
        if outcome.findings:
            lines += ["| | what | measured | expected | predicted |", "| --- | --- | --- | --- | --- |"]
            lines += [_row(finding, predictions) for finding in outcome.findings] + [""]
        if outcome.problem:
            lines += ["```", *outcome.output.strip().splitlines()[-30:], "```", ""]
    return "\n".join(lines)


def _row(finding: Finding, predictions: dict[str, dict[str, Any]]) -> str:
    verdict = {True: "held", False: "**no**", None: ""}[finding.held]
    cells = [verdict, *map(_cell, (finding.what, finding.measured, finding.expected)), _predicted(finding, predictions)]
    return f"| {' | '.join(cells)} |"


def _predicted(finding: Finding, predictions: dict[str, dict[str, Any]]) -> str:
    key, _, part = finding.key.partition("/")
    value = predictions.get(key, {}).get(part or "ms")
    if value is None or finding.value is None:
        return ""
    return f"{value:.1f} ms" + (f" (measured {finding.value / value:.2f} of it)" if value else "")


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _machine(device: str) -> str:
    import torch

    text = f"PyTorch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        text += f", {properties.name} with {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        text += f", NCCL {nccl}"
    else:
        text += ", **no GPU: small sizes on the CPU, which show that the checks run and nothing else**"
    return text


def _machine_name(device: str) -> str:
    import torch

    if device == "cpu":
        return "h200"
    properties = torch.cuda.get_device_properties(0)
    return nearest_machine(properties.name, properties.total_memory) or "h200"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--only", nargs="+", choices=list(LIMITS), default=list(LIMITS), metavar="CHECK")
    some.add_argument("--part", type=int, choices=range(1, len(PARTS) + 1), help="some checks, in under ten minutes")
    parser.add_argument("--minutes", type=float, default=19.0, help="for all checks together")
    parser.add_argument("--machine", default="", help="whose figures the predictions are of; default: this GPU's")
    parser.add_argument("--predictor", default="", metavar="MODULE:FUNCTION", help="in place of the dry run")
    parser.add_argument("--out", type=Path, default=Path("runs/first-gpu.md"))
    given = parser.parse_args(arguments)
    if given.part:
        given.only = list(PARTS[given.part - 1])
    end = time.monotonic() + 60 * given.minutes
    machine = _machine(given.device)
    outcomes: list[Outcome] = []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        predicted = folder / "predicted.json"
        command = [sys.executable, "-m", "benchmarks.first_gpu.predict", "--out", str(predicted)]
        command += ["--machine", given.machine or _machine_name(given.device), "--by", given.predictor]
        command += ["--cases"] if given.device == "cpu" and not given.predictor else []
        predictor = subprocess.Popen(
            command, cwd=ROOT, env=_environment({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            for check in given.only:
                limit = min(float(LIMITS[check]), end - time.monotonic())
                if limit < 10:
                    outcomes.append(Outcome(check, problem="was not begun: no time was left"))
                    continue
                outcomes.append(run(check, command_of(check, given.device, limit), limit, folder))
                last = outcomes[-1]
                counts = [sum(each.held is verdict for each in last.findings) for verdict in (True, False)]
                print(
                    f"{check}: {counts[0]} held, {counts[1]} did not, {last.seconds:.0f} s {last.problem}", flush=True
                )
                _write(given.out, outcomes, predicted, machine)
            if given.predictor or given.device == "cuda":
                predictor.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            print("predictions were not complete")
        finally:
            _end(predictor)
        _write(given.out, outcomes, predicted, machine)
    print(given.out)
    return int(any(each.problem or any(f.held is False for f in each.findings) for each in outcomes))


def _write(out: Path, outcomes: list[Outcome], predicted: Path, machine: str) -> None:
    """The page, and beside it the output of all checks. Called after each: what is there stays if this is ended."""
    predictions = json.loads(predicted.read_text() or "{}") if predicted.exists() else {}
    out.write_text(page(outcomes, predictions, machine) + "\n")
    log = "\n".join(f"==== {outcome.name}\n{outcome.output}" for outcome in outcomes)
    out.with_suffix(".log").write_text(log)


if __name__ == "__main__":
    sys.exit(main())
