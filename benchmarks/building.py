"""Resident memory of a rank's process while a model is built and sharded at stage 3, beside the model's own size.

    python -m benchmarks.building --ranks 2

Each row has processes of its own. They first build and shard a tiny model in the same way, so that what is imported on
the way does not count. A peak is the growth of ``VmHWM`` since then, the largest rank's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.arena import _environment, _free_port, table

WAYS = ("plain", "zero.Init", "meta")


@dataclass(frozen=True)
class Growth:
    """Bytes of resident memory that one rank's process has more than before, without its Python modules."""

    model: int  # of the whole model's parameters, in the dtype in which it is built without sharding (fp32)
    building_peak: int
    initialize_peak: int
    after: int
    shard_dtype: str  # of parameters between building and ``initialize``


def growth(way: str, precision: str, ranks: int, layers: int, hidden: int) -> list[Growth]:
    """Build and shard a model of ``layers`` square weights on ``ranks`` processes. One result for each rank."""
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.building", "--as-rank", way, precision, str(layers), str(hidden)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment(rank, ranks, port, 1))
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [Growth(**json.loads(output.splitlines()[-1])) for output in outputs]


def _run_rank(way: str, precision: str, layers: int, hidden: int) -> None:
    import torch

    import shoal

    torch.set_num_threads(1)
    shoal.init_distributed(verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": precision == "bf16"},
        "units": {"names": ["*"]},
        "log_level": "error",
    }
    os.environ["MALLOC_TRIM_THRESHOLD_"] = ""  # read by Shoal, which then leaves the heap as it is
    _build_and_shard(way, config, 2, 64)
    del os.environ["MALLOC_TRIM_THRESHOLD_"]
    gc.collect()
    print(json.dumps(asdict(_build_and_shard(way, config, layers, hidden))))


def _build_and_shard(way: str, config: dict[str, Any], layers: int, hidden: int) -> Growth:
    import torch
    from torch import nn

    import shoal

    contexts: dict[str, contextlib.AbstractContextManager[Any]] = {
        "plain": contextlib.nullcontext(),
        "zero.Init": shoal.zero.Init(config_dict_or_path=config),
        "meta": torch.device("meta"),
    }
    before = _memory("VmRSS")
    _forget_peak()
    with contexts[way]:
        model = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(layers)))
    building = _memory("VmHWM") - before
    dtype = str(next(model.parameters()).dtype)
    numel = sum(parameter.numel() for parameter in model.parameters())
    _forget_peak()
    engine = shoal.initialize(model=model, config=config)[0]
    found = Growth(4 * numel, building, _memory("VmHWM") - before, _memory("VmRSS") - before, dtype)
    engine.destroy()
    return found


def _memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def _forget_peak() -> None:
    """Let ``VmHWM`` start anew. Where the kernel does not allow it, the peak includes the start of the process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=90)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--as-rank", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        way, precision, layers, hidden = arguments.as_rank
        _run_rank(way, precision, int(layers), int(hidden))
        os._exit(0)
    rows = [["way, precision", "whole model MiB", "building, peak", "initialize, peak", "afterwards"]]
    for precision in ("fp32", "bf16"):
        for way in WAYS:
            found = growth(way, precision, arguments.ranks, arguments.layers, arguments.hidden)
            keys = ("model", "building_peak", "initialize_peak", "after")
            values = [max(getattr(each, key) for each in found) for key in keys]
            rows.append([f"{way}, {precision}", *(f"{value / 2**20:.0f}" for value in values)])
    print(f"resident memory of the largest of {arguments.ranks} ranks, MiB\n{table(rows)}")


if __name__ == "__main__":
    main()
