"""Steps on a slow network: two ranks on two hosts whose link is held to a rate, plain and with fewer bits, in turn.

    python -m benchmarks.slow_network --rates 100mbit 1gbit --out runs/slow_network.json

A host is a network namespace with processes and a host name of its own; the two are joined by a pair of virtual
interfaces, each of which sends at most at the rate (a token bucket filter). Needs root and iproute2. Every rank has one
thread. A round is a few steps of each contender; the table has the median of the rounds' mean time of a step, and the
bytes that rank 0's host has sent in a step, headers included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arena import ContenderError, Host, Team, machine, reason, table
from benchmarks.contenders import LEARNING_RATE, Task

ROUNDS_STEPS = 8  # in a round: a multiple of the steps between two synchronisations of local steps
BURST_SECONDS = 0.004  # of the rate, that may be sent at once
QUEUE = "400ms"  # what waits longer is dropped


@dataclass(frozen=True)
class Entry:
    """One line of the table: a contender of ``benchmarks.contenders``, and what its configuration has more."""

    contender: str
    more: dict[str, Any] | None = None
    warm_steps: int = 0  # before the first round


def _optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": LEARNING_RATE, **params}}}


ENTRIES: dict[str, Entry] = {
    "ddp": Entry("ddp"),
    "shoal-0": Entry("shoal-0"),
    "shoal-2": Entry("shoal-2"),
    "shoal-3": Entry("shoal-3"),
    "shoal-2 int8": Entry("shoal-2", {"wire": {"gather": "int8", "reduce": "int8"}}),
    "shoal-2 int8, int4": Entry("shoal-2", {"wire": {"gather": "int8", "reduce": "int4_hadamard"}}),
    "shoal-2 int4": Entry(
        "shoal-2", {"wire": {"gather": "int4_hadamard", "difference": True, "reduce": "int4_hadamard"}}
    ),
    "shoal-3 int8, int4": Entry("shoal-3", {"wire": {"gather": "int8", "reduce": "int4_hadamard"}}),
    "shoal-0 int8": Entry("shoal-0", {"wire": {"reduce": "int8"}}),
    "shoal-0 int4": Entry("shoal-0", {"wire": {"reduce": "int4_hadamard"}}),
    "shoal-0 1bit": Entry("shoal-0", {"wire": {"reduce": "1bit", "error_feedback": True}}),
    "shoal-0 1-bit Adam": Entry("shoal-0", _optimizer("OneBitAdam", freeze_step=3), warm_steps=4),
    "shoal-0 0/1 Adam": Entry(
        "shoal-0",
        _optimizer("ZeroOneAdam", var_freeze_step=3, local_step_scaler=4, local_step_clipper=8),
        warm_steps=16,
    ),
    "shoal-2 local steps": Entry("shoal-2", {"local_steps": {"every": 8}, "parallel": {"dp_replicate": 2}}),
    "shoal-2 local steps int4": Entry(
        "shoal-2", {"local_steps": {"every": 8, "wire": "int4_hadamard"}, "parallel": {"dp_replicate": 2}}
    ),
    "deepspeed-2": Entry("deepspeed-2"),
    "deepspeed-3": Entry("deepspeed-3"),
}


@contextmanager
def network(rate: str) -> Iterator[list[Host]]:
    """Two hosts whose link is held to ``rate`` (as ``tc`` takes it) in each direction."""
    names = [f"shoal{os.getpid()}n{number}" for number in range(2)]
    links = [f"sh{os.getpid()}v{number}" for number in range(2)]
    burst = max(32_000, int(_bytes_per_second(rate) * BURST_SECONDS))
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True)):
            _run("ip", "link", "set", link, "netns", name)
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "address", "add", f"10.77.0.{number + 1}/24", "dev", link)
            for device in ("lo", link):
                _run(*inside, "ip", "link", "set", device, "up")
            shaped = ("rate", rate, "burst", str(burst), "latency", QUEUE)
            _run(*inside, "tc", "qdisc", "add", "dev", link, "root", "tbf", *shaped)
        yield [_host(name, link) for name, link in zip(names, links, strict=True)]
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)


def _host(name: str, link: str) -> Host:
    # Processes of other hosts are not seen, so ranks cannot map each other's memory.
    apart = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    enter = ("ip", "netns", "exec", name, *apart, "sh", "-c", f'hostname {name} && exec "$@"', "sh")
    environment = {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": link, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return Host(enter, environment)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _bytes_per_second(rate: str) -> float:
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor / 8
    raise SystemExit(f"--rates {rate}: write a number of mbit or gbit, such as 100mbit.")


def _sent(host: Host) -> int:
    """Bytes that a host's link has sent since it was made."""
    link = host.environment["GLOO_SOCKET_IFNAME"]
    return int(_run(*host.enter[:4], "cat", f"/sys/class/net/{link}/statistics/tx_bytes"))


def measure(labels: list[str], task: Task, rate: str, rounds: int) -> list[dict[str, Any]]:
    """What each contender took at one rate, in turn."""
    rows: dict[str, dict[str, Any]] = {label: {"rate": rate, "contender": label} for label in labels}
    with network(rate) as hosts:
        teams: dict[str, Team] = {}
        try:
            for label in labels:
                entry = ENTRIES[label]
                team = Team(entry.contender, replace(task, more=entry.more or {}), 2, hosts=hosts)
                try:
                    team.wait_until_ready()
                    if entry.warm_steps:
                        team.run(entry.warm_steps)
                except ContenderError as error:
                    rows[label]["error"] = reason(str(error))
                    team.close()
                    continue
                teams[label] = team
                rows[label] |= {"seconds": [], "bytes": []}
            for _ in range(rounds):
                for label, team in teams.items():
                    before = _sent(hosts[0])
                    answers, _ = team.run(ROUNDS_STEPS)
                    row = rows[label]
                    row["bytes"].append((_sent(hosts[0]) - before) / (ROUNDS_STEPS + 1))
                    row["seconds"].append(max(sum(answer["seconds"]) for answer in answers) / ROUNDS_STEPS)
                    row["loss"] = sum(answer["loss"] for answer in answers) / len(answers)
        finally:
            for team in teams.values():
                team.close()
    return list(rows.values())


def show(rows: list[dict[str, Any]], reference: str) -> str:
    """The rows as a table; times as ratios to the reference of the same rate, too."""
    base = {row["rate"]: median(row["seconds"]) for row in rows if row["contender"] == reference and "seconds" in row}
    lines = [["rate, contender", "s a step", f"times as fast as {reference}", "MB sent", "loss"]]
    for row in rows:
        head = f"{row['rate']}  {row['contender']}"
        if "error" in row:
            lines.append([head, row["error"][:60], "", "", ""])
            continue
        seconds = median(row["seconds"])
        ratio = f"{base[row['rate']] / seconds:.2f}" if row["rate"] in base else ""
        lines.append([head, f"{seconds:.3f}", ratio, f"{median(row['bytes']) / 1e6:.2f}", f"{row['loss']:.3f}"])
    return table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", nargs="+", default=["100mbit", "1gbit"], help="of the link, such as 100mbit or 1gbit"
    )
    parser.add_argument("--contenders", nargs="+", default=list(ENTRIES), metavar="NAME", help=", ".join(ENTRIES))
    parser.add_argument("--reference", default="shoal-2", help="times are ratios to its (default: shoal-2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--layers", type=int, default=8, help="of width 512 (default: 8, 33.6 M parameters)")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    options = parser.parse_args()
    unknown = [name for name in options.contenders if name not in ENTRIES]
    if unknown:
        parser.error(f"--contenders {unknown[0]!r}: there are {', '.join(ENTRIES)}.")
    task = Task(precision=options.precision, num_layers=options.layers)
    rows: list[dict[str, Any]] = []
    for rate in options.rates:
        begin = time.monotonic()
        rows += measure(options.contenders, task, rate, options.rounds)
        print(show([row for row in rows if row["rate"] == rate], options.reference), flush=True)
        print(f"{time.monotonic() - begin:.0f} s\n", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": machine(), "task": task.as_dict(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
