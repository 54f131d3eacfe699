"""Sharded parameters, whole: to read, to set, to build; and parameters that another module reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import skip_init

import shoal
from shoal import zero
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ModelError, UsageError
from shoal.zero.early import EARLY
from tests.ranks.models import (
    HIDDEN,
    VOCABULARY,
    Block,
    OddParameters,
    Plain,
    ReadsOthers,
    WithBuffers,
    cross_entropy,
)
from tests.ranks.training import (
    STAGES,
    adamw,
    are_bit_equal,
    batch,
    config,
    finish,
    largest_difference,
    make,
    masters,
    micro_step,
    run_steps,
    start,
    start_with,
    train_alone,
)

BF16 = {"bf16": {"enabled": True}}


def named(engine: shoal.Engine) -> dict[str, nn.Parameter]:
    return dict(engine.module.named_parameters())


# GatheredParameters


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_parameters_are_whole_inside_and_as_before_outside(stage: int) -> None:
    def job() -> tuple[bool, bool, bool]:
        engine = start(OddParameters, config(stage))
        before = make(OddParameters)
        parameters = named(engine)
        block = [p for name, p in parameters.items() if name.startswith("blocks.1.")]
        at_rest = parameters["blocks.1.up.weight"].isnan().all().item()
        with zero.GatheredParameters(block):
            inside = all(
                torch.equal(parameters[n], p) for n, p in before.named_parameters() if n.startswith("blocks.1.")
            )
        with zero.GatheredParameters(parameters["odd"]):
            inside = inside and torch.equal(parameters["odd"], before.odd)
        after = parameters["blocks.1.up.weight"].isnan().all().item()
        engine.destroy()
        return at_rest, inside, after

    assert run_ranks(3, job) == [(stage == 3, True, stage == 3)] * 3


@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_what_the_modifier_rank_changed_reaches_all_ranks_and_their_master_weights(
    world: int, stage: int, sections: dict[str, Any]
) -> None:
    def job() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        engine = start(Plain, config(stage, **sections), adamw)
        rank = current_world().rank
        run_steps(engine, 2)
        weight = named(engine)["blocks.1.up.weight"]
        before = engine.access.full_parameter(weight).clone()
        with zero.GatheredParameters([weight], modifier_rank=world - 1):
            with torch.no_grad():
                weight[:2] = 7.0 if rank == world - 1 else -1.0  # only the modifier's counts
        master = engine.access.full_parameter(weight).clone()
        run_steps(engine, 1, first=2)
        engine.destroy()
        return before, master, weight.detach().clone()

    for before, master, weight in run_ranks(world, job):
        assert (master[:2] == 7.0).all()
        assert torch.equal(master[2:], before[2:])  # to the bit, though the 16-bit weights are coarser
        assert not weight.isnan().any()
        assert (weight[:2] > 6.9).all()


def test_without_a_modifier_rank_changes_of_sharded_parameters_are_lost() -> None:
    def job() -> torch.Tensor:
        engine = start(Plain, config(3))
        weight = named(engine)["blocks.1.up.weight"]
        with zero.GatheredParameters(weight), torch.no_grad():
            weight.fill_(7.0)
        value = engine.access.full_parameter(weight).clone()
        engine.destroy()
        return value

    for value in run_ranks(2, job):
        assert torch.equal(value, make(Plain).blocks[1].up.weight)


@pytest.mark.parametrize("world", [2, 3])
def test_what_was_made_of_gathered_parameters_outlives_the_block(world: int) -> None:
    def job() -> tuple[Any, ...]:
        engine = start(OddParameters, config(3), adamw)
        run_steps(engine, 1)
        weight = named(engine)["blocks.1.up.weight"]
        with zero.GatheredParameters([weight]):
            kept = weight.detach()
            wanted = weight.detach().clone()
        run_steps(engine, 1, first=1)
        with zero.GatheredParameters([weight]):
            now = weight.detach().clone()
        storages = {bucket.full.untyped_storage().nbytes() for bucket in engine.sharded.unit_of[id(weight)].buckets}
        master = engine.access.full_parameter(weight).clone()
        engine.destroy()
        return kept, wanted, now, master, storages

    for kept, wanted, now, master, storages in run_ranks(world, job):
        assert torch.equal(kept, wanted)
        assert not torch.equal(now, wanted)
        assert torch.equal(now, master)
        assert storages == {0}


def test_gathered_parameters_take_no_other_memory_where_nobody_else_holds_it() -> None:
    def job() -> bool:
        engine = start(Plain, config(3))
        weight = named(engine)["blocks.1.up.weight"]
        buckets = engine.sharded.unit_of[id(weight)].buckets
        before = [bucket.full for bucket in buckets]
        for _ in range(2):
            with zero.GatheredParameters([weight]):
                weight.sum().item()
            run_steps(engine, 1)
        same = all(bucket.full is full for bucket, full in zip(buckets, before, strict=True))
        engine.destroy()
        return same

    assert run_ranks(2, job) == [True, True]


def test_gathered_parameters_nest_and_hold_until_the_outermost_ends() -> None:
    def job() -> list[str]:
        engine = start(Plain, config(3))
        unit = next(unit for unit in engine.sharded.units if unit.name == "blocks.0")
        parameters = list(engine.module.blocks[0].parameters())
        states = [unit.state.value]
        with zero.GatheredParameters(parameters):
            with zero.GatheredParameters(parameters[:1]):
                states.append(unit.state.value)
            states.append(unit.state.value)
            run_steps(engine, 1)  # training inside changes nothing
            states.append(unit.state.value)
        states.append(unit.state.value)
        engine.destroy()
        return states

    assert run_ranks(2, job) == [["RESTING", "FULL", "FULL", "FULL", "RESTING"]] * 2


def test_training_while_parameters_are_gathered_gives_the_same_numbers() -> None:
    def job(holds: bool) -> dict[str, torch.Tensor]:
        engine = start(Plain, config(3))
        for step in range(3):
            with zero.GatheredParameters(engine.module.parameters(), enabled=holds):
                micro_step(engine, step)
        return finish(engine, []).parameters

    for held, plain in zip(run_ranks(2, job, True), run_ranks(2, job, False), strict=True):
        assert are_bit_equal(held, plain)


def test_gathered_parameters_takes_parameters_only() -> None:
    with pytest.raises(UsageError, match="got int"):
        zero.GatheredParameters(3)
    with pytest.raises(UsageError, match="got str"):
        zero.GatheredParameters(["weight"])


# The safe accessors


@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_full_values_are_those_of_one_process(world: int, stage: int, sections: dict[str, Any]) -> None:
    model = make(OddParameters)
    optimizer = adamw(model.parameters())
    for step in range(3):
        for rank in range(world):
            (model(*batch(step, rank, world)) / world).backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()

    def job() -> dict[str, list[torch.Tensor | None]]:
        engine = start(OddParameters, config(stage, **sections), adamw)
        run_steps(engine, 2)
        rank = current_world().rank
        engine.backward(engine(*batch(2, rank, world)))
        found = {
            name: [
                zero.safe_get_full_fp32_param(p),
                zero.safe_get_full_grad(p),
                zero.safe_get_full_optimizer_state(p, "exp_avg"),
                zero.safe_get_full_optimizer_state(p, "exp_avg_sq"),
            ]
            for name, p in named(engine).items()
            if "unused" not in name and p.numel()
        }
        engine.destroy()
        return found

    # fp32: Adam's amplification of rounding; bf16: 8 bits, of gradients up to 4.
    atol = 1e-4 if not sections else 0.2
    for found in run_ranks(world, job):
        for name, parameter in model.named_parameters():
            if name not in found:
                continue
            state = optimizer.state[parameter]
            expected = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
            for value, of_one_process in zip(found[name], expected, strict=True):
                assert value is not None
                assert value.dtype == torch.float32
                assert value.shape == parameter.shape
                assert largest_difference({"": value}, {"": of_one_process.detach()}) <= atol, name


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_gradients_and_states_are_none_before_there_are_any(world: int, stage: int) -> None:
    def job() -> list[Any]:
        engine = start(Plain, config(stage), adamw)
        weight = named(engine)["blocks.0.up.weight"]
        found = [zero.safe_get_full_grad(weight), zero.safe_get_full_optimizer_state(weight, "exp_avg")]
        engine.destroy()
        return found

    assert run_ranks(world, job) == [[None, None]] * world


@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_what_was_set_is_what_is_got_and_what_the_optimizer_uses(
    world: int, stage: int, sections: dict[str, Any]
) -> None:
    def job() -> dict[str, bool]:
        engine = start(Plain, config(stage, **sections), adamw)
        run_steps(engine, 1)
        weight = named(engine)["blocks.1.up.weight"]
        shape, rank = weight.shape, current_world().rank
        ramp = torch.arange(weight.numel(), dtype=torch.float32).view(shape) / 100
        found = {}
        zero.safe_set_full_optimizer_state(weight, ramp, "exp_avg")
        found["state"] = torch.equal(zero.safe_get_full_optimizer_state(weight, "exp_avg"), ramp)
        zero.safe_set_full_fp32_param(weight, ramp)
        found["parameter"] = torch.equal(zero.safe_get_full_fp32_param(weight), ramp)
        with zero.GatheredParameters(weight):
            found["the model's own"] = torch.equal(weight.detach(), ramp.to(weight.dtype))
        engine.backward(engine(*batch(1, rank, world)))
        zero.safe_set_full_grad(weight, torch.zeros(shape))
        found["gradient"] = bool((zero.safe_get_full_grad(weight) == 0).all())
        zero.safe_set_full_optimizer_state(weight, torch.zeros(shape), "exp_avg")
        engine.step()
        # No gradient and no momentum: only weight decay (0.1 x learning rate 1e-2) is left.
        decayed = ramp * (1 - 1e-3)
        found["step"] = bool((zero.safe_get_full_fp32_param(weight) - decayed).abs().max() < 1e-5)
        engine.destroy()
        return found

    for found in run_ranks(world, job):
        assert found == dict.fromkeys(["state", "parameter", "the model's own", "gradient", "step"], True)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_local_parts_put_together_are_the_whole(world: int, stage: int) -> None:
    def job() -> list[list[torch.Tensor | None]]:
        engine = start(OddParameters, config(stage), adamw)
        run_steps(engine, 1)
        engine.backward(engine(*batch(1, current_world().rank, world)))
        found = []
        for parameter in (named(engine)["odd"], named(engine)["blocks.2.up.weight"], named(engine)["scalar"]):
            found.append(
                [
                    zero.safe_get_local_fp32_param(parameter),
                    zero.safe_get_local_grad(parameter),
                    zero.safe_get_local_optimizer_state(parameter, "exp_avg"),
                ]
            )
            found[-1] += [
                zero.safe_get_full_fp32_param(parameter),
                zero.safe_get_full_grad(parameter),
                zero.safe_get_full_optimizer_state(parameter, "exp_avg"),
            ]
        found = [[None if t is None else t.clone() for t in row] for row in found]
        engine.destroy()
        return found

    results = run_ranks(world, job)
    for index in range(3):
        for kind in range(3):
            parts = [found[index][kind] for found in results]
            whole = results[0][index][kind + 3]
            assert whole is not None
            if stage == 0:
                assert all(torch.equal(part, whole.reshape(-1)) for part in parts if part is not None)
            else:
                assert torch.equal(torch.cat([part for part in parts if part is not None]), whole.reshape(-1))


def test_local_parts_can_be_set() -> None:
    def job(stage: int) -> tuple[bool, bool]:
        engine = start(Plain, config(stage), adamw)
        run_steps(engine, 1)
        weight = named(engine)["blocks.1.up.weight"]
        part = zero.safe_get_local_fp32_param(weight)
        held = zero.safe_get_local_optimizer_state(weight, "exp_avg")
        if part is not None and held is not None:
            zero.safe_set_local_fp32_param(weight, torch.full_like(part, 2.0))
            zero.safe_set_local_optimizer_state(weight, torch.full_like(held, 3.0), "exp_avg")
        parameter = zero.safe_get_full_fp32_param(weight)
        state = zero.safe_get_full_optimizer_state(weight, "exp_avg")
        engine.destroy()
        return bool((parameter == 2.0).all()), bool((state == 3.0).all())

    for stage in STAGES:
        assert run_ranks(2, job, stage) == [(True, True)] * 2


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("sections", [{}, {"fp16": {"enabled": True, "initial_scale_power": 4}}], ids=["fp32", "fp16"])
def test_each_rank_sets_its_part_of_the_gradient(world: int, sections: dict[str, Any]) -> None:
    def job(stage: int) -> tuple[Any, ...]:
        engine = start(Plain, config(stage, **sections))
        weight = named(engine)["blocks.1.up.weight"]
        engine.backward(engine(*batch(0, current_world().rank, world)))
        part = zero.safe_get_local_fp32_param(weight)
        value = torch.full((0 if part is None else part.numel(),), 0.25)
        before = engine.access.full_parameter(weight).clone()
        zero.safe_set_local_grad(weight, value)
        whole = engine.access.full_gradient(weight)
        engine.step()
        moved = before - engine.access.full_parameter(weight)
        engine.destroy()
        return whole, moved, before

    for stage in STAGES:
        for whole, moved, before in run_ranks(world, job, stage):
            assert torch.equal(whole, torch.full_like(whole, 0.25))
            torch.testing.assert_close(moved, 0.1 * (0.25 + 0.01 * before), atol=1e-6, rtol=1e-4)  # decay and rate


def test_a_part_of_the_gradient_needs_a_gradient_and_its_size() -> None:
    def job(stage: int) -> list[str]:
        engine = start(Plain, config(stage))
        weight = named(engine)["blocks.1.up.weight"]
        part = torch.zeros(10**6)
        said = []
        for _ in range(2):
            with pytest.raises(UsageError) as caught:
                zero.safe_set_local_grad(weight, part)
            said.append(str(caught.value))
            engine.backward(engine(*batch(0, current_world().rank, 2)))
        engine.destroy()
        return said

    for stage in STAGES:
        for before, after in run_ranks(1, job, stage):
            assert "no gradient to replace" in before
            assert "the local value has 1000000 elements" in after


def test_a_wrong_shape_or_a_foreign_parameter_is_a_usage_error() -> None:
    def job() -> list[str]:
        engine = start(Plain, config(3))
        weight = named(engine)["blocks.1.up.weight"]
        calls: list[Callable[[], Any]] = [
            lambda: zero.safe_set_full_fp32_param(weight, torch.zeros(3)),
            lambda: zero.safe_get_full_fp32_param(nn.Parameter(torch.zeros(3))),
            lambda: zero.safe_set_full_grad(weight, torch.zeros_like(make(Plain).blocks[1].up.weight)),
        ]
        codes = []
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            codes.append(caught.value.code)
        engine.destroy()
        return codes

    assert run_ranks(2, job) == [["access-shape", "access-unknown", "access-no-gradient"]] * 2


# Building a model sharded


class Initialised(WithBuffers):
    """Touches parameters of its children again in its constructor, as models do."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            nn.init.constant_(self.blocks[0].up.bias, 3.0)
            self.blocks[1].down.weight.mul_(2.0)
            self.blocks[2].up.weight.copy_(self.blocks[0].up.weight)
        self.apply(self.widen)

    @staticmethod
    def widen(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.weight.data.add_(0.5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_model_built_under_zero_init_is_bit_equal_to_one_built_directly(world: int, stage: int) -> None:
    expected = make(Initialised)

    def job() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        def build() -> nn.Module:
            with zero.Init():
                return Initialised()

        engine = start(build, config(stage))
        found = masters(engine)
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        run_steps(engine, 1)
        engine.destroy()
        return found, buffers

    if world == 1:
        results = run_ranks(1, job)
    else:
        # Threads share torch's generator and meet in zero.Init's broadcasts, so each rank draws its own numbers here:
        # all must end with rank 0's.
        results = run_ranks(world, unlocked(stage))
    for parameters, buffers in results:
        if world == 1:
            assert are_bit_equal(parameters, {n: p.detach() for n, p in expected.named_parameters()})
            assert are_bit_equal(buffers, dict(expected.named_buffers()))
        assert are_bit_equal(parameters, results[0][0])
        assert are_bit_equal(buffers, results[0][1])
        assert (parameters["blocks.0.up.bias"] == 3.0).all()
        assert (parameters["blocks.1.norm.weight"] == 1.5).all()
        assert torch.equal(parameters["blocks.2.up.weight"], parameters["blocks.0.up.weight"])


def test_modules_whose_initialisation_is_skipped_are_sharded_too() -> None:
    class Parent(nn.Module):
        def __init__(self, device: Any = None) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 5, device=device)

    def job() -> list[int]:
        with zero.Init():
            built = nn.ModuleList([skip_init(nn.Linear, 6, 5), skip_init(Parent)])
            with torch.no_grad():
                for parameter in built.parameters():
                    parameter.fill_(2.0)
        shards = [EARLY.get(parameter) for parameter in built.parameters()]
        with zero.GatheredParameters(built.parameters()):
            assert all(bool((parameter == 2.0).all()) for parameter in built.parameters())
        return [shard.shard.numel() for shard in shards if shard is not None]

    before = nn.Module.to_empty
    assert run_ranks(2, job) == [[15, 3, 15, 3]] * 2
    assert nn.Module.to_empty is before


def unlocked(stage: int) -> Callable[[], Any]:
    def job() -> Any:
        with zero.Init():
            model = Initialised()
        engine = start_with(model, config(stage))
        found = masters(engine)
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        run_steps(engine, 1)
        engine.destroy()
        return found, buffers

    return job


def test_parameters_under_zero_init_hold_this_ranks_part_only() -> None:
    def job() -> tuple[int, tuple[int, ...], bool]:
        with zero.Init():
            model = nn.Linear(12, 10)
        held = model.weight.untyped_storage().nbytes()
        return held, tuple(model.weight.shape), bool(model.weight.isnan().all())

    assert run_ranks(2, job) == [(4, (10, 12), True)] * 2


def test_zero_init_leaves_module_classes_as_they_were() -> None:
    before = nn.Linear.__init__, Plain.__init__, "__init_subclass__" in nn.Module.__dict__

    def job() -> None:
        with zero.Init():
            Plain()
        with pytest.raises(ZeroDivisionError), zero.Init():
            1 / 0  # noqa: B018

    run_ranks(2, job)
    assert (nn.Linear.__init__, Plain.__init__, "__init_subclass__" in nn.Module.__dict__) == before


def test_parameters_under_zero_init_can_be_gathered_before_initialize() -> None:
    def job() -> list[torch.Tensor]:
        with zero.Init():
            model = Plain()
        weight = model.blocks[0].up.weight
        with zero.GatheredParameters(weight, modifier_rank=1):
            if current_world().rank == 1:
                weight.data.fill_(5.0)
        engine = start_with(model, config(3))
        found = engine.access.full_parameter(weight).clone()
        engine.destroy()
        return [found]

    for (found,) in run_ranks(2, job):
        assert (found == 5.0).all()


class Untied(nn.Module):
    """No weight is made and then replaced: on the meta device the random numbers for such a weight are never drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), targets)


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_from_the_meta_device_is_bit_equal_to_one_built_directly(stage: int) -> None:
    expected = {name: p.detach() for name, p in make(Untied).named_parameters()}

    def job() -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = Untied()
        torch.manual_seed(0)
        engine = start_with(model, config(stage))
        found = masters(engine)
        run_steps(engine, 1)
        engine.destroy()
        return found

    assert are_bit_equal(run_ranks(1, job)[0], expected)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_start_from_the_meta_device_agree(stage: int) -> None:
    def job() -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = WithBuffers()
        model.register_buffer("shift", torch.rand(HIDDEN))
        model.register_buffer("mask", torch.rand(HIDDEN) > 0.5)
        engine = start_with(model, config(stage))
        run_steps(engine, 2)
        return finish(engine, []).masters  # such a model stays sharded after destroy()

    results = run_ranks(3, job)
    assert not any(value.isnan().any() for value in results[0].values())
    assert are_bit_equal(results[0], results[1])
    assert are_bit_equal(results[0], results[2])


def test_a_meta_module_that_cannot_initialise_itself_is_an_error_that_names_it() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.weight = nn.Parameter(torch.zeros(3))

    def job() -> None:
        with torch.device("meta"):
            model = Bare()
        shoal.initialize(model=model, config=config(3, units={"names": []}))

    with pytest.raises(ModelError, match=r"module 'inner'.*'weight'"):
        run_ranks(1, job)


class Scale(nn.Module):
    """Has no ``reset_parameters``: only an initialiser around it gives it a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class ScaledBlock(Block):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__(hidden)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(super().forward(x))


class Pretrained(Untied):
    """Initialised as Hugging Face's models are: the root knows how for every module below it, and a block's turn comes
    after its parts' (whose values it reads and changes). Values tell when they were set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ScaledBlock() for _ in range(3)])
        self.num_set = 0

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            self.num_set += 1
            shape = module.weight.shape
            module.weight.data.copy_(torch.linspace(-0.1, 0.1 * self.num_set, shape.numel()).view(shape))
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()
        elif isinstance(module, Scale):
            module.weight.data.fill_(1.0)
        elif isinstance(module, Block):
            for name, parameter in module.named_parameters():
                if name == "down.weight":
                    parameter.data.div_(2.0)
            with torch.no_grad():
                module.up.bias += module.scale.weight.sum()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_meta_model_that_initialises_its_modules_is_bit_equal_to_one_built_directly(stage: int, world: int) -> None:
    model = make(Pretrained)
    model.apply(model._init_weights)
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert (expected["blocks.2.up.bias"] == float(HIDDEN)).all()

    def job() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        with torch.device("meta"):
            model = Pretrained()
        engine = start_with(model, config(stage))
        found = masters(engine)
        run_steps(engine, 2)
        return found, finish(engine, []).masters

    results = run_ranks(world, job)
    for found, trained in results:
        assert are_bit_equal(found, expected)
        assert are_bit_equal(trained, results[0][1])


@pytest.mark.parametrize("world", [1, 2])
def test_a_meta_module_that_the_model_does_not_initialise_is_an_error_that_names_it(world: int) -> None:
    class Forgets(Pretrained):
        def _init_weights(self, module: nn.Module) -> None:
            if not isinstance(module, Scale):
                super()._init_weights(module)

    def job() -> None:
        with torch.device("meta"):
            model = Forgets()
        shoal.initialize(model=model, config=config(3))

    with pytest.raises(ModelError, match=r"module 'blocks.0.scale' \(Scale\).*'weight'"):
        run_ranks(world, job)


# External parameters


def test_a_registered_external_parameter_is_gathered_with_its_reader() -> None:
    alone = train_alone(ReadsOthers, world=2)

    def job() -> tuple[dict[str, torch.Tensor], list[str]]:
        engine = start(ReadsOthers, config(3))
        zero.register_external_parameter(engine.module, engine.module.blocks[1].up.weight)
        root = next(unit for unit in engine.sharded.units if unit.name == "root")
        externals = [unit.name for unit in root.externals]
        zero.unregister_external_parameter(engine.module, engine.module.blocks[1].up.weight)
        assert root.externals == []
        run_steps(engine, 3)
        return finish(engine, []).parameters, externals

    for parameters, externals in run_ranks(2, job):
        assert externals == ["blocks.1"]
        assert largest_difference(parameters, alone.parameters) <= 1e-5


class ReadsLater(Plain):
    """Reads another module's parameter from its second step on only, when nobody looks for such reads any more."""

    reads = False

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens, targets)
        return loss + self.blocks[1].up.bias.sum() if self.reads else loss


def test_a_read_that_begins_later_is_never_silent_and_works_once_registered() -> None:
    def job(is_registered: bool) -> float:
        engine = start(ReadsLater, config(3))
        run_steps(engine, 2)
        engine.module.reads = True
        if is_registered:
            zero.register_external_parameter(engine.module, engine.module.blocks[1].up.bias)
        loss = run_steps(engine, 1, first=2)[0]
        engine.destroy()
        return loss

    assert all(loss == loss for loss in run_ranks(2, job, True))
    with pytest.raises(shoal.errors.NonFiniteError):
        run_ranks(2, job, False)


class OwnHead(torch.nn.Module):
    """Reads the embedding in its own forward; everything that is its own alone is small."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 300)
        self.norm = torch.nn.LayerNorm(300)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.embedding(tokens)) @ self.embedding.weight.T).square().mean()


def test_a_model_without_a_root_unit_may_read_another_units_parameter_in_every_step() -> None:
    torch.manual_seed(0)
    values = OwnHead().state_dict()

    def train(stage: int) -> list[float]:
        model = OwnHead()
        model.load_state_dict(values)
        engine, *_ = shoal.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "zero_optimization": {"stage": stage},
            },
        )
        losses = []
        for step in range(4):
            loss = engine(torch.arange(4).view(2, 2) + step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    whole, sharded = run_ranks(2, train, 0)[0], run_ranks(2, train, 3)[0]
    assert sharded == whole
    assert all(math.isfinite(loss) for loss in sharded)
