"""ZeRO beside a tensor-parallel axis: a model that declares its parts, as Megatron-LM does, trains as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shoal
from shoal.access.engine_parameters import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from shoal.comm.autograd import all_gather, all_reduce, copy, gather, reduce_scatter
from shoal.comm.protocol import Communicator
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from tests.helpers.training import make

HIDDEN, LENGTH, ROWS = 10, 4, 2


class Block(nn.Module):
    """A norm, and a gated MLP whose gate and up projections are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate_up = nn.Parameter(torch.randn(4 * HIDDEN, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(HIDDEN, 2 * HIDDEN) / 3)
        self.bias = nn.Parameter(torch.randn(HIDDEN))
        self.comm: Communicator | None = None
        self.splits_sequence = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        comm, hidden = self.comm, self.norm(x)
        if comm is not None:
            hidden = (
                all_gather(hidden, comm, dim=1, label="up") if self.splits_sequence else copy(hidden, comm, label="up")
            )
        gate, up = functional.linear(hidden, self.gate_up).chunk(2, -1)
        out = functional.linear(functional.silu(gate) * up, self.down)
        if comm is not None and self.splits_sequence:
            out = reduce_scatter(out, comm, dim=1, label="down")
        elif comm is not None:
            out = all_reduce(out, comm, label="down")
        return x + out + self.bias


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: Any = self.blocks[0]
        if first.splits_sequence:
            x = x.chunk(first.comm.size, 1)[first.comm.rank]
        for block in self.blocks:
            x = block(x)
        if first.splits_sequence:
            x = gather(x, first.comm, dim=1, label="head")  # every rank computes the whole loss
        return self.head(x * self.frozen).square().mean()


def split(model: Model, comm: Communicator, *, splits_sequence: bool) -> Model:
    """Each rank keeps unequal parts: the first has one column more of each half than the others."""
    sizes = [2 * HIDDEN // comm.size] * comm.size
    if comm.size > 1:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    begin = sum(sizes[: comm.rank])
    end = begin + sizes[comm.rank]
    for module in model.blocks:
        block: Any = module
        gate, up = block.gate_up.data.chunk(2)
        for parameter, part, dim, stride in (
            (block.gate_up, torch.cat([gate[begin:end], up[begin:end]]), 0, 2),
            (block.down, block.down.data[:, begin:end].clone(), 1, 1),
        ):
            parameter.data = part
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride
        block.comm, block.splits_sequence = comm, splits_sequence
        if splits_sequence:
            for parameter in (block.norm.weight, block.norm.bias, block.bias):
                parameter.sequence_parallel = True
    return model


def data(step: int, row: int, num_rows: int) -> torch.Tensor:
    x = torch.randn(ROWS * num_rows, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(step))
    return x[ROWS * row : ROWS * (row + 1)]


def config(stage: int, accumulation: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.05,
        "zero_optimization": zero,
        "units": {"names": ["blocks.*"]},
        **more,
    }


def alone(num_rows: int, accumulation: int, steps: int = 3) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Plain PyTorch on all samples."""
    model = make(Model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    norms = []
    for step in range(steps):
        for micro in range(accumulation):
            (
                model(data(10 * step + micro, 0, 1) if num_rows == 0 else _whole(step, micro, num_rows)) / accumulation
            ).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, norms


def _whole(step: int, micro: int, num_rows: int) -> torch.Tensor:
    return torch.randn(ROWS * num_rows, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(10 * step + micro))


def engine_of(settings: dict[str, Any], tp: int, *, splits_sequence: bool = False) -> Any:
    world = current_world()
    comm = world.communicator("tp", Mesh.of(world.size, tp=tp))
    model = split(make(Model), comm, splits_sequence=splits_sequence)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return shoal.initialize(
        model=model, optimizer=optimizer, config={**settings, "parallel": {"tp": tp, **settings.get("parallel", {})}}
    )[0]


def train(engine: Any, steps: range, accumulation: int) -> list[float]:
    norms = []
    for step in steps:
        for micro in range(accumulation):
            batch = engine.axes.batch
            engine.backward(engine(data(10 * step + micro, batch.rank, batch.size)))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


CASES = [
    *((4, 2, stage, 1, sequence, {}) for stage in range(4) for sequence in (False, True)),
    (4, 4, 3, 1, True, {}),
    (4, 2, 2, 3, True, {}),
    (4, 2, 0, 2, True, {}),
    (8, 2, 3, 2, True, {"parallel": {"dp_shard": 2}}),
    (4, 2, 3, 1, True, {"zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}),
]


@pytest.mark.parametrize(("size", "tp", "stage", "accumulation", "sequence", "more"), CASES)
def test_split_layers_train_as_one_process_does(
    size: int, tp: int, stage: int, accumulation: int, sequence: bool, more: dict[str, Any]
) -> None:
    expected, norms = alone(size // tp, accumulation)

    def job() -> Any:
        engine = engine_of(config(stage, accumulation, **more), tp, splits_sequence=sequence)
        found = train(engine, range(3), accumulation)
        return engine.module_state_dict(), found, engine.dp_world_size

    for values, found, dp in run_ranks(size, job):
        assert dp == size // tp
        assert found == pytest.approx(norms, rel=1e-5)
        assert list(values) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_full_values_are_those_of_the_whole_parameter(stage: int) -> None:
    def job() -> None:
        engine = engine_of(config(stage, 1), 2, splits_sequence=True)
        whole = make(Model)
        batch = engine.axes.batch
        engine.backward(engine(data(0, batch.rank, batch.size)))
        whole(_whole(0, 0, 2)).backward()
        parameter = engine.module.blocks[1].gate_up
        torch.testing.assert_close(safe_get_full_fp32_param(parameter), whole.blocks[1].gate_up.detach())
        torch.testing.assert_close(safe_get_full_grad(parameter), whole.blocks[1].gate_up.grad)
        norm = engine.module.blocks[0].norm.weight
        torch.testing.assert_close(safe_get_full_grad(norm), whole.blocks[0].norm.weight.grad)
        engine.step()
        state = safe_get_full_optimizer_state(parameter, "exp_avg")
        assert state is not None and state.shape == (4 * HIDDEN, HIDDEN)
        new = torch.randn(4 * HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3))
        safe_set_full_fp32_param(parameter, new)
        assert torch.equal(safe_get_full_fp32_param(parameter), new)
        assert torch.equal(engine.module_state_dict()["blocks.1.gate_up"], new)

    run_ranks(4, job)


@pytest.mark.parametrize(("save", "load"), [((4, 2, 3), (4, 1, 1)), ((4, 1, 2), (4, 4, 3)), ((4, 2, 0), (2, 2, 3))])
def test_a_checkpoint_loads_with_other_tensor_parallel_ranks(
    tmp_path: Path, save: tuple[int, int, int], load: tuple[int, int, int]
) -> None:
    def first() -> Any:
        engine = engine_of(config(save[2], 1), save[1])
        train(engine, range(2), 1)
        engine.save_checkpoint(tmp_path, "tag")
        return engine.module_state_dict()

    expected = run_ranks(save[0], first)[0]

    def second() -> Any:
        engine = engine_of(config(load[2], 1), load[1])
        engine.load_checkpoint(tmp_path, "tag")
        moments = safe_get_full_optimizer_state(engine.module.blocks[0].gate_up, "exp_avg")
        return engine.module_state_dict(), moments

    for values, moments in run_ranks(load[0], second):
        assert all(torch.equal(values[name], value) for name, value in expected.items())
        assert moments.abs().sum() > 0


def test_tensor_parallel_ranks_with_different_batches_are_an_error_on_every_rank() -> None:
    def job() -> str:
        engine = engine_of(config(2, 1), 2)
        with pytest.raises(shoal.errors.UsageError) as caught:
            engine(data(0, current_world().rank, 4))
        return str(caught.value)

    for text in run_ranks(4, job):
        assert "2 ranks of a tensor-parallel group were given 2 different batches" in text
        assert "batch-differs" in text
