"""What an engine says when it starts: two lines, and more on request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import shoal
from shoal.compat.deepspeed import utils
from shoal.engine.log import quiet
from shoal.errors import UsageError
from shoal.launch.environment import log_level


@pytest.fixture(autouse=True)
def levels_as_before() -> Iterator[None]:
    loggers = logging.getLogger("shoal"), utils.logger
    before = [each.level for each in loggers]
    yield
    for each, level in zip(loggers, before, strict=True):
        each.setLevel(level)


def said(caplog: pytest.LogCaptureFixture, **config: Any) -> list[str]:
    """The messages of a start."""
    caplog.clear()
    logging.getLogger("shoal").setLevel(logging.NOTSET)
    with caplog.at_level(logging.NOTSET):
        whole = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
        engine, *_ = shoal.initialize(model=torch.nn.Linear(4, 2), config=whole)
        engine.destroy()
    return caplog.messages


def test_a_start_is_a_line_on_the_placement_and_one_on_memory(caplog: pytest.LogCaptureFixture) -> None:
    placement, memory = said(caplog)
    row = "root: parameters Replicate, gradients Partial, optimizer state Replicate (device)"
    assert placement == f"ZeRO-0 on 1 rank; {row}"
    assert memory.startswith("memory of rank 0: ")


@pytest.mark.parametrize("from_environment", [False, True])
def test_the_tables_come_at_level_debug(
    from_environment: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_LOG_LEVEL", "DEBUG" if from_environment else "")
    messages = said(caplog, **({} if from_environment else {"log_level": "debug"}))
    assert [m.splitlines()[0] for m in messages if "\n" in m] == ["placement", "memory of rank 0"]


def test_the_environments_level_overrides_the_configs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_LOG_LEVEL", "warning")
    assert said(caplog, log_level="debug") == []
    with pytest.raises(UsageError, match="SHOAL_LOG_LEVEL='loud' is not a level"):
        log_level({"SHOAL_LOG_LEVEL": "loud"})


def test_many_keys_without_effect_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    names = ["contiguous_gradients", "round_robin_gradients", "allgather_partitions"]
    *_, last = said(caplog, zero_optimization=dict.fromkeys(names, True))
    assert last.startswith("3 keys of the config have no effect (`shoal doctor FILE` shows why): zero_optimization.")
    assert all(name in last for name in names)
    one = said(caplog, zero_optimization={names[0]: True})
    assert one[-1].startswith("zero_optimization.contiguous_gradients = true: accepted, no effect: ")


def test_a_client_that_silences_deepspeeds_logger_leaves_the_start_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shoal"):
        utils.log_dist("seen", ranks=[0])
        utils.logger.setLevel(logging.WARNING)  # as Transformers' Trainer does
        utils.log_dist("not seen", ranks=[0])
        assert caplog.messages == ["[Rank 0] seen"]
    assert len(said(caplog)) == 2


def test_a_dry_run_says_nothing_and_two_that_overlap_leave_the_log_on() -> None:
    logger = logging.getLogger("shoal")
    with ExitStack() as first:
        first.enter_context(quiet())
        with ExitStack() as second:
            second.enter_context(quiet())
            first.close()
            assert logger.disabled
    assert not logger.disabled
