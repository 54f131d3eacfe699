"""``offload_activation``: the saved tensors of a block are in host memory, and the bits are the same."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.comm.threads import run_ranks
from shoal.engine.parts.activations import SavedActivations
from shoal.errors import UsageError
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.activations import HostActivations
from shoal.parallel.recompute import Recompute
from shoal.parallel.recompute_blocks import BudgetedRecompute
from shoal.sharding.placement import Tier
from tests.helpers.compiling import CountsGraphs, compiling
from tests.helpers.slow_copies import SlowCopies
from tests.helpers.training import config, make, start_with

torch.manual_seed(0)
MODEL = GPT(GPTConfig(vocab_size=32, sequence_length=64, num_layers=4, hidden_size=64, num_heads=2, tied=False))


def train(sections: dict[str, Any], stage: int) -> tuple[list[float], dict[str, Any], int]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=config)
    held, losses = 0, []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        tokens = torch.randint(32, (1, 64), generator=generator)
        loss = engine(tokens, tokens)
        held = sum(
            entry.nbytes
            for entry in engine.memory_report().entries
            if (entry.kind, entry.tier) == ("saved activations", "host")
        )
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    values, module = engine.module_state_dict(), engine.module
    engine.destroy()
    assert module.blocks[0].forward.__func__ is type(module.blocks[0]).forward  # taken off again
    return losses, values, held


@pytest.mark.parametrize("stage", [0, 3])
def test_activations_on_the_host_give_the_same_bits(stage: int) -> None:
    plain = run_ranks(2, train, {}, stage)
    cases: list[dict[str, Any]] = [
        {"offload_activation": {"device": "cpu"}},
        {"offload_activation": {"device": "cpu", "bytes": 300_000}},
        {"offload_activation": {"device": "cpu"}, "activation_checkpointing": {"modules": ["Block"]}},
    ]
    found = []
    for sections in cases:
        ours = run_ranks(2, train, sections, stage)
        for (losses, values, none), (others, other_values, _) in zip(plain, ours, strict=True):
            assert losses == others
            assert all(torch.equal(values[name], other_values[name]) for name in values)
            assert none == 0
        found.append(ours[0][2])
    everything, limited, recomputed = found
    hidden = 64 * 64 * 4
    assert everything > 4 * 12 * hidden  # a block keeps more than a dozen times its input
    assert 300_000 - 4 * hidden < limited <= 300_000
    assert recomputed == 0  # inputs of recomputed blocks are stored where activation_checkpointing says: on the device


@pytest.mark.parametrize("stage", [0, 3])
def test_of_compiled_blocks_what_their_graph_saves_is_on_the_host(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, compile_ = CountsGraphs("aot_eager"), torch.compile
    compiled = partial(compile_, backend=backend, dynamic=False)
    monkeypatch.setattr(torch, "compile", lambda function, *, mode: compiled(function))
    with compiling():
        torch._dynamo.utils.counters.clear()
        ((losses, values, nbytes),) = run_ranks(
            1, train, {"offload_activation": {"device": "cpu"}, "compile": {"enabled": True}}, stage
        )
        breaks = dict(torch._dynamo.utils.counters["graph_break"])
    ((others, other_values, _),) = run_ranks(1, train, {}, stage)
    assert backend.num_graphs == 1  # of four blocks and two steps
    assert list(breaks.values()) == [1]
    assert losses == others
    assert all(torch.equal(values[name], value) for name, value in other_values.items())
    assert nbytes > 4 * 8 * 64 * 64 * 4


class Chain(nn.Module):
    """A list of blocks, one matrix shared by all."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x


def gradients(model: nn.Module, x: torch.Tensor, passes: int = 1) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    for number in range(passes):
        loss.backward(retain_graph=number + 1 < passes)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("passes", [1, 2])
def test_slow_copies_arrive_before_they_are_read_and_parameters_stay(passes: int) -> None:
    model, x = Chain(5), torch.randn(32, 64)
    expected = gradients(model, x, passes)
    slow = SlowCopies()
    kept = HostActivations(model, copies_of=lambda _: slow)
    assert kept.names == tuple(f"blocks.{index}" for index in range(5))
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x, passes), expected, strict=True))
    assert slow.num_late == 0
    # Of each block the input of the matrix and the output of tanh; 16 KiB of parameters are not among them.
    assert kept.peak_saved_bytes == 5 * 2 * x.nbytes
    assert kept.saved_bytes_by_tier() == {}
    kept.remove()


def test_a_dry_run_offloads_as_much_as_a_run_and_no_parameters() -> None:
    peaks = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            model, x = Chain(5), torch.randn(32, 64)
            kept = HostActivations(model, copies_of=lambda _: SlowCopies())
            model(x).sum().backward()
            peaks.append(kept.peak_saved_bytes)
            kept.remove()
    assert peaks == [5 * 2 * 32 * 64 * 4] * 2


class Inside(nn.Module):
    """A chain that recomputes itself, or its blocks, by torch's function."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.chain = whole, Chain(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.whole:
            return checkpoint(lambda y: self.chain(y).sin(), x * 2, use_reentrant=False)
        x = x * 2
        for block in self.chain.blocks:
            x = checkpoint(lambda y, block=block: block(y).sin(), x, use_reentrant=False)
        return x


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("keeps", ["on the host", "within a budget"])
def test_blocks_inside_of_functions_that_the_model_recomputes_give_the_same_bits(keeps: str, whole: bool) -> None:
    model, x = Inside(whole), torch.randn(32, 64)
    expected = gradients(model, x)
    if keeps == "on the host":
        kept: Any = HostActivations(model, copies_of=lambda _: SlowCopies())
    else:
        kept = BudgetedRecompute(Recompute(), x.nbytes).install(model, None)
    assert kept.names == ("chain.blocks.0", "chain.blocks.1", "chain.blocks.2")
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    kept.remove()


def test_parts_of_a_model_without_a_list_are_its_blocks() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.ModuleDict({"a": nn.Linear(64, 64)})["a"])
    x = torch.randn(32, 64)
    expected = gradients(model, x)
    kept = HostActivations(model, copies_of=lambda _: SlowCopies())
    assert kept.names == ("0", "1", "2")
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    kept.remove()


def test_no_more_leaves_than_the_limit_in_each_pass() -> None:
    model, x = Chain(5), torch.randn(32, 64)
    kept = HostActivations(model, max_nbytes=3 * x.nbytes, copies_of=lambda _: SlowCopies())
    for _ in range(2):
        loss = model(x).sum()
        assert kept.saved_bytes_by_tier() == {Tier.HOST: 3 * x.nbytes, Tier.DEVICE: 7 * x.nbytes}
        loss.backward()
    with torch.no_grad():
        model(x)
    assert kept.saved_bytes_by_tier() == {}


class Hasty(nn.Module):
    """Changes what autograd keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        y = self.blocks[1](x)
        with torch.no_grad():
            x += 1
        return y


@pytest.mark.parametrize("copies", [None, SlowCopies()], ids=["in place", "copied"])
def test_a_forward_without_a_backward_leaves_nothing(copies: SlowCopies | None) -> None:
    model, x = copy.deepcopy(MODEL), torch.zeros(1, 64, dtype=torch.long)
    kept = HostActivations(model, copies_of=lambda _: copies)
    loss = model(x, x)
    assert sum(kept.saved_bytes_by_tier().values()) > 0
    del loss
    gc.collect()
    assert kept.saved_bytes_by_tier() == {}


def test_an_activation_that_is_changed_in_place_is_an_error() -> None:
    model = Hasty()
    HostActivations(model, copies_of=lambda _: SlowCopies())
    with pytest.raises(UsageError, match=r"an activation of 'blocks\.1' was changed in place"):
        model(torch.randn(32, 64)).sum().backward()


@pytest.mark.parametrize("has_layers", [False, True], ids=["model", "layers"])
def test_a_pipeline_stage_of_one_block_offloads_the_block_and_not_a_list_inside_of_it(has_layers: bool) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = torch.nn.functional.linear(x, part.weight).tanh()
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Parts() for _ in range(2))

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return (x - target).square().mean()

    def job(sections: dict[str, Any]) -> tuple[Any, float, int]:
        model: Any = make(Model)
        made = config(1, parallel={"pp": 2}, **sections)
        if has_layers:
            model = shoal.PipelineModule(list(model.blocks), loss_fn=nn.functional.mse_loss)
            del made["units"]
        engine: Any = start_with(model, made)
        rows = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
        loss = float(engine.train_batch(iter([tuple(rows)])))
        offloaded = engine.part(SavedActivations).offloaded
        peak = offloaded.peak_saved_bytes if offloaded is not None else 0
        return loss, engine.module_state_dict(), peak

    plain = run_ranks(2, job, {})
    for (loss, values, nbytes), (expected, whole, _) in zip(
        run_ranks(2, job, {"offload_activation": {"device": "cpu"}}), plain, strict=True
    ):
        assert loss == expected
        assert all(torch.equal(values[name], whole[name]) for name in whole)
        assert nbytes >= 3 * 64 * 64 * 4
