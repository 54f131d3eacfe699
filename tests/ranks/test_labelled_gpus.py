"""What CUDA refuses raises without a GPU too: tensors of two devices in an operator, a thread on another device."""

from __future__ import annotations

import copy
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.data import ahead_on
from shoal.device import Device
from shoal.engine.accumulation import Accumulation
from shoal.engine.engine import Engine
from shoal.engine.parts.fault_tolerance import FaultTolerance
from shoal.engine.peer_state import ExportedState
from shoal.parallel.recompute import Recompute, RecomputeSettings, recompute_blocks
from tests.device import test_host_synchronization_gpu, test_recompute_gpu
from tests.helpers import models
from tests.helpers.composition import Combination, named, plainest, settings_of
from tests.helpers.composition_runs import check_run
from tests.helpers.labelled_gpus import GPU, HOST, labelled_gpus
from tests.helpers.training import STAGES, batch, config, largest_difference, make

Values = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with labelled_gpus():
        yield


def number(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)


REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a sum": lambda gpu, host: gpu + host,
    "a product of matrices": lambda gpu, host: gpu @ host,
    "a number of the GPU with a tensor of the host": lambda gpu, host: gpu.sum() + host,
    "zeros without a device": lambda gpu, _: gpu + torch.zeros(3, 3),
    "an index on the host": lambda gpu, _: gpu.index_select(0, torch.tensor([0])),
    "an index on the GPU": lambda gpu, host: host[torch.tensor([0], device=gpu.device)],
    "numbers of a list": lambda gpu, host: torch._foreach_mul_([gpu, host], gpu.sum()),
    "a mask on the host": lambda gpu, host: gpu.masked_fill_(host > 0, 0.0),
    "a result on the host": lambda gpu, host: torch.add(gpu, gpu, out=host),
    "concatenation": lambda gpu, host: torch.cat([gpu, host]),
    "NumPy": lambda gpu, _: gpu.numpy(),
    "page-locking": lambda gpu, _: gpu.pin_memory(),
    "a generator of the host": lambda gpu, _: torch.randn(3, generator=torch.Generator(), device=gpu.device),
    "a gradient on the host": lambda gpu, host: setattr(gpu, "grad", host),
    "a number of the host for a sum": lambda gpu, _: torch._foreach_add_([gpu], torch.tensor(1.0), alpha=2),
    "numbers of the GPU for a list": lambda gpu, _: torch._foreach_addcmul_([gpu], [gpu], [gpu], gpu[0, :1]),
    "a result in a number of the host": lambda gpu, _: torch.tensor(1.0).add_(gpu.sum()),
}
TAKEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a number of the host": lambda gpu, _: gpu + torch.tensor(1.0),
    "a number of the host for a list": lambda gpu, _: torch._foreach_mul([gpu, gpu], torch.tensor(2.0))[1],
    "a list with a number of the host": lambda gpu, _: torch._foreach_add([gpu], [torch.tensor(2.0)])[0],
    "lists of two devices": lambda gpu, host: torch._foreach_add([host, gpu], [host, gpu])[1],
    "autocast": lambda gpu, _: under_autocast(gpu),
    "a copy": lambda gpu, host: gpu.copy_(host),
    "an index on the host": lambda gpu, _: gpu[torch.tensor([0])],
    "zeros like it": lambda gpu, _: gpu + torch.zeros_like(gpu) + gpu.new_zeros(3, 3),
    "a device of the block": lambda gpu, _: zeros_of_block() + gpu,
    "a generator of its own": lambda gpu, _: torch.randn(3, generator=torch.Generator("cuda"), device="cuda") + gpu,
    "a mean of no values": lambda gpu, _: torch.nn.functional.layer_norm(gpu, (3,)),
}


def zeros_of_block() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.zeros(3, 3)


def under_autocast(gpu: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = gpu @ gpu
    assert product.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (gpu @ gpu).dtype == torch.float32
    return product


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_raises(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"device|cuda"):
        REFUSED[name](torch.ones(3, 3, device="cuda"), torch.ones(3, 3))


@pytest.mark.parametrize("name", TAKEN)
def test_what_cuda_takes_is_on_the_gpu(name: str) -> None:
    gpu = torch.ones(3, 3, device="cuda")
    assert TAKEN[name](gpu, torch.ones(3, 3)).device == gpu.device == GPU
    assert gpu.cpu().device == HOST


def test_a_new_thread_is_on_device_0() -> None:
    errors: list[str] = []

    def run() -> None:
        try:
            torch.zeros(2, device=GPU)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "is on device 0, and aten.zeros.default on cuda:1" in errors[0]


def trained(
    stage: int,
    *,
    steps: int,
    first: int = 0,
    folder: Path | None = None,
    model: torch.nn.Module | None = None,
    **settings: Any,
) -> Values:
    """Parameters after some steps. The checkpoint in ``folder`` is loaded, or saved where ``first`` is 0."""
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    if model is None:
        with torch.device("cpu"):
            model = make(models.Plain)
    engine = shoal.initialize(model=model, config=config(stage, **{"optimizer": adam, **settings}))[0]
    device = current_world().device
    if first:
        engine.load_checkpoint(folder)
    for step in range(first, first + steps):
        with torch.device("cpu"):  # also where the script has another default
            tensors = batch(step, 0, 1)
        engine.backward(engine(*(tensor.to(device) for tensor in tensors)))
        engine.step()
        if step == 1 and folder is not None and not first:
            engine.save_checkpoint(folder)
    return values_of(engine)


def values_of(engine: Engine) -> Values:
    model = engine.module
    engine.destroy()
    return {name: value.detach().cpu() for name, value in model.named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("stage", "places"), [*((stage, ()) for stage in STAGES), (2, ("optimizer",)), (3, ("param", "optimizer"))]
)
def test_ranks_on_a_gpu_train_and_resume_at_another_stage(
    stage: int, places: tuple[str, ...], precision: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"gradient_clipping": 0.5}
    if precision != "fp32":
        settings[precision] = {"enabled": True, "loss_scale": 64.0}
    zero = {f"offload_{place}": {"device": "cpu"} for place in places}

    def on_gpu() -> Values:
        return trained(stage, steps=4, folder=tmp_path, zero_optimization=zero, **settings)

    straight = run_ranks(2, on_gpu, device=GPU)[0]
    expected = run_ranks(2, lambda: trained(stage, steps=4, **settings))[0]
    assert largest_difference(straight, expected) <= 2e-3
    again = run_ranks(1, lambda: trained(3 - stage, steps=2, first=2, folder=tmp_path, **settings), device=GPU)[0]
    assert largest_difference(again, straight) <= 4e-2


@pytest.mark.parametrize(
    ("stage", "places", "is_async"), [(0, (), True), (2, ("optimizer",), False), (3, ("param", "optimizer"), True)]
)
def test_the_scripts_default_device_changes_nothing(
    stage: int, places: tuple[str, ...], is_async: bool, tmp_path: Path
) -> None:
    """Of ``torch.set_default_device("cuda")``: what Shoal makes in host memory stays there."""
    zero = {f"offload_{place}": {"device": "cpu"} for place in places}

    def on_gpu() -> Values:
        values = trained(stage, steps=4, folder=tmp_path, zero_optimization=zero, checkpoint={"async_save": is_async})
        again = trained(stage, steps=2, first=2, folder=tmp_path, zero_optimization=zero)
        assert not largest_difference(again, values)
        return values

    def with_default() -> Values:
        torch.set_default_device(GPU)
        try:
            return on_gpu()
        finally:
            torch.set_default_device(None)

    results = [run_ranks(2, run, device=GPU)[0] for run in (with_default, on_gpu)]
    assert not largest_difference(*results)


OF_DTYPE: dict[str, dict[str, Any]] = {
    "state in blocks": {"precision": {"state_dtype": "fp8"}},
    "errors of a format": {"wire": {"reduce": "int8", "error_feedback": True}},
    "updates on the host": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "sums of whole parameters": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}},
    "counts": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}}},
}


@pytest.mark.parametrize("name", OF_DTYPE)
def test_the_scripts_default_dtype_changes_nothing(name: str) -> None:
    """Of ``torch.set_default_dtype(torch.bfloat16)``, which a script calls before it builds its model."""
    model = make(models.Plain)

    def run() -> Values:
        return trained(0 if name == "counts" else 2, steps=4, model=copy.deepcopy(model), **OF_DTYPE[name])

    expected = run_ranks(2, run, device=GPU)[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        values = run_ranks(2, run, device=GPU)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert not largest_difference(values, expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_host_waits_once_a_step(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_host_synchronization_gpu.test_the_host_waits_once_a_step_and_never_in_forward_and_backward(
        stage, "fp16", monkeypatch
    )


@pytest.mark.parametrize("kind", ["a number", "a tensor of the host", "a tensor of the GPU"])
def test_the_host_does_not_wait_for_a_number_of_tokens(kind: str) -> None:
    accumulation = Accumulation(micro_batch=1, num_micro=1, num_ranks=1, counts_tokens=True)
    loss, given = torch.ones((), device="cuda"), torch.tensor([5])
    tokens = {"a number": 5, "a tensor of the host": given, "a tensor of the GPU": given.to("cuda")}[kind]
    with test_host_synchronization_gpu.sync_mode("error"):
        scaled = accumulation.scaled(loss, "engine", num_tokens=tokens)
    assert float(scaled) == 5.0
    total = accumulation.count_tokens(GPU)
    assert total is not None
    assert (float(total), total.dtype) == (5.0, torch.float64)


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_inputs_that_are_offloaded_are_fetched_and_dropout_is_drawn_again(num_blocks: int) -> None:
    model = torch.nn.Sequential(*(test_recompute_gpu.Block() for _ in range(num_blocks))).to("cuda")
    x = torch.randn(4, test_recompute_gpu.HIDDEN, device="cuda")
    loss, gradients, _ = test_recompute_gpu.run(model, x)
    recompute_blocks(model, test_recompute_gpu.Block, recompute=Recompute(RecomputeSettings(is_offloaded=True)))
    ours, our_gradients, _ = test_recompute_gpu.run(model, x)
    assert torch.equal(ours, loss)
    assert all(torch.equal(a, b) for a, b in zip(our_gradients, gradients, strict=True))


def test_batches_that_are_on_the_gpu_already_are_handed_out_as_they_are() -> None:
    there = torch.ones(2, device="cuda")
    host = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (first, moved), *_ = ahead_on(GPU, iter([(there, host), (there, host)]))
    assert first is there
    assert moved.device == GPU
    assert moved.is_contiguous(memory_format=torch.channels_last)


class Encoded(UserDict[str, Any]):
    """As Transformers' batches, of which torch's tree functions know nothing."""


def test_batches_that_are_mappings_of_their_own_kind_are_copied_to_the_gpu() -> None:
    given = Encoded(tokens=torch.ones(2), parts=[torch.ones(3)], name="first")
    (moved,) = ahead_on(GPU, iter([given]))
    assert isinstance(moved, Encoded) and moved["name"] == "first"
    assert moved["tokens"].device == moved["parts"][0].device == GPU
    assert given["tokens"].device == torch.device("cpu")


def test_a_replica_sends_the_state_of_its_gpu_in_a_thread_on_that_device() -> None:
    sent: list[torch.Tensor] = []
    comm = SimpleNamespace(send=lambda message, *_, **__: sent.append(message))
    replica = object.__new__(FaultTolerance)
    replica._link = cast(Any, SimpleNamespace(comm=SimpleNamespace(blocking=comm)))
    replica._device = Device(GPU)
    replica._start_sending(ExportedState({}, [(torch.arange(3.0, device="cuda"),)]), [1])
    replica.wait_sent()
    assert sent[-1].view(torch.float32).tolist() == [0.0, 1.0, 2.0]


# Autocast, backward in another thread, and an optimizer of PyTorch with lists of parameters.
PAIRS: list[Combination] = [
    {"stage": "2", "ranks": "2", "precision": "autocast", "recompute": "matmul", "state": "host", "between": "resume"},
    {"stage": "3", "ranks": "2", "thread": "other", "state": "ratio", "precision": "fp16", "between": "evaluation"},
    {"stage": "1", "ranks": "2", "thread": "other", "optimizer": "client", "clipping": "yes", "loss": "token"},
]


@pytest.mark.parametrize("combination", PAIRS, ids=named)
def test_settings_together_end_on_a_gpu_where_one_process_ends(combination: Combination) -> None:
    plain = plainest()
    check_run(*settings_of({**plain, **combination}), device=GPU)
