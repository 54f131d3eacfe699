"""Products by parts on the simulated accelerator, by torch's operators and by messages: they wait where they must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.nccl import NcclCommunicator
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers.simulated_nccl import SimulatedGroup
from tests.ranks.parallel.tensor.test_engine import config, gpt, initialize, make, train

SIZE = 2
LABELS = ("qkv", "projection", "up", "down")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """torch's operators as collectives of the simulated group, which they find by its name."""
    groups: dict[str, SimulatedGroup] = {}
    found = Counter[str]()

    def name_of(group: SimulatedGroup) -> str:
        groups[str(id(group))] = group
        return str(id(group))

    class Options:
        asyncOp = True
        reduceOp = torch.distributed.ReduceOp(torch.distributed.ReduceOp.SUM)

    def gather(
        x: torch.Tensor, weights: list[torch.Tensor], dim: int, name: str, *, return_A: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        found["gather"] += 1
        parts = x.new_empty(SIZE, *x.shape)
        groups[name].all_gather_single(parts.view(-1), x.reshape(-1), Options).wait()
        whole = torch.cat(list(parts), dim)
        return whole, [whole @ weight for weight in weights]

    def scatter(x: torch.Tensor, weight: torch.Tensor, operation: str, dim: int, name: str) -> torch.Tensor:
        found["scatter"] += 1
        products = torch.stack((x @ weight).chunk(SIZE, dim))
        out = torch.empty_like(products[0])
        groups[name].reduce_scatter_single(out.view(-1), products.view(-1), Options).wait()
        return out

    monkeypatch.setattr(SimulatedGroup, "group_name", property(name_of))
    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        library.impl("fused_all_gather_matmul", gather, "CPU")
        library.impl("fused_matmul_reduce_scatter", scatter, "CPU")
        yield found


def trained(setting: Any, *, checked: bool) -> dict[str, torch.Tensor]:
    sections = {"parallel": {"tp_sequence_parallel": True}, "tensor_parallel": {"tp_overlap_comm": setting}}

    def run() -> dict[str, torch.Tensor]:
        engine = initialize(make(gpt), config(3, SIZE, **sections))
        train(engine, range(2))
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        engine.destroy()
        current_world().close()
        return values

    def rank() -> dict[str, torch.Tensor]:
        if not checked:
            return run()
        with shoal.check_streams():
            return run()

    return run_ranks(2 * SIZE, rank, timeout=120)[0]


@pytest.mark.parametrize("has_memory", [True, False])
def test_products_by_parts_wait_for_what_they_read(
    calls: Counter[str], has_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NcclCommunicator, "open_symmetric_memory", lambda comm, device: has_memory)
    values = trained("symmetric_memory", checked=True)
    assert (calls["gather"] > 0, calls["scatter"] > 0) == (has_memory, has_memory)
    for name, value in trained(False, checked=False).items():
        torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=name)
