"""DeepSpeed's checkpoints of models whose experts AutoEP has divided: the real one wrote those in tests/fixtures."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from shoal.checkpoint.formats import open_source
from shoal.checkpoint.load import with_groups
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.native import manifest_of
from shoal.checkpoint.portable import TensorInfo
from shoal.cli.app import app
from shoal.compat.checkpoints.autoep import layers_of
from shoal.compat.checkpoints.autoep_names import ModelNames
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.compat.checkpoints.files import open_file
from shoal.compat.checkpoints.unnamed import read_replaced
from shoal.errors import CheckpointError, NotBuiltError
from tests.fixtures.deepspeed.autoep_model import WithReplacedExperts
from tests.fixtures.deepspeed.make_autoep import AUTOEP_CASES, UNIVERSAL
from tests.helpers.deepspeed_made import MADE, everything, made, universal

LAYERS = ("model.layers.1.mlp", "model.layers.2.mlp")
METADATA = "ds_autoep_layers"
MODEL_FILE = "mp_rank_00_model_states.pt"


def shapes_of(family: str) -> dict[str, tuple[int, ...] | None]:
    return {name: tuple(tensor.shape) for name, tensor in WithReplacedExperts(family).state_dict().items()}


def read(case: str) -> DeepSpeedSource:
    """For the model that was saved."""
    return DeepSpeedSource(MADE / case / "checkpoint", model=shapes_of(AUTOEP_CASES[case].family))


@pytest.mark.parametrize("case", sorted(AUTOEP_CASES))
def test_every_tensor_of_autoep_equals_that_of_the_processes(case: str) -> None:
    held, found = load_file(MADE / case / "held.safetensors"), everything(read(case))
    if "stage0" in case:  # there DeepSpeed saves no tie, and copies each tensor
        head = found.pop("model/lm_head.weight")
        assert torch.equal(head, found["model/model.embed_tokens.weight"].to(head.dtype))
    assert set(found) == set(held)
    for name, tensor in found.items():
        assert torch.equal(tensor.view(-1), held[name].view(-1)), name


@pytest.mark.parametrize("case", sorted(AUTOEP_CASES))
def test_parameters_have_the_names_the_shapes_and_the_groups_of_the_model(case: str) -> None:
    kind, about = AUTOEP_CASES[case], read(case).about
    model = WithReplacedExperts(kind.family)
    dtype = torch.bfloat16 if kind.is_bf16 else torch.float32
    wanted = {name: (tuple(p.shape), dtype) for name, p in model.named_parameters(remove_duplicate=kind.stage > 0)}
    assert {name: (info.shape, info.dtype) for name, info in about.parameters.items()} == wanted
    experts = [name for name in wanted if ".experts." in name or ".bank." in name]
    assert len(experts) == (2 * 4 * 3 if kind.family == "listed" else 2 * 2)
    for name, (shape, _) in wanted.items():
        if name != "lm_head.weight":
            of_others = int(kind.has_client_groups and len(shape) == 1)
            assert about.group_of[name] == ((2 if kind.has_client_groups else 1) if name in experts else of_others)
            # DeepSpeed's optimizer around bf16 without ZeRO makes a step of its own at the start.
            assert about.scalars[name] == {"step": 4.0 if case == "autoep2-stage0-bf16" else 3.0}
    assert about.optimizer == "AdamW"
    assert about.client_state == {"epoch": 2}
    assert about.notes == []
    assert about.aliases == ({"model.embed_tokens.weight": ("lm_head.weight",)} if kind.stage else {})


def test_the_group_of_experts_is_joined_to_that_of_the_script() -> None:
    joined = with_groups(manifest_of(read("autoep2-stage2"), "tag", "")[0], 2)
    group_of = {record.name: record.group for record in joined.parameters}
    assert group_of[f"{LAYERS[0]}.experts.gate_up_proj"] == group_of[f"{LAYERS[0]}.gate.weight"] == 0
    assert group_of["model.norm.bias"] == 1


def test_without_a_model_experts_are_taken_for_a_stack_and_a_note_says_so() -> None:
    for case in ("autoep2-stage2", "autoep1-stage1"):
        source, known = made(case), read(case)
        assert source.about.parameters == known.about.parameters
        found = everything(source)
        assert all(torch.equal(found[name], tensor) for name, tensor in everything(known).items())
        assert source.about.notes == [
            "AutoEP does not say how the experts lay in the model; they were taken for stacks, as in Transformers 5:"
            " model.layers.1.mlp.experts.gate_up_proj, ..."
        ]


@pytest.mark.parametrize("stage", [1, 2])
def test_the_names_of_the_groups_may_be_those_of_the_model_at_stage_0(stage: int) -> None:
    """In fp32, where shapes alone say the order; of the engine's order, and of the ``stage``-th group."""
    case = "autoep2-stage0-groups"
    expected = read(case)
    names: list[list[str]] = [[], []]
    for name, parameter in WithReplacedExperts("deepseek_v3").named_parameters():
        names[parameter.dim() == 1].append(name)
    split = [[name for name in names[0] if ".experts." not in name], names[1]]
    split.append([name for name in names[0] if ".experts." in name])
    groups = names if stage == 1 else split
    source = DeepSpeedSource(MADE / case / "checkpoint", names=groups, model=shapes_of("deepseek_v3"))
    assert source.about.group_of == expected.about.group_of
    found = everything(source)
    assert all(torch.equal(found[name], tensor) for name, tensor in everything(expected).items())
    left_out = DeepSpeedSource(MADE / case / "checkpoint", names=(), model=shapes_of("deepseek_v3"))
    assert list(left_out.kinds()) == [MODEL]


def test_names_that_are_not_in_their_order_are_an_error_at_stage_0() -> None:
    names = [list(WithReplacedExperts("qwen3_moe").state_dict())[::-1]]
    with pytest.raises(CheckpointError, match="at stage 0 DeepSpeed saves") as caught:
        DeepSpeedSource(MADE / "autoep2-stage0" / "checkpoint", names=names)
    assert caught.value.code == "checkpoint-unnamed"


@pytest.mark.parametrize("case", ["autoep2-stage0", "autoep2-stage1-bf16", "autoep2-stage3"])
def test_shoal_converts_and_verifies_what_autoep_saved(case: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    result = CliRunner().invoke(app, ["convert", str(MADE / case / "checkpoint"), out, "--to", "shoal"])
    assert result.exit_code == 0, result.output
    before, after = everything(made(case)), everything(open_source(out))
    assert before.keys() <= after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []
    for command in ("list", "verify"):
        result = CliRunner().invoke(app, ["checkpoint", command, out])
        assert result.exit_code == 0, result.output


# The universal format


@pytest.mark.parametrize("case", UNIVERSAL)
def test_what_ds_to_universal_made_of_autoep_is_the_checkpoint(case: str, tmp_path: Path) -> None:
    old, new = read(case), DeepSpeedSource(universal(case, tmp_path), model=shapes_of(AUTOEP_CASES[case].family))
    before, after = everything(old), everything(new)
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []
    for what in ("parameters", "group_of", "scalars", "aliases", "groups", "optimizer", "notes", "client_state"):
        assert getattr(new.about, what) == getattr(old.about, what), what


@pytest.mark.parametrize(
    ("file", "how", "what"),
    [
        ("fp32.pt", lambda held: {**held, "param": held["param"][:3].clone()}, "it has 3 rows of 4"),
        ("exp_avg.pt", lambda held: {**held, "param": held["param"][:, :5].clone()}, "it has the shape"),
        ("fp32.pt", None, "are missing"),
    ],
)
def test_a_universal_file_of_experts_that_does_not_fit_is_named(
    file: str, how: Callable[[dict[str, Any]], Any] | None, what: str, tmp_path: Path
) -> None:
    folder = universal("autoep2-stage1-bf16", tmp_path)
    place = folder / "zero" / f"{LAYERS[1]}.experts.w2"
    if how is None:
        (place / file).unlink()
    else:
        change(place, how, file)
    with pytest.raises(CheckpointError, match=what) as caught:
        DeepSpeedSource(folder)
    assert f"{LAYERS[1]}.experts.w2" in str(caught.value)


# What is missing, or contradicts the rest


@pytest.mark.parametrize("case", ["autoep2-stage2-listed", "autoep2-stage3-listed"])
def test_three_weights_may_be_a_list_or_a_stack_and_without_a_model_that_is_an_error(case: str) -> None:
    with pytest.raises(CheckpointError, match="have three weights each, which a list may have and a stack") as caught:
        made(case)
    assert caught.value.code == "checkpoint-unnamed"
    assert "load_checkpoint()" in str(caught.value)


def test_without_a_configuration_the_model_says_the_names(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage2")
    change(folder, lambda state: state | {"ds_config": "config.json"})
    with pytest.raises(CheckpointError, match="its configuration, which names the layers' attributes, is not in it"):
        DeepSpeedSource(folder)
    found = everything(DeepSpeedSource(folder, model=shapes_of("qwen3_moe")))
    assert all(torch.equal(found[name], tensor) for name, tensor in everything(read("autoep2-stage2")).items())


def change(folder: Path, how: Callable[[dict[str, Any]], Any], name: str = MODEL_FILE) -> None:
    """Change what a file holds. Stage 3's optimizer files have classes; theirs is the ``optimizer_state_dict``."""
    state = open_file(folder / name, verify=False)
    changed = how(state)
    (folder / name).unlink()  # it is mapped
    torch.save(changed, folder / name)


def with_layer(index: int, **entries: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A layer's metadata with other entries; None: without the entry."""

    def changed(state: dict[str, Any]) -> dict[str, Any]:
        layers = [dict(layer) for layer in state[METADATA]]
        layers[index].update(entries)
        layers[index] = {key: value for key, value in layers[index].items() if value is not None}
        return state | {METADATA: layers}

    return changed


def placed(*experts: list[int], version: int = 1) -> dict[str, Any]:
    ranks = [{"rank": rank, "experts": own} for rank, own in enumerate(experts)]
    return {"version": version, "num_experts": 4, "ep_size": 2, "ranks": ranks}


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({"module_path": None}, "entry 'module_path' is missing"),
        ({"expert_key_prefix": None}, "entry 'expert_key_prefix' is missing"),
        ({"num_experts": None}, "entry 'num_experts' is missing"),
        ({"ep_size": None}, "entry 'ep_size' is missing"),
        ({"num_local_experts": None}, "entry 'num_local_experts' is missing"),
        ({"moe_layer_id": None}, "entry 'moe_layer_id' is missing"),
        ({"moe_layer_id": 1}, r"AutoEP's layers have the numbers \[1, 1\], not 0 to 1"),
        ({"module_path": LAYERS[1]}, f"the experts of AutoEP's layer '{LAYERS[1]}' are called '{LAYERS[0]}.experts'"),
        ({"num_experts": "4"}, "'num_experts' of AutoEP is '4'"),
        ({"num_experts": 5}, r"5 experts of model.layers.1.mlp on 2 .* placed as \(\(0, 1\), \(2, 3\)\)"),
        ({"ep_size": 4, "num_local_experts": 1}, "4 experts of .* on 4 expert-parallel ranks are placed as"),
        ({"num_local_experts": 3}, "has 3 experts on rank 0 of 2"),
        ({"ep_rank": 2}, "has 2 experts on rank 2 of 2"),
        ({"ep_rank": 1}, "have several ep_size or ep_rank"),
        ({"expert_placement": placed([0, 1], [2, 3], version=2)}, "is of version 2, not 1"),
        ({"expert_placement": placed([0, 1], [1, 3])}, "each has to have one place"),
        (
            {"expert_placement": placed([0, 1, 2], [3]), "num_local_experts": 3},
            "another number of experts on each rank",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_named(entries: dict[str, Any], what: str, deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage2")
    change(folder, with_layer(0, **entries))
    with pytest.raises((CheckpointError, NotBuiltError), match=what) as caught:
        DeepSpeedSource(folder)
    assert MODEL_FILE in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({METADATA: {"ep_size": 2}}, "the metadata of AutoEP is a dict, not a list"),
        ({"num_experts": [4, 8]}, r"num_experts is \[4, 8\], and AutoEP's layers have \[4, 4\] experts"),
        ({"num_experts": [4, 4, 4]}, "layers of AutoEP and of moe.layer.MoE in one model"),
        ({METADATA: None}, r"experts\.w1\.0' as a parameter of expert 0"),
    ],
)
def test_a_model_file_that_does_not_fit_its_metadata_is_refused(
    entries: dict[str, Any], what: str, deepspeed_copy: Any
) -> None:
    folder = deepspeed_copy("autoep2-stage2")
    change(folder, lambda state: state | entries)
    with pytest.raises((CheckpointError, NotBuiltError), match=what):
        DeepSpeedSource(folder)


def test_a_tensor_that_autoep_does_not_have_is_named(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage2")
    extra = {f"{LAYERS[1]}.expert_bias": torch.zeros(4)}
    change(folder, lambda state: state | {"module": {**state["module"], **extra}})
    with pytest.raises(CheckpointError, match=f"no tensor like 'expert_bias' of {LAYERS[1]}"):
        DeepSpeedSource(folder)


def test_experts_lie_where_their_placement_says(deepspeed_copy: Any) -> None:
    """As if rank 0 had had experts 3 and 1 of the first layer."""
    folder = deepspeed_copy("autoep2-stage2")
    change(folder, with_layer(0, expert_placement=placed([3, 1], [0, 2])))
    found, usual = everything(DeepSpeedSource(folder)), everything(made("autoep2-stage2"))
    for key in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        for weight in ("gate_up_proj", "down_proj"):
            name = f"{key}/{LAYERS[0]}.experts.{weight}"
            assert torch.equal(found[name][[3, 1, 0, 2]], usual[name])
            other = name.replace(LAYERS[0], LAYERS[1])
            assert torch.equal(found[other], usual[other])


def test_an_older_release_says_no_placement_and_no_rank(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage2")

    def older(state: dict[str, Any]) -> dict[str, Any]:
        left_out = ("expert_placement", "affine_maps", "ep_rank", "ep_group_name")
        layers = [{key: each for key, each in layer.items() if key not in left_out} for layer in state[METADATA]]
        return {key: each for key, each in state.items() if key != METADATA} | {"autoep_layers": layers}

    change(folder, older)
    found = everything(DeepSpeedSource(folder))
    assert all(torch.equal(found[name], tensor) for name, tensor in everything(made("autoep2-stage2")).items())


def test_a_missing_file_of_an_expert_of_autoep_is_named(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage2")
    (folder / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="files of 1 experts of layer 1 are missing: layer_1_expert_2_mp_rank_00"):
        DeepSpeedSource(folder)


def test_an_expert_without_one_of_its_weights_is_named(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage2")
    name = "layer_1_expert_2_mp_rank_00_model_states.pt"
    change(folder, lambda state: {key: each for key, each in state.items() if ".w3." not in key}, name)
    with pytest.raises(CheckpointError, match=rf"entry '{LAYERS[1]}.experts.w3.2' is missing"):
        DeepSpeedSource(folder)


def test_the_file_of_another_expert_of_autoep_is_an_error(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage2")
    name = "layer_0_expert_{}_mp_rank_00_model_states.pt"
    shutil.copy(folder / name.format(1), folder / name.format(2))
    with pytest.raises(NotBuiltError, match=r"experts\.w1\.1' as a parameter of expert 2"):
        DeepSpeedSource(folder)


def test_a_missing_optimizer_of_a_rank_of_autoep_is_an_error(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage0")
    (folder / "expp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"the optimizers of expert-parallel ranks \[0\] are here, not of 2"):
        DeepSpeedSource(folder)


@pytest.mark.parametrize(
    ("rank", "entries", "what"),
    [
        (1, {"ep_rank": 0}, "flat group 2 is part 0 of 1, expected part 0 of 2"),
        (1, {"expert_placement": placed([0, 2], [1, 3])}, "AutoEP's layers are others than in zero_pp_rank_0"),
        (0, {"ep_rank": 1}, "flat group 2 is part 0 of 1"),
    ],
)
def test_ranks_of_stage_3_that_contradict_each_other_are_named(
    rank: int, entries: dict[str, Any], what: str, deepspeed_copy: Any
) -> None:
    folder = deepspeed_copy("autoep2-stage3")
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    for layer in (0, 1):
        change(folder, with_layer(layer, **entries), name)
    with pytest.raises(CheckpointError, match=what):
        DeepSpeedSource(folder)


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        (None, "entry 'ds_zero_partition_groups' is missing"),
        ([], "'ds_zero_partition_groups' lacks flat group 0"),
        (
            [{"sub_group": 0, "partition_count": 3, "partition_rank": 1}],
            "flat group 0 is part 1 of 3, expected part 1 of 2",
        ),
    ],
)
def test_optimizer_files_of_stage_3_say_who_shares_a_flat_tensor(groups: Any, what: str, deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage3")

    def changed(state: dict[str, Any]) -> dict[str, Any]:
        inner = state["optimizer_state_dict"] | {
            "ds_zero_partition_groups": groups,
            "loss_scaler": None,
            "zero_stage": 3,
        }
        return {"optimizer_state_dict": {key: each for key, each in inner.items() if each is not None or "loss" in key}}

    change(folder, changed, "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match=what):
        DeepSpeedSource(folder)


def test_a_weight_whose_parts_are_in_two_groups_is_an_error(deepspeed_copy: Any) -> None:
    """Gate and up are one parameter of the model."""
    folder = deepspeed_copy("autoep2-stage3")

    def split(state: dict[str, Any]) -> dict[str, Any]:
        *others, experts = state["param_shapes"]
        assert set(experts) == {f"{layer}.experts.{weight}" for layer in LAYERS for weight in ("w1", "w2", "w3")}
        moved = {name: shape for name, shape in experts.items() if name.endswith("layers.1.mlp.experts.w1")}
        return state | {"param_shapes": [*others, {n: s for n, s in experts.items() if n not in moved}, moved]}

    change(folder, split, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for rank in (0, 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        change(folder, own_group, name)
    with pytest.raises(CheckpointError, match=r"experts\.w3\.0 has other groups than other parts of .*gate_up_proj"):
        DeepSpeedSource(folder)


def own_group(state: dict[str, Any]) -> dict[str, Any]:
    """A rank's optimizer file, its first tensor of experts in a group of its own."""
    inner = dict(state["optimizer_state_dict"])
    base, numel = inner["optimizer_state_dict"], 2 * 6 * 8
    weights, moments = inner["fp32_flat_groups"][2], base["state"][2]
    inner["fp32_flat_groups"] = [*inner["fp32_flat_groups"][:2], weights[numel:].clone(), weights[:numel].clone()]
    parts = [
        {key: each[part].clone() if each.dim() else each for key, each in moments.items()}
        for part in (slice(numel, None), slice(numel))
    ]
    base["state"] |= {2: parts[0], 3: parts[1]}
    base["param_groups"] = [*base["param_groups"], base["param_groups"][2] | {"params": [3]}]
    partition = inner["ds_zero_partition_groups"]
    inner["ds_zero_partition_groups"] = [*partition, partition[2] | {"sub_group": 3}]
    return {"optimizer_state_dict": inner | {"loss_scaler": None, "zero_stage": 3}}


def everywhere(**entries: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """All layers' metadata with other entries."""
    return lambda state: with_layer(1, **entries)(with_layer(0, **entries)(state))


ON_ONE_RANK = {
    "ep_size": 1,
    "num_local_experts": 4,
    "expert_placement": {"version": 1, "ranks": [{"rank": 0, "experts": [0, 1, 2, 3]}]},
}


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("autoep2-stage0", "the optimizers of 2 ranks are here, of 1"),
        ("autoep2-stage2", "1 ranks divide the experts, and 2 hold 1 parts"),
    ],
)
def test_another_number_of_expert_parallel_ranks_than_saved_is_an_error(
    case: str, what: str, deepspeed_copy: Any
) -> None:
    folder = deepspeed_copy(case)
    change(folder, everywhere(**ON_ONE_RANK))
    with pytest.raises(CheckpointError, match=what):
        DeepSpeedSource(folder)


def test_two_layers_of_one_path_are_an_error(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage2")
    change(folder, with_layer(0, module_path=LAYERS[1], expert_key_prefix=f"{LAYERS[1]}.experts"))
    with pytest.raises(CheckpointError, match="two of AutoEP's layers have the same module_path"):
        DeepSpeedSource(folder)


def test_two_placements_of_one_rank_are_an_error(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage2")
    ranks = [{"rank": rank, "experts": experts} for rank, experts in ((0, [0, 1]), (0, [2, 3]), (1, [0, 1]))]
    change(folder, with_layer(0, expert_placement={"version": 1, "ranks": ranks}))
    with pytest.raises(CheckpointError, match=r"are placed on the ranks \[0, 1\]"):
        DeepSpeedSource(folder)


def reshaped(state: dict[str, Any], change_shapes: Callable[[list[dict[str, Any]]], None]) -> dict[str, Any]:
    shapes = [dict(members) for members in state["param_shapes"]]
    change_shapes(shapes)
    return state | {"param_shapes": shapes}


def test_a_tensor_of_another_number_of_experts_is_an_error(deepspeed_copy: Any) -> None:
    folder, name = deepspeed_copy("autoep2-stage2"), f"{LAYERS[0]}.experts.w1"
    change(folder, lambda state: reshaped(state, lambda shapes: shapes[2].update({name: (1, 12, 8)})))
    with pytest.raises(CheckpointError, match=f"{name} has 1 experts on rank 0, expected 2"):
        DeepSpeedSource(folder)


def test_experts_beside_others_in_a_flat_tensor_of_stage_3_are_an_error(deepspeed_copy: Any) -> None:
    folder, name = deepspeed_copy("autoep2-stage3"), f"{LAYERS[0]}.experts.w1"

    def move(shapes: list[dict[str, Any]]) -> None:
        shapes[1][name] = shapes[2].pop(name)

    change(folder, lambda state: reshaped(state, move), "zero_pp_rank_0_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="flat group 1 has parameters of experts and others"):
        DeepSpeedSource(folder)


def test_experts_of_different_shapes_are_an_error(deepspeed_copy: Any) -> None:
    folder, name = deepspeed_copy("autoep2-stage2"), f"{LAYERS[0]}.experts.w1.1"
    for file in folder.glob("*optim_states.pt"):
        file.unlink()
    expert = "layer_0_expert_1_mp_rank_00_model_states.pt"
    change(folder, lambda state: state | {name: state[name][:5].clone()}, expert)
    with pytest.raises(CheckpointError, match="gate_up_proj is made of tensors of several shapes or dtypes"):
        DeepSpeedSource(folder)


def test_weights_of_autoep_are_read_without_optimizer_files(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-stage2")
    for file in folder.glob("*optim_states.pt"):
        file.unlink()
    found = everything(DeepSpeedSource(folder))
    held = load_file(MADE / "autoep2-stage2" / "held.safetensors")
    assert set(found) == {name for name in held if name.startswith("model/")}
    assert all(torch.equal(tensor.view(-1), held[name].view(-1)) for name, tensor in found.items())


def test_experts_of_autoep_in_pipeline_stages_are_refused(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("pp2-stage1")
    change(folder, lambda state: state | one_layer())
    with pytest.raises(NotBuiltError, match="experts of AutoEP in pipeline stages"):
        DeepSpeedSource(folder)


# Tensor parallelism


def test_the_experts_of_each_tensor_parallel_rank_come_from_its_files(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-tp2-stage1")
    (folder / "layer_1_expert_3_mp_rank_01_model_states.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"files of 1 experts of layer 1 are missing: layer_1_expert_3_mp_rank_\*"
    ):
        DeepSpeedSource(folder)


@pytest.mark.parametrize("case", ["autoep2-tp2-stage1", "autoep4-tp2-stage0"])
def test_a_tensor_parallel_rank_with_the_metadata_of_another_is_an_error(case: str, deepspeed_copy: Any) -> None:
    folder = deepspeed_copy(case)
    change(folder, everywhere(ep_rank=0), "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="it is said to be of expert-parallel rank 0"):
        DeepSpeedSource(folder)


def test_expert_parallel_ranks_that_tensor_parallel_ranks_do_not_divide_are_refused(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep2-tp2-stage1")
    change(folder, everywhere(**ON_ONE_RANK, ep_rank=0))
    with pytest.raises(NotBuiltError, match=r"autoep_size \(1\) that is no multiple of the tensor-parallel ranks"):
        DeepSpeedSource(folder)


def test_a_tied_weight_of_stage_0_is_joined_as_the_one_that_is_described(deepspeed_copy: Any) -> None:
    """Stage 0 saves a copy of it, and AutoTP writes down how the first one is split."""
    folder, name = deepspeed_copy("autoep4-tp2-stage0"), "lm_head.weight"
    assert DeepSpeedSource(folder).tensors(MODEL)[name].shape == (11, 8)

    def other(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "module": {**state["module"], name: state["module"][name] + 1}}

    for rank in (0, 1):
        change(folder, other, f"mp_rank_0{rank}_model_states.pt")
    assert DeepSpeedSource(folder).tensors(MODEL)[name].shape == (22, 8)


# What the model and the configuration say


def test_a_list_of_experts_in_the_model_is_found_by_its_names() -> None:
    """DeepSeek's own code has a list, under the preset's name; each expert then is a part of a stack's row."""
    model = {name: shape for name, shape in shapes_of("deepseek_v3").items() if ".experts." not in name}
    weights = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    for layer in LAYERS:
        model |= {f"{layer}.experts.{e}.{w}.weight": shape for e in range(4) for w, shape in weights.items()}
    source = DeepSpeedSource(MADE / "autoep1-stage1" / "checkpoint", model=model)
    assert {name: info.shape for name, info in source.tensors(MODEL).items()} == {
        name: shape for name, shape in model.items() if name != "lm_head.weight"
    }
    found, stacked = everything(source), everything(read("autoep1-stage1"))
    for kind in source.kinds():
        for layer in LAYERS:
            both, down = (stacked[f"{kind}/{layer}.experts.{each}"] for each in ("gate_up_proj", "down_proj"))
            for e in range(4):
                own = [found[f"{kind}/{layer}.experts.{e}.{each}.weight"] for each in weights]
                assert torch.equal(torch.cat(own[:2]), both[e])
                assert torch.equal(own[2], down[e])


def test_the_bias_of_the_choice_may_be_beside_the_router() -> None:
    """As MiniMax-M2 has it."""
    names = {name.replace(".gate.e_score", ".e_score"): shape for name, shape in shapes_of("deepseek_v3").items()}
    source = DeepSpeedSource(MADE / "autoep1-stage1" / "checkpoint", model=names)
    assert f"{LAYERS[0]}.e_score_correction_bias" in source.tensors(MODEL)
    assert set(source.tensors(MODEL)) == set(names) - {"lm_head.weight"}


def test_the_preset_in_the_configuration_names_the_shared_experts(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("autoep1-stage1")
    change(folder, lambda state: state | {"ds_config": {"expert_parallel": {"preset_model": "qwen3_moe"}}})
    assert f"{LAYERS[0]}.shared_expert.up_proj.weight" in DeepSpeedSource(folder).tensors(MODEL)
    change(folder, lambda state: state | {"ds_config": {"expert_parallel": {"expert_w1": 3}}})
    with pytest.raises(CheckpointError, match="expert_w1 is 3"):
        DeepSpeedSource(folder)


# Names at stage 0


def test_names_of_one_ranks_experts_alone_leave_the_order_to_the_shapes() -> None:
    """An engine with a list of experts knows those of its own rank only."""
    names = [name for name in WithReplacedExperts("qwen3_moe").state_dict() if "2.mlp.experts" not in name]
    source = DeepSpeedSource(MADE / "autoep2-stage0" / "checkpoint", names=[names], model=shapes_of("qwen3_moe"))
    expected = everything(read("autoep2-stage0"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in everything(source).items())


def test_two_orders_that_give_other_names_are_an_error() -> None:
    """A router as large as a parameter after it, of which the optimizer has the state alone."""
    layers = layers_of(one_layer(), "file", 1)
    dense = {"m.router.gate.weight": torch.ones(2, 3), "n.weight": torch.ones(2, 3)}
    own = {f"m.experts.{weight}@0": torch.ones(2, 3, 3) for weight in ("w1", "w2", "w3")}
    infos = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in dense.items()}
    state = {
        "state": {n: {"exp_avg": each.clone()} for n, each in enumerate([*dense.values(), *own.values()])},
        "param_groups": [{"params": [0, 1]}, {"params": [2, 3, 4]}],
    }  # fmt: skip
    names = ModelNames(layers, {"expert_parallel": {}}, infos, {"n.weight": (2, 3)}, "file")
    with pytest.raises(CheckpointError, match="AutoEP's routers may have two places in its groups"):
        read_replaced(state, dense, own, None, "file", layers, names)
    for number in (0, 1):
        state["state"][number]["exp_avg"] = torch.ones(1 + number, 3)
    dense["m.router.gate.weight"] = torch.ones(1, 3)
    found = read_replaced(state, dense, own, None, "file", layers, names)
    assert [place.flat for place in found.places["m.router.gate.weight"]] == [0]


def one_layer() -> dict[str, Any]:
    layer = {"module_path": "m", "expert_key_prefix": "m.experts", "num_experts": 2, "num_local_experts": 2}
    return {METADATA: [{**layer, "ep_size": 1, "moe_layer_id": 0}], "num_experts": [2]}
