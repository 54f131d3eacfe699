"""Draws cases, runs each against plain PyTorch, and makes the failing ones small.

    python -m tests.search --minutes 60 --seed 1                 # cases 1, 2, ... for an hour
    python -m tests.search --cases 25 --seed 1 --models own      # 25 cases of models whose name begins with own
    python -m tests.search --case '{"model": "gpt2", "tp": 2}'   # one case, with the traceback
    python -m tests.search --file faults.jsonl                   # the cases of a file again

The exit status is 1 if a case was wrong, crashed or hung.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.search.cases import PLAIN, Case, complete, draw, short
from tests.search.models import FAMILIES

FAULTS = ("wrong", "crash", "hang")
SECONDS = 300.0  # for one case, after which the worker is killed
MOST_TRIES = 40  # runs that make one case small


class Worker:
    """A process that runs cases, one after the other; another one after a hang."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, case: Case) -> dict[str, Any]:
        if self.process is None:
            command = [sys.executable, "-W", "ignore", "-m", "tests.search", "--worker"]
            environment = {"OMP_NUM_THREADS": "1", **os.environ, "TOKENIZERS_PARALLELISM": "false"}
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        self.send(case)
        found = self.wait(SECONDS)
        if found["kind"] == "hang" or self.process.poll() is not None:
            self.close()
        return found

    def send(self, case: Case) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()

    def wait(self, seconds: float) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not ready:
            return {"kind": "hang", "what": f"no outcome in {seconds:g} s", "details": ""}
        line = self.process.stdout.readline()
        if not line:
            return {"kind": "crash", "what": f"the process ended with status {self.process.wait()}", "details": ""}
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None


def serve() -> None:
    """A worker: a case on each line of stdin, its outcome on a line of stdout."""
    import logging

    import torch

    from tests.search.run import run

    answers, sys.stdout = sys.stdout, sys.stderr
    logging.lastResort = None  # run() reads the warnings of Shoal itself
    logging.getLogger("shoal").propagate = False
    torch.set_num_threads(1)
    for line in sys.stdin:
        outcome = run(json.loads(line))
        answers.write(json.dumps({"kind": outcome.kind, "what": outcome.what, "details": outcome.details}) + "\n")
        answers.flush()


def symptom(found: dict[str, Any]) -> str:
    """What is alike in two outcomes of one fault: the words without numbers and names in quotes."""
    if found["kind"] != "crash":
        return str(found["kind"])
    return re.sub(r"'[^']*'|\d+", "_", found["what"])[:120]


def simpler(case: Case) -> list[Case]:
    """Cases with one option less, or with a plainer value of it."""
    found: list[Case] = []
    for name in sorted(case, key=lambda name: name != "then"):
        if name == "model":
            continue
        plainer: list[Any] = [PLAIN[name]]
        if isinstance(case[name], int) and not isinstance(case[name], bool) and name != "small":
            plainer += [value for value in (1, 2) if PLAIN[name] < value < case[name]]
        if name == "then":
            plainer += [{key: value for key, value in case[name].items() if key != drop} for drop in case[name]]
        for value in plainer:
            whole = complete({**case, name: value})
            if whole is not None and short(whole) != case:
                found.append(short(whole))
    found += [{**case, "model": model} for model in ("own", "llama") if case["model"] not in ("own", "llama")]
    return [each for each in found if complete(each)]


def shrink(case: Case, found: dict[str, Any], worker: Worker) -> tuple[Case, dict[str, Any]]:
    """The smallest case with the same symptom that leaving out one option after the other finds."""
    tries = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for each in simpler(case):
            if tries >= MOST_TRIES:
                return case, found
            tries += 1
            outcome = worker.run(each)
            if symptom(outcome) == symptom(found):
                case, found, is_smaller = each, outcome, True
                break
    return case, found


def search(arguments: argparse.Namespace) -> int:
    models = tuple(name for name in FAMILIES if name.startswith(tuple(arguments.models or [""])))
    end = time.monotonic() + arguments.minutes * 60
    seeds = range(arguments.seed + arguments.job, arguments.seed + (arguments.cases or 10**9), arguments.jobs)
    counts: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    known: list[tuple[str, Case]] = []
    worker = Worker()
    for seed in seeds:
        if time.monotonic() > end:
            break
        case = draw(seed, models)
        found = worker.run(case)
        counts[found["kind"]] += 1
        if found["kind"] == "refused":
            refusals[found["what"].split(":")[0]] += 1
            say(arguments, {"seed": seed, "refused": found["what"][:300], "case": case})
        if found["kind"] not in FAULTS:
            continue
        print(f"seed {seed}: {found['kind']}: {found['what'][:300]}\n  {json.dumps(case)}", flush=True)
        if any(symptom(found) == said and small.items() <= case.items() for said, small in known):
            print("  known", flush=True)
            continue
        small, outcome = (case, found) if arguments.no_shrink else shrink(case, found, worker)
        known.append((symptom(outcome), small))
        print(f"  small: {json.dumps(small)}\n  {outcome['what'][:600]}", flush=True)
        say(arguments, {"seed": seed, **outcome, "case": small, "drawn": case})
    worker.close()
    total = max(sum(counts.values()), 1)
    print(f"{total} cases from seed {arguments.seed}: {dict(counts)}; refused {counts['refused'] / total:.0%}")
    print(f"refusals: {dict(refusals.most_common())}")
    return int(any(counts[kind] for kind in FAULTS))


def say(arguments: argparse.Namespace, line: dict[str, Any]) -> None:
    if arguments.out:
        with Path(arguments.out).open("a") as file:
            file.write(json.dumps(line) + "\n")


def again(cases: list[Case]) -> int:
    worker, num_faults = Worker(), 0
    for case in cases:
        found = worker.run(case)
        num_faults += found["kind"] in FAULTS
        print(f"{found['kind']}: {found['what'][:600]}\n  {json.dumps(case)}", flush=True)
        if len(cases) == 1:
            print(found["details"])
    worker.close()
    return int(num_faults > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, help="at most so many cases")
    parser.add_argument("--seed", type=int, default=1, help="of the first case; the next ones count up")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--models", nargs="*", help="only models whose names begin so")
    parser.add_argument("--case", help="one case, as JSON")
    parser.add_argument("--file", help="a file of cases, as --out writes them")
    parser.add_argument("--out", help="append failing and refused cases to this file, as JSON lines")
    parser.add_argument("--no-shrink", action="store_true", help="do not make failing cases small")
    parser.add_argument("--job", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve()
        return 0
    if arguments.case:
        return again([json.loads(arguments.case)])
    if arguments.file:
        lines = [json.loads(line) for line in Path(arguments.file).read_text().splitlines() if line.strip()]
        return again([line.get("case", line) for line in lines])
    if arguments.jobs > 1 and not arguments.job:
        others = [
            subprocess.Popen([sys.executable, "-m", "tests.search", *sys.argv[1:], "--job", str(job)])
            for job in range(1, arguments.jobs)
        ]
        status = search(arguments)
        return max([status, *(each.wait() for each in others)])
    return search(arguments)


if __name__ == "__main__":
    sys.exit(main())
