"""Kernels: interpreted on CPU tensors in a process of their own, compiled for a GPU, and timed in a dry run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.comm import formats
from shoal.comm.formats import FORMATS
from shoal.kernels import use
from shoal.kernels.use import one_kernel, this_kernel
from shoal.optim import one_kernel_adam
from shoal.parallel import loss as loss_of_shoal
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.held import ExpertsHeld
from shoal.parallel.loss import linear_cross_entropy
from shoal.parallel.low_precision.formats import Block, ScaledFloat8
from shoal.parallel.sequence.chunks import Tile
from shoal.parallel.sequence.ring import _MergedOutput
from shoal.parallel.swiglu import swiglu
from shoal.simulation.machines import machine_of
from shoal.simulation.times import COMPUTE, COPY
from tests.helpers.training import config

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


@pytest.mark.timeout(240)
def test_kernels_compute_what_operators_compute() -> None:
    cases = sorted(map(str, Path("tests/helpers").glob("interpreted_*.py")))
    assert len(cases) == 8
    printed = run_python("-m", "pytest", "-q", "-p", "no:xdist", *cases, TRITON_INTERPRET="1")
    assert re.search(r"^\d+ passed in ", printed, re.MULTILINE), printed  # none is skipped


COMPILED = """
import re
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shoal.kernels import adam, block_formats as kernels, cross_entropy, expert_rows, float8, merge, swiglu

name = sys.argv[1]


def compile_for_gpu(kernel, known, kinds, other="i32"):
    names = kernel.arg_names
    signature = {each: "constexpr" if each in known else kinds.get(each, other) for each in names}
    constants = {(names.index(each),): value for each, value in known.items() if each in names}
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert ".entry" in made.asm["ptx"]
    print(kernel.fn.__name__, made.metadata.shared)
    return made.asm["ptx"]


def check_barrier(ptx):
    # No warp reads between the last barrier and the first write: what it would read may be overwritten by another warp.
    accesses = re.findall(r"ld[.]global|bar[.]sync|st[.]global", ptx)
    assert accesses[accesses.index("st.global") - 1] == "bar.sync", accesses


known = dict(KIND=kernels._KINDS[name], BITS=kernels._BITS[name], HAS_ERROR=True, **kernels._tile(256))
kinds = {"rows": "*bf16", "error": "*fp32", "scales": "*fp32", "codes": "*u8", "out": "*bf16"}
for kernel in (kernels._encode, kernels._decode):
    compile_for_gpu(kernel, known, kinds)
known = dict(IS_DECOUPLED=True, IS_CORRECTED=True, HAS_PARAMETER=True, BLOCK=1024)
kinds = {"gradient": "*bf16", "parameter": "*bf16", "numel": "i32"}
kinds |= dict.fromkeys(("main", "average", "square", "count"), "*fp32")
kinds |= dict.fromkeys(("lr", "power1", "power2"), "fp64")
compile_for_gpu(adam._adam, known, kinds, "fp32")
kinds = {"logits": "*bf16", "targets": "*i64", "losses": "*fp32"}
check_barrier(compile_for_gpu(cross_entropy._cross_entropy, {"BLOCK": 4096}, kinds))
known = dict(HAS_SCALE=True, HAS_DOTS=True, HAS_WEIGHTS=True, K=8, BLOCK=2048)
kinds = dict.fromkeys(("tokens", "rows", "dot_with", "out"), "*bf16") | {"token_of": "*i64", "row_of": "*i64"}
kinds |= dict.fromkeys(("scale", "weights", "dots"), "*fp32")
for kernel in (expert_rows._gather, expert_rows._sum):
    compile_for_gpu(kernel, known, kinds)
kinds = {"total": "*fp32", "lse": "*fp32", "out": "*bf16", "of_tile": "*fp32"}
check_barrier(compile_for_gpu(merge._merge, {"IS_REVERSED": True, "QUERIES": 32, "PADDED": 128}, kinds))
kinds = dict.fromkeys(("gate_up", "out", "gradient", "of_gate_up"), "*bf16")
for kernel in (swiglu._forward, swiglu._backward):
    compile_for_gpu(kernel, {"BLOCK": 1024}, kinds)
kinds = {"matrix": "*bf16", "stack": "*bf16", "largest": "*i32", "codes": "*u8", "scales": "*fp32"}
for is_e5m2 in (False, True):
    known = {"BY_ROW": not is_e5m2, "IS_E5M2": is_e5m2, "TILE": float8._TILE}
    for kernel in (float8._largest, float8._encode):
        compile_for_gpu(kernel, known, kinds)
for is_square, width, scales in ((False, 128, "*fp32"), (True, 128, "*fp32"), (False, 32, "*u8")):
    known = {"IS_SQUARE": is_square, "WIDTH": width, "TILE": float8._BLOCKS}
    compile_for_gpu(float8._encode_blocks, known, {**kinds, "scales": scales})
kinds |= dict.fromkeys(("ends", "source", "group_of", "aligned_ends"), "*i32") | {"rows": "*bf16"}
known = {"GROUPS": 128, "ROWS": float8.GROUP_ROWS, "TILE": float8._TILE}
for kernel in (float8._align, float8._largest_of_groups, float8._encode_groups):
    compile_for_gpu(kernel, {name: value for name, value in known.items() if name in kernel.arg_names}, kinds)
"""


@pytest.mark.parametrize("name", ["int4_hadamard"])
def test_kernels_compile_for_a_gpu(name: str, tmp_path: Path) -> None:
    """Triton's compiler refuses what its interpreter runs."""
    printed = run_python("-W", "ignore", "-c", COMPILED, name, TRITON_CACHE_DIR=str(tmp_path))
    kernels = "_encode _decode _adam _cross_entropy _gather _sum _merge _forward _backward _largest _encode"
    kernels += " _largest _encode _encode_blocks _encode_blocks _encode_blocks"
    kernels += " _align _largest_of_groups _encode_groups"
    assert printed.split()[::2] == kernels.split()


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


@pytest.mark.parametrize("block", [(1, None), (None, None)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_dry_run_times_codes_of_8_bits_as_a_pass_that_reads_and_one_that_writes(
    block: Block, is_transposed: bool
) -> None:
    size = 2**13
    with shoal.dry_run(1, machine="h100") as run:
        matrix = torch.empty(size, size, dtype=torch.bfloat16)
        with run.step():
            codes, _ = ScaledFloat8(torch.float8_e4m3fn, block).encode(matrix.t() if is_transposed else matrix)
    assert codes.is_contiguous()
    expected = size * size * (2 + 2 + 1) / machine_of("h100").memory_bandwidth
    assert expected <= run.steps[0].by_kind[COMPUTE] <= 1.1 * expected


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.bfloat16, 28), (torch.float32, 30)])
def test_a_dry_run_times_adam_of_each_range_as_one_pass_over_memory(dtype: torch.dtype, nbytes: int) -> None:
    numel = 2**27
    with shoal.dry_run(1, machine="h100") as run:
        flat, gradient, parameters = torch.empty(numel), torch.empty(numel).to(dtype), torch.empty(numel).bfloat16()
        mains = [torch.nn.Parameter(half) for half in flat.chunk(2)]
        optimizer = torch.optim.AdamW(mains)
        halves = zip(mains, gradient.chunk(2), parameters.chunk(2), strict=True)
        ranges = [one_kernel_adam.AdamRange(*half) for half in halves]
        for _ in range(2):
            with run.step():
                one_kernel_adam.update(optimizer, optimizer.param_groups[0], ranges, 0.5)
    once = numel * nbytes / machine_of("h100").memory_bandwidth
    assert once <= run.steps[1].by_kind[COMPUTE] <= 1.1 * once  # the first step makes the moments, too


@pytest.mark.parametrize("is_fused", [True, False])
def test_an_update_is_one_kernel_for_each_range(is_fused: bool) -> None:
    """The counts of steps, which one more adds 1 to, are of no device to a dry run."""
    with shoal.dry_run(1, machine="h100") as run:
        mains = [torch.nn.Parameter(torch.empty(2**20)) for _ in range(8)]
        optimizer = torch.optim.AdamW(mains, fused=is_fused)
        ranges = [one_kernel_adam.AdamRange(main, torch.empty(2**20).bfloat16(), None) for main in mains]
        for _ in range(2):
            with run.step():
                one_kernel_adam.update(optimizer, optimizer.param_groups[0], ranges, 0.5)
    begin = run.steps[1].begin
    kernels = [each for each in run._times.operations if each.start >= begin and each.kind in (COMPUTE, COPY)]
    assert len(kernels) == 8, [each.name for each in kernels]


def test_the_step_of_an_engine_updates_by_kernels_from_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bytes an element fewer than torch's operators count, with bf16 gradients and nothing to scale: 4 each to write
    the cast, to read it, for torch's right to change it, and to read the main parameters when they are rounded.
    """

    width = 32768

    def steps() -> list[float]:
        with shoal.dry_run(8, machine="h100") as run:
            model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(2)))
            settings = config(3, units={"names": []}, bf16={"enabled": True}, gradient_clipping=1.0)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            engine = shoal.initialize(model=model, optimizer=optimizer, config=settings)[0]
            for _ in range(2):
                with run.step():
                    engine.backward(engine(torch.zeros(1, width)).sum())
                    engine.step()
            engine.destroy()
        return [step.by_kind[COMPUTE] for step in run.steps]

    ours = steps()
    monkeypatch.setattr(one_kernel_adam, "MIN_NUMEL", 2**40)
    for mine, theirs in zip(ours, steps(), strict=True):
        saved = (theirs - mine) * machine_of("h100").memory_bandwidth / (2 * width**2 / 8)
        assert 15.5 <= saved <= 17


@pytest.mark.parametrize("capacity", [None, 1024])
def test_a_dry_run_times_each_gather_and_sum_of_rows_of_experts_as_one_pass_over_memory(capacity: int | None) -> None:
    """Bytes of 16-bit rows and tokens: 2 to read the rows in each sum and in the combination's backward, 2 to write
    them where they are gathered, and 2 there; of tokens, an eighth as many, 2 in each. torch's operators move 72, and
    with a capacity 86.
    """
    num_tokens, width, k = 8192, 2048, 8
    with shoal.dry_run(1, machine="h100") as run:
        hidden = torch.empty(num_tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weights, index = torch.empty(num_tokens, k, requires_grad=True), torch.zeros(num_tokens, k, dtype=torch.long)
        with run.step():
            out = run_experts(
                hidden, index, weights, lambda rows, _: rows, ExpertsHeld(64), may_drop=False, capacity=capacity
            )
            out.backward(torch.empty_like(out))
    moved = run.steps[0].by_kind[COMPUTE] * machine_of("h100").memory_bandwidth / (num_tokens * width * k)
    assert 2 + 2 + 2 + 2 + 2 + 4 * 2 / 8 - 2 * (capacity is not None) <= moved <= 13


def test_a_dry_run_times_a_gated_activation_and_its_gradients_as_one_pass_over_memory_each() -> None:
    """torch's operators move 10 and 26 bytes an element of 16 bits, and keep two more until backward."""
    rows, width = 8192, 4096
    with shoal.dry_run(1, machine="h100") as run:
        gate_up = torch.empty(rows, 2 * width, dtype=torch.bfloat16, requires_grad=True)
        with run.step():
            out = swiglu(gate_up)
        with run.step():
            out.backward(torch.empty_like(out))
    moved = [step.by_kind[COMPUTE] * machine_of("h100").memory_bandwidth / (rows * width) for step in run.steps]
    assert moved == [pytest.approx(6, abs=0.3), pytest.approx(10, abs=0.3)]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_dry_run_times_a_merge_of_tiles_as_one_pass_over_memory(is_first: bool) -> None:
    """10 bytes an element of a 16-bit output; torch's operators move 26. The first tile is left as it is."""
    rows, heads, length, size = 1, 16, 8192, 128
    tile = Tile(None, 0, length, 0, length)
    with shoal.dry_run(1, machine="h100") as run:
        out, lse = torch.empty(rows, heads, length, size, dtype=torch.bfloat16), torch.empty(rows, heads, length)
        merged = _MergedOutput(out, out)
        if not is_first:
            merged.add(tile, out, lse.clone())
            merged.out = merged.out.float()
        with run.step():
            merged.add(tile, out, lse)
    moved = run.steps[0].by_kind[COMPUTE] * machine_of("h100").memory_bandwidth / out.numel()
    assert moved == 0 if is_first else 10 <= moved <= 10.5


def test_a_dry_run_times_the_loss_of_a_chunk_and_its_gradient_as_one_pass_over_the_logits() -> None:
    """Without the kernel 20 bytes a logit: log_softmax reads 2 and writes 4, exp 8, the cast 6."""
    numel = 2048 * 32_768
    formula = loss_of_shoal._Formula(loss_of_shoal.CrossEntropy(), "mean", None, 2048, torch.bfloat16, True)
    with shoal.dry_run(1, machine="h100") as run:
        logits, targets = torch.empty(2048, 32_768, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.long)
        for each in (formula, replace(formula, is_in_one_kernel=False)):
            with run.step():
                loss, gradient = loss_of_shoal._one_chunk(logits, targets, each, has_gradient=True)
                gradient = gradient.to(torch.bfloat16)
            assert loss.shape == (2048,) and gradient.shape == logits.shape
    ours, theirs = (step.by_kind[COMPUTE] * machine_of("h100").memory_bandwidth / numel for step in run.steps)
    assert 4 <= ours <= 4.4 and theirs >= 20


@pytest.mark.parametrize(("options", "number"), [({}, 2), ({"label_smoothing": 0.1}, 8), ({"reduction": "none"}, 8)])
def test_chunks_whose_logits_are_alone_in_memory_have_four_times_the_tokens(
    options: dict[str, Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk adds to the fp32 gradient of the whole weight."""
    chunks: list[int] = []
    one_chunk = loss_of_shoal._one_chunk
    monkeypatch.setattr(
        loss_of_shoal,
        "_one_chunk",
        lambda logits, *args, **kw: (chunks.append(len(logits)), one_chunk(logits, *args, **kw))[1],
    )
    with shoal.dry_run(1, machine="h100"):
        hidden, weight = (torch.empty(n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (8192, 131_072))
        linear_cross_entropy(hidden, weight, torch.zeros(8192, dtype=torch.long), **options)
    assert chunks == [8192 // number] * number


def test_without_a_c_compiler_operators_run_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Driver:
        @property
        def active(self) -> Any:
            raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    for name in ("_can_launch", "launch_obstacle"):
        monkeypatch.setattr(use, name, cache(getattr(use, name).__wrapped__))
    monkeypatch.setattr(use, "_has_triton", lambda: True)
    monkeypatch.setattr(use, "_is_interpreted", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=Driver()))  # type: ignore[arg-type]
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert not use.has_kernels(torch.zeros(1)) and not caplog.messages
    assert not use.has_kernels(on_gpu) and not use.has_kernels(on_gpu, on_gpu)
    assert len(caplog.messages) == 1 and "Failed to find C compiler. (It needs" in caplog.text

    use._can_launch.cache_clear()
    use.launch_obstacle.cache_clear()
    found = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: "sm_90"))
    monkeypatch.setattr(sys.modules["triton.runtime"], "driver", found)
    assert use.has_kernels(on_gpu) and not use.has_kernels(on_gpu, torch.zeros(1))


@pytest.mark.parametrize(("name", "largest"), [("int8", 8192), ("fp8", 8192), ("int4", 1024), ("1bit", 512)])
def test_blocks_whose_kernel_takes_long_to_compile_are_left_to_operators(
    name: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    kernels = SimpleNamespace(encode=lambda _, block, *rest: encoded.append(block), decode=lambda *_: None)
    monkeypatch.setattr(formats, "has_kernels", lambda *_: True)
    monkeypatch.setattr(formats, "_kernels", lambda: kernels)
    for block in (largest, 2 * largest):
        FORMATS[name](block).encode(torch.zeros(1, 4 * block))
    assert encoded == [largest]


def test_blocks_of_one_kernel_nest() -> None:
    with one_kernel():
        with one_kernel():
            assert this_kernel()
        assert this_kernel()
    assert not this_kernel()
