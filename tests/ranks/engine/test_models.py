"""Whatever a model does, every stage trains it as plain PyTorch would on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers import models
from tests.helpers.training import (
    STAGES,
    adamw,
    are_bit_equal,
    assert_like_alone,
    assert_ranks_agree,
    batch,
    config,
    finish,
    largest_difference,
    make,
    micro_step,
    sgd,
    start,
    train,
    train_alone,
    train_ranks,
)

ZOO = [
    models.Plain,
    models.Checkpointed,
    models.CheckpointedReentrant,
    models.CheckpointedInside,
    models.CheckpointedInsideReentrant,
    models.Adapted,
    models.AdaptedCheckpointed,
    models.AdaptedCheckpointedReentrant,
    models.FrozenBlocks,
    models.FrozenBottom,
    models.Twice,
    models.Shared,
    models.TiedBetweenBlocks,
    models.ReadsOthers,
    models.BlockReadsOther,
    models.ReturnsDataclasses,
    models.ReturnsTuplesDictsObjects,
    models.KeepsAuxiliaryLoss,
    models.BranchingInsideUnit,
    models.SeveralDtypes,
    models.OddParameters,
    models.WithBuffers,
    models.PenalisesGradient,
    models.Attacks,
    models.TwiceCheckpointed,
    models.TwiceCheckpointedReentrant,
    models.Chunked,
    models.ChunkedReentrant,
    models.FrozenIntegers,
    models.Recurrent,
    models.NotContiguous,
    models.Normalised,
]


@pytest.mark.parametrize("world", [1, 3])  # 2: below, with accumulation
@pytest.mark.parametrize("model", ZOO, ids=lambda model: model.__name__)
def test_every_stage_trains_the_model_as_one_process_does(model: type[nn.Module], world: int) -> None:
    alone = train_alone(model, world=world)
    # Shoal has an fp32 main parameter of a bf16 parameter, plain PyTorch does not: they differ by a bit or two of 8.
    atol = 2e-3 if model is models.SeveralDtypes else 1e-5
    for stage in STAGES if world > 1 else (0, 3):  # on one rank the stages are one
        results = train_ranks(world, model, config(stage))
        assert_like_alone(results, alone, atol=atol)


@pytest.mark.parametrize("model", ZOO, ids=lambda model: model.__name__)
def test_accumulation_over_micro_batches_is_that_of_one_process(model: type[nn.Module]) -> None:
    alone = train_alone(model, world=2, accumulation=2)
    atol = 5e-3 if model is models.SeveralDtypes else 1e-5
    for stage in STAGES:
        results = train_ranks(2, model, config(stage, gradient_accumulation_steps=2))
        assert_like_alone(results, alone, atol=atol)


ZERO = {
    "no prefetch": {"stage3_prefetch_bucket_size": 0},
    "one unit live": {"stage3_max_live_parameters": 1},
    "units kept for reuse": {"stage3_max_reuse_distance": 1_000_000_000},
    "buckets of one parameter": {"reduce_bucket_size": 1},
    "small buckets": {"reduce_bucket_size": 300},
    "small parameters stay whole": {"stage3_param_persistence_threshold": 100},
    "no overlap": {"overlap_comm": False},
    "small sub-groups": {"sub_group_size": 100},
}


@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO.keys())
def test_a_key_of_the_config_changes_speed_and_memory_but_no_number(zero: dict[str, Any]) -> None:
    for stage in STAGES:
        plain = train_ranks(2, models.Plain, config(stage), steps=4)
        results = train_ranks(2, models.Plain, config(stage, zero_optimization=zero), steps=4)
        assert_ranks_agree(results)
        assert results[0].losses == plain[0].losses
        # The norm is summed bucket by bucket, and the buckets differ.
        assert largest_difference(results[0].parameters, plain[0].parameters) <= 1e-6


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("world", "zero"),
    [
        (4, {"mics_shard_size": 2}),
        (4, {"mics_shard_size": 1}),
        (4, {"zero_hpz_partition_size": 2}),
        (6, {"mics_shard_size": 3}),
        (6, {"mics_shard_size": 2}),
        (6, {"zero_hpz_partition_size": 3}),
    ],
    ids=lambda value: str(value),
)
def test_hybrid_sharding_trains_as_one_process_does(world: int, zero: dict[str, int], accumulation: int) -> None:
    alone = train_alone(models.Twice, world=world, accumulation=accumulation, clip=0.5)
    for stage in STAGES if "mics_shard_size" in zero else (3,):
        settings = config(
            stage, gradient_accumulation_steps=accumulation, gradient_clipping=0.5, zero_optimization=zero
        )
        assert_like_alone(train_ranks(world, models.Twice, settings), alone, atol=1e-5)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.05},
    ]


def test_each_parameter_group_keeps_its_own_settings() -> None:
    alone_model = make(models.OddParameters)
    optimizer = torch.optim.SGD(two_groups(alone_model), lr=0.1, momentum=0.9)
    for step in range(3):
        for rank in range(2):
            (alone_model(*batch(step, rank, 2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[1]["lr"] *= 0.5
    alone = {name: p.detach() for name, p in alone_model.named_parameters()}

    def job(stage: int) -> dict[str, torch.Tensor]:
        model = make(models.OddParameters)
        made = torch.optim.SGD(two_groups(model), lr=0.1, momentum=0.9)
        engine, wrapped, _, _ = shoal.initialize(model=model, optimizer=made, config=config(stage))
        for step in range(3):
            micro_step(engine, step)
            wrapped.param_groups[1]["lr"] *= 0.5  # what a schedule does
        assert engine.get_lr() == [0.1, 0.05 * 0.125]
        return finish(engine, []).parameters

    for stage in STAGES:
        for found in run_ranks(2, job, stage):
            assert largest_difference(found, alone) <= 1e-5


@pytest.mark.parametrize("names", [["blocks"], [], ["blocks.0"]], ids=["one unit without a forward", "root", "some"])
@pytest.mark.parametrize("model", [models.TwiceCheckpointed, models.TwiceCheckpointedReentrant])
def test_a_unit_that_is_recomputed_twice_is_gathered_each_time_under_every_partition(
    model: type[nn.Module], names: list[str]
) -> None:
    alone = train_alone(model, world=2)
    assert_like_alone(train_ranks(2, model, config(3, units={"names": names})), alone, atol=1e-5)


def test_hooks_of_the_user_find_every_module_whole() -> None:
    seen: list[bool] = []

    class Hooked(models.Plain):
        def __init__(self) -> None:
            super().__init__()
            for module, weight in ((self, self.norm.weight), (self.blocks[0], self.blocks[0].up.weight)):
                module.register_forward_pre_hook(lambda m, args, w=weight: seen.append(bool(w.isnan().any())))
                module.register_forward_hook(lambda m, args, out, w=weight: seen.append(bool(w.isnan().any())))

    train_ranks(2, Hooked, config(3), steps=3)
    assert seen == [False] * 2 * 3 * 4


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_penalty_taken_outside_the_model_trains_as_in_one_process(world: int) -> None:
    class Outside(models.Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.head(self.norm(self.body(x)))

    def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(2, 3, models.HIDDEN, generator=generator).requires_grad_()
        out = model(x).square().mean()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out + (gradient.norm(dim=-1) - 1).square().mean()

    model = make(Outside)
    optimizer = sgd(model.parameters())
    for step in range(3):
        for rank in range(world):
            for micro in range(2):
                (loss_of(model, 2 * step + micro, rank) / world / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = {name: p.detach() for name, p in model.named_parameters()}

    def job(stage: int, style: str) -> dict[str, torch.Tensor]:
        engine = start(Outside, config(stage, gradient_accumulation_steps=2))
        for index in range(6):
            loss = loss_of(engine, index, current_world().rank)
            engine.backward(loss) if style == "engine" else loss.backward()
            engine.step()
            assert all(unit.is_released for unit in engine.sharded.sharded)
        return finish(engine, []).parameters

    for stage in STAGES:
        for style in ("engine", "plain"):
            for found in run_ranks(world, job, stage, style):
                assert largest_difference(found, alone) <= 1e-5


# Steps counted as torch counts them


def test_a_parameter_that_first_gets_a_gradient_at_the_third_step_counts_from_there() -> None:
    def alone() -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        model = make(models.Late)
        optimizer = adamw(model.parameters())
        for step in range(5):
            model.is_joined = step >= 2
            for rank in range(2):
                (model(*batch(step, rank, 2)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        steps = {name: float(optimizer.state[p]["step"]) for name, p in model.named_parameters() if optimizer.state[p]}
        return {name: p.detach() for name, p in model.named_parameters()}, steps

    expected, counts = alone()
    assert (counts["extra.weight"], counts["norm.weight"], "unused.weight" in counts) == (3.0, 5.0, False)

    def job(stage: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        engine = start(models.Late, config(stage), adamw)
        for step in range(5):
            engine.module.is_joined = step >= 2
            micro_step(engine, step)
        state = engine.optimizer.state
        steps = {name: float(state[p]["step"]) for name, p in engine.module.named_parameters() if state.get(p)}
        return finish(engine, []).parameters, steps

    for stage in STAGES:
        results = run_ranks(2, job, stage)
        for parameters, _ in results:
            assert largest_difference(parameters, expected) <= 1e-5
        for name, count in counts.items():
            assert {steps[name] for _, steps in results if name in steps} == {count}, name
        assert not any("unused.weight" in steps for _, steps in results)


def test_a_parameter_without_a_gradient_on_any_rank_is_left_alone() -> None:
    def job(stage: int) -> tuple[torch.Tensor, torch.Tensor]:
        before = make(models.Plain).unused.weight.detach().clone()
        return before, train(models.Plain, config(stage), adamw).parameters["unused.weight"]

    for world in (1, 2):
        for stage in STAGES:
            for before, after in run_ranks(world, job, stage):
                assert torch.equal(before, after)  # weight decay 0.1 would have changed it


class OnOneRank(models.Plain):
    """Only rank 0 uses the extra layer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(models.HIDDEN, models.HIDDEN)
        self.uses_extra: bool | None = None

    def body(self, x: torch.Tensor) -> torch.Tensor:
        uses = self.uses_extra if self.uses_extra is not None else current_world().rank == 0
        x = super().body(x)
        return x + self.extra(x) if uses else x


def test_a_parameter_with_a_gradient_on_one_rank_only_is_updated_by_the_mean_over_all() -> None:
    model = make(OnOneRank)
    optimizer = sgd(model.parameters())
    for step in range(3):
        for rank in range(3):
            model.uses_extra = rank == 0
            (model(*batch(step, rank, 3)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = {name: p.detach() for name, p in model.named_parameters()}
    for stage in STAGES:
        results = train_ranks(3, OnOneRank, config(stage))
        assert_ranks_agree(results)
        assert largest_difference(results[0].parameters, alone) <= 1e-5


# Evaluation and generation between steps


@torch.no_grad()
def generate(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        tokens = torch.cat([tokens, model.logits(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_and_generation_between_steps_change_nothing(world: int) -> None:
    def job(stage: int, looks: bool) -> tuple[dict[str, torch.Tensor], list[Any]]:
        engine = start(models.Plain, config(stage))
        seen: list[Any] = []
        for step in range(4):
            micro_step(engine, step)
            if looks:
                engine.eval()
                with torch.no_grad():
                    seen.append(float(engine(*batch(50, 0, 1))))
                engine.train()
        return finish(engine, []).parameters, seen

    for stage in STAGES:
        plain = run_ranks(world, job, stage, False)
        looking = run_ranks(world, job, stage, True)
        assert all(are_bit_equal(a[0], b[0]) for a, b in zip(plain, looking, strict=True))
        assert all(len(set(values)) == 4 and values == looking[0][1] for _, values in looking)


class Generates(models.Plain):
    """Its forward without targets gives logits, as language models do."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.logits(tokens)
        return logits if targets is None else models.cross_entropy(logits, targets)


def test_generation_between_steps_is_that_of_the_whole_model() -> None:
    def job(stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        engine = start(Generates, config(stage))
        sharded, whole = [], []
        for step in range(3):
            micro_step(engine, step)
            tokens = torch.arange(3).view(1, 3)
            with torch.no_grad():
                out = tokens
                for _ in range(4):
                    out = torch.cat([out, engine(out)[:, -1:].argmax(-1)], dim=1)
            sharded.append(out)
            with shoal.zero.GatheredParameters(engine.module.parameters()):
                whole.append(generate(engine.module, tokens)[:, : out.shape[1]])
        engine.destroy()
        return sharded, whole

    for stage in STAGES:
        for sharded, whole in run_ranks(2, job, stage):
            assert all(torch.equal(a[:, :6], b[:, :6]) for a, b in zip(sharded, whole, strict=True))
