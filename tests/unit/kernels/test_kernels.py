"""Kernels: interpreted on CPU tensors in a process of their own, compiled for a GPU, and timed in a dry run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.comm.formats import FORMATS
from shoal.kernels.use import is_one_kernel, one_kernel
from shoal.simulation.machines import machine_of
from shoal.simulation.times import COMPUTE

KERNELS = Path(sys.prefix, "kernels")


def run_python(*args: str, **environment: str) -> str:
    """What a process prints: Triton reads at its import whether to interpret kernels."""
    if importlib.util.find_spec("triton") is None:
        if not (KERNELS / "triton").exists():
            pytest.skip("Triton is not installed: make test installs it")
        environment["PYTHONPATH"] = os.pathsep.join((str(KERNELS), str(Path.cwd())))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    run = subprocess.run([sys.executable, *args], capture_output=True, text=True, env={**inherited, **environment})
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    return run.stdout


@pytest.mark.parametrize("module", ["interpreted_block_formats"])
def test_kernels_compute_what_operators_compute(module: str) -> None:
    cases = f"tests/helpers/{module}.py"
    printed = run_python("-m", "pytest", "-q", "-p", "no:xdist", cases, TRITON_INTERPRET="1")
    assert re.search(r"^\d+ passed in ", printed, re.MULTILINE), printed  # none is skipped


COMPILED = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shoal.kernels import block_formats as kernels

name = sys.argv[1]
known = dict(KIND=kernels._KINDS[name], BITS=kernels._BITS[name], HAS_ERROR=True, **kernels._tile(256))
kinds = {"rows": "*bf16", "error": "*fp32", "scales": "*fp32", "codes": "*u8", "out": "*bf16"}
for kernel in (kernels._encode, kernels._decode):
    names = kernel.arg_names
    signature = {each: "constexpr" if each in known else kinds.get(each, "i32") for each in names}
    constants = {(names.index(each),): value for each, value in known.items() if each in names}
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert ".entry" in made.asm["ptx"]
    print(kernel.fn.__name__, made.metadata.shared)
"""


@pytest.mark.parametrize("name", ["int4_hadamard"])
def test_kernels_compile_for_a_gpu(name: str, tmp_path: Path) -> None:
    """Triton's compiler refuses what its interpreter runs."""
    printed = run_python("-W", "ignore", "-c", COMPILED, name, TRITON_CACHE_DIR=str(tmp_path))
    assert printed.split()[::2] == ["_encode", "_decode"]


def test_a_dry_run_times_an_encoding_as_one_pass_over_memory() -> None:
    numel = 2**26
    with shoal.dry_run(1, machine="h100") as run:
        rows = torch.empty(1, numel)
        with run.step():
            encoded = FORMATS["int8"](None).encode(rows)
        with run.step():
            FORMATS["int8"](None).decode(encoded, rows)
    once = numel * (4 + 1 + 4 / 256) / machine_of("h100").memory_bandwidth
    for step in run.steps:
        assert once <= step.by_kind[COMPUTE] <= 1.1 * once


def test_blocks_of_one_kernel_nest() -> None:
    with one_kernel():
        with one_kernel():
            assert is_one_kernel()
        assert is_one_kernel()
    assert not is_one_kernel()
