"""Copies that come late, and computing that comes late, change no bit: streams wait for each other where they must.

Every case trains in processes of its own kind: with CUDA_LAUNCH_BLOCKING=1, where every kernel ends before the next
one is queued; as it is; with `torch.cuda._sleep` before each copy, in the copy's stream; and with it before and after
each block of the model, in the compute stream. The last parameters, and those that an asynchronous save wrote while
training went on, have the same bits in all. A case on two ranks has them as threads on the one GPU.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import shoal
from benchmarks.first_gpu.common import (
    Finding,
    Setting,
    checksum,
    config,
    deterministic,
    main,
    micro_step,
    model,
    tokens,
)
from shoal.comm.side_stream import CopyDone
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.memory.stream_copies import StreamCopies

CASES = [
    *((stage, (), 1) for stage in range(4)),
    *((stage, ("optimizer",), 1) for stage in (1, 2, 3)),
    (3, ("param",), 1),
    (3, ("param", "optimizer"), 1),
    (3, (), 2),
    (3, ("param", "optimizer"), 2),
]
MODES = ["blocking", "as it is", "copies late", "computing late"]


def check(setting: Setting) -> Iterable[Finding]:
    found: dict[str, dict[str, Any]] = {}
    modes = [MODES[0], *setting.some(MODES[1:])]
    # All at the same time: the GPU takes turns among processes.
    children = {
        mode: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.first_gpu.delays", setting.device.type, mode],
            env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1" if mode == "blocking" else "0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for mode in modes
    }
    for mode, process in children.items():
        lines = [line for line in process.communicate()[0].splitlines() if line.startswith("{")]
        found[mode] = {answer["case"]: answer for answer in map(json.loads, lines)}
    for case in map(name_of, setting.some(CASES)):
        right = found["blocking"].get(case, {"error": "no answer"})
        if "error" in right:
            yield Finding(f"{case}, {MODES[0]}", False, right["error"])
            continue
        for mode in modes[1:]:
            ours = found[mode].get(case, {"error": "no answer"})
            same = {key: ours.get(key) == right[key] for key in ("last", "saved")}
            different = [key for key, is_same in same.items() if not is_same]
            text = ours.get("error") or (f"other bits: {', '.join(different)} parameters" if different else "same bits")
            yield Finding(f"{case}, {mode}", not different, text, "the bits of CUDA_LAUNCH_BLOCKING=1")


def name_of(case: tuple[int, tuple[str, ...], int]) -> str:
    stage, places, size = case
    return f"stage {stage}, {' and '.join(places) or 'nothing'} on the host" + (f", {size} ranks" if size > 1 else "")


@contextmanager
def late_copies(setting: Setting) -> Iterator[None]:
    queued = StreamCopies.queued

    @contextmanager
    def sleeping(self: StreamCopies) -> Iterator[CopyDone]:
        with queued(self) as done:
            setting.sleep(8_000_000)
            yield done

    StreamCopies.queued = sleeping  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        StreamCopies.queued = queued  # type: ignore[method-assign]


def run_case(case: tuple[int, tuple[str, ...], int], mode: str, setting: Setting) -> dict[str, str]:
    """Train six steps of two micro-batches, save beside the third and later ones, read the save."""
    stage, places, size = case
    made = model(setting)  # on one thread: ranks share torch's generator

    def train(folder: str) -> dict[str, str]:
        mine, rank = copy.deepcopy(made), current_world().rank
        if mode == "computing late":
            for block in mine.blocks:
                block.register_forward_pre_hook(lambda *_: setting.sleep(4_000_000))
                block.register_full_backward_hook(lambda *_: setting.sleep(4_000_000))
        settings = config(stage, *places, accumulation=2, checkpoint={"async_save": True}, gradient_clipping=1.0)
        engine = shoal.initialize(model=mine, config=settings)[0]
        for step in range(6):
            if step == 3:
                engine.save_checkpoint(folder, tag="middle")
            for micro in range(2):
                micro_step(engine, tokens(setting, 1000 * rank + 2 * step + micro))
        last = checksum(engine.module_state_dict().values())
        engine.load_checkpoint(folder, tag="middle")
        saved = checksum(engine.module_state_dict().values())
        engine.destroy()
        return {"last": last, "saved": saved}

    with tempfile.TemporaryDirectory() as folder:
        if size == 1:
            return train(folder)
        return run_ranks(size, train, folder, device=setting.device)[0]


def child(device: str, mode: str) -> None:
    logging.disable(logging.WARNING)
    deterministic()
    setting = Setting(torch.device(device, 0) if device == "cuda" else torch.device(device), device == "cpu", 0.0)
    for case in setting.some(CASES):
        answer: dict[str, str] = {"case": name_of(case)}
        try:
            if mode == "copies late":
                with late_copies(setting):
                    answer |= run_case(case, mode, setting)
            else:
                answer |= run_case(case, mode, setting)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2] in MODES:
        child(sys.argv[1], sys.argv[2])
    else:
        main(check, __doc__)
