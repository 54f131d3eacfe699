"""Mixture-of-experts models of Transformers through the engine: training, building on the meta device, loading."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint.loading_hf import load_hf
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.clients.test_expert_models import FAMILIES, TOKENS, build

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]

transformers.utils.logging.disable_progress_bar()  # its thread would stay

STEPS = 3


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "gradient_clipping": 0.5,
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        **more,
    }


def train_alone(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        for tokens in TOKENS:
            (model(input_ids=tokens[None], labels=tokens[None]).loss / len(TOKENS)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(engine: Any) -> dict[str, torch.Tensor]:
    tokens = TOKENS[engine.axes.batch.rank][None]
    for _ in range(STEPS):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    values: dict[str, torch.Tensor] = engine.module_state_dict()
    return values


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_a_family_trains_as_on_one_rank(family: str, stage: int) -> None:
    model = build(family)
    copies = [copy.deepcopy(model) for _ in TOKENS]
    expected = train_alone(model)

    def job() -> dict[str, torch.Tensor]:
        engine, *_ = shoal.initialize(model=copies[current_world().rank], config=settings(stage))
        return train(engine)

    for found in run_ranks(2, job):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-6, msg=name)
