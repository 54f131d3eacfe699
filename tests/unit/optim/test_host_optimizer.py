"""The host's step gives the bits of the optimizer's own step, on every path."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from shoal.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shoal.errors import OptimizerError
from shoal.optim.build import build
from shoal.optim.host import Choice, HostStep, UpdatePath, choose_path
from shoal.optim.host_rules import Rule, RuleName, host_note, kind_of
from shoal.optim.lamb import Lamb
from shoal.optim.lion import Lion
from shoal.optim.muon import Muon

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUMEL = 3 * 4096 + 37  # whole blocks, a last one that is short, and a tail that fills no vector

RULES: dict[str, tuple[RuleName, dict[str, Any]]] = {
    "Adam": ("Adam", {"adam_w_mode": False, "lr": 3e-3, "weight_decay": 0.1}),
    "Adam without decay": ("Adam", {"adam_w_mode": False, "betas": [0.3, 0.9]}),
    "AdamW": ("AdamW", {"lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}),
    "AdamW, amsgrad": ("AdamW", {"amsgrad": True, "maximize": True}),
    "Adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.1}),
    "Lion": ("Lion", {"lr": 3e-3, "weight_decay": 0.1}),
    "Lion without decay": ("Lion", {"lr": 3e-3}),
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD, momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD, nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam, not fused": ("Adam", {"adam_w_mode": False, "lr": 3e-3, "weight_decay": 0.1, "fused": False}),
    "AdamW, not fused": ("AdamW", {"lr": 3e-3, "weight_decay": 0.1, "amsgrad": True, "fused": False}),
    "AdamW, foreach": ("AdamW", {"lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "foreach": True}),
    "Adagrad, not fused": ("Adagrad", {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.1, "fused": False}),
    "SGD, not fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True, "fused": False}),
    "SGD, foreach, no momentum": ("SGD", {"lr": 0.1, "weight_decay": 0.1, "foreach": True}),
}


def optimizer_of(name: str, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    kind, params = RULES[name]
    return build(kind, params, [parameter])[0]


def gradients(numel: int, dtype: torch.dtype, number: int = 3) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-6, 1, numel)
    return [(torch.randn(numel, generator=random) * sizes).to(dtype) for _ in range(number)]


def by_the_optimizer(
    name: str, start: torch.Tensor, grads: list[torch.Tensor], parameter: torch.dtype | None, gradient_scale: float
) -> list[torch.Tensor]:
    """The step without offload for one part: cast, scale, ``step()``, round."""
    main = torch.nn.Parameter(start.clone())
    optimizer = optimizer_of(name, main)
    for grad in grads:
        main.grad = grad.float().clone()
        if gradient_scale != 1.0:
            main.grad.mul_(gradient_scale)
        optimizer.step()
    state = [value for key, value in sorted(optimizer.state[main].items()) if value is not None and value.dim() == 1]
    rounded = [] if parameter is None else [main.detach().to(parameter)]
    return [main.detach(), *state, *rounded]


def by_the_host(
    step: HostStep,
    name: str,
    start: torch.Tensor,
    grads: list[torch.Tensor],
    parameter: torch.dtype | None,
    gradient_scale: float,
) -> list[torch.Tensor]:
    kind, _ = RULES[name]
    main = start.clone()
    hyper = optimizer_of(name, torch.nn.Parameter(main)).param_groups[0]
    states = {key: torch.zeros_like(main) for key in Rule.of(kind, hyper, 1).state_names}
    target = None if parameter is None else torch.zeros(start.numel(), dtype=parameter)
    for number, grad in enumerate(grads, start=1):
        before = grad.clone()
        rule = Rule.of(kind, hyper, number)
        step.start(rule, main, states, grad, target, gradient_scale=gradient_scale).wait()
        assert torch.equal(grad.nan_to_num(), before.nan_to_num())
    return [main, *(states[key] for key in sorted(states))] + ([] if target is None else [target])


def assert_equal_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    differing = [int((a != b).sum()) for a, b in zip(found, expected, strict=True)]
    assert differing == [0] * len(expected)


@pytest.fixture(params=["threads", "blocks", "plain"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostStep]:
    monkeypatch.setattr("shoal.optim.host.TEAM_BLOCK_NUMEL", 4096)
    step = HostStep(request.param, num_threads=2, block_numel=4096)
    yield step
    step.close()


@pytest.mark.parametrize("name", RULES)
def test_every_path_gives_the_bits_of_the_optimizers_own_step(step: HostStep, name: str) -> None:
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    for gradient, parameter, gradient_scale in product((BF16, FP32), (BF16, None), (1.0, 0.37)):
        grads = gradients(NUMEL, gradient)
        expected = by_the_optimizer(name, start, grads, parameter, gradient_scale)
        assert_equal_bits(by_the_host(step, name, start, grads, parameter, gradient_scale), expected)


@pytest.mark.parametrize(("gradient", "parameter"), [(FP16, FP16), (FP16, FP32), (FP32, FP32)])
def test_other_dtypes_give_the_same_bits_too(step: HostStep, gradient: torch.dtype, parameter: torch.dtype) -> None:
    start, grads = torch.linspace(-1, 1, NUMEL), gradients(NUMEL, gradient)
    expected = by_the_optimizer("AdamW", start, grads, parameter, 1.0)
    assert_equal_bits(by_the_host(step, "AdamW", start, grads, parameter, 1.0), expected)


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 4096, 4097])
def test_ranges_of_any_length_are_updated(step: HostStep, numel: int) -> None:
    start, grads = torch.linspace(-1, 1, numel), gradients(numel, BF16)
    expected = by_the_optimizer("AdamW", start, grads, BF16, 1.0)
    assert_equal_bits(by_the_host(step, "AdamW", start, grads, BF16, 1.0), expected)


def test_what_is_not_finite_goes_through_as_in_torch(step: HostStep) -> None:
    start = torch.zeros(64)
    grad = torch.zeros(64, dtype=BF16)
    grad[:3] = torch.tensor([float("inf"), float("nan"), -0.0])
    found = by_the_host(step, "AdamW", start, [grad], BF16, 1.0)
    assert found[0][:3].isnan().tolist() == [True, True, False]
    assert not found[0][2:].any()


def test_ranges_in_flight_do_not_disturb_each_other_and_the_last_wait_sees_them_all() -> None:
    step = HostStep("threads", num_threads=3, block_numel=256)
    hyper = optimizer_of("AdamW", torch.nn.Parameter(torch.zeros(1))).param_groups[0]
    start, (grad, *_) = torch.linspace(-1, 1, NUMEL), gradients(NUMEL, BF16)
    expected = by_the_optimizer("AdamW", start, [grad], BF16, 1.0)
    found, works = [], []
    for _ in range(8):
        tensors = [start.clone(), torch.zeros(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL, dtype=BF16)]
        states = {"exp_avg": tensors[1], "exp_avg_sq": tensors[2]}
        works.append(step.start(Rule.of("AdamW", hyper, 1), tensors[0], states, grad, tensors[3]))
        found.append(tensors)
    for work in works:
        work.wait()
    for tensors in found:
        assert_equal_bits(tensors, expected)
    step.close()


def test_the_threads_leave_torchs_own_number_of_threads_as_it_is() -> None:
    number = torch.get_num_threads()
    step = HostStep("threads", num_threads=3, block_numel=64)
    by_the_host(step, "AdamW", torch.zeros(640), gradients(640, BF16, 1), BF16, 1.0)
    assert step._threads is not None
    inside = [step._threads._pool.submit(torch.get_num_threads).result() for _ in range(6)]
    assert inside == [1] * 6
    assert torch.get_num_threads() == number
    step.close()


def test_a_range_split_as_in_the_step_without_offload_has_the_same_bits() -> None:
    """An optimizer over parts of 2048 elements against one update in blocks of 1024."""
    start, grads = torch.linspace(-1, 1, 8192 + 128), gradients(8192 + 128, BF16)
    pieces = [slice(low, low + 2048) for low in range(0, 8192 + 128, 2048)]
    expected = [by_the_optimizer("AdamW", start[p], [grad[p] for grad in grads], BF16, 0.5) for p in pieces]
    step = HostStep("threads", num_threads=2, block_numel=1024)
    found = by_the_host(step, "AdamW", start, grads, BF16, 0.5)
    step.close()
    assert_equal_bits(found, [torch.cat(parts) for parts in zip(*expected, strict=True)])


def test_the_path_is_measured_once_and_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.optim.host.TRIAL_NUMEL", 1 << 20)
    choose_path.cache_clear()
    threads = torch.get_num_threads()
    with caplog.at_level(logging.INFO, "shoal"):
        first = choose_path("AdamW", BF16, BF16, threads)
        second = choose_path("AdamW", BF16, BF16, threads)
        other = choose_path("Lion", BF16, None, threads + 1)
    choose_path.cache_clear()
    assert first is second
    assert first.path == min(first.milliseconds, key=lambda path: first.milliseconds[path])
    assert other == Choice("threads", other.milliseconds)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" on ")[0] for line in lines] == [
        f"host optimizer: AdamW takes the path {first.path!r}",
        "host optimizer: Lion takes the path 'threads'",
    ]


def test_auto_takes_the_measured_path(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[UpdatePath] = ["plain"]
    monkeypatch.setattr("shoal.optim.host.choose_path", lambda *_: Choice(chosen[0], {}))
    step = HostStep("auto", num_threads=2)
    by_the_host(step, "AdamW", torch.zeros(640), gradients(640, BF16, 1), BF16, 1.0)
    assert (step._threads, step.scratch_nbytes) == (None, 640 * 4)
    step.close()
    assert step.scratch_nbytes == 0


def test_the_rule_of_an_optimizer_is_named_only_where_the_bits_would_be_the_same() -> None:
    weight = torch.nn.Parameter(torch.zeros(8))

    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Named(torch.optim.AdamW):
        """As clients have them: with another constructor, or none."""

    found = {name: kind_of(optimizer_of(name, weight)) for name in RULES}
    assert found == {name: kind for name, (kind, _) in RULES.items()}
    assert kind_of(torch.optim.AdamW([weight])) == "AdamW"
    assert kind_of(torch.optim.AdamW([weight], lr=torch.tensor(1e-3))) is None  # its arithmetic is a tensor's
    assert kind_of(torch.optim.Adagrad([weight], differentiable=True)) is None
    assert kind_of(Own([weight], fused=True)) is None
    assert kind_of(Named([weight], fused=True)) == "AdamW"
    host = DeepSpeedCPUAdam([weight])  # what Accelerate makes of AdamW, with offload
    assert kind_of(host) is None
    host.may_cast = False
    assert kind_of(host) == "AdamW"
    assert kind_of(FusedAdam([weight], adam_w_mode=False)) == "Adam"
    assert kind_of(torch.optim.RMSprop([weight])) is None


@pytest.mark.parametrize(
    ("optimizer", "note"),
    [
        (torch.optim.AdamW([torch.nn.Parameter(torch.zeros(8))], fused=True), None),
        (Lion([torch.nn.Parameter(torch.zeros(8))]), None),
        (torch.optim.AdamW([torch.nn.Parameter(torch.zeros(8))]), "AdamW was built without fused=True"),
        (
            torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(8))]),
            "RMSprop.step() runs unchanged on the host; the step",
        ),
        (Lamb([torch.nn.Parameter(torch.zeros(8))]), "Lamb.step() runs unchanged on the host; the step waits for it"),
        (Muon([torch.nn.Parameter(torch.zeros(8, 8))]), "Muon's matrices are orthogonalized on the device"),
    ],
)
def test_an_update_that_is_slow_on_the_host_is_named(optimizer: torch.optim.Optimizer, note: str | None) -> None:
    found = host_note(optimizer)
    assert found is None if note is None else found is not None and found.startswith(f"offload_optimizer: {note}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"main": torch.zeros(8, dtype=BF16)}, "main is torch.bfloat16 of shape (8,)"),
        ({"gradient": torch.zeros(7)}, "gradient is torch.float32 of shape (7,)"),
        ({"gradient": torch.zeros(8, dtype=torch.float64)}, "gradient is torch.float64"),
        ({"parameter": torch.zeros(16)[::2]}, "and stride (2,) on cpu"),
        ({"states": {"exp_avg": torch.zeros(8)}}, "AdamW needs the state 'exp_avg_sq', and got ['exp_avg']"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "main": torch.zeros(8),
        "states": {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)},
        "gradient": torch.zeros(8),
        "parameter": torch.zeros(8),
    } | change
    hyper = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    with pytest.raises(OptimizerError) as caught:
        HostStep("plain").start(Rule.of("AdamW", hyper, 1), **arguments)
    assert caught.value.code == "host-step-tensors"
    assert message in str(caught.value)


def test_a_rule_or_a_number_that_is_not_there_is_refused() -> None:
    unknown: Any = "Adamax"
    with pytest.raises(OptimizerError, match=r"has no rule 'Adamax'"):
        Rule.of(unknown, {}, 1)
    with pytest.raises(OptimizerError, match=r"hyperparameters of SGD have no 'weight_decay'"):
        Rule.of("SGD", {"lr": 0.1}, 1)
