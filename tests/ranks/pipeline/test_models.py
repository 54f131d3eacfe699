"""Whole models, cut by the JSON file alone, in pipelines beside tensor, sequence and data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.engine.parts.activations import SavedActivations
from shoal.errors import ModelError, NotBuiltError, UsageError
from tests.helpers.training import make, sgd
from tests.ranks.parallel.tensor.test_engine import (
    GPT,
    LENGTH,
    ROWS,
    VOCABULARY,
    GPTConfig,
    assert_equal,
    config,
    gpt,
    tokens,
)

STEPS, MICRO = 3, 3


def alone(dp: int, build: Callable[[], Any], *, is_anew: bool = False) -> tuple[dict[str, torch.Tensor], list[float]]:
    """``is_anew``: each step has an optimizer of its own."""
    model = make(build)
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        total = 0.0
        if is_anew:
            optimizer = sgd(model.parameters())
        for micro in range(MICRO):
            batch = tokens(10 * step + micro, dp)
            loss = model(batch[:, :-1], batch[:, 1:]) / MICRO
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, losses


@pytest.mark.parametrize(
    ("size", "stage", "tied", "parallel", "more"),
    [
        (2, 1, True, {"pp": 2}, {}),
        (2, 3, False, {"pp": 2}, {"pipeline": {"schedule": "zb_h1"}}),
        (4, 2, True, {"pp": 2, "tp": 2}, {}),
        (8, 1, True, {"pp": 2, "tp": 2}, {}),
        (8, 2, True, {"pp": 2, "tp": 2}, {}),
        (8, 3, True, {"pp": 2, "tp": 2}, {}),
        (4, 3, True, {"pp": 2, "tp": 2, "tp_sequence_parallel": True, "tp_loss_parallel": True}, {}),
        (4, 2, True, {"pp": 2, "sp": 2}, {}),
        (4, 3, True, {"pp": 2, "cp": 2}, {}),
        (4, 3, True, {"pp": 2}, {"activation_checkpointing": {"modules": ["blocks.*"]}}),
        (2, 2, True, {"pp": 2}, {"loss_reduction": "token"}),
    ],
)
def test_a_gpt_trains_as_in_one_process(
    size: int, stage: int, tied: bool, parallel: dict[str, Any], more: dict[str, Any]
) -> None:
    dp = size // parallel["pp"] // parallel.get("tp", 1) // parallel.get("sp", 1) // parallel.get("cp", 1)
    expected, losses = alone(dp, lambda: gpt(tied=tied))

    def job() -> Any:
        model = make(lambda: gpt(tied=tied))
        if {"sp", "cp"} & set(parallel):
            model.attend_by(shoal.attention)
        settings = config(stage, 1, MICRO, **more) | {"parallel": parallel}
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        found = []
        for step in range(STEPS):
            rank, micros = engine.axes.batch.rank, []
            for micro in range(MICRO):
                rows = tokens(10 * step + micro, dp)[ROWS * rank : ROWS * (rank + 1)]
                inputs, labels, context = rows[:, :-1], rows[:, 1:], engine.sequence_context
                if context is None:
                    micros.append((inputs, labels))
                else:
                    positions = context.positions(inputs.shape[1], inputs.device)
                    micros.append((context.shard(inputs), context.shard(labels), positions))
            found.append(float(engine.train_batch(iter(micros))))
        return found, engine.module_state_dict()

    for found, values in run_ranks(size, job):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        assert_equal(values, expected)


@pytest.mark.parametrize(
    ("size", "stage", "parallel"), [(2, 3, {"pp": 2}), (4, 1, {"pp": 2, "tp": 2}), (8, 3, {"pp": 2, "tp": 2})]
)
def test_a_second_engine_takes_over_the_stages(size: int, stage: int, parallel: dict[str, Any]) -> None:
    dp = size // parallel["pp"] // parallel.get("tp", 1)
    expected, losses = alone(dp, gpt, is_anew=True)

    def job() -> Any:
        whole = model = make(gpt)
        settings = config(stage, 1, MICRO) | {"parallel": parallel}
        found, values = [], {}
        for step in range(STEPS):
            engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
            rank = engine.axes.batch.rank
            rows = [tokens(10 * step + micro, dp)[ROWS * rank : ROWS * (rank + 1)] for micro in range(MICRO)]
            found.append(float(engine.train_batch(iter([(each[:, :-1], each[:, 1:]) for each in rows]))))
            values, model = engine.module_state_dict(), engine.module
            engine.destroy()
        with pytest.raises(ModelError, match=r"cut this GPT into pipeline stages.*\n.*engine\.module"):
            shoal.initialize(model=whole, optimizer=sgd(whole.parameters()), config=settings)
        return found, values

    for found, values in run_ranks(size, job):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        assert_equal(values, expected)


@pytest.mark.parametrize(("interval", "stage"), [(1, 1), (2, 1), (3, 3), (8, 2)])
def test_an_interval_recomputes_so_many_blocks_at_a_time(interval: int, stage: int) -> None:
    def deep() -> Any:
        return GPT(GPTConfig(VOCABULARY, LENGTH, 8, 16, 2, True))

    expected, _ = alone(1, deep)

    def job() -> Any:
        model = make(deep)
        settings = config(stage, 1, MICRO) | {
            "parallel": {"pp": 2},
            "pipeline": {"schedule": "zb_h1", "activation_checkpoint_interval": interval},
        }
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        activations = engine.part(SavedActivations)
        assert activations is not None and bool(activations.num_recomputed) == (interval == 1)
        calls = [0]
        first = next(iter(engine.module.whole_model.blocks._modules.values()))
        first.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        for step in range(STEPS):
            batches = (tokens(10 * step + micro, 1) for micro in range(MICRO))
            engine.train_batch((batch[:, :-1], batch[:, 1:]) for batch in batches)
        assert calls[0] == STEPS * MICRO * (
            1 if interval == 1 else 2
        )  # alone, a block is recomputed inside of its call
        engine.eval_batch((batch[:, :-1], batch[:, 1:]) for batch in [tokens(micro, 1) for micro in range(MICRO)])
        return engine.module_state_dict()

    for values in run_ranks(2, job):
        assert_equal(values, expected)


def test_settings_that_the_model_cannot_follow_are_refused() -> None:
    def job() -> None:
        for key, value, match in (("seed_layers", True, "pipeline-seeds"),):
            model, settings = make(gpt), config(1, 1, MICRO) | {"parallel": {"pp": 2}, "pipeline": {key: value}}
            with pytest.raises(NotBuiltError, match=match):
                shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)

    run_ranks(2, job)


class DtypeBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        assert hidden.dtype == scale.dtype, (hidden.dtype, scale.dtype)
        return hidden + torch.tanh(self.linear(hidden)) * scale.to(hidden.dtype)


class DtypeFollower(torch.nn.Module):
    """Its blocks get a tensor in the dtype of what the module before them returns, as rotary positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(16, 16)
        self.scale = torch.nn.Parameter(torch.rand(16))
        self.layers = torch.nn.ModuleList(DtypeBlock() for _ in range(4))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs.to(self.scale.dtype))
        scale = torch.linspace(0.5, 1.5, 16).to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, scale)
        return (hidden.float() - targets).square().mean()


@pytest.mark.parametrize(
    "precision",
    [
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 4}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    ],
    ids=lambda section: next(iter(section)),
)
@pytest.mark.parametrize("build", [lambda: gpt(tied=False), DtypeFollower], ids=["gpt", "follower"])
def test_a_stage_derives_the_dtypes_that_one_rank_does(build: Callable[[], Any], precision: dict[str, Any]) -> None:
    def of(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        if build is DtypeFollower:
            generator = torch.Generator().manual_seed(10 * step + micro)
            return torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)
        batch = tokens(10 * step + micro, 1)
        return batch[:, :-1], batch[:, 1:]

    def job(pp: int) -> list[float]:
        settings = config(1, 1, MICRO, **precision) | {"parallel": {"pp": pp}}
        model = make(build)
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        losses = []
        for step in range(STEPS):
            if pp > 1:
                losses.append(float(engine.train_batch(of(step, micro) for micro in range(MICRO))))
                continue
            micros = []
            for micro in range(MICRO):
                loss = engine(*of(step, micro))
                engine.backward(loss)
                engine.step()
                micros.append(float(loss.detach()))
            losses.append(sum(micros) / MICRO)
        return losses

    alone, found = run_ranks(1, job, 1)[0], run_ranks(2, job, 2)[0]
    assert found[0] == pytest.approx(alone[0], rel=1e-6)  # the same forward
    assert found == pytest.approx(alone, rel=2**-6)


class Numbered(torch.nn.Module):
    """Its forward changes the hidden state between blocks, or gives each block another number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = torch.nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, scale=float(index) if self.kind == "argument" else 1.0)
            x = x + 1 if self.kind == "hidden" else x
        return torch.nn.functional.mse_loss(x, labels)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.linear(x)) * scale
        return out


@pytest.mark.parametrize(("kind", "argument"), [("argument", "scale"), ("hidden", "0"), ("same", "")])
def test_blocks_that_are_called_with_other_arguments_are_not_recomputed_together(kind: str, argument: str) -> None:
    def job(pp: int, interval: int) -> Any:
        model = make(lambda: Numbered(kind))
        settings = config(1, 1, MICRO) | {"pipeline": {"stages": pp, "activation_checkpoint_interval": interval}}
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        data = [tuple(torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(i))) for i in range(MICRO)]
        return float(engine.train_batch(iter(data))), engine.module_state_dict()

    if kind != "same":
        with pytest.raises(
            (ModelError, UsageError),
            match=f"cannot be recomputed together with .*: its argument '{argument}' is a different one",
        ):
            run_ranks(2, job, 2, 2)
        return
    (loss, values), (other, _) = run_ranks(2, job, 2, 2), run_ranks(2, job, 2, 0)[0]
    assert loss[0] == other
    assert values[0] == other


def test_sequences_that_do_not_divide_under_sequence_parallelism_are_an_error_on_all_ranks() -> None:
    def job() -> Any:
        model = make(gpt)
        section = config(1, 1, 2) | {"parallel": {"pp": 2, "tp": 2, "tp_sequence_parallel": True}}
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=section)[0]
        batches = [(batch[:, :-1], batch[:, 1:]) for batch in (tokens(0, 1), tokens(1, 1))]
        odd = [(inputs[:, :-1], labels[:, :-1]) for inputs, labels in batches]
        for call in (engine.eval_batch, engine.train_batch):
            with pytest.raises(UsageError, match=f"a sequence of {LENGTH - 1} tokens does not divide by 2"):
                call(iter(odd))
        assert float(engine.eval_batch(iter(batches))) == pytest.approx(float(engine.train_batch(iter(batches))))
        return True

    assert LENGTH % 2 == 0
    assert run_ranks(4, job) == [True] * 4
