"""A client hands a model over a second time: the new engine has it, the one from before is gone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.compat.deepspeed.runtime.entry import initialize
from shoal.errors import ShoalError

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_that_is_handed_over_again_keeps_what_was_trained(stage: int) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.ones(1, 4)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}

    def job() -> tuple[Any, ...]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {**CONFIG, "zero_optimization": zero}
        engine = initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
        engine.backward(engine(x).sum())
        engine.step()
        trained = engine(x).detach().clone()
        again = initialize(model=model, model_parameters=[], config=config, dist_init_required=False)[0]
        tested = again(x).detach().clone()
        with pytest.raises(ShoalError, match="destroy"):
            engine(x)
        again.destroy()
        return trained, tested

    for trained, tested in run_ranks(2, job):
        assert not torch.equal(trained, first(x).detach())
        torch.testing.assert_close(tested, trained, atol=0, rtol=0)
