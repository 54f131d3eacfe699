"""Random-LTD: layers on a random part of the tokens, the same on any number of ranks and when recomputed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import NotBuiltError, UsageError
from shoal.models.gpt import GPT, Block, GPTConfig
from tests.helpers.compiling import CountsGraphs, compiling
from tests.helpers.training import make

LENGTH, VOCABULARY, BATCH = 16, 31, 2


def settings(stage: int, kept: int = 8, **sections: Any) -> dict[str, Any]:
    ltd = {
        "enabled": True,
        "random_ltd_layer_id": [1, 2],
        "random_ltd_schedule": {
            "min_value": kept,
            "max_value": LENGTH,
            "schedule_config": {"require_steps": 4, "seq_per_step": 4},
        },
    }
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}},
        **sections,
    }


def model() -> GPT:
    return GPT(GPTConfig(vocab_size=VOCABULARY, hidden_size=16, num_layers=4, num_heads=2, sequence_length=LENGTH))


def tokens_of(micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(micro_batch)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def train(
    config: dict[str, Any],
    steps: int = 5,
    load: Path | None = None,
    save: Path | None = None,
    first: int = 0,
    factory: Callable[[], GPT] = model,
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Returns: this rank's losses, the parameters, and the tokens that layers kept in each step."""
    engine, *_ = shoal.initialize(model=make(factory), config=config)
    if load is not None:
        engine.load_checkpoint(load)
    losses, kept = [], []
    data, micro = engine.axes.batch, engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        for number in range(micro):
            batch = tokens_of((step * micro + number) * data.size + data.rank)
            loss = engine(batch[:, :-1], batch[:, 1:])
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        kept.append(engine.random_ltd_scheduler.get_current_seq())
    if save is not None:
        engine.save_checkpoint(save)
    parameters = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return losses, parameters, kept


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def test_the_number_of_tokens_grows() -> None:
    _, _, kept = run_ranks(1, train, settings(0))[0]
    assert kept == [8, 8, 12, 12, 16]


def test_stages_agree_bit_for_bit() -> None:
    first, *others = [run_ranks(2, train, settings(stage)) for stage in (0, 1, 2, 3)]
    assert all(other[0][0] == first[0][0] and alike(other[0][1], first[0][1]) for other in others)
    without = run_ranks(2, train, settings(0, LENGTH))
    assert first[0][0][0] != without[0][0][0]
    assert abs(first[0][0][0] - without[0][0][0]) < 0.2  # of about 3.5


def test_layers_that_keep_all_tokens_compute_what_they_do_without_it() -> None:
    config = settings(2, LENGTH)
    found = run_ranks(2, train, config)[0]
    config["data_efficiency"]["data_routing"]["random_ltd"]["enabled"] = False
    assert found[0] == run_ranks(2, _train_without, config)[0][0]


def _train_without(config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    engine, *_ = shoal.initialize(model=make(model), config=config)
    losses = []
    for step in range(5):
        batch = tokens_of(step * current_world().size + current_world().rank)
        losses.append(engine(batch[:, :-1], batch[:, 1:]))
        engine.backward(losses[-1])
        engine.step()
    engine.destroy()
    return [loss.item() for loss in losses], {}, []


def test_ranks_keep_the_tokens_that_one_rank_keeps() -> None:
    ranks = run_ranks(2, train, settings(3))
    alone = run_ranks(1, train, settings(0, gradient_accumulation_steps=2))[0]
    together = [loss for step in zip(*(losses for losses, *_ in ranks), strict=True) for loss in step]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone[0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("recompute", [{"modules": ["Block"]}, {"memory_budget": 0}], ids=str)
def test_a_recomputed_layer_keeps_the_same_tokens(recompute: dict[str, Any]) -> None:
    plain, recomputed = (
        run_ranks(2, train, settings(3, **sections))[0] for sections in ({}, {"activation_checkpointing": recompute})
    )
    assert plain[0] == recomputed[0] and alike(plain[1], recomputed[1])


class CheckpointedBlock(Block):
    """Recomputes itself, hooks and all, as layers of Transformers do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


def checkpointed() -> GPT:
    made = model()
    for block in made.blocks:
        block.__class__ = CheckpointedBlock
    return made


def test_a_layer_that_recomputes_itself_keeps_the_same_tokens() -> None:
    plain, recomputed = (run_ranks(2, partial(train, factory=each), settings(3))[0] for each in (model, checkpointed))
    assert plain[0] == recomputed[0] and alike(plain[1], recomputed[1])


def test_two_forward_passes_before_a_backward_pass_are_refused_where_a_layer_recomputes_itself() -> None:
    engine, *_ = shoal.initialize(model=make(checkpointed), config=settings(0))
    batch = tokens_of(0)
    loss = sum(engine(batch[:, :-1], batch[:, 1:]) for _ in range(2))
    with pytest.raises(UsageError, match="recomputed by its own checkpointing after 2 forward passes"):
        engine.backward(loss)
    engine.destroy()


def test_tensor_parallel_ranks_keep_the_same_tokens() -> None:
    split = run_ranks(2, train, settings(0, parallel={"tp": 2}))
    alone = run_ranks(1, train, settings(0))[0]
    assert split[0][0] == split[1][0]
    torch.testing.assert_close(torch.tensor(split[0][0]), torch.tensor(alone[0]), rtol=0, atol=1e-5)


def test_a_resumed_run_keeps_the_same_tokens(tmp_path: Path) -> None:
    whole = run_ranks(2, train, settings(2), 4)[0]
    run_ranks(2, train, settings(2), 2, None, tmp_path)
    resumed = run_ranks(2, train, settings(2), 2, tmp_path, None, 2)[0]
    assert resumed[0] == whole[0][2:] and alike(resumed[1], whole[1])


@pytest.mark.parametrize(("parallel", "axis"), [({"sp": 2}, "sp"), ({"cp": 2}, "cp"), ({"pp": 2}, "pp")])
def test_positions_that_are_split_over_ranks_are_refused(parallel: dict[str, int], axis: str) -> None:
    with pytest.raises(Exception) as caught:
        run_ranks(2, train, settings(0, parallel=parallel))
    assert "random-LTD" in str(caught.value) and axis in str(caught.value)
    assert isinstance(caught.value, NotBuiltError) or isinstance(caught.value.__cause__, NotBuiltError)


def test_compiled_layers_keep_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, compile_ = CountsGraphs("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, *, mode: compile_(function, backend=backend, dynamic=False))
    plain = train(settings(0))
    with compiling():
        compiled = train(settings(0, compile={"enabled": True}))
    assert compiled[0] == plain[0] and alike(compiled[1], plain[1])
    assert backend.num_graphs > 0
