"""Adam and AdamW in one kernel, interpreted: against the formula in fp64, and against torch's optimizers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.device import Device
from shoal.kernels.adam import adam
from shoal.optim import one_kernel_adam
from shoal.optim.one_kernel_adam import AdamRange, takes, update
from shoal.optim.variants import AdamWithBias
from tests.helpers.models import Plain
from tests.helpers.training import config, finish, run_steps, start

NUMEL = 2500  # two whole programs and a part of one
UNIT = 2.0**-24  # the largest relative error of one rounding to fp32


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_kernel_adam, "MIN_NUMEL", 1)


CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    (torch.optim.Adam, {"fused": True, "weight_decay": 0.1, "maximize": True}),
    (AdamWithBias, {"fused": True, "bias_correction": False, "decoupled_weight_decay": True}),
]


def gradient_of(step: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step)) * torch.logspace(-6, 2, NUMEL)
    made[: NUMEL // 7] = 0.0
    return made.to(dtype)


def exact_moments(group: dict[str, Any], before: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    """After a step, in fp64 from given ones; the gradient with the penalty of Adam's weight decay too."""
    main, average, square = (value.double() for value in before)
    beta1, beta2 = group["betas"]
    gradient = -gradient if group["maximize"] else gradient
    if not group["decoupled_weight_decay"]:
        gradient = gradient + group["weight_decay"] * main
    return [beta1 * average + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient.square()]


def exact_change(group: dict[str, Any], moments: list[torch.Tensor], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step subtracts from decayed main parameters, in fp64 from the moments; and its derivative by the first."""
    is_corrected = group.get("bias_correction", True)
    first, second = (1 - beta**step if is_corrected else 1.0 for beta in group["betas"])
    rate = group["lr"] / first / (moments[1].double().sqrt() / second**0.5 + group["eps"])
    return rate * moments[0].double(), rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_each_result_is_a_few_roundings_from_the_exact_one_and_from_torchs(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """A moment is off by at most 4 roundings of its larger operand; a main parameter, from what the moments give, by 3
    of itself (its decay, the product, the difference) and 8 of its change.
    """
    main = torch.nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(9)))
    optimizer = kind([main], lr=0.01, **settings)
    group, parameter = optimizer.param_groups[0], torch.empty(NUMEL, dtype=torch.bfloat16)
    for step in range(1, 5):
        gradient, scale = gradient_of(step, dtype), 0.37
        kept = gradient.clone()
        part = AdamRange(main, gradient, parameter)
        assert takes(optimizer, group, part)
        state = optimizer.state[main]
        moments = [state[key].clone() if state else torch.zeros(NUMEL) for key in ("exp_avg", "exp_avg_sq")]
        before = [main.detach().clone(), *moments]
        update(optimizer, group, [part], scale)
        assert torch.equal(gradient, kept) and float(state["step"]) == step

        found = [state["exp_avg"], state["exp_avg_sq"]]
        right = exact_moments(group, before, gradient.double() * scale)
        scaled = (gradient.double() * scale).abs()
        decay = 1.0
        if group["decoupled_weight_decay"]:
            decay -= group["lr"] * group["weight_decay"]
        else:
            scaled = scaled + group["weight_decay"] * before[0].double().abs()
        change, rate = exact_change(group, found, step)
        found.append(main.detach())
        right.append(before[0].double() * decay - change)
        bounds = [
            4 * UNIT * torch.maximum(scaled, before[1].double().abs()),
            4 * UNIT * torch.maximum(scaled.square(), before[2].double()) + 2.0**-149,
            3 * UNIT * torch.maximum(right[2].abs(), before[0].double().abs()) + 8 * UNIT * change.abs(),
        ]
        theirs = torchs(kind, settings, before, gradient.float() * scale, step)
        for name, mine, want, other, bound in zip(
            ("exp_avg", "exp_avg_sq", "main"), found, right, theirs, bounds, strict=True
        ):
            worst = ((mine.double() - want).abs() / bound.clamp(min=1e-60)).max()
            assert worst <= 1, f"{name}: {worst} of its bound"
            if name == "main":  # torch's comes from its own moments
                bound = bound + 2 * rate * bounds[0] + 4 * UNIT * change.abs()
            assert ((mine.double() - other.double()).abs() <= 2 * bound).all(), name
        assert torch.equal(parameter, main.detach().to(torch.bfloat16)) or is_cut_off(parameter, main)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.9999), (0.0, 0.98)])
def test_bias_corrections_have_the_bits_of_torchs_in_fp64(betas: tuple[float, float]) -> None:
    """At counts up to the largest that fp32 tells apart."""
    for count in (1, 2, 3, 10, 777, 20_001, 99_999, 2**24 - 1):
        first, second = (1 - torch.pow(beta, torch.tensor(count, dtype=torch.float64)) for beta in betas)
        rate, root = (each.float().expand(NUMEL) for each in (3e-4 / first, second.sqrt()))
        main, average, square = (gradient_of(seed, torch.float32) for seed in (1, 2, 3))
        square = square.abs()
        grad = gradient_of(count, torch.bfloat16).float()
        expected = [average + (1 - betas[0]) * (grad - average), square * betas[1] + (1 - betas[1]) * grad * grad]
        divisor = expected[1].double().sqrt().float() / root + 1e-8  # torch's square roots in fp32 are not all exact
        expected.append(main - rate * expected[0] / divisor)
        adam(
            main, (average, square), grad.bfloat16(), None, torch.tensor(float(count)), gradient_scale=1.0, lr=3e-4,
            betas=betas, eps=1e-8, weight_decay=0.0, is_decoupled=True, is_corrected=True,
        )  # fmt: skip
        for mine, right in zip((average, square, main), expected, strict=True):
            assert torch.equal(mine, right), count


def is_cut_off(parameter: torch.Tensor, main: torch.Tensor) -> bool:
    """The interpreter cuts bf16 off where a GPU rounds it."""
    bits = main.detach().view(torch.int32) & -65536
    return torch.equal(parameter.float().view(torch.int32), bits)


def torchs(
    kind: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    before: list[torch.Tensor],
    gradient: torch.Tensor,
    step: int,
) -> list[torch.Tensor]:
    """The same step by the optimizer's own ``step()``."""
    main = torch.nn.Parameter(before[0].clone())
    optimizer = kind([main], lr=0.01, **settings)
    state = optimizer.state[main]
    state["step"], state["exp_avg"], state["exp_avg_sq"] = torch.tensor(step - 1.0), *(x.clone() for x in before[1:])
    main.grad = gradient
    optimizer.step()
    return [state["exp_avg"], state["exp_avg_sq"], main.detach()]


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_without_a_kernel_a_range_has_the_bits_of_torchs_fused_operator(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    before = [torch.randn(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)]
    main = torch.nn.Parameter(before[0].clone())
    optimizer = kind([main], lr=0.01, **settings)
    parameter = torch.empty(NUMEL, dtype=torch.bfloat16)
    part = AdamRange(main, gradient_of(1, torch.bfloat16), parameter)
    update(optimizer, optimizer.param_groups[0], [part], 0.37)
    theirs = torchs(kind, settings | {"fused": True}, before, part.gradient.float() * 0.37, 1)
    assert torch.equal(main.detach(), theirs[2]) and torch.equal(parameter, theirs[2].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.1)}),
        (torch.optim.NAdam, {}),
    ],
)
def test_other_optimizers_and_settings_are_left_to_torch(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    main = torch.nn.Parameter(torch.zeros(8))
    optimizer = kind([main], **settings)
    assert not takes(optimizer, optimizer.param_groups[0], AdamRange(main, torch.zeros(8), None))


def test_of_a_wide_parameter_nothing_but_moments_and_main_parameters_is_written() -> None:
    """A range without a parameter of its own, and one in the middle of a buffer: its neighbours keep their values."""
    flat, gradient = torch.ones(3000), torch.full((3000,), 0.5)
    main = torch.nn.Parameter(flat[100:2900])
    optimizer = torch.optim.AdamW([main], lr=0.1, weight_decay=0.0)
    update(optimizer, optimizer.param_groups[0], [AdamRange(main, gradient[100:2900], None)], 1.0)
    assert (flat[:100] == 1).all() and (flat[2900:] == 1).all()
    torch.testing.assert_close(flat[100:2900], torch.full((2800,), 0.9))


@pytest.mark.parametrize(("stage", "is_bf16", "steps"), [(1, True, 1), (3, True, 1), (1, False, 3), (3, False, 3)])
def test_an_engine_on_an_accelerator_steps_by_kernels_and_trains_as_with_torchs(
    stage: int, is_bf16: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Main parameters differ by less than a thousandth of the learning rate. (After a step in bf16 the interpreter's
    parameters are cut off where torch's are rounded.)
    """
    monkeypatch.setattr(Device, "step_block_numel", None)
    numels: list[int] = []
    plain_update, lock = one_kernel_adam.update, threading.Lock()

    def counted(*args: Any) -> None:
        with lock:  # the interpreter runs one kernel at a time
            numels.extend(part.main.numel() for part in args[2])
            plain_update(*args)

    monkeypatch.setattr("shoal.running.step.update_by_kernels", counted)

    def job() -> dict[str, torch.Tensor]:
        settings = config(stage, bf16={"enabled": is_bf16}, gradient_clipping=0.1)
        engine = start(Plain, settings, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True))
        return finish(engine, run_steps(engine, steps)).main_parameters

    ours = run_ranks(2, job)
    assert numels
    taken = len(numels)
    monkeypatch.setattr(one_kernel_adam, "MIN_NUMEL", 2**40)
    theirs = run_ranks(2, job)
    assert len(numels) == taken
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in mine.items():
            torch.testing.assert_close(value, other[name], rtol=0.0, atol=1e-6, msg=name)
