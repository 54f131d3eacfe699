"""The configuration models, monitors and lists of cores that scripts take from DeepSpeed's modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pydantic
import pytest

from shoal.compat import finder
from shoal.errors import ConfigError


@pytest.fixture(autouse=True)
def deepspeed_alias() -> Iterator[None]:
    finder.install(children=False)
    yield
    finder.uninstall()


def model() -> Any:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    class Old(DeepSpeedConfigModel):
        width: int = 1
        size: int | None = pydantic.Field(
            None,
            json_schema_extra={"deprecated": True, "new_param": "width", "new_param_fn": (lambda size: size * 2)},
        )

    return Old


def test_an_old_name_hands_its_value_over_to_the_new_one() -> None:
    Old = model()
    assert Old(size=4).width == 8
    assert Old(width="auto", size=4).width == 8
    assert Old(width=3).width == 3
    with pytest.raises(AssertionError, match="'size' and 'width' are both given") as caught:
        Old(size=4, width=8)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("keys", [{"widht": 1}, {"width": "wide"}])
def test_a_model_refuses_unknown_keys_and_other_types(keys: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        model()(**keys)


def test_the_zero_section_is_read_by_any_of_its_names() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=1000)
    assert (section.prefetch_bucket_size, section.stage3_prefetch_bucket_size) == (1000, 1000)
    assert section.overlap_comm is True
    assert section.offload_param is None
    assert DeepSpeedZeroConfig(stage=1).overlap_comm is False
    assert DeepSpeedZeroConfig(stage=3, overlap_comm=False).overlap_comm is False
    offload = DeepSpeedZeroConfig(stage=3, offload_optimizer={"device": "cpu", "pipeline_read": True}).offload_optimizer
    assert (offload.device, offload.pipeline) == ("cpu", True)
    with pytest.raises(AttributeError, match="no key 'stag'"):
        _ = section.stag
    with pytest.raises(ConfigError, match="stag"):
        DeepSpeedZeroConfig(stag=3)


def test_the_fp16_section_refuses_what_cannot_be() -> None:
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    assert DeepSpeedFP16Config(enabled=True, initial_scale_power=4).initial_dynamic_scale() == 16
    for scale in (-1, float("inf"), float("nan")):
        with pytest.raises(pydantic.ValidationError):
            DeepSpeedFP16Config(loss_scale=scale)


@pytest.mark.parametrize(("name", "value"), [("loss_scale_window", 0), ("min_loss_scale", -1)])
def test_values_of_the_adaptive_scale_count_where_it_is_used(name: str, value: int) -> None:
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    for unused in ({"enabled": False}, {"enabled": True, "loss_scale": 8}):
        assert getattr(DeepSpeedFP16Config(**unused, **{name: value}), name) == value  # type: ignore[arg-type]
    with pytest.raises(pydantic.ValidationError, match=rf"fp16\.{name} must be > 0 when dynamic"):
        DeepSpeedFP16Config(enabled=True, **{name: value})  # type: ignore[arg-type]
    assert DeepSpeedFP16Config(initial_scale_power=-1).dynamic_loss_scale_args()["init_scale"] == 0.5


@pytest.mark.parametrize("name", ["loss_scale", "loss_scale_window", "min_loss_scale"])
def test_numbers_of_the_fp16_section_may_be_text_but_must_be_numbers(name: str) -> None:
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    assert getattr(DeepSpeedFP16Config(**{name: "3"}), name) == 3
    for wrong in ([], {}, True, "three", None):
        with pytest.raises(pydantic.ValidationError, match=rf"fp16\.{name} must be a number"):
            DeepSpeedFP16Config(**{name: wrong})
    for wrong in ("inf", float("inf"), float("nan")):
        with pytest.raises(pydantic.ValidationError):
            DeepSpeedFP16Config(**{name: wrong})


def test_lists_of_cores_are_ranges_that_ascend() -> None:
    from deepspeed.utils.numa import parse_range_list

    assert parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    for wrong in ("4-2", "2,1", "1-", "a", "", "1-2-3", "0-3,2"):
        with pytest.raises(ConfigError, match="cores"):
            parse_range_list(wrong)


def test_one_monitor_writes_its_own_files(tmp_path: Path) -> None:
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.csv_monitor import csvMonitor

    section = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    monitor = csvMonitor(get_monitor_config(section).csv_monitor)
    assert (monitor.enabled, monitor.output_path, monitor.job_name) == (True, str(tmp_path), "job")
    monitor.write_events([("Train/loss", 0.5, 3)])
    rows = [path.read_text() for path in tmp_path.rglob("*.csv")]
    assert len(rows) == 1
    assert rows[0].splitlines()[-1] == "3,0.5"


def test_the_other_monitors_have_their_sections_keys() -> None:
    from deepspeed.monitor.comet import CometMonitor
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.tensorboard import TensorBoardMonitor
    from deepspeed.monitor.wandb import WandbMonitor

    config = get_monitor_config({"tensorboard": {"job_name": "a"}, "wandb": {"project": "b"}})
    assert TensorBoardMonitor(config.tensorboard).job_name == "a"
    assert WandbMonitor(config.wandb).project == "b"
    assert not TensorBoardMonitor(config.tensorboard).enabled
    comet = CometMonitor(config.comet)
    assert (comet.enabled, comet.samples_log_interval, comet.experiment) == (False, 100, None)
    assert not config.enabled


def test_comets_monitor_starts_one_experiment_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.monitor.comet import CometMonitor
    from deepspeed.monitor.monitor import MonitorMaster
    from deepspeed.runtime.config import DeepSpeedConfig

    package, experiment = Mock(), Mock()
    package.start.return_value = experiment
    monkeypatch.setitem(sys.modules, "comet_ml", package)
    section = {"enabled": True, "samples_log_interval": 42, "project": "p", "experiment_name": "n", "online": True}
    config = DeepSpeedConfig({"train_batch_size": 1, "comet": section})
    monitor = CometMonitor(config.monitor_config.comet)
    assert (monitor.enabled, monitor.samples_log_interval, monitor.experiment) == (True, 42, experiment)
    package.start.assert_called_once_with(
        api_key=None, project="p", workspace=None, experiment_key=None, mode=None, online=True
    )
    experiment.set_name.assert_called_once_with("n")
    monitor.write_events([("Train/loss", 0.5, 3)])
    experiment.log_metric.assert_called_once_with("Train/loss", 0.5, step=3)
    master = MonitorMaster(config.monitor_config)
    assert master.enabled
    master.close()
    experiment.end.assert_called_once_with()


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_the_section_for_bf16_has_two_names(name: str) -> None:
    from shoal.compat.deepspeed.runtime.precision_config import get_bfloat16_config

    assert get_bfloat16_config({name: {"enabled": True}}).enabled is True
    assert get_bfloat16_config({}).enabled is False


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ((32, 16, 2), (32, 16, 2)),
        ((32, None, 2), (32, 16, 2)),
        ((None, 5, None), (5, 5, 1)),
        ((12, None, None), (12, 12, 1)),
    ],
)
def test_batch_sizes_that_are_set_afterwards_are_solved_again(given: tuple[Any, ...], solved: tuple[int, ...]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = DeepSpeedConfig({"train_batch_size": 3})
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    assert tuple(getattr(config, name) for name in names) == (3, 3, 1)

    def configure(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        for name, size in zip(names, sizes, strict=True):
            setattr(config, name, size)
        config._configure_train_batch_size()
        return tuple(getattr(config, name) for name in names)

    assert configure(given) == solved
    for wrong in ((33, 16, 2), (None, None, 2), (-4, -2, 2)):
        with pytest.raises(AssertionError, match=r"\[config-batch\]"):
            configure(wrong)
