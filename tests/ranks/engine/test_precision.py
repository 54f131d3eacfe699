"""Precisions, scalings of gradients, and the optimizers of the config, at every stage against plain PyTorch."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.config import load
from shoal.errors import ConfigError
from shoal.optim.variants import FP32States
from tests.helpers.models import Plain
from tests.helpers.training import (
    ROWS,
    STAGES,
    Trained,
    adamw,
    are_bit_equal,
    assert_ranks_agree,
    batch,
    config,
    finish,
    largest_difference,
    make,
    micro_step,
    run_steps,
    sgd,
    start,
    train_alone,
    train_ranks,
)

WORLDS = pytest.mark.parametrize("world", [1, 2])


def at_all_stages(world: int, optimizer: Any = sgd, *, steps: int = 3, **sections: Any) -> list[list[Trained]]:
    found = []
    for stage in STAGES:
        results = train_ranks(world, Plain, config(stage, **sections), optimizer, steps=steps)
        assert_ranks_agree(results)
        found.append(results)
    return found


@WORLDS
def test_torch_autocast_is_plain_pytorchs(world: int) -> None:
    model = make(Plain)
    optimizer = sgd(model.parameters())
    for step in range(3):
        for rank in range(world):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*batch(step, rank, world)) / world
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    found = at_all_stages(world, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    for results in found:
        assert {p.dtype for p in results[0].parameters.values()} == {torch.float32}
        assert largest_difference(results[0].parameters, expected) <= 2e-4  # a rounding to 8 bits may fall otherwise
        assert are_bit_equal(results[0].parameters, found[0][0].parameters)


def test_under_torch_autocast_gradients_of_linear_modules_are_reduced_in_its_dtype() -> None:
    def sent(modules: list[str] | None) -> dict[torch.dtype, int]:
        def rank() -> dict[torch.dtype, int]:
            section = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": modules}
            sections = {"torch_autocast": section, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
            engine, *_ = shoal.initialize(model=make(Plain), config=config(2, **sections))
            numels: dict[torch.dtype, int] = {}
            for group in engine.sharding.groups:
                dtype = group.gradient.policy.reduce_dtype or group.buffer.dtype
                held = sum(slot.numel for slot in group.buffer.layout.specs)
                numels[dtype] = numels.get(dtype, 0) + held
            engine.destroy()
            return numels

        return run_ranks(2, rank)[0]

    model = make(Plain)
    linear = sum(p.numel() for m in model.modules() if type(m) is torch.nn.Linear for p in m.parameters())
    linear -= model.head.weight.numel()  # the embedding's too
    norm = sum(p.numel() for m in model.modules() if type(m) is torch.nn.LayerNorm for p in m.parameters())
    everything = sum(p.numel() for p in model.parameters())
    assert 0 < linear < everything
    assert sent(["torch.nn.Linear"]) == {torch.bfloat16: linear, torch.float32: everything - linear}
    assert sent([]) == sent(None) == {torch.float32: everything}
    assert norm > 0
    assert sent(["torch.nn.LayerNorm"]) == {torch.bfloat16: norm, torch.float32: everything - norm}
    with pytest.raises(ConfigError, match=r"'torch.nn.Nothing' .*; 'Linear' .*; 'torch.nn.functional.relu'"):
        sent(["torch.nn.Nothing", "Linear", "torch.nn.functional.relu"])


def test_inputs_and_outputs_of_forward_are_cast() -> None:
    def dtypes(**precision: Any) -> tuple[torch.dtype, torch.dtype]:
        seen = []

        class Seen(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append(x.dtype)
                return super().forward(x.to(self.weight.dtype))

        settings = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "precision": precision}
        engine = shoal.initialize(model=Seen(4, 4), config=settings)[0]
        output = engine(torch.ones(2, 4))
        return seen[0], output.dtype

    cast = partial(run_ranks, 1)
    assert cast(dtypes) == [(torch.float32, torch.bfloat16)]
    assert cast(partial(dtypes, cast_forward_inputs=True)) == [(torch.bfloat16, torch.bfloat16)]
    assert cast(partial(dtypes, output_dtype="fp32")) == [(torch.float32, torch.float32)]
    with pytest.raises(ConfigError, match="cast_forward_inputs"):
        load({"train_micro_batch_size_per_gpu": 2, "precision": {"cast_forward_inputs": True}})


class Rotated(nn.Module):
    """Frequencies as rotary embeddings keep them: the seventh of them is another number in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("frequencies", 10_000 ** -(torch.arange(8) / 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.cos(1000 * self.frequencies).to(x.dtype)
        return self.norm(self.layer(x * turned)).float().square().mean()


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_keep_their_format_beside_16_bit_parameters_but_for_a_norms_statistics(stage: int) -> None:
    def formats(**sections: Any) -> dict[str, torch.dtype]:
        def rank() -> dict[str, torch.dtype]:
            model = Rotated()
            frequencies = model.frequencies.clone()
            engine, *_ = shoal.initialize(
                model=model,
                config=config(stage, units={"names": []}, bf16={"enabled": True}, **sections),
                optimizer=sgd(model.parameters()),
            )
            loss = engine(torch.ones(4, 8, dtype=torch.bfloat16))
            engine.backward(loss)
            engine.step()
            found = {name: buffer.dtype for name, buffer in engine.module.named_buffers()}
            assert torch.equal(model.frequencies, frequencies.to(found["frequencies"]))
            engine.destroy()
            return found

        return run_ranks(2, rank)[0]

    counted = {"norm.num_batches_tracked": torch.int64}
    statistics = dict.fromkeys(["norm.running_mean", "norm.running_var"], torch.bfloat16)
    assert formats() == {"frequencies": torch.float32, **statistics, **counted}
    everything = formats(data_types={"buffer_dtype": "bf16"})
    assert everything == {"frequencies": torch.bfloat16, **statistics, **counted}


class Positions(nn.Module):
    """A table in fp32 that is added to activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.table).float().square().mean()


def test_a_forward_that_fails_over_formats_names_the_buffers_of_another_format() -> None:
    def use(**sections: Any) -> list[str]:
        def rank() -> list[str]:
            model = Positions()
            settings = config(1, units={"names": []}, bf16={"enabled": True}, **sections)
            engine, *_ = shoal.initialize(model=model, config=settings, optimizer=sgd(model.parameters()))
            try:
                engine(torch.ones(2, 8, dtype=torch.bfloat16))
            except RuntimeError as error:
                return error.__notes__
            finally:
                engine.destroy()
            return []

        return run_ranks(2, rank)[0]

    (note,) = use()
    assert "buffers keep a format of their own beside parameters in bfloat16: table." in note
    assert '"buffer_dtype"' in note
    assert use(data_types={"buffer_dtype": "bf16"}) == []


class Fp32StateAdamW(FP32States, torch.optim.AdamW):
    pass


@WORLDS
@pytest.mark.parametrize("has_bf16_state", [False, True])
def test_bf16_without_main_parameters_is_an_optimizer_on_bf16_parameters(world: int, has_bf16_state: bool) -> None:
    model = make(Plain).to(torch.bfloat16)
    kind = torch.optim.AdamW if has_bf16_state else Fp32StateAdamW
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        gradients: dict[str, list[torch.Tensor]] = {}
        for rank in range(world):
            model(*batch(step, rank, world)).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradients.setdefault(name, []).append(parameter.grad.float())
                    parameter.grad = None
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.grad = (sum(gradients[name]) / world).to(torch.bfloat16)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": has_bf16_state}
    found = at_all_stages(world, adamw, bf16=bf16)
    for results in found:
        assert are_bit_equal(results[0].parameters, expected)


NO_MAIN: dict[str, Any] = {"enabled": True, "bf16_master_weights_and_grads": True}


@pytest.mark.parametrize(
    ("sections", "has_main", "state"),
    [
        ({"bf16": NO_MAIN}, False, torch.float32),
        ({"bf16": {**NO_MAIN, "bf16_optimizer_states": True}}, False, torch.bfloat16),
        ({"bf16": {"enabled": True}, "precision": {"master_dtype": "bf16"}}, False, torch.float32),
        ({"bf16": NO_MAIN, "precision": {"state_dtype": "bf16"}}, False, torch.bfloat16),
        ({"bf16": {"enabled": True}, "precision": {"state_dtype": "bf16"}}, True, torch.bfloat16),
        ({"bf16": {"enabled": True}, "precision": {"state_dtype": "fp32"}}, True, torch.float32),
        ({"fp16": {"enabled": True, "loss_scale": 1, "fp16_master_weights_and_grads": True}}, False, torch.float32),
        ({"precision": {"state_dtype": "bf16"}}, False, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_main_parameters_and_state_have_the_formats_that_the_keys_name(
    sections: dict[str, Any], has_main: bool, state: torch.dtype, is_offloaded: bool
) -> None:
    zero = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if is_offloaded else {}

    def job() -> tuple[dict[str, int], set[torch.dtype]]:
        settings = config(2, **sections, **zero)
        engine = start(Plain, settings, adamw)
        run_steps(engine, 1)
        kinds = engine.memory_report().by_kind()
        held = engine.optimizer.state
        dtypes = {held[parameter][key].dtype for parameter in held for key in ("exp_avg", "exp_avg_sq")}
        engine.destroy()
        return kinds, dtypes

    for kinds, dtypes in run_ranks(2, job):
        assert bool(kinds["master"]) == has_main
        assert dtypes == {state}


def test_bf16_state_beside_main_parameters_is_rounded_after_each_step_and_resumes_to_the_bit(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"bf16": {"enabled": True}, "precision": {"state_dtype": "bf16"}}

    def job() -> list[dict[str, torch.Tensor]]:
        found = []
        whole = start(Plain, config(2, **sections), adamw)
        run_steps(whole, 3)
        for stage in (2, 3):
            part = start(Plain, config(stage, **sections), adamw)
            run_steps(part, 2)
            part.save_checkpoint(tmp_path, tag=str(stage))
            later = start(Plain, config(stage, **sections), adamw)
            later.load_checkpoint(tmp_path, tag=str(stage))
            run_steps(later, 1, first=2)
            found.append(later)
        engines = [whole, *found, start(Plain, config(2, bf16={"enabled": True}), adamw)]
        run_steps(engines[-1], 3)
        return [{n: v.clone() for n, v in engine.module_state_dict().items()} for engine in engines]

    for whole, *resumed, with_fp32_state in run_ranks(2, job):
        assert all(are_bit_equal(each, whole) for each in resumed)
        assert not are_bit_equal(with_fp32_state, whole)
        for name, value in whole.items():
            torch.testing.assert_close(value, with_fp32_state[name], rtol=0.02, atol=0.02)


def test_a_state_format_is_refused_for_an_optimizer_of_whole_tensors() -> None:
    settings = {
        "train_batch_size": 1, "precision": {"state_dtype": "bf16"}, "optimizer": {"type": "Lamb"},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"precision\.state_dtype.*Lamb steps whole tensors"):
        shoal.initialize(model=make(Plain), config=settings)


def scaled_by_hand(world: int, factor: float) -> dict[str, torch.Tensor]:
    model = make(Plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        for rank in range(world):
            (model(*batch(step, rank, world)) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def slow(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@pytest.mark.parametrize(
    ("sections", "factor"),
    [
        ({"gradient_allreduce_op": "sum"}, 1.0),
        ({"prescale_gradients": True}, 1 / 3),
        ({"gradient_predivide_factor": 2.0}, 1 / 3),
        ({"prescale_gradients": True, "gradient_predivide_factor": 2.0}, 1 / 3),
    ],
    ids=["sum", "prescaled", "factor without prescaling", "factor with prescaling"],
)
def test_gradients_are_a_mean_unless_the_file_asks_for_a_sum(sections: dict[str, Any], factor: float) -> None:
    expected = scaled_by_hand(3, factor)
    for results in at_all_stages(3, slow, **sections):
        assert largest_difference(results[0].parameters, expected) <= 1e-5


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_reduced_in_autocasts_dtype_are_near_those_in_fp32(accumulation: int) -> None:
    plain = {"enabled": True, "dtype": "bfloat16"}
    low = {**plain, "lower_precision_safe_modules": ["torch.nn.Linear"]}
    expected = at_all_stages(2, slow, torch_autocast=plain, gradient_accumulation_steps=accumulation)
    found = at_all_stages(2, slow, torch_autocast=low, gradient_accumulation_steps=accumulation)
    for one, other in zip(expected, found, strict=True):
        assert largest_difference(one[0].parameters, other[0].parameters) <= 1e-3


@pytest.mark.parametrize("wire", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_reduced_in_16_bits_are_near_those_in_fp32(wire: str, accumulation: int) -> None:
    alone = train_alone(Plain, slow, world=2, accumulation=accumulation)
    found = at_all_stages(2, slow, communication_data_type=wire, gradient_accumulation_steps=accumulation)
    # Gradients below 4, three steps at 0.01, 8 or 11 bits.
    bound = {"bf16": 1e-3, "fp16": 1e-4, "fp32": 1e-5}[wire]
    for results in found:
        assert largest_difference(results[0].parameters, alone.parameters) <= bound


def test_bf16_gradients_accumulate_in_fp32_unless_the_file_says_otherwise() -> None:
    def job(dtype: str | None) -> set[torch.dtype]:
        sections: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4}
        if dtype is not None:
            sections["data_types"] = {"grad_accum_dtype": dtype}
        engine = start(Plain, config(2, **sections), adamw)
        run_steps(engine, 1)
        found = {group.gradient.memory().dtype for group in engine.sharding.groups}
        engine.destroy()
        return found

    assert run_ranks(2, job, None) == [{torch.float32}] * 2
    assert run_ranks(2, job, "bf16") == [{torch.bfloat16}] * 2


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor).sum()


def add_up(engine: shoal.Engine, how: str) -> None:
    """One step of 33 micro-batches, whose gradients are 1 and then 32 times 1/256."""
    number = engine.gradient_accumulation_steps()  # losses are divided by it
    for index in range(33):
        factor = torch.tensor(float(number) if index == 0 else number / 256, dtype=torch.bfloat16)
        is_quiet = how == "no_sync throughout" or (how == "no_sync" and index < 32)
        with engine.no_sync() if is_quiet else contextlib.nullcontext():
            engine.backward(engine(factor))
            if how != "unmanaged":
                engine.step()
    if how == "unmanaged":
        engine.step()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["the file", "set_train_batch_size", "no_sync", "no_sync throughout", "unmanaged"])
def test_many_tiny_gradients_are_not_lost_in_bf16(how: str, world: int) -> None:
    """1 + 32 / 256: in bf16 each addition rounds back to 1."""

    def job(stage: int) -> tuple[float, list[torch.dtype]]:
        model = One()
        settings = config(
            stage,
            bf16={"enabled": True},
            gradient_accumulation_steps=1 if how in ("set_train_batch_size", "unmanaged") else 33,
            managed_gradient_accumulation=how != "unmanaged",
            units={"names": []},
            gradient_clipping=0.0,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = shoal.initialize(model=model, optimizer=optimizer, config=settings)[0]
        if how == "set_train_batch_size":
            for _ in range(33):  # a boundary of the new count, too
                engine.backward(engine(torch.tensor(0.25, dtype=torch.bfloat16)))
                engine.step()
            engine.set_train_batch_size(33 * ROWS * world)
        for _ in range(2):
            add_up(engine, how)
        value = float(engine.access.full_parameter(model.weight)[0])
        dtypes = [group.gradient.dtype for group in engine.sharding.groups]
        engine.destroy()
        return value, dtypes

    first = -33 * 0.25 if how == "set_train_batch_size" else 0.0
    for stage in STAGES:
        assert run_ranks(world, job, stage) == [(first - 2 * 1.125, [torch.float32])] * world


@pytest.mark.parametrize("stage", [2, 3])
def test_unsynced_gradients_are_in_the_ledger_until_they_are_reduced(stage: int) -> None:
    def job() -> list[int]:
        engine = start(Plain, config(stage, bf16={"enabled": True}, gradient_accumulation_steps=2), adamw)
        held = []
        for is_quiet, index in ((False, 0), (False, 1), (True, 2), (False, 3)):
            with engine.no_sync() if is_quiet else contextlib.nullcontext():
                micro_step(engine, index)
            held.append(engine.memory_report().by_kind()["gradient"])
        whole = sum(group.buffer.layout.numel * 4 for group in engine.sharding.groups)
        engine.destroy()
        return [number - held[0] - (whole if index == 2 else 0) for index, number in enumerate(held)]

    assert run_ranks(2, job) == [[0, 0, 0, 0]] * 2


def test_16_bit_accumulators_stay_so_without_fp32_main_parameters() -> None:
    def job(stage: int, sections: dict[str, Any]) -> set[torch.dtype]:
        engine = start(Plain, config(stage, **sections), adamw)
        engine.set_train_batch_size(2 * engine.train_batch_size())
        run_steps(engine, 1)
        with engine.no_sync():
            run_steps(engine, 1, first=2)
        found = {group.gradient.dtype for group in engine.sharding.groups}
        engine.destroy()
        return found

    said = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    without_main_parameters = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    for stage in STAGES:
        for sections in (said, without_main_parameters):
            assert run_ranks(2, job, stage, sections) == [{torch.bfloat16}] * 2


# Optimizers of the config


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1},
    "Muon": {"lr": 1e-2},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_the_config_gives_the_same_at_every_stage_and_on_any_number_of_ranks(name: str) -> None:
    sections = {"optimizer": {"type": name, "params": OPTIMIZERS[name]}, "gradient_clipping": 0.5}
    # Of all ranks' data, so that every number of ranks sees the same batches.
    one = train_ranks(1, WholeBatch, config(0, **sections), None, steps=3)[0]
    # Lion's update is a sign: where a gradient is zero but for rounding it may differ.
    bound = {"Lion": 7e-3, "Muon": 2e-3}.get(name, 5e-5)
    first = None
    for stage in STAGES:
        results = train_ranks(3, WholeBatch, config(stage, **sections), None, steps=3)
        assert_ranks_agree(results)
        assert largest_difference(results[0].parameters, one.parameters) <= bound
        first = first or results[0]
        if name not in ("Lamb", "Muon"):
            assert are_bit_equal(results[0].parameters, first.parameters)


class WholeBatch(Plain):
    """Ignores what it is given and takes one fixed batch, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return super().forward(*batch(self.step, 0, 1))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_the_optimizers_state_dict_goes_on_where_it_stopped(world: int, stage: int) -> None:
    def job(stops: bool) -> dict[str, torch.Tensor]:
        engine = start(Plain, config(stage, bf16={"enabled": True}), adamw)
        run_steps(engine, 2)
        if stops:
            saved = engine.optimizer.state_dict()
            assert sorted(saved) == ["param_groups", "state"]
            assert saved["param_groups"][0]["params"] == list(range(23))
            copied = {
                key: {k: (v.clone() if isinstance(v, torch.Tensor) else v) for k, v in value.items()}
                for key, value in saved["state"].items()
            }
            main_parameters = {n: engine.access.full_parameter(p) for n, p in engine.module.named_parameters()}
            engine.destroy()
            engine = start(Plain, config(stage, bf16={"enabled": True}), adamw)
            for name, parameter in engine.module.named_parameters():
                engine.access.set_full_parameter(parameter, main_parameters[name])
            engine.optimizer.load_state_dict({"state": copied, "param_groups": saved["param_groups"]})
        run_steps(engine, 2, first=2)
        return finish(engine, []).main_parameters

    for expected, found in zip(run_ranks(world, job, False), run_ranks(world, job, True), strict=True):
        assert are_bit_equal(found, expected)


def test_ranks_see_their_own_data_and_the_norm_of_all() -> None:
    alone = train_alone(Plain, sgd, world=3, steps=1)

    def job(stage: int) -> tuple[float, float]:
        engine = start(Plain, config(stage))
        loss = run_steps(engine, 1)[0]
        norm = engine.get_global_grad_norm()
        engine.destroy()
        assert norm is not None
        return loss, norm

    for stage in STAGES:
        results = run_ranks(3, job, stage)
        assert len({loss for loss, _ in results}) == 3
        assert len({norm for _, norm in results}) == 1
        assert abs(results[0][1] - alone.norms[0]) <= 1e-5
    assert current_world().size == 1
