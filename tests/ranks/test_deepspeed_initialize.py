"""``deepspeed.initialize`` says what is wrong in the kinds of error that DeepSpeed's scripts catch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.compat.deepspeed.runtime.entry import initialize
from shoal.errors import ConfigError, ModelError, OptimizerError, UsageError

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
TWICE = {"train_batch_size": 3, "gradient_accumulation_steps": 2}  # 3 is not 1 x 2 x 1
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def on_one_rank(job: Any) -> None:
    run_ranks(1, job)


@pytest.mark.parametrize(
    ("given", "kind", "code"),
    [
        ({"model": None, "config": CONFIG}, ModelError, "model-type"),
        ({"model": nn.Linear(2, 2)}, ConfigError, "config-missing"),
        (
            {
                "model": nn.Linear(2, 2),
                "config": {**CONFIG, **TWICE, **ADAM},
            },
            ConfigError,
            "config",
        ),
    ],
)
def test_what_deepspeed_asserts_is_an_assertion_error_too(given: dict[str, Any], kind: type, code: str) -> None:
    def job() -> None:
        with pytest.raises(AssertionError) as caught:
            initialize(**given, dist_init_required=False)
        assert isinstance(caught.value, kind)
        assert vars(caught.value).get("code", kind.code) == code  # type: ignore[attr-defined]

    on_one_rank(job)


def test_backward_and_step_without_an_optimizer_are_assertion_errors_and_usage_errors() -> None:
    def job() -> None:
        engine = initialize(model=nn.Linear(2, 2), config=CONFIG, dist_init_required=False)[0]
        for kind in (AssertionError, UsageError):
            with pytest.raises(kind, match="no-optimizer"):
                engine.backward(engine(torch.ones(1, 2)).sum())
            with pytest.raises(kind, match="no-optimizer"):
                engine.step()
        engine.destroy()

    on_one_rank(job)


@pytest.mark.parametrize("is_in_config", [True, False])
def test_a_schedule_of_another_optimizer_is_refused(is_in_config: bool) -> None:
    model = nn.Linear(2, 2)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(other)

    def job() -> None:
        mine = None if is_in_config else torch.optim.AdamW(model.parameters(), lr=0.1)
        config = {**CONFIG, **ADAM} if is_in_config else CONFIG
        with pytest.raises(OptimizerError, match=r"schedule-of-another.*ConstantLR of another optimizer \(SGD\)"):
            shoal.initialize(model=model, optimizer=mine, lr_scheduler=schedule, config=config)

    on_one_rank(job)


def test_the_oldest_spelling_of_the_config_argument_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **ADAM}))

    def job() -> None:
        args = argparse.Namespace(deepscale_config=str(path), local_rank=0)
        engine = initialize(args=args, model=nn.Linear(2, 2), dist_init_required=False)[0]
        assert engine.train_micro_batch_size_per_gpu() == 1
        engine.destroy()

    on_one_rank(job)
