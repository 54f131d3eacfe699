"""A model that is cut into pipeline stages computes what the whole model computes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import ModelError, UsageError
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.recompute import recompute_blocks
from shoal.pipeline.blocks import find_blocks
from shoal.pipeline.cut import cut
from shoal.pipeline.stand_in import meta_copy
from tests.helpers.pipeline_stages import assert_same, cut_over, run_stages, run_whole

WIDTH = 8


def gpt(num_layers: int = 6, tied: bool = False) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(17, 8, num_layers, 16, 2, tied=tied))


def micro_batches(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(0, 17, (2, length)), torch.randint(0, 17, (2, length))) for length in lengths]


def output_is_loss(output: Any, batch: Any) -> Tensor:
    assert isinstance(output, Tensor)
    return output


def names_of(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


class Layer(nn.Module):
    """A block that is given more than the hidden state, and returns it in a tuple."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH)) if index == 0 else None
        self.kind = "even" if index % 2 == 0 else "odd"

    def forward(self, hidden: Tensor, mask: Tensor, *, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.bias is not None
            bias = self.bias * 2
        return torch.tanh(self.linear(hidden) * mask + bias), bias


class Stack(nn.Module):
    """A model of many habits: a norm registered before the blocks, a parameter of its own, masks by index and kind."""

    def __init__(self, num_layers: int = 5, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.norm = nn.LayerNorm(WIDTH)
        self.tokens = nn.Embedding(17, WIDTH)
        self.positions = nn.Parameter(torch.randn(8, WIDTH))
        self.layers = nn.ModuleList(Layer(index) for index in range(num_layers))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 17)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.tokens(ids)
        hidden += self.positions[: ids.shape[1]]
        masks = [torch.full((WIDTH,), 1.0 + index, dtype=hidden.dtype) for index in range(len(self.layers))]
        bias = None
        for index, layer in enumerate(self.layers[: len(self.layers)]):
            assert layer.kind == ("odd" if index % 2 else "even") and isinstance(layer, Layer)
            if self.run is None:
                hidden, bias = layer(hidden, masks[index], bias=bias)
            else:
                hidden, bias = self.run(layer.__call__, hidden, masks[index], bias=bias)
        logits = self.head(self.norm(hidden) * self.scale)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def stack_batch() -> dict[str, Tensor]:
    ids, labels = micro_batches(6)[0]
    return {"ids": ids, "labels": labels}


def loss_in_dict(output: Any, batch: Any) -> Tensor:
    return output["loss"]


RANKS = [[(0,)], [(0,), (1,)], [(0,), (1,), (2,)], [(0,), (1,), (2,), (3,)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_a_gpt_in_stages_has_the_losses_and_gradients_of_the_whole(ranks: list[tuple[int, ...]]) -> None:
    batches = micro_batches(8, 5, 8)  # all of them between forward and backward, with other shapes
    whole = run_whole(gpt(), batches, output_is_loss)
    assert_same(whole, run_stages(cut_over(gpt(), ranks), batches))


@pytest.mark.parametrize("ranks", RANKS[1:], ids=str)
def test_a_tied_head_has_a_copy_under_the_embeddings_name(ranks: list[tuple[int, ...]]) -> None:
    batches = micro_batches(8)
    whole = run_whole(gpt(tied=True), batches, output_is_loss)
    parts = cut_over(gpt(tied=True), ranks)
    last = parts[0].num_stages - 1
    for part in parts:
        assert part.tied == {"embedding.weight": (0, last)}
        assert ("embedding.weight" in names_of(part)) == bool({0, last} & set(part.stages))
        assert "head.weight" not in names_of(part)
    assert_same(whole, run_stages(parts, batches))


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_what_blocks_share_crosses_and_masks_are_computed_on_each_stage(ranks: list[tuple[int, ...]]) -> None:
    whole = run_whole(Stack(), [stack_batch()], loss_in_dict)
    parts = cut_over(Stack(), ranks)
    assert_same(whole, run_stages(parts, [stack_batch()]))
    if len(ranks) > 1:
        sent = parts[0](0, None, stack_batch())
        assert list(sent["arguments"]) == ["0", "bias"] and sent["output"] == ("hidden", None)


def test_evaluation_needs_no_gradients() -> None:
    batches = [stack_batch()]
    with torch.no_grad():
        whole = run_whole(Stack().eval(), batches, loss_in_dict)
        parts = cut_over(Stack(), [(0,), (1, 2)])
        for part in parts:
            assert not part.eval().whole_model.training
        assert torch.equal(run_stages(parts, batches)[0][0], whole[0][0])


def test_a_rank_has_the_parameters_of_its_stages_and_the_rest_is_freed() -> None:
    model = gpt()
    alive = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    part = cut(model, 3, stages_of_rank=(1,), starts=(0, 2, 4))
    gc.collect()
    own = [name for name in alive if name.startswith(("blocks.2.", "blocks.3."))]
    assert names_of(part) == own == [name for name, parameter in alive.items() if parameter() is not None]
    assert list(part.state_dict()) == own
    assert [name for name, _ in part.named_modules() if name.count(".") == 1] == ["blocks.2", "blocks.3"]
    part.to(torch.float64)
    assert part.get_parameter("blocks.2.attention.qkv.weight").dtype == torch.float64


def test_a_model_on_the_meta_device_is_cut_there() -> None:
    with torch.device("meta"):
        model = gpt()
    parts = [cut(copy.deepcopy(model), 2, stages_of_rank=(stage,)) for stage in range(2)]
    assert all(parameter.is_meta for part in parts for parameter in part.parameters())
    source = gpt()
    for part in parts:
        part.to_empty(device="cpu")
        part.load_state_dict({name: source.state_dict()[name] for name in part.state_dict()})
    whole = run_whole(gpt(), micro_batches(8), output_is_loss)
    assert_same(whole, run_stages(parts, micro_batches(8)))


def test_stage_parameters_are_those_that_a_stage_uses() -> None:
    part = cut(gpt(num_layers=2, tied=True), 2, stages_of_rank=(0, 1))
    own = {id(parameter): name for name, parameter in part.named_parameters()}
    first, last = ([own[id(parameter)] for parameter in part.stage_parameters(stage)] for stage in (0, 1))
    assert set(first) & set(last) == {"embedding.weight"}
    assert {name for name in last if not name.startswith("blocks.1.")} == {"embedding.weight", "norm.weight"}


def test_a_forward_leaves_no_activations_behind() -> None:
    parts = cut_over(gpt(), [(0,), (1,)])
    batch = micro_batches(8)[0]

    def count() -> int:
        return sum(type(thing) is Tensor for thing in gc.get_objects())

    gc.collect()
    gc.disable()  # so that reference cycles would stay
    try:
        before = count()
        with torch.no_grad():
            sent = parts[0](0, None, batch)
            parts[1](1, sent, batch)
        assert count() == before + 1  # what was sent
        del sent
        parts[1](1, parts[0](0, None, batch), batch)
        assert count() == before
    finally:
        gc.enable()


class Mixer(nn.Sequential):
    """A list with a forward of its own."""

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        for block in self:
            hidden = block(hidden) * scale
        return hidden


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixer = Mixer(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mixer(hidden, scale=0.5)


@pytest.mark.parametrize("make", [lambda: Wrapped().mixer, Wrapped, lambda: nn.Sequential(*Wrapped().mixer)])
def test_a_sequential_is_cut_with_a_loss_function(make: Callable[[], nn.Module]) -> None:
    batch = (torch.randn(3, WIDTH), torch.randn(3, WIDTH))
    loss_fn = nn.functional.mse_loss
    model = make()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    whole = [loss.detach()], {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same(whole, run_stages(cut_over(make(), [(0,), (1, 2)], loss_fn=loss_fn), [batch]))


class Convolutions(nn.Module):
    """Children that the forward calls by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 1)  # registered first, called last
        self.stem = nn.Conv2d(1, 4, 3, stride=2)
        self.pool = nn.MaxPool2d(2)
        self.one = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.two(self.one(self.pool(self.stem(image))))
        return self.fc(hidden.mean((2, 3))).mean()


def test_split_points_may_be_children_of_any_module() -> None:
    torch.manual_seed(3)
    batches = [(torch.randn(2, 1, 16, 16),)]
    whole = run_whole(Convolutions(), batches, output_is_loss)
    parts = cut_over(Convolutions(), [(0,), (1,), (2,)], split_points=["one", "two"])
    assert [sorted({name.split(".")[0] for name in names_of(part)}) for part in parts] == [
        ["stem"],
        ["one"],
        ["fc", "two"],
    ]
    assert_same(whole, run_stages(parts, batches))


def test_split_points_name_the_first_block_of_a_stage() -> None:
    parts = cut_over(gpt(), [(0,), (1,), (2,)], split_points=["blocks.1", "blocks.5"])
    assert parts[0].starts == (0, 1, 5)
    whole = run_whole(gpt(), micro_batches(8), output_is_loss)
    assert_same(whole, run_stages(parts, micro_batches(8)))


@pytest.mark.parametrize(
    ("partition", "starts"),
    [("parameters", (0, 2, 4)), ("uniform", (0, 2, 4)), ("best", (0, 1, 4)), ([9, 1, 1, 1, 5, 5], (0, 1, 5))],
)
def test_the_partition_balances_parameters_blocks_or_costs(partition: Any, starts: tuple[int, ...]) -> None:
    model = GPT(GPTConfig(200, 8, 6, 16, 2, tied=False))  # the embedding has the parameters of one block
    if partition == "best":
        model.head = nn.Linear(16, 1, bias=False)  # type: ignore[assignment]
    assert cut(model, 3, stages_of_rank=(0,), partition=partition).starts[:3] == starts


def test_a_block_that_is_used_twice_is_tied() -> None:
    def shared() -> GPT:
        model = gpt()
        model.blocks[4] = model.blocks[1]
        model.blocks[3].attention = model.blocks[0].attention  # a part of a block
        return model

    whole = run_whole(shared(), micro_batches(8), output_is_loss)
    parts = cut_over(shared(), [(0,), (1,), (2,)], starts=(0, 2, 4))
    assert parts[0].tied["blocks.1.attention.qkv.weight"] == (0, 2)
    assert parts[0].tied["blocks.0.attention.qkv.weight"] == (0, 1)
    assert "blocks.0.feed_forward.up.weight" not in names_of(parts[1])
    assert_same(whole, run_stages(parts, micro_batches(8)))


def test_frozen_blocks_and_embeddings_send_no_gradient() -> None:
    def frozen() -> GPT:
        model = gpt()
        model.embedding.requires_grad_(False)
        model.blocks[:3].requires_grad_(False)
        return model

    whole = run_whole(frozen(), micro_batches(8), output_is_loss)
    assert_same(whole, run_stages(cut_over(frozen(), [(0,), (1,), (2,)], starts=(0, 2, 4)), micro_batches(8)))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_that_the_model_checkpoints_are_recomputed(use_reentrant: bool) -> None:
    def run(function: Callable[..., Any], hidden: Tensor, mask: Tensor, bias: Tensor | None) -> Any:
        if use_reentrant:
            return checkpoint(lambda h, m, b: function(h, m, bias=b), hidden, mask, bias, use_reentrant=True)
        return checkpoint(function, hidden, mask, bias=bias, use_reentrant=False)

    whole = run_whole(Stack(run=run), [stack_batch()], loss_in_dict)
    assert_same(whole, run_stages(cut_over(Stack(run=run), [(0,), (1,), (2,)]), [stack_batch()]))


def test_blocks_that_shoal_recomputes_are_recomputed() -> None:
    whole = run_whole(gpt(), micro_batches(8), output_is_loss)
    parts = cut_over(gpt(), [(0, 2), (1, 3)])
    for part in parts:
        assert len(recompute_blocks(part, ["Block"])) == 3
    assert_same(whole, run_stages(parts, micro_batches(8)))


class Outside(nn.Module):
    """A model with blocks that some function of them and the embedding calls."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.run(self.blocks, self.embedding(ids)).sum()


def residual(blocks: Any, hidden: Tensor) -> Tensor:
    for block in blocks:
        hidden = hidden + block(hidden)
    return hidden


def skip_to_last(blocks: Any, hidden: Tensor) -> Tensor:
    first = hidden
    for block in blocks:
        hidden = block(hidden)
    return hidden + first


def twice(blocks: Any, hidden: Tensor) -> Tensor:
    for block in [*blocks, *blocks]:
        hidden = block(hidden)
    return hidden


def downward(blocks: Any, hidden: Tensor) -> Tensor:
    for position in (2, 1, 0):
        hidden = blocks[position](hidden)
    return hidden


def early(blocks: Any, hidden: Tensor) -> Tensor:
    return blocks[0](hidden)


FILE = "test_cut.py"


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (
            residual,
            rf"uses .* \(.*{FILE}:\d+\), .*; argument '0', .* of 'blocks\.\d' \(.*{FILE}:\d+\)",
        ),
        (skip_to_last, rf"uses 'embedding' \(.*{FILE}:\d+\), which .*; a gradient arrives at it"),
        (twice, "calls block 'blocks.0' out of order"),
        (downward, "calls block 'blocks.2' out of order"),
        (early, "ended on pipeline stage 0 without a call of block 'blocks.1'"),
    ],
)
def test_a_model_that_cannot_be_cut_between_its_blocks_is_an_error(run: Any, says: str) -> None:
    parts = cut_over(Outside(run), [(0,), (1,), (2,)])
    with pytest.raises((ModelError, RuntimeError), match=says):
        run_stages(parts, [(torch.zeros(2, 3, dtype=torch.long),)])
    for part in parts:  # every module is in its place again
        assert type(part.whole_model.blocks) is nn.ModuleList and "_forward" not in vars(part.whole_model.blocks)


def test_a_module_on_a_wrong_stage_is_named_with_the_key_that_repairs_it() -> None:
    with pytest.raises(ModelError, match=r"'norm' is on the first .* it after .*\n.*\n.*add 'norm' to .*last_stage"):
        run_stages(cut_over(Stack(), [(0,), (1,)], first_stage=["norm"]), [stack_batch()])
    with pytest.raises(ModelError, match=r"'tokens' is on the last .* it before .*\n.*\n.*'tokens' to .*first_stage"):
        run_stages(cut_over(Stack(), [(0,), (1,)], last_stage=["tokens"]), [stack_batch()])
    whole = run_whole(Stack(), [stack_batch()], loss_in_dict)
    parts = cut_over(Stack(), [(0,), (1,), (2,)], last_stage=["norm"], every_stage=["tokens"])
    assert parts[0].tied == {"tokens.weight": (0, 1, 2)}
    assert_same(whole, run_stages(parts, [stack_batch()]))


@pytest.mark.parametrize(
    ("num_stages", "options", "says"),
    [
        (7, {}, "7 pipeline stages, but GPT has 6 blocks in 'blocks'"),
        (2, {"starts": (0, 6)}, r"\[0, 6\] are not the first blocks of 2 stages"),
        (2, {"starts": (1, 3)}, r"\[1, 3\] are not the first blocks"),
        (2, {"split_points": ["blocks.9"]}, r"\['blocks.9'\] are not modules of the model"),
        (2, {"split_points": ["blocks.0"]}, r"begin at \[0\]"),
        (2, {"split_points": ["norm"]}, r"'' has lists of modules beside \['norm'\]"),
        (3, {"split_points": ["blocks.2"]}, r"\[0, 2\] are not the first blocks of 3 stages"),
        (2, {"partition": [1.0, -1.0]}, "2 costs .* for the 6 blocks"),
        (2, {"last_stage": ["nrm"]}, r"\['nrm'\] are no modules with parameters beside the blocks"),
    ],
)
def test_a_cut_that_does_not_fit_is_an_error(num_stages: int, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        cut(gpt(), num_stages, stages_of_rank=(0,), **options)


class ManyExperts(nn.Module):
    """A feed-forward layer with a list of experts that is longer than the list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 6)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.gate(hidden).softmax(-1)
        outputs = [weights[..., i : i + 1] * expert(hidden) for i, expert in enumerate(self.experts)]
        return hidden + torch.stack(outputs).sum(0)


def test_experts_are_no_blocks_however_many_they_are() -> None:
    few, one = (nn.Sequential(OrderedDict(layers=nn.Sequential(*(ManyExperts() for _ in range(n))))) for n in (2, 1))
    assert find_blocks(few).names == ("0", "1")
    with pytest.raises(ModelError, match="2 pipeline stages, but Sequential has 1 block"):
        cut(one, 2, stages_of_rank=(0,))


def test_a_model_without_a_list_of_blocks_is_an_error() -> None:
    with pytest.raises(ModelError, match="Linear has no list of blocks"):
        cut(nn.Linear(2, 2), 2, stages_of_rank=(0,))


def test_an_output_without_a_loss_and_a_stage_without_a_batch_are_errors() -> None:
    part = cut(gpt(), 1, stages_of_rank=(0,))
    batch = (micro_batches(8)[0][0],)
    with pytest.raises(UsageError, match=r"no loss: Tensor of shape \[2, 8, 17\]"):
        part.loss(part(0, None, batch), batch)
    with pytest.raises(UsageError, match="pipeline stage 0 has no micro-batch"):
        part(0, None, None)


def test_a_copy_without_data_calls_the_hooks_that_its_module_gets_later() -> None:
    module = nn.Linear(4, 4)
    copied = meta_copy(module)
    calls: list[tuple[Any, ...]] = []
    module.register_forward_hook(lambda called, args, kwargs, output: calls.append((kwargs, output)), with_kwargs=True)
    output = copied(torch.empty(2, 4, device="meta"))
    assert [kwargs for kwargs, _ in calls] == [{}]
    assert calls[0][1] is output
