"""Expert parallelism beside every ZeRO stage: parameters equal those of one process that holds all experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.access.engine_parameters import safe_get_full_fp32_param
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ConfigError, ModelError, UsageError
from shoal.mesh import Mesh
from shoal.parallel.expert.divide import divide
from shoal.parallel.expert.held import ExpertsHeld
from shoal.pipeline.module import PipelineModule
from tests.helpers.expert_cases import (
    NUM_EXPERTS,
    WIDTH,
    ExpertBlock,
    ExpertModel,
    ListedExperts,
    RoutedExperts,
    RoutedModel,
    StackedExperts,
    WideModel,
)
from tests.helpers.training import adamw, batch, config, make, sgd, start_with

STEPS = 5


def alone(
    factory: Any, num_ranks: int, accumulation: int, optimizer: Any = sgd, length: int | None = None
) -> dict[str, torch.Tensor]:
    model = make(factory)
    stepped = optimizer(model.parameters())
    for step in range(STEPS):
        for micro in range(accumulation):
            tokens, targets = whole(step, micro, num_ranks, accumulation)
            (model(tokens[:, :length], targets[:, :length]) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        stepped.step()
        stepped.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def whole(step: int, micro: int, num_ranks: int, accumulation: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [batch(step * accumulation + micro, rank, num_ranks) for rank in range(num_ranks)]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def train(engine: Any, steps: range, accumulation: int = 1) -> None:
    ranks = engine.axes.batch
    for step in steps:
        for micro in range(accumulation):
            engine.backward(engine(*batch(step * accumulation + micro, ranks.rank, ranks.size)))
            engine.step()


def settings(stage: int, ep: int | None, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    made = config(stage, gradient_clipping=0.5, gradient_accumulation_steps=accumulation, **more)
    return {**made, "parallel": {**({} if ep is None else {"ep": ep}), **more.get("parallel", {})}}


def assert_close(values: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert set(values) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(values[name].float(), value, rtol=1e-6, atol=1e-6, msg=name)


HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
HOST_PARAMETERS = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize("form", ["stacked", "listed"])
@pytest.mark.parametrize(
    ("size", "ep", "stage", "accumulation", "more"),
    [
        (2, 2, 0, 1, {}),
        (2, 2, 1, 2, {}),
        (4, 2, 0, 2, {}),
        (4, 2, 1, 1, {}),
        (4, 2, 2, 2, {}),
        (4, 2, 3, 1, {}),
        (4, 4, 3, 2, {}),
        (4, 2, 2, 1, HOST),
        (4, 2, 3, 2, HOST_PARAMETERS),
        (4, 2, 3, 1, {"parallel": {"dp_replicate": 2}}),
        (8, 2, 2, 1, {"parallel": {"dp_replicate": 2}}),
    ],
)
def test_parameters_equal_those_of_one_process_that_holds_all_experts(
    form: str, size: int, ep: int, stage: int, accumulation: int, more: dict[str, Any]
) -> None:
    expected = alone(partial(ExpertModel, None if form == "stacked" else 1), size, accumulation)

    def rank() -> tuple[dict[str, Any], float]:
        engine = start_with(
            make(partial(ExpertModel, None if form == "stacked" else ep)),
            settings(stage, ep if form == "stacked" else None, accumulation, **more),
        )
        train(engine, range(STEPS), accumulation)
        return engine.module_state_dict(), engine.get_global_grad_norm()

    found = run_ranks(size, rank)
    for values, norm in found:
        assert_close(values, expected)
        assert norm == found[0][1]


def test_each_rank_stores_its_share_of_its_experts_only() -> None:
    def rank() -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
        engine = start_with(make(ExpertModel), settings(3, 2))
        experts = engine.module.blocks[0].experts
        groups = [group for group in engine.sharded.groups if group.axes.parts is not None]
        stored = [(group.owned_numel, group.buffer.shard.numel()) for group in groups]
        return [tuple(p.shape) for p in experts.parameters()], stored

    per_layer = sum(p.numel() for p in ExpertModel().blocks[0].experts.parameters())
    for shapes, stored in run_ranks(4, rank):
        assert all(shape[0] == NUM_EXPERTS // 2 for shape in shapes)
        assert len(stored) == 2
        for owned, shard in stored:  # 2 expert-parallel ranks x 2 that shard; a parameter begins at a multiple of 64
            assert per_layer / 4 <= owned == shard < per_layer / 4 + 2 * 64


@pytest.mark.parametrize("form", ["stacked", "listed"])
def test_a_checkpoint_changes_the_expert_parallel_ranks_the_stage_and_the_number_of_ranks(
    tmp_path: Path, form: str
) -> None:
    def engine_of(ep: int, stage: int) -> Any:
        listed = form == "listed"
        return start_with(
            make(partial(ExpertModel, ep if listed else None)), settings(stage, None if listed else ep), adamw
        )

    def save() -> None:
        engine = engine_of(2, 3)
        train(engine, range(2))
        engine.save_checkpoint(str(tmp_path), tag="mine")
        engine.destroy()

    def load(ep: int, stage: int) -> dict[str, Any]:
        engine = engine_of(ep, stage)
        engine.load_checkpoint(str(tmp_path), tag="mine")
        for step in range(2, STEPS):
            tokens, targets = whole(step, 0, 4, 1)
            ranks = engine.axes.batch
            rows = len(tokens) // ranks.size
            mine = slice(ranks.rank * rows, (ranks.rank + 1) * rows)
            engine.backward(engine(tokens[mine], targets[mine]))
            engine.step()
        values = engine.module_state_dict()
        engine.destroy()
        return values

    expected = alone(partial(ExpertModel, None if form == "stacked" else 1), 4, 1, adamw)
    run_ranks(4, save)
    layouts = ((4, 4, 1), (2, 1, 2), (1, 1, 0), (4, 2, 3))
    results = [run_ranks(size, partial(load, ep, stage))[0] for size, ep, stage in layouts]
    for values in results:
        assert_close(values, expected if form == "stacked" else results[0])


def test_accessors_put_the_experts_of_all_ranks_together() -> None:
    def rank() -> torch.Tensor:
        engine = start_with(make(ExpertModel), settings(2, 2))
        return safe_get_full_fp32_param(engine.module.blocks[1].experts.up)

    expected = make(ExpertModel).blocks[1].experts.up
    for value in run_ranks(2, rank):
        torch.testing.assert_close(value, expected)


def test_what_does_not_fit_is_an_error_on_every_rank() -> None:
    def rank(model: Any, ep: int) -> None:
        start_with(make(model), settings(1, ep))

    with pytest.raises(ConfigError, match="4 experts cannot be divided among 3 expert-parallel ranks"):
        run_ranks(3, lambda: rank(ExpertModel, 3))
    with pytest.raises(ModelError, match="Linear has no expert layer"):
        run_ranks(2, lambda: rank(partial(torch.nn.Linear, 4, 4), 2))
    with pytest.raises(ConfigError, match="3 does not divide the 4 ranks"):
        run_ranks(4, lambda: rank(ExpertModel, 3))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["meta", "zero.Init"])
def test_a_model_that_is_not_whole_anywhere_is_divided(how: str, stage: int) -> None:
    def rank() -> dict[str, Any]:
        chosen = settings(stage, 2)
        if how == "meta":
            with torch.device("meta"):
                model = ExpertModel()
            torch.manual_seed(0)
        else:
            with shoal.zero.Init(config_dict_or_path=chosen):
                model = ExpertModel()
        engine = start_with(model, chosen)
        train(engine, range(2))
        values = engine.module_state_dict()
        assert values["blocks.0.experts.up"].shape[0] == NUM_EXPERTS
        assert not torch.equal(values["blocks.0.experts.up"][0], values["blocks.0.experts.up"][2])
        return values

    first, *others = run_ranks(4, rank)
    for values in others:
        assert_close(values, first)


@pytest.mark.parametrize("axis", ["sp", "cp"])
@pytest.mark.parametrize("ep", [2, 4])
def test_experts_are_divided_among_ranks_that_hold_parts_of_a_sequence(axis: str, ep: int) -> None:
    expected = alone(ExpertModel, 2, 1, length=4)

    def rank() -> dict[str, Any]:
        engine = start_with(make(ExpertModel), settings(2, ep, parallel={axis: 2}))
        for step in range(STEPS):
            tokens, targets = batch(step, engine.axes.batch.rank, engine.axes.batch.size)
            part = engine.axes.get(axis)
            engine.backward(engine(*(each[:, :4].chunk(2, 1)[part.rank] for each in (tokens, targets))))
            engine.step()
        return engine.module_state_dict()

    for values in run_ranks(4, rank):
        assert_close(values, expected)


@pytest.mark.parametrize(
    ("size", "tp", "ep", "stage"), [(2, 2, 2, 0), (4, 2, 2, 1), (4, 2, 4, 2), (4, 2, 2, 3), (8, 2, 4, 3)]
)
def test_tensor_parallel_ranks_hold_different_experts_and_no_token_is_computed_twice(
    size: int, tp: int, ep: int, stage: int
) -> None:
    expected = alone(RoutedModel, size // tp, 1)

    def rank() -> tuple[dict[str, Any], int]:
        plan = {"blocks.*.router": "column_gather_output", "head": "vocab_head"}
        engine = start_with(make(RoutedModel), settings(stage, ep, parallel={"tp": tp, "tp_plan": plan}))
        train(engine, range(STEPS))
        return engine.module_state_dict(), RoutedExperts.num_rows(engine.module)

    found = run_ranks(size, rank)
    for values, _ in found:
        assert_close(values, expected)
    tokens = STEPS * batch(0, 0, 1)[0].numel() * size // tp
    assert sum(rows for _, rows in found) == tokens * 2 * 2  # two layers, two experts of each token


class OtherChoices(RoutedExperts):
    """Chooses other experts on the tensor-parallel ranks with an odd number."""

    def forward(self, hidden: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, share.roll(current_world().rank % 2, -1))


def test_tensor_parallel_ranks_that_choose_different_experts_are_an_error_on_every_rank() -> None:
    plan = {"blocks.*.router": "column_gather_output", "head": "vocab_head"}
    messages = []

    def rank() -> None:
        model = make(RoutedModel)
        model.blocks[1].experts = make(OtherChoices)
        engine = start_with(model, settings(1, 4, parallel={"tp": 2, "tp_plan": plan}))
        with pytest.raises(
            UsageError, match="expert-parallel ranks 0 and 1 are tensor-parallel ranks of the same"
        ) as e:
            train(engine, range(1))
        messages.append(e.value.code)

    run_ranks(4, rank)
    assert messages == ["expert-routing"] * 4


@pytest.mark.parametrize(("stage", "ep"), [(0, 2), (1, 2), (2, 4), (3, 2), (3, 4)])
def test_bytes_of_parameters_gradients_and_state_equal_the_formula(stage: int, ep: int) -> None:
    """Per rank: experts / ep, and by stage / expert_dp; the rest by stage / all ranks."""

    def rank() -> dict[str, int]:
        engine = start_with(make(WideModel), settings(stage, ep), adamw)
        train(engine, range(1))
        return dict(engine.memory_report().by_kind())

    size = 4
    model = WideModel()
    experts = sum(p.numel() for block in model.blocks for p in block.experts.parameters())
    others = sum(p.numel() for p in model.parameters()) - experts
    by_ranks = experts / size + others / size  # experts / ep / expert_dp
    whole = experts / ep + others
    expected = {
        "parameter": 4 * (by_ranks if stage == 3 else whole),
        "gradient": 4 * (by_ranks if stage >= 2 else whole),
        "optimizer state": 8 * (by_ranks if stage >= 1 else whole),
    }
    for held in run_ranks(size, rank):
        for kind, nbytes in expected.items():
            assert held[kind] == pytest.approx(nbytes, rel=0.02), kind


def test_ranks_with_other_layers_of_experts_are_told_so() -> None:
    held = [[StackedExperts() for _ in range(2)] for _ in range(2)]
    held[1][1].experts_held = ExpertsHeld(2 * NUM_EXPERTS)
    messages = []

    def rank() -> None:
        world = current_world()
        comm = world.communicator("ep", Mesh.of(2, ep=2))
        with pytest.raises(ModelError, match="rank 0 has 1 with 4 experts, rank 1 1 with 8") as error:
            divide(torch.nn.ModuleList(held[world.rank]), comm)
        messages.append(str(error.value))

    run_ranks(2, rank)
    assert len(messages) == 2


def test_a_pipeline_stage_may_have_no_experts() -> None:
    class Late(RoutedModel):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0] = torch.nn.Linear(self.embedding.weight.shape[1], self.embedding.weight.shape[1])

    expected = alone(Late, 2, 1)

    def rank() -> dict[str, Any]:
        split = {"stages": 2, "split_points": ["blocks.1"]}
        engine = start_with(make(Late), settings(2, 2, parallel={"pp": 2}, pipeline=split))
        for step in range(STEPS):
            engine.train_batch(iter([batch(step, engine.axes.batch.rank, 2)]))
        return engine.module_state_dict()

    for values in run_ranks(4, rank):
        assert_close(values, expected)


@pytest.mark.parametrize("has_layers", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_pipeline_stage_may_have_no_list_of_experts(place: int, has_layers: bool, tmp_path: Path) -> None:
    def layers(ep_size: int) -> list[torch.nn.Module]:
        blocks = [ExpertBlock(ListedExperts(ep_size)), torch.nn.Linear(WIDTH, WIDTH)]
        return blocks if place == 0 else blocks[::-1]

    def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (output - labels).square().mean()

    class Model(torch.nn.Module):
        def __init__(self, ep_size: int) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(layers(ep_size))

        def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return loss_of(hidden, labels)

    rows = [torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    model = make(lambda: Model(1))
    sum((model(*rows[at : at + 2]) / 2 for at in (0, 2)), torch.zeros(())).backward()
    sgd(model.parameters()).step()
    expected = model.state_dict()

    def rank() -> Any:
        module: Any = make(lambda: Model(2))
        if has_layers:
            module = PipelineModule(module.blocks, num_stages=2, loss_fn=loss_of, partition_method="uniform")
        split, units = {"partition": "uniform"}, {"names": ["[01]" if has_layers else "blocks.[01]"]}
        made = settings(1, 2, parallel={"pp": 2}, pipeline=split, units=units)
        engine: Any = start_with(module, {**made, "gradient_clipping": 0.0})
        at = 2 * engine.axes.batch.rank
        engine.train_batch(iter([(rows[at], rows[at + 1])]))
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        return {name if not has_layers else f"blocks.{name}": v for name, v in engine.module_state_dict().items()}

    for values in run_ranks(4, rank, timeout=30):
        assert_close(values, expected)


def test_rows_move_in_two_steps_where_ranks_are_on_several_nodes() -> None:
    expected = alone(RoutedModel, 4, 1)

    def rank(ranks_per_node: int) -> tuple[dict[str, Any], bool]:
        section = {"expert_parallel": {"ranks_per_node": ranks_per_node}}
        engine = start_with(make(RoutedModel), settings(2, 4, **section))
        train(engine, range(STEPS))
        held = engine.module.blocks[0].experts.experts_held
        return engine.module_state_dict(), held.hierarchy is not None

    for values, has_steps in run_ranks(4, partial(rank, 2)):
        assert has_steps
        assert_close(values, expected)
    assert not any(has_steps for _, has_steps in run_ranks(4, partial(rank, 4)))
    with pytest.raises(ConfigError, match="ranks_per_node is 3, which does not divide 4"):
        run_ranks(4, partial(rank, 3))
