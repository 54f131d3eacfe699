"""Tensor parallelism on Shoal's GPT: parity with one rank, recorded collectives, bytes held, and what is refused."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world, use_world
from shoal.errors import ModelError, RankFailedError, UsageError
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.tensor import parallelize, plan_for
from shoal.sharding.parts import cut, paste
from tests.helpers.tensor_cases import Outputs, compare, randomize, tp_communicator
from tests.ranks.comm.test_processes import own_world

Gloo = Callable[..., list[Any]]

BATCH, LENGTH, HIDDEN, VOCABULARY = 2, 8, 56, 67  # 67 tokens divide by no number of ranks
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=GENERATOR)
TARGETS = torch.where(torch.rand((BATCH, LENGTH), generator=GENERATOR) < 0.2, -100, TOKENS.roll(-1, 1))


def gpt(num_heads: int = 7, *, tied: bool = True, dropout: float = 0.0, num_layers: int = 2) -> nn.Module:
    config = GPTConfig(VOCABULARY, LENGTH, num_layers, HIDDEN, num_heads, tied=tied, dropout=dropout)
    return randomize(GPT(config))


def forward(model: nn.Module) -> Outputs:
    return {"logits": model(TOKENS), "loss": model(TOKENS, TARGETS)}


def loss_alone(model: nn.Module) -> Outputs:
    return {"loss": model(TOKENS, TARGETS)}


def test_the_plan_of_the_gpt_is_data() -> None:
    assert plan_for(gpt()) == {
        "embedding": "vocab",
        "blocks.*.attention": "prepare_input",
        "blocks.*.attention.qkv": "column",
        "blocks.*.attention.out": "row",
        "blocks.*.feed_forward.up": "column",
        "blocks.*.feed_forward.down": "row",
        "head": "vocab_head",
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("size", "num_heads", "tied"), [(2, 7, True), (4, 7, False), (2, 4, False), (4, 4, True)])
def test_a_split_model_computes_what_the_whole_one_does(
    size: int, num_heads: int, tied: bool, sequence_parallel: bool
) -> None:
    compare(gpt(num_heads, tied=tied), forward, size, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_loss_of_split_logits_is_the_loss(sequence_parallel: bool) -> None:
    compare(gpt(), loss_alone, 2, loss_parallel=True, sequence_parallel=sequence_parallel)


def test_on_one_rank_nothing_is_split() -> None:
    compare(gpt(), forward, 1)


def test_a_layer_issues_two_all_reduces_forward_and_two_backward() -> None:
    """Megatron-LM, section 3; the rest is the embedding's sum, the head's input, and the exchange of the loss."""
    for calls in compare(gpt(num_layers=3), loss_alone, 2, loss_parallel=True):
        counts = Counter((call.op, call.label.endswith("backward")) for call in calls if "blocks." in call.label)
        assert counts == {("all_reduce", False): 2 * 3, ("all_reduce", True): 2 * 3}
        hidden_bytes = BATCH * LENGTH * HIDDEN * 4
        assert {call.nbytes for call in calls if call.op == "all_reduce"} == {2 * hidden_bytes // 2}
        assert [call.label for call in calls if "blocks." not in call.label] == [
            "embedding out", "cross entropy", "head in backward",
        ]  # fmt: skip
        (exchange,) = [call for call in calls if call.label == "cross entropy"]
        assert exchange.nbytes == 2 * BATCH * LENGTH * 4  # two numbers per target, from one other rank


def test_sequence_parallelism_issues_the_halves_of_these_all_reduces_and_gathers_two_inputs_again() -> None:
    """Korthikanti et al., section 4.2.2: the inputs of qkv and of up are kept in parts, and gathered in backward."""
    for calls in compare(gpt(num_layers=3), loss_alone, 4, loss_parallel=True, sequence_parallel=True):
        in_layers = [call for call in calls if call.label.startswith("blocks.")]
        counts = Counter((call.op, call.label.endswith("backward")) for call in in_layers)
        assert counts == {
            ("all_gather", False): 2 * 3,
            ("reduce_scatter", False): 2 * 3,
            ("all_gather", True): (2 + 2) * 3,
            ("reduce_scatter", True): 2 * 3,
        }
        assert {call.nbytes for call in in_layers} == {BATCH * LENGTH * HIDDEN * 4 * 3 // 4}
        ends = [call.label for call in calls if call.label.startswith("blocks ")]
        assert ends == ["blocks out", "blocks in backward"]


@pytest.mark.parametrize(("size", "num_heads"), [(2, 7), (4, 7), (4, 4)])
def test_the_parts_are_disjoint_cover_the_model_and_are_all_that_is_held(size: int, num_heads: int) -> None:
    model = gpt(num_heads, tied=False)
    whole = dict(model.named_parameters())

    def on_a_rank() -> dict[str, Any]:
        mine = copy.deepcopy(model)
        split = parallelize(mine, tp_communicator())
        held = {name: p.untyped_storage().nbytes() for name, p in mine.named_parameters()}
        assert held == {name: p.numel() * 4 for name, p in mine.named_parameters()}
        return {name: (part, mine.get_parameter(name).detach()) for name, part in split.parts.items()}

    results = run_ranks(size, on_a_rank)
    assert {name for name in whole if "norm" not in name} == set(results[0])
    head = HIDDEN // num_heads
    for rank, result in enumerate(results):
        heads = (rank + 1) * num_heads // size - rank * num_heads // size
        tokens = (rank + 1) * VOCABULARY // size - rank * VOCABULARY // size
        layer = 4 * heads * head * HIDDEN + 2 * HIDDEN * (4 * HIDDEN // size)  # qkv, out; up, down
        assert sum(tensor.numel() for _, tensor in result.values()) == 2 * layer + 2 * tokens * HIDDEN
    for name, parameter in whole.items():
        if name in results[0]:
            rebuilt = torch.full_like(parameter, math.nan)
            for result in results:
                part, tensor = result[name]
                assert part.name == name
                assert cut(rebuilt, part).isnan().all(), "two ranks hold the same elements"
                paste(tensor, part, rebuilt)
            assert torch.equal(rebuilt, parameter), name


def test_a_model_on_the_meta_device_has_meta_parts() -> None:
    with torch.device("meta"):
        models = [gpt() for _ in range(2)]

    def on_a_rank() -> None:
        mine = models[current_world().rank]
        split = parallelize(mine, tp_communicator())
        assert all(p.is_meta for p in mine.parameters())
        assert {name: mine.get_parameter(name).shape for name in split.parts} == {
            name: part.shape for name, part in split.parts.items()
        }
        assert mine.get_parameter("head.weight") is mine.get_parameter("embedding.weight")

    run_ranks(2, on_a_rank)


def test_modules_stay_the_same_objects_of_their_classes() -> None:
    models = [gpt() for _ in range(2)]

    def on_a_rank() -> None:
        mine = models[current_world().rank]
        before = {name: (module, type(module)) for name, module in mine.named_modules()}
        parameters = dict(mine.named_parameters())
        parallelize(mine, tp_communicator())
        for name, module in mine.named_modules():
            assert module is before[name][0]
            assert isinstance(module, before[name][1])
        assert all(mine.get_parameter(name) is parameter for name, parameter in parameters.items())
        copy.deepcopy(mine)(TOKENS, TARGETS).backward()

    run_ranks(2, on_a_rank)


def test_sequences_that_do_not_divide_are_refused_in_training_and_computed_whole_without_gradients() -> None:
    model = gpt()
    expected = model(TOKENS[:, :5])

    def on_a_rank() -> None:
        mine = copy.deepcopy(model)
        parallelize(mine, tp_communicator(), sequence_parallel=True)
        with torch.no_grad():
            assert torch.allclose(mine(TOKENS[:, :5]), expected, atol=1e-5)
        with pytest.raises(UsageError, match=r"5 tokens does not divide by 2 .*\n.*\n.*pad the sequence by 1 tokens"):
            mine(TOKENS[:, :5])
        mine(TOKENS, TARGETS).backward()

    run_ranks(2, on_a_rank)


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({"blocks.*.attention.qqkv": "column"}, 2, r"does not have: blocks\.\*\.attention\.qqkv; did you mean"),
        ({"blocks.0.attention.qkv": "column"}, 2, r"1 modules twice: blocks\.0\.attention\.qkv by blocks\.\*\.att"),
        (
            {"blocks.*.feed_forward.up": None},
            2,
            r"nothing of 2 linear layers: blocks\.0\.feed_forward\.up, blocks\.1\.",
        ),
        ({"blocks.*.feed_forward.up": "col"}, 2, r"'blocks\.\*\.feed_forward\.up': 'col', but there is no such style"),
        (
            {"blocks.*.feed_forward.up": "column:3"},
            2,
            r"blocks\.0\.feed_forward\.up cannot be split as column in blocks",
        ),
        ({"blocks.*.attention.out": "replicate"}, 2, r"splits blocks\.0\.attention\.qkv, but not all projections"),
        ({"embedding": "replicate"}, 2, r"embedding\.weight is tied, and the plan splits it for head alone"),
        ({"embedding": "column"}, 2, r"embedding cannot be split as column: it is of the class Embedding"),
        ({"head": "row"}, 2, r"head\.weight is tied, and the plan splits it in two ways"),
        ({}, 8, r"blocks\.0\.attention has 7 attention heads, too few for 8"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_is_changed(
    change: dict[str, str | None], size: int, message: str
) -> None:
    model = gpt()
    changed: dict[str, Any] = {**plan_for(model), **change}
    plan = {key: style for key, style in changed.items() if style is not None}

    def on_a_rank() -> None:
        mine = copy.deepcopy(model)
        with pytest.raises(ModelError, match=message):
            parallelize(mine, tp_communicator(), plan)
        assert torch.equal(mine(TOKENS), model(TOKENS))
        assert all(type(a) is type(b) for a, b in zip(mine.modules(), model.modules(), strict=True))

    run_ranks(size, on_a_rank)


def test_without_strict_linears_that_no_key_names_stay_whole() -> None:
    plan = {key: style for key, style in plan_for(gpt()).items() if "feed_forward" not in key}
    compare(gpt(), forward, 2, plan=plan, strict=False)


def test_a_token_out_of_the_vocabulary_is_an_error() -> None:
    models = [gpt() for _ in range(2)]

    def on_a_rank() -> None:
        mine = models[current_world().rank]
        parallelize(mine, tp_communicator())
        mine(torch.full((1, 4), VOCABULARY))

    with pytest.raises((IndexError, RankFailedError)):
        run_ranks(2, on_a_rank)


class Dropping(nn.Module):
    """An attention-like module that drops split activations inside, and whole ones behind its row parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))
        self.head_dim = 2
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)
        self.masks: list[list[bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.q_proj(x) + self.k_proj(x) + self.v_proj(x)
        inner = self.inner(torch.ones_like(mixed))
        out = self.o_proj(inner * mixed)
        outer = self.outer(torch.ones_like(out))
        self.masks += [(inner > 0).flatten().tolist(), (outer > 0).flatten().tolist()]
        return torch.as_tensor(out * outer)


def _dropout_masks(rank: int, size: int) -> list[Any]:
    world = own_world(rank, size, "dropout", True)
    with use_world(world):
        torch.manual_seed(5)
        layer = Dropping()
        parallelize(nn.ModuleDict({"layer": layer}), tp_communicator())
        x = torch.ones(3, 8, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False)
        y.sum().backward()
        found = [layer.masks, torch.get_rng_state().sum().item(), y.tolist()]
        model = gpt(dropout=0.5)
        parallelize(model, tp_communicator(), sequence_parallel=True)
        dropped: list[Any] = []
        model.get_submodule("blocks.0.attention.out").register_forward_hook(
            lambda module, args, out: dropped.append((F.dropout(torch.ones_like(out), 0.5) > 0).tolist())
        )
        loss = model(TOKENS, TARGETS)
        loss.backward()
        found += [dropped, [loss.item(), torch.get_rng_state().sum().item()]]
    world.close()
    return found


@pytest.mark.gloo
def test_dropout_is_equal_on_whole_activations_and_differs_on_split_ones(gloo: Gloo) -> None:
    (first, state, out, split, after), (second, other_state, other_out, other_split, other_after) = gloo(
        2, _dropout_masks
    )
    assert first[0] != second[0]  # inside
    assert first[1] == second[1]  # behind the sum
    assert (first[2:], second[2:]) == (first[:2], second[:2])  # recomputed: the same elements again
    assert (state, out) == (other_state, other_out)
    assert split != other_split  # sequence parallel: other tokens, other elements
    assert after == other_after


def test_one_rank_keeps_a_loss_function_that_is_a_module() -> None:
    class Loss(nn.Module):
        def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

    model = gpt()
    del model.loss_function
    model.loss_function = Loss()
    expected = model(TOKENS, TOKENS)
    for size, is_kept in ((1, True), (2, False)):

        def on_a_rank(is_kept: bool = is_kept) -> None:
            mine = copy.deepcopy(model)
            parallelize(mine, tp_communicator(), loss_parallel=True)
            assert isinstance(mine.loss_function, Loss) == is_kept
            assert torch.allclose(mine(TOKENS, TOKENS), expected)

        run_ranks(size, on_a_rank)
