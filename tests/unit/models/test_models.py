"""The GPT: shapes, counts, initialisation from the meta device, generation."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shoal.errors import ModelError, UsageError
from shoal.models import GPT, NAMED_SHAPES, GPTConfig, named_config, nearest_config, parse_count
from shoal.models.gpt import rotate, rotations
from shoal.parallel.expert.stacked import ExpertFeedForward

SHAPE = GPTConfig(vocab_size=50, sequence_length=16, num_layers=2, hidden_size=32, num_heads=4)


def build(config: GPTConfig, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def materialise(model: torch.nn.Module) -> None:
    """Fill a model on the meta device module by module, keeping shared parameters shared."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        own = list(module.named_parameters(recurse=False))
        for name, old in own:
            new = made.setdefault(old, torch.nn.Parameter(torch.full_like(old, float("nan"), device="cpu")))
            setattr(module, name, new)
        if own:
            module.reset_parameters()


@pytest.mark.parametrize("tied", [True, False])
def test_the_formula_counts_the_parameters_that_are_there(tied: bool) -> None:
    config = dataclasses.replace(SHAPE, tied=tied)
    model = GPT(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters()


def test_named_shapes_have_the_size_that_their_name_says() -> None:
    assert NAMED_SHAPES["small-34m"].num_parameters() == 33_563_136
    assert NAMED_SHAPES["124m"].num_parameters() == 123_587_328
    assert NAMED_SHAPES["1.5b"].num_parameters() == 1_555_201_600


def test_logits_and_loss_have_their_shapes() -> None:
    model = build(SHAPE)
    tokens = torch.randint(50, (3, 16))
    assert model(tokens).shape == (3, 16, 50)
    loss = model(tokens, torch.randint(50, (3, 16)))
    assert loss.shape == ()
    assert abs(loss.item() - 3.912) < 0.3  # ln 50: nothing is known yet


def test_positions_marked_with_minus_100_do_not_count() -> None:
    model = build(SHAPE)
    tokens = torch.randint(50, (1, 16))
    targets = tokens.clone()
    targets[:, 8:] = -100
    torch.testing.assert_close(model(tokens, targets), model(tokens[:, :8], tokens[:, :8]))


def test_no_position_sees_a_later_one() -> None:
    model = build(SHAPE)
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_rotation_makes_scores_depend_on_the_distance_only() -> None:
    query, key = torch.randn(8), torch.randn(8)
    cos, sin = rotations(torch.arange(12), 8, torch.float32)
    queries = rotate(query.expand(1, 12, 1, 1, 8), cos, sin)[0, :, 0, 0]
    keys = rotate(key.expand(1, 12, 1, 1, 8), cos, sin)[0, :, 0, 0]
    scores = queries @ keys.T
    torch.testing.assert_close(scores[5, 2], scores[9, 6])
    assert not torch.isclose(scores[5, 2], scores[5, 3])


def test_bf16_parameters_give_nearly_the_loss_of_fp32() -> None:
    model = build(SHAPE)
    tokens = torch.randint(50, (4, 16))
    exact = model(tokens, tokens).item()
    loss = model.bfloat16()(tokens, tokens)
    loss.backward()
    assert loss.dtype is torch.float32
    assert abs(loss.item() - exact) < 0.02
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_filling_a_meta_model_module_by_module_gives_the_bits_of_a_direct_one(tied: bool) -> None:
    config = dataclasses.replace(SHAPE, tied=tied)
    direct = build(config, seed=7)
    with torch.device("meta"):
        late = GPT(config)
    torch.manual_seed(7)
    materialise(late)
    assert (late.head.weight is late.embedding.weight) is tied
    for (name, expected), (late_name, actual) in zip(direct.named_parameters(), late.named_parameters(), strict=True):
        assert name == late_name
        assert torch.equal(expected, actual), name


def test_the_same_generator_gives_the_same_text_and_another_gives_another() -> None:
    model = build(SHAPE)
    prompt = torch.tensor([[1, 2, 3]])

    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompt, 24, temperature=1.0, top_k=20, generator=generator)[0].tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(draw(1)) == 27  # longer than the 16 positions that the model looks at
    assert draw(1)[:3] == [1, 2, 3]


def test_temperature_zero_and_top_1_both_take_the_likeliest_token() -> None:
    model = build(SHAPE)
    prompt = torch.tensor([[4, 5]])
    greedy = model.generate(prompt, 8, temperature=0)
    assert torch.equal(greedy, model.generate(prompt, 8, top_k=1))
    assert greedy[0, 2] == model(prompt)[0, -1].argmax()


def test_generation_leaves_the_mode_as_it_was() -> None:
    model = build(SHAPE).train()
    model.generate(torch.tensor([[1]]), 1)
    assert model.training
    model.eval().generate(torch.tensor([[1]]), 1)
    assert not model.training


def test_too_long_a_sequence_is_refused_with_both_lengths() -> None:
    with pytest.raises(UsageError, match=r"17 tokens.*16"):
        build(SHAPE)(torch.zeros(1, 17, dtype=torch.long))


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ModelError, match="hidden_size 30 does not divide into 4 heads"):
        dataclasses.replace(SHAPE, hidden_size=30)


@pytest.mark.parametrize("target", ["100k", "1M", "10M", "124M", "1.5B", "7B"])
def test_a_number_of_parameters_finds_a_shape_within_a_tenth(target: str) -> None:
    wanted = parse_count(target)
    found = nearest_config(wanted, vocab_size=256).num_parameters()
    assert abs(found / wanted - 1) < 0.1


def test_a_misspelt_name_is_met_with_the_right_one() -> None:
    with pytest.raises(ModelError, match="did you mean 'tiny'"):
        named_config("tinny")
    assert named_config("tiny", vocab_size=300, sequence_length=32).vocab_size == 300


@pytest.mark.parametrize("text", ["", "ten", "-3M", "0", "1e999"])
def test_what_is_no_number_of_parameters_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="not a number of parameters"):
        parse_count(text)


def test_a_number_too_small_for_any_shape_is_refused() -> None:
    with pytest.raises(ModelError, match="a smaller vocabulary"):
        nearest_config(1000, vocab_size=50304)


# Experts

EXPERTS = dataclasses.replace(SHAPE, num_experts=4, experts_per_token=2, auxiliary_loss=0.1, z_loss=0.01)


def with_experts(config: GPTConfig = EXPERTS) -> GPT:
    torch.manual_seed(0)
    return GPT(config, experts=ExpertFeedForward)


def token_by_token(layer: torch.nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``ExpertFeedForward`` computes, one token and expert after the other."""
    assert isinstance(layer, ExpertFeedForward)
    rows = hidden.flatten(0, -2)
    logits = rows @ layer.router.weight.T
    probabilities = logits.softmax(-1)
    outputs, chosen = [], torch.zeros(layer.router.out_features)
    for row, scores in zip(rows, probabilities, strict=True):
        best = scores.topk(layer.experts_per_token).indices.tolist()
        total = sum(scores[expert] for expert in best)
        own = []
        for expert in best:
            chosen[expert] += 1
            inner = torch.nn.functional.gelu(row @ layer.experts.up[expert], approximate="tanh")
            own.append(scores[expert] / total * (inner @ layer.experts.down[expert]))
        outputs.append(torch.stack(own).sum(0))
    balance = len(chosen) * (chosen / chosen.sum() * probabilities.mean(0)).sum()
    z = logits.logsumexp(-1).square().mean()
    return torch.stack(outputs).view_as(hidden), layer.auxiliary_loss * balance + layer.z_loss * z


@pytest.mark.parametrize("per_token", [1, 2, 4])
def test_experts_compute_what_each_token_would_alone(per_token: int) -> None:
    layer = ExpertFeedForward(dataclasses.replace(EXPERTS, experts_per_token=per_token))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(2, 5, 32, requires_grad=True)
    results = []
    for compute in (layer, lambda rows: token_by_token(layer, rows)):
        out, loss = compute(hidden)
        (out.square().sum() + loss).backward()
        gradients = [hidden.grad, *(parameter.grad for parameter in layer.parameters())]
        results.append([out, loss, *(gradient.clone() for gradient in gradients if gradient is not None)])
        layer.zero_grad()
        hidden.grad = None
    assert len(results[0]) == 6
    # One expert's weight is 1 whatever the router says: the gradient through it is a difference of equal numbers.
    atol = 1e-3 if per_token == 1 else 1e-4
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)


def test_an_expert_without_a_token_and_all_tokens_on_one_expert() -> None:
    layer = ExpertFeedForward(dataclasses.replace(EXPERTS, experts_per_token=1))
    torch.nn.init.zeros_(layer.router.weight)
    with torch.no_grad():
        layer.router.weight[2, 0] = 1.0
    hidden = torch.rand(1, 6, 32) + 0.1
    out, _ = layer(hidden)
    torch.testing.assert_close(out, token_by_token(layer, hidden)[0])
    out.sum().backward()
    assert layer.experts.up.grad is not None
    assert [bool(each.any()) for each in layer.experts.up.grad] == [False, False, True, False]


def test_parameters_of_all_experts_and_those_of_one_token_are_counted() -> None:
    counted = sum(parameter.numel() for parameter in with_experts().parameters())
    assert counted == EXPERTS.num_parameters()
    unused = 2 * (4 - 2) * 8 * 32 * 32  # blocks, experts that a token does not use, the size of one
    assert EXPERTS.num_active_parameters() == counted - unused
    assert SHAPE.num_active_parameters() == SHAPE.num_parameters()
    routers = 2 * 4 * 32
    two_experts = 6 * (2 * 8 * 32 * 32 + routers)
    assert EXPERTS.flops_per_token() == SHAPE.flops_per_token() + two_experts


def test_the_routers_losses_are_of_training_alone() -> None:
    model = with_experts()
    tokens = torch.randint(50, (2, 16))
    trained = model(tokens, tokens)
    model.eval()
    plain = model(tokens, tokens)
    hidden, routers = model.embedding(tokens), 0.0
    cos, sin = rotations(torch.arange(16), SHAPE.head_size, torch.float32)
    for block in model.blocks:
        hidden, own = block(hidden, cos, sin, torch.zeros(()))
        routers += own.item()
    assert trained.item() - plain.item() == pytest.approx(routers, rel=1e-4)
    assert routers > 2 * 0.1 * 0.99  # balanced experts have a loss of 1
    assert model(tokens).shape == (2, 16, 50)


def test_a_model_with_experts_from_the_meta_device_has_the_same_bits() -> None:
    direct = with_experts()
    with torch.device("meta"):
        late = GPT(EXPERTS, experts=ExpertFeedForward)
    torch.manual_seed(0)
    materialise(late)
    for (name, expected), found in zip(direct.named_parameters(), late.parameters(), strict=True):
        assert torch.equal(expected, found), name


def test_experts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="3 experts per token of 2 experts"):
        dataclasses.replace(SHAPE, num_experts=2, experts_per_token=3)
    with pytest.raises(ModelError, match="the shape has 4 experts, and no layer was given for them"):
        GPT(EXPERTS)
