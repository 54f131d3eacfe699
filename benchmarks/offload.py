"""Offload beside its peers, in phases that each have a time limit; JSON grows as they end, a line tells of each.

    python -m benchmarks.offload --out runs/offload.json                    # on a GPU where there is one, else small
    python -m benchmarks.offload --device cpu --phases step-host --rounds 9

| phase | where | what |
| --- | --- | --- |
| ``host-adam`` | both | the host's AdamW beside DeepSpeedCPUAdam and a plain copy (``benchmarks.host_adam``) |
| ``disk`` | CPU | the disk tier beside fio (``benchmarks.disk``) |
| ``step-host`` | CPU | a step with optimizer state in host memory beside ZeRO-Offload and FSDP2's CPUOffloadPolicy |
| ``step-disk`` | CPU | a step with optimizer state on a disk: Shoal, DeepSpeed's ``nvme`` |
| ``link`` | GPU | bandwidth of page-locked copies, which bounds the time of gradient and parameter copies |
| ``tokens-7b``, ``tokens-13b`` | GPU | tokens/s with optimizer state in host memory, the peers one after the other |
| ``largest`` | both | the largest GPT that trains, state split between device and host as memory is (``ratio``) |

A contender whose host memory would not fit, by the bytes a parameter below, is not started: that is its row then. On a
GPU contenders run one at a time, since each takes most of the host. The share of the host's update that is hidden
behind the device's work is 1 - (seconds that the step waited for updates) / (seconds of updates).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arena import Result, available_bytes, compete, machine, reason, table
from benchmarks.contenders import Task

GIB = 2**30
SPARE = 0.92  # of the memory that is free may be planned with
# Host bytes a parameter in bf16 training with fp32 AdamW: master and two moments, then copies under way.
HOST_BYTES = {"shoal-host": 16.0, "shoal-host-ahead": 28.0, "deepspeed-host": 18.0, "fsdp2-host": 16.0}
VOCABULARY = 50304
CPU_PHASES = {"host-adam": 150, "disk": 90, "step-host": 180, "step-disk": 120, "largest": 60}  # seconds
GPU_PHASES = {"host-adam": 60, "link": 20, "tokens-7b": 165, "largest": 150, "tokens-13b": 165}


@dataclass(frozen=True)
class TrainingPlan:
    """Bytes a parameter that some way to train keeps.

    Args:
        device: on the device, whatever the ratio.
        state: of optimizer state and master weights, where they are on the device.
        host: of the same on the host, with copies under way.
        config: Shoal's.
    """

    name: str
    device: float
    state: float
    host: float
    config: dict[str, Any]

    def best(self, device_bytes: float, host_bytes: float) -> tuple[float, float]:
        """The most parameters that fit, and the share of the state that is on the host then.

        >>> plan = TrainingPlan("", device=4, state=12, host=16, config={})
        >>> plan.best(40e9, 1e15)
        (10000000000.0, 1.0)
        >>> numel, ratio = plan.best(140e9, 120e9)
        >>> round(numel / 1e9, 1), round(ratio, 2)
        (14.4, 0.52)
        """
        ratio = host_bytes * (self.device + self.state) / (device_bytes * self.host + host_bytes * self.state)
        ratio = min(1.0, ratio)
        return min(device_bytes / (self.device + (1 - ratio) * self.state), host_bytes / (self.host * ratio)), ratio


LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1}}}
NO_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
PLANS = [
    # parameter 2 + gradient 2 | two moments in bf16 | the same, a copy of the weights, gradient and result on their way
    TrainingPlan("AdamW, all in bf16", 4, 4, 10, NO_MASTERS),
    # parameter 2 + gradient 2 | master 4 + moments 8 | the same, gradient and result on their way
    TrainingPlan("AdamW, fp32 masters and moments", 4, 12, 16, {}),
    TrainingPlan("Lion, fp32 master and momentum", 4, 8, 12, LION),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--phases", nargs="+", choices=sorted({*CPU_PHASES, *GPU_PHASES}), metavar="NAME")
    parser.add_argument("--minutes", type=float, default=9.5, help="no phase begins, or goes on, after so many")
    parser.add_argument("--ranks", type=int, default=2, help="of steps on CPUs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8, help="of the GPT that steps on CPUs train")
    parser.add_argument("--hidden", type=int, default=512, help="width of that GPT")
    parser.add_argument("--sequences", type=int, default=8, help="of 2,048 tokens, of a step on a GPU")
    parser.add_argument("--folder", type=Path, help="on a disk; None: one of the system's for passing things")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    arguments = parser.parse_args()
    if arguments.device == "auto":
        import torch

        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    run(arguments)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All phases, one after the other. Returns: what the JSON holds."""
    limits = CPU_PHASES if arguments.device == "cpu" else GPU_PHASES
    names = arguments.phases or list(limits)
    begin = time.monotonic()
    end = begin + 60 * arguments.minutes
    report: dict[str, Any] = {"machine": machine(), "device": arguments.device, "phases": {}}
    report["deepspeed"] = importlib.util.find_spec("deepspeed") is not None
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    if not report["deepspeed"]:
        print("DeepSpeed is not installed here: its rows are missing")
    with _folder(arguments.folder) as folder:
        for name in names:
            deadline = min(end, time.monotonic() + limits.get(name, 120))
            print(f"[{time.monotonic() - begin:5.0f} s] {name}", flush=True)
            try:
                if deadline - time.monotonic() < 10:
                    raise TimeoutError("no time is left")
                found = PHASES[name](arguments, deadline, folder)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
                print(f"          not measured: {found['error'].splitlines()[0]}")
            found["seconds"] = round(time.monotonic() - begin, 1)
            report["phases"][name] = found
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"[{time.monotonic() - begin:5.0f} s] done", flush=True)
    return report


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="shoal-offload-") as made:
        yield Path(made)


# parts that have scripts of their own


def host_adam(arguments: argparse.Namespace, deadline: float, folder: Path) -> dict[str, Any]:
    names = ["copy", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else []), "whole", "threads"]
    threads = 2 if arguments.device == "cpu" else _cores()
    rounds = arguments.rounds if arguments.device == "cpu" else 9
    options = ["--small", "--threads", str(threads), "--rounds", str(rounds), "--contenders", *names]
    found = _script("benchmarks.host_adam", options, deadline, folder)
    for row in found["rows"]:
        peer = f", {row['time_to_deepspeed']:.2f} of DeepSpeed's time" if "time_to_deepspeed" in row else ""
        print(f"          {row['contender']}: {row['ms']:.1f} ms{peer}, {1 / row['time_to_copy']:.2f} of a copy's rate")
    return found


def disk(arguments: argparse.Namespace, deadline: float, folder: Path) -> dict[str, Any]:
    options = ["--folder", str(folder / "disk"), "--size-mib", "512", "--rounds", str(arguments.rounds)]
    found = _script("benchmarks.disk", options, deadline, folder)
    rates = found["MiB/s"]
    for name, figures in rates.items():
        print(f"          {name}: writes {median(figures['write']):.0f}, reads {median(figures['read']):.0f} MiB/s")
    return found


def _script(module: str, options: list[str], deadline: float, folder: Path) -> dict[str, Any]:
    out = folder / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", module, *options, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=max(1.0, deadline - time.monotonic()),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


# steps on CPUs, in turn


def step_host(arguments: argparse.Namespace, deadline: float, folder: Path) -> dict[str, Any]:
    return _in_turn(["shoal-2", "shoal-host", "deepspeed-host", "fsdp2-host"], arguments, deadline, folder)


def step_disk(arguments: argparse.Namespace, deadline: float, folder: Path) -> dict[str, Any]:
    return _in_turn(["shoal-host", "shoal-disk", "shoal-3-disk", "deepspeed-disk"], arguments, deadline, folder)


def _in_turn(names: list[str], arguments: argparse.Namespace, deadline: float, folder: Path) -> dict[str, Any]:
    task = Task(num_layers=arguments.layers, hidden_size=arguments.hidden, folder=str(folder))
    results = compete(
        _installed(names), task, arguments.ranks, rounds=arguments.rounds, steps=3, deadline=deadline - 10
    )
    rows = [result.as_dict(None) for result in results.values()]
    for row in rows:
        own = results[row["contender"]]
        for peer in ("deepspeed-host", "deepspeed-disk", "fsdp2-host"):
            if row["contender"].startswith("shoal") and peer in results and results[peer].seconds and own.seconds:
                row[f"times_as_fast_as_{peer}"] = round(_times_as_fast(own, results[peer]), 3)
    print(_shown(rows))
    return {"ranks": arguments.ranks, "rows": rows}


def _times_as_fast(own: Result, peer: Result) -> float:
    """The median of the ratios of samples, in the order in which they were taken."""
    return median(theirs / ours for ours, theirs in zip(own.in_order, peer.in_order, strict=False))


# on a GPU, one at a time


def tokens_7b(arguments: argparse.Namespace, deadline: float, folder: Path) -> dict[str, Any]:
    return _tokens((32, 4096, 32), arguments, deadline, folder)


def tokens_13b(arguments: argparse.Namespace, deadline: float, folder: Path) -> dict[str, Any]:
    return _tokens((40, 5120, 40), arguments, deadline, folder)


def _tokens(
    shape: tuple[int, int, int], arguments: argparse.Namespace, deadline: float, folder: Path
) -> dict[str, Any]:
    """Tokens a second of a GPT of (layers, width, heads)."""
    layers, width, heads = shape
    task = Task(
        sequences=arguments.sequences,
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        vocab_size=VOCABULARY,
        sequence_length=2048,
        device=arguments.device,
        is_recomputed=True,
        is_meta=True,
        folder=str(folder),
        threads=_cores(),
    )
    numel = num_parameters(task)
    free = SPARE * available_bytes()
    names = _installed(["shoal-host", "deepspeed-host", "fsdp2-host"])
    if HOST_BYTES["shoal-host-ahead"] * numel < free:
        names.insert(1, "shoal-host-ahead")
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        own, needed = task, HOST_BYTES[name] * numel
        if needed > free and name == "shoal-host":  # what does not fit the host stays on the device
            ratio = round(free / needed, 3)
            own, needed = replace(task, zero=_split(ratio)), free
        if needed > free:
            rows.append({"contender": name, "error": f"needs {needed / GIB:.0f} GiB of {free / GIB:.0f} on the host"})
            continue
        left = deadline - time.monotonic()
        result = compete([name], own, 1, rounds=1, steps=3, deadline=time.monotonic() + left / (len(names) - index))
        rows.append(_row(result[name], own))
    best = {row["contender"]: row["tokens_per_second"] for row in rows if "error" not in row}
    peers = [rate for name, rate in best.items() if not name.startswith("shoal")]
    ours = [rate for name, rate in best.items() if name.startswith("shoal")]
    print(_shown(rows))
    found: dict[str, Any] = {"parameters": numel, "tokens": task.sequences * task.sequence_length, "rows": rows}
    if peers and ours:
        found["times_as_fast_as_the_best_peer"] = round(max(ours) / max(peers), 3)
        print(f"          {found['times_as_fast_as_the_best_peer']} times as fast as the better peer")
    return found


def _split(ratio: float) -> dict[str, Any]:
    section = {"device": "cpu", "ratio": ratio} if ratio < 1 else {"device": "cpu"}
    return {"stage": 3, "offload_optimizer": section}


def _row(result: Result, task: Task) -> dict[str, Any]:
    row = result.as_dict(None)
    if "error" in row:
        return row
    row["tokens_per_second"] = round(task.sequences * task.sequence_length / median(result.seconds), 1)
    if result.host_seconds.get("updates"):
        hidden = 1 - result.host_seconds["waited"] / result.host_seconds["updates"]
        row["hidden_share_of_host_updates"] = round(max(0.0, hidden), 3)
    return row


def link(arguments: argparse.Namespace, deadline: float, folder: Path) -> dict[str, Any]:
    """GB/s of page-locked copies of 1 GiB, each way."""
    import torch

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    found = {}
    for name, source, target in (("to host", device, host), ("to device", host, device)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found[f"GB/s {name}"] = round(5 * GIB / (time.perf_counter() - begin) / 1e9, 1)
    print("          " + ", ".join(f"{key}: {value}" for key, value in found.items()))
    return found


# the largest


def largest(arguments: argparse.Namespace, deadline: float, folder: Path) -> dict[str, Any]:
    """Plans in turn, each at the size that should fit, then smaller; the first steps of each are taken."""
    if arguments.device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        room = (SPARE * free - 12 * GIB, SPARE * available_bytes())  # activations, one gathered unit, the allocator
        torch.cuda.empty_cache()
    else:
        room = (4e6, 40e6)  # a small made-up machine: on a CPU this phase only tests the script
    rows: list[dict[str, Any]] = []
    best = 0
    for index, plan in enumerate(PLANS):
        numel, ratio = plan.best(*room)
        for shrink in (1.0, 0.88):
            task = _sized(int(numel * shrink), arguments, plan, round(ratio, 3), folder)
            left = deadline - time.monotonic()
            if num_parameters(task) <= best or left < 15:
                break
            share = left / (len(PLANS) - index)
            name = f"shoal-{task.zero['stage']}"
            result = compete([name], task, 1, rounds=1, steps=1, deadline=time.monotonic() + share)[name]
            row = {"contender": plan.name, "parameters": num_parameters(task), "ratio": ratio}
            rows.append({**_row(result, task), **row})
            if not result.error:
                best = num_parameters(task)
            if not result.error or "Config" in reason(result.error):
                break
    print(_shown(rows))
    print(f"          the largest that trained: {best / 1e9:.3g} B parameters")
    return {"largest": best, "rows": rows}


def _sized(numel: int, arguments: argparse.Namespace, plan: TrainingPlan, ratio: float, folder: Path) -> Task:
    """A task with a model of about so many parameters, at most."""
    is_small = arguments.device == "cpu"
    width, vocabulary = (128, 256) if is_small else (6144, VOCABULARY)
    task = Task(
        sequences=1,
        num_layers=1,
        hidden_size=width,
        num_heads=width // 128,
        vocab_size=vocabulary,
        sequence_length=128 if is_small else 1024,
        device=arguments.device,
        is_recomputed=True,
        is_meta=True,
        zero=_split(ratio),
        more=plan.config,
        folder=str(folder),
        threads=1 if is_small else _cores(),
    )
    block = 12 * width * width + 2 * width
    layers = (numel - (num_parameters(task) - block)) // block
    return replace(task, num_layers=max(1, layers))


def num_parameters(task: Task) -> int:
    """Of the task's GPT, whose head is not tied.

    >>> num_parameters(Task()) // 10**5
    335
    """
    width = task.hidden_size
    return task.num_layers * (12 * width * width + 2 * width) + 2 * task.vocab_size * width + width


def _installed(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("deepspeed") or importlib.util.find_spec("deepspeed")]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _shown(rows: list[dict[str, Any]]) -> str:
    lines = [["contender", "ms", "least to most", "tokens/s", "hidden", "device or process MiB", "host MiB", "loss"]]
    notes = ""
    for row in rows:
        if "error" in row:
            notes += f"\n{row['contender']} failed: {reason(row['error'])}"
            continue
        lines.append(
            [
                row["contender"],
                f"{row['ms']:.0f}",
                f"{row['ms_min']:.0f} to {row['ms_max']:.0f}",
                str(row.get("tokens_per_second", "")),
                str(row.get("hidden_share_of_host_updates", "")),
                f"{row['peak_mib']:.0f}",
                f"{row['host_peak_mib']:.0f}",
                f"{row['loss']:.3f}",
            ]
        )
        for key, value in row.items():
            if key.startswith("times_as_fast_as"):
                notes += f"\n{row['contender']} is {value} {key.replace('_', ' ')}"
    return (table(lines) if len(lines) > 1 else "") + notes


PHASES: dict[str, Callable[[argparse.Namespace, float, Path], dict[str, Any]]] = {
    "host-adam": host_adam,
    "disk": disk,
    "step-host": step_host,
    "step-disk": step_disk,
    "link": link,
    "tokens-7b": tokens_7b,
    "tokens-13b": tokens_13b,
    "largest": largest,
}


if __name__ == "__main__":
    main()
