"""What an asynchronous save costs training: equally many steps without a save, and with one that begins before them.

    python -m benchmarks.async_save --ranks 2 --rounds 7 --steps 6 --folder /a/disk

The three modes take turns in one run: no save; a save whose thread writes at the priority of training, without pauses;
a save as Shoal does it (``shoal/checkpoint/background.py``). A time is that of the slowest rank, from before
``save_checkpoint`` to the end of the last step. Each row is compared with the turn without a save beside it, and the
median of the differences is shown. Processor time is that of all ranks, without the kernel's own threads: other
programs on the machine change it less than times. A save that the steps do not outlast is finished outside of them,
and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arena import _environment, _free_port, machine, table
from benchmarks.contenders import Task

MODES = ("none", "plain thread", "background")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="in each turn")
    parser.add_argument("--layers", type=int, default=16, help="of 768: 16 are 138 M parameters, 1.7 GB a checkpoint")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--folder", type=Path, default=Path("runs/async-save-benchmark"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.async_save", "--worker", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env=_environment(rank, arguments.ranks, port, 1), stdout=subprocess.PIPE, text=True)
        for rank in range(arguments.ranks)
    ]
    texts = [rank.communicate()[0] for rank in ranks]
    shutil.rmtree(arguments.folder, ignore_errors=True)
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"exit codes {[rank.returncode for rank in ranks]}")
    turns = [json.loads(text.strip().splitlines()[-1]) for text in texts]
    print(", ".join(f"{key} {value}" for key, value in machine().items()), f"load {os.getloadavg()[0]:.1f}")
    print(show(turns, arguments.steps))


def show(turns: list[list[dict[str, Any]]], steps: int) -> str:
    """Args: turns: of each rank, its turns, one after the other."""
    titles = ["mode", "hold s", "first step s", f"{steps} steps s", "more than without", "first step more s"]
    rows = [[*titles, "processor s more", "unfinished"]]
    slowest = [
        {"mode": same[0]["mode"], **{key: max(one[key] for one in same) for key in same[0] if key != "mode"}}
        | {"processor": sum(one["processor"] for one in same)}
        for same in zip(*turns, strict=True)
    ]
    rounds = [slowest[i : i + len(MODES)] for i in range(0, len(slowest), len(MODES))]
    for index, mode in enumerate(MODES):
        own = [turn[index] for turn in rounds]
        more = [each["total"] / turn[0]["total"] - 1 for each, turn in zip(own, rounds, strict=True)]
        first = [each["first"] - turn[0]["first"] for each, turn in zip(own, rounds, strict=True)]
        processor = [each["processor"] - turn[0]["processor"] for each, turn in zip(own, rounds, strict=True)]
        rows.append(
            [
                mode,
                f"{median(each['hold'] for each in own):.3f}",
                f"{median(each['first'] for each in own):.3f}",
                f"{median(each['total'] for each in own):.3f}",
                f"{100 * median(more):.1f} %",
                f"{median(first):.3f}",
                f"{median(processor):.3f}",
                str(sum(each["unfinished"] for each in own)),
            ]
        )
    return table(rows)


def work(arguments: argparse.Namespace) -> None:
    """One rank: all turns; prints their times as JSON."""
    import torch
    import torch.distributed as dist

    from benchmarks import contenders
    from shoal.checkpoint.save import Background

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    task = replace(Task(precision=arguments.precision, sequences=1), num_layers=arguments.layers)
    task = replace(task, hidden_size=768, num_heads=12, vocab_size=16384, sequence_length=64)
    step: Any = contenders.shoal(task, rank, dist.get_world_size(), 2)
    step()
    engine = step.engine
    object.__setattr__(engine.checkpointing._settings, "async_save", True)
    own = Background.enter, Background.pause
    turns: list[dict[str, Any]] = []
    for number in range(-1, arguments.rounds):  # the first round asks for the snapshot's memory
        for mode in MODES:
            is_plain = mode == "plain thread"
            Background.enter, Background.pause = (_nothing, _nothing) if is_plain else own  # type: ignore[method-assign]
            dist.barrier()
            begin, before = time.perf_counter(), time.process_time()
            if mode != "none":
                engine.save_checkpoint(str(arguments.folder), tag="t")
            hold = time.perf_counter() - begin
            step()
            first = time.perf_counter() - begin - hold
            for _ in range(arguments.steps - 1):
                step()
            dist.barrier()
            total = time.perf_counter() - begin
            unfinished = int(engine.checkpointing._in_flight is not None)
            engine.checkpointing.finish()
            processor = time.process_time() - before
            times = {"hold": hold, "first": first, "total": total, "processor": processor}
            if number >= 0:
                turns.append({"mode": mode, **times, "unfinished": unfinished})
    print(json.dumps(turns), flush=True)
    dist.barrier()
    os._exit(0)


def _nothing(background: Any) -> None:
    return


if __name__ == "__main__":
    main()
