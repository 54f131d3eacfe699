"""torch's compiler: what it does not trace, and that nothing imports it where nothing is compiled."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import compiler
from shoal.compiler import make_optimizer, untraced, with_cuda_graphs
from shoal.config import load
from shoal.engine.compiled import refuse_cuda_graphs
from shoal.engine.settings import plan_of
from shoal.errors import ModelError
from shoal.optim.lamb import Lamb
from shoal.optim.lion import Lion

TRAINS = """
import sys
import torch
import shoal

for stage, kind in ((0, "AdamW"), (3, "AdamW"), (2, "Lion"), (1, "Adagrad")):
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": stage > 0},
        "optimizer": {"type": kind, "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = shoal.initialize(model=model, config=config)
    for _ in range(2):
        loss = engine(torch.ones(2, 8, dtype=torch.bfloat16 if stage else torch.float32)).float().sum()
        engine.backward(loss)
        engine.step()
    engine.memory_report()
    engine.destroy()
    print(stage, [name for name in ("torch._dynamo", "sympy", "torch._inductor") if name in sys.modules])
"""


def test_training_imports_no_compiler() -> None:
    ended = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout.splitlines()[-4:] == ["0 []", "3 []", "2 []", "1 []"], ended.stderr[-2000:]


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which nobody has compiled."""
    monkeypatch.setattr(compiler, "is_imported", lambda: False)


def trained(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: int = 3) -> torch.Tensor:
    for number in range(steps):
        weight.grad = torch.linspace(-1, 2, weight.numel()).view_as(weight) * (number + 1)
        optimizer.step()
    return weight.detach().clone()


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    (torch.optim.Adam, {"lr": 1e-2, "foreach": True}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.RMSprop, {"lr": 1e-2}),
    (Lion, {"lr": 1e-3}),
    (Lamb, {"lr": 1e-3}),
]


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_an_optimizer_made_here_is_one_made_by_its_class(kind: Any, settings: dict[str, Any]) -> None:
    ours, theirs = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(3, 5))
    made = make_optimizer(kind, [{"params": [ours]}], **settings)
    own = kind([{"params": [theirs]}], **settings)
    assert type(made) is kind
    assert torch.equal(trained(made, ours), trained(own, theirs))
    assert made.param_groups[0].keys() == own.param_groups[0].keys()
    assert "add_param_group" not in vars(made)
    made.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(made.param_groups) == 2


@pytest.mark.usefixtures("not_imported")
def test_hooks_closures_and_schedules_meet_the_step_as_usual() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = make_optimizer(torch.optim.SGD, [weight], lr=1.0)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure() -> torch.Tensor:
        seen.append("closure")
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()  # type: ignore[no-untyped-call] # torch does not annotate it
        return loss

    assert optimizer.step(closure).item() == 4.0  # type: ignore[attr-defined] # the closure's tensor
    schedule.step()  # warns, which is an error here, where it thinks that no step was made
    assert seen == ["before", "closure", "after"]
    assert torch.equal(weight.detach(), torch.zeros(4))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_once_the_compiler_is_there_steps_are_the_class_own(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(4))
    called = []

    class Watched(torch.optim.SGD):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "is_imported", lambda: False)
        optimizer = make_optimizer(Watched, [weight], lr=1.0)
    monkeypatch.setattr(compiler, "is_imported", lambda: True)
    optimizer.register_step_post_hook(lambda *_: called.append(torch.is_grad_enabled()))
    weight.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.zeros(4))
    assert called


@pytest.mark.usefixtures("not_imported")
def test_what_a_class_says_against_its_arguments_is_raised() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        make_optimizer(torch.optim.AdamW, [nn.Parameter(torch.ones(1))], lr=-1.0)


class Graphs:
    def __init__(self) -> None:
        self.num_nodes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.num_nodes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_caller_calls_and_does_not_look_inside() -> None:
    was_traced = []

    @untraced
    def hook(value: torch.Tensor) -> torch.Tensor:
        was_traced.append(torch.compiler.is_compiling())
        return value * 2

    def model(value: torch.Tensor) -> torch.Tensor:
        return hook(value + 1) + 3

    graphs = Graphs()
    torch._dynamo.reset()
    try:
        compiled = torch.compile(model, backend=graphs)
        results = [compiled(torch.full((2,), float(number))) for number in range(4)]
    finally:
        torch._dynamo.reset()
    assert [result.tolist() for result in results] == [[2.0 * n + 5] * 2 for n in range(4)]
    assert was_traced == [False] * 4
    assert graphs.num_nodes == [1, 1]  # before the call and after it; nothing of the call, and nothing twice


def compiled_model(how: str, **settings: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if how == "wrapped":
        model[1] = torch.compile(model[1], **settings)
    elif how == "in place":
        model[1].compile(**settings)
    else:
        model[1].forward = torch.compile(model[1].forward, **settings)
    return model


@pytest.mark.parametrize("how", ["wrapped", "in place", "forward"])
@pytest.mark.parametrize(
    ("settings", "has_graphs"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({}, False),
        ({"backend": "eager"}, False),
    ],
)
def test_modules_with_cuda_graphs_are_found(how: str, settings: dict[str, Any], has_graphs: bool) -> None:
    model = compiled_model(how, **settings)
    assert with_cuda_graphs(model, torch.device("cuda")) == (["1"] if has_graphs else [])
    assert with_cuda_graphs(model, torch.device("cpu")) == []


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("ZeRO stage 3 frees parameters", {"zero_optimization": {"stage": 3}}),
    ("pipeline stages send", {"parallel": {"pp": 2}}),
    ("offload_activation copies", {"offload_activation": {"device": "cpu"}}),
    ("tp, sp: collectives divide", {"parallel": {"tp": 2, "sp": 2}}),
    ("cp: collectives divide", {"parallel": {"cp": 2}}),
    ("experts: collectives divide", {"expert_parallel": {"enabled": True}}),
    ("progressive_layer_drop leaves", {"progressive_layer_drop": {"enabled": True}}),
]


@pytest.mark.parametrize(("why", "sections"), REFUSED)
def test_cuda_graphs_are_refused_with_the_reason(why: str, sections: dict[str, Any]) -> None:
    settings = load({"train_micro_batch_size_per_gpu": 2, **sections}, world_size=4)
    plan = plan_of(settings, 4)
    refuse_cuda_graphs([], settings, plan)
    with pytest.raises(ModelError, match=r"2 modules are compiled with CUDA graphs.*: 1, 2\.") as caught:
        refuse_cuda_graphs(["1", "2"], settings, plan)
    assert caught.value.code == "model-cuda-graphs"
    assert str(caught.value.where).startswith(why)


def test_cuda_graphs_are_for_stages_0_to_2() -> None:
    for stage in range(3):
        asked = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        settings = load(asked, world_size=4)
        refuse_cuda_graphs(["1"], settings, plan_of(settings, 4))


def test_an_engine_refuses_cuda_graphs_at_the_start_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_has_graphs", lambda _device: True)  # as on a GPU
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    with pytest.raises(ModelError, match="CUDA graphs"):
        shoal.initialize(model=compiled_model("in place", mode="reduce-overhead"), config=config)
    engine, *_ = shoal.initialize(model=nn.Linear(2, 2), config=config)
    with pytest.raises(ModelError, match=r"CUDA graphs.*: the whole model"):
        engine.compile(compile_kwargs={"mode": "reduce-overhead"})
    assert not engine.is_compiled
    engine.destroy()


def test_no_cuda_graph_has_an_operator_of_shoals() -> None:
    for name in ("comm.autograd", "parallel.kept_graph", "parallel.sequence.attention", "parallel.expert.dispatch"):
        importlib.import_module(f"shoal.{name}")
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("shoal::")]
    assert len(names) >= 5
    for name in names:
        operator = getattr(torch.ops.shoal, name.removeprefix("shoal::").split(".")[0]).default
        assert torch.Tag.cudagraph_unsafe in operator.tags, name
