"""The time of a step: Shoal, plain PyTorch on one rank, DDP, FSDP2 and DeepSpeed on one GPT, in turn in one run.

    python -m benchmarks.step --ranks 2 --sequences 1 4 --precision bf16 fp32 --out results.json

``ratio`` is to ``plain``: the same model and batch in one process alone, with no communication.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arena import Result, available_bytes, compete, machine, table
from benchmarks.contenders import CONTENDERS, Task

# Not those of other questions: other numerics, and offload (benchmarks.offload, which has a folder for them).
DEFAULT = [name for name in CONTENDERS if not name.endswith(("-no-masters", "-autocast", "-host", "-ahead", "-disk"))]
BYTES_PER_PROCESS = 1.4 * 2**30  # what one rank of the largest contender takes, with a margin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4], help="sequences a rank")
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=DEFAULT, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps in a round, after one that is not counted")
    parser.add_argument("--most-rounds", type=int, default=0, help="go on so long while too few steps were quiet")
    parser.add_argument("--together", type=int, default=0, help="contenders alive at a time; 0: as memory allows")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "arguments": vars(arguments) | {"out": None}, "runs": []}
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    for ranks in arguments.ranks:
        for precision in arguments.precision:
            for sequences in arguments.sequences:
                task = Task(precision=precision, sequences=sequences)
                rows = run(task, ranks, arguments)
                report["runs"].append({"ranks": ranks, "precision": precision, "sequences": sequences, "rows": rows})
                print(f"\n{ranks} ranks, {precision}, {sequences} sequences a rank\n{show(rows)}", flush=True)
                if arguments.out:
                    arguments.out.parent.mkdir(parents=True, exist_ok=True)
                    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def run(task: Task, ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure in groups that fit the memory; ``plain`` runs in every group and is what its ratios are to."""
    names = [name for name in arguments.contenders if name != "plain"]
    together = arguments.together or max(1, int((available_bytes() / BYTES_PER_PROCESS - 1) // ranks))
    rows: list[dict[str, Any]] = []
    for first in range(0, max(1, len(names)), together):
        group = names[first : first + together]
        results = compete(
            ["plain", *group],
            task,
            ranks,
            rounds=arguments.rounds,
            steps=arguments.steps,
            most_rounds=arguments.most_rounds,
        )
        base: Result = results["plain"]
        reference = None if base.error else median(base.seconds)
        rows += [result.as_dict(reference) for name, result in results.items() if name != "plain" or first == 0]
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    lines = [["contender", "ms", "ratio", "min", "max", "steps", "quiet", "peak MiB", "loss"]]
    for row in rows:
        if "error" in row:
            lines.append([row["contender"], "failed", *[""] * 7])
            continue
        lines.append(
            [
                row["contender"],
                f"{row['ms']:.1f}",
                "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
                f"{row['ms_min']:.1f}",
                f"{row['ms_max']:.1f}",
                str(row["steps"]),
                str(row["quiet_steps"]),
                f"{row['peak_mib']:.0f}",
                f"{row['loss']:.3f}",
            ]
        )
    failures = "".join(f"\n\n{row['contender']} failed: {row['error']}" for row in rows if "error" in row)
    return table(lines) + failures


if __name__ == "__main__":
    main()
