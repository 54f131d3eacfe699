"""Optimizers by name from a configuration: DeepSpeed's names, defaults and quirks, and all mistakes in one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.config import ConfigProblems, load
from shoal.errors import ConfigError, OptimizerError
from shoal.optim.build import build, torch_optimizers
from shoal.optim.elementwise import check
from shoal.optim.lamb import Lamb
from shoal.optim.lion import Lion
from shoal.optim.muon import Muon
from shoal.optim.sums_values import SumsValues


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2))]


def built(name: str, settings: dict[str, Any] | None = None, groups: Any = None) -> torch.optim.Optimizer:
    return build(name, settings or {}, params() if groups is None else groups)[0]


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("Adam", torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ("AdamW", torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ("SGD", torch.optim.SGD, {"lr": 1e-3, "momentum": 0, "weight_decay": 0}),
        ("Adagrad", torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0}),
        ("Lion", Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("Lamb", Lamb, {"lr": 1e-3, "max_coeff": 10.0, "min_coeff": 0.01, "eps": 1e-8, "bias_correction": True}),
        ("NAdam", torch.optim.NAdam, {"lr": 2e-3}),
    ],
)
@pytest.mark.parametrize("spelling", [str, str.lower, str.upper])
def test_names_in_any_case_give_deepspeeds_defaults(
    name: str, kind: type, settings: dict[str, Any], spelling: Any
) -> None:
    optimizer = built(spelling(name))
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in settings} == settings


def test_adam_without_adam_w_mode_is_adam_with_l2() -> None:
    optimizer, notes = build("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, params())
    assert type(optimizer) is torch.optim.Adam
    assert notes == []


def test_adam_says_that_it_is_adamw() -> None:
    _, notes = build("Adam", {}, params())
    assert notes == ['"Adam" is AdamW (decoupled weight decay), as in DeepSpeed; set "adam_w_mode": false for L2.']


def test_adamw_stays_adamw() -> None:
    optimizer, notes = build("AdamW", {"adam_w_mode": False}, params())
    assert type(optimizer) is torch.optim.AdamW
    assert len(notes) == 1
    assert "has no effect" in notes[0]


def test_parameters_without_effect_are_noted() -> None:
    _, notes = build("AdamW", {"torch_adam": True, "fp32_optimizer_states": True, "bias_correction": True}, params())
    assert notes == [
        "optimizer.params.torch_adam = True has no effect: torch's kernels are used in either case.",
        "optimizer.params.fp32_optimizer_states = True has no effect: "
        "set precision.state_dtype or bf16.bf16_optimizer_states instead.",
        "optimizer.params.weight_decay is 0.01, the default of torch's AdamW (torch_adam).",
    ]


def test_the_given_parameters_are_left_as_they_were() -> None:
    settings = {"torch_adam": True, "adam_w_mode": True, "betas": [0.8, 0.9]}
    built("Adam", settings)
    assert settings == {"torch_adam": True, "adam_w_mode": True, "betas": [0.8, 0.9]}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_the_fused_kernel_is_used_where_torch_has_it(name: str) -> None:
    assert built(name).param_groups[0]["fused"] is True


def test_a_chosen_implementation_is_kept() -> None:
    assert not built("AdamW", {"foreach": True}).param_groups[0]["fused"]
    assert built("AdamW", {"fused": False}).param_groups[0]["fused"] is False


def test_every_optimizer_that_build_makes_may_run_on_shards() -> None:
    for name in torch_optimizers():
        if name in ("LBFGS", "SparseAdam", "Adafactor"):
            with pytest.raises(OptimizerError, match="not elementwise"):
                built(name)
        elif name != "Muon":
            assert check(built(name)) == "elementwise"


def load_optimizer(name: str, **params: Any) -> None:
    load({"optimizer": {"type": name, "params": params}})


@pytest.mark.parametrize("name", ["OneBitAdam", "OnebitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_one_bit_optimizers_take_deepspeeds_parameters(name: str) -> None:
    params = {"lr": 1e-3, "cuda_aware": False, "comm_backend_name": "nccl", "amsgrad": False, "eps_inside_sqrt": False}
    load_optimizer(name, **params)
    optimizer, notes = build(name, params, [torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, SumsValues)
    assert [note.split(" has no effect")[0] for note in notes] == [
        "optimizer.params.cuda_aware = False",
        "optimizer.params.comm_backend_name = nccl",
    ]


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_what_a_one_bit_optimizer_cannot_do_is_said_when_the_config_is_loaded(name: str) -> None:
    for key in ("amsgrad", *(["eps_inside_sqrt"] if name != "OneBitLamb" else [])):
        with pytest.raises(ConfigProblems, match=rf"params.{key}: true, which {name} does not have"):
            load_optimizer(name, **{key: True})
    for stage, why in ((1, "gathers whole parameters"), (2, "in each micro-batch"), (3, "in each micro-batch")):
        with pytest.raises(ConfigProblems, match=f"zero_optimization.stage: {stage}, but {name} sums .*{why}"):
            load({"optimizer": {"type": name, "params": {}}, "zero_optimization": {"stage": stage}})
    with pytest.raises(ConfigProblems, match=f'wire.reduce: "int8", but {name} decides in which format'):
        load({"optimizer": {"type": name, "params": {}}, "wire": {"reduce": "int8"}})


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigProblems, match=r"""no optimizer "Addam".\n.*\n  do: did you mean 'Adam'"""):
        load_optimizer("Addam")
    with pytest.raises(OptimizerError, match=r"there is no optimizer 'Addam'"):
        built("Addam")


def test_all_wrong_parameters_are_one_error() -> None:
    wrong = {"learning_rate": 1, "beta": 1, "lr": "fast", "eps": -1.0, "betas": [0.9], "max_grad_norm": 2.0}
    with pytest.raises(ConfigProblems) as caught:
        load({"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {**wrong, "weight_decay": "auto"}}})
    text = str(caught.value)
    for part in (
        "optimizer.params.max_grad_norm: 2, but gradient_clipping is 1, and gradients are clipped once.",
        "optimizer.params.learning_rate: no such key in optimizer.params.",
        "optimizer.params.beta: no such key in optimizer.params. -> did you mean 'betas'",
        'optimizer.params.lr: "fast" is not a number, at least 0.',
        "optimizer.params.eps: -1 is not a number, at least 0.",
        "optimizer.params.betas: [0.9] is not a list of 2, each a number, at least 0 and less than 1.",
    ):
        assert part in text
    with pytest.raises(ConfigError, match=r'optimizer\.params\.lr: "auto" cannot be derived here'):
        load({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}).params_of("optimizer")


def test_what_the_constructor_refuses_is_an_error_of_ours() -> None:
    for params in ({"learning_rate": 1}, {"lr": "fast"}, {"eps": -1.0}, {"betas": [0.9]}, {"max_grad_norm": 1.0}):
        with pytest.raises(OptimizerError, match=r"optimizer\.params of 'AdamW'"):
            built("AdamW", params)
    for params in ({"amsgrad": True}, {"max_coeff": -1.0}, {"fused": True}):
        with pytest.raises(OptimizerError):
            built("Lamb", params)


def test_a_mistake_that_torch_finds_is_reported_as_ours() -> None:
    with pytest.raises(OptimizerError, match="Nesterov momentum requires"):
        built("SGD", {"nesterov": True})


def test_no_parameters_are_an_error_of_ours() -> None:
    with pytest.raises(OptimizerError, match="got no parameters"):
        built("AdamW", {}, [])


def test_groups_keep_their_dicts_and_their_own_settings() -> None:
    first, second = params()
    groups = [{"params": first, "lr": 0.5}, {"params": (p for p in [second]), "weight_decay": 0.3}]
    optimizer = built("AdamW", {"lr": 0.1}, groups)
    assert optimizer.param_groups[0] is groups[0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.3]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 4)
        self.hidden = torch.nn.Linear(4, 4)
        self.lm_head = torch.nn.Linear(4, 5, bias=False)


def test_muon_gets_hidden_matrices_and_adamw_the_rest() -> None:
    model = Model()
    names = {id(p): name for name, p in model.named_parameters()}
    settings = {"lr": 0.1, "muon_lr": 0.02, "adam_lr": 0.003, "momentum": 0.9, "weight_decay": 0.1}
    optimizer, notes = build("Muon", settings, model.parameters(), names=names)
    assert type(optimizer) is Muon
    muon, adam = optimizer.param_groups
    assert (muon["use_muon"], muon["lr"], muon["momentum"], muon["weight_decay"]) == (True, 0.02, 0.9, 0.1)
    assert (adam["use_muon"], adam["lr"], adam["weight_decay"]) == (False, 0.003, 0.1)
    assert [names[id(p)] for p in muon["params"]] == ["hidden.weight"]
    assert [names[id(p)] for p in adam["params"]] == ["embed_tokens.weight", "hidden.bias", "lm_head.weight"]
    assert notes == ["Muon updates 1 matrices; 3 other parameters get AdamW."]


def test_muon_takes_names_from_named_parameters_and_keeps_a_groups_rate() -> None:
    model = Model()
    optimizer = built("Muon", {"muon_lr": 0.02}, [{"params": list(model.named_parameters()), "lr": 0.7}])
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.7]
    assert optimizer.param_groups[0]["params"][0] is model.hidden.weight


def test_muon_obeys_groups_that_say_what_they_use() -> None:
    first, second = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    groups = [{"params": [first], "use_muon": True}, {"params": [second], "use_muon": False}]
    optimizer = built("Muon", {}, groups)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    assert optimizer.param_groups[0] is groups[0]


def test_muon_has_both_groups_where_a_model_has_no_matrix_or_nothing_else() -> None:
    """A pipeline stage may have only one kind of parameters; the groups are those of the whole model."""
    for shape in ((4, 4), (4,)):
        parameter = ("hidden", torch.nn.Parameter(torch.ones(shape)))
        muon, adam = built("Muon", {"muon_lr": 0.02, "adam_lr": 0.003}, [parameter]).param_groups
        assert [len(muon["params"]), len(adam["params"])] == ([1, 0] if len(shape) == 2 else [0, 1])
        assert [(group["use_muon"], group["lr"]) for group in (muon, adam)] == [(True, 0.02), (False, 0.003)]


def test_muon_without_names_asks_for_them() -> None:
    with pytest.raises(OptimizerError, match="Muon got no name for parameter 0 of group 0"):
        built("Muon")


def test_muons_wrong_settings_are_one_error() -> None:
    with pytest.raises(ConfigProblems) as caught:
        load_optimizer("Muon", ns_method="svd", muon_lr="x", use_muon=True)
    for part in ('ns_method: "svd" is not', 'muon_lr: "x" is not', "use_muon: no such key"):
        assert part in str(caught.value)
    with pytest.raises(ConfigProblems, match="adam_w_mode: false, but"):
        load_optimizer("Muon", adam_w_mode=False)
    hidden = [("hidden", torch.nn.Parameter(torch.ones(2, 2)))]
    for settings in ({"ns_method": "svd"}, {"adam_w_mode": False}, {"lr": -1.0}):
        with pytest.raises(OptimizerError):
            built("Muon", settings, hidden)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_without_main_parameters_updates_every_element(momentum: float, dtype: torch.dtype) -> None:
    for numel in (5, 64, 66, 257):
        parameter = torch.nn.Parameter(torch.ones(numel, dtype=dtype))
        optimizer, _ = build("SGD", {"lr": 0.5, "momentum": momentum}, [parameter], has_master=False)
        for _ in range(2):
            parameter.grad = torch.full((numel,), 0.25, dtype=dtype)
            optimizer.step()
        expected = 1 - 0.5 * 0.25 * (2 + momentum)
        assert torch.allclose(parameter.detach().float(), torch.full((numel,), expected), atol=0.004)


def test_sgd_of_main_parameters_is_fused() -> None:
    optimizer, _ = build("SGD", {"lr": 0.5}, [torch.nn.Parameter(torch.ones(4))])
    assert optimizer.param_groups[0]["fused"]


def test_torchs_adamw_has_a_decay_where_none_is_given() -> None:
    for name, given, decay in (
        ("AdamW", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0.0),
        ("AdamW", {"torch_adam": True, "weight_decay": 0.0}, 0.0),
        ("AdamW", {"torch_adam": False}, 0.0),
    ):
        optimizer, _ = build(name, given, params())
        assert optimizer.param_groups[0]["weight_decay"] == decay
