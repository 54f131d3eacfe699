"""Autocast of sharded parameters: what is kept until backward, and that it is the same step as of whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from tests.helpers.training import are_bit_equal, config, finish, make, start, start_with

AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
SIZE, NUM_LAYERS = 96, 6
CAST_NBYTES = 2 * SIZE * SIZE  # of one weight


class Layers(nn.Module):
    """Linear layers of which nothing else is large."""

    def __init__(self, *, is_recomputed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(NUM_LAYERS))
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.is_recomputed = is_recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_recomputed else torch.tanh(block(x))
        return self.convolution(x[:, None]).float()


def inputs_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, SIZE, generator=torch.Generator().manual_seed(10 * step + rank))


def settings(stage: int, **sections: Any) -> dict[str, Any]:
    return config(stage, torch_autocast=AUTOCAST, gradient_accumulation_steps=2, **sections)


class Casts(TorchDispatchMode):
    """The most casts of weights that were there at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.numel() == SIZE * SIZE:
            self._made.append(StorageWeakRef(out.untyped_storage()))
            self.most = max(self.most, sum(not each.expired() for each in self._made))
        return out


@pytest.mark.parametrize("is_scripts", [False, True])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_forward_at_stage_3_keeps_one_cast_of_a_weight_at_a_time(is_recomputed: bool, is_scripts: bool) -> None:
    def job(stage: int) -> int:
        sections = {} if is_scripts else {"torch_autocast": AUTOCAST}
        engine = start(lambda: Layers(is_recomputed=is_recomputed), config(stage, **sections))
        for step in range(3):
            with Casts() as casts, torch.autocast("cpu", torch.bfloat16, enabled=is_scripts):
                loss = engine(inputs_of(step, 0)).square().mean()
            engine.backward(loss)
            engine.step()
        engine.destroy()
        return casts.most

    # The first input has no gradient. One rank: autocast's cache is the process', and another rank's thread clears it.
    assert run_ranks(1, job, 2)[0] >= NUM_LAYERS - 1
    assert run_ranks(2, job, 3)[0] == 1


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_every_stage_takes_the_same_step_with_gradients_of_gradients(is_recomputed: bool) -> None:
    def job(stage: int) -> dict[str, torch.Tensor]:
        engine = start(lambda: Layers(is_recomputed=is_recomputed), settings(stage))
        for step in range(4):
            x = inputs_of(step, current_world().rank).requires_grad_()
            loss = engine(x).square().mean()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            engine.backward(loss + gradient.square().sum())
            engine.step()
        return finish(engine, []).parameters

    whole, *others = [run_ranks(2, job, stage)[0] for stage in (0, 2, 3)]
    assert all(are_bit_equal(other, whole) for other in others)


def test_what_is_changed_in_place_is_an_error_as_in_torch() -> None:
    class Changed(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.blocks[0](x))
            x += 1
            return self.blocks[1](x).float()

    def job() -> None:
        engine = start(Changed, settings(3))
        with pytest.raises(UsageError, match=r"changed in place after autograd saved it \(torch.bfloat16"):
            engine.backward(engine(inputs_of(0, 0)).mean())
        engine.destroy()

    run_ranks(2, job)


def test_weights_are_no_activations_that_are_offloaded() -> None:
    def job(stage: int) -> int:
        engine = start(Layers, settings(stage, offload_activation={"device": "cpu"}))
        loss = engine(inputs_of(0, 0)).square().mean()
        saved = engine.memory_report().by_kind()["saved activations"]
        engine.backward(loss)
        engine.destroy()
        return saved

    for stage in (0, 3):
        assert 0 < run_ranks(2, job, stage)[0] < CAST_NBYTES


SAFE = {"lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv1d"]}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_of_safe_modules_are_gathered_in_autocasts_dtype_with_the_same_bits(is_frozen: bool) -> None:
    def job(stage: int, section: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
        model = make(Layers)
        model.blocks[:3].requires_grad_(not is_frozen)
        engine = start_with(model, {**settings(stage), "torch_autocast": {**AUTOCAST, **section}})
        for step in range(4):
            if step == 3:
                engine.zero_grad()
            with current_world().recorder.recording() as entries:
                engine.backward(engine(inputs_of(step, current_world().rank)).square().mean())
            engine.step()
        gathered = sum(entry.nbytes for entry in entries if (entry.op, entry.kind) == ("all_gather", "data"))
        return finish(engine, []).parameters, gathered

    whole, _ = run_ranks(2, job, 2, SAFE)[0]
    sharded, in_bf16 = run_ranks(2, job, 3, SAFE)[0]
    assert are_bit_equal(sharded, whole)
    _, in_fp32 = run_ranks(2, job, 3, {})[0]
    assert 2 * in_bf16 == pytest.approx(in_fp32, rel=0.01)


def test_a_transform_of_torch_func_which_takes_no_hooks_runs_at_stage_3() -> None:
    def job(stage: int) -> torch.Tensor:
        engine = start(Layers, settings(stage))
        with shoal.zero.GatheredParameters(engine.module.parameters()):
            gradient = torch.func.grad(lambda x: engine(x).sum())(inputs_of(0, 0))
        engine.destroy()
        return gradient

    whole, sharded = (run_ranks(2, job, stage)[0] for stage in (0, 3))
    assert torch.equal(whole, sharded)
