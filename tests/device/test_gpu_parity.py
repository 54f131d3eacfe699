"""On one GPU one rank trains at every stage as plain PyTorch does there, and the ledger says what the allocator says.

Several ranks on one GPU: ``test_ranks_on_one_gpu.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.helpers import models
from tests.helpers.training import STAGES, adamw, batch, config, largest_difference, make, sgd

pytestmark = pytest.mark.device

STEPS = 4


@pytest.fixture(autouse=True)
def _exact_matmul() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def moved(index: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(device()) for tensor in batch(index, 0, 1))


def allocated() -> int:
    """Bytes that are allocated once cuBLAS has its workspaces, for this thread and for the one of backward."""
    gc.collect()
    x = torch.ones(16, 16, device=device(), requires_grad=True)
    torch.autograd.grad((x @ x).sum(), x)
    del x
    torch.accelerator.synchronize()
    return torch.cuda.memory_allocated()


def train_plain(
    factory: Callable[[], nn.Module], optimizer: Any, *, accumulation: int = 1, clip: float = 0.0
) -> dict[str, torch.Tensor]:
    model = make(factory).to(device())
    parameters = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(parameters)
    for step in range(STEPS):
        for micro in range(accumulation):
            (model(*moved(step * accumulation + micro)) / accumulation).backward()
        nn.utils.clip_grad_norm_(parameters, clip if clip else float("inf"))
        made.step()
        made.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def train_shoal(factory: Callable[[], nn.Module], optimizer: Any, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = make(factory)
    made = optimizer([p for p in model.parameters() if p.requires_grad]) if optimizer is not None else None
    engine = shoal.initialize(model=model, optimizer=made, config=settings)[0]
    assert engine.device.type == device().type
    for index in range(STEPS * engine.gradient_accumulation_steps()):
        engine.backward(engine(*moved(index)))
        engine.step()
    engine.destroy()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_fp32_on_the_gpu_is_plain_pytorch_on_the_gpu(
    stage: int, accumulation: int, clip: float, optimizer: Any
) -> None:
    settings = config(stage, gradient_accumulation_steps=accumulation, gradient_clipping=clip)
    expected = train_plain(models.Plain, optimizer, accumulation=accumulation, clip=clip)
    found = train_shoal(models.Plain, optimizer, settings)
    assert largest_difference(found, expected) <= (1e-5 if optimizer is sgd else 1e-4)


@pytest.mark.parametrize(
    "model",
    [
        models.Checkpointed,
        models.CheckpointedReentrant,
        models.Adapted,
        models.AdaptedCheckpointedReentrant,
        models.Twice,
        models.Shared,
        models.ReadsOthers,
        models.ReturnsTuplesDictsObjects,
        models.KeepsAuxiliaryLoss,
        models.OddParameters,
    ],
    ids=lambda model: model.__name__,
)
def test_every_model_of_the_zoo_trains_on_the_gpu(model: type[nn.Module]) -> None:
    expected = train_plain(model, sgd)
    for stage in STAGES:
        assert largest_difference(train_shoal(model, sgd, config(stage)), expected) <= 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bit_training_is_alike_at_all_stages_and_near_fp32(precision: str) -> None:
    section = {"enabled": True} if precision == "bf16" else {"enabled": True, "loss_scale": 256.0}
    expected = train_plain(models.Plain, adamw)
    found = [train_shoal(models.Plain, adamw, config(stage, **{precision: section})) for stage in STAGES]
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())
    # Four updates of at most 1e-2 each; the sign of a tiny gradient may differ.
    assert largest_difference({n: v.float() for n, v in found[0].items()}, expected) <= 8e-2


def test_an_optimizer_of_the_config_is_fused_and_trains_alike() -> None:
    expected = train_plain(
        models.Plain, lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8)
    )
    settings = config(3, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}})
    assert largest_difference(train_shoal(models.Plain, None, settings), expected) <= 1e-4


@pytest.mark.parametrize("kind", ["Muon", "Lamb"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizers_of_whole_tensors_train_alike_from_host_memory(kind: str, stage: int) -> None:
    optimizer = {"type": kind, "params": {"lr": 1e-2}}
    expected = train_shoal(models.Plain, None, config(stage, optimizer=optimizer))
    away = {"offload_optimizer": {"device": "cpu"}}
    found = train_shoal(models.Plain, None, config(stage, optimizer=optimizer, zero_optimization=away))
    assert largest_difference(found, expected) <= 1e-3


class Wide(models.Plain):
    def __init__(self) -> None:
        super().__init__(num_blocks=4, hidden=1024)


@pytest.mark.parametrize("stage", STAGES)
def test_the_ledger_is_within_2_percent_of_the_allocator(stage: int) -> None:
    before = allocated()
    model = make(Wide)
    settings = config(stage, bf16={"enabled": True})
    engine = shoal.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)[0]
    for index in range(2):
        engine.backward(engine(*moved(index)))
        engine.step()
    torch.accelerator.synchronize()
    kinds = engine.memory_report().by_kind()
    # On one rank gradients are autograd's own and gone after the step.
    held = sum(kinds.values()) - kinds["gradient"]
    taken = torch.cuda.memory_allocated() - before
    engine.destroy()
    assert abs(taken - held) <= 0.02 * held


def test_a_destroyed_engine_leaves_its_model_only() -> None:
    before = allocated()
    model = make(Wide)
    engine = shoal.initialize(model=model, optimizer=adamw(model.parameters()), config=config(2))[0]
    engine.backward(engine(*moved(0)))
    engine.step()
    engine.destroy()
    del engine
    numel = sum(p.numel() for p in model.parameters())
    assert torch.cuda.memory_allocated() - before <= 1.05 * 4 * numel


def test_running_out_of_gpu_memory_comes_with_the_ledger() -> None:
    class TooLarge(models.Plain):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
            return super().body(x)

    model = make(TooLarge)
    engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=config(1))[0]
    with pytest.raises(shoal.errors.OutOfMemoryError, match="bytes per parameter"):
        engine(*moved(0))
    engine.destroy()
