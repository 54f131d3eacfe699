"""DeepSpeed's sequence parallelism under its names: DistributedAttention, groups, and the data loader's adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import shoal
from shoal.access.engine_parameters import safe_get_full_grad
from shoal.comm.threads import run_ranks
from shoal.comm.world import communicator_of, current_world
from shoal.compat.deepspeed.utils import groups
from shoal.compat.sequence_parallel import (
    DistributedAttention,
    UlyssesSPDataLoaderAdapter,
    current_unit,
    get_sequence_data_parallel_world_size,
    get_sequence_parallel_rank,
    initialize_sequence_parallel,
)
from shoal.errors import UsageError
from shoal.mesh import Mesh
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.sequence.context import current_sequence_context, set_sequence_context
from tests.helpers.training import make

E = 8


def local_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """Of [L, B, H, E], as Megatron has it."""
    heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
    return F.scaled_dot_product_attention(*heads, is_causal=is_causal, enable_gqa=True).permute(2, 0, 1, 3)


def check_distributed(group: Any, rank: int, size: int) -> None:
    attention = DistributedAttention(local_attention, group)
    for heads, key_heads in ((8, 8), (7, 7), (12, 3), (4, 1)):
        generator = torch.Generator().manual_seed(heads)
        shapes = [(4 * size, 2, some, E) for some in (heads, key_heads, key_heads, heads)]
        *tensors, gradient = [torch.randn(shape, generator=generator) for shape in shapes]
        whole = [tensor.clone().requires_grad_() for tensor in tensors]
        wanted = local_attention(*whole, is_causal=True)
        wanted_gradients = torch.autograd.grad(wanted, whole, gradient)
        own = slice(4 * rank, 4 * rank + 4)
        mine = [tensor[own].clone().requires_grad_() for tensor in tensors]
        for arguments in ((), (1,)):  # DeepSpeed's batch_dim_idx
            out = attention(*mine, *arguments, is_causal=True)
            assert torch.allclose(out, wanted[own], atol=1e-6)
            for found, expected in zip(torch.autograd.grad(out, mine, gradient[own]), wanted_gradients, strict=True):
                assert (found - expected[own]).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("size", [2, 4])
def test_distributed_attention_equals_its_local_attention_over_the_whole_sequence(size: int) -> None:
    def run() -> None:
        world = current_world()
        check_distributed(world.process_group("world", Mesh.of(size)), world.rank, size)

    run_ranks(size, run)


def test_distributed_attention_of_the_dims_that_it_is_told() -> None:
    def run() -> None:
        world = current_world()
        group = world.process_group("world", Mesh.of(2))
        attention = DistributedAttention(lambda q, k, v: (q + k) * v, group, scatter_idx=1, gather_idx=2)
        tensors = [torch.randn(2, 4, 3, E) for _ in range(3)]
        assert torch.allclose(attention(*tensors), (tensors[0] + tensors[1]) * tensors[2])
        with pytest.raises(UsageError, match="rotate query and key before"):
            attention(*tensors, rotary_pos_emb=(1, 2))

    run_ranks(2, run)


def with_torchs_groups(rank: int, size: int) -> None:
    check_distributed(dist.group.WORLD, rank, size)
    assert communicator_of(None).size == size
    alone = communicator_of(dist.new_group([rank], use_local_synchronization=True))
    assert (alone.size, alone.rank) == (1, 0)
    initialize_sequence_parallel(2)
    set_sequence_context(None)
    assert dist.get_process_group_ranks(groups._get_sequence_parallel_group()) == [0, 1]
    assert dist.get_process_group_ranks(groups._get_data_parallel_group()) == [rank]
    batches = UlyssesSPDataLoaderAdapter(
        [{"input_ids": torch.arange(8).view(1, 8) + 10 * rank}], rank, groups._get_sequence_parallel_group(), 2, "cpu"
    )
    own = [batch["input_ids"].flatten().tolist() for batch in batches]
    assert own == [[first + 4 * rank + index for index in range(4)] for first in (0, 10)]
    current_world().close()


def test_distributed_attention_on_torchs_process_groups(gloo: Callable[..., list[Any]]) -> None:
    gloo(2, with_torchs_groups)


def test_groups_are_neighbours_that_share_a_sequence() -> None:
    def run() -> dict[str, Any]:
        initialize_sequence_parallel(2)
        context = current_sequence_context()
        assert context is not None
        assert context.sp is not None
        found = {
            "sequence": (groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size()),
            "data": (groups._get_data_parallel_rank(), groups._get_data_parallel_world_size()),
            "data ranks": groups._get_data_parallel_group_ranks(),
            "context": (context.sp.rank, context.sp.size),
            "module": (get_sequence_parallel_rank(), get_sequence_data_parallel_world_size()),
            "groups": [
                dist.distributed_c10d._world.pg_group_ranks[group]
                for group in (groups._get_sequence_parallel_group(), groups._get_data_parallel_group())
            ],
        }
        set_sequence_context(None)
        return found

    assert run_ranks(4, run)[3] == {
        "sequence": (1, 2),
        "data": (1, 2),
        "data ranks": [1, 3],
        "context": (1, 2),
        "module": (1, 4),
        "groups": [{2: 0, 3: 1}, {1: 0, 3: 1}],
    }


def test_without_initialisation_the_functions_say_what_to_call() -> None:
    assert current_unit() is None
    with pytest.raises(UsageError, match="sequence parallelism is not initialised"):
        get_sequence_parallel_rank()


def adapted(batches: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    world = current_world()
    group = world.process_group("world", Mesh.of(world.size))
    adapter = UlyssesSPDataLoaderAdapter(batches[world.rank], world.rank, group, world.size, "cpu")
    first = list(adapter)
    assert len(first) == len(adapter)
    again = [next(adapter) for _ in range(len(adapter))]
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one if isinstance(one[key], torch.Tensor))
    with pytest.raises(StopIteration):
        next(adapter)
    return first


def test_the_adapter_cuts_every_ranks_batch_along_the_sequence() -> None:
    """Batches of other lengths, rows and dtypes; what has no positions is every rank's."""

    def batch(rank: int, length: int) -> dict[str, Any]:
        ids = torch.arange(2 * length).view(2, length) + 100 * rank
        return {
            "input_ids": ids,
            "labels": ids.clone(),
            "attention_mask": torch.ones(2, length, dtype=torch.bool),
            "pixels": torch.randn(2, length, 3, dtype=torch.float64),
            "weight": torch.tensor([0.5 + rank, 1.0]),
            "name": f"batch of {rank}",
        }

    batches = [[batch(0, 8), batch(0, 4)], [batch(1, 6), batch(1, 10)]]
    cut = run_ranks(2, adapted, batches)
    for index, (source, which, length) in enumerate([(0, 0, 8), (1, 0, 6), (0, 1, 4), (1, 1, 10)]):
        whole = batches[source][which]
        parts = [cut[rank][index] for rank in range(2)]
        for key in ("input_ids", "attention_mask", "pixels"):
            assert torch.equal(torch.cat([part[key] for part in parts], 1), whole[key])
        labels = torch.cat([part["shift_labels"] for part in parts], 1)
        assert torch.equal(labels[:, :-1], whole["labels"][:, 1:])
        assert (labels[:, -1] == -100).all()
        positions = torch.cat([part["position_ids"] for part in parts], 1)
        assert torch.equal(positions, torch.arange(length).expand(2, length))
        for part in parts:
            assert "labels" not in part
            assert torch.equal(part["weight"], whole["weight"])
            assert part["name"] == whole["name"]


def test_rows_that_do_not_divide_are_padded_by_positions_without_a_target() -> None:
    """Padding has positions of its own, so that no token attends to it, and no label."""

    def batch(rank: int) -> dict[str, Any]:
        ids = torch.arange(1, 6).expand(2, 5) + 10 * rank
        mask = torch.ones(2, 5, dtype=torch.bool)
        return {"input_ids": ids, "labels": ids, "attention_mask": mask, "pixels": torch.ones(2, 5, 3)}

    cut = run_ranks(4, adapted, [[batch(rank)] for rank in range(4)])
    for index in range(4):
        whole = {key: torch.cat([of[index][key] for of in cut], 1) for key in cut[0][index]}
        assert whole["input_ids"][0].tolist() == [*(10 * index + torch.arange(1, 6)).tolist(), 0, 0, 0]
        assert whole["shift_labels"][1].tolist() == [*(10 * index + torch.arange(2, 6)).tolist(), *[-100] * 4]
        assert whole["position_ids"][1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
        assert whole["attention_mask"][0].tolist() == [True] * 5 + [False] * 3
        assert whole["pixels"].shape == (2, 8, 3)


def test_batches_that_cannot_be_cut_are_refused_on_all_ranks() -> None:
    other = [[{"input_ids": torch.zeros(1, 8)}], [{"input_ids": torch.zeros(1, 8), "extra": 1}]]

    def run() -> None:
        with pytest.raises(UsageError, match="batches with different keys"):
            adapted(other)

    run_ranks(2, run)


ROWS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def losses_of_engines() -> None:
    """Engines with and without sequence parallelism in one process, in turn; each recomputes its layers."""

    def gpt() -> GPT:
        model = make(lambda: GPT(GPTConfig(50, 8, 2, 16, 2)))
        model.attend_by(shoal.attention)
        return model

    def engine(mpu: Any = None) -> Any:
        settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        settings["activation_checkpointing"] = {"modules": ["Block"]}
        return shoal.initialize(model=gpt(), config=settings, mpu=mpu)[0]

    def loss(engine: Any) -> torch.Tensor:
        context = engine.sequence_context or shoal.SequenceContext()
        parts = [context.shard(tokens) for tokens in (ROWS[:, :-1], ROWS[:, 1:])]
        found: torch.Tensor = engine(*parts, context.positions(8))
        return found

    whole = gpt()
    wanted = whole(ROWS[:, :-1], ROWS[:, 1:])
    wanted.backward()
    initialize_sequence_parallel(2)
    first, second = engine(current_unit()), engine()
    assert current_sequence_context() is None  # of the engine that was made last
    for _ in range(2):
        spread, alone = loss(first), loss(second)
        assert first.axes.world.exchange(spread.detach().view(1), label="loss").wait().mean() == pytest.approx(
            wanted.item(), rel=1e-6
        )
        assert alone.item() == pytest.approx(wanted.item(), rel=1e-6)
    for each, of in ((first, spread), (second, alone)):
        each.backward(of)
        for parameter, expected in zip(each.module.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(safe_get_full_grad(parameter), expected.grad, rtol=1e-5, atol=1e-7)
    first.destroy()
    assert loss(second).item() == pytest.approx(wanted.item(), rel=1e-6)
    second.destroy()
    assert current_sequence_context() is None
    third = engine(current_unit())  # the unit serves again, without another registration
    assert current_sequence_context() is third.sequence_context is not None
    with shoal.sequence_parallel(None):  # what a block says comes before an engine's own
        assert third.eval()(ROWS[:, :-1], ROWS[:, 1:]).item() == pytest.approx(wanted.item(), rel=1e-6)
    third.destroy()
    # An engine that is made without the unit computes in the registered context; the next one does not.
    initialize_sequence_parallel(2)
    registered = current_sequence_context()
    fourth = engine()
    assert current_sequence_context() is registered is not None
    fifth = engine()
    assert current_sequence_context() is None
    fourth.destroy()
    fifth.destroy()


def test_each_engine_of_a_process_computes_in_its_own_sequence_context() -> None:
    run_ranks(2, losses_of_engines)


def test_the_adapter_has_the_loaders_attributes() -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=2)
    adapter = run_ranks(1, lambda: UlyssesSPDataLoaderAdapter(loader, 0, current_world().process_group(
        "world", Mesh.of(1)), 1, "cpu"))[0]  # fmt: skip
    assert adapter.batch_size == 2
    assert adapter.dataset == [1, 2, 3]
    assert not hasattr(adapter, "set_epoch")


def test_a_process_group_of_irregular_ranks_is_refused() -> None:
    def run() -> None:
        world = current_world()
        group: Any = object()  # stands for a group of torch with these ranks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 3])
            with pytest.raises(UsageError, match=r"ranks \[0, 1, 3\] of a process group are no group"):
                communicator_of(group)
        assert world.rank == 0

    run_ranks(1, run)
