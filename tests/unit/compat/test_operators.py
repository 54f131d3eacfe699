"""What DeepSpeed's builders load: steps of optimizers, files, pinned memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.compat.op_builders import BUILDERS
from shoal.errors import UsageError
from shoal.optim.lion import Lion

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1


def load(builder: str) -> Any:
    return BUILDERS[builder]().load(verbose=False)


def gradients(count: int = 3) -> list[torch.Tensor]:
    return list(torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(0)))


def stepped(make: Any) -> torch.Tensor:
    """A parameter of ones after the steps of torch's or Shoal's optimizer."""
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = make([parameter])
    for gradient in gradients():
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("is_adamw", [True, False])
def test_cpu_adams_update_is_adams_and_its_rollback_undoes_it(is_adamw: bool) -> None:
    module = load("CPUAdamBuilder")
    assert module.create_adam(3, LR, *BETAS, EPS, DECAY, is_adamw, False) == 0
    parameter, exp_avg, exp_avg_sq = torch.ones(4, 3), torch.zeros(4, 3), torch.zeros(4, 3)
    states = []
    for step, gradient in enumerate(gradients(), 1):
        states.append([tensor.clone() for tensor in (parameter, exp_avg, exp_avg_sq)])
        module.adam_update(3, step, LR, *BETAS, EPS, DECAY, True, parameter, gradient, exp_avg, exp_avg_sq)
    kind = torch.optim.AdamW if is_adamw else torch.optim.Adam
    torch.testing.assert_close(parameter, stepped(lambda p: kind(p, LR, BETAS, EPS, weight_decay=DECAY)))
    for step, gradient in reversed(list(enumerate(gradients(), 1))):
        module.adam_rollback(3, step, LR, *BETAS, EPS, DECAY, True, parameter, gradient, exp_avg, exp_avg_sq)
        for tensor, before in zip((parameter, exp_avg, exp_avg_sq), states[step - 1], strict=True):
            torch.testing.assert_close(tensor, before, atol=1e-5, rtol=1e-4)
    module.destroy_adam(3)
    with pytest.raises(UsageError, match="no adam optimizer 3"):
        module.adam_update(3, 1, LR, *BETAS, EPS, DECAY, True, parameter, parameter, exp_avg, exp_avg_sq)


def test_a_step_of_16_bit_parameters_is_computed_in_fp32() -> None:
    module = load("CPUAdamBuilder")
    module.create_adam(0, LR, *BETAS, EPS, 0.0, True, False)
    low, high = torch.ones(8, dtype=torch.bfloat16), torch.ones(8)
    for parameter in (low, high):
        state = torch.zeros(8), torch.zeros(8)
        module.adam_update(0, 1, 0.1, *BETAS, EPS, 0.0, True, parameter, torch.full_like(parameter, 0.5), *state)
    assert torch.equal(low, high.bfloat16())
    module.destroy_adam(0)


def test_the_other_optimizers_steps_are_theirs() -> None:
    adagrad, lion = load("CPUAdagradBuilder"), load("CPULionBuilder")
    adagrad.create_adagrad(0, LR, EPS, DECAY, False)
    lion.create_lion(0, LR, *BETAS, DECAY, False)
    first, second, total, exp_avg = torch.ones(4, 3), torch.ones(4, 3), torch.zeros(4, 3), torch.zeros(4, 3)
    for step, gradient in enumerate(gradients(), 1):
        adagrad.adagrad_update(0, step, LR, EPS, DECAY, first, gradient, total)
        lion.lion_update(0, step, LR, *BETAS, DECAY, second, gradient, exp_avg)
    torch.testing.assert_close(first, stepped(lambda p: torch.optim.Adagrad(p, LR, weight_decay=DECAY, eps=EPS)))
    torch.testing.assert_close(second, stepped(lambda p: Lion(p, LR, BETAS, weight_decay=DECAY)))
    adagrad.destroy_adagrad(0)
    lion.destroy_lion(0)


def test_fused_adam_steps_lists_of_tensors_unless_the_flag_is_set() -> None:
    update = load("FusedAdamBuilder").multi_tensor_adam
    parameters, state = [torch.ones(4, 3), torch.ones(2)], [[torch.zeros(4, 3), torch.zeros(2)] for _ in range(2)]
    for step, gradient in enumerate(gradients(), 1):
        lists = [[gradient, torch.zeros(2)], parameters, *state]
        for flag in (torch.ones(1, dtype=torch.int), torch.zeros(1, dtype=torch.int)):
            update(2048, flag, lists, LR, *BETAS, EPS, step, 1, 1, DECAY)
    expected = stepped(lambda p: torch.optim.AdamW(p, LR, BETAS, EPS, weight_decay=DECAY))
    torch.testing.assert_close(parameters[0], expected)


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
