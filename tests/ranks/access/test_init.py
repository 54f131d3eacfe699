"""Models that are sharded while they are built: under `zero.Init`, and from the meta device."""

from __future__ import annotations

import gc
import weakref
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
from shoal.errors import ConfigError, ModelError
from shoal.running.parameter_owner import OWNERS
from tests.helpers.models import HIDDEN, VOCABULARY, Block, Plain, WithBuffers, cross_entropy
from tests.helpers.training import (
    STAGES,
    are_bit_equal,
    config,
    finish,
    main_parameters,
    make,
    run_steps,
    start,
    start_with,
)


class Initialised(WithBuffers):
    """Modifies parameters of its children again in its constructor, as models do."""

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
        found = main_parameters(engine)
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
        owners = [(parameter, OWNERS.get(parameter)) for parameter in built.parameters()]
        with zero.GatheredParameters(built.parameters()):
            assert all(bool((parameter == 2.0).all()) for parameter in built.parameters())
        return [owner.shard_of(parameter).numel() for parameter, owner in owners if owner is not None]

    before = nn.Module.to_empty
    assert run_ranks(2, job) == [[15, 3, 15, 3]] * 2
    assert nn.Module.to_empty is before


def unlocked(stage: int) -> Callable[[], Any]:
    def job() -> Any:
        with zero.Init():
            model = Initialised()
        engine = start_with(model, config(stage))
        found = main_parameters(engine)
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


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        ({"bf16": {"enabled": True}}, None, torch.bfloat16),
        ({"fp16": {"enabled": True}}, None, torch.float16),
        ({"bf16": {"enabled": True}}, torch.float32, torch.float32),
        ({"bf16": {"enabled": "auto"}}, None, torch.float64),
        (None, None, torch.float64),
    ],
)
def test_the_configs_dtype_is_that_of_the_shards(
    config: dict[str, Any] | None, dtype: torch.dtype | None, expected: torch.dtype
) -> None:
    def job() -> tuple[torch.dtype, torch.dtype]:
        with zero.Init(config_dict_or_path=config, dtype=dtype):
            model = nn.Linear(3, 3, dtype=torch.float64)
        owner = OWNERS.get(model.weight)
        assert owner is not None
        return model.weight.dtype, owner.shard_of(model.weight).dtype

    assert run_ranks(2, job) == [(expected, expected)] * 2


def test_a_config_that_initialize_refuses_is_refused_before_the_model_is_built() -> None:
    def job() -> None:
        with pytest.raises(ConfigError, match="zero_optimisation"):
            zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimisation": {"stage": 3}})
        zero.Init(config_dict_or_path={"zero_optimisation": {"stage": 3}}, enabled=False)

    run_ranks(1, job)


def test_zero_init_leaves_module_classes_as_they_were() -> None:
    before = nn.Linear.__init__, Plain.__init__, "__init_subclass__" in nn.Module.__dict__

    def job() -> None:
        with zero.Init():
            Plain()
        with pytest.raises(ZeroDivisionError), zero.Init():
            1 / 0  # noqa: B018

    run_ranks(2, job)
    assert (nn.Linear.__init__, Plain.__init__, "__init_subclass__" in nn.Module.__dict__) == before


def with_width(cls: type[nn.Module]) -> type[nn.Module]:
    """A class decorator that replaces the constructor, as those of Transformers do."""
    constructor = cls.__init__

    def replaced(module: nn.Module, width: int) -> None:
        constructor(module, width)  # type: ignore[arg-type]
        module.width = width  # type: ignore[assignment]

    cls.__init__ = replaced  # type: ignore[method-assign, assignment]
    return cls


def test_a_decorator_that_replaces_a_constructor_inside_zero_init_stays() -> None:
    def job() -> list[object]:
        with zero.Init():

            @with_width
            class Wide(nn.Module):
                def __init__(self, width: int) -> None:
                    super().__init__()
                    self.weight = nn.Parameter(torch.ones(width))

            inside = Wide(6)  # type: ignore[call-arg]
        with zero.Init():
            again = Wide(8)  # type: ignore[call-arg]
        outside = Wide(4)  # type: ignore[call-arg]
        is_sharded = [OWNERS.get(module.weight) is not None for module in (inside, again, outside)]
        return [inside.width, again.width, outside.width, *is_sharded]

    assert run_ranks(2, job) == [[6, 8, 4, True, True, False]] * 2


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


def test_parameters_that_code_has_accessed_are_freed_where_the_constructor_fails() -> None:
    seen: list[weakref.ref[nn.Parameter]] = []

    def build() -> None:
        with zero.Init():
            layer = nn.Linear(4, 4)
            nn.init.ones_(layer.weight)
            seen.append(weakref.ref(layer.weight))
            raise ZeroDivisionError

    def job() -> bool:
        with pytest.raises(ZeroDivisionError):
            build()
        gc.collect()
        return seen[0]() is None

    assert run_ranks(1, job) == [True]


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
        found = main_parameters(engine)
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
        return finish(engine, []).main_parameters  # such a model stays sharded after destroy()

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
        found = main_parameters(engine)
        run_steps(engine, 2)
        return found, finish(engine, []).main_parameters

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
