"""Checkpoints: how fast they are saved and loaded, beside plain writes of the same bytes, DeepSpeed and DCP with FSDP2.

    python -m benchmarks.checkpoint --ranks 2 --rounds 3 --folder /a/disk

Every contender runs in processes of its own, in turn, A B C, A B C. In each turn it saves and loads a few times; a time
is that of the slowest rank between two barriers. Loads read what was just written, so mostly from the page cache.

| contender | what is written, bytes a parameter |
| --- | --- |
| ``write`` | 12, from memory, by one process a rank, 4 MiB at a time, flushed to the disk (fsync) |
| ``write-unflushed`` | the same without fsync |
| ``shoal-2``, ``shoal-3`` | fp32 master weights and two moments: 12; flushed, summed, committed by a rename |
| ``shoal-2-async``, ``-3-`` | the same, saved while training goes on: how long ``save_checkpoint`` holds it, and |
| | what a step before it and the first step after it take |
| ``fsdp2-dcp`` | fp32 parameters and two moments by ``torch.distributed.checkpoint``: 12; flushed |
| ``deepspeed-2``, ``deepspeed-3`` | bf16 parameters, fp32 master weights and two moments: 14; not flushed |
| ``deepspeed-2-flushed``, ``-3-`` | the same, and then its files are flushed, each rank its part of them |
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arena import _environment, _free_port, machine, table
from benchmarks.contenders import Task

CONTENDERS = (
    "write",
    "write-unflushed",
    "shoal-2",
    "shoal-3",
    "shoal-2-async",
    "shoal-3-async",
    "fsdp2-dcp",
    "deepspeed-2",
    "deepspeed-3",
    "deepspeed-2-flushed",
    "deepspeed-3-flushed",
)
BYTES_PER_PARAMETER = 12
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16, help="of 768: 16 are 138 M parameters with the vocabulary")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/checkpoint-benchmark"))
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    task = replace(Task(precision="bf16", sequences=1), num_layers=arguments.layers)
    task = replace(task, hidden_size=arguments.hidden, num_heads=max(1, arguments.hidden // 64))
    task = replace(task, vocab_size=16384, sequence_length=64)
    if arguments.worker:
        work(arguments.worker, task, arguments.folder)
        return
    found: dict[str, dict[str, list[float]]] = {name: {} for name in arguments.contenders}
    for _ in range(arguments.rounds):
        for name in arguments.contenders:
            for key, values in run(name, arguments).items():
                found[name].setdefault(key, []).extend(values)
    rows = [summary(name, values) for name, values in found.items()]
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(show(rows))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def run(name: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """One turn of one contender: its ranks' times, the slowest rank's of each."""
    port = _free_port()
    folder = arguments.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--worker", name, "--folder", str(folder)]
    command += ["--layers", str(arguments.layers), "--hidden", str(arguments.hidden)]
    processes = [
        subprocess.Popen(command, env=_environment(rank, arguments.ranks, port, 1), stdout=subprocess.PIPE, text=True)
        for rank in range(arguments.ranks)
    ]
    texts = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name} failed, exit codes {[process.returncode for process in processes]}")
    answers = [json.loads(text.strip().splitlines()[-1]) for text in texts]
    shutil.rmtree(folder, ignore_errors=True)
    return {key: [max(values) for values in zip(*(a[key] for a in answers), strict=True)] for key in answers[0]}


def summary(name: str, values: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"contender": name}
    for key in values:
        row[key] = round(median(values[key]), 4)
        row[f"{key}_min"] = round(min(values[key]), 4)
        row[f"{key}_max"] = round(max(values[key]), 4)
    return row


def show(rows: list[dict[str, Any]]) -> str:
    lines = [["contender", "GB", "save s", "least to most", "load s", "least to most", "peak MiB over", "step s, next"]]
    for row in rows:
        lines.append(
            [
                row["contender"],
                f"{row['gigabytes']:.2f}",
                f"{row['save']:.2f}",
                f"{row['save_min']:.2f} to {row['save_max']:.2f}",
                f"{row['load']:.2f}" if "load" in row else "",
                f"{row['load_min']:.2f} to {row['load_max']:.2f}" if "load" in row else "",
                f"{row['over']:.0f}" if "over" in row else "",
                f"{row['step']:.3f}, {row['next']:.3f}" if "step" in row else "",
            ]
        )
    return table(lines)


# one rank


def work(name: str, task: Task, folder: Path) -> None:
    """Build, train a step, save and load in turn; print the times as JSON."""
    import torch

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if name.startswith("deepspeed"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    parts, finish = _parts(name, task, rank, size, folder)
    times: dict[str, list[float]] = {key: [] for key in (*parts, "over", "gigabytes")}
    for repeat in range(REPEATS):
        for key, part in parts.items():
            _forget_peak()
            before = _resident("VmRSS")
            times[key].append(_timed(lambda part=part, repeat=repeat: part(repeat)))
            if key == "save":
                times["over"].append((_resident("VmHWM") - before) / 2**20)
        finish()
        _barrier()
        if rank == 0:
            size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if repeat + 1 < REPEATS:
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            size_bytes = 0
        times["gigabytes"].append(size_bytes / 1e9)
        _barrier()
    print(json.dumps(times), flush=True)
    _barrier()
    os._exit(0)


def _timed(action: Callable[[], Any]) -> float:
    _barrier()
    begin = time.perf_counter()
    action()
    _barrier()
    return time.perf_counter() - begin


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


Part = Callable[[int], Any]


def _parts(name: str, task: Task, rank: int, size: int, folder: Path) -> tuple[dict[str, Part], Callable[[], None]]:
    """What is timed, in this order in each turn, and what ends the turn."""
    from benchmarks import contenders

    if name.startswith("write"):
        return _plain(task, rank, size, folder, is_flushed=name == "write")
    if name == "fsdp2-dcp":
        return _dcp(task, rank, folder)
    stage = int(name.split("-")[1])
    if name.startswith("deepspeed"):
        step: Any = contenders.deepspeed(task, rank, size, stage)
    else:
        step = contenders.shoal(task, rank, size, stage)
    step()
    engine = step.engine
    if name.endswith("async"):
        return _async(step, engine, folder), engine.checkpointing.finish

    def save(repeat: int) -> None:
        engine.save_checkpoint(str(folder), tag=f"t{repeat}")
        if name.endswith("flushed"):
            _flush(folder / f"t{repeat}", rank, size)

    return _in_turn(save, lambda repeat: engine.load_checkpoint(str(folder), tag=f"t{repeat}"))


def _flush(folder: Path, rank: int, size: int) -> None:
    """Have the disk keep what was written: this rank's part of the files, once all are there."""
    _barrier()
    for path in sorted(folder.iterdir())[rank::size]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _in_turn(save: Part, load: Part) -> tuple[dict[str, Part], Callable[[], None]]:
    return {"save": save, "load": load}, lambda: None


def _async(step: Callable[[], Any], engine: Any, folder: Path) -> dict[str, Part]:
    """The hold, and the steps before and after it; what is under way ends before the next is begun."""
    settings = engine.checkpointing._settings
    object.__setattr__(settings, "async_save", True)

    engine.save_checkpoint(str(folder), tag="first")  # the snapshot's memory is asked for once

    def save(repeat: int) -> None:
        engine.save_checkpoint(str(folder), tag=f"t{repeat}")

    engine.checkpointing.finish()
    return {"step": lambda repeat: step(), "save": save, "next": lambda repeat: step()}


def _plain(
    task: Task, rank: int, size: int, folder: Path, *, is_flushed: bool
) -> tuple[dict[str, Part], Callable[[], None]]:
    """Bytes from memory to a file and back, 4 MiB at a time."""
    import torch

    from benchmarks.contenders import build_model

    num_parameters = sum(p.numel() for p in build_model(task).parameters())
    memory = torch.ones(num_parameters * BYTES_PER_PARAMETER // size, dtype=torch.uint8).numpy()
    view = memoryview(memory)
    block = 4 << 20

    def save(repeat: int) -> None:
        fd = os.open(folder / f"{repeat}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for start in range(0, len(view), block):
            part = view[start : start + block]
            while part:
                part = part[os.write(fd, part) :]
        if is_flushed:
            os.fsync(fd)
        os.close(fd)

    def load(repeat: int) -> None:
        fd = os.open(folder / f"{repeat}-{rank}", os.O_RDONLY)
        for start in range(0, len(view), block):
            part = view[start : start + block]
            while part:
                got = os.preadv(fd, [part], start)
                part, start = part[got:], start + got
        os.close(fd)

    return _in_turn(save, load)


def _dcp(task: Task, rank: int, folder: Path) -> tuple[dict[str, Part], Callable[[], None]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    from benchmarks.contenders import adamw, build_batch, build_model

    model = build_model(task)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model.parameters())
    model(*build_batch(task, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()

    def save(repeat: int) -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=str(folder / f"t{repeat}"))

    def load(repeat: int) -> None:
        weights, state = get_state_dict(model, optimizer)
        both = {"model": weights, "optim": state}
        dcp.load(both, checkpoint_id=str(folder / f"t{repeat}"))
        set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optim"])

    return _in_turn(save, load)


if __name__ == "__main__":
    main()
