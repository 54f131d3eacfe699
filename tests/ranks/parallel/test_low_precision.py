"""Layers that compute in few bits, on ranks: against one process, over stages, schedules, splits and what else a step
does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.parallel.low_precision.layers import LowPrecisionLayers
from shoal.parallel.low_precision.products import LowPrecisionProducts
from shoal.parallel.low_precision.recipes import RECIPES
from shoal.parallel.products import LayerProducts, Products
from tests.helpers.compiling import CountsGraphs, compiling
from tests.helpers.expert_layers import Stack
from tests.helpers.low_precision import skip_where_torch_refuses
from tests.helpers.models import Checkpointed, Plain
from tests.helpers.training import (
    Trained,
    are_bit_equal,
    assert_ranks_agree,
    batch,
    config,
    finish,
    largest_difference,
    main_parameters,
    make,
    run_steps,
    sgd,
    start,
    train_alone,
    train_ranks,
)

DETERMINISTIC = [name for name in RECIPES if name != "nvfp4"]  # its noise differs from rank to rank


def fp8(recipe: str = "rowwise", **keys: Any) -> dict[str, Any]:
    """The zoo's layers are smaller than those that are taken by default."""
    return {"recipe": recipe, "modules": ["*"], **keys}


def low_precision(model: nn.Module, recipe: str, names: tuple[str, ...] = ()) -> nn.Module:
    """The model, whose linear layers compute as a recipe says, without an engine."""
    here = LowPrecisionProducts(RECIPES[recipe])
    skip_where_torch_refuses(here)
    products = LayerProducts(here)
    products.is_on = True
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and (not names or n in names)}
    LowPrecisionLayers(linears, products, products)
    return model


def bits(results: list[Trained]) -> dict[str, torch.Tensor]:
    assert_ranks_agree(results)
    return results[0].parameters


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("recipe", DETERMINISTIC)
def test_a_run_ends_where_one_process_ends_that_computes_the_same(recipe: str, num_micro: int) -> None:
    """Bit-equal on one rank; on two, sums have another order, which moves a value over the edge of a code at times."""
    settings = config(2, fp8=fp8(recipe), gradient_accumulation_steps=num_micro)
    for world, bound in ((1, 0.0), (2, 1e-6)):
        alone = train_alone(lambda: low_precision(Plain(), recipe), world=world, steps=2, accumulation=num_micro)
        results = train_ranks(world, Plain, settings, sgd, steps=2)
        assert largest_difference(bits(results), alone.parameters) <= bound
        plain = train_alone(Plain, world=world, steps=2, accumulation=num_micro)
        assert largest_difference(bits(results), plain.parameters) > 1e-4


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_stages_give_the_same_bits(recipe: str) -> None:
    found = [bits(train_ranks(2, Plain, config(stage, fp8=fp8(recipe)))) for stage in range(4)]
    assert all(are_bit_equal(each, found[0]) for each in found[1:])


OTHERS: dict[str, dict[str, Any]] = {
    "recompute": {"activation_checkpointing": {"modules": ["Block"]}},
    "recompute a layer": {"activation_checkpointing": {"modules": ["blocks.*.up"]}},
    "saved on the host": {"offload_activation": {"device": "cpu"}},
    "state on the host": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
}


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_changes_no_number_changes_none_in_few_bits(name: str, recipe: str) -> None:
    plain = bits(train_ranks(2, Plain, config(3, fp8=fp8(recipe))))
    assert are_bit_equal(bits(train_ranks(2, Plain, config(3, fp8=fp8(recipe), **OTHERS[name]))), plain)


def test_a_model_that_recomputes_itself_does_so_in_few_bits() -> None:
    plain = bits(train_ranks(2, Plain, config(3, fp8=fp8())))
    assert are_bit_equal(bits(train_ranks(2, Checkpointed, config(3, fp8=fp8()))), plain)


@pytest.mark.parametrize("section", ["bf16", "fp16", "torch_autocast"])
@pytest.mark.parametrize("stage", [1, 3])
def test_other_precisions_compute_near_the_run_in_their_own_bits(section: str, stage: int) -> None:
    """The differences of the run in few bits are at most a quarter of how far the parameters have moved."""
    began = {name: value.detach() for name, value in make(Plain).named_parameters()}
    plain, ours = (
        train_ranks(2, Plain, config(stage, **{section: {"enabled": True}}, **more))[0].main_parameters
        for more in ({}, {"fp8": fp8()})
    )
    moved = sum(float((value - began[name]).square().sum()) for name, value in plain.items())
    off = sum(float((ours[name] - value).square().sum()) for name, value in plain.items())
    assert 0 < off <= 0.25**2 * moved


class Bare(nn.Module):
    """Linear layers without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens % 12, 12).to(self.blocks[0].weight.dtype)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(x.flatten(0, 1).float(), targets.flatten() % 12)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_weights_gathered_in_8_bits_give_the_bits_of_weights_gathered_as_they_are(
    recipe: str, precision: dict[str, Any]
) -> None:
    plain, gathered = (
        train_ranks(2, Bare, config(3, fp8=fp8(recipe), **precision, **wire))
        for wire in ({}, {"wire": {"gather": "fp8"}})
    )
    assert plain[0].losses == gathered[0].losses
    assert are_bit_equal(plain[0].main_parameters, gathered[0].main_parameters)
    other = train_ranks(2, Bare, config(3, fp8=fp8(recipe), **precision, wire={"gather": "int8"}))
    assert other[0].losses != plain[0].losses


# The schedule


def steps_of(settings: dict[str, Any], number: int, first: int = 0) -> Trained:
    engine = start(Plain, settings)
    return finish(engine, run_steps(engine, number, first=first))


def test_the_layers_compute_in_few_bits_in_the_steps_of_the_schedule_only(ranks: Callable[..., Any]) -> None:
    """Losses are those of the plain run until a step, and in between those of one process that switches too."""
    plain = ranks(1, steps_of, config(1), 5)[0]
    ours = ranks(1, steps_of, config(1, fp8=fp8(from_step=2, until_step=4)), 5)[0]
    model = make(Plain)
    quantized = low_precision(make(Plain), "rowwise")
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(5):
        used = quantized if 2 <= step < 4 else model
        used.load_state_dict(model.state_dict())
        used.zero_grad()
        loss = used(*batch(step, 0, 1))
        loss.backward()
        for ours_, theirs in zip(model.parameters(), used.parameters(), strict=True):
            ours_.grad = theirs.grad
        optimizer.step()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
    assert ours.losses == losses
    assert ours.losses[:2] == plain.losses[:2] and ours.losses[2:] != plain.losses[2:]


@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4"])
@pytest.mark.parametrize("saved_at", [1, 2, 3])
def test_a_resumed_run_goes_on_with_the_same_bits_across_the_switches(
    recipe: str, saved_at: int, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    settings = config(3, fp8=fp8(recipe, from_step=1, until_step=3))

    def job() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = start(Plain, settings)
        run_steps(engine, saved_at)
        engine.save_checkpoint(tmp_path)
        run_steps(engine, 5 - saved_at, first=saved_at)
        through = main_parameters(engine)
        engine.destroy()
        engine = start(Plain, settings)
        engine.load_checkpoint(tmp_path)
        run_steps(engine, 5 - saved_at, first=saved_at)
        resumed = main_parameters(engine)
        engine.destroy()
        return through, resumed

    for through, resumed in ranks(2, job):
        assert are_bit_equal(through, resumed)


def test_a_switch_is_logged(ranks: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "shoal"):
        ranks(1, steps_of, config(1, fp8=fp8(from_step=1, until_step=2, keep=["head"])), 4)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("fp8")]
    assert said == [
        "fp8: 7 layers of 8 in rowwise from step 1 on until step 2; as they are: head.",
        "fp8: on after step 1 (rowwise).",
        "fp8: off after step 2 (rowwise).",
    ]


# Which layers


class Wide(nn.Module):
    """A tied head, a layer that is too small, and blocks whose layers are taken by default."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 16)
        self.positions = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}) for _ in "1234")
        self.small = nn.Linear(16, 3)
        self.head = nn.Linear(16, 48, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + block["down"](block["up"](x).relu())
        return self.head(x).logsumexp(-1).mean() + self.small(x).square().mean()


def chosen(model: nn.Module, **keys: Any) -> list[str]:
    """The names of the layers that an engine has compute in few bits."""
    section = {"recipe": "rowwise", **keys}
    optimizer = sgd(model.parameters())
    settings = {key: value for key, value in config(0, fp8=section).items() if key != "units"}
    engine = shoal.initialize(model=model, optimizer=optimizer, config=settings)[0]
    found = [name for name, module in model.named_modules() if "forward" in vars(module)]
    engine.destroy()
    assert not any("forward" in vars(module) for module in model.modules())
    return found


@pytest.mark.parametrize("is_tied", [True, False])
def test_layers_are_taken_whose_dims_are_multiples_of_16_without_the_head(
    is_tied: bool, ranks: Callable[..., Any]
) -> None:
    every = [f"blocks.{number}.{name}" for number in range(4) for name in ("up", "down")]
    assert ranks(1, lambda: chosen(Wide(is_tied))) == [every]


def test_patterns_and_a_share_of_the_blocks_say_which_layers_stay(ranks: Callable[..., Any]) -> None:
    def names(**keys: Any) -> list[str]:
        found: list[str] = ranks(1, lambda: chosen(Wide(), **keys))[0]
        return found

    assert names(modules=["*.up", "head"], keep=["blocks.0.*"]) == ["blocks.1.up", "blocks.2.up", "blocks.3.up", "head"]
    assert names(keep_last_layers=0.15, keep=["*.up"]) == ["blocks.0.down", "blocks.1.down", "blocks.2.down"]
    assert names(keep_last_layers=0.6) == ["blocks.0.up", "blocks.0.down"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"modules": ["*.uq"]}, "fp8.modules has '\\*.uq', which matches no linear layer"),
        ({"keep": ["norm"]}, "fp8.keep has 'norm', which matches no linear layer"),
        ({"keep": ["*"]}, "no linear layer of the model is left for fp8"),
        ({"modules": ["small"], "keep": ["small"]}, "no linear layer of the model is left for fp8: of 10, 1 are taken"),
    ],
)
def test_patterns_that_leave_nothing_are_refused(keys: dict[str, Any], said: str, ranks: Callable[..., Any]) -> None:
    with pytest.raises(shoal.ShoalError, match=said) as caught:
        ranks(1, lambda: chosen(Wide(), **keys))
    assert caught.value.code == "fp8-modules"


def test_a_share_of_blocks_needs_blocks(ranks: Callable[..., Any]) -> None:
    with pytest.raises(shoal.ShoalError, match=r"fp8.keep_last_layers = 0.5, but the model has no list of blocks"):
        ranks(1, lambda: chosen(nn.Sequential(nn.Linear(16, 16)), keep_last_layers=0.5))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"keep": ["head"]}, "fp8.recipe"),
        ({"recipe": "int8"}, "fp8.recipe"),
        ({"recipe": "rowwise", "from_step": 5, "until_step": 5}, "fp8.until_step"),
        ({"recipe": "rowwise", "keep_last_layers": 1.0}, "fp8.keep_last_layers"),
    ],
)
def test_a_section_that_cannot_work_is_an_error_of_the_config(
    section: dict[str, Any], said: str, ranks: Callable[..., Any]
) -> None:
    with pytest.raises(shoal.ShoalError, match=said):
        ranks(1, steps_of, config(1, fp8=section), 1)


def test_a_model_is_given_back_as_it_was_and_its_copies_compute_as_it_does(ranks: Callable[..., Any]) -> None:
    def job() -> None:
        model = make(Plain)
        before = {name: dict(vars(module)).keys() for name, module in model.named_modules()}
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=config(1, fp8=fp8()))[0]
        run_steps(engine, 1)
        copied = copy.deepcopy(model)
        inputs = batch(7, 0, 1)
        with torch.no_grad():
            assert torch.equal(copied(*inputs), engine(*inputs))
            engine.destroy()
            weights = dict(model.named_parameters())
            plain = make(Plain)
            plain.load_state_dict(model.state_dict())
            assert torch.equal(model(*inputs), plain(*inputs)) and weights
        assert {name: dict(vars(module)).keys() for name, module in model.named_modules()} == before

    ranks(1, job)


def test_a_gradient_that_is_not_finite_skips_the_step(ranks: Callable[..., Any]) -> None:
    def skip() -> tuple[int, bool]:
        engine = start(Plain, config(2, fp8=fp8(), precision={"nonfinite": "skip"}))
        before = main_parameters(engine)
        loss = engine(*batch(0, current_world().rank, current_world().size))
        engine.backward(loss * (torch.inf if current_world().rank else 1.0))
        engine.step()
        return engine.skipped_steps, are_bit_equal(main_parameters(engine), before)

    assert ranks(2, skip) == [(1, True)] * 2


# Over ranks that split layers, and what compiles


class InParts(Products):
    """What tensor-parallel ranks compute together: each has a part of the weight, and scales of its own."""

    def __init__(self, recipe: str, num_ranks: int, *, is_column: bool) -> None:
        self._products, self._num, self._is_column = LowPrecisionProducts(RECIPES[recipe]), num_ranks, is_column

    def output(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._is_column:
            return torch.cat([self._products.output(x, part) for part in weight.chunk(self._num)], -1)
        parts = zip(x.chunk(self._num, -1), weight.chunk(self._num, 1), strict=True)
        return sum((self._products.output(*part) for part in parts), torch.zeros(()))

    def of_input(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self._is_column:
            return torch.cat([self._products.of_input(gradient, part) for part in weight.chunk(self._num, 1)], -1)
        parts = zip(gradient.chunk(self._num, -1), weight.chunk(self._num), strict=True)
        return sum((self._products.of_input(*part) for part in parts), torch.zeros(()))

    def of_weight(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self._is_column:
            return torch.cat([self._products.of_weight(part, x) for part in gradient.chunk(self._num, -1)])
        return torch.cat([self._products.of_weight(gradient, part) for part in x.chunk(self._num, -1)], 1)


def even_batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence that two ranks divide."""
    tokens, targets = batch(index, 0, 1)
    return tokens[:, :4], targets[:, :4]


def split_in_parts(model: nn.Module, recipe: str, num_ranks: int) -> nn.Module:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("blocks"):
            products = LayerProducts(InParts(recipe, num_ranks, is_column=name.endswith("up")))
            products.is_on = True
            LowPrecisionLayers({name: module}, products, products)
    return model


class PartlySplit(nn.Module):
    """Tensor-parallel ranks hold a part of two layers, and all of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x).relu())).square().mean()


def test_tensor_parallel_ranks_round_the_gradients_of_a_layer_alike_that_they_hold_whole(
    ranks: Callable[..., Any],
) -> None:
    plan = {"up": "column", "down": "row", "head": "replicate"}
    settings = {
        **config(1, fp8=fp8("nvfp4"), parallel={"tp": 2, "tp_plan": plan}, debug={"replica_check_steps": 1}),
        "units": {},
    }

    def job() -> list[torch.Tensor]:
        engine = start(PartlySplit, settings, sgd)
        for _ in range(3):
            engine.backward(
                engine(torch.randn(2, 16, generator=torch.Generator().manual_seed(current_world().rank // 2)))
            )
            engine.step()
        return [p.detach().clone() for p in engine.module.head.parameters()]

    results = ranks(4, job)
    assert all(are_bit_equal(dict(enumerate(each)), dict(enumerate(results[0]))) for each in results[1:])


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {}},
        {"parallel": {"tp_sequence_parallel": True}},
        {"parallel": {}, "tensor_parallel": {"tp_overlap_comm": True}},
    ],
    ids=["plain", "sequence parallel", "overlapping"],
)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_split_layers_compute_what_their_parts_compute_with_scales_of_their_own(
    recipe: str, sections: dict[str, Any], ranks: Callable[..., Any]
) -> None:
    plan = {"blocks.*.up": "column", "blocks.*.down": "row", "head": "replicate", "unused": "replicate"}
    parallel = {"tp": 2, "tp_plan": plan, **sections["parallel"]}
    settings = config(1, fp8={"recipe": recipe, "modules": ["blocks.*"]}, **{**sections, "parallel": parallel})

    def job() -> list[float]:
        engine = start(Plain, settings)
        losses = []
        for step in range(3):
            loss = engine(*even_batch(step))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.destroy()
        return losses

    model = split_in_parts(make(Plain), recipe, 2)
    optimizer = sgd(model.parameters())
    wanted = []
    for step in range(3):
        loss = model(*even_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
    for losses in ranks(2, job):
        assert losses == pytest.approx(wanted, abs=1e-5)


def test_names_of_all_pipeline_stages_are_known_on_each(ranks: Callable[..., Any]) -> None:
    stages = {"every_stage": ["embedding"]}

    def names(**keys: Any) -> list[str]:
        settings = config(1, fp8={"recipe": "rowwise", **keys}, parallel={"pp": 2}, pipeline=stages)
        engine = start(lambda: Plain(num_blocks=4), {key: v for key, v in settings.items() if key != "units"})
        found = [name for name, module in engine.module.named_modules() if "forward" in vars(module)]
        loss = engine.train_batch(batch(index, 0, 1) for index in range(2))
        assert torch.isfinite(loss)
        return found

    assert ranks(2, lambda: names(modules=["blocks.*"], keep_last_layers=0.25)) == [
        [f"blocks.{number}.{name}" for number in numbers for name in ("up", "down")] for numbers in ((0, 1), (2,))
    ]
    assert ranks(2, lambda: names(modules=["blocks.0.up", "head"])) == [["blocks.0.up"], ["head"]]


def test_compiled_blocks_compute_the_same_on_both_sides_of_a_switch(ranks: Callable[..., Any]) -> None:
    def job(is_compiled: bool) -> list[float]:
        engine = start(Plain, config(3, fp8=fp8(from_step=1, until_step=3)))
        for block in engine.module.blocks if is_compiled else ():
            block.compile(backend=backend, dynamic=False)
        losses = run_steps(engine, 4)
        engine.destroy()
        return losses

    backend = CountsGraphs("aot_eager")
    plain = ranks(1, job, False)[0]
    with compiling():
        compiled = ranks(1, job, True)[0]
    assert backend.num_graphs > 0
    assert compiled == pytest.approx(plain, abs=1e-6)


class WithExperts(nn.Module):
    """A layer of stacked experts as Transformers has them, whose sizes are taken by default."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = Stack(4, is_transposed=False, has_gate=True, inner=32, width=16)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.router(x).softmax(-1), 2, dim=-1)
        out: torch.Tensor = self.experts(x, chosen, weights)
        return out


@pytest.mark.parametrize("stage", [0, 3])
def test_stacked_experts_of_a_model_compute_in_few_bits_without_expert_parallelism(stage: int) -> None:
    def job(recipe: str | None, enabled: bool) -> torch.Tensor:
        sections = {"expert_parallel": {"enabled": True}} if enabled else {}
        sections |= {"fp8": {"recipe": recipe}} if recipe else {}
        engine = start(WithExperts, {**config(stage, **sections), "units": {}})
        loss = engine(torch.randn(2, 16, generator=torch.Generator().manual_seed(2))).square().sum()
        engine.backward(loss)
        engine.step()
        engine.destroy()
        return loss.detach()

    plain, found, prepared = (
        run_ranks(2, job, *of)[0] for of in ((None, False), ("rowwise", False), ("rowwise", True))
    )
    assert 1e-4 < abs(found / plain - 1) < 0.1
    assert torch.equal(found, prepared)
