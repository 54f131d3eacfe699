"""Mistakes that one process can make: each works, or is said when it happens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.comm.failure import ExceptHook
from shoal.config import load
from shoal.config.problems import ConfigProblems
from shoal.data import InMemorySource, TokenStream
from shoal.errors import CheckpointError, ModelError, OptimizerError, UsageError
from shoal.models.gpt import GPT, GPTConfig


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def engine_of(trained: nn.Module | None = None, **config: Any) -> Any:
    section = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "train_micro_batch_size_per_gpu": 4, **config}
    return shoal.initialize(model=trained or model(), config=section)[0]


def test_a_loss_that_fp16_does_not_scale_is_refused_at_the_step() -> None:
    engine = engine_of(fp16={"enabled": True})
    rows = torch.randn(4, 8).half()
    engine(rows).float().sum().backward()
    with pytest.raises(UsageError, match=r"fp16's loss scale \(65536\)") as caught:
        engine.step()
    assert caught.value.code == "loss-scale"
    engine.zero_grad()
    engine.scale(engine(rows).float().sum()).backward()
    engine.step()
    engine.destroy()


def test_with_a_static_scale_of_1_plain_backward_is_right_and_allowed() -> None:
    engine = engine_of(fp16={"enabled": True, "loss_scale": 1.0})
    engine(torch.randn(4, 8).half()).float().sum().backward()
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_model_that_torch_parallelises_already_is_refused_with_the_wrappers_name(is_inner: bool) -> None:
    wrapped: nn.Module = nn.DataParallel(model())
    if is_inner:
        wrapped = nn.Sequential(wrapped, nn.Linear(4, 4))
    with pytest.raises(ModelError, match=r"wrapped in torch's DataParallel") as caught:
        engine_of(wrapped)
    assert caught.value.code == "model-wrapped"
    assert ("'0'" in str(caught.value)) is is_inner


@pytest.mark.parametrize(("shape", "is_told"), [((4, 8), False), ((7, 8), True), ((1, 4, 8), False)])
def test_a_first_batch_of_another_size_than_the_configs_is_told_once(
    shape: tuple[int, ...], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of()
    with caplog.at_level(logging.WARNING, "shoal"):
        for _ in range(2):
            engine.backward(engine(torch.randn(shape)).sum())
            engine.step()
    told = [text for text in caplog.messages if "train_micro_batch_size_per_gpu" in text]
    assert len(told) == is_told
    if is_told:
        assert "has 7 samples, and train_micro_batch_size_per_gpu is 4" in told[0]
    engine.destroy()


def test_a_config_without_batch_sizes_says_nothing_of_them(caplog: pytest.LogCaptureFixture) -> None:
    engine, *_ = shoal.initialize(model=model(), config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    with caplog.at_level(logging.WARNING, "shoal"):
        engine(torch.randn(7, 8))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    engine.destroy()


def test_train_batch_without_pipeline_stages_says_what_to_call() -> None:
    engine = engine_of()
    assert not hasattr(engine, "train_batch")
    with pytest.raises(AttributeError, match=r"(?s)train_batch\(\) needs a model in pipeline stages.*engine\.step\(\)"):
        engine.train_batch(iter([]))
    engine.destroy()


def test_a_method_of_the_models_own_of_that_name_is_the_models() -> None:
    class Own(nn.Linear):
        def train_batch(self) -> str:
            return "own"

    engine = engine_of(Own(8, 4))
    assert engine.train_batch() == "own"
    engine.destroy()


def test_inputs_of_another_dtype_get_a_hint() -> None:
    engine = engine_of()
    with pytest.raises(RuntimeError, match="dtype") as caught:
        engine(torch.randn(4, 8).double())
    assert "inputs are float64, and parameters float32" in "".join(caught.value.__notes__)
    engine.destroy()


def test_an_optimizer_with_parameters_of_another_model_names_ten_at_most() -> None:
    other = [nn.Parameter(torch.zeros(2)) for _ in range(30)]
    with pytest.raises(OptimizerError) as caught:
        shoal.initialize(model=model(), config={"train_batch_size": 4}, optimizer=torch.optim.SGD(other, lr=0.1))
    assert caught.value.code == "optimizer-groups"
    assert caught.value.what.count("not in the model") == 10
    assert caught.value.what.endswith("and 20 more.")


def test_a_checkpoint_of_another_model_names_ten_parameters_of_each_kind(tmp_path: Path) -> None:
    first = engine_of(nn.Sequential(*[nn.Linear(2, 2) for _ in range(30)]))
    first.save_checkpoint(tmp_path)
    first.destroy()
    second = engine_of(nn.Sequential(nn.ModuleDict({f"x{i}": nn.Linear(2, 2) for i in range(30)})))
    with pytest.raises(CheckpointError) as caught:
        second.load_checkpoint(tmp_path)
    lines = caught.value.what.splitlines()[1:]
    assert [line.count(",") for line in lines] == [9, 9]  # groups do not repeat the names
    assert all(line.endswith("and 50 more") for line in lines)
    second.destroy()


@pytest.mark.parametrize(("kind", "name"), [("optimizer", "Foo"), ("scheduler", "Foo"), ("optimizer", "Adafactr")])
def test_errors_propose_only_types_that_are_accepted(kind: str, name: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load({kind: {"type": name, "params": {}}}, world_size=1)
    proposed = caught.value.do
    assert not any(refused in proposed for refused in ("LambdaLR", "Adafactor", "LBFGS", "SparseAdam"))
    if name == "Foo":
        names = proposed.removeprefix("use one of ").rstrip(".").split(", ")
        for each in names if kind == "optimizer" else ():
            load({"optimizer": {"type": each, "params": {"lr": 0.1}}}, world_size=1)


def test_names_values_and_cross_key_problems_come_in_one_error() -> None:
    with pytest.raises(ConfigProblems) as caught:
        load(
            {
                "zero_optimizaton": {},
                "gradient_clipping": "x",
                "fp16": {"enabled": True},
                "bf16": {"enabled": True},
                "optimizer": {"type": "Adm", "params": {"lr": 0.1}},
                "scheduler": {"type": "StepLR", "params": {"step_siz": 1}},
                "train_batch_size": 7,
                "train_micro_batch_size_per_gpu": 2,
            },
            world_size=2,
        )
    paths = {problem.path for problem in caught.value.problems}
    assert {
        "zero_optimizaton",
        "gradient_clipping",
        "bf16.enabled",
        "optimizer.type",
        "scheduler.params.step_siz",
        "train_batch_size",
    } <= paths


def test_an_uncaught_write_to_a_placeholder_is_explained() -> None:
    hook = ExceptHook(lambda error: None)
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(()).expand(3).add_(1)
    hook._on_exception(RuntimeError, caught.value, None)
    hook.remove()
    assert "with shoal.zero.GatheredParameters([p], modifier_rank=0)" in caught.value.__notes__[0]


def test_the_schema_that_editors_read_is_no_key_of_the_config() -> None:
    assert load({"$schema": "config.schema.json", "train_batch_size": 2}, world_size=1).train_batch_size == 2


def test_conversions_say_what_they_read_cast_and_dropped(tmp_path: Path) -> None:
    engine = engine_of(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}})
    engine.backward(engine(torch.randn(4, 8)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path / "own", client_state={"epoch": 7})
    engine.destroy()

    def convert(*arguments: str) -> tuple[int, str]:
        given = [str(tmp_path / each) if each.isidentifier() and each != "fp32" else each for each in arguments[:2]]
        result = CliRunner().invoke(app, ["convert", *given, *arguments[2:]])
        return result.exit_code, result.stderr

    code, said = convert("own", "torchs", "--to", "dcp")
    assert code == 0
    assert "step 1, saved by 1 rank, with optimizer state" in said
    assert "dcp has no place for counters (step), learning-rate schedule, client state; left out" in said
    code, said = convert("torchs", "back", "--to", "shoal")
    assert "the source has no counters (step), no learning-rate schedule: a run that resumes begins with new" in said
    code, said = convert("own", "cast", "--to", "huggingface", "--dtype", "bfloat16")
    assert "written as bfloat16" in said
    assert "as they are" not in said
    code, said = convert("own", "wide", "--to", "fp32", "--dtype", "bfloat16")
    assert code == 1
    assert "--to fp32 writes float32, and --dtype is bfloat16" in said
    assert not (tmp_path / "wide").exists()
    listed = CliRunner().invoke(app, ["checkpoint", "list", str(tmp_path / "own")])
    assert "not every byte: shoal checkpoint verify" in listed.stderr


@pytest.mark.parametrize(
    ("config", "do"),
    [
        ({"lr": 0.1}, "it belongs elsewhere: did you mean 'optimizer.params.lr'?"),
        ({"optimizer": {"type": "SGD", "lr": 0.1}}, "it belongs elsewhere: did you mean 'optimizer.params.lr'?"),
        ({"warmup_num_steps": 10}, "it belongs elsewhere: did you mean 'scheduler.params.warmup_num_steps'?"),
        ({"offload_optimizer": {}}, "it belongs elsewhere: did you mean 'zero_optimization.offload_optimizer'?"),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}}, "it takes dampening, differentiable, "),
        ({"parallel": {"degree": 2}}, "it takes cp, dp_replicate, dp_shard, ep, max_ctas, order, pp, sp, tp, "),
    ],
)
def test_a_misplaced_key_is_told_its_place_and_an_unknown_one_the_keys_of_its_section(
    config: dict[str, Any], do: str
) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load(config)
    assert caught.value.do.startswith(do)


def test_a_folder_that_a_monitor_cannot_use_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    section = {"enabled": True, "output_path": str(tmp_path / "file"), "job_name": "run"}
    for name in ("tensorboard", "csv_monitor"):
        with pytest.raises(UsageError, match="cannot be used: Not a directory") as caught:
            engine_of(**{name: section})
        assert (caught.value.code, caught.value.where) == ("monitor-folder", str(tmp_path / "file" / "run"))


@pytest.mark.parametrize(
    ("data", "do"), [((torch.ones(8) for _ in range(4)), "pass a list"), (DataLoader([1, 2]), "pass the DataLoader's")]
)
def test_training_data_that_has_no_indices_is_an_error(data: Any, do: str) -> None:
    with pytest.raises(UsageError, match=do):
        shoal.initialize(model=model(), config={"train_micro_batch_size_per_gpu": 4}, training_data=data)


def test_samples_that_are_longer_than_the_model_takes_are_an_error_before_the_first_step() -> None:
    data = TokenStream(InMemorySource([range(40)]), 32)
    longer, shorter = (GPT(GPTConfig(64, length, 1, 16, 2)) for length in (32, 16))
    config = {"train_micro_batch_size_per_gpu": 1}
    with pytest.raises(
        UsageError, match=r"samples of 32 tokens, and the model takes 16 \(GPTConfig\.sequence_length\)"
    ):
        shoal.initialize(model=shorter, config=config, training_data=data)
    shoal.initialize(model=longer, config=config, training_data=data)[0].destroy()


def test_zero_init_refuses_a_device_that_does_not_exist() -> None:
    with pytest.raises(UsageError) as caught:
        shoal.zero.Init(remote_device="tpu")
    assert caught.value.code == "zero-init-device"
