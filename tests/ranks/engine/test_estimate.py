"""``shoal estimate``'s numbers are the bytes that an engine holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import shoal
from shoal.build.settings import ZeroSettings
from shoal.comm.threads import run_ranks
from shoal.engine.estimate import Estimate, activation_nbytes, estimate, variants
from shoal.errors import UsageError
from shoal.models import GPT, GPTConfig
from shoal.sharding.placement import Tier

SHAPE = GPTConfig(512, 32, num_layers=2, hidden_size=128, num_heads=2, tied=False)
STATES = ("parameter", "gradient", "master", "optimizer state")
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "int8": {"bf16": {"enabled": True}, "precision": {"state_dtype": "int8"}},
}


def held(config: dict[str, Any]) -> dict[tuple[str, str], int]:
    """What the ledger of a real engine has after two steps, read off its live tensors."""
    torch.manual_seed(0)
    engine, *_ = shoal.initialize(model=GPT(SHAPE), config=config)
    tokens = torch.arange(64).view(2, 32)
    for _ in range(2):
        engine.backward(engine(tokens, tokens))
        engine.step()
    found: dict[tuple[str, str], int] = {}
    for entry in engine.memory_report().entries:
        key = entry.kind, entry.tier
        found[key] = found.get(key, 0) + entry.nbytes
    found["staging buffers", "device"] = sum(each.nbytes for each in engine.sharded.staging)
    engine.destroy()
    return found


def estimated(config: dict[str, Any], num_ranks: int) -> Estimate:
    with FakeTensorMode():
        return estimate(GPT(SHAPE), config, num_ranks)


def cases() -> list[Any]:
    every = variants({"zero_optimization": {"stage3_param_persistence_threshold": 0}}, range(4), with_disk=True)
    return [
        pytest.param(one, precision, id=f"{precision}-{i}")
        for i, one in enumerate(every)
        # In fp32, whether there are main parameters depends on the tiers.
        for precision in ("bf16", "int8", *(["fp32"] if one["zero_optimization"]["stage"] == 3 else []))
    ]


@pytest.mark.parametrize(("variant", "precision"), cases())
def test_the_estimate_is_what_an_engine_holds(
    variant: dict[str, Any], precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the variants have their disk
    monkeypatch.setattr("shoal.engine.settings.ZeroSettings", partial(ZeroSettings, is_host_separate=True))
    config = {**CONFIG, **variant, **PRECISIONS[precision]}
    real = run_ranks(2, held, config)[0]
    guess = estimated(config, 2)
    for kind in STATES:
        for tier in Tier:
            expected = real.get((kind, tier.value), 0)
            # Gaps between parameters have no optimizer state, but all else.
            assert expected <= guess.on(tier, kind) <= expected * 1.003, (kind, tier)
    assert real["staging buffers", "device"] <= guess.on(Tier.DEVICE, "buffers")


def test_activations_on_fake_tensors_are_those_of_a_real_forward() -> None:
    def nbytes() -> int:
        model, tokens = GPT(SHAPE), torch.zeros(2, 32, dtype=torch.long)
        return activation_nbytes(model, torch.bfloat16, lambda model: model(tokens, tokens))

    with FakeTensorMode():
        without_values = nbytes()
    assert without_values == nbytes() > 2 * 32 * 128 * 2 * SHAPE.num_layers


def test_other_axes_than_data_parallel_ones_are_refused() -> None:
    with pytest.raises(UsageError, match="covers data-parallel ranks only"):
        estimated({**CONFIG, "parallel": {"tp": 2}}, 4)
