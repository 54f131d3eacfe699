"""How much longer Shoal takes to import than ``import torch``: medians of new processes, in turn.

``import shoal`` alone puts its parts off to their first use, so what they take together is told beside it.

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
    face = "import torch, shoal; [getattr(shoal, name) for name in shoal.__all__]"
    statements = ("import torch", "import torch, shoal", face)
    for statement in statements:
        seconds_of(statement)  # bytecode and files are in memory from here on
    times: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(arguments.rounds):
        for statement in statements:
            times[statement].append(seconds_of(statement))
    torch_seconds, shoal_seconds, face_seconds = (median(times[statement]) for statement in statements)
    more = shoal_seconds - torch_seconds
    print(f"import torch: {torch_seconds:.2f} s; import shoal: {more:.2f} s more", end="; ")
    print(f"and every public name of it: {face_seconds - torch_seconds:.2f} s more")
    if more > arguments.most_seconds:
        sys.exit(f"Shoal takes {more:.2f} s more than torch alone; at most {arguments.most_seconds} s are meant")


if __name__ == "__main__":
    main()
