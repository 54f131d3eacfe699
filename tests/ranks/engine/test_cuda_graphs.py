"""Blocks in CUDA graphs: memory that replays overwrite, marks of steps, and where they are refused.

A CPU has no CUDA graphs. ``GraphMemory`` has their memory, at fixed addresses and overwritten by the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.compiler import GraphSteps
from tests.helpers import models
from tests.helpers.compiling import compiling
from tests.helpers.graph_memory import GraphMemory
from tests.helpers.training import Trained, batch, config, finish, run_steps, start, train_ranks

GRAPHS = {"enabled": True, "mode": "reduce-overhead"}


class StepsOfThread(GraphSteps, threading.local):
    """Ranks that are threads mark steps as processes do."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphMemory]:
    """As on a GPU."""
    memory, compile_ = GraphMemory(), torch.compile
    modes = []

    def compiled(function: Any, *, mode: str) -> Any:
        modes.append(mode)
        made = compile_(function, backend=memory, dynamic=False)
        made.get_compiler_config = lambda: {"triton.cudagraphs": True}  # as inductor's
        return made

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", memory.mark_step)
    monkeypatch.setattr("shoal.engine.compiled.GRAPH_STEPS", StepsOfThread())
    monkeypatch.setattr("shoal.compiler._has_graphs", lambda _device: True)
    with compiling():
        yield memory
    assert set(modes) <= {"reduce-overhead"}


CASES: dict[str, tuple[type[nn.Module], int, dict[str, Any]]] = {
    "stage 1": (models.Plain, 1, {"gradient_accumulation_steps": 3}),
    "stage 2": (models.Plain, 2, {"gradient_accumulation_steps": 2}),
    "stage 0, bf16": (models.Plain, 0, {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}),
    "stage 2, on the host": (models.Plain, 2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "stage 1, recomputed": (models.Plain, 1, {"activation_checkpointing": {"modules": ["blocks.*"]}}),
    "stage 2, recomputed by the script": (models.Checkpointed, 2, {"gradient_accumulation_steps": 2}),
    "stage 0, recomputed by the script": (models.CheckpointedReentrant, 0, {}),
    "stage 2, clipped, bf16": (models.Adapted, 2, {"gradient_clipping": 0.5, "bf16": {"enabled": True}}),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_recorded_in_the_first_steps_and_end_to_the_bit_as_uncompiled(
    case: str, memory: GraphMemory
) -> None:
    model, stage, sections = CASES[case]
    plain = train_ranks(2, model, config(stage, **sections), steps=5)

    def job() -> tuple[Trained, list[dict[str, int]]]:
        engine = start(model, config(stage, compile=GRAPHS, **sections))
        losses, counts = [], []
        for step in range(5):
            losses += run_steps(engine, 1, first=step * engine.gradient_accumulation_steps())
            counts.append(dict(memory.counts))
            memory.counts.clear()
        assert memory.num_marks == 5
        return finish(engine, losses), counts

    for (trained, counts), expected in zip(run_ranks(2, job), plain, strict=True):
        assert trained.losses == expected.losses
        assert all(torch.equal(value, expected.parameters[name]) for name, value in trained.parameters.items())
        assert "recorded" in counts[0]
        assert all(list(each) == ["replayed"] for each in counts[2:])


def moved(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(index, 0, 1)


def two_losses(engine: shoal.Engine, index: int) -> None:
    engine.backward(engine(*moved(index)) + engine(*moved(index + 1)))
    engine.step()


def first_loss_last(engine: shoal.Engine, index: int) -> None:
    first, second = engine(*moved(index)), engine(*moved(index + 1))
    for loss in (second, first):
        engine.backward(loss)
        engine.step()


def evaluation_between(engine: shoal.Engine, index: int) -> None:
    loss = engine(*moved(index))
    with torch.no_grad():
        engine(*moved(index + 1))
    engine.backward(loss)
    engine.step()


def without_sync(engine: shoal.Engine, index: int) -> None:
    """What is accumulated stays in ``parameter.grad``, where a graph may have returned it."""
    with engine.no_sync():
        engine.backward(engine(*moved(index)))
        engine.step()
    engine.backward(engine(*moved(index + 1)))
    engine.step()


@pytest.mark.parametrize(
    ("step", "accumulation"), [(two_losses, 1), (first_loss_last, 2), (evaluation_between, 1), (without_sync, 2)]
)
def test_what_a_step_still_needs_is_not_overwritten(
    step: Callable[[shoal.Engine, int], None], accumulation: int, memory: GraphMemory
) -> None:
    def trained(**sections: Any) -> tuple[Trained, list[int]]:
        engine = start(models.Plain, config(2, gradient_accumulation_steps=accumulation, **sections))
        marks = []
        for index in range(5):
            before = memory.num_marks
            step(engine, index)
            marks.append(memory.num_marks - before)
        return finish(engine, []), marks

    plain, _ = trained()
    graphs, marks = trained(compile=GRAPHS)
    assert all(torch.equal(value, plain.parameters[name]) for name, value in graphs.parameters.items())
    assert marks == [1] * 5
    assert memory.counts["replayed"] > 0


class Generator(models.Plain):
    """Returns what its last block returns."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(tokens))


class Critic(models.Plain):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(hidden)).square().mean()


def test_two_engines_keep_what_the_other_one_needs(memory: GraphMemory) -> None:
    def trained(**sections: Any) -> list[dict[str, torch.Tensor]]:
        generator, critic = (start(each, config(1, **sections)) for each in (Generator, Critic))
        for index in range(5):
            made = generator(moved(index)[0])
            critic.backward(critic(made.detach()))
            critic.step()  # the generator's backward follows
            generator.backward(-critic(made))
            generator.step()
            critic.zero_grad()
            del made
        return [finish(engine, []).parameters for engine in (generator, critic)]

    for found, expected in zip(trained(compile=GRAPHS), trained(), strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert memory.counts["replayed"] > 0


def test_evaluations_are_steps_of_their_own_and_what_they_return_may_be_kept(memory: GraphMemory) -> None:
    engine, plain = start(Generator, config(1, compile=GRAPHS)), start(Generator, config(1))
    inside: list[torch.Tensor] = []
    engine.module.blocks[2].register_forward_hook(lambda _module, _args, output: inside.append(output))
    with torch.no_grad():
        before = memory.num_marks
        outputs = [engine(moved(index)[0]) for index in range(3)]
        assert memory.num_marks - before == 3
        assert all(torch.equal(output, plain(moved(index)[0])) for index, output in enumerate(outputs))
    assert torch.equal(inside[0], inside[2])  # a block's own output is that of the last step
    assert not torch.equal(inside[0], outputs[0])
    assert memory.counts["recorded"] == 3  # one for each block
    engine.destroy()
    plain.destroy()


def test_what_a_model_compiled_whole_returns_may_be_kept(memory: GraphMemory) -> None:
    section = {**GRAPHS, "regional": False}
    engine, plain = start(models.Plain, config(1, compile=section)), start(models.Plain, config(1))
    kept = []
    for each in (engine, plain):
        losses = []
        for index in range(4):
            losses.append(each(*moved(index)))
            each.backward(losses[-1])
            each.step()
        kept.append([loss.item() for loss in losses])
    assert kept[0] == kept[1]
    assert memory.counts["replayed"] > 0
    engine.destroy()
    assert not engine.module._forward_hooks
    plain.destroy()
