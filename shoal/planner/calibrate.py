"""Measures this machine and writes its figures in the form of ``machines.yaml``, for dry runs on it.

Every rank measures at the same time, as they compute at the same time in training: CPU ranks share cores and the
bandwidth of memory. Rank 0 writes the mean over the ranks.
"""

from __future__ import annotations

import copy
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from rich.progress import track
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.comm.protocol import Communicator
from shoal.comm.world import World, current_world, use_world
from shoal.device import Device, num_accelerators
from shoal.engine.entry import initialize
from shoal.engine.log import quiet
from shoal.errors import UsageError
from shoal.host_heap import resident_nbytes, trim
from shoal.launch import LocalJob, run_local
from shoal.memory.host import host_available_nbytes
from shoal.mesh import Mesh
from shoal.models import GPT, GPTConfig
from shoal.simulation.collective_times import Links, collective_seconds
from shoal.simulation.kernels import Kernel, kernel_seconds
from shoal.simulation.machines import GpuNode, figures_of, machine_of
from shoal.simulation.modes import effects_of

_DTYPES = {"cpu": ("float32", "bfloat16", "float64"), "cuda": ("float32", "bfloat16", "float16", "float64")}
_LARGE = {"cpu": 1 << 24, "cuda": 1 << 28}  # bytes of a message whose latency does not count, which no cache holds
_BASES = {7: "v100-32g", 8: "a100-80g"}  # by compute capability: whose figures count that are not measured
_SMALL = 1 << 10
_DISK_NBYTES = 1 << 27

Figures = dict[str, Any]


def calibrate(path: str | Path, num_ranks: int | None = None) -> Path:
    """Start ranks on this machine, measure what they reach, and write it to a YAML file that ``machine_of`` reads.

    Args:
        num_ranks: None: one for each GPU, else two.

    Raises: UsageError: the ranks failed.
    """
    ranks = num_ranks or num_accelerators() or 2
    program = [sys.executable, "-m", "shoal.planner.calibrate", str(path)]
    outcome = run_local(LocalJob(program, ranks, rank_0_keeps_terminal=True))
    if outcome.exit_code:
        raise UsageError(f"measuring failed: {outcome.report}", do="see what the rank says.", code="dry-run-machine")
    return Path(path)


def measure(world: World, seconds: float = 1.0, largest: int | None = None, *, shows: bool = False) -> Figures:
    """The figures of this machine, those of all ranks alike. Communicates: collectives along the whole world.

    Args:
        seconds: of each measurement.
        largest: bytes of the largest message, and of the tensors that are copied; None: enough for the device.
        shows: a bar.
    """
    figures: Figures = {}
    kind = "cuda" if world.device.type == "cuda" else "cpu"
    largest = largest or _LARGE[kind]
    comm = world.communicator("dp_shard", Mesh.of(world.size))
    base = copy.deepcopy(figures_of("h100" if kind == "cpu" else _BASES.get(Device(world.device).capability, "h100")))
    steps = _measurements(world, comm, kind, seconds, largest)
    for step in track(list(steps), "measuring", disable=not shows):
        comm.barrier(label="calibrate")
        figures.update(step())
    if kind == "cpu":
        figures["process"] = process_nbytes(min(1024, largest >> 12))
    names = sorted(figures)
    values = torch.tensor([figures[name] for name in names], dtype=torch.float64, device=world.device)
    comm.all_reduce(values, scale=1.0 / world.size, label="calibrate").wait()
    return _filled(base, dict(zip(names, values.tolist(), strict=True)), world, kind, largest)


def _measurements(
    world: World, comm: Communicator, kind: str, seconds: float, largest: int
) -> Iterator[Callable[[], dict[str, float]]]:
    """Each returns some figures: seconds, or bytes or floating-point operations per second."""
    device = world.device
    other_work = torch.zeros(4096, 4096, device=device) if kind == "cuda" else torch.zeros(())

    def timed(run: Callable[[], object], *, by_host: bool = False) -> float:
        """Seconds of a call: the median. The ranks call equally often.

        Args:
            by_host: True: from the host's first call until the device has done all; else a GPU's time alone: the host
                queues the call while the GPU computes something else.
        """
        run()
        begun, taken = time.perf_counter(), []
        for _ in range(200):
            _wait(device)
            if kind == "cuda" and not by_host:
                begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
                torch.matmul(other_work, other_work)
                begin.record()
                run()
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end) / 1e3)
            else:
                before = time.perf_counter()
                run()
                _wait(device)
                taken.append(time.perf_counter() - before)
            left = torch.tensor([float(time.perf_counter() - begun < seconds)], device=device)
            if len(taken) >= 3 and not comm.all_reduce(left, label="calibrate").wait().item():
                break
        return median(taken)

    def product(dtype: str) -> dict[str, float]:
        size = 8192 if kind == "cuda" else min(1024, largest >> 12)
        rates = []
        for m, n, k in ((size, size, size), (size // 2, size, 2 * size)):
            left, right = (torch.randn(a, b, device=device).to(getattr(torch, dtype)) for a, b in ((m, k), (k, n)))
            rates.append(2 * m * n * k / timed(partial(torch.matmul, left, right)))
        return {f"flops {dtype}": median(rates)}

    def memory() -> dict[str, float]:
        values = torch.zeros(largest // 4 if kind == "cuda" else largest, device=device)
        out = torch.empty_like(values)  # the engine keeps what the host has freed: pages are there
        found = {"memory": 2 * values.nbytes / timed(partial(torch.mul, values, 2.0, out=out))}
        if kind == "cuda":  # a processor reads a line before it writes it
            values, out = (torch.zeros(largest // 4) for _ in range(2))
            found["host"] = 3 * values.nbytes / timed(partial(torch.mul, values, 2.0, out=out), by_host=True)
        return found

    def operators() -> dict[str, float]:
        """In turn of several tensors, which the cache of a core does not hold."""
        given = [torch.randn(largest >> 14, 1024) for _ in range(4)]
        found = {}
        for name, (times, run) in _operators(given).items():
            seconds = timed(lambda: [run(x) for x in given])  # noqa: B023  (called before the next one)
            found[f"operator {name}"] = times * given[0].nbytes * len(given) / seconds
        return found

    def attention() -> dict[str, float]:
        dtype, length = torch.bfloat16 if kind == "cuda" else torch.float32, 4096 if kind == "cuda" else 512
        given = [torch.randn(1, 8, length, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        attend = partial(F.scaled_dot_product_attention, given[0], given[1], given[2], is_causal=True)
        forward, out = timed(attend), attend()
        backward = timed(lambda: torch.autograd.grad(out, given, torch.ones_like(out), retain_graph=True))
        return {"attention forward": forward, "attention backward": backward}

    def launches() -> dict[str, float]:
        """A step of an engine with a model so small that its kernels take no time."""
        shape = GPTConfig(vocab_size=32, sequence_length=8, num_layers=8, hidden_size=16, num_heads=2)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 1},
        }
        tokens = torch.zeros(1, shape.sequence_length, dtype=torch.long, device=device)
        with quiet(), use_world(World(0, 1, 0, device, "none", None)):
            engine = initialize(model=GPT(shape), config=config)[0]

        def run() -> None:
            engine.backward(engine(tokens, tokens))
            engine.step()

        run()
        with _Count() as count:
            run()
        taken = timed(run, by_host=True)
        engine.destroy()
        return {"launch": taken / count.num}

    def reduce(values: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce(values, label="calibrate").wait()

    def collective() -> dict[str, float]:
        found = {}
        for name, nbytes in (("small", _SMALL), ("large", largest)):
            values = torch.zeros(nbytes // 4, device=device)
            found[name] = timed(partial(reduce, values))
        return found

    def copies() -> dict[str, float]:
        on_device = torch.zeros(largest // 4 if kind == "cuda" else largest, device=device)
        found = {}
        for name in ("pinned", "pageable"):
            host = torch.zeros(on_device.shape, pin_memory=name == "pinned" and kind == "cuda")
            found[name] = host.nbytes / timed(partial(on_device.copy_, host, non_blocking=True), by_host=True)
        return found

    def disk() -> dict[str, float]:
        values = os.urandom(min(_DISK_NBYTES, largest))
        with tempfile.NamedTemporaryFile(dir=".") as file:
            before = time.perf_counter()
            file.write(values)
            file.flush()
            os.fsync(file.fileno())
            return {"disk": world.size * len(values) / (time.perf_counter() - before)}

    for dtype in _DTYPES[kind]:
        yield partial(product, dtype)
    yield from (memory, attention, launches, collective, copies, disk)
    if kind == "cpu":
        yield operators


def _operators(given: Sequence[torch.Tensor]) -> dict[str, tuple[int, Callable[[torch.Tensor], object]]]:
    """Operators that a CPU computes more slowly than it moves their bytes: how many tensors they move, and a call."""
    aten, shape = torch.ops.aten, [given[0].shape[-1]]
    weight = torch.ones(shape)
    mean, scale = (torch.ones(len(given[0]), 1) for _ in range(2))
    norm, grads = partial(F.layer_norm, normalized_shape=shape, weight=weight, bias=weight), [True, True, True]
    states = [[torch.ones_like(given[0])] for _ in range(4)]
    step = partial(
        torch._fused_adamw_, *states, [], [torch.ones(())],
        lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return {
        "gelu": (2, partial(F.gelu, approximate="tanh")),
        "gelu_backward": (3, lambda x: aten.gelu_backward(x, x, approximate="tanh")),
        "silu": (2, F.silu),
        "silu_backward": (3, lambda x: aten.silu_backward(x, x)),
        "native_layer_norm": (2, norm),
        "native_layer_norm_backward": (
            3, lambda x: aten.native_layer_norm_backward(x, x, shape, mean, scale, weight, weight, grads),
        ),
        "_softmax": (2, partial(F.softmax, dim=-1)),
        "_softmax_backward_data": (3, lambda x: aten._softmax_backward_data(x, x, -1, x.dtype)),
        "_log_softmax": (2, partial(F.log_softmax, dim=-1)),
        "_log_softmax_backward_data": (3, lambda x: aten._log_softmax_backward_data(x, x, -1, x.dtype)),
        "cat": (4, lambda x: torch.cat((x, x))),
        "_fused_adamw_": (7, lambda _: step()),
        "strided": (2, lambda x: x.view(len(x), 2, -1, 64).transpose(0, 2).contiguous()),
    }  # fmt: skip


def process_nbytes(side: int = 1024) -> int:
    """Resident bytes of a CPU rank without a model, its code and what the library of products keeps included.

    Args:
        side: of the products after which this is measured.
    """
    layers = nn.Sequential(nn.Linear(side, 4 * side), nn.LayerNorm(4 * side), nn.GELU(), nn.Linear(4 * side, side))
    layers(torch.zeros(side, side, requires_grad=True)).sum().backward()
    del layers
    trim()
    return resident_nbytes()


class _Count(TorchDispatchMode):
    """Counts the operators that a dry run launches: views and allocations are none."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += bool(effects_of(func).arguments)
        return func(*args, **(kwargs or {}))


def _wait(device: torch.device) -> None:
    Device(device).synchronize()


def _filled(base: Figures, measured: dict[str, float], world: World, kind: str, largest: int) -> Figures:
    """The figures of a file: the measured ones; what is not measured as in ``base``, such as the network."""

    def rate(value: float) -> Figures:
        return {"peak": float(f"{value:.4g}"), "reached": 1.0}

    gpu, node = base["gpu"], base["node"]
    is_cpu = kind == "cpu"
    gpu["flops"] = {name.split()[1]: rate(value) for name, value in measured.items() if name.startswith("flops")}
    gpu["memory_bandwidth"] = rate(measured["memory"])
    available = host_available_nbytes() or 1 << 34
    gpu["memory"] = available // world.size if is_cpu else Device(world.device).total_nbytes
    node["gpus"] = world.size
    node["bus"] = {**rate(measured["pinned"]), "pageable": float(f"{measured['pageable']:.4g}")}
    node["host"] = {"memory": float(available), **rate(measured["memory" if is_cpu else "host"] * world.size)}
    node["disk"] = float(f"{measured['disk']:.4g}")
    node["launch"] = float(f"{measured['launch']:.3g}")
    if not is_cpu:
        gpu["tiles"] = {**gpu["tiles"], "multiprocessors": Device(world.device).num_multiprocessors}
    else:  # one core computes one tile after another; the host waits for each kernel
        gpu["generation"] = "cpu"
        gpu["tiles"] = {"multiprocessors": 1, "prologue": 0}
        gpu |= {"overlap": 1.0, "kernel": 0.0, "latency": 0.0}
        gpu["operators"] = {
            name.split()[1]: float(f"{value:.4g}") for name, value in measured.items() if name.startswith("operator ")
        }
        gpu |= {"context": int(measured["process"]), "workspace": 0}
        node["link"] = {**node["link"], "kind": "pcie"}
    what = platform.processor() or platform.machine() if is_cpu else Device(world.device).name
    made = {"source": f"measured by shoal calibrate: {world.size} ranks, {what}", "gpu": gpu, "node": node}
    _fit_link(made, measured, world.size, largest)
    _fit_attention(made, measured, torch.float32 if is_cpu else torch.bfloat16, 512 if is_cpu else 4096)
    return made


def _fit_link(made: Figures, measured: dict[str, float], size: int, largest: int) -> None:
    """Set the link so that an all-reduce takes what it took, of a small and of a large message."""
    link = made["node"]["link"]
    if size == 1:
        return
    rate = 2 * largest * (size - 1) / size / measured["large"]
    generation = made["gpu"]["generation"]
    unit = Links(1e18, 1e18, link["kind"], generation="hopper" if generation == "cpu" else generation)
    factor = measured["small"] / collective_seconds("all_reduce", _SMALL, range(size), size, unit)
    link |= {"peak": float(f"{rate:.4g}"), "reached": 1.0, "latency_factor": float(f"{factor:.3g}")}


def _fit_attention(made: Figures, measured: dict[str, float], dtype: torch.dtype, length: int) -> None:
    """Set the parts of the rate of products that attention reaches."""
    made["gpu"]["attention"] = {"forward": 1.0, "backward": 1.0}
    node: GpuNode = replace(machine_of_figures(made), kernel_latency=0.0, kernel_seconds=0.0)
    for name, flops in (("forward", 4), ("backward", 10)):
        call = f"attention_{name}"
        kernel = Kernel(call, dtype, 0, flops * 8 * length * length * 64, (8, length, length, 64), is_causal=True)
        part = kernel_seconds(kernel, node) / measured[f"attention {name}"]
        made["gpu"]["attention"][name] = float(f"{min(max(part, 0.01), 1.0):.3g}")


def machine_of_figures(made: Figures) -> GpuNode:
    """The machine that figures describe."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.yaml"
        path.write_text(yaml.safe_dump(made, sort_keys=False))
        return machine_of(path)


def _main() -> None:
    world = current_world()
    figures = measure(world, shows=world.rank == 0)
    if world.rank == 0:
        Path(sys.argv[1]).write_text(yaml.safe_dump(figures, sort_keys=False))
    world.close()


if __name__ == "__main__":
    _main()
