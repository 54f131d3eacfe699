"""Memory: what Shoal holds per rank beside the formula, and the peak of a rank's process beside the peers'.

    python -m benchmarks.memory --ranks 2 --sequences 1

The formula is the ZeRO paper's (arXiv:1910.02054, section 3 and figure 1) without padding. With Adam, in bf16: 2 bytes
a parameter, 2 a gradient, 12 of master weight and moments; in fp32, where the parameter is its own master: 4, 4 and 8.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.arena import Team, available_bytes, compete, machine, table
from benchmarks.contenders import CONTENDERS, Task

PEERS = ["plain", "ddp", "fsdp2-stage2", "fsdp2-stage3", "deepspeed-1", "deepspeed-2", "deepspeed-3"]
SHOAL = [f"shoal-{stage}" for stage in range(4)]
HELD_KINDS = ("parameter", "gradient", "master", "optimizer state")


def formula_bytes(stage: int, numel: int, ranks: int, precision: str) -> float:
    """Bytes that one rank holds between steps.

    >>> formula_bytes(0, 100, 4, "bf16"), formula_bytes(3, 100, 4, "bf16"), formula_bytes(2, 100, 4, "fp32")
    (1600.0, 400.0, 700.0)
    """
    parameter, gradient, state = (2, 2, 12) if precision == "bf16" else (4, 4, 8)
    per_parameter = (
        (parameter / ranks if stage >= 3 else parameter)
        + (gradient / ranks if stage >= 2 else gradient)
        + (state / ranks if stage >= 1 else state)
    )
    return float(per_parameter * numel)


def held(stage: int, task: Task, ranks: int) -> dict[str, Any]:
    """The largest rank's ledger after two steps, beside the formula."""
    team = Team(f"shoal-{stage}", task, ranks)
    try:
        team.wait_until_ready()
        team.run(1)
        answers = team.ask(report="memory")
    finally:
        team.close()
    total = max(sum(answer["ledger"]["by_kind"][kind] for kind in HELD_KINDS) for answer in answers)
    formula = formula_bytes(stage, answers[0]["numel"], ranks, task.precision)
    return {
        "stage": stage,
        "by_kind": answers[0]["ledger"]["by_kind"],
        "held_bytes": total,
        "formula_bytes": formula,
        "over": total / formula - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=PEERS + SHOAL, metavar="NAME")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "runs": []}
    for precision in arguments.precision:
        # Parameters too small to be worth gathering stay whole by default; the formula knows no such exception.
        exact = {"stage3_param_persistence_threshold": 0}
        stages = [int(name[-1]) for name in arguments.contenders if name.startswith("shoal")]
        ledgers = [
            held(stage, Task(precision=precision, sequences=arguments.sequences, zero=exact), arguments.ranks)
            for stage in stages
        ]
        if ledgers:
            print(f"\nheld per rank, {arguments.ranks} ranks, {precision}")
            lines = [["stage", "held MiB", "formula MiB", "over"]]
            for row in ledgers:
                mib = (f"{row['held_bytes'] / 2**20:.2f}", f"{row['formula_bytes'] / 2**20:.2f}")
                lines.append([str(row["stage"]), *mib, f"{100 * row['over']:.3f} %"])
            print(table(lines))
        task = Task(precision=precision, sequences=arguments.sequences)
        peaks = []
        together = max(1, int(available_bytes() / (1.4 * 2**30) // arguments.ranks))
        for first in range(0, len(arguments.contenders), together):
            group = arguments.contenders[first : first + together]
            results = compete(group, task, arguments.ranks, rounds=2, steps=2)
            peaks += [result.as_dict(None) for result in results.values()]
        print(f"\npeak of the largest rank's process in training steps, {arguments.ranks} ranks, {precision}")
        lines = [["contender", "peak MiB", "shared counted once", "after imports", "between steps", "of it shared"]]
        for row in peaks:
            if "error" in row:
                lines.append([row["contender"], "failed", *[""] * 5])
                print(row["error"])
                continue
            values = (row["peak_mib"], row["once_mib"], row["imported_mib"], row["own_mib"], row["shared_mib"])
            lines.append([row["contender"], *(f"{value:.0f}" for value in values)])
        print(table(lines), flush=True)
        report["runs"].append({"precision": precision, "ledgers": ledgers, "peaks": peaks})
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
