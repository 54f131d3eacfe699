"""One GPU: the step time of a GPT of 1.5 B parameters, Shoal beside plain PyTorch with fused AdamW, in bf16.

    python -m benchmarks.gpu_step --rounds 5

With one rank there is nothing to communicate: what differs is what the engine costs. Each contender keeps 16 bytes a
parameter, about 25 GB, beside its activations; they are alive at the same time where the memory is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.arena import machine
from benchmarks.contenders import CONTENDERS, Task
from benchmarks.step import run, show

DEFAULT = ["plain", "plain-no-masters", *(f"shoal-{stage}" for stage in range(4))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=DEFAULT, metavar="NAME")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=1600)
    parser.add_argument("--heads", type=int, default=25)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--together", type=int, default=1, help="contenders alive at a time beside plain")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("skipped: this benchmark needs a GPU, and PyTorch sees none here")
        return
    arguments.most_rounds = 0
    task = Task(
        precision="bf16",
        sequences=arguments.sequences,
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_heads=arguments.heads,
        vocab_size=50304,
        sequence_length=arguments.sequence_length,
        device="cuda",
    )
    rows = run(task, 1, arguments)
    name = torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}, {arguments.sequences} x {arguments.sequence_length} tokens\n{show(rows)}"
    )
    if arguments.out:
        arguments.out.write_text(json.dumps({"device": name, "machine": machine(), "rows": rows}, indent=1) + "\n")
    if any("error" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
