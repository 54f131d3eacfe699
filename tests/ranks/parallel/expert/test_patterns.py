"""Experts of models that are not Shoal's, stacked or in lists: parity with their own loops, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint.formats.huggingface import write_huggingface
from shoal.checkpoint.loading_hf import load_hf
from shoal.checkpoint.manifest import MODEL
from shoal.comm.protocol import Communicator
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world, use_world
from shoal.config import load
from shoal.config.parallel import PRESETS as NAMES
from shoal.errors import CheckpointError, ModelError, OptimizerError
from shoal.mesh import Mesh
from shoal.parallel.expert.apply import PRESETS, prepare_experts
from shoal.parallel.expert.divide import divide
from shoal.parallel.expert.held import ExpertsHeld, global_names
from shoal.parallel.expert.router import Routing
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parts import paste
from tests.helpers.expert_layers import LISTED, NUM_EXPERTS, STACKED, WIDTH, Layers, MixtralLayer
from tests.helpers.formats_source import MemorySource
from tests.helpers.tensor_cases import difference
from tests.ranks.comm.test_processes import own_world

HIDDEN = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
PATTERNS = {"moe_layer_pattern": r"layers\.\d+\.mixture", "router_pattern": "ga.*", "expert_pattern": "experts"}


def section(**keys: Any) -> Any:
    return load({"expert_parallel": {"enabled": True, **keys}}).expert_parallel


def ep() -> Communicator | None:
    world = current_world()
    return world.communicator("ep", Mesh.of(world.size, ep=world.size)) if world.size > 1 else None


def compare(model: Layers, size: int, **keys: Any) -> None:
    """Compare outputs and gradients on ranks that have different tokens with those of the model's own loops."""
    batches = HIDDEN.chunk(size)
    copies = [copy.deepcopy(model) for _ in batches]
    expected = [model(hidden) for hidden in batches]
    sum(out.square().mean() for out in expected).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}

    def on_a_rank() -> dict[str, torch.Tensor | None]:
        rank, mine = current_world().rank, copies[current_world().rank]
        assert len(prepare_experts(mine, ep(), section(**keys))) == 2
        out = mine(batches[rank])
        assert difference(out, expected[rank]) < 1e-6
        out.square().mean().backward()
        return global_gradients(mine)

    ranks = run_ranks(size, on_a_rank)
    for name, gradient in wanted.items():
        found = [rank[name] for rank in ranks if rank.get(name) is not None]
        if gradient is None:
            assert not found, name
            continue
        assert len(found) == (1 if ".experts." in name else size)
        assert difference(torch.stack(found).sum(0), gradient) < 1e-6, name


def global_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """By the name in the whole model."""
    names = {id(p): name for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        held = getattr(module, "experts_held", None)
        if isinstance(held, ExpertsHeld):
            assert held.form == "listed" and isinstance(module, nn.ModuleList)
            for number, expert in zip(held.ids, module, strict=True):
                names.update({id(p): f"{name}.{number}.{inner}" for inner, p in expert.named_parameters()})
    return {names[id(p)]: p.grad for p in model.parameters()}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", STACKED)
def test_stacked_experts_of_transformers_interface_compute_what_their_loop_does(family: str, size: int) -> None:
    model = Layers(family)
    wanted = gradients(model, size)

    def on_a_rank() -> dict[str, tuple[ParameterSpec | None, torch.Tensor]]:
        mine, comm = Layers(family), ep()
        prepare_experts(mine, comm, section())
        parts = divide(mine, comm)
        mine(HIDDEN.chunk(size)[current_world().rank]).square().mean().backward()
        return {name: (parts.get(name), grad_of(p)) for name, p in mine.named_parameters()}

    ranks = run_ranks(size, on_a_rank)
    for name, gradient in wanted.items():
        whole = torch.zeros_like(gradient)
        for rank in ranks:
            part, found = rank[name]
            whole += found if part is None else pasted(found, part)
        assert difference(whole, gradient) < 1e-6, name


@pytest.mark.gloo
def test_processes_over_gloo_compute_what_one_does(gloo: Any) -> None:
    wanted = gradients(Layers("plain"), 2)
    name = "layers.0.mlp.experts.gate_up_proj"
    parts = gloo(2, on_a_gloo_rank, name)
    assert [len(part) for part in parts] == [NUM_EXPERTS // 2] * 2
    assert difference(torch.cat(parts), wanted[name]) < 1e-6


def on_a_gloo_rank(rank: int, size: int, name: str) -> torch.Tensor:
    world = own_world(rank, size, "experts", False)
    with use_world(world):
        mine, comm = Layers("plain"), ep()
        prepare_experts(mine, comm, section())
        divide(mine, comm)
        mine(HIDDEN.chunk(size)[rank]).square().mean().backward()
        found = grad_of(mine.get_parameter(name))
    world.close()
    return found


def gradients(model: nn.Module, size: int) -> dict[str, torch.Tensor]:
    """Of the sum of the losses that ``size`` ranks have of their parts of the tokens."""
    for hidden in HIDDEN.chunk(size):
        model(hidden).square().mean().backward()
    return {name: grad_of(parameter) for name, parameter in model.named_parameters()}


def grad_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def pasted(part: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    whole = torch.zeros(spec.global_shape, dtype=part.dtype)
    paste(part, spec, whole)
    return whole


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", LISTED)
def test_the_preset_of_the_models_type_computes_what_the_loop_does(family: str, size: int) -> None:
    compare(Layers(family), size)


def test_patterns_find_layers_of_any_name() -> None:
    model = Layers("mixtral")
    model.config.model_type = "my_own"
    for block in model.layers:
        block.add_module("mixture", block._modules.pop("block_sparse_moe"))
    compare(model, 2, **PATTERNS, route_norm=True, expert_w1="w1", expert_w2="w2", expert_w3="w3")


def test_a_rank_without_tokens_on_its_experts_takes_part() -> None:
    model = Layers("deepseek_v3")
    for layer in model.layers:
        layer.mlp.gate.e_score_correction_bias.data = torch.tensor(
            [9.0, 9.0, 0.0, 0.0], dtype=torch.float64
        )  # group 0 alone
    compare(model, 2)


def test_one_token_in_all() -> None:
    model = Layers("mixtral")
    mine = copy.deepcopy(model)
    prepare_experts(mine, None, section())
    torch.testing.assert_close(mine(HIDDEN[:1, :1]), model(HIDDEN[:1, :1]), rtol=1e-6, atol=1e-6)


def test_a_rank_holds_its_experts_only() -> None:
    def job() -> tuple[int, list[int]]:
        model = Layers("mixtral")
        prepare_experts(model, ep(), section())
        layer = model.layers[0].block_sparse_moe
        assert type(layer).__name__ == "MixtralLayer" and isinstance(layer, MixtralLayer)
        assert isinstance(layer(HIDDEN), tuple)
        return len(layer.experts), list(layer.experts.experts_held.ids)

    assert run_ranks(2, job) == [(2, [0, 1]), (2, [2, 3])]


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"preset_model": "gpt_oss", "moe_layer_pattern": r".*block_sparse_moe"}, "no attribute 'router', its router"),
        ({"expert_pattern": "ffn"}, "MixtralLayer has no attribute 'ffn', its experts"),
        ({"expert_w1": "gate_proj"}, "Gated has no attribute 'gate_proj'"),
        ({"expert_pattern": "gate"}, "Linear is neither a module with stacked parameters"),
        ({"num_experts_attr": "num_experts_per_tok"}, "4 experts, and num_experts_per_tok of the model's config is 2"),
        ({"top_k_attr": "missing"}, r"its experts for each token are None of 4 \(missing of the model's config\)"),
        ({"top_k": 5}, r"its experts for each token are 5 of 4 \(expert_parallel.top_k\)"),
        ({"shared_experts_pattern": "shared"}, "no attribute 'shared', its shared experts"),
        ({"num_expert_groups": 3, "num_limited_groups": 1}, "4 experts cannot be divided into 3 groups"),
    ],
)
def test_what_does_not_match_is_named_and_the_model_stays(keys: dict[str, Any], what: str) -> None:
    model = Layers("mixtral")
    before = [type(module) for module in model.modules()]
    with pytest.raises(ModelError, match=what):
        prepare_experts(model, None, section(**keys))
    assert [type(module) for module in model.modules()] == before


def test_groups_are_chosen_by_their_highest_score_or_their_two_highest() -> None:
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    by_max = Routing(NUM_EXPERTS, 2, "sigmoid", groups=2, limited_groups=1)
    by_sum = Routing(NUM_EXPERTS, 2, "sigmoid", groups=2, limited_groups=1, group_score="top2_sum")
    assert sorted(by_max.choose(logits)[1][0].tolist()) == [0, 1]
    assert sorted(by_sum.choose(logits)[1][0].tolist()) == [2, 3]


def test_each_rank_loads_its_experts_of_a_list(tmp_path: Path) -> None:
    model = Layers("mixtral")
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    write_huggingface(MemorySource({MODEL: values}), tmp_path)

    def job() -> dict[str, torch.Tensor]:
        mine = Layers("mixtral")
        prepare_experts(mine, ep(), section())
        for parameter in mine.parameters():
            parameter.data.zero_()
        load_hf(mine, tmp_path)
        rename = global_names(mine)
        return {rename(name): value.detach() for name, value in mine.named_parameters()}

    ranks = run_ranks(2, job)
    assert {name for rank in ranks for name in rank} == set(values)
    assert all(torch.equal(value, values[name]) for rank in ranks for name, value in rank.items())
    del values["layers.1.block_sparse_moe.experts.3.w2.weight"]
    write_huggingface(MemorySource({MODEL: values}), tmp_path / "less")
    mine = Layers("mixtral")
    with pytest.raises(
        CheckpointError, match=r"missing in the folder \(1\):\n    layers.1.block_sparse_moe.experts.3.w2"
    ):
        load_hf(mine, tmp_path / "less")


def test_the_config_accepts_the_presets_that_there_are() -> None:
    assert set(NAMES) == set(PRESETS)


@pytest.mark.parametrize("given", ["optimizer", "groups", "parameters"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_clients_optimizer_of_the_whole_model_has_this_ranks_experts_of_a_list(given: str, stage: int) -> None:
    """The script makes it before ``initialize`` divides them."""
    rate = 0.1

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        biases = [p for p in model.parameters() if p.dim() < 2]
        others = [p for p in model.parameters() if p.dim() >= 2]
        return torch.optim.AdamW([{"params": others}, {"params": biases, "lr": rate / 2}], lr=rate, eps=0.1)

    whole = Layers("mixtral")
    alone = copy.deepcopy(whole)
    optimizer = optimizer_of(alone) if given != "parameters" else torch.optim.AdamW(alone.parameters(), rate, eps=0.1)
    for _ in range(3):
        sum(alone(hidden).square().mean() / 2 for hidden in HIDDEN.chunk(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    copies = [copy.deepcopy(whole) for _ in range(2)]

    def job() -> dict[str, torch.Tensor]:
        rank = current_world().rank
        mine = copies[rank]
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": rate, "eps": 0.1, "weight_decay": 0.01}},
        }
        passed: dict[str, Any] = {"model_parameters": mine.parameters()}
        if given != "parameters":
            del config["optimizer"]
            passed = {"optimizer": optimizer_of(mine)}
        if given == "groups":
            passed["model_parameters"] = [{"params": list(mine.parameters())}]
        engine, *_ = shoal.initialize(model=mine, config=config, **passed)
        for _ in range(3):
            engine.backward(engine(HIDDEN.chunk(2)[rank]).square().mean())
            engine.step()
        return engine.module_state_dict()

    expected = alone.state_dict()
    for values in run_ranks(2, job):
        assert values.keys() == expected.keys()
        assert all(difference(value, expected[name]) < 1e-6 for name, value in values.items())


def test_a_clients_parameter_of_another_model_is_an_error_beside_divided_experts() -> None:
    def job() -> None:
        mine = Layers("mixtral")
        optimizer = torch.optim.AdamW([*mine.parameters(), nn.Parameter(torch.ones(3))])
        config = {"train_micro_batch_size_per_gpu": 2, "expert_parallel": {"enabled": True, "autoep_size": 2}}
        with pytest.raises(OptimizerError, match=r"shape \(3,\)\) that is not in the model"):
            shoal.initialize(model=mine, optimizer=optimizer, config=config)

    run_ranks(2, job)
