"""One rank of one contender: a process that builds its step, then waits for the word to run some steps.

Requests arrive on standard input, one JSON object a line; answers go to what was standard output, and everything that a
library prints goes to standard error instead. While it waits it uses no processor time, so other contenders can be
measured.

| request | answer |
| --- | --- |
| ``{"steps": n}`` | seconds and losses of ``n`` steps after one warm-up step, and memory |
| ``{"report": "memory"}`` | the ledger of a Shoal engine |
| ``{"report": "parameters"}`` | a checksum of each full parameter of a Shoal engine |
| ``{"save": folder, "tag": tag}``, ``{"load": folder, "tag": tag}`` | seconds of one call, of a Shoal engine |
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

MIB = 2**20


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        _serve(answers)
    except BaseException:
        answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")
        raise


def _serve(answers: Any) -> None:
    import torch

    from benchmarks.contenders import CONTENDERS, EngineStep, Task

    job = json.loads(sys.stdin.readline())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(job["task"]["threads"])
    imported = _memory("VmRSS")
    contender = CONTENDERS[job["contender"]]
    task = Task(**job["task"])
    if contender.joined:
        _join(job["contender"], task)
    step = contender.build(task, rank, size, **contender.options)
    loss = step()
    ready = {
        "loss": float(loss.detach()),
        "imported_bytes": imported,
        "setup_peak_bytes": _memory("VmHWM"),
        "shoal": str(Path(sys.modules["shoal"].__path__[0]).parent) if "shoal" in sys.modules else "",
    }
    _forget_peak()
    answers.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        if "steps" not in request:
            assert isinstance(step, EngineStep)
            answers.write(json.dumps(_of_engine(step.engine, request)) + "\n")
            continue
        num_steps = request["steps"]
        losses = [step()]  # other contenders ran since: bring code and data back into the caches
        seconds = []
        before = step.host_seconds() if isinstance(step, EngineStep) else {}
        cpu = time.process_time()
        for _ in range(num_steps):
            begin = time.perf_counter()
            losses.append(step())
            if task.device != "cpu":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        answers.write(
            json.dumps(
                {
                    "seconds": seconds,
                    "cpu_seconds": time.process_time() - cpu,
                    "loss": float(losses[-1].detach()),
                    "losses": [float(loss.detach()).hex() for loss in losses],
                    "host_seconds": _since(before, step),
                    "host_peak_bytes": _memory("VmHWM"),
                    "shared_bytes": _memory("RssShmem"),
                    "own_bytes": _proportional("Pss"),
                    "once_bytes": _memory("VmHWM") - _memory("RssShmem") + _proportional("Pss_Shmem"),
                    "peak_bytes": _memory("VmHWM") if task.device == "cpu" else torch.cuda.max_memory_allocated(),
                }
            )
            + "\n"
        )
    os._exit(0)  # the peers may have gone already: no farewell that could hang


def _join(name: str, task: Any) -> None:
    if name.startswith("deepspeed"):
        import deepspeed

        deepspeed.init_distributed("gloo" if task.device == "cpu" else "nccl")
    elif name.startswith("shoal"):
        import shoal

        shoal.init_distributed()
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo" if task.device == "cpu" else "nccl")


def _of_engine(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that only a Shoal engine can answer."""
    if request.get("report") == "memory":
        ledger = engine.memory_report()
        return {"ledger": ledger.as_dict(), "numel": ledger.parameter_numel}
    if request.get("report") == "parameters":
        return {"parameters": _checksums(engine)}
    begin = time.perf_counter()
    if "save" in request:
        engine.save_checkpoint(request["save"], tag=request["tag"])
    else:
        engine.load_checkpoint(request["load"], tag=request["tag"])
    return {"seconds": time.perf_counter() - begin}


def _checksums(engine: Any) -> dict[str, str]:
    """SHA-256 of each full parameter, one parameter gathered at a time."""
    import torch

    import shoal

    found = {}
    for name, parameter in engine.module.named_parameters():
        with shoal.zero.GatheredParameters([parameter]):
            flat = parameter.detach().cpu().contiguous().flatten()
            found[name] = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def _since(before: dict[str, float], step: Any) -> dict[str, float]:
    """What the host's updates took since ``before`` was read."""
    return {key: value - before[key] for key, value in step.host_seconds().items()} if before else {}


def _memory(key: str) -> int:
    """``VmHWM`` (peak), ``VmRSS`` or ``RssShmem`` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _proportional(key: str) -> int:
    """Resident bytes of this process, memory shared by n processes counted as 1/n: ``Pss``, or ``Pss_Shmem`` of it."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _forget_peak() -> None:
    """Let ``VmHWM`` start anew, so that it tells of training steps, not of the set-up."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak includes the set-up: /proc/self/clear_refs cannot be written", file=sys.stderr)


if __name__ == "__main__":
    main()
