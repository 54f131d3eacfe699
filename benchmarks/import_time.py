"""How much longer ``import shoal`` takes than ``import torch``: medians of new processes, in turn.

python -m benchmarks.import_time --most-seconds 0.3
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median


def seconds_of(statement: str) -> float:
    """Seconds that a new interpreter spends in one import statement, its own start not counted."""
    program = f"import time; begin = time.perf_counter(); {statement}; print(time.perf_counter() - begin)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most-seconds", type=float, default=0.3, help="fail above so many seconds more")
    arguments = parser.parse_args()
    statements = ("import torch", "import shoal")
    for statement in statements:
        seconds_of(statement)  # bytecode and files are in memory from here on
    times: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(arguments.rounds):
        for statement in statements:
            times[statement].append(seconds_of(statement))
    torch_seconds, shoal_seconds = (median(times[statement]) for statement in statements)
    more = shoal_seconds - torch_seconds
    print(f"import torch {torch_seconds:.2f} s, import shoal {shoal_seconds:.2f} s: {more:.2f} s more")
    if more > arguments.most_seconds:
        sys.exit(
            f"import shoal takes {more:.2f} s more than import torch; at most {arguments.most_seconds} s are meant"
        )


if __name__ == "__main__":
    main()
