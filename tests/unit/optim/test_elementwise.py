"""Which optimizers may run on shards: known ones by name, unknown ones by trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.errors import OptimizerError
from shoal.optim.elementwise import KNOWN, check
from shoal.optim.lamb import Lamb
from shoal.optim.lion import Lion
from shoal.optim.muon import Muon


def matrix() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 4))]


class Plain(torch.optim.Optimizer):
    """Plain gradient descent with a momentum of its own: elementwise, but of no known class."""

    def __init__(self, params: Any, lr: float = 0.1, friction: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "friction": friction})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                speed = state.setdefault("speed", torch.zeros_like(param))
                speed.mul_(group["friction"]).add_(param.grad)
                param.sub_(speed * group["lr"])


class Normed(Plain):
    """Divides the gradient by its norm: the whole tensor decides."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad / param.grad.norm())


class RowWise(Plain):
    """Divides each row of a matrix by its own norm; a vector is one row."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad / param.grad.norm(dim=-1, keepdim=True))


class Counting(Plain):
    """Counts its steps in the group, so that a step in two parts counts twice."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        for param in group["params"]:
            param.sub_(param.grad / group["count"])


class WithClosure(Plain):
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()


class NeedsMore(Plain):
    def __init__(self, params: Any, model: torch.nn.Module) -> None:
        super().__init__(params)


@pytest.mark.parametrize("kind", KNOWN)
def test_known_classes_are_elementwise(kind: type[torch.optim.Optimizer]) -> None:
    assert check(kind(matrix(), lr=0.1)) == "elementwise"  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", KNOWN)
def test_known_classes_would_also_pass_the_trial(kind: type[torch.optim.Optimizer]) -> None:
    class Derived(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            return super().step(closure)

    assert check(Derived(matrix(), lr=0.1)) == "elementwise"


def test_groups_are_tried_with_their_own_settings() -> None:
    class Sometimes(Plain):
        def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
            (Normed.step if self.param_groups[0]["friction"] > 0.9 else Plain.step)(self, closure)  # type: ignore[arg-type]

    first, second = matrix(), matrix()
    assert check(Sometimes([{"params": first}, {"params": second}])) == "elementwise"
    with pytest.raises(OptimizerError, match="Sometimes is not elementwise"):
        check(Sometimes([{"params": first}, {"params": second, "friction": 0.95}]))


def test_an_unknown_elementwise_class_passes_the_trial() -> None:
    assert check(Plain(matrix())) == "elementwise"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Normed, "after 3 steps a matrix and its two parts differ by up to"),
        (RowWise, "after 3 steps a matrix and the same numbers flat differ by up to"),
        (Counting, r"its two parts, each in a step\(\) of its own differ by up to"),
    ],
)
def test_a_failed_comparison_is_named(kind: type[Plain], message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        check(kind(matrix()))
    with pytest.raises(OptimizerError, match=message):
        check(kind(matrix()), allow_untested=True)
    with pytest.raises(OptimizerError, match=message):
        check(kind(matrix()), allow_untested=True, world_size=2)
    with pytest.warns(UserWarning, match=message):
        check(kind(matrix()), allow_untested=True, world_size=1)


def test_what_cannot_be_tried_is_refused_or_taken_with_a_warning() -> None:
    optimizer = NeedsMore(matrix(), torch.nn.Linear(1, 1))
    with pytest.raises(
        OptimizerError, match=r"(?s)could not be tried on a small matrix: TypeError.*zero_allow_untested"
    ) as e:
        check(optimizer)
    assert e.value.code == "optimizer-untested"
    with pytest.warns(UserWarning, match="zero_allow_untested_optimizer is set"):
        assert check(optimizer, allow_untested=True) == "elementwise"


def test_where_the_config_says_no_an_unknown_class_is_not_tried() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert check(Own(matrix(), lr=0.1)) == "elementwise"
    assert check(torch.optim.SGD(matrix(), lr=0.1), refuse_untested=True) == "elementwise"
    for kind in (AssertionError, OptimizerError):
        with pytest.raises(kind, match='Own is not an optimizer that Shoal knows, and "zero_allow_untested_optimizer"'):
            check(Own(matrix(), lr=0.1), refuse_untested=True)


def test_a_step_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(OptimizerError, match="needs a closure"):
        check(WithClosure(matrix()))


@pytest.mark.parametrize(
    ("name", "settings"), [("LBFGS", {}), ("SparseAdam", {}), ("Adafactor", {}), ("Muon", {"lr": 0.1})]
)
def test_those_of_torch_that_are_not_elementwise_are_refused(name: str, settings: dict[str, Any]) -> None:
    optimizer = getattr(torch.optim, name)(matrix(), **settings)
    with pytest.raises(OptimizerError, match=r"closure|not elementwise"):
        check(optimizer, allow_untested=True, world_size=1)


@pytest.mark.parametrize("kind", [Lamb, Muon])
def test_our_own_optimizers_of_whole_tensors_are_recognized(kind: Any) -> None:
    assert check(kind(matrix())) == "whole-tensor"


def test_a_derived_class_with_a_new_name_only_is_known() -> None:
    derived = type("LightningAdamW", (torch.optim.AdamW,), {})
    assert check(derived(matrix())) == "elementwise"


def test_the_trial_leaves_the_optimizer_and_the_random_numbers_alone() -> None:
    optimizer = Plain(matrix())
    before = torch.random.get_rng_state()
    check(optimizer)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not optimizer.state
    assert torch.equal(optimizer.param_groups[0]["params"][0].detach(), torch.ones(4, 4))


def test_lion_steps_as_worked_out_by_hand() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))
    optimizer = Lion([weight], lr=0.1, betas=(0.5, 0.75), weight_decay=0.5)
    weight.grad = torch.tensor([2.0, -4.0, 0.0])
    optimizer.step()
    # u = sign(0.5 g) = (1, -1, 0); w = w - 0.1 (u + 0.5 w); m = 0.25 g = (0.5, -1, 0)
    torch.testing.assert_close(weight.detach(), torch.tensor([0.85, -0.85, 1.9]))
    weight.grad = torch.tensor([-0.25, 2.0, 1.0])
    optimizer.step()
    # u = sign(0.5 m + 0.5 g) = sign(0.125, 0.5, 0.5) = (1, 1, 1); m = 0.75 m + 0.25 g
    torch.testing.assert_close(weight.detach(), torch.tensor([0.7075, -0.9075, 1.705]))
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], torch.tensor([0.3125, -0.25, 0.25]))


def test_lions_wrong_numbers_are_one_error() -> None:
    with pytest.raises(OptimizerError) as caught:
        Lion(matrix(), lr=-1.0, betas=(0.9, 2.0), weight_decay=-0.5)
    for part in ("lr is -1.0", "betas are (0.9, 2.0)", "weight_decay is -0.5"):
        assert part in str(caught.value)
