"""``shoal doctor`` without a file: what is installed, what computes, and whether ranks can run on this machine."""

from __future__ import annotations

import json
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import shoal
from shoal.comm.local_device import backends
from shoal.comm.shm import is_supported
from shoal.compat.about import TESTED
from shoal.device import num_accelerators
from shoal.kernels.use import launch_obstacle
from shoal.launch import read_environment
from shoal.memory.host import host_available_nbytes
from shoal.processor import Format, has_instructions_for, num_cores
from shoal.text import format_bytes, table


@dataclass(frozen=True)
class Finding:
    """One line: a fact, and the problem that it is, if any."""

    name: str
    value: str
    problem: str = ""


def check_machine(*, as_json: bool = False) -> bool:
    """Print what this machine has. Returns: True if ranks can run on it."""
    findings = list(_findings())
    problems = [each for each in findings if each.problem]
    if as_json:
        print(json.dumps([asdict(each) for each in findings], indent=2))
    else:
        print(table([[each.name, each.value] for each in findings], ["item", "value"]))
        for each in problems:
            print(f"problem: {each.name}: {each.problem}")
        if not problems:
            print("Nothing is wrong. `shoal doctor FILE` checks a configuration.")
    return not problems


def _findings() -> Iterator[Finding]:
    yield Finding("shoal", shoal.__version__)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    yield from _devices()
    yield Finding("processor", f"{platform.machine()}, {num_cores()} cores for this process")
    both: tuple[Format, Format] = ("bf16", "fp16")
    formats = [name for name in both if has_instructions_for(name)]
    yield Finding("  instructions for", ", ".join(formats) or "neither bf16 nor fp16: both are emulated, and slow")
    threads = read_environment().num_threads
    yield Finding("  threads per rank", "cores / ranks" if threads is None else f"{threads} (OMP_NUM_THREADS)")
    yield Finding("memory available", format_bytes(host_available_nbytes()))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "no limit" if limit == resource.RLIM_INFINITY else f"at most {format_bytes(limit)} (ulimit -l)"
    yield Finding("  page-locked", locked)
    is_shared = is_supported()
    yield Finding("ranks of this machine", "exchange data in shared memory" if is_shared else "exchange data over Gloo")
    yield _loopback()
    lacks = "" if "gloo" in backends() else "this torch was built without Gloo, which ranks need to find each other."
    yield Finding("backends of torch", ", ".join(backends()) or "none", lacks)
    yield _folder()
    for name, tested in TESTED.items():
        yield Finding(name, f"{_installed(name)} (tested: {tested})")


def _devices() -> Iterator[Finding]:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        yield Finding("devices", "no GPU: ranks compute on the CPU")
        return
    module: Any = torch.get_device_module(kind)
    for index in range(torch.accelerator.device_count()):
        each = module.get_device_properties(index)
        yield Finding(f"{kind.type}:{index}", f"{each.name}, {format_bytes(each.total_memory)}")
    visible = read_environment().visible_devices
    if visible is not None:
        yield Finding("  CUDA_VISIBLE_DEVICES", ",".join(visible) or "none")
    if num_accelerators() and (obstacle := launch_obstacle()):
        yield Finding("  kernels", f"torch's operators, as Triton cannot run its own: {obstacle}")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2):
            return Finding("127.0.0.1", "accepts connections")
    except OSError as error:
        return Finding("127.0.0.1", "no connection", f"ranks of this machine connect to rank 0 there: {error}.")


def _folder() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    problem = "the ranks' output goes there: free some space, or set TMPDIR." if free < 1 << 20 else ""
    return Finding("temporary files", f"{folder}, {format_bytes(free)} free", problem)


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
