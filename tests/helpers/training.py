"""Trains a model of the zoo on ranks that are threads, and alone in plain PyTorch, on the same data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.models.gpt import GPT, GPTConfig
from tests.helpers.models import SEQUENCE, VOCABULARY

Factory = Callable[[], nn.Module]
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
Batch = tuple[torch.Tensor, torch.Tensor]

ROWS = 2  # of one rank's micro-batch
STAGES = (0, 1, 2, 3)
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
# Keys of zero_optimization that say when and in what form gradients are reduced.
GRADIENT_ORDERS: list[dict[str, Any]] = [
    {"round_robin_gradients": True},
    {"round_robin_gradients": True, "offload_optimizer": {"device": "cpu"}},
    {"contiguous_gradients": False, "reduce_scatter": False, "overlap_comm": False},
]

_RANDOM = threading.Lock()  # threads share torch's generator


def make(factory: Factory, seed: int = 0) -> nn.Module:
    """The same model on every rank that is a thread."""
    with _RANDOM:
        torch.manual_seed(seed)
        return factory()


def gpt_of_own_numbers(shape: GPTConfig, **given: Any) -> GPT:
    """A GPT whose parameters ranks that are threads draw alike: they share torch's generator."""
    model = GPT(shape, **given)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    return model


def batch(index: int, rank: int, world: int) -> Batch:
    """Micro-batch ``index`` of one rank; all ranks' together are the whole batch."""
    generator = torch.Generator().manual_seed(1000 + index)
    rows = torch.randint(0, VOCABULARY, (ROWS * world, SEQUENCE + 1), generator=generator)
    mine = rows[rank * ROWS : (rank + 1) * ROWS]
    return mine[:, :-1], mine[:, 1:]


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def config(stage: int, **sections: Any) -> dict[str, Any]:
    """A config with one unit a block and every parameter sharded; sections are merged in, one level deep."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "units": {"names": ["blocks.*"]},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    for key, value in sections.items():
        made[key] = {**made[key], **value} if isinstance(made.get(key), dict) else value
    return made


def start(factory: Factory, settings: dict[str, Any], optimizer: OptimizerFactory | None = sgd) -> shoal.Engine:
    """An engine on this rank."""
    return start_with(make(factory), settings, optimizer)


def start_with(model: nn.Module, settings: dict[str, Any], optimizer: OptimizerFactory | None = sgd) -> shoal.Engine:
    """An engine of this very model."""
    made = optimizer([p for p in model.parameters() if p.requires_grad]) if optimizer is not None else None
    return shoal.initialize(model=model, optimizer=made, config=settings)[0]


def named(engine: shoal.Engine) -> dict[str, nn.Parameter]:
    return dict(engine.module.named_parameters())


def main_parameters(engine: shoal.Engine) -> dict[str, torch.Tensor]:
    """The whole main parameters, by name; copies."""
    named = engine.module.named_parameters()
    return {name: engine.access.full_parameter(p).clone() for name, p in named if engine.access.knows(p)}


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)  # one a step, the mean over micro-batches
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # as in the model, whole
    main_parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def micro_step(engine: shoal.Engine, index: int, *, style: str = "engine") -> float:
    """Forward, backward and step of one micro-batch. ``style``: ``engine.backward(loss)`` or ``loss.backward()``."""
    world = current_world()
    loss = engine(*batch(index, world.rank, world.size))
    if style == "engine":
        engine.backward(loss)
    else:
        loss.backward()
    engine.step()
    return float(loss.detach())


def run_steps(engine: shoal.Engine, steps: int, *, first: int = 0, style: str = "engine") -> list[float]:
    """Whole steps, from micro-batch ``first`` on. Returns: the mean loss of each."""
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for step in range(steps):
        indices = range(first + step * accumulation, first + (step + 1) * accumulation)
        losses.append(sum(micro_step(engine, index, style=style) for index in indices) / accumulation)
    return losses


def finish(engine: shoal.Engine, losses: list[float]) -> Trained:
    """Read main parameters and parameters, then destroy the engine."""
    model = engine.module
    trained = Trained(losses=losses)
    trained.main_parameters = main_parameters(engine)
    engine.destroy()
    trained.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return trained


def train(
    factory: Factory,
    settings: dict[str, Any],
    optimizer: OptimizerFactory | None = sgd,
    *,
    steps: int = 3,
    style: str = "engine",
    between: Callable[[shoal.Engine], Any] | None = None,
) -> Trained:
    """Train on this rank; ``between``: called after each step, without gradients."""
    engine = start(factory, settings, optimizer)
    losses, norms = [], []
    for step in range(steps):
        first = step * engine.gradient_accumulation_steps()
        losses += run_steps(engine, 1, first=first, style=style)
        norms.append(engine.get_global_grad_norm() or 0.0)
        if between is not None:
            with torch.no_grad():
                between(engine)
    trained = finish(engine, losses)
    trained.norms = norms
    return trained


def train_ranks(world: int, factory: Factory, settings: dict[str, Any], *args: Any, **kwargs: Any) -> list[Trained]:
    """Train on ``world`` ranks; what each ended with."""
    return run_ranks(world, lambda: train(factory, settings, *args, **kwargs))


def train_alone(
    factory: Factory,
    optimizer: OptimizerFactory = sgd,
    *,
    world: int,
    steps: int = 3,
    accumulation: int = 1,
    clip: float = 0.0,
) -> Trained:
    """Plain PyTorch in one process, on all ranks' micro-batches."""
    model = make(factory)
    trained_parameters = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(trained_parameters)
    result = Trained()
    for step in range(steps):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(world):
                loss = model(*batch(step * accumulation + micro, rank, world)) / (world * accumulation)
                loss.backward()
                total += float(loss.detach())
        norm = nn.utils.clip_grad_norm_(trained_parameters, clip if clip else float("inf"))
        made.step()
        made.zero_grad()
        result.losses.append(total)
        result.norms.append(float(norm))
    result.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return result


def train_by_hand(
    factory: Factory,
    dtype: torch.dtype,
    optimizer: OptimizerFactory,
    *,
    world: int,
    steps: int,
    accumulation: int,
    clip: float,
    scale: float = 1.0,
) -> Trained:
    """Mixed precision in plain PyTorch: each rank's gradients in ``dtype``, accumulated and then summed in rank order
    in fp32, and fp32 main parameters that the optimizer updates."""
    model = make(factory)
    parameters = [p for p in model.parameters() if p.requires_grad]
    main_parameters = [nn.Parameter(p.detach().clone()) for p in parameters]
    made = optimizer(main_parameters)
    model.to(dtype)
    result = Trained()
    for step in range(steps):
        sums: list[torch.Tensor | None] = [None] * len(main_parameters)
        losses = []
        for rank in range(world):
            mine: list[torch.Tensor | None] = [None] * len(main_parameters)
            for micro in range(accumulation):
                loss = model(*batch(step * accumulation + micro, rank, world))
                losses.append(float(loss.detach()))
                (loss.float() / accumulation * scale).backward()
                for index, parameter in enumerate(parameters):
                    if parameter.grad is not None:
                        held = mine[index]
                        mine[index] = parameter.grad.float() if held is None else held + parameter.grad.float()
                        parameter.grad = None
            for index, gradient in enumerate(mine):
                if gradient is not None:
                    held = sums[index]
                    sums[index] = gradient if held is None else held + gradient
        for master, total in zip(main_parameters, sums, strict=True):
            if total is not None:
                mean = total / world
                master.grad = (mean.to(dtype).float() if accumulation == 1 else mean) / scale
        result.norms.append(float(nn.utils.clip_grad_norm_(main_parameters, clip if clip else float("inf"))))
        made.step()
        made.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(parameters, main_parameters, strict=True):
                parameter.copy_(master)
        result.losses.append(sum(losses) / len(losses))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    result.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    result.main_parameters = {name: master.detach() for name, master in zip(names, main_parameters, strict=True)}
    return result


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference of any element. NaN anywhere is infinitely far."""
    assert list(ours) == list(theirs)
    worst = 0.0
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape, name
        if tensor.numel():
            difference = float((tensor.double() - theirs[name].double()).abs().max())
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def are_bit_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert list(ours) == list(theirs)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def assert_ranks_agree(results: list[Trained]) -> None:
    """Every rank ended with the same bits."""
    for rank, result in enumerate(results[1:], start=1):
        different = [
            name for name, value in result.parameters.items() if not torch.equal(value, results[0].parameters[name])
        ]
        assert not different, f"rank {rank} differs from rank 0 in {different}"


def assert_like_alone(results: list[Trained], alone: Trained, *, atol: float) -> None:
    """All ranks have equal results, and parameters, mean losses and norms are those of one process within ``atol``."""
    assert_ranks_agree(results)
    difference = largest_difference(results[0].parameters, alone.parameters)
    assert difference <= atol
    losses = [sum(values) / len(values) for values in zip(*(result.losses for result in results), strict=True)]
    assert max(abs(a - b) for a, b in zip(losses, alone.losses, strict=True)) <= atol
    assert max(abs(a - b) for a, b in zip(results[0].norms, alone.norms, strict=True)) <= atol * max(1.0, *alone.norms)
