"""On a GPU, inputs offloaded to the host are fetched with their bits, and the device stores those of two segments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.device import Device, _LockedMemory
from shoal.parallel.recompute import Recompute, RecomputeSettings, recompute_blocks
from shoal.sharding.placement import Tier

pytestmark = pytest.mark.device

ROWS, HIDDEN = 8192, 1024
X_NBYTES = ROWS * HIDDEN * 4


class Block(nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def gpu() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def run(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Loss, gradients, and the device bytes before backward beyond those at the start."""
    model.zero_grad()
    torch.manual_seed(0)
    before = Device(x.device).memory().allocated
    loss = model(x).square().mean()
    held = Device(x.device).memory().allocated - before
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None], held


@pytest.mark.parametrize("num_blocks", [4, 12])
def test_inputs_are_offloaded_to_the_host_and_fetched_with_their_bits(num_blocks: int) -> None:
    model = nn.Sequential(*(Block() for _ in range(num_blocks))).to(gpu())
    x = torch.randn(ROWS, HIDDEN, device=gpu())
    loss, gradients, _ = run(model, x)
    made = Recompute(RecomputeSettings(is_offloaded=True))
    recompute_blocks(model, Block, recompute=made)
    for _ in range(3):
        ours, our_gradients, held = run(model, x)
        assert torch.equal(ours, loss)
        assert all(torch.equal(a, b) for a, b in zip(our_gradients, gradients, strict=True))
        # The inputs of two segments, the last output, which square() keeps, and small things.
        assert held <= 3 * X_NBYTES + 2**20
    assert made.peak_saved_bytes == num_blocks * X_NBYTES
    assert made.saved_bytes_by_tier() == {}


def test_the_bytes_are_on_the_host() -> None:
    model = nn.Sequential(Block(), Block(), Block()).to(gpu())
    made = Recompute(RecomputeSettings(is_offloaded=True))
    recompute_blocks(model, Block, recompute=made)
    loss = model(torch.randn(ROWS, HIDDEN, device=gpu())).sum()
    assert made.saved_bytes_by_tier() == {Tier.HOST: 3 * X_NBYTES}
    loss.backward()


def test_host_memory_is_locked_in_the_first_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size that is no power of two; PyTorch's allocator reuses the others."""
    locked: list[int] = []
    allocate = _LockedMemory.allocate

    def counted(nbytes: int, device: torch.device) -> torch.Tensor:
        locked.append(nbytes)
        return allocate(nbytes, device)

    monkeypatch.setattr(_LockedMemory, "allocate", counted)
    model = nn.Sequential(*(Block(1100) for _ in range(6))).to(gpu())
    recompute_blocks(model, Block, recompute=Recompute(RecomputeSettings(is_offloaded=True)))
    x = torch.randn(ROWS, 1100, device=gpu())
    loss, gradients, _ = run(model, x)
    assert len(locked) == 6
    for _ in range(3):
        ours, our_gradients, _ = run(model, x)
        assert torch.equal(ours, loss)
        assert all(torch.equal(a, b) for a, b in zip(our_gradients, gradients, strict=True))
    assert len(locked) == 6
