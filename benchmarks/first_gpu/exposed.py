"""How long computing waits for copies and collectives: from a trace of `torch.profiler`, stream by stream.

A step of GPT-2 XL's shape with states on the host is traced. Time in which a copy (or a kernel of NCCL) runs and no
other kernel does is exposed; time in which nothing runs is idle. The dry run predicts both.
"""

from __future__ import annotations

import copy
import gc
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import shoal
from benchmarks.first_gpu.common import TINY, Finding, Setting, attempt, main, micro_step, tokens
from benchmarks.first_gpu.predict import CASES, ROWS, SHAPE, zero_of
from shoal.models.gpt import GPT

Span = tuple[float, float]
TRACED = ["shoal-2-optimizer", "shoal-3-param", "shoal-3-param-optimizer"]
GOAL = 0.10  # of the step: computing waits for copies, one GPU


def check(setting: Setting) -> Iterable[Finding]:
    torch.manual_seed(0)
    model = GPT(TINY if setting.is_tiny else SHAPE)  # drawn once: 1.5 billion values take 10 s and more
    for name in setting.some(TRACED):
        try:
            yield from _run(name, copy.deepcopy(model), setting)
        except Exception as error:
            yield attempt(name, lambda e=error: _raise(e))  # type: ignore[misc]


def _raise(error: Exception) -> Finding:
    raise error


def _run(name: str, model: GPT, setting: Setting) -> Iterable[Finding]:
    shape, (stage, places) = TINY if setting.is_tiny else SHAPE, CASES[name]
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": zero_of(stage, places),
    }
    gc.collect()  # what is left of the engine before
    engine = shoal.initialize(model=model, config=settings)[0]
    batch = tokens(setting, 0, shape, ROWS)
    for _ in range(3):
        micro_step(engine, batch)
    setting.synchronize()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.is_gpu else [])]
    with profile(activities=kinds) as profiler:
        for _ in range(2):
            micro_step(engine, batch)
        setting.synchronize()
    engine.destroy()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        times = exposed_times(json.loads(path.read_text())["traceEvents"])
    if not setting.is_gpu:
        yield Finding(name, None, "no GPU: the trace has no kernels")
        return
    for kind in ("copies", "communication"):
        share = times[kind] / times["all"] if times["all"] else 0.0
        text = f"{times[kind] / 2:.1f} ms of {times['all'] / 2:.1f} ms a step ({100 * share:.1f} %)"
        key = f"{name}/{kind} ms"
        yield Finding(f"{name}: waits for {kind}", share <= GOAL, text, f"at most {GOAL:.0%}", key, times[kind] / 2)
    idle = f"{times['idle'] / 2:.1f} ms a step: the host is late, or updates on it are"
    yield Finding(f"{name}: nothing runs", None, idle)


def exposed_times(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds from a Chrome trace, of all its steps: "all", "compute", and exposed "communication" and "copies".

    Time that several kinds share counts for the first of compute, communication and copies; "idle" is the rest.
    """
    spans: dict[str, list[Span]] = {"compute": [], "communication": [], "copies": []}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        begin = float(event["ts"])
        spans[_kind_of(event)].append((begin, begin + float(event["dur"])))
    every = merged([span for kind in spans.values() for span in kind])
    if not every:
        return dict.fromkeys(("all", "compute", "communication", "copies", "idle"), 0.0)
    total = every[-1][1] - every[0][0]
    times, covered, so_far = {"all": total}, 0.0, list[Span]()
    for kind, own in spans.items():
        so_far = merged([*so_far, *own])
        length = sum(end - begin for begin, end in so_far)
        times[kind], covered = length - covered, length
    times["idle"] = total - covered
    return {kind: length / 1e3 for kind, length in times.items()}


def _kind_of(event: dict[str, Any]) -> str:
    name = str(event.get("name", ""))
    if event["cat"] == "kernel":
        return "communication" if "nccl" in name.lower() else "compute"
    return "copies" if "HtoD" in name or "DtoH" in name else "compute"


def merged(spans: Sequence[Span]) -> list[Span]:
    """The union of time spans, in order.

    >>> merged([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


if __name__ == "__main__":
    main(check, __doc__)
