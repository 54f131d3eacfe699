"""``device_check``: a rank whose device is slow or computes wrong is named, by its product, its copy and its links."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.protocol import Communicator
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.engine.parts.device_check import DeviceCheck
from shoal.errors import DeviceError, RankFailedError
from shoal.launch.failure import read_error

ODD = 1
_product, _batch, _copy = DeviceCheck._product, Communicator.batch, torch.Tensor.copy_


def train(num_ranks: int, steps: int = 4, parts: Callable[[], list[shoal.Part]] = list, **section: Any) -> list[Any]:
    def rank_main() -> float:
        model = nn.Linear(8, 8)
        for parameter in model.parameters():  # the threads share torch's generator
            nn.init.constant_(parameter, 0.1)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "device_check": {"every": 2, "factor": 8.0, **section},
        }
        engine = shoal.initialize(model=model, config=config)[0]
        for _ in range(steps):
            engine.backward(engine(torch.ones(2, 8)).square().sum())
            engine.step()
        engine.destroy()
        return float(engine.module.weight.detach().sum())

    return run_ranks(num_ranks, rank_main)


def is_odd() -> bool:
    return current_world().rank == ODD


def slow_product(check: DeviceCheck, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    time.sleep(0.3 * is_odd())
    return _product(check, left, right)


def wrong_product(check: DeviceCheck, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = _product(check, left, right)
    if is_odd() and check._counters.global_steps == 2:
        product[5, 7] += 1.0
    return product


def slow_link(comm: Communicator, messages: Any) -> Any:
    is_test = messages[0].label == "device check"
    time.sleep(0.3 * (is_test and (is_odd() or any(each.peer == ODD for each in messages))))
    return _batch(comm, messages)


@pytest.mark.parametrize("kind", ["product", "copy", "link"])
def test_a_slow_device_is_named(kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_copy(target: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.3 * (is_odd() and target.numel() == 1 << 20))
        return _copy(target, source, *args, **kwargs)

    if kind == "product":
        monkeypatch.setattr(DeviceCheck, "_product", slow_product)
    elif kind == "copy":
        monkeypatch.setattr(torch.Tensor, "copy_", slow_copy)
    else:
        monkeypatch.setattr(Communicator, "batch", slow_link)
    monkeypatch.setattr("shoal.engine.parts.device_check._REPEATS", 2)
    monkeypatch.setattr("shoal.engine.parts.device_check._CPU_COPY_NBYTES", 1 << 20)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        train(4, steps=0)
    (text,) = [record.getMessage() for record in caplog.records if "takes" in record.getMessage()]
    what = {"product": "the product of matrices", "copy": "the copy of memory", "link": "the link to its neighbours"}
    start = rf"at the start: rank 1 on {socket.gethostname()}, device cpu: {what[kind]} takes [3-9]\d\d ms, the"
    assert re.match(start, text), text


def test_devices_that_are_alike_are_not_named_and_numbers_do_not_change(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="shoal"):
        assert train(3, factor=1e3) == train(3, every=None)
    assert not [record for record in caplog.records if "device" in record.getMessage()]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_one_wrong_element_is_found_also_on_a_rank_alone(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceCheck, "_product", wrong_product)
    monkeypatch.setattr(f"{__name__}.ODD", num_ranks - 1)
    with pytest.raises(DeviceError, match="products have wrong bits") as caught:
        train(num_ranks, action="stop")
    assert f"[device-check] rank {num_ranks - 1} on {socket.gethostname()}, device cpu: 4 of 4 products" in str(
        caught.value
    )
    assert caught.value.where == "step 2"


def test_a_machine_that_is_to_be_left_out_is_the_one_of_the_rank_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceCheck, "_product", wrong_product)
    errors: dict[int, BaseException] = {}

    def rank_main() -> None:
        try:
            config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
            config["device_check"] = {"every": 2, "factor": 99, "action": "exclude"}
            config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
            engine = shoal.initialize(model=nn.Linear(8, 8), config=config)[0]
            for _ in range(4):
                engine.backward(engine(torch.ones(2, 8)).sum())
                engine.step()
        except BaseException as error:
            errors[current_world().rank] = error
            raise

    with pytest.raises(DeviceError, match="device-failed"):
        run_ranks(3, rank_main)
    assert {rank: type(error) for rank, error in errors.items()} == {
        0: RankFailedError, 1: DeviceError, 2: RankFailedError,
    }  # fmt: skip
    for rank, error in errors.items():
        head = "Traceback (most recent call last):\n"
        written = f'{head}  File "t.py", line 1, in <module>\nshoal.errors.{type(error).__name__}: {error}\n'
        assert read_error(written).is_of_hardware == (rank == ODD)
