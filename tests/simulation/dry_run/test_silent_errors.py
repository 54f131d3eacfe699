"""The kinds of silent errors that a type checker found in Megatron-LM, each made in Shoal or in a script, are found.

Source of the errors: NVIDIA/Megatron-LM, issue 7452 (found with meta-pytorch/spmd_types). Each test names the error
there. Where Shoal has no such layer (a gated delta net, attention sinks, multi-token prediction), a module of a script
makes the same mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.comm import autograd
from shoal.comm.world import current_world
from shoal.parallel.loss import CrossEntropy, TokenLosses
from shoal.parallel.tensor import layers
from shoal.parallel.tensor.region import TensorRegion
from shoal.simulation.type_check import TypeFinding
from shoal.simulation.verify import verify
from tests.simulation.dry_run.test_verify import PLAN, WIDTH, Block

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], loss: Loss) -> None:
        super().__init__()
        self.loss_function = loss
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([block()])
        self.head = nn.Linear(WIDTH, 32, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.loss_function(self.head(x), targets)


def found(
    block: Callable[[], nn.Module] = Block,
    *,
    loss: Loss = cross_entropy,
    head: str = "replicate",
    num_rows: int = 2,
    **parallel: Any,
) -> list[TypeFinding]:
    """What a step on two data-parallel ranks, times those of ``parallel``, has."""
    parallel = {"tp": 2, **parallel}
    if parallel["tp"] > 1:
        parallel["tp_plan"] = {**PLAN, "embedding": "vocab", "head": head}
    settings = {
        "train_micro_batch_size_per_gpu": num_rows,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel": parallel,
    }

    def train() -> None:
        engine = shoal.initialize(model=Model(block, loss), config=settings)[0]
        context = engine.sequence_context or shoal.SequenceContext()
        tokens = context.shard(torch.zeros(num_rows, 8, dtype=torch.long))
        engine.backward(engine(tokens, tokens))
        engine.step()
        engine.destroy()

    ranks = parallel["tp"] * parallel.get("cp", 1) * parallel.get("sp", 1)
    return verify(train, 2 * ranks).findings


SPLIT: dict[str, Any] = {"head": "vocab_head", "tp_sequence_parallel": True, "tp_loss_parallel": True}


@pytest.mark.parametrize("settings", [{}, SPLIT, {"tp": 1, "cp": 2}], ids=["tp", "split", "cp"])
def test_without_an_error_nothing_is_found(settings: dict[str, Any]) -> None:
    assert found(**settings) == []


def test_1_label_smoothing_over_the_ranks_own_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CrossEntropy.losses

    def losses(formula: CrossEntropy, logits: Any, targets: Any, *, at_once: bool) -> TokenLosses:
        result = right(formula, logits, targets, at_once=at_once)
        own = torch.log_softmax(logits, -1, dtype=torch.float32).mean(-1)
        return result._replace(values=0.9 * result.values - 0.1 * own)

    monkeypatch.setattr(CrossEntropy, "losses", losses)
    (fault,) = found(**SPLIT)
    assert (fault.axis, fault.what) == ("tp", "the loss is varying along an axis whose ranks compute one loss")


def test_2_a_vocabulary_parallel_loss_of_logits_that_were_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.vocab_parallel_cross_entropy

    def gathers(logits: torch.Tensor, targets: torch.Tensor, comm: Any, vocab_size: int, **options: Any) -> Any:
        return right(autograd.gather(logits, comm, dim=-1, label="logits"), targets, comm, vocab_size, **options)

    monkeypatch.setattr(layers, "vocab_parallel_cross_entropy", gathers)
    first = found(**SPLIT)[0]
    assert first.axis == "tp"
    assert first.what == "all_gather 'cross entropy' of a replicated tensor: it is there 2 times"


def own_count(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over tokens that count, of which each rank of a row counts its own."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    counts = (targets >= 0).float()
    return (losses * counts).sum() / counts.sum()


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_3_and_9_a_loss_is_divided_by_the_tokens_of_its_own_part_of_the_row(axis: str) -> None:
    fault = found(loss=own_count, tp=1, **{axis: 2})[0]
    assert (fault.axis, fault.operator) == (axis, "aten.div.Tensor")
    assert "div by a partial tensor" in fault.what
    assert "in own_count" in fault.place


@pytest.mark.parametrize("number", [4, 5])
def test_4_and_5_a_sum_over_the_ranks_of_another_axis(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row linear's output, or (5) of the gradient of a column linear's input."""
    right = TensorRegion.leave if number == 4 else TensorRegion.copy

    def other(region: TensorRegion, tensor: torch.Tensor, label: str) -> torch.Tensor:
        world = current_world()
        comm = next(comm for comm in world._communicators.values() if comm.size == 2 and comm.axis != "tp")
        return right(TensorRegion(comm), tensor, label)

    monkeypatch.setattr(TensorRegion, "leave" if number == 4 else "copy", other)
    first = found()[0]
    assert first.axis == "tp"
    assert "partial" in first.what
    assert ("backward" in first.place) is (number == 5 and "Backward" in first.place)


def test_6_a_gather_whose_gradient_is_cut_where_it_must_be_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "all_gather", autograd.gather)
    first = found(**SPLIT)[0]
    assert (first.axis, first.operator) == ("tp", "split")
    assert "takes each rank's part of a tensor that is not replicated but partial" in first.what


def test_7_embeddings_are_cut_along_another_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TensorRegion.split_sequence

    def other(region: TensorRegion, tensor: torch.Tensor, label: str) -> torch.Tensor:
        world = current_world()
        comm = next(comm for comm in world._communicators.values() if comm.size == 2 and comm.axis != "tp")
        return right(TensorRegion(comm, splits_sequence=True), tensor, label)

    monkeypatch.setattr(TensorRegion, "split_sequence", other)
    first = found(**SPLIT)[0]
    assert first.axis == "dp_shard"
    assert "takes each rank's part of a tensor that is not replicated but varying" in first.what


class Sinks(Block):
    """One value for each head of this rank, which the plan does not know to be split."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4 * WIDTH // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)) + self.sinks))


def test_8_a_parameter_of_the_ranks_own_heads_is_taken_for_a_whole_one() -> None:
    (fault,) = found(Sinks)
    assert (fault.axis, fault.parameters) == ("tp", ("layers.0.sinks",))
    assert "the ranks' copies drift apart" in fault.what


def test_10_a_count_of_all_ranks_is_summed_over_them_again() -> None:
    class Counted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            comm = next(c for c in current_world()._communicators.values() if c.size == 2 and c.axis != "tp")
            counts = (x.detach() > 0).sum((0, 1)).float()
            comm.blocking.all_reduce(counts, label="tokens")
            comm.blocking.all_reduce(counts, label="tokens")
            return super().forward(x) * (counts.mean() + 1)

    first = found(Counted)[0]
    assert (first.axis, first.operator) == ("dp_shard", "all_reduce")
    assert "all_reduce 'tokens' of a replicated tensor: it is counted 2 times" in first.what
    assert "in forward" in first.place


class OutputNorm(Block):
    """A norm of each head's output, whose weight all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.out_norm = nn.LayerNorm(8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(self.norm(x)).unflatten(-1, (-1, 8))
        return x + self.down(self.out_norm(heads).flatten(-2))


def test_11_a_norm_inside_a_split_layer_whose_gradient_is_not_summed() -> None:
    (fault,) = found(OutputNorm)
    assert (fault.axis, fault.parameters) == ("tp", ("layers.0.out_norm.weight",))
    assert "native_layer_norm" in fault.operator
    assert "in forward" in fault.place


def test_12_a_layer_returns_its_summand_without_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorRegion, "leave", lambda region, tensor, label: tensor)
    first = found()[0]
    assert (first.axis, first.operator) == ("tp", "aten.add.Tensor")
    assert "add of a partial and a replicated tensor" in first.what
    assert first.parameters == ("layers.0.down.bias",)
