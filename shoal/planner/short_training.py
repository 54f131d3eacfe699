"""A few steps of a model that a command names, on random micro-batches, on one rank: for ``verify`` and ``tune``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shoal.planner.model_of import Batch, loss_of, token_batch


def take_steps(
    engine: Any,
    model: nn.Module,
    steps: int,
    *,
    sequence: int | None,
    batch: str | None = None,
    seed: int = 0,
    after_step: Callable[[], object] = lambda: None,
) -> None:
    """Train for some steps. A micro-batch depends on the seed, the step, and its number among those of all ranks.

    Args:
        model: before it was given to ``initialize``.
        batch: "module:function": gets the rows of a micro-batch, returns the model's arguments, from torch's RNG. None:
            random tokens of a language model.
    """
    batches, num_micro = engine.axes.batch, engine.gradient_accumulation_steps()
    num_rows = engine.train_micro_batch_size_per_gpu()

    def batch_of(step: int, micro: int) -> Batch:
        torch.manual_seed(hash((seed, step, micro * batches.size + batches.rank)) % 2**63)
        return _on_rank(engine, _whole_rows(model, num_rows, sequence, batch))

    for step in range(steps):
        take_step(engine, (batch_of(step, micro) for micro in range(num_micro)))
        after_step()


def take_step(engine: Any, micro_batches: Iterable[Batch], loss: Callable[[Any], torch.Tensor] | None = None) -> None:
    """One step, with its micro-batches. Args: ``loss``: of what the model returns; None: ``loss_of``."""
    if hasattr(engine, "train_batch"):
        engine.train_batch(iter(micro_batches))
        return
    for given in micro_batches:
        output = engine(**given) if isinstance(given, dict) else engine(*given)
        engine.backward((loss or loss_of)(output))
        del output
        engine.step()


def _whole_rows(model: nn.Module, num_rows: int, sequence: int | None, batch: str | None) -> Batch:
    """A micro-batch before ranks of ``sp`` and ``cp`` divide it, from torch's RNG."""
    if batch is not None:
        module, _, name = batch.partition(":")
        made: Batch = getattr(importlib.import_module(module), name)(num_rows)
        return made
    given = token_batch(model, num_rows, sequence)
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    tokens = torch.randint(0, vocabulary, _tensors(given)[0].shape)
    if isinstance(given, dict):
        return {key: tokens if isinstance(each, torch.Tensor) else each for key, each in given.items()}
    return tuple(tokens for _ in given)


def _tensors(given: Batch) -> list[torch.Tensor]:
    values = given.values() if isinstance(given, dict) else given
    return [value for value in values if isinstance(value, torch.Tensor)]


def _on_rank(engine: Any, given: Batch) -> Batch:
    """The arguments on this rank's device: its positions, where ``sp`` and ``cp`` divide them."""
    context = engine.sequence_context

    def mine(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.to(engine.device)
        return value if context is None else context.shard(value)

    tokens = _tensors(given)[0]
    positions = None if context is None else context.positions(tokens.shape[1], engine.device)
    if isinstance(given, dict):
        made = {key: mine(value) for key, value in given.items()}
        return made if positions is None else {**made, "position_ids": positions.expand(tokens.shape[0], -1)}
    return (*map(mine, given), *(() if positions is None else (positions,)))
