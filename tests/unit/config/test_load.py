"""Reading a configuration: recipes, sources, errors, origins, notes, parts that are not built."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import pathlib
from typing import Any

import pytest
from pydantic import ValidationError

from shoal.config import Config, ConfigProblems, ConfigWarning, add_config_arguments, load
from shoal.errors import ConfigError
from tests.helpers.config_reading import problems, quietly
from tests.helpers.places import FIXTURES

RECIPES = FIXTURES / "config_recipes"


def test_the_zero_2_recipe_is_read_as_it_stands() -> None:
    config = load(RECIPES / "zero2_config_accelerate.json", world_size=2)
    assert config.zero_optimization.stage == 2
    assert config.zero_optimization.reduce_bucket_size == 200_000_000
    assert config.fp16.enabled is True
    assert config.fp16.initial_scale_power == 15
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (2, 1)
    assert config.gradient_clipping == 1.0
    assert config.steps_per_print == 2000
    assert config.optimizer is not None
    assert config.optimizer.type == "AdamW"
    assert config.unresolved_auto == (
        "optimizer.params.lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
    )
    assert config.origin("gradient_clipping") == "auto"
    assert config.origin("train_batch_size") == "auto"


def test_the_zero_3_offload_recipe_is_read_as_it_stands() -> None:
    path = RECIPES / "zero3_offload_config_accelerate.json"
    config = load(path, world_size=1)
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert config.zero_optimization.offload_param.device == "none"


TEXT = '{"train_batch_size": 8, /* all */ "zero_optimization": {"stage": 1,},}'


def test_every_kind_of_source_reads_the_same(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(TEXT, encoding="utf-8-sig")
    coded = base64.urlsafe_b64encode(TEXT.encode()).decode()
    parser = add_config_arguments(argparse.ArgumentParser())
    named = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    oldest = parser.parse_args(["--deepscale_config", str(path)])
    read = [
        load({"train_batch_size": 8, "zero_optimization": {"stage": 1}}),
        *map(load, (path, str(path), TEXT, f"\n {TEXT}", coded)),
        load(args=named),
        load(None, args=oldest),
    ]
    assert [config.effective() for config in read] == [read[0].effective()] * 8
    assert read[0].zero_optimization.stage == 1


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (None, "no configuration was given"),
        (3, "not int"),
        ("no_such_file", "is neither a file, nor JSON, nor base64 of JSON"),
        (pathlib.Path("no_such.json"), "there is no file 'no_such.json'"),
        ("[1]", "is neither a file"),
        ("{not json", "not JSON: expected ':' after the key 'not'"),
        (base64.urlsafe_b64encode(b"\xff\xfe").decode(), "is neither a file"),
        ("x" * 5000, "is neither a file"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error(source: object, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert part in str(caught.value)


def test_a_missing_file_names_the_nearest_in_its_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"did you mean 'ds_config\.json'\?"):
        load(tmp_path / "ds_confg.json")


def test_a_file_with_a_list_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ds.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is list, not an object of keys"):
        load(tmp_path / "ds.json")


def test_all_problems_come_at_once() -> None:
    found = problems(
        {
            "gradient_clipp1ng": 1,
            "stage": 2,
            "train_batch_size": "many",
            "zero_optimization": {"stage": 7, "chunk_size": 1, "reduce_bucket_size": 0},
            "fp16": {"enabled": "yes", "hysteresis ": 1},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "Adam", "params": {"lrr": 1, "lr": "x", "max_grad_norm": 1.5}},
            "hybrid_engine": {"enabled": True},
        }
    )
    assert found == {
        "gradient_clipp1ng": "no such key. did you mean 'gradient_clipping'?",
        "stage": "no such key. it belongs elsewhere: did you mean 'zero_optimization.stage'?",
        "train_batch_size": '"many" is not an integer, at least 1.',
        "zero_optimization.stage": "7 is not one of 0, 1, 2, 3.",
        "zero_optimization.chunk_size": (
            "no such key in zero_optimization. no ZeRO ever had it; reduce_bucket_size, stage3_prefetch_bucket_size "
            "and sub_group_size set sizes."
        ),
        "zero_optimization.reduce_bucket_size": "0 is not an integer, at least 1.",
        "fp16.enabled": '"yes" is not true or false.',
        "fp16.hysteresis ": (
            "no such key: there is space around its name. did you mean 'hysteresis', without the space?"
        ),
        "optimizer.params.lrr": "no such key in optimizer.params. did you mean 'lr'?",
        "optimizer.params.lr": '"x" is not a number, at least 0.',
        "optimizer.params.max_grad_norm": (
            "1.5, but gradient_clipping is 1, and gradients are clipped once. leave it out."
        ),
        "hybrid_engine.enabled": (
            "true asks for a part that is not built yet: generation while training. leave it out for now."
        ),
    }


def test_a_misspelt_section_is_an_error_not_silence() -> None:
    assert problems({"zero_optimizaton": {"stage": 3}}) == {
        "zero_optimizaton": "no such key. did you mean 'zero_optimization'?"
    }


def test_the_message_names_the_file_and_the_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  "fp16": {\n    "enabld": true\n  },\n  "gradient_clipping": -1\n}')
    with pytest.raises(ConfigProblems) as caught:
        load(path)
    assert str(caught.value).splitlines() == [
        "[config] 2 problems:",
        "  1. fp16.enabld (line 3): no such key in fp16. -> did you mean 'enabled'?",
        "  2. gradient_clipping (line 5): -1 is not a number, at least 0.",
        f"  where: {path}",
        "  do: fix each of them.",
    ]


@pytest.mark.parametrize(
    "value",
    [[], {}, "text", -1, None, [1], {"enabled": True}, 1e400, float("nan"), True, {"a": {"b": []}}, [[{}]], object()],
    ids=lambda value: repr(value) if type(value) is not object else "an object",
)
def test_no_value_anywhere_lets_an_error_of_pydantic_out(value: object) -> None:
    for path in load({}).effective():
        for source in ({path: value}, {path: {"enabled": value}}, {path: {"params": value, "type": value}}):
            with contextlib.suppress(ConfigError):  # whatever else comes out fails the test
                assert isinstance(quietly(source, world_size=2), Config)


def test_strict_warn_turns_unknown_keys_into_warnings() -> None:
    with pytest.warns(ConfigWarning, match="gradient_cliping = 1 is ignored: no such key"):
        config = load({"strict": "warn", "gradient_cliping": 1})
    assert config.gradient_clipping == 1.0


@pytest.mark.parametrize(
    "source",
    [{"msamp": {"enabled": False}}, {"cuda_visible_devices": "0"}, {"zero_optimization.reduce_bucket_size": 5}],
    ids=["accelerate", "examples", "trl"],
)
def test_keys_that_clients_leave_behind_are_a_warning(source: dict[str, Any]) -> None:
    with pytest.warns(ConfigWarning, match="is ignored"):
        load(source)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
        ({"precision": {"master_dtype": "bf16"}}, "precision.master_dtype"),
        ({"fp16": {"enabled": True}, "precision": {"master_dtype": "bf16"}}, "precision.master_dtype"),
        (
            {
                "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
                "precision": {"master_dtype": "fp32"},
            },
            "precision.master_dtype",
        ),
        ({"precision": {"state_dtype": "fp16"}}, "precision.state_dtype"),
        ({"compat": "newest"}, "compat"),
    ],
)
def test_keys_that_exclude_each_other_are_an_error(source: dict[str, Any], path: str) -> None:
    assert list(problems(source)) == [path]


def test_an_older_deepspeeds_defaults_apply_on_demand() -> None:
    assert load({}).gradient_clipping == 1.0
    assert load({"compat": "ds-0.18.2"}).gradient_clipping == 0.0
    assert load({"compat": "ds-0.19"}).gradient_clipping == 1.0
    assert load({"compat": "ds-0.18", "gradient_clipping": 0.3}).gradient_clipping == 0.3


def test_the_raw_dict_is_a_copy_of_what_was_given() -> None:
    given: dict[str, Any] = {"fp16": {"enabled": "true"}, "zero_optimization": {"cpu_offload": False}}
    config = quietly(given)
    assert config.raw == {"fp16": {"enabled": "true"}, "zero_optimization": {"cpu_offload": False}}
    given["fp16"]["enabled"] = False
    assert config.raw["fp16"]["enabled"] == "true"


def test_a_configuration_is_frozen() -> None:
    config = load({})
    with pytest.raises(ValidationError):
        config.gradient_clipping = 2.0
    with pytest.raises(ValidationError):
        config.fp16.enabled = True


def test_origins_tell_where_values_come_from() -> None:
    config = load({"fp16": {"enabled": True}, "gradient_clipping": "auto", "optimizer": {"params": {"lr": "auto"}}})
    assert config.origin("fp16.enabled") == "user"
    assert config.origin("fp16.loss_scale") == "default"
    assert config.origin("fp16") == "user"
    assert config.origin("bf16") == "default"
    assert config.origin("gradient_clipping") == "auto"
    assert config.origin("optimizer.params.lr") == "auto"


def test_notes_speak_only_of_keys_that_the_file_sets() -> None:
    assert load({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}).notes()[0] == (
        'zero_optimization.offload_param.device = "cpu": no effect at stage 2, only stage 3 shards parameters.'
    )
    assert load({}).notes() == []
    assert load({"zero_optimization": {"allgather_partitions": True}, "gradient_clipping": "auto"}).notes() == [
        "zero_optimization.allgather_partitions = true: accepted, no effect: updated parameters are always "
        "all-gathered, unit by unit.",
        'gradient_clipping = "auto": 1 is used.',
    ]


def test_an_auto_that_cannot_be_derived_is_an_error_only_when_it_is_needed() -> None:
    config = load({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6}}})
    assert config.unresolved_auto == ("optimizer.params.lr",)
    with pytest.raises(ConfigError, match=r'optimizer\.params\.lr: "auto" cannot be derived'):
        config.params_of("optimizer")
    assert config.params_of("scheduler") == {}


def test_the_schedules_auto_maximum_is_the_optimizers_rate() -> None:
    config = load(
        {
            "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "weight_decay": "auto"}},
            "scheduler": {
                "type": "warmupdecaylr",
                "params": {"warmup_max_lr": "auto", "warmup_min_lr": "auto", "total_num_steps": 10},
            },
        }
    )
    assert config.unresolved_auto == ()
    assert config.params_of("optimizer") == {"lr": 3e-4}
    assert config.params_of("scheduler") == {"warmup_max_lr": 3e-4, "total_num_steps": 10}


def test_files_of_deepspeeds_own_examples_load() -> None:
    """Old names, sections that change nothing, Hjson: each as one of the files has it."""
    adam = {"type": "Adam", "params": {"lr": 1, "max_grad_norm": 2.0}}
    assert load({"optimizer": adam}, warns=False).gradient_clipping == 2
    with pytest.warns(ConfigWarning, match="write gradient_clipping = 2"):
        load({"optimizer": adam})
    same = {"gradient_clipping": 1.0, "optimizer": {"type": "DeepSpeed_Adam", "params": {"lr": 1, "max_grad_norm": 1}}}
    config = load(same, warns=False)
    assert config.gradient_clipping == 1 and config.optimizer is not None and config.optimizer.type == "Adam"
    assert config.warnings == ("optimizer.params.max_grad_norm is deprecated; write gradient_clipping = 1.",)
    zero = load(
        {"zero_optimization": {"stage": 3, "cpu_offload_params": True, "comm_overlap": False,
                               "stage3_param_persitance_threshold": 7}},
        warns=False,
    ).zero_optimization  # fmt: skip
    assert (zero.offload_param.device, zero.overlap_comm, zero.stage3_param_persistence_threshold) == ("cpu", False, 7)
    assert load({"prescale_gradients": True, "gradient_predivide_factor": 8}).gradient_predivide_factor == 8
    notes = load({"train_batch_size": 1, "sparse_attention": {"mode": "bigbird", "block": 8}}).notes()
    assert [note[:39] for note in notes] == ["sparse_attention = {'mode': 'bigbird', "]
    schedule = {"schedule_type": "fixed_linear", "schedule_config": {"total_step": 10, "difficulty_step": 8}}
    curriculum = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64, **schedule}
    found = load({"curriculum_learning": curriculum}, warns=False)
    assert found.curriculum_learning.schedule_config.total_curriculum_step == 10


def test_secrets_are_never_printed() -> None:
    config = load({"comet": {"api_key": "hush"}})
    assert config.comet.api_key == "hush"
    assert "hush" not in json.dumps(config.effective())
    found = problems({"comet": {"api_key": ["hush"]}})
    assert found == {"comet.api_key": "*** is not text or null."}


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"compile": {"deepcompile": True, "symmetric_memory": True}}, "compile.symmetric_memory"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp.enabled"),
        ({"weight_quantization": {"num_bits": 4}}, "weight_quantization"),
        ({"hybrid_engine": {"enabled": True, "max_out_tokens": 9}}, "hybrid_engine.enabled"),
        ({"debug": {"nan_trace": True}}, "debug.nan_trace"),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "bf16.immediate_grad_update"),
        (
            {"compression_training": {"weight_quantization": {
                "shared_parameters": {"enabled": True}, "different_groups": {"a.b": {"params": {"start_bits": 8}}}}}},
            "compression_training.weight_quantization.shared_parameters.enabled",
        ),
    ],
)  # fmt: skip
def test_a_part_that_is_asked_for_and_missing_is_named_once(source: dict[str, Any], path: str) -> None:
    assert [each for each in problems(source) if "different_groups" not in each] == [path]


@pytest.mark.parametrize(
    "source",
    [
        {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True, "buffer_count": 9}}},
        {"zero_optimization": {"offload_param": {"device": None, "nvme_path": None}, "offload_optimizer": None}},
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"wandb": {"enabled": False, "project": "x"}},
        {"flops_profiler": {"enabled": False, "profile_step": 7}},
        {"aio": {"block_size": 1, "queue_depth": 4, "single_submit": True, "thread_count": 2}},
        {"activation_checkpointing": {"partition_activations": False, "contiguous_memory_optimization": True}},
        {"checkpoint": {"use_node_local_storage": False, "tag_validation": "Warn"}},
        {"tensor_parallel": {"autotp_size": 1}, "parallel": {"tp": 1, "pp": "auto"}},
        {"elasticity": {"enabled": "false", "max_train_batch_size": 9}},
        {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}},
        {"weight_quantization": {"enabled": False}, "sparse_attention": None},
        {"autotuning": {"enabled": False, "arg_mappings": {"train_batch_size": "--b"}}},
    ],
)
def test_a_missing_part_that_is_switched_off_passes(source: dict[str, Any]) -> None:
    assert isinstance(load(source), Config)


def test_a_schedule_over_no_steps_loads_because_trainer_writes_it_where_it_only_evaluates() -> None:
    config = load({"train_batch_size": 2, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 0}}})
    assert config.params_of("scheduler") == {"total_num_steps": 0}


def test_an_empty_section_asks_for_a_part_that_is_off_when_it_is_left_out() -> None:
    with pytest.raises(ConfigError, match=r"weight_quantization: \{\} is not supported"):
        load({"train_batch_size": 1, "weight_quantization": {}})
    load({"train_batch_size": 1, "weight_quantization": None, "zero_optimization": {"offload_param": {}}})


def test_deepcompile_and_what_it_offloads_are_written_into_our_keys() -> None:
    asked = ("offload_activation", "offload_opt_states", "offload_parameters")
    compiled = load({"zero_optimization": {"stage": 3}, "compile": {"deepcompile": True, **dict.fromkeys(asked, True)}})
    zero = compiled.zero_optimization
    devices = [section.device for section in (compiled.offload_activation, zero.offload_optimizer, zero.offload_param)]
    assert compiled.compile.enabled
    assert devices == ["cpu"] * 3
    some = load({"compile": {"deepcompile": True, "offload_opt_states": True}, "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}})  # fmt: skip
    assert some.zero_optimization.offload_optimizer.device == "nvme"
    assert some.offload_activation.device == "none"
    off = load({"compile": {"enabled": True, **dict.fromkeys(asked, True)}})  # as in DeepSpeed, with deepcompile alone
    assert off.zero_optimization.offload_optimizer.device == "none"
    assert all(any(f"compile.{name} = true: no effect here" in note for note in off.notes()) for name in asked)


def test_every_key_of_deepcompile_acts_or_says_what_to_write() -> None:
    asked = {"passes": ["z3", "autosp"], "debug_log": True, "symmetric_memory": True}
    for name, value in asked.items():
        assert [f"compile.{name}"] == list(problems({"compile": {"deepcompile": True, name: value}}))
        load({"compile": {name: value}})
    assert list(problems({"compile": {"deepcompile": True, "enabled": False}})) == ["compile.enabled"]
    unused = {"free_activation": True, "double_buffer": False, "autoep_non_moe": True, "sync_after_reduce": True}
    notes = " ".join(load({"compile": {"deepcompile": True, **unused}}).notes())
    assert all(f"compile.{name}" in notes for name in unused), notes
