"""What a parameter costs in Python: a model of 1,000 small parameters, whose step is nearly all overhead.

python -m benchmarks.many_parameters --ranks 2
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.arena import machine
from benchmarks.contenders import CONTENDERS, Task
from benchmarks.step import run, show

DEFAULT = ["plain", "plain-together", "ddp", "fsdp2-stage2", "fsdp2-stage3", *(f"shoal-{stage}" for stage in range(4))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--parameters", type=int, default=1000, help="half of them weights of 32 x 32, half biases of 32"
    )
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="fp32")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=DEFAULT, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--most-rounds", type=int, default=0)
    parser.add_argument("--together", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    task = Task(precision=arguments.precision, sequences=1, small_layers=arguments.parameters // 2)
    rows = run(task, arguments.ranks, arguments)
    print(f"{arguments.ranks} ranks, {arguments.precision}, {arguments.parameters} parameters\n{show(rows)}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
