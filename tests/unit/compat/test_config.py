"""``DeepSpeedConfig``, the monitors that it names, and the levels of DeepSpeed's logger."""

from __future__ import annotations

import logging
import sys
from typing import Any
from unittest.mock import Mock

import pytest

from shoal.compat.deepspeed.monitor.monitor import MonitorMaster
from shoal.compat.deepspeed.runtime.config import DeepSpeedConfig
from shoal.compat.deepspeed.utils.logging import set_log_level_from_string
from shoal.config import examine
from shoal.errors import ConfigError


def test_comets_monitor_starts_one_experiment_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    package, experiment = Mock(), Mock()
    package.start.return_value = experiment
    monkeypatch.setitem(sys.modules, "comet_ml", package)
    section = {"enabled": True, "samples_log_interval": 42, "project": "p", "experiment_name": "n", "online": True}
    config = DeepSpeedConfig({"train_batch_size": 1, "comet": section})
    master = MonitorMaster(config.monitor_config)
    assert (master.enabled, master.comet_experiment) == (True, experiment)
    package.start.assert_called_once_with(
        api_key=None, project="p", workspace=None, experiment_key=None, mode=None, online=True
    )
    experiment.set_name.assert_called_once_with("n")
    master.write_events([("Train/loss", 0.5, 3)])
    experiment.log_metric.assert_called_once_with("Train/loss", 0.5, step=3)
    master.close()
    experiment.end.assert_called_once_with()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gradient_allreduce_op": "max"}, "Invalid gradient_allreduce_op"),
        ({"communication_data_type": "x"}, "Invalid communication_data_type"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "cannot be simultaneously enabled"),
        ({"data_types": {"param_dtype": "bf16"}}, "conflicts with the enabled precision mode"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', "Duplicate keys in DeepSpeed config"),
    ],
)
def test_errors_of_a_configuration_have_the_words_that_scripts_match(given: Any, words: str) -> None:
    config = {"train_batch_size": 1, **given} if isinstance(given, dict) else given
    with pytest.raises(AssertionError, match=words) as caught:
        DeepSpeedConfig(config)
    assert isinstance(caught.value, ConfigError)
    if isinstance(given, dict):
        assert words not in str(examine(config).problems), "Shoal's own message has Shoal's words alone"


def test_a_level_of_the_log_is_set_by_name() -> None:
    logger = logging.Logger("of a script")
    set_log_level_from_string("Warning", logger)
    assert logger.level == logging.WARNING
    with pytest.raises(ValueError, match="'loud' is not one of the valid logging levels"):
        set_log_level_from_string("loud", logger)
