"""Parameters that are a part of a larger tensor (tensor parallelism): saved in parts, loaded whole and in others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint import directory
from shoal.checkpoint.local_shards import LocalShard, local_rectangles
from shoal.checkpoint.manifest import MODEL, OPTIMIZER, ParameterRecord
from shoal.checkpoint.native import SourceReader
from shoal.checkpoint.reader import CheckpointReader
from shoal.checkpoint.save import Save, SavedState, SaveOptions
from shoal.checkpoint.storage import LocalStorage
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parts import paste, read_part
from tests.helpers.formats_source import MemorySource

MATRIX = torch.arange(24, dtype=torch.float32).view(4, 6)
MOMENTUM = -MATRIX
NORM = torch.arange(5, dtype=torch.float32) + 100


def part(name: str, whole: torch.Tensor, *local: tuple[int, int]) -> ParameterSpec:
    return ParameterSpec.part(name, tuple(whole.shape), tuple((one,) for one in local))


def cut(whole: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    for dim, ranges in enumerate(spec.local):
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return whole


def shard(
    kind: str, spec: ParameterSpec, whole: torch.Tensor, dp: tuple[int, int], *, copies: tuple[int, int] = (1, 0)
) -> LocalShard:
    """What data-parallel rank ``dp[0]`` of ``dp[1]`` has of a tensor-parallel part."""
    flat = cut(whole, spec).reshape(-1)
    rank, size = dp
    begin, end = flat.numel() * rank // size, flat.numel() * (rank + 1) // size
    return LocalShard(kind, spec, begin, (flat[begin:end].clone(),), *copies)


def test_a_parameter_is_the_whole_tensor_unless_its_spec_names_a_part() -> None:
    whole, columns = ParameterSpec("w", (4, 6), 24, 0, 0), part("w", MATRIX, (0, 4), (2, 4))
    assert (whole.global_shape, whole.local) == ((4, 6), (((0, 4),), ((0, 6),)))
    assert (columns.shape, columns.global_shape, columns.local) == ((4, 2), (4, 6), (((0, 4),), ((2, 4),)))
    with pytest.raises(ValueError, match="exceeds its global shape"):
        part("w", MATRIX, (0, 5), (0, 6))


def test_a_range_of_a_column_part_is_these_rectangles() -> None:
    spec = part("w", MATRIX, (0, 4), (2, 4))
    found = [(begin, r.start, r.shape) for begin, r in local_rectangles(spec, 1, 6)]
    assert found == [(1, (0, 3), (1, 1)), (2, (1, 2), (2, 2))]


@st.composite
def parts(draw: st.DrawFn) -> tuple[ParameterSpec, int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    local = []
    for size in shape:
        ends = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
        local.append(tuple(draw(st.permutations(list(zip(ends[::2], ends[1::2], strict=False))))))
    spec = ParameterSpec.part("w", shape, tuple(local))
    begin, end = sorted((draw(st.integers(0, spec.numel)), draw(st.integers(0, spec.numel))))
    return spec, begin, end


@given(parts())
def test_rectangles_of_a_part_hold_its_elements_in_order(case: tuple[ParameterSpec, int, int]) -> None:
    spec, begin, end = case
    numbers = torch.arange(math.prod(spec.global_shape)).view(spec.global_shape)
    own = cut(numbers, spec).reshape(-1).tolist()
    held = []
    for at, rectangle in local_rectangles(spec, begin, end):
        assert at == begin + len(held)
        held += numbers[rectangle.slices()].reshape(-1).tolist()
    assert held == own[begin:end]


@given(parts())
def test_a_part_is_read_from_the_whole_and_written_to_its_place(case: tuple[ParameterSpec, int, int]) -> None:
    spec, _, _ = case
    numbers = torch.arange(1, 1 + math.prod(spec.global_shape)).view(spec.global_shape)
    own = cut(numbers, spec)
    whole = torch.zeros_like(numbers)
    paste(own, spec, whole)
    assert whole[whole != 0].tolist() == sorted(own.reshape(-1).tolist())
    assert torch.equal(whole[whole != 0], numbers[whole != 0])
    assert not spec.shape or torch.equal(read_part(spec, lambda begin, end: numbers.view(-1)[begin:end]), own)


def save(folder: Path, dp_size: int) -> None:
    """Two tensor-parallel ranks with three columns each, sharded by ``dp_size``; the norm weight is on all ranks."""

    def job() -> None:
        comm = current_world().communicator("dp", Mesh.of(2 * dp_size))
        tp, dp = divmod(comm.rank, dp_size)
        columns = part("w", MATRIX, (0, 4), (3 * tp, 3 * tp + 3))
        shards = [
            shard(MODEL, columns, MATRIX, (dp, dp_size)),
            shard(OPTIMIZER + "momentum_buffer", columns, MOMENTUM, (dp, dp_size)),
            shard(MODEL, ParameterSpec.whole("norm", (5,)), NORM, (0, 1), copies=(comm.size, comm.rank)),
        ]
        records = [
            ParameterRecord(name=name, dtype="float32", shape=tuple(value.shape), group=0)
            for name, value in (("w", MATRIX), ("norm", NORM))
        ]
        state = SavedState(1, lambda: records, {}, {"size": comm.size}, [], dict)
        host = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)  # noqa: E731
        storage = LocalStorage(folder)
        Save(comm, storage, "tag", shards, state, SaveOptions(), lambda phase: None, host, torch.device("cpu"))

    run_ranks(2 * dp_size, job)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_column_parts_are_saved_as_one_tensor_and_loaded_whole(tmp_path: Path, dp_size: int) -> None:
    save(tmp_path, dp_size)
    storage = LocalStorage(tmp_path)
    assert directory.verify(storage, "tag") == []
    reader = CheckpointReader(storage, "tag", directory.inspect(storage, "tag"))
    assert torch.equal(reader.tensor(MODEL, "w"), MATRIX)
    assert torch.equal(reader.tensor(OPTIMIZER + "momentum_buffer", "w"), MOMENTUM)
    assert torch.equal(reader.tensor(MODEL, "norm"), NORM)
    [record] = [t for t in reader.manifest.tensors if (t.kind, t.name) == (MODEL, "w")]
    assert record.shape == (4, 6)
    starts = [start for _, _, start, _ in record.chunks]
    assert starts == ([(0, 0), (0, 3)] if dp_size == 1 else [(0, 0), (2, 0), (0, 3), (2, 3)])


@pytest.mark.parametrize("format", ["shoal", "another"])
@pytest.mark.parametrize("local", [((1, 3), (0, 6)), ((0, 4), (1, 6)), ((0, 2), (2, 5)), ((0, 4), (3, 3))])
def test_other_parts_load_what_column_parts_saved(
    tmp_path: Path, local: tuple[tuple[int, int], ...], format: str
) -> None:
    reader: CheckpointReader | SourceReader
    if format == "shoal":
        save(tmp_path, 2)
        storage = LocalStorage(tmp_path)
        reader = CheckpointReader(storage, "tag", directory.inspect(storage, "tag"))
    else:
        reader = SourceReader(MemorySource({MODEL: {"w": MATRIX}}), "tag")
    spec = part("w", MATRIX, *local)
    for rank in range(2):
        expected = shard(MODEL, spec, MATRIX, (rank, 2))
        target = shard(MODEL, spec, torch.zeros(4, 6), (rank, 2))
        plan = reader.plan([target])
        reader.check(plan)
        reader.run(plan)
        assert torch.equal(target.parts[0], expected.parts[0])
