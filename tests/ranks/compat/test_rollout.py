"""Generation with the model that is trained, by DeepSpeed's interface of rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.compat.deepspeed.runtime.entry import initialize
from shoal.compat.rollout import (
    RolloutBatch,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
)
from shoal.errors import NotBuiltError
from tests.helpers.training import STAGES, config, sgd

EOS, PAD = 3, 0
TOKENIZER = SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD)


class Counting(nn.Module):
    """The next token is the last one plus the weight's, so that generation reads the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, -1:] + self.weight[:1].round().long()

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        assert not self.training
        assert kwargs["attention_mask"].shape == input_ids.shape
        assert kwargs["do_sample"] is False
        for _ in range(kwargs["max_new_tokens"]):
            ended = (input_ids == kwargs["eos_token_id"]).any(1, keepdim=True)
            following = torch.where(ended, kwargs["pad_token_id"], self(input_ids))
            input_ids = torch.cat([input_ids, following], dim=1)
        return input_ids


@pytest.mark.parametrize("stage", STAGES)
def test_responses_follow_their_prompts_and_are_masked_after_the_end_of_text(stage: int) -> None:
    def job() -> RolloutBatch:
        engine, *_ = initialize(
            model=Counting(), optimizer=sgd, config=config(stage, units={"names": []}), dist_init_required=False
        )
        rollout = build_rollout(RolloutConfig(), student_engine=engine, tokenizer=TOKENIZER)
        prompts = RolloutRequest(torch.tensor([[0, 1], [7, 8]]), torch.tensor([[0, 1], [1, 1]]))
        batch = rollout.generate(prompts, SamplingConfig(4, temperature=0.0, n_samples_per_prompt=2))
        assert engine.module.training
        rollout.sync_weights(1)
        rollout.shutdown()
        engine.destroy()
        return batch

    for batch in run_ranks(2, job):
        assert batch.input_ids.tolist() == [[0, 1, 2, 3, 0, 0]] * 2 + [[7, 8, 9, 10, 11, 12]] * 2
        assert batch.attention_mask.tolist() == [[0, 1, 1, 1, 0, 0]] * 2 + [[1] * 6] * 2
        assert batch.response_start_idx.tolist() == [2] * 4
        assert (batch.batch_size, batch.seq_len) == (4, 6)


def test_what_cannot_be_is_said_as_deepspeed_says_it() -> None:
    with pytest.raises(ValueError, match=r"prompt_attention_mask shape \(2, 4\) does not match prompt_ids \(2, 5\)"):
        RolloutRequest(torch.ones(2, 5), torch.ones(2, 4))
    with pytest.raises(ValueError, match="attention_mask shape"):
        RolloutBatch(torch.ones(2, 5), torch.ones(2, 4), torch.ones(2))
    with pytest.raises(TypeError, match="abstract"):
        RolloutEngine()  # type: ignore[abstract]
    with pytest.raises(ValueError, match="Unknown rollout engine 'vllm'"):
        build_rollout(RolloutConfig("vllm"))
    with pytest.raises(ValueError, match="needs both student_engine and tokenizer"):
        build_rollout(RolloutConfig())
    with pytest.raises(ValueError, match="neither pad_token_id nor eos_token_id"):
        build_rollout(RolloutConfig(), student_engine=object(), tokenizer=object())
    with pytest.raises(NotBuiltError, match="use_graph_capture"):
        build_rollout(RolloutConfig(use_graph_capture=True), student_engine=object(), tokenizer=TOKENIZER)
    with pytest.raises(NotBuiltError, match="continuous_batch_size"):
        build_rollout(RolloutConfig(), student_engine=object(), tokenizer=TOKENIZER).generate(
            RolloutRequest(torch.ones(1, 1), torch.ones(1, 1)), SamplingConfig(4, continuous_batch_size=2)
        )
