"""Every collective of Shoal's over NCCL on one rank, under TORCH_DISTRIBUTED_DEBUG=DETAIL, in every dtype.

One rank shows that the calls, the reductions (AVG and PREMUL_SUM) and the dtypes are accepted, and that the kernels
after them write the right values; not that ranks agree: NCCL refuses two ranks on one GPU, and Shoal names the two
before NCCL is asked, which is checked too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.first_gpu.common import Finding, Setting, attempt, main
from shoal.comm.failure import FirstError
from shoal.comm.gloo import GlooCommunicator, GlooPending
from shoal.comm.gloo_links import GlooLinks
from shoal.comm.nccl import NcclCommunicator, new_group
from shoal.comm.protocol import Communicator
from shoal.comm.recorder import Recorder

REDUCED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
SCALES = [1.0, 0.5, 1 / 12]

_TWO_ON_ONE = """
import torch, shoal
try:
    shoal.init_distributed()
    print("no error")
except shoal.errors.ConfigError as error:
    print(error)
"""


def check(setting: Setting) -> Iterable[Finding]:
    with _group(setting) as comm:
        device = setting.device
        yield Finding("TORCH_DISTRIBUTED_DEBUG", None, os.environ.get("TORCH_DISTRIBUTED_DEBUG", "not set"))
        for dtype in setting.some(REDUCED):
            for scale in SCALES if dtype.is_floating_point else [1.0]:
                what = f"sums of {_name(dtype)}, scaled by {scale:g}"
                yield attempt(what, lambda d=dtype, s=scale, w=what: _sums(comm, d, s, device, w))  # type: ignore[misc]
        for dtype in setting.some(MOVED):
            what = f"gathers and broadcasts of {_name(dtype)}"
            yield attempt(what, lambda d=dtype, w=what: _moves(comm, d, device, w))  # type: ignore[misc]
    if setting.is_gpu:
        yield attempt("two ranks on one GPU are named", _two_ranks)


@contextmanager
def _group(setting: Setting) -> Iterator[Communicator]:
    """A communicator of one rank, with the groups that an axis of several ranks has."""
    kinds, store = "cpu:gloo,cuda:nccl" if setting.is_gpu else "gloo", HashStore()
    dist.init_process_group(kinds, store=store, rank=0, world_size=1)
    try:
        timeout = timedelta(seconds=60)
        if setting.is_gpu:
            group = new_group(store, "first-gpu", [0], setting.device, timeout)
        else:
            group = dist.new_group([0], timeout)
        first_error, failures = FirstError(), SimpleNamespace(explain=lambda error, what: error)
        links, pending = GlooLinks(HashStore(), 0, 60.0), GlooPending(first_error)
        host = GlooCommunicator("dp", links, [0], 1, failures, pending, is_mesh=False)  # type: ignore[arg-type]
        backend = NcclCommunicator("dp", group, host, failures, first_error)  # type: ignore[arg-type]
        yield Communicator(backend, Recorder())
    finally:
        dist.destroy_process_group()


def _sums(comm: Communicator, dtype: torch.dtype, scale: float, device: torch.device, what: str) -> Finding:
    full = torch.arange(1, 65, device=device).to(dtype)
    right = (full.double() * scale).to(dtype)
    found = {"all_reduce": comm.all_reduce(full.clone(), scale=scale, label="sum").wait()}
    out = torch.empty_like(full)
    found["reduce_scatter"] = comm.reduce_scatter(full.clone(), out, scale=scale, label="sum").wait()
    if dtype.is_floating_point:
        total = torch.ones(64, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        comm.reduce_scatter(full.clone(), total, scale=scale, accumulate=True, label="sum").wait()
        found["reduce_scatter, added"] = (total - 1).to(dtype)
    # The factor before the sum and the one after it round apart, in the last bit of the dtype.
    bound = 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    bad = [op for op, result in found.items() if not torch.allclose(result.double(), right.double(), rtol=bound)]
    return Finding(what, not bad, f"wrong: {', '.join(bad)}" if bad else "right", "right")


def _moves(comm: Communicator, dtype: torch.dtype, device: torch.device, what: str) -> Finding:
    values = torch.arange(64, device=device).remainder(2).to(dtype)
    found = {}
    for op in ("all_gather", "all_to_all", "all_to_all, split", "broadcast", "exchange"):
        out = torch.zeros(64, device=device).to(dtype)
        try:
            if op == "all_gather":
                comm.all_gather(out, values, label="move").wait()
            elif op == "all_to_all":
                comm.all_to_all(out, values, label="move").wait()
            elif op == "all_to_all, split":
                comm.all_to_all(out, values, out_splits=[64], source_splits=[64], label="move").wait()
            elif op == "broadcast":
                out = comm.broadcast(values.clone(), 0, label="move").wait()
            else:
                out = comm.exchange(values, label="move").wait()[0]
            found[op] = "" if torch.equal(out.float(), values.float()) else "wrong values"
        except Exception as error:
            found[op] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    bad = [f"{op}: {problem}" for op, problem in found.items() if problem]
    return Finding(what, not bad, "; ".join(bad) or "right", "right")


def _two_ranks() -> Finding:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "CUDA_VISIBLE_DEVICES": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _TWO_ON_ONE],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=60)[0].strip() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    is_named = any("use the same device" in text for text in texts)
    text = next((text for text in texts if "ConfigError" in text or "device" in text), texts[0]).splitlines()
    return Finding("two ranks on one GPU are named", is_named, text[0][:200] if text else "no output", "rank-device")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main(check, __doc__)
