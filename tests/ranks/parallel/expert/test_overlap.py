"""Engines whose experts run on parts of the tokens, beside a shared expert: as one process that runs them at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.stacked import StackedExperts
from tests.helpers.expert_cases import NUM_EXPERTS, WIDTH, ExpertModel
from tests.helpers.training import make, start_with
from tests.ranks.parallel.expert.test_engine import STEPS, alone, assert_close, settings, train


class OverlappedBlock(nn.Module):
    def __init__(self, overlap: int, is_recomputed: bool) -> None:
        super().__init__()
        self.overlap, self.is_recomputed = overlap, is_recomputed
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = StackedExperts(NUM_EXPERTS, WIDTH, 2 * WIDTH, 0.25)
        self.shared = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.experts.up, std=0.25)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.is_recomputed:
            output: Tensor = checkpoint(self.run, hidden, use_reentrant=False, preserve_rng_state=False)
            return output
        return self.run(hidden)

    def run(self, hidden: Tensor) -> Tensor:
        rows = self.norm(hidden).flatten(0, -2)
        weights, index = self.router(rows).softmax(-1).topk(2, -1)
        shared: list[Tensor] = []
        output = run_experts(
            rows,
            index,
            weights,
            self.experts,
            self.experts.experts_held,
            overlap=self.overlap,
            meanwhile=lambda: shared.append(self.shared(rows)),
        )
        return hidden + (output + shared[0]).view(hidden.shape)


class OverlappedModel(ExpertModel):
    def __init__(self, overlap: int = 1, is_recomputed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OverlappedBlock(overlap, is_recomputed) for _ in range(2))


@pytest.mark.parametrize(("size", "ep"), [(2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize(("stage", "is_recomputed"), [(0, False), (1, True), (2, False), (3, False), (3, True)])
def test_parameters_equal_those_of_one_process_that_runs_all_tokens_at_once(
    size: int, ep: int, stage: int, is_recomputed: bool
) -> None:
    def rank() -> tuple[dict[str, Any], list[str]]:
        engine = start_with(make(partial(OverlappedModel, 2, is_recomputed)), settings(stage, ep))
        train(engine, range(STEPS - 1))
        with current_world().recorder.recording() as entries:
            train(engine, range(STEPS - 1, STEPS))
        return engine.module_state_dict(), [entry.label for entry in entries if entry.op == "all_to_all"]

    expected = alone(OverlappedModel, size, 1)
    forward = ["experts dispatch"] * 2 + ["experts combine"] * 2
    backward = ["experts combine backward"] * 2 + ["experts dispatch backward"] * 2
    for values, labels in run_ranks(size, rank):
        assert_close(values, expected)
        if ep == 1:
            assert labels == []
        elif is_recomputed:
            assert labels == forward * 2 + (forward + backward) * 2
        else:
            assert labels == forward * 2 + backward * 2
