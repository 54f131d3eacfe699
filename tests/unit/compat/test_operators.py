"""What DeepSpeed's builders load: files and pinned memory; functions of optimizers are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.compat.op_builders import BUILDERS
from shoal.errors import NotBuiltError, UsageError


def load(builder: str) -> Any:
    return BUILDERS[builder]().load(verbose=False)


@pytest.mark.parametrize("builder", ["CPUAdamBuilder", "FusedAdamBuilder", "CPULionBuilder", "FusedLambBuilder"])
def test_an_optimizers_operator_is_loaded_and_its_functions_say_what_to_use(builder: str) -> None:
    module = load(builder)  # scripts load it in order to compile it before training
    with pytest.raises(NotBuiltError, match=r"function create_adam\(\)(.|\n)*do: use the optimizer classes"):
        module.create_adam(0, 1e-2)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_handle_writes_and_reads_tensors(tmp_path: Path, threads: int, dtype: torch.dtype) -> None:
    handle = load("AsyncIOBuilder").aio_handle(1 << 16, 8, True, False, threads)
    assert (handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (8, threads)
    written = torch.arange(10_001).reshape(73, 137).to(dtype)
    path = str(tmp_path / "tensor")
    assert handle.sync_pwrite(written, path) == 1
    assert torch.equal(torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=dtype), written.reshape(-1))
    whole, tail = handle.new_cpu_locked_tensor(10_001, written), torch.empty(137, dtype=dtype)
    assert handle.async_pread(whole, path) == 0
    assert handle.async_pread(tail, path, (10_001 - 137) * written.element_size()) == 0
    assert handle.wait() == 2
    assert handle.wait() == 0
    assert torch.equal(whole.view(73, 137), written)
    assert torch.equal(tail, written[-1])
    assert (handle.free_cpu_locked_tensor(whole), handle.free_cpu_locked_tensor(whole)) == (True, False)
    handle.async_pwrite(torch.zeros(137, dtype=dtype), path, 0)
    assert handle.wait() == 1
    assert handle.read(tail, path) == 1
    assert not tail.any()


def test_a_request_that_cannot_be_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    handle = load("AsyncIOBuilder").aio_handle()
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(OSError, match="none' cannot be opened: No such file"):
        handle.sync_pread(torch.empty(4), str(tmp_path / "none"))
    with pytest.raises(OSError, match=r"short' has 4 bytes, and bytes 0 to 16"):
        handle.sync_pread(torch.empty(4), str(tmp_path / "short"))
    with pytest.raises(UsageError, match="not contiguous"):
        handle.sync_pwrite(torch.ones(4, 4).t(), str(tmp_path / "other"))


def test_a_pin_handle_knows_the_tensors_that_it_made() -> None:
    handle = load("PinMemoryBuilder").pin_handle()
    tensor = handle.new_cpu_locked_tensor(10, torch.empty(0, dtype=torch.float16))
    assert (tensor.shape, tensor.dtype) == ((10,), torch.float16)
    assert handle.is_pinned(tensor[2:])
    assert not handle.is_pinned(torch.zeros(3))
    assert handle.free_cpu_locked_tensor_by_ptr(tensor.data_ptr())
    assert not handle.free_cpu_locked_tensor(torch.zeros(3))
