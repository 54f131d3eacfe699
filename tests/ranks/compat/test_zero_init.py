"""``zero.Init`` and ``GatheredParameters`` as DeepSpeed's clients use them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.deepspeed import initialize
from shoal.compat.zero_init import Init
from shoal.errors import UsageError
from shoal.running.parameter_owner import OWNERS
from shoal.zero import GatheredParameters
from tests.helpers.models import Plain
from tests.helpers.training import batch, config, sgd, start, start_with

# As Transformers has it before it knows the model's size.
WITH_AUTO: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def on_two(run: Callable[[], Any]) -> list[Any]:
    return run_ranks(2, run)


class Rotary(nn.Module):
    """Makes tensors of every kind as it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("steps", torch.arange(0.0, 4.0, 0.5))
        self.register_buffer("table", torch.zeros(2) + torch.ones(2) + torch.full((2,), 2.0) + torch.eye(2)[0])
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("asked", torch.tensor([1.0], dtype=torch.float64))


def test_the_configs_dtype_is_that_of_parameters_and_of_tensors() -> None:
    def build() -> list[torch.dtype]:
        with Init(config_dict_or_path=WITH_AUTO):
            model = Rotary()
        assert OWNERS.get(model.weight) is not None
        assert model.weight.shape == (3, 2)
        return [t.dtype for t in (model.weight, model.steps, model.table, model.counts, model.asked)]

    bf16 = torch.bfloat16
    assert on_two(build) == [[bf16, bf16, bf16, torch.int64, bf16]] * 2
    assert torch.zeros(1).dtype == torch.float32


class Routed(nn.Module):
    """Names a buffer, as transformers' mixtures do."""

    _keep_in_fp32_modules_strict = ("bias_of_*",)

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.inner = nn.Module()
        self.inner.register_buffer("bias_of_experts", torch.zeros(4))
        self.inner.register_buffer("noise", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x).float().sum()


@pytest.mark.parametrize(
    ("named", "expected"),
    [(None, [torch.float32, torch.bfloat16]), (["noise"], [torch.bfloat16, torch.float32])],
    ids=["the model's", "the config's"],
)
def test_buffers_that_are_named_stay_in_fp32_in_the_context_and_in_the_engine(named: Any, expected: list[Any]) -> None:
    sections: dict[str, Any] = {"bf16": {"enabled": True}}
    if named is not None:
        sections["data_types"] = {"keep_in_fp32_modules": named}

    def build() -> list[list[torch.dtype]]:
        with Init(config_dict_or_path={"train_batch_size": 2, **sections}):
            model = Routed()
        before = [buffer.dtype for buffer in model.buffers()]
        engine, *_ = initialize(
            model=model, config=config(3, units={"names": []}, **sections), dist_init_required=False
        )
        after = [buffer.dtype for buffer in engine.module.buffers()]
        engine.destroy()
        return [before, after]

    assert on_two(build) == [[expected, expected]] * 2


def test_one_rank_where_the_launcher_started_several_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")

    def build() -> None:
        Init(enabled=False)
        with pytest.raises(UsageError, match=r"WORLD_SIZE=8[\s\S]*init_distributed"):
            Init()

    run_ranks(1, build)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [({"fp16": {"enabled": True}}, torch.float16), ({}, torch.float32), ({"fp16": {"enabled": "auto"}}, torch.float32)],
)
def test_without_a_half_dtype_in_the_config_all_is_fp32(sections: dict[str, Any], expected: torch.dtype) -> None:
    def build() -> list[torch.dtype]:
        with Init(config_dict_or_path={"train_batch_size": 2, **sections}):
            model = Rotary()
        return [model.weight.dtype, model.steps.dtype]

    assert on_two(build) == [[expected] * 2] * 2


def test_a_context_that_is_not_enabled_does_nothing() -> None:
    with Init(config_dict_or_path=WITH_AUTO, enabled=False, remote_device="cpu"):
        model = Rotary()
    assert OWNERS.get(model.weight) is None
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("remote", [None, "none", "cpu", "nvme"])
def test_offloaded_shards_train_the_same(remote: str | None) -> None:
    def train() -> dict[str, torch.Tensor]:
        with Init(config_dict_or_path={"train_batch_size": 4}, remote_device=remote):
            torch.manual_seed(0)
            model = Plain()
        engine = start_with(model, config(3), sgd)
        engine.backward(engine(*batch(0, current_world().rank, 2)))
        engine.step()
        values = engine.module_state_dict()
        engine.destroy()
        return values

    trained, again = on_two(train)
    assert all(bool(value.isfinite().all()) for value in trained.values())
    assert all(torch.equal(trained[name], again[name]) for name in trained)


def test_initialize_inside_an_open_context_keeps_what_code_has_changed_and_casts_nothing() -> None:
    def build() -> tuple[torch.Tensor, list[torch.dtype], torch.Tensor, torch.dtype]:
        with Init(config_dict_or_path={"train_batch_size": 4, "bf16": {"enabled": True}}):
            model = Plain()
            with torch.no_grad():
                model.head.weight.fill_(0.25)
            engine = start_with(model, config(3, bf16={"enabled": True}), sgd)
            main_parameters = [group.main.dtype for group in engine.sharding.groups]
            later = nn.Linear(2, 2)
            assert OWNERS.get(later.weight) is not None
        weight = engine.module_state_dict()["head.weight"]
        engine.destroy()
        return weight, main_parameters, later.weight.detach(), later.weight.dtype

    for weight, main_parameters, _, dtype in on_two(build):
        assert torch.equal(weight, torch.full_like(weight, 0.25))
        assert set(main_parameters) == {torch.float32}
        assert dtype == torch.bfloat16


def test_nested_contexts_and_modules_are_sharded_once() -> None:
    def build() -> list[int]:
        with Init(config_dict_or_path={"train_batch_size": 2}), Init(config_dict_or_path={"train_batch_size": 2}):
            model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
        owners = [(parameter, OWNERS.get(parameter)) for parameter in model.parameters()]
        return [owner.shard_of(parameter).numel() for parameter, owner in owners if owner is not None]

    assert on_two(build) == [[8, 2, 4, 1]] * 2


def test_apply_inside_the_context_sees_whole_parameters_and_rank_0s_values_count() -> None:
    def build() -> torch.Tensor:
        rank = current_world().rank

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.part = nn.Linear(3, 3)
                self.apply(self.fill)

            def fill(self, module: nn.Module) -> None:
                if isinstance(module, nn.Linear):
                    assert not bool(module.weight.isnan().any())
                    nn.init.constant_(module.weight, 1.0 + rank)

        with Init(config_dict_or_path={"train_batch_size": 2}):
            model = Model()
        with GatheredParameters(model.parameters()):
            return model.part.weight.detach().clone()

    for value in on_two(build):
        assert torch.equal(value, torch.ones(3, 3))


def model_of_init() -> nn.Module:
    with Init(config_dict_or_path={"train_batch_size": 2}):
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def value_of(parameter: nn.Parameter) -> torch.Tensor:
    with GatheredParameters(parameter):
        return parameter.detach().clone()


def test_gathering_takes_nothing_none_duplicates_generators_and_ordinary_tensors() -> None:
    def gather() -> None:
        model = model_of_init()
        ordinary = nn.Parameter(torch.ones(2))
        with GatheredParameters([]), GatheredParameters(()), GatheredParameters([None, ordinary, torch.zeros(1)]):
            assert torch.equal(ordinary.detach(), torch.ones(2))
        weight = model[0].weight
        with GatheredParameters((p for p in [weight, weight, None]), modifier_rank=1):
            with torch.no_grad():
                weight.fill_(float(current_world().rank))
        assert bool(weight.isnan().all())
        assert torch.equal(value_of(weight), torch.ones(5, 3))

    on_two(gather)


def test_parameters_are_gathered_in_one_order_whatever_the_ranks_say() -> None:
    """As where Transformers hands over a set."""

    def gather() -> None:
        for model in (model_of_init(), start(Plain, config(3), sgd).module):
            parameters = list(model.parameters())
            shuffled = parameters if current_world().rank == 0 else parameters[::-1]
            with GatheredParameters(shuffled, modifier_rank=0), torch.no_grad():
                for number, parameter in enumerate(parameters):
                    parameter.fill_(number)
            for number, parameter in enumerate(parameters):
                assert set(value_of(parameter).flatten().tolist()) == {float(number)}

    on_two(gather)


@pytest.mark.parametrize("is_live", [False, True])
def test_rank_0_alone_may_run_the_body_and_gather_within(is_live: bool) -> None:
    def gather() -> None:
        model = start(Plain, config(3), sgd).module if is_live else model_of_init()
        parameters = list(model.parameters())
        with GatheredParameters(parameters, modifier_rank=0):
            if current_world().rank == 0:
                with GatheredParameters(parameters[:2], modifier_rank=0), torch.no_grad():
                    parameters[0].fill_(3.0)
                with torch.no_grad():
                    parameters[1].fill_(4.0)
        assert set(value_of(parameters[0]).flatten().tolist()) == {3.0}
        assert set(value_of(parameters[1]).flatten().tolist()) == {4.0}

    on_two(gather)


def test_a_block_that_keeps_changes_inside_one_that_does_not_keeps_them() -> None:
    def gather() -> None:
        weight = model_of_init()[0].weight
        with GatheredParameters(weight):
            with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                weight.fill_(2.0)
        assert torch.equal(value_of(weight), torch.full((5, 3), 2.0))

    on_two(gather)


def test_rank_0_alone_may_run_the_body_while_the_context_is_open() -> None:
    def build() -> torch.Tensor:
        with Init(config_dict_or_path={"train_batch_size": 2}):
            part = nn.Linear(2, 2)
            with torch.no_grad():
                part.bias.fill_(7.0)  # touched, and so whole, before the block
            with GatheredParameters([part.weight, part.bias], modifier_rank=0):
                if current_world().rank == 0:
                    nn.init.ones_(part.weight)
        assert torch.equal(value_of(part.bias), torch.full((2,), 7.0))
        return value_of(part.weight)

    for value in on_two(build):
        assert torch.equal(value, torch.ones(2, 2))


def test_a_parameter_that_gets_another_shape_inside_the_block_keeps_it() -> None:
    """As an embedding does that grows."""

    def grow() -> tuple[torch.Tensor, torch.Tensor]:
        with Init(config_dict_or_path={"train_batch_size": 2}):
            table = nn.Embedding(4, 2)
        grown = nn.Embedding(7, 2)
        before = value_of(table.weight)
        with GatheredParameters([table.weight, grown.weight], modifier_rank=0):
            grown.weight.data[:4] = table.weight.data
            table.weight.data = grown.weight.data
        assert table.weight.shape == (7, 2)
        after = value_of(table.weight)
        assert torch.equal(after[:4], before)
        other = nn.Embedding(3, 2)
        with GatheredParameters([table.weight, other.weight], modifier_rank=0):
            table.weight = other.weight
        return after, table.weight.detach()

    (one, own), (two, _) = on_two(grow)
    assert torch.equal(one, two)
    assert own.shape == (3, 2)


class Normed(nn.Module):
    """A convolution whose weight is normalised, as speech models have it."""

    def __init__(self, *, is_gathered: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor(0.5))  # 0-d
        if is_gathered:
            with GatheredParameters(self.conv.weight, modifier_rank=0):
                self.conv = nn.utils.parametrizations.weight_norm(self.conv, name="weight", dim=2)
            for name in ("original0", "original1"):
                shoal.zero.register_external_parameter(self, getattr(self.conv.parametrizations.weight, name))
        else:
            self.conv = nn.utils.parametrizations.weight_norm(self.conv, name="weight", dim=2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.conv(inputs) * self.scale).square().mean()


def test_a_normalised_weight_and_a_0_d_parameter_train_as_one_process_does() -> None:
    torch.manual_seed(3)
    plain = Normed(is_gathered=False)
    values = copy.deepcopy(plain.state_dict())
    inputs = torch.randn(4, 4, 6)
    optimizer = sgd(list(plain.parameters()))
    for _ in range(2):
        plain(inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    def train() -> dict[str, torch.Tensor]:
        rank = current_world().rank
        with Init(config_dict_or_path={"train_batch_size": 4}):
            model = Normed(is_gathered=True)
        with GatheredParameters(model.parameters(), modifier_rank=0):
            if rank == 0:
                model.load_state_dict(values)
        settings = {**config(3), "units": {"names": ["conv"]}}
        engine = start_with(model, settings, sgd)
        for _ in range(2):
            engine.backward(engine(inputs[rank * 2 : rank * 2 + 2]))
            engine.step()
        found = engine.module_state_dict()
        engine.destroy()
        return found

    for found in on_two(train):
        assert sorted(found) == sorted(values)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value)


def test_a_model_that_was_trained_destroyed_and_sharded_at_init_is_initialized_again() -> None:
    def twice() -> None:
        rank = current_world().rank
        with Init(config_dict_or_path={"train_batch_size": 2}):
            model = Plain()
        for index in range(2):
            engine = start_with(model, config(3), sgd)
            engine.backward(engine(*batch(index, rank, 2)))
            engine.step()
            engine.destroy()
        with GatheredParameters(model.parameters()):
            assert all(bool(p.isfinite().all()) for p in model.parameters())

    on_two(twice)


@pytest.mark.parametrize("is_engine", [False, True])
@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_change_that_would_be_lost_is_a_warning_and_an_error_on_all_ranks_where_the_config_asks_for_it(
    is_asked_for: bool, is_engine: bool
) -> None:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "enable_sanity_checks": is_asked_for,
        },
    }

    def change() -> list[str]:
        with Init(config_dict_or_path=settings):
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        engine = initialize(model=model, config=settings, dist_init_required=False)[0] if is_engine else None
        weights = [model[0].weight, model[1].weight]
        said = []
        for changer in (0, None):
            try:
                with GatheredParameters(weights), torch.no_grad():
                    if current_world().rank == changer:
                        weights[1].add_(0.0)
            except UsageError as error:
                said.append(error.what)
            except UserWarning as warning:
                said.append(str(warning))
        with GatheredParameters(weights, modifier_rank=0), torch.no_grad():
            weights[1].fill_(2.0)
        with GatheredParameters(weights):
            assert bool((weights[1] == 2).all())
        if engine is not None:
            engine.destroy()
        return said

    words = (
        "in-place modification of sharded parameters inside GatheredParameters on ranks [0], and modifier_rank=None:"
        " the change is lost."
    )
    warned = (
        "1 sharded parameters were changed inside GatheredParameters with modifier_rank=None: the changes are lost."
        " Pass modifier_rank=0 to broadcast rank 0's."
    )
    assert run_ranks(2, change) == ([[words]] * 2 if is_asked_for else [[warned], []])


@pytest.mark.parametrize("is_held", [False, True])
def test_a_copy_of_a_sharded_module_is_whole_and_its_own(is_held: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 3, bias=False)
            self.second = nn.Linear(2, 3, bias=False)
            self.second.weight = self.first.weight
            self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    expected = nn.Linear(2, 3, bias=False)

    def build() -> list[Any]:
        with Init(config_dict_or_path={"train_batch_size": 2}):
            model = Tied()
        with GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            model.first.weight.copy_(expected.weight)
        with GatheredParameters(list(model.parameters()), enabled=is_held):
            copied = copy.deepcopy(model)
        with pytest.raises(UsageError, match=r"\[copy-at-rest\]"):
            pickle.dumps(model.first.weight)
        again = copy.deepcopy(copied)
        with torch.no_grad():
            copied.first.weight.zero_()
        with GatheredParameters([model.first.weight]):
            kept = model.first.weight.detach().clone()
        assert again.second.weight is again.first.weight and OWNERS.get(again.first.weight) is None
        assert again.first.weight.requires_grad and not again.scale.requires_grad
        return [again.first.weight.detach(), kept, again.scale.item()]

    for copied, kept, scale in on_two(build):
        assert torch.equal(copied, expected.weight) and torch.equal(kept, expected.weight)
        assert scale == 2.0


def test_an_engine_that_takes_a_sharded_module_leaves_nothing_on_its_parameters() -> None:
    def build() -> list[bool]:
        with Init(config_dict_or_path={"train_batch_size": 2}):
            model = Plain()
        engine = start_with(model, config(3), sgd)
        is_plain = ["__deepcopy__" not in vars(parameter) for parameter in model.parameters()]
        engine.destroy()
        return is_plain

    assert all(all(each) for each in on_two(build))
