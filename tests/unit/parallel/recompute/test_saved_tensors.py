"""What a recomputed segment saves, and where: its inputs, copies on the host, and what a policy adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import ConfigError, UsageError
from shoal.parallel.recompute import Recompute, RecomputeSettings, recompute_blocks
from shoal.parallel.saved_tensors import Form
from shoal.parallel.selective import operations_of
from shoal.sharding.placement import Tier
from tests.helpers.recompute_models import HIDDEN, ROWS, X_NBYTES, Block, Chain, assert_same, inputs, recomputed, run
from tests.helpers.slow_copies import SlowCopies


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive."""

    def __init__(self, leave_out: Callable[[int], bool] = lambda _: False) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._leave_out = leave_out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, is_new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, is_new=True)
        return out

    def _see(self, tensor: torch.Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        ref = StorageWeakRef(storage)
        self._storages.setdefault(ref.cdata, (ref, storage.nbytes() if is_new else 0))

    def now(self) -> int:
        live = [(ref, n) for ref, n in self._storages.values() if not ref.expired()]
        return sum(n for ref, n in live if not self._leave_out(ref.cdata))


def test_a_segment_keeps_its_inputs_and_nothing_else() -> None:
    """Counted twice: by Shoal, and by looking at which of all storages that were made are alive."""
    model, x = Chain(), torch.randn(ROWS, HIDDEN)
    for block in model.blocks:
        block.dropout.p = 0.0
    with LiveBytes() as live:
        loss = model(x)
    plain_nbytes = live.now() - 4
    del loss
    with recomputed(model, RecomputeSettings()) as made, LiveBytes() as live:
        loss = model(x)
    assert made.saved_bytes == 4 * X_NBYTES
    assert live.now() == 3 * X_NBYTES + 4  # the first input is the caller's; the loss
    assert made.saved_bytes_by_tier() == {Tier.DEVICE: 640}
    assert plain_nbytes == 3 * X_NBYTES + 4 * 2 * X_NBYTES  # inputs, and what tanh gives
    loss.backward()
    assert made.saved_bytes == 0
    assert made.peak_saved_bytes == 640


def test_what_several_segments_share_counts_once_and_an_expanded_mask_as_its_column() -> None:
    model, (x, mask) = Chain(), inputs()
    with recomputed(model, RecomputeSettings(is_offloaded=True)) as made:
        loss = model(x, mask)
    assert made.saved_bytes_by_tier() == {Tier.HOST: 4 * X_NBYTES + ROWS * 4}
    del loss
    assert made.saved_bytes == 0


def test_parameters_among_the_arguments_are_not_counted() -> None:
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4)
    made = Recompute(RecomputeSettings(is_offloaded=True))
    out = made.checkpoint(torch.nn.functional.linear, x, weight).sin()
    assert made.saved_bytes == 32
    out.sum().backward()
    assert weight.grad is not None


def test_an_input_changed_in_place_is_an_error_and_not_another_gradient() -> None:
    made = Recompute()
    x = torch.ones(3, requires_grad=True) * 1.0
    out = made.checkpoint(lambda t: t.sin(), x)
    x.add_(1)
    with pytest.raises(UsageError, match=r"recompute-input-changed.*shape \(3,\)"):
        out.sum().backward()


def test_a_dry_run_counts_without_values() -> None:
    with FakeTensorMode():
        model, x = Chain(), torch.randn(ROWS, HIDDEN)
        with recomputed(model, RecomputeSettings(is_offloaded=True), copies_of=lambda _: SlowCopies()) as made:
            loss = model(x)
            assert made.saved_bytes_by_tier() == {Tier.HOST: 640}
            loss.backward()
    assert made.saved_bytes == 0


NUMBERS = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        NUMBERS,
        NUMBERS.t(),
        NUMBERS.view(2, 3, 2)[:, 1:, ::2],
        NUMBERS[:, :1].expand(3, 4),
        NUMBERS[:1].expand(3, 4)[:, 1:],
        NUMBERS[0, 0],
        NUMBERS.bfloat16(),
        NUMBERS.long(),
        NUMBERS[:1, :3].expand(2, 3).t(),
    ],
    ids=["whole", "transposed", "sliced", "column", "row", "number", "bf16", "integers", "row, transposed"],
)
def test_a_form_is_rebuilt_with_values_and_strides(tensor: torch.Tensor) -> None:
    form = Form.of(tensor)
    assert form.can_move
    moved = form.empty()
    rebuilt = form.expand(moved.copy_(form.compact(tensor)))
    assert torch.equal(rebuilt, tensor)
    assert rebuilt.stride() == tensor.stride()
    assert rebuilt.dtype == tensor.dtype


def test_overlapping_and_empty_tensors_do_not_move() -> None:
    assert not Form.of(torch.arange(6).as_strided((3, 3), (1, 1))).can_move
    assert not Form.of(torch.arange(6).unfold(0, 3, 1)).can_move
    assert not Form.of(torch.empty(0, 3)).can_move


# --- copies to the host and back ---


def test_copies_leave_and_return_beside_the_segments_in_this_order() -> None:
    slow, log = SlowCopies(), []
    slow.log = log
    made = Recompute(RecomputeSettings(is_offloaded=True), copies_of=lambda _: slow)

    def segment(x: torch.Tensor, number: int) -> torch.Tensor:
        log.append(f"run {number}")
        return (x * 2).sin()

    x = torch.randn(3, requires_grad=True) * 1.0
    for number in range(5):
        x = made.checkpoint(segment, x, number)
    assert log == ["out 0", "run 0", "out 1", "run 1", "wait out 0", "out 2", "run 2", "wait out 1", "out 3", "run 3",
                   "wait out 2", "out 4", "run 4"]  # fmt: skip
    log.clear()
    x.sum().backward()
    # The last two are still there; 2 is sent for while segment 3 runs, 1 while 2 does, 0 while 1 does. The copies of 4
    # and 3 are waited for when they are freed, so that their memory is not written while it is read.
    assert log == ["run 4", "wait out 4", "in 2", "run 3", "wait out 3", "wait in 2", "in 1", "run 2", "wait in 1",
                   "in 0", "run 1", "wait in 0", "run 0"]  # fmt: skip


@pytest.mark.parametrize("num_blocks", [4, 16])
def test_the_device_stores_the_inputs_of_two_segments_however_many_there_are(num_blocks: int) -> None:
    model, x = Chain(num_blocks), torch.randn(ROWS, HIDDEN)
    slow = SlowCopies()
    most = 0

    class Watch(nn.Module):
        def __init__(self, live: LiveBytes) -> None:
            super().__init__()
            self.live = [live]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal most
            most = max(most, self.live[0].now())
            return x

    with LiveBytes(leave_out=slow.is_host) as live:
        for block in model.blocks:
            block.dropout = Watch(live)  # type: ignore[assignment]
        with recomputed(model, RecomputeSettings(is_offloaded=True), copies_of=lambda _: slow) as made:
            loss = model(x)
            assert live.now() == 2 * X_NBYTES + 4
            assert made.saved_bytes_by_tier() == {Tier.HOST: num_blocks * X_NBYTES}
            loss.backward()
    # Two inputs, the gradient of the output, tanh's output and what comes of it; the gradients of parameters.
    parameter_nbytes = sum(p.numel() * 4 for p in model.parameters())
    assert most <= 2 * X_NBYTES + X_NBYTES + 2 * 2 * X_NBYTES + X_NBYTES + parameter_nbytes


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7])
def test_what_returns_from_the_host_has_the_same_bits(num_blocks: int) -> None:
    model, (x, mask) = Chain(num_blocks), inputs()
    plain = run(model, x, mask)
    slow = SlowCopies()
    with recomputed(model, RecomputeSettings(is_offloaded=True), copies_of=lambda _: slow) as made:
        assert_same(run(model, x, mask), plain)
        assert_same(run(model, x, mask), plain)
    assert slow.num_late == 0
    assert made.saved_bytes == 0


def test_two_forward_passes_before_their_backward_passes_return_each_its_own() -> None:
    model, (x, mask) = Chain(5), inputs()
    y = torch.randn(ROWS, HIDDEN)
    for block in model.blocks:
        block.dropout.p = 0.0
    parameters = list(model.parameters())
    plain = [torch.autograd.grad(model(given, mask), parameters) for given in (x, y)]
    slow = SlowCopies()
    with recomputed(model, RecomputeSettings(is_offloaded=True), copies_of=lambda _: slow):
        losses = [model(given, mask) for given in (x, y)]
        ours = [torch.autograd.grad(loss, parameters) for loss in losses]  # the first one's first
    for mine, theirs in zip(ours, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert slow.num_late == 0


def test_a_forward_without_a_backward_leaves_nothing_on_the_device_after_reset() -> None:
    model, x = Chain(4), torch.randn(ROWS, HIDDEN)
    slow = SlowCopies()
    with LiveBytes(leave_out=slow.is_host) as live:
        with recomputed(model, RecomputeSettings(is_offloaded=True), copies_of=lambda _: slow) as made:
            loss = model(x)
            made.reset()
            assert live.now() == 4  # the loss
            (gradient,) = torch.autograd.grad(loss, [model.blocks[0].up.bias])
    assert gradient.shape == (2 * HIDDEN,)
    assert slow.num_late == 0


def test_what_is_on_its_way_back_when_its_graph_is_dropped_is_waited_for() -> None:
    slow = SlowCopies()
    made = Recompute(RecomputeSettings(is_offloaded=True), copies_of=lambda _: slow)
    xs = [torch.randn(3, requires_grad=True)]
    for _ in range(5):
        xs.append(made.checkpoint(lambda x: (x * 2).sin(), xs[-1]))
    torch.autograd.grad(xs[-1].sum(), xs[3])  # stops after the last two segments: the third is on its way
    assert "in 2" in slow.log and "wait in 2" not in slow.log
    xs.clear()
    assert "wait in 2" in slow.log
    slow.carry_out(100)  # all
    assert slow.num_late == 0


@pytest.mark.parametrize("later_segments", [0, 3])
def test_an_input_changed_before_it_has_left_is_an_error(later_segments: int) -> None:
    made = Recompute(RecomputeSettings(is_offloaded=True), copies_of=lambda _: SlowCopies())
    x = torch.ones(3, requires_grad=True) * 1.0
    out = made.checkpoint(lambda t: t.sin(), x)
    x.detach().add_(1)
    y = out
    for _ in range(later_segments):
        y = made.checkpoint(lambda t: t.sin(), y)
    with pytest.raises(UsageError, match="recompute-input-changed"):
        y.sum().backward()


# --- what is kept beside the inputs ---


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "products", "tanhs"), [("block", 4, 2), ("matmul", 2, 2), (["tanh"], 4, 1)])
def test_a_policy_says_what_is_not_run_again(policy: Any, products: int, tanhs: int) -> None:
    block = Block()
    made = Recompute(RecomputeSettings(operations=operations_of(policy)))
    with Operations() as operations:
        made.checkpoint(block, torch.randn(ROWS, HIDDEN)).sum().backward()
    assert operations.seen.count("addmm") == products
    assert operations.seen.count("tanh") == tanhs


class Careless(nn.Module):
    """Writes into tensors, its products' outputs among them, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, scale: float, mask: None) -> torch.Tensor:
        with torch.no_grad():
            means = torch.empty(ROWS, 1)
            torch.mm(x, torch.full((HIDDEN, 1), 1 / HIDDEN), out=means)
        y = self.up(x)
        y += means
        y.view(-1).mul_(2)
        y = torch.relu_(self.down(torch.tanh(y) * torch.rand_like(y)))
        return x + y * torch.rand_like(y)


def test_a_policy_does_not_save_what_an_operation_does_beside_its_output() -> None:
    model = Chain(0)
    model.blocks = nn.ModuleList([Careless(), Careless()])
    x = torch.randn(ROWS, HIDDEN)
    plain = run(model, x)
    made = Recompute(RecomputeSettings(operations=operations_of(["mm", "addmm", "view", "rand_like"])))
    recomputed = recompute_blocks(model, Careless, recompute=made)
    assert_same(run(model, x), plain)
    recomputed.remove()


def test_an_output_that_a_policy_saves_serves_one_backward_pass_and_may_not_be_changed_after_the_segment() -> None:
    made = Recompute(RecomputeSettings(operations=operations_of("matmul")))
    weight = torch.randn(HIDDEN, HIDDEN, requires_grad=True)
    loss = made.checkpoint(lambda x: torch.tanh(x @ weight), torch.randn(ROWS, HIDDEN)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="recompute-policy-twice"):
        loss.backward()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x @ weight
        return product, torch.tanh(product)

    product, activation = made.checkpoint(both, torch.randn(ROWS, HIDDEN))
    product += 1
    with pytest.raises(UsageError, match="recompute-input-changed"):
        activation.sum().backward()


def test_a_policy_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'matmull' does not exist; did you mean 'matmul'"):
        operations_of("matmull")
    with pytest.raises(ConfigError, match="torch has no operation 'aten::nonsense'"):
        operations_of(["nonsense"])
