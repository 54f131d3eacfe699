"""The status of a step: the norm's kernels on an accelerator, and how often the host waits for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.comm import protocol
from shoal.comm.fake import SingleCommunicator
from shoal.comm.threads import run_ranks
from shoal.engine.model_parts import axes_of
from shoal.mesh import Mesh
from shoal.running.reducer import Reducer
from shoal.running.status import synchronize_status
from shoal.sharding.gradient_norm import sum_of_squares, sums_of_squares
from tests.helpers.models import Plain
from tests.helpers.training import batch, config, sgd, start

CUDA = torch.device("cuda", 0)
READS = {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.nonzero.default", "aten.equal.default"}


class Operations(TorchDispatchMode):
    """The operations inside, with the devices of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, set[str]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        self.seen.append((str(function), {tensor.device.type for tensor in tensors}))
        return out


class Group:
    axes = SimpleNamespace(counts_norm=True, across=())

    def __init__(self, flat: torch.Tensor, offloaded: torch.Tensor | None = None) -> None:
        self.gradient: Any = SimpleNamespace(
            norm_part=lambda: flat,
            offloaded_norm_squared=offloaded,
            has_grad=bytearray(b"\1"),
            is_left_partial=False,
        )


def test_the_norm_of_all_groups_is_one_kernel_and_nothing_crosses_to_the_host_before_one_read() -> None:
    comm = SingleCommunicator("dp")
    axes = axes_of(Mesh.of(comm.size), lambda axis: comm)
    counts = []
    with FakeTensorMode():
        reducer = Reducer([], comm, has_overlap=False, follows_gathers=False, device=CUDA)
        for num_groups in (2, 200):
            flats = [torch.empty(8 + index, device=CUDA, dtype=torch.bfloat16) for index in range(num_groups)]
            groups: list[Any] = [Group(flat) for flat in flats]
            groups.append(Group(flats[0], torch.empty((), device=CUDA)))
            loss = torch.empty((), device=CUDA)
            with Operations() as log:
                synchronize_status(groups, reducer, axes, CUDA, loss)
            assert [devices for _, devices in log.seen if len(devices) > 1 or "cpu" in devices] == []
            assert sum("_foreach_norm" in name for name, _ in log.seen) == 1
            counts.append(len(log.seen))
    assert counts[0] == counts[1] <= 20


def test_sums_of_squares_of_many_tensors_are_those_of_each() -> None:
    class Elsewhere(torch.Tensor):
        """Values of the CPU that say they are an accelerator's."""

        device = CUDA  # type: ignore[assignment]

    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float16]
    flats = [torch.randn(100 + 7 * index).to(dtype) for index, dtype in enumerate(dtypes)]
    expected = [sum_of_squares(flat) for flat in flats]
    assert all(torch.equal(a, b) for a, b in zip(sums_of_squares(flats), expected, strict=True))
    found = sums_of_squares([flats[0].as_subclass(Elsewhere), *flats[1:]])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.as_subclass(torch.Tensor), other, rtol=1e-5, atol=0)
    assert sums_of_squares([]) == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_host_reads_values_once_a_step_and_never_in_forward_and_backward(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job() -> tuple[list[str], list[str], int]:
        engine = start(Plain, config(stage, gradient_clipping=0.1), sgd)
        for index in range(2):
            engine.backward(engine(*batch(index, 0, 1)))
            engine.step()
        inputs = batch(2, 0, 1)
        with Operations() as passes:
            engine.backward(engine(*inputs))
        read: list[int] = []
        with monkeypatch.context() as patched, Operations() as step:
            plain = protocol.read_vector
            patched.setattr(protocol, "read_vector", lambda *a, **k: (read.append(1), plain(*a, **k))[1])
            engine.step()
        engine.destroy()
        names = [[name for name, _ in log.seen if name in READS] for log in (passes, step)]
        return names[0], names[1], len(read)

    assert run_ranks(1, job) == [([], [], 1)]
