"""Experts split over some of the tensor-parallel ranks: groups of these hold different experts.

tp 4, expert_tensor_parallel_size 2, ep 2    rank            0    1    2    3
                                             half of experts 0 1  0 1  2 3  2 3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.build.plan import mean_size
from shoal.comm.world import current_world, fake_world
from shoal.engine.model_parts import axes_of
from shoal.errors import ConfigError, ModelError, UsageError
from shoal.mesh import Mesh
from shoal.models import GPT, GPTConfig
from shoal.parallel.expert.held import modules_with_experts
from shoal.parallel.expert.stacked import ExpertFeedForward
from shoal.sharding.layout import ParameterSpec
from tests.helpers.any_two import in_turn
from tests.helpers.expert_layers import TOP_K, WIDTH
from tests.helpers.models import VOCABULARY
from tests.helpers.training import batch, config, make, start_with
from tests.ranks.parallel.expert.test_tensor_parallel import (
    DENSE_PLAN,
    STEPS,
    UNITS,
    Model,
    alone,
    assert_close,
    settings,
    tokens_of,
    train,
)  # fmt: skip

OF_EXPERT = "deepspeed_moe.experts.deepspeed_experts."
SPLIT = ("gate_up_proj", "gate_up_proj_bias", "experts.up_proj", "down_proj")


def folded(form: str, stage: int, ep: int, *, tp: int = 4, etp: int = 2, dense: bool = False) -> dict[str, Any]:
    """Of ``tp`` tensor-parallel ranks, groups of ``etp`` hold different experts."""
    made = settings(form, stage, ep)
    made["parallel"].update({"tp": tp, **({"tp_plan": DENSE_PLAN} if dense else {})})
    made["expert_parallel"]["expert_tensor_parallel_size"] = etp
    return made


@pytest.mark.parametrize(
    ("form", "size", "tp", "etp", "ep", "stage", "accumulation", "more"),
    in_turn(
        ["listed", "stacked"],
        [
            (4, 4, 2, 1, 0, 1, {}),
            (4, 4, 2, 2, 1, 2, {}),
            (8, 4, 2, 1, 3, 2, {}),
            (8, 4, 2, 2, 0, 1, {}),
            (8, 4, 2, 4, 2, 2, {}),
            (8, 4, 2, 2, 3, 1, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
            (8, 4, 2, 2, 1, 1, {"parallel": {"dp_replicate": 2}}),
            (8, 8, 4, 2, 2, 1, {}),
            (8, 8, 2, 4, 3, 1, {}),
            (8, 8, 2, 2, 3, 1, {}),
        ],
    ),
)
def test_experts_split_over_some_tensor_parallel_ranks_end_where_one_process_ends(
    form: str,
    size: int,
    tp: int,
    etp: int,
    ep: int,
    stage: int,
    accumulation: int,
    more: dict[str, Any],
    ranks: Callable[..., Any],
) -> None:
    expected, norm = alone(form, size // tp, accumulation=accumulation)

    def rank() -> tuple[dict[str, Any], float, dict[str, tuple[int, ...]]]:
        made = folded(form, stage, ep, tp=tp, etp=etp) | {"gradient_accumulation_steps": accumulation}
        for section, keys in more.items():
            made[section].update(keys)
        engine = start_with(make(partial(Model, form, ep, asks=False)), made)
        shapes = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
        train(engine, range(STEPS))
        return engine.module_state_dict(), engine.get_global_grad_norm(), shapes

    for values, found_norm, shapes in ranks(size, rank):
        assert_close(values, expected)
        assert found_norm == pytest.approx(norm, rel=1e-6)
        if form == "listed":
            of_expert = "experts.layers.1.moe.deepspeed_moe.experts.deepspeed_experts.0."
            assert shapes[f"{of_expert}gate_proj.weight"] == (20 // etp, WIDTH)
            assert shapes[f"{of_expert}down_proj.weight"] == (WIDTH, 20 // etp)
        else:
            assert shapes["experts.layers.0.mlp.experts.gate_up_proj"] == (4 // ep, WIDTH, 40 // etp)
            assert shapes["experts.layers.1.mlp.experts.down_proj"] == (4 // ep, WIDTH, 20 // etp)
            assert shapes["experts.layers.0.mlp.experts.down_proj_bias"] == (4 // ep, WIDTH)


@pytest.mark.parametrize(
    ("form", "size", "ep", "stage", "accumulation"),
    in_turn(["listed", "stacked"], [(4, 1, 0, 1), (4, 2, 2, 2), (8, 1, 3, 2), (8, 1, 1, 1), (8, 4, 3, 1)]),
)
def test_experts_split_over_some_ranks_of_a_split_sequence_end_where_one_process_ends(
    form: str, size: int, ep: int, stage: int, accumulation: int, ranks: Callable[..., Any]
) -> None:
    """Each group gathers its own tokens only."""
    options = {"drops": False, "has_dense": form == "stacked"}
    expected, norm = alone(form, size // 4, length=4, accumulation=accumulation, **options)

    def rank() -> tuple[dict[str, Any], float, list[tuple[str, str, int]]]:
        made = folded(form, stage, ep, dense=form == "stacked") | {"gradient_accumulation_steps": accumulation}
        made["parallel"]["tp_sequence_parallel"] = True
        engine = start_with(make(partial(Model, form, ep, asks=False, **options)), made)
        with current_world().recorder.recording() as entries:
            train(engine, range(STEPS), length=4)
        sent = [(entry.axis, entry.label, entry.nbytes) for entry in entries if entry.label.startswith("experts ")]
        return engine.module_state_dict(), engine.get_global_grad_norm(), sent

    for values, found_norm, sent in ranks(size, rank):
        assert_close(values, expected)
        assert found_norm == pytest.approx(norm, rel=1e-6)
        tokens = tokens_of(0, 0, size // 4, 4)[0].numel() // 4  # of each rank
        labels = ("experts experts of tokens", "experts weights", "experts tokens", "experts outputs backward")
        of_pair = [(axis, label, nbytes) for axis, label, nbytes in sent if label in labels]
        sizes = (tokens * 2 * 8, tokens * 2 * 4, tokens * WIDTH * 4, tokens * WIDTH * 4)
        assert set(of_pair) == {("etp", label, nbytes) for label, nbytes in zip(labels, sizes, strict=True)}
        assert len(of_pair) == 4 * 2 * STEPS * accumulation  # in each of two layers


@pytest.mark.parametrize("ep", [1, 2])
def test_linears_of_experts_in_lists_need_not_divide_evenly_by_the_size(ep: int, ranks: Callable[..., Any]) -> None:
    """20 and 16 inner elements over 3 ranks, with ``tp_overlap_comm``."""
    expected, norm = alone("listed", 1)

    def rank() -> tuple[dict[str, Any], float]:
        made = folded("listed", 2, ep, tp=6, etp=3) | {"tensor_parallel": {"tp_overlap_comm": True}}
        engine = start_with(make(partial(Model, "listed", ep, asks=False)), made)
        train(engine, range(STEPS))
        return engine.module_state_dict(), engine.get_global_grad_norm()

    for values, found_norm in ranks(6, rank):
        assert_close(values, expected)
        assert found_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_whose_experts_are_not_divided_stands_beside_one_whose_are(
    is_split: bool, stage: int, ranks: Callable[..., Any]
) -> None:
    """Their gradients are summed over different ranks."""
    expected, norm = alone("listed", 2, drops=False, length=4)

    def rank() -> tuple[dict[str, Any], float]:
        model = make(partial(Model, "listed", 2, asks=False, drops=False))
        model.experts.layers[0] = make(partial(Model, "listed", 1, asks=False, drops=False)).experts.layers[0]
        made = folded("listed", stage, 2)
        made["parallel"]["tp_sequence_parallel"] = is_split
        engine = start_with(model, made)
        train(engine, range(STEPS), length=4)
        return engine.module_state_dict(), engine.get_global_grad_norm()

    for values, found_norm in ranks(8, rank):
        assert_close(values, expected)
        assert found_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("form", ["listed", "stacked"])
def test_a_checkpoint_of_folded_experts_loads_at_other_degrees_and_theirs_here(
    form: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    expected, _ = alone(form, 2)
    layouts: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, ep, config
        "folded": (8, 2, folded(form, 3, 2)),
        "folded, ep 4": (8, 4, folded(form, 1, 4)),
        "folded, ep 1": (8, 1, folded(form, 2, 1)),
        "over all of tp": (8, 2, folded(form, 0, 2, etp=4)),
        "over 2 of tp 2": (4, 2, folded(form, 3, 2, tp=2)),
        "whole": (2, 1, config(1, gradient_clipping=0.1, units=UNITS)),
    }

    def job(layout: str, steps: range, folder: str, *, saves: bool) -> dict[str, Any]:
        _, ep, made = layouts[layout]
        engine = start_with(make(partial(Model, form, ep, asks=False), seed=0 if saves else 1), made)
        if not saves:
            engine.load_checkpoint(str(tmp_path / folder))
        train(engine, steps)
        if saves:
            engine.save_checkpoint(str(tmp_path / folder))
        return engine.module_state_dict()

    for layout in ("folded", "folded, ep 1", "over 2 of tp 2"):
        ranks(layouts[layout][0], partial(job, layout, range(3), layout, saves=True))
    pairs = [("folded", layout) for layout in layouts]
    pairs += [("over 2 of tp 2", "folded, ep 4"), ("over 2 of tp 2", "folded, ep 1"), ("folded, ep 1", "folded")]
    for source, layout in pairs:
        for values in ranks(layouts[layout][0], partial(job, layout, range(3, STEPS), source, saves=False)):
            assert_close(values, expected)


@pytest.mark.parametrize(("ep", "stage"), [(1, 0), (1, 3), (2, 0), (2, 1), (4, 3)])
def test_collectives_and_bytes_of_folded_experts_equal_the_formula(
    ep: int, stage: int, ranks: Callable[..., Any]
) -> None:
    """Each layer: one all-reduce over the pair of the rows of its part of the tokens, and one of their gradients."""

    def rank() -> tuple[list[tuple[str, str, str, int]], int, float]:
        engine = start_with(make(partial(Model, "stacked")), folded("stacked", stage, ep))
        experts = [
            group
            for group in engine.sharding.groups
            if any(spec.name.endswith(SPLIT) for spec in group.buffer.layout.specs)
        ]
        nbytes = sum(4 * spec.numel for group in experts for spec in group.buffer.layout.specs)
        owned = sum(group.owned_numel for group in experts) / sum(group.buffer.layout.numel for group in experts)
        with current_world().recorder.recording() as entries:
            train(engine, range(1))
        sent = [(entry.axis, entry.op, entry.label, entry.nbytes) for entry in entries]
        return sent, nbytes, owned

    whole = make(partial(Model, "stacked"))
    stacks = sum(4 * p.numel() for name, p in whole.named_parameters() if name.endswith(SPLIT))
    found = ranks(8, rank)
    num_shards = 1 if stage == 0 else 2 if ep == 1 else 8 // (2 * ep)
    for _, nbytes, owned in found:
        assert nbytes == stacks // (2 * ep)
        assert owned == 1 / num_shards
    tokens = batch(0, 0, 2)[0].numel()  # of each of 2 batch ranks
    rows = {"experts out": 0, "experts in backward": 0}
    for sent, _, _ in found:
        of_pair = [(op, label, nbytes) for axis, op, label, nbytes in sent if axis == "etp" and label in rows]
        assert [(op, label) for op, label, _ in of_pair] == [
            *[("all_reduce", "experts out")] * 2,
            *[("all_reduce", "experts in backward")] * 2,
        ]
        for _, label, nbytes in of_pair:
            rows[label] += nbytes // (WIDTH * 4)
        taken = [nbytes for axis, _, label, nbytes in sent if axis == "tp_fold" and label == "experts outputs"]
        # Half of the tokens, and back; with ep 1 each pair computes all.
        assert taken == ([] if ep == 1 else [tokens // 2 * WIDTH * 4] * 2)
        assert not any(axis == "tp" and label.startswith("experts ") for axis, _, label, _ in sent)
    # In 2 layers; both ranks of a pair compute what one sends, and with ep 1 both pairs.
    assert set(rows.values()) == {2 * tokens * TOP_K * 2 * 2 * (2 if ep == 1 else 1)}


@pytest.mark.parametrize(
    ("form", "stage", "hot"),
    [("listed", 3, 0), ("listed", 0, 0), ("stacked", 2, 0), ("stacked", 3, 1)],
)
def test_folded_experts_that_change_ranks_change_no_result_and_are_counted_once(
    form: str, stage: int, hot: int, ranks: Callable[..., Any]
) -> None:
    expected, _ = alone(form, 2, drops=False, length=6)

    def rank() -> tuple[dict[str, Any], bool, dict[str, list[int]]]:
        made = folded(form, stage, 2)
        made["expert_parallel"].update({"rebalance_every": 1, "hot_experts": hot})
        engine = start_with(make(partial(Model, form, 2, asks=False, drops=False)), made)
        before, moved = [held.ids for _, _, held in modules_with_experts(engine.module)], False
        for step in range(STEPS):
            train(engine, range(step, step + 1), length=6)
            moved |= before != [held.ids for _, _, held in modules_with_experts(engine.module)]
        copied = any(held.copies and held.copies.experts for _, _, held in modules_with_experts(engine.module))
        return engine.module_state_dict(), moved or bool(copied), engine.expert_load()

    found = ranks(8, rank)
    for values, _, loads in found:
        assert_close(values, expected)
        assert {sum(load) for load in loads.values()} == {2 * tokens_of(0, 0, 2, 6)[0].numel() * TOP_K}
    assert any(changed for _, changed, _ in found)


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_experts_from_the_meta_device_are_alike_where_ranks_hold_the_same(
    ep: int, stage: int, ranks: Callable[..., Any]
) -> None:
    """Each rank initializes its parts with other random numbers."""

    def rank() -> tuple[dict[str, Any], dict[str, Any]]:
        with torch.device("meta"):
            model = Model("listed", ep, asks=False)
        torch.manual_seed(current_world().rank)
        engine = start_with(model, folded("listed", stage, ep))
        named = dict(engine.module.named_parameters())
        with shoal.zero.GatheredParameters(list(named.values())):
            own = {name: value.detach().clone() for name, value in named.items()}
        train(engine, range(2))
        return own, engine.module_state_dict()

    mesh = Mesh.of(8, tp=4, ep=ep, etp=2)
    found = ranks(8, rank)
    for values in found:
        assert_close(values[1], found[0][1])
    for index, (own, _) in enumerate(found):
        for name, value in own.items():
            if OF_EXPERT not in name:
                same = range(8)
            elif name.endswith("two.bias"):  # not split
                same = [other for other in range(8) if mesh.index("ep", other) == mesh.index("ep", index)]
            else:
                same = [o for o in range(8) if mesh.index("expert_model", o) == mesh.index("expert_model", index)]
            if "head" not in name and "embedding" not in name:
                assert all(torch.equal(found[other][0][name], value) for other in same), name


@pytest.mark.parametrize("ep", [1, 2])
def test_a_change_of_one_rank_reaches_those_that_hold_the_same_part(ep: int, ranks: Callable[..., Any]) -> None:
    source = 5

    def rank() -> dict[str, float]:
        engine = start_with(make(partial(Model, "stacked")), folded("stacked", 3, ep))
        named = {name: p for name, p in engine.module.named_parameters() if "0.mlp.experts" in name}
        with shoal.zero.GatheredParameters(list(named.values()), modifier_rank=source):
            for parameter in named.values():
                parameter.data.fill_(current_world().rank)
        with shoal.zero.GatheredParameters(list(named.values())):
            return {name.rpartition(".")[2]: p.detach().unique().tolist() for name, p in named.items()}

    mesh = Mesh.of(8, tp=4, ep=ep, etp=2)
    for index, values in enumerate(ranks(8, rank)):
        # Of the parts that ``source`` does not hold: the rank at its place among those that do.
        writers = {
            False: source if ep == 1 else source - 2 * (mesh.index("ep", source) - mesh.index("ep", index)),
        }
        writers[True] = writers[False] - (mesh.index("etp", source) - mesh.index("etp", index))
        assert values == {
            "gate_up_proj": [writers[True]],
            "gate_up_proj_bias": [writers[True]],
            "down_proj": [writers[True]],
            "down_proj_bias": [writers[False]],
        }


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
@pytest.mark.parametrize("ep", [1, 2])
def test_optimizers_of_whole_tensors_put_the_parts_of_folded_experts_together(
    name: str, ep: int, ranks: Callable[..., Any]
) -> None:
    """In fp64: both multiply rounding errors of small gradients."""

    def rank(ep: int, made: dict[str, Any]) -> dict[str, Any]:
        model = make(partial(Model, "listed", ep, asks=False)).double()
        optimizer = {"type": name, "params": {"lr": 0.01, "weight_decay": 0.1}}
        engine = start_with(model, made | {"optimizer": optimizer}, optimizer=None)
        train(engine, range(3))
        return engine.module_state_dict()

    (expected,) = ranks(1, partial(rank, 1, config(0, gradient_clipping=0.1, units=UNITS)))
    for values in ranks(4, partial(rank, ep, folded("listed", 2, ep))):
        for key, value in expected.items():
            assert float((values[key] - value).norm()) <= 1e-6 * float(value.norm()), key


def test_rows_move_to_folded_experts_in_two_steps_where_ranks_are_on_several_nodes(ranks: Callable[..., Any]) -> None:
    expected, _ = alone("stacked", 2)

    def rank() -> tuple[dict[str, Any], list[str]]:
        made = folded("stacked", 1, 4)
        made["expert_parallel"]["ranks_per_node"] = 2
        engine = start_with(make(partial(Model, "stacked")), made)
        with current_world().recorder.recording() as entries:
            train(engine, range(STEPS))
        return engine.module_state_dict(), sorted({entry.axis for entry in entries if "dispatch" in entry.label})

    for values, axes in ranks(8, rank):
        assert_close(values, expected)
        assert axes == ["ep:2x2/0", "ep:2x2/1"]


def test_groups_that_choose_different_experts_for_the_same_tokens_are_an_error(ranks: Callable[..., Any]) -> None:
    def rank() -> None:
        engine = start_with(make(partial(Model, "stacked")), folded("stacked", 0, 2))
        if engine.axes.mesh.index("tp_fold", current_world().rank):
            with torch.no_grad():
                engine.module.experts.layers[0].mlp.router.weight.neg_()
        with pytest.raises(UsageError, match="expert-parallel ranks 0 and 1 are tensor-parallel ranks of the same"):
            train(engine, range(1))

    ranks(4, rank)


def test_experts_of_a_gpt_train_as_whole_ones_where_they_are_split_over_half_of_tp(ranks: Callable[..., Any]) -> None:
    shape = GPTConfig(
        vocab_size=VOCABULARY, sequence_length=8, num_layers=2, hidden_size=16, num_heads=4, num_experts=4
    )

    def rank(tp: int, ep: int) -> dict[str, Any]:
        made = config(2, parallel={"ep": ep, "tp": tp}, units={"names": ["blocks.*"]})
        made["expert_parallel"] = {"expert_tensor_parallel_size": max(tp // 2, 1)}
        engine = start_with(make(lambda: GPT(shape, experts=ExpertFeedForward)), made)
        for step in range(STEPS):
            group = engine.axes.batch
            engine.backward(engine(*batch(step, group.rank, group.size)))
            engine.step()
        return engine.module_state_dict()

    expected = ranks(2, partial(rank, 1, 2))[0]
    for values in ranks(8, partial(rank, 4, 4)):
        assert_close(values, expected)


@pytest.mark.parametrize(
    ("form", "etp", "ep", "error", "words"),
    [
        ("stacked", 3, 2, ConfigError, "3 does not divide the 4 tensor-parallel ranks(.|\n)*do: write 1, 2 or 4"),
        ("stacked", 8, 2, ConfigError, "8 does not divide the 4 tensor-parallel ranks"),
        (
            "stacked",
            2,
            4,
            ConfigError,
            r"4 does not divide the 2 ranks .*cp x sp x tp / 2(.|\n)*one of 1, 2",
        ),
        ("listed", 3, 2, ConfigError, "3 does not divide the 4 tensor-parallel ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(
    form: str, etp: int, ep: int, error: type[Exception], words: str, ranks: Callable[..., Any]
) -> None:
    def rank() -> None:
        with pytest.raises(error, match=words):
            start_with(make(partial(Model, form, ep, asks=False)), folded(form, 0, ep, etp=etp))

    ranks(4, rank)


def test_parts_that_a_size_does_not_divide_are_refused(ranks: Callable[..., Any]) -> None:
    def rank() -> None:
        with pytest.raises(ModelError, match="has 20 elements in dim 2, which 3 tensor-parallel ranks do not divide"):
            start_with(make(partial(Model, "stacked")), folded("stacked", 0, 2, tp=6, etp=3))

    ranks(6, rank)


def test_experts_that_declare_that_they_are_split_over_all_ranks_are_refused(ranks: Callable[..., Any]) -> None:
    def rank() -> None:
        model = make(partial(Model, "stacked"))
        parameter = model.experts.layers[1].mlp.experts.down_proj
        parameter.tensor_model_parallel, parameter.partition_dim = True, 2
        with pytest.raises(ModelError, match="down_proj is split over all tensor-parallel ranks already"):
            start_with(model, folded("stacked", 0, 2))

    ranks(4, rank)


@pytest.mark.parametrize(("etp", "rows"), [(1, 5), (2, 10), (4, 5)])
def test_a_layer_that_asks_for_split_experts_means_all_tensor_parallel_ranks_or_as_many_as_the_config_says(
    etp: int, rows: int, ranks: Callable[..., Any]
) -> None:
    def rank() -> tuple[int, ...]:
        engine = start_with(make(partial(Model, "listed", 1)), folded("listed", 0, 1, etp=etp))
        return tuple(engine.module.get_parameter(f"experts.layers.1.moe.{OF_EXPERT}0.gate_proj.weight").shape)

    assert ranks(4, rank) == [(rows, WIDTH)] * 4


def test_divided_lists_start_with_the_values_of_the_first_rank_of_each_group(ranks: Callable[..., Any]) -> None:
    def rank() -> dict[str, Any]:
        mesh, own = Mesh.of(4, tp=4, ep=2, etp=2), current_world().rank
        model = make(partial(Model, "listed", 2, asks=False))
        for name, parameter in model.named_parameters():
            if OF_EXPERT in name:
                place = int(name.partition(OF_EXPERT)[2].partition(".")[0])
                nn.init.constant_(parameter, 2 * mesh.index("ep", own) + place + 0.5 * mesh.index("etp", own))
        return start_with(model, folded("listed", 1, 2)).module_state_dict()

    for values in ranks(4, rank):
        for name, value in values.items():
            if OF_EXPERT in name:
                expert = int(name.partition(OF_EXPERT)[2].partition(".")[0])
                assert torch.equal(value, torch.full_like(value, expert)), name


def test_units_are_made_of_the_mean_size_of_the_parts_on_every_rank() -> None:
    """Ranks hold 2, 2 and 1 rows of 5; the sizes by which units are cut are the same on all."""
    mesh = Mesh.of(6, tp=6, ep=2, etp=3)
    with fake_world(6) as world:
        axes = axes_of(mesh, partial(world.communicator, mesh=mesh))
    part = ParameterSpec.along("w", (5, 8), 0, ((0, 2),))
    dense, folded = (replace(part, split_over=frozenset({axis})) for axis in ("tp", "etp"))
    expert = replace(folded, others_over=frozenset({"ep"}))
    specs = dense, folded, expert, ParameterSpec.whole("w", (2, 8))
    assert [mean_size(spec, axes) for spec in specs] == [7, 14, 14, 16]


@pytest.mark.parametrize(("size", "tp", "etp", "ep"), [(2, 2, 2, 1), (4, 4, 2, 2)])
def test_ranks_that_hold_parts_of_an_expert_and_choose_different_experts_are_an_error_on_every_rank(
    size: int, tp: int, etp: int, ep: int, ranks: Callable[..., Any]
) -> None:
    def rank() -> str:
        engine = start_with(make(partial(Model, "stacked")), folded("stacked", 1, ep, tp=tp, etp=etp))
        held = [held for _, _, held in modules_with_experts(engine.module)]
        check = held[0].router_check
        run = check.check_index

        def other(index: torch.Tensor, num_experts: int, label: str) -> None:
            if current_world().rank % 2:
                index.copy_(index.flip(0))  # as many rows for each expert
            run(index, num_experts, label)

        check.check_index = other  # type: ignore[method-assign]
        with pytest.raises(UsageError, match="routers chose different experts") as caught:
            engine(*batch(0, 0, 1))
        return caught.value.code

    assert ranks(size, rank) == ["expert-routing"] * size
