"""First values of main parameters: the model's under Shoal's name, those rounded to 16 bits under DeepSpeed's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.compat.deepspeed import initialize
from tests.helpers.models import Plain
from tests.helpers.training import STAGES, adamw, config, make


def main_parameters(start: Any, settings: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    def begin() -> dict[str, torch.Tensor]:
        engine, *_ = start(model=make(Plain), optimizer=adamw, config=settings, **options)
        found = {name: shoal.zero.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
        engine.destroy()
        return found

    return run_ranks(2, begin)[0]


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_main_parameters_begin_rounded_only_under_deepspeeds_name(
    stage: int, precision: str, offload: str, tmp_path: Any
) -> None:
    settings = config(stage, **{precision: {"enabled": True}})
    if stage and offload != "none":
        settings["zero_optimization"]["offload_optimizer"] = {"device": offload, "nvme_path": str(tmp_path)}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    own = main_parameters(shoal.initialize, settings)
    under_deepspeed = main_parameters(initialize, settings, dist_init_required=False)
    for name, value in make(Plain).named_parameters():
        assert torch.equal(own[name], value.detach()), name
        assert torch.equal(under_deepspeed[name], value.detach().to(dtype).float()), name


@pytest.mark.parametrize("stage", STAGES)
def test_in_fp32_nothing_is_rounded(stage: int) -> None:
    under_deepspeed = main_parameters(initialize, config(stage), dist_init_required=False)
    for name, value in make(Plain).named_parameters():
        assert torch.equal(under_deepspeed[name], value.detach()), name
