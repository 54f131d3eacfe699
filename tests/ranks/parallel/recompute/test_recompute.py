"""Recomputed blocks train as plain ones do, to the bit, under every kind of row; and saved inputs shared by ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.parallel import recompute
from shoal.parallel.recompute import Recompute, RecomputeSettings, recompute_blocks
from shoal.parallel.selective import operations_of
from shoal.sharding.placement import Tier
from tests.helpers import models
from tests.helpers.models import HIDDEN, SEQUENCE
from tests.helpers.slow_copies import SlowCopies
from tests.helpers.training import (
    ROWS,
    Factory,
    Trained,
    are_bit_equal,
    assert_ranks_agree,
    batch,
    config,
    finish,
    run_steps,
    start,
    train,
)

X_NBYTES = ROWS * SEQUENCE * HIDDEN * 4

SETTINGS = {
    "in place": RecomputeSettings(),
    "on the host": RecomputeSettings(is_offloaded=True),
    "matmuls kept": RecomputeSettings(operations=operations_of("matmul")),
    "timed": RecomputeSettings(has_times=True),
}


def train_recomputed(
    factory: Factory, settings: dict[str, Any], name: str, *, is_slow: bool, classes: Any, steps: int = 3
) -> tuple[Trained, Recompute, int]:
    """Losses, the configuration, and copies that came too late."""
    engine = start(factory, settings)
    slow = SlowCopies()
    made = Recompute(SETTINGS[name], copies_of=lambda _: slow if is_slow else None)
    blocks = recompute_blocks(engine.module, classes, recompute=made)
    losses = run_steps(engine, steps)
    blocks.remove()
    return finish(engine, losses), made, slow.num_late


def assert_bit_equal(ours: list[Trained], plain: list[Trained]) -> None:
    assert_ranks_agree(ours)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.losses == theirs.losses
        assert are_bit_equal(mine.main_parameters, theirs.main_parameters)
        assert are_bit_equal(mine.parameters, theirs.parameters)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stage", [0, 3])
def test_recomputed_blocks_train_to_the_same_bits(stage: int, name: str) -> None:
    plain = run_ranks(2, lambda: train(models.Plain, config(stage)))
    done = run_ranks(
        2, lambda: train_recomputed(models.Plain, config(stage), name, is_slow=name == "on the host", classes="Block")
    )
    assert_bit_equal([trained for trained, _, _ in done], plain)
    for _, made, num_late in done:
        assert made.num_segments == 3 * 3
        assert made.saved_bytes == 0
        assert made.peak_saved_bytes == 3 * X_NBYTES
        assert num_late == 0


@pytest.mark.parametrize(
    ("factory", "classes"),
    [
        (models.Adapted, "Lora"),
        (models.FrozenBlocks, "Block"),
        (models.FrozenBottom, "Block"),
        (models.Twice, "Block"),
        (models.Shared, "Block"),
        (models.TiedBetweenBlocks, "Block"),
        (models.ReadsOthers, "Block"),
        (models.BlockReadsOther, "Reader"),
        (models.ReturnsDataclasses, "DataBlock"),
        (models.Checkpointed, "Block"),
        (models.CheckpointedInside, "Inner"),
        (models.CheckpointedReentrant, "Block"),
        (models.Plain, ["embedding", "blocks.*", "head"]),
        (models.Plain, ["Linear"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "+".join(value) if isinstance(value, list) else "",
)
def test_models_that_use_their_blocks_in_unusual_ways_train_to_the_same_bits(factory: Factory, classes: Any) -> None:
    plain = run_ranks(2, lambda: train(factory, config(3), steps=2))
    done = run_ranks(
        2, lambda: train_recomputed(factory, config(3), "on the host", is_slow=True, classes=classes, steps=2)
    )
    assert_bit_equal([trained for trained, _, _ in done], plain)
    assert [made.saved_bytes for _, made, _ in done] == [0, 0]
    assert [num_late for _, _, num_late in done] == [0, 0]


class Calls(models.Plain):
    """Calls ``recompute.checkpoint`` itself, as models written for DeepSpeed do."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = recompute.checkpoint(block, x)
        return x


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_calls_checkpoint_finds_the_configuration_of_its_rank(stage: int) -> None:
    def train_configured() -> tuple[Trained, dict[Tier, int], int]:
        world = current_world()
        made = Recompute(RecomputeSettings(is_offloaded=world.rank == 1))
        recompute.install(made, world)
        engine = start(Calls, config(stage))
        loss = engine(*batch(0, world.rank, world.size))
        held = made.saved_bytes_by_tier()
        engine.backward(loss)
        engine.step()
        losses = run_steps(engine, 2, first=1)
        trained = finish(engine, [float(loss.detach()), *losses])
        recompute.uninstall(made, world)
        assert not recompute.is_configured()
        return trained, held, made.num_segments

    plain = run_ranks(2, lambda: train(models.Plain, config(stage)))
    done = run_ranks(2, train_configured)
    assert_bit_equal([trained for trained, _, _ in done], plain)
    assert [held for _, held, _ in done] == [{Tier.DEVICE: 3 * X_NBYTES}, {Tier.HOST: 3 * X_NBYTES}]
    assert [num_segments for _, _, num_segments in done] == [9, 9]


def test_blocks_wrapped_before_initialize_and_accumulated_gradients_give_the_same_bits() -> None:
    def wrapped() -> models.Plain:
        model = models.Plain()
        recompute_blocks(model, recompute=Recompute(RecomputeSettings(is_offloaded=True)))
        return model

    settings = config(3, gradient_accumulation_steps=2, bf16={"enabled": True})
    plain = run_ranks(2, lambda: train(models.Plain, settings))
    assert_bit_equal(run_ranks(2, lambda: train(wrapped, settings)), plain)


def test_recomputation_gathers_no_unit_more_than_its_backward_does() -> None:
    """The blocks are recomputed inside their units, which are whole for their backward anyway."""

    def count(is_recomputed: bool) -> list[tuple[str, str]]:
        engine = start(models.Plain, config(3))
        if is_recomputed:
            recompute_blocks(engine.module, "Block", recompute=Recompute())
        run_steps(engine, 2)
        with current_world().recorder.recording() as calls:
            run_steps(engine, 1, first=2)
        engine.destroy()
        return [(call.op, call.label) for call in calls if call.op != "exchange"]

    assert run_ranks(2, count, True) == run_ranks(2, count, False)


# --- in parts ---


def shares(size: int, *, is_on_host: bool) -> list[tuple[int, int, bool, list[tuple[str, int]]]]:
    """On each rank: saved bytes, those of the plain configuration before, are gradients equal, collectives."""
    lock = threading.Lock()

    def run() -> tuple[int, int, bool, list[tuple[str, int]]]:
        world = current_world()
        comm = world.communicator("tp", Mesh.of(size, tp=size))
        generator = torch.Generator().manual_seed(0)  # the same on all ranks, as in a model-parallel group
        x = torch.randn(5, 7, generator=generator).requires_grad_()
        flags = torch.arange(7).expand(5, 7)
        weights = [torch.randn(7, 7, generator=generator).requires_grad_() for _ in range(3)]

        def layer(x: torch.Tensor, weight: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ weight) * flags

        def gradients(made: Recompute) -> tuple[int, list[torch.Tensor]]:
            y = x.t().contiguous().t()  # strides that are to be kept
            for weight in weights:
                y = made.checkpoint(layer, y, weight * 1.0, flags)
            held = made.saved_bytes
            return held, list(torch.autograd.grad(y.sum(), [x, *weights]))

        with lock:
            whole, plain = gradients(Recompute())
        slow = SlowCopies()
        with world.recorder.recording() as calls:
            held, ours = gradients(
                Recompute(
                    RecomputeSettings(is_partitioned=True, is_offloaded=is_on_host),
                    model_parallel=comm,
                    copies_of=lambda _: slow if is_on_host else None,
                )
            )
        assert slow.num_late == 0
        are_equal = all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
        return held, whole, are_equal, [(call.op, call.nbytes) for call in calls]

    return run_ranks(size, run)


@pytest.mark.parametrize("is_on_host", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_stores_its_share_and_gathers_the_others_in_backward(size: int, is_on_host: bool) -> None:
    x, weight, flags = 5 * 7 * 4, 7 * 7 * 4, 7 * 8
    share = {2: (70, 98, 28), 3: (47, 66, 19)}[size]  # rounded up
    for held, whole, are_equal, calls in shares(size, is_on_host=is_on_host):
        assert are_equal
        assert whole == 3 * (x + weight) + flags  # the flags are shared by the three segments
        assert held == 3 * (share[0] + share[1]) + share[2]
        gathered = [("all_gather", nbytes * (size - 1)) for nbytes in share]  # received
        assert sorted(calls) == sorted(3 * gathered)


def test_one_model_parallel_rank_keeps_everything_and_says_so() -> None:
    world = current_world()
    made = Recompute(RecomputeSettings(is_partitioned=True), model_parallel=world.communicator("tp", Mesh.of(1)))
    made.checkpoint(torch.sin, torch.ones(3, requires_grad=True))
    assert made.notes() == [
        "partition_activations: no effect, because there is one model-parallel rank: no other has the same activations."
    ]
    assert not made.is_partitioned


# --- real processes ---


def trained_with_dropout(rank: int, size: int, stage: int) -> dict[str, Any]:
    """Losses and main_parameters, plain and recomputed; in processes each rank has a generator of its own."""

    class DroppedInside(models.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(super().forward(x), 0.25)

    class Dropped(models.Plain):
        block = DroppedInside

    found: dict[str, Any] = {}
    for name, settings in (("plain", None), ("host", RecomputeSettings(is_offloaded=True))):
        engine = start(Dropped, config(stage))
        if settings is not None:
            recompute_blocks(engine.module, "DroppedInside", recompute=Recompute(settings))
        torch.manual_seed(100 + rank)
        losses = run_steps(engine, 2)
        trained = finish(engine, losses)
        found[name] = [losses, trained.main_parameters]
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_is_the_same_in_the_recomputation_of_each_process(gloo: Any, stage: int) -> None:
    for found in gloo(2, trained_with_dropout, stage):
        (plain_losses, plain), (losses, main_parameters) = found["plain"], found["host"]
        assert losses == plain_losses
        assert list(main_parameters) == list(plain)
        assert all(torch.equal(main_parameters[key], plain[key]) for key in plain)
