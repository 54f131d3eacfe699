"""Recomputed segments give the bits that the plain ones give, keep what they say and no more, and bring it back."""

from __future__ import annotations

import copy
import doctest
import gc
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.comm.world import current_world
from shoal.config import load
from shoal.config.saving import ActivationCheckpointing
from shoal.errors import ConfigError, ModelError, NotBuiltError, UsageError
from shoal.memory.placement import Tier
from shoal.parallel import kept, recompute, segment_times, selective
from shoal.parallel import recompute_blocks as recompute_blocks_module
from shoal.parallel.kept import Form
from shoal.parallel.recompute import Recompute, RecomputeSettings, recompute_blocks, use_recompute
from shoal.parallel.segment_times import Times
from shoal.parallel.selective import operations_of
from tests.slow_copies import SlowCopies

ROWS, HIDDEN = 5, 8
X_NBYTES = ROWS * HIDDEN * 4
PLACES = {
    "in place": RecomputeSettings(),
    "on the host": RecomputeSettings(is_on_host=True),
    "timed": RecomputeSettings(has_times=True),
    "matmuls kept": RecomputeSettings(operations=operations_of("matmul")),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.dropout(self.down(torch.tanh(self.up(x)))) * scale
        return x + (y if mask is None else y * mask)


class Chain(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, 0.5, mask=mask)
        return x.sum()


class Trained(NamedTuple):
    loss: torch.Tensor
    gradients: list[torch.Tensor | None]


def run(model: nn.Module, *inputs: Any, **kwargs: Any) -> Trained:
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(*inputs, **kwargs)
    loss.backward()
    return Trained(loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()])


def assert_same(ours: Trained, plain: Trained) -> None:
    assert torch.equal(ours.loss, plain.loss)
    assert len(ours.gradients) == len(plain.gradients)
    for mine, theirs in zip(ours.gradients, plain.gradients, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


@contextmanager
def recomputed(model: nn.Module, settings: RecomputeSettings, **kwargs: Any) -> Iterator[Recompute]:
    made = Recompute(settings, **kwargs)
    blocks = recompute_blocks(model, Block, recompute=made)
    try:
        yield made
    finally:
        blocks.remove()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, HIDDEN, requires_grad=True), torch.ones(ROWS, 1).expand(ROWS, HIDDEN)


# --- the same numbers ---


@pytest.mark.parametrize("name", PLACES)
def test_loss_and_gradients_have_the_bits_of_the_plain_model_dropout_included(name: str) -> None:
    model, (x, mask) = Chain(), inputs()
    plain = run(model, x, mask)
    assert x.grad is not None
    x_gradient, x.grad = x.grad, None
    with recomputed(model, PLACES[name]) as made:
        assert_same(run(model, x, mask), plain)
    assert torch.equal(x.grad, x_gradient)
    assert made.num_segments == 4
    assert made.saved_bytes == 0


@pytest.mark.parametrize("name", PLACES)
def test_under_autocast_the_recomputation_is_autocast_too(name: str) -> None:
    model, (x, mask) = Chain(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(3)
        loss = model(x, mask)
    loss.backward()
    plain = Trained(loss.detach(), [p.grad for p in model.parameters()])
    model.zero_grad()
    with recomputed(model, PLACES[name]):
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(3)
            loss = model(x, mask)
        loss.backward()
    assert_same(Trained(loss.detach(), [p.grad for p in model.parameters()]), plain)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


def takes_and_gives_anything(
    pair: Pair, nested: tuple[Any, ...], many: list[torch.Tensor], *, named: dict[str, torch.Tensor], text: str
) -> dict[str, Any]:
    assert type(pair) is Pair and pair.right is None
    assert type(nested) is tuple and nested[0] == "kept" and nested[2] is None
    total = pair.left * nested[1][0] + many[0] * named["w"]
    return {"sum": total.sin(), "parts": (total.cos(), [total * 2]), "text": text, "none": None}


@pytest.mark.parametrize("name", PLACES)
def test_arguments_and_outputs_are_passed_as_they_are(name: str) -> None:
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(4)]

    def call(function: Callable[..., Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        a, b, c, d = (leaf * 1.0 for leaf in leaves)
        given = function(Pair(a, None), ("kept", (b,), None), [c], named={"w": d}, text="hello")
        loss = given["sum"].sum() + given["parts"][0].sum() + given["parts"][1][0].sum()
        return given, list(torch.autograd.grad(loss, leaves))

    plain, plain_gradients = call(takes_and_gives_anything)
    made = Recompute(PLACES[name])
    given, gradients = call(lambda *args, **kwargs: made.checkpoint(takes_and_gives_anything, *args, **kwargs))
    assert list(given) == ["sum", "parts", "text", "none"]
    assert (given["text"], given["none"], type(given["parts"])) == ("hello", None, tuple)
    assert torch.equal(given["sum"], plain["sum"])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, plain_gradients, strict=True))


def test_a_list_that_the_function_fills_is_the_callers() -> None:
    seen: list[str] = []

    def function(x: torch.Tensor, log: list[str]) -> torch.Tensor:
        log.append("run")
        return x.sin().sin()

    x = torch.randn(3, requires_grad=True)
    out = Recompute().checkpoint(function, x, seen)
    assert seen == ["run"]
    out.sum().backward()
    assert seen == ["run", "run"]


def test_segments_inside_segments_keep_only_the_inputs_of_the_outer_one() -> None:
    model, (x, _) = Chain(), inputs()
    plain = run(model, x)
    made = Recompute(RecomputeSettings(is_on_host=True))
    blocks = recompute_blocks(model, Block, recompute=made)
    torch.manual_seed(3)
    model.zero_grad()
    with use_recompute(made):
        loss = recompute.checkpoint(model, x)
    assert made.saved_bytes == X_NBYTES
    assert made.num_segments == 1
    loss.backward()
    blocks.remove()
    assert_same(Trained(loss.detach(), [p.grad for p in model.parameters()]), plain)
    assert made.peak_saved_bytes == X_NBYTES


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_graph_that_is_kept_can_be_gone_through_again(is_slow: bool) -> None:
    model, (x, _) = Chain(), inputs()
    slow = SlowCopies()
    with recomputed(model, RecomputeSettings(is_on_host=True), copies_of=lambda _: slow if is_slow else None):
        loss = model(x)
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["in place", "on the host", "timed"])  # with kept operations torch refuses it
def test_a_gradient_of_a_gradient_is_the_same(name: str) -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh()

    def penalty(f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), weight)[0]

    made = Recompute(PLACES[name])
    assert torch.equal(penalty(lambda x: made.checkpoint(function, x)), penalty(function))


def test_without_gradients_the_function_just_runs() -> None:
    made = Recompute(RecomputeSettings(is_on_host=True, has_times=True))
    with torch.no_grad():
        out = made.checkpoint(lambda x: x * 2, torch.ones(3, requires_grad=True))
    assert out.tolist() == [2.0, 2.0, 2.0]
    assert (made.num_segments, made.saved_bytes, made.times.take()) == (0, 0, {})


@pytest.mark.parametrize("settings", [RecomputeSettings(), RecomputeSettings(is_on_host=True)], ids=["plain", "host"])
def test_compiled_blocks_are_recomputed(settings: RecomputeSettings) -> None:
    model, (x, _) = Chain(2), inputs()
    plain = run(model, x)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    made = Recompute(settings)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = made.checkpoint(block, x, 0.5)
        return x.sum()

    model.forward = forward  # type: ignore[method-assign]
    assert_same(run(model, x), plain)
    assert made.peak_saved_bytes == 2 * X_NBYTES


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own, at a break
def test_a_compiler_takes_plain_segments_into_its_graph_and_leaves_others_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, (x, _) = Chain(2), inputs()
    plain = run(model, x)
    with recomputed(model, RecomputeSettings()):
        assert_same(run(torch.compile(model, backend="aot_eager", fullgraph=True), x), plain)
    torch._dynamo.reset()
    with recomputed(model, RecomputeSettings(is_on_host=True)) as made:
        assert_same(run(torch.compile(model, backend="aot_eager"), x), plain)
    assert made.peak_saved_bytes == 2 * X_NBYTES
    told = [record.getMessage() for record in caplog.records if "runs uncompiled" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("segment blocks.0 is inside compiled code and runs uncompiled")


# --- what is kept ---


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
    with recomputed(model, RecomputeSettings(is_on_host=True)) as made:
        loss = model(x, mask)
    assert made.saved_bytes_by_tier() == {Tier.HOST: 4 * X_NBYTES + ROWS * 4}
    del loss
    assert made.saved_bytes == 0


def test_parameters_among_the_arguments_are_not_counted() -> None:
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4)
    made = Recompute(RecomputeSettings(is_on_host=True))
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
        with recomputed(model, RecomputeSettings(is_on_host=True), copies_of=lambda _: SlowCopies()) as made:
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
    made = Recompute(RecomputeSettings(is_on_host=True), copies_of=lambda _: slow)

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
def test_the_device_holds_the_inputs_of_two_segments_however_many_there_are(num_blocks: int) -> None:
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
        with recomputed(model, RecomputeSettings(is_on_host=True), copies_of=lambda _: slow) as made:
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
    with recomputed(model, RecomputeSettings(is_on_host=True), copies_of=lambda _: slow) as made:
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
    with recomputed(model, RecomputeSettings(is_on_host=True), copies_of=lambda _: slow):
        losses = [model(given, mask) for given in (x, y)]
        ours = [torch.autograd.grad(loss, parameters) for loss in losses]  # the first one's first
    for mine, theirs in zip(ours, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert slow.num_late == 0


def test_a_forward_without_a_backward_leaves_nothing_on_the_device_after_reset() -> None:
    model, x = Chain(4), torch.randn(ROWS, HIDDEN)
    slow = SlowCopies()
    with LiveBytes(leave_out=slow.is_host) as live:
        with recomputed(model, RecomputeSettings(is_on_host=True), copies_of=lambda _: slow) as made:
            loss = model(x)
            made.reset()
            assert live.now() == 4  # the loss
            (gradient,) = torch.autograd.grad(loss, [model.blocks[0].up.bias])
    assert gradient.shape == (2 * HIDDEN,)
    assert slow.num_late == 0


def test_what_is_on_its_way_back_when_its_graph_is_dropped_is_waited_for() -> None:
    slow = SlowCopies()
    made = Recompute(RecomputeSettings(is_on_host=True), copies_of=lambda _: slow)
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
    made = Recompute(RecomputeSettings(is_on_host=True), copies_of=lambda _: SlowCopies())
    x = torch.ones(3, requires_grad=True) * 1.0
    out = made.checkpoint(lambda t: t.sin(), x)
    x.detach().add_(1)
    y = out
    for _ in range(later_segments):
        y = made.checkpoint(lambda t: t.sin(), y)
    with pytest.raises(UsageError, match="recompute-input-changed"):
        y.sum().backward()


# --- random states ---


def test_named_random_states_are_restored_for_the_recomputation() -> None:
    made = Recompute()
    made.rng.add("model-parallel-rng", 7)

    def function(x: torch.Tensor) -> torch.Tensor:
        with made.rng.fork():
            return torch.nn.functional.dropout(x.sin(), 0.5)

    x = torch.ones(64, requires_grad=True)
    (kept,) = torch.autograd.grad(made.checkpoint(function, x).sum(), x)
    made.rng.reset()
    made.rng.add("model-parallel-rng", 7)
    (plain,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(kept, plain)
    assert 0 < int((kept == 0).sum()) < 64


def test_a_fork_draws_from_its_own_state_and_leaves_the_generator_alone() -> None:
    recompute.model_parallel_cuda_manual_seed(11)
    tracker = recompute.get_cuda_rng_tracker()
    try:
        with tracker.fork():
            forked = torch.rand(3)
        plain = torch.rand(3)
        assert torch.equal(plain, torch.rand(3, generator=torch.Generator().manual_seed(11)))
        assert torch.equal(forked, torch.rand(3, generator=torch.Generator().manual_seed(11 + 2718)))
        with tracker.fork():
            assert not torch.equal(torch.rand(3), forked)
        with pytest.raises(UsageError, match=r"did you mean 'model-parallel-rng'"), tracker.fork("model-paralel-rng"):
            pass
        with pytest.raises(UsageError, match="tracked already"):
            tracker.add("other", 11 + 2718)
    finally:
        unconfigure()


class Mpu:
    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank


def test_model_parallel_ranks_get_different_states() -> None:
    try:
        recompute.model_parallel_cuda_manual_seed(11, Mpu(4, 3))
        with recompute.get_cuda_rng_tracker().fork():
            assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(11 + 2718 + 3)))
    finally:
        unconfigure()


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


def test_a_policy_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'matmull' does not exist; did you mean 'matmul'"):
        operations_of("matmull")
    with pytest.raises(ConfigError, match="torch has no operation 'aten::nonsense'"):
        operations_of(["nonsense"])


# --- modules ---


def test_modules_are_chosen_by_class_name_pattern_or_found() -> None:
    model, made = nn.Sequential(Chain(5), nn.Linear(2, 2)), Recompute()

    def chosen(*args: Any, **kwargs: Any) -> tuple[str, ...]:
        blocks = recompute_blocks(model, *args, recompute=made, **kwargs)
        blocks.remove()
        return blocks.names

    every = tuple(f"0.blocks.{index}" for index in range(5))
    assert chosen() == chosen(Block) == chosen("Block") == chosen("0.blocks.*") == every
    assert chosen(["0.blocks.1", "1"]) == ("0.blocks.1", "1")
    assert chosen("Block", every=2) == ("0.blocks.0", "0.blocks.2", "0.blocks.4")
    assert chosen("Block", every=9) == ("0.blocks.0",)


def test_modules_that_are_not_there_are_an_error() -> None:
    with pytest.raises(ModelError, match=r"'Blok'.*did you mean 'Block'"):
        recompute_blocks(Chain(), "Blok", recompute=Recompute())
    with pytest.raises(ModelError, match="no list of alike modules"):
        recompute_blocks(nn.Linear(2, 2), recompute=Recompute())
    with pytest.raises(UsageError, match="every = 0"):
        recompute_blocks(Chain(), every=0, recompute=Recompute())


def test_a_deep_copy_recomputes_its_own_modules() -> None:
    model, (x, _) = Chain(), inputs()
    with recomputed(model, RecomputeSettings()) as made:
        copied = copy.deepcopy(model)
        for parameter in copied.parameters():
            parameter.data.mul_(2)
        ours = run(copied, x)
        assert made.num_segments == 4
    plain = Chain()
    plain.load_state_dict(copied.state_dict())
    assert_same(ours, run(plain, x))


def test_what_was_wrapped_comes_back_as_it_was_whoever_wrapped_it_since() -> None:
    model, (x, _) = Chain(1), inputs()
    block = model.blocks[0]
    own = block.forward
    calls = []

    def logged(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append("inner")
        return own(x, *args, **kwargs)

    block.forward = logged
    made = Recompute()
    blocks = recompute_blocks(model, Block, recompute=made)
    run(model, x)
    assert (calls, made.num_segments) == (["inner", "inner"], 1)
    blocks.remove()
    assert block.forward is logged
    again = recompute_blocks(model, Block, recompute=made)
    theirs = block.forward
    block.forward = lambda *args, **kwargs: theirs(*args, **kwargs)
    again.remove()
    run(model, x)
    assert made.num_segments == 1


def test_a_removed_model_is_freed() -> None:
    model = Chain()
    recompute_blocks(model, Block, recompute=Recompute()).remove()
    assert all("forward" not in vars(block) for block in model.blocks)
    ref = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("module", [kept, recompute_blocks_module, segment_times, selective])
def test_the_examples_in_docstrings_are_right(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)


# --- the face ---


def unconfigure() -> None:
    recompute.uninstall(recompute.current_recompute(), current_world())
    assert not recompute.is_configured()


def test_configure_takes_the_section_and_arguments_win(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="shoal")
    assert not recompute.is_configured()
    before = recompute.current_recompute()
    try:
        recompute.configure(None, checkpoint_in_cpu=True, num_checkpoints=4, contiguous_checkpointing=True,
                            synchronize=True, partition_activations=True, profile=True)  # fmt: skip
        assert recompute.is_configured()
        assert recompute.current_recompute().settings == RecomputeSettings(
            is_on_host=True, is_in_parts=True, has_times=True
        )
        told = [record.getMessage().partition(":")[0] for record in caplog.records if record.name == "shoal"]
        assert told == ["partition_activations", "contiguous_checkpointing", "num_checkpoints", "synchronize"]
        recompute.partition_activations_in_checkpoint(False)
        assert recompute.current_recompute().settings == RecomputeSettings(is_on_host=True, has_times=True)
        x = torch.ones(2, requires_grad=True)
        out = recompute.checkpoint_wrapped(torch.sin)(x)
        assert recompute.current_recompute().saved_bytes == 8
        out.sum().backward()
        assert x.grad is not None
        recompute.non_reentrant_checkpoint(torch.sin, x).sum().backward()
        recompute.set_num_layers(3)
        recompute.reset()
        recompute.configure(Mpu(2, 1))
        assert recompute.current_recompute().settings == RecomputeSettings()
        with pytest.raises(NotBuiltError, match="2 model-parallel ranks"):
            recompute.configure(Mpu(2, 1), partition_activations=True)
    finally:
        unconfigure()
    assert recompute.current_recompute() is before


def test_configure_reads_a_config() -> None:
    config = load({"train_batch_size": 1, "activation_checkpointing": {"number_checkpoints": 2}}, world_size=1)
    try:
        recompute.configure(None, config, profile=True)
        assert recompute.current_recompute().settings == RecomputeSettings(has_times=True)
    finally:
        unconfigure()


def test_settings_follow_from_the_section() -> None:
    section = ActivationCheckpointing(cpu_checkpointing=True, profile=True, partition_activations=True, policy=["mm"])
    assert RecomputeSettings.of(section) == RecomputeSettings(True, True, True, ("aten::mm",))


def test_settings_that_nothing_uses_are_told() -> None:
    made = Recompute(RecomputeSettings(is_on_host=True))
    note = made.unused_note()
    assert note is not None and note.startswith("activation_checkpointing is set, but nothing was recomputed")
    made.checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    assert made.unused_note() is None
    assert Recompute().unused_note() is None


def test_a_reentrant_segment_is_refused() -> None:
    with pytest.raises(UsageError, match="recompute-reentrant"):
        recompute.checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=True)
    recompute.checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


def test_torchs_options_reach_torch() -> None:
    x = torch.ones(64, requires_grad=True)
    out = recompute.checkpoint(lambda t: torch.nn.functional.dropout(t.sin()), x, preserve_rng_state=False)
    out.sum().backward()
    assert x.grad is not None
    dropped = out == 0
    assert not torch.equal(dropped, x.grad == 0)  # other random numbers: what the option allows


def test_the_examples_of_the_how_to_page_run() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    text = (root / "docs" / "how-to" / "activation-checkpointing.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()[0] == "4227072 bytes wait for backward"
    )  # 4 x [8, 128, 256], and cos and sin, in fp32
    assert "blocks.3" in done.stdout


def test_times_are_kept_by_the_modules_names() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.01)
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            _ = ctx.saved_tensors
            time.sleep(0.03)
            return gradient * 2

    class SlowBlock(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Slow.apply(x).sin()

    model = nn.Sequential(SlowBlock(), SlowBlock())
    made = Recompute(RecomputeSettings(has_times=True))
    recompute_blocks(model, SlowBlock, recompute=made)
    x = torch.ones(2, requires_grad=True)
    model(x).sum().backward()
    model(x).sum().backward()
    times = made.times.take()
    assert list(times) == ["0", "1"]
    for each in times.values():
        assert each.calls == 2
        assert each.forward_seconds >= 0.02
        assert each.recompute_seconds >= 0.02
        assert each.backward_seconds >= 0.06
    assert made.times.take() == {}
    assert Times() == Times(0, 0.0, 0.0, 0.0)
