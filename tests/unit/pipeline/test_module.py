"""PipelineModule: the parts of all ranks, built in one process, against the whole model on one stage, bit for bit."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import ModelError, UsageError
from shoal.parallel.recompute import checkpoint
from shoal.pipeline.layers import LayerSpec, TiedLayerSpec
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.schedule import stages_to_ranks
from shoal.pipeline.topology import PipeDataParallelTopology


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Head(nn.Module):
    """A class of its own that shares a weight with an embedding."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(width, num_tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.norm(x))


def logits(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t()


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def gpt(num_blocks: int = 3, dropout: float = 0.0) -> list[Any]:
    """Embedding, blocks, a function, the embedding again as head."""
    blocks = [LayerSpec(Block, 8, dropout=dropout) for _ in range(num_blocks)]
    return [
        TiedLayerSpec("embed", nn.Embedding, 16, 8),
        *blocks,
        double,
        TiedLayerSpec("embed", nn.Embedding, 16, 8, forward_fn=logits),
    ]


def untied() -> list[Any]:
    return [LayerSpec(nn.Embedding, 16, 8), LayerSpec(Block, 8), nn.Tanh(), LayerSpec(Head, 16, 8), double]


def two_classes() -> list[Any]:
    return [
        TiedLayerSpec("embed", nn.Embedding, 16, 8),
        LayerSpec(Block, 8),
        LayerSpec(Block, 8),
        TiedLayerSpec("embed", Head, 16, 8, tied_weight_attr="proj.weight"),
    ]


MODELS: dict[str, Callable[[], list[Any]]] = {"gpt": gpt, "untied": untied, "two classes": two_classes}


def parts_of(layers: Callable[[], Any], num_ranks: int, seed: int = 3, **options: Any) -> list[PipelineModule]:
    """The modules of all ranks, each built as in a process of its own."""
    parts = []
    for rank in range(num_ranks):
        torch.manual_seed(seed)
        parts.append(PipelineModule(layers(), num_ranks, loss_fn=loss_fn, pipeline_rank=rank, **options))
    return parts


def batches(count: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(0, 16, (2, 5), generator=generator) for _ in range(2)) for _ in range(count)]


def train(parts: Sequence[PipelineModule], micro_batches: Sequence[Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """All forwards, then all backwards, as with GPipe; returns losses and the gradients summed over the stages."""
    of_stage = {stage: part for part in parts for stage in part.stages}
    assert sorted(of_stage) == list(range(parts[0].num_stages))
    losses, runs = [], []
    for batch in micro_batches:
        received, run = None, []
        for stage in sorted(of_stage):
            output = of_stage[stage](stage, received, batch)
            run.append((received, output))
            received = output.detach().requires_grad_()
        losses.append(of_stage[stage].loss(run[-1][1], batch))
        runs.append(run)
    for loss, run in zip(losses, runs, strict=True):
        loss.backward()
        for (received, _), (_, before) in zip(reversed(run), [*reversed(run[:-1]), (None, None)], strict=True):
            if before is not None:
                before.backward(received.grad)
    gradients: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return [loss.item() for loss in losses], gradients


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed_layers", [False, True])
@pytest.mark.parametrize(("num_ranks", "virtual_stages", "order"), [(2, 1, "loop"), (4, 1, "loop"), (2, 2, "v")])
def test_every_number_of_stages_has_the_values_and_gradients_of_one(
    model: str, seed_layers: bool, num_ranks: int, virtual_stages: int, order: str
) -> None:
    options = {"partition_method": "uniform", "seed_layers": seed_layers}
    [whole] = parts_of(MODELS[model], 1, **options)
    parts = parts_of(MODELS[model], num_ranks, virtual_stages=virtual_stages, stage_to_rank=order, **options)
    values = dict(whole.named_parameters())
    held = [(name, parameter) for part in parts for name, parameter in part.named_parameters()]
    assert {name for name, _ in held} == values.keys()
    assert [name for name, parameter in held if not torch.equal(parameter, values[name])] == []
    losses, gradients = train(parts, batches())
    expected_losses, expected_gradients = train([whole], batches())
    assert losses == expected_losses
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        if name in parts[0].tied:  # its terms are added in another order
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(gradient, expected_gradients[name]), name


def test_layers_have_the_names_of_deepspeed_and_a_rank_keeps_its_own() -> None:
    parts = parts_of(gpt, 2)
    names = [[name for name, _ in part.named_parameters()] for part in parts]
    assert parts[0].partitions() == parts[1].parts == [0, 3, 6]
    assert names[0] == [
        "tied_modules.embed.weight",
        "1.linear.weight",
        "1.linear.bias",
        "2.linear.weight",
        "2.linear.bias",
    ]
    assert names[1] == ["tied_modules.embed.weight", "3.linear.weight", "3.linear.bias"]
    assert [part.tied for part in parts] == [{"tied_modules.embed.weight": (0, 1)}] * 2
    assert [part.stage_owner(index) for part in parts for index in (0, 2, 3, 5)] == [0, 0, 1, 1] * 2
    assert len(parts[0].forward_funcs) == 3
    assert [len(part.stage_parameters(part.stage_id)) for part in parts] == [5, 3]
    assert parts[1].stage_parameters(1)[-1] is parts[1].tied_modules["embed"].weight


def test_layers_of_one_key_and_two_classes_share_the_named_weight_under_its_first_name() -> None:
    parts = parts_of(two_classes, 4)
    assert [name for name, _ in parts[3].named_parameters()] == [
        "tied_modules.embed.weight",
        "3.norm.weight",
        "3.norm.bias",
        "3.proj.bias",
    ]
    assert parts[3].get_parameter("3.proj.weight") is parts[3].get_parameter("tied_modules.embed.weight")
    [whole] = parts_of(two_classes, 1)
    assert whole.tied == {}
    assert whole.get_parameter("3.proj.weight") is whole.get_parameter("tied_modules.embed.weight")
    with pytest.raises(ModelError, match=r"share \[\(16, 8\)\], and layer 3 .* has \[\(16,\)\] as proj.bias"):
        parts_of(lambda: [*two_classes()[:3], TiedLayerSpec("embed", Head, 16, 8, tied_weight_attr="proj.bias")], 2)
    with pytest.raises(ModelError, match=r"(?s)no attribute `nothing`.*do: name its parameters: norm.weight"):
        parts_of(lambda: [*two_classes()[:3], TiedLayerSpec("embed", Head, 16, 8, tied_weight_attr="nothing")], 2)


def test_one_rank_has_the_values_of_a_sequential_that_is_built_in_the_same_order() -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Embedding(16, 8), Block(8), Block(8), Head(16, 8))
    specs = [LayerSpec(nn.Embedding, 16, 8), LayerSpec(Block, 8), LayerSpec(Block, 8), LayerSpec(Head, 16, 8)]
    state = random.getstate()
    for part in parts_of(lambda: specs, 3):
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name))
    assert random.getstate() == state


def test_seeds_of_layers_are_those_of_deepspeed() -> None:
    seen: list[int] = []
    [part] = parts_of(untied, 1, seed_layers=True, seed_fn=seen.append, base_seed=50)
    assert seen == [50, 51, 53]  # layers 2 and 4 are built already
    part(0, None, batches()[0])
    part(0, None, batches()[0])
    assert seen[3:] == [100, 101, 102, 103, 104, 150, 151, 152, 153, 154]
    seen.clear()
    second = parts_of(untied, 3, seed_layers=True, seed_fn=seen.append, base_seed=50, partition_method="uniform")[1]
    assert second.partitions() == [0, 2, 4, 5]
    assert seen == [50, 51, 53]  # rank 0's, rank 1's


def test_a_sequential_with_a_shared_weight_is_cut_with_the_weight_under_its_first_name() -> None:
    def shared() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
        model[3].weight = model[0].weight
        return model

    parts = parts_of(shared, 2, partition_method=[1, 1, 1, 1])
    assert [name for name, _ in parts[1].named_parameters()] == ["2.weight", "0.weight", "3.bias"]
    assert parts[1].tied == {"0.weight": (0, 1)}
    assert parts[1].get_parameter("3.weight") is parts[1].get_parameter("0.weight")
    repeated = nn.Tanh(), nn.Linear(8, 8)
    [part] = parts_of(lambda: [*repeated, *repeated], 1)
    assert [name for name, _ in part.named_parameters()] == ["1.weight", "1.bias"]


def test_dropout_is_the_same_on_every_number_of_stages_with_seeded_layers() -> None:
    def dropped() -> list[Any]:
        return gpt(dropout=0.5)

    expected = train(parts_of(dropped, 1, seed_layers=True), batches())[0]
    assert train(parts_of(dropped, 3, seed_layers=True), batches())[0] == expected
    assert expected != train(parts_of(gpt, 1, seed_layers=True), batches())[0]


@pytest.mark.parametrize("interval", [1, 2, 9])
def test_recomputed_layers_give_the_same_gradients(interval: int) -> None:
    calls: list[int] = []

    def counting(function: Callable[..., Any], *args: Any) -> Any:
        calls.append(len(args))
        return checkpoint(function, *args)

    options = {"activation_checkpoint_interval": 3, "activation_checkpoint_func": counting}
    parts = parts_of(lambda: gpt(dropout=0.5), 2, seed_layers=True, **options)
    for part in parts:
        part.set_checkpoint_interval(interval)
    found = train(parts, batches(1))
    assert len(calls) == {1: 5, 2: 4, 9: 2}[interval]  # the function alone is not recomputed
    expected = train(parts_of(lambda: gpt(dropout=0.5), 2, seed_layers=True), batches(1))
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())


class Add(nn.Linear):
    def forward(self, pair: Any) -> torch.Tensor:
        assert isinstance(pair, tuple)
        return super().forward(pair[0] + pair[1])


def test_checkpointable_layers_names_classes_and_a_tuple_is_one_argument_of_a_layer() -> None:
    calls: list[int] = []

    def recording(function: Callable[..., Any], *args: Any) -> Any:
        calls.append(len(args))
        return function(*args)

    [part] = parts_of(
        lambda: [lambda x: (x, x), LayerSpec(Add, 4, 4), LayerSpec(nn.Linear, 4, 4), torch.sum],
        1,
        activation_checkpoint_interval=1,
        activation_checkpoint_func=recording,
        checkpointable_layers=["Add"],
    )
    part.loss_fn = None
    output = part(0, None, (torch.ones(4),))
    assert calls == [2]
    assert part.loss(output, None) is output
    part.checkpointable_layers = None
    assert torch.equal(part(0, None, (torch.ones(4),)), output)
    assert calls == [2, 2, 1]


def test_layers_that_cannot_fill_the_stages_are_an_error_that_says_what_fits() -> None:
    with pytest.raises(UsageError, match=r"(?s)5 layers cannot fill 6 pipeline stages\..*num_stages=5 at most"):
        parts_of(untied, 6)
    with pytest.raises(
        UsageError, match=r"(?s)5 layers .* 6 .*\(2 ranks with 3 each\).*virtual_stages=2 or num_stages=1"
    ):
        parts_of(untied, 2, virtual_stages=3)
    with pytest.raises(UsageError, match=r"(?s)num_stages=3 does not divide the 1 ranks.*use one of 1"):
        PipelineModule(untied(), 3)
    for layer in (nn.Linear, None, parts_of(untied, 1)[0]):
        with pytest.raises(UsageError, match=r"layer 1 of 2 is (<class|None|PipelineModule)"):
            parts_of(lambda layer=layer: [double, layer], 1)
    with pytest.raises(UsageError, match="is not a class of torch"):
        LayerSpec(double)  # type: ignore[arg-type]  # what it refuses
    with pytest.raises(UsageError, match=r"stage_to_rank=\[0, 0\]"):
        parts_of(untied, 2, stage_to_rank=[0, 0])
    [part] = parts_of(untied, 1)
    for batch in (torch.ones(2, 2), {"x": 1}, None):
        with pytest.raises(UsageError, match=rf"reads inputs from a micro-batch, which is a {type(batch).__name__}"):
            part(0, None, batch)
    with pytest.raises(UsageError, match="reads labels from a micro-batch, which is 1 parts"):
        part.loss(torch.ones(()), (1,))


def test_a_stage_may_begin_with_a_layer_that_works_in_place() -> None:
    def layers() -> list[Any]:
        return [LayerSpec(nn.Linear, 8, 8), nn.ReLU(inplace=True), LayerSpec(nn.Linear, 8, 16)]

    batch = torch.ones(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64)
    expected = train(parts_of(layers, 1), [batch])
    found = train(parts_of(layers, 3), [batch])
    assert found[0] == expected[0]
    assert all(torch.equal(gradient, expected[1][name]) for name, gradient in found[1].items())


def test_layers_of_other_ranks_are_freed_one_at_a_time() -> None:
    alive: list[weakref.ref[nn.Module]] = []
    most: list[int] = []

    class Counted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            if self.weight.device.type != "meta":
                alive.append(weakref.ref(self))
                most.append(sum(each() is not None for each in alive))

    part = PipelineModule([LayerSpec(Counted) for _ in range(12)], 4, pipeline_rank=3)
    assert most == [*[1] * 10, 2, 3]
    assert part.stages == (3,)


def test_orders_of_virtual_stages() -> None:
    assert stages_to_ranks("loop", 2, 3) == [0, 1, 0, 1, 0, 1]
    assert stages_to_ranks("v", 2, 3) == [0, 1, 1, 0, 0, 1]
    parts = parts_of(gpt, 2, virtual_stages=2, stage_to_rank="v")
    assert [part.stages for part in parts] == [(0, 3), (1, 2)]
    assert [part.num_stages for part in parts] == [4, 4]
    assert parts[1].tied == {"tied_modules.embed.weight": (0, 3)}  # both on rank 0, which has one parameter
    assert [name for name, _ in parts[1].named_parameters() if "tied" in name] == []


def test_a_layer_file_has_the_name_that_deepspeed_gives_it() -> None:
    parts = parts_of(gpt, 2)
    assert parts[1].ckpt_layer_path("dir", 1) == "dir/layer_04-model_states.pt"


@pytest.mark.parametrize("model", MODELS)
def test_a_module_without_stages_is_cut_later_into_the_same_parts(model: str) -> None:
    ranks = stages_to_ranks("v", 2, 2)
    topology = PipeDataParallelTopology(2, 1)
    for rank, expected in enumerate(parts_of(MODELS[model], 2, virtual_stages=2, stage_to_rank="v")):
        torch.manual_seed(3)
        module = PipelineModule(MODELS[model](), loss_fn=loss_fn)
        assert module.is_whole
        assert (module.num_stages, module.stages, module.degrees) == (1, (0,), {})
        whole = dict(module.named_parameters())
        module.keep_stages(topology, ranks, rank=rank)
        assert not module.is_whole
        assert (module.stages, module.parts, module.tied) == (expected.stages, expected.parts, expected.tied)
        held = dict(module.named_parameters())
        assert list(held) == [name for name, _ in expected.named_parameters()]
        assert all(parameter is whole[name] for name, parameter in held.items())
        assert all(torch.equal(held[name], parameter) for name, parameter in expected.named_parameters())
