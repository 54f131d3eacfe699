"""Streams of tokens: what a sample is, and the same samples in each step, whatever ranks, workers and resumes."""

from __future__ import annotations

import doctest
import gc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.data.stream
from shoal.data import InMemorySource, Loader, PackedBatch, RepeatingLoader, TokenStream
from shoal.data.packing import Packing
from shoal.errors import UsageError

Rows = list[tuple[int, ...]]


def source(number: int = 0, num: int = 40, longest: int = 30) -> InMemorySource:
    """Documents whose tokens are all different, over all sources."""
    lengths = np.random.default_rng(number).integers(1, longest, num)
    ends = np.cumsum(lengths) + 10_000 * number
    return InMemorySource([np.arange(end - size, end) for end, size in zip(ends, lengths, strict=True)], f"s{number}")


def stream(packing: Packing = "first_fit", **options: Any) -> TokenStream:
    return TokenStream(
        [source(1), source(2)], 16, **{"packing": packing, "seed": 3, "weights": [2, 1], "epochs": None} | options
    )


def loaders(data: TokenStream | Any, batch_size: int, world_size: int, num_micro: int, **options: Any) -> list[Loader]:
    """Of all ranks, each with a stream of its own."""
    return [
        Loader(data(), batch_size, rank=rank, world_size=world_size, num_micro=lambda: num_micro, **options)
        for rank in range(world_size)
    ]


def read(ranks: list[Loader], num_micro: int, steps: range) -> list[Rows]:
    """The rows of each step, sorted."""
    batches = [RepeatingLoader(loader) for loader in ranks]
    result = []
    for step in steps:
        rows: Rows = []
        for loader in ranks:
            loader.begin_step(step)
        for _ in range(num_micro):
            for each in batches:
                tokens, targets, *_ = next(each)
                rows += map(tuple, torch.cat([tokens, targets], dim=1).tolist())
        result.append(sorted(rows))
    return result


def test_the_examples_of_the_module_are_true() -> None:
    assert doctest.testmod(shoal.data.stream).failed == 0


@pytest.mark.parametrize("packing", ["concatenate", "greedy", "first_fit", "none"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_pass_has_every_target_once_at_its_position_in_its_document(packing: Packing, shuffle: bool) -> None:
    data = source(1)
    made = TokenStream(data, 16, packing=packing, shuffle=shuffle)
    starts = np.cumsum(data.lengths) - data.lengths + data.tokens(0)[0]
    batch = made.batch(range(len(made)))
    assert isinstance(batch, PackedBatch)
    seen = []
    for row, begins in enumerate(batch.documents.begins):
        for begin, end in pairwise(begins):
            tokens, targets, positions = (part[row, begin:end] for part in batch[:3])
            assert positions.tolist() == list(range(end - begin))
            is_target = targets != -100
            assert torch.equal(targets[is_target], tokens[is_target] + 1)  # tokens count on, within a document only
            assert not is_target.any() or is_target[:-1].all()
            seen += targets[is_target].tolist()
    expected = [
        token for start, size in zip(starts, data.lengths, strict=True) for token in range(start + 1, start + size)
    ]
    left = len(expected) - len(seen)
    assert left == made.num_left_out and (left > 0) == (packing == "none")
    assert len(set(seen)) == len(seen) and set(seen) <= set(expected)
    assert (seen != sorted(seen)) == (shuffle or packing == "first_fit")
    if packing != "concatenate":
        assert ((batch.targets == -100) == (batch.tokens == 0)).all()  # no position without a target but padding


def test_with_documents_false_a_batch_is_tokens_and_targets() -> None:
    tokens, targets = stream(with_documents=False).batch([0, 5])
    assert tokens.shape == targets.shape == (2, 16)


SHAPES = [(1, 1, 12), (2, 1, 6), (2, 3, 2), (1, 4, 3), (3, 2, 2), (12, 1, 1)]  # batch size, ranks, micro-batches: 12


@settings(max_examples=12)
@given(
    packing=st.sampled_from(["concatenate", "greedy", "first_fit", "none"]),
    legs=st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(1, 4)), min_size=2, max_size=4),
    is_ended=st.booleans(),
)
def test_runs_of_any_shapes_one_after_another_have_the_steps_of_one_run(
    packing: Packing, legs: list[tuple[tuple[int, int, int], int]], is_ended: bool
) -> None:
    total = sum(steps for _, steps in legs)
    expected = read(loaders(lambda: stream(packing), 12, 1, 1), 1, range(total))
    state, step = None, 0
    seen = []
    for (batch_size, world_size, num_micro), steps in legs:
        ranks = loaders(lambda: stream(packing), batch_size, world_size, num_micro)
        for loader in ranks if state else []:
            loader.load_state_dict(state)
        seen += read(ranks, num_micro, range(step, step + steps))
        step += steps
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert seen == expected
    for number, rows in enumerate(expected):  # the last run knows what all of them read
        replayed = ranks[0].replay(number)
        assert sorted(replayed_row(ranks[0], each.sample) for each in replayed) == rows


def replayed_row(loader: Loader, sample: Any) -> tuple[int, ...]:
    tokens, targets, *_ = loader.dataset.collate([sample])  # type: ignore[attr-defined]
    return tuple(torch.cat([tokens, targets], dim=1)[0].tolist())


def test_a_replayed_sample_says_where_its_tokens_are() -> None:
    ranks = loaders(stream, 2, 2, 3)
    read(ranks, 3, range(4))
    data = {each.name: each for each in (source(1), source(2))}
    for rank, micro, sample, pieces in ranks[1].replay(2):
        assert rank in (0, 1) and micro in (0, 1, 2)
        tokens = np.concatenate(
            [data[piece.source].tokens(piece.document, piece.start, piece.stop) for piece in pieces]
        )
        assert tokens.tolist() == sample.tokens.tolist()
        assert all((piece.file, piece.offset) == data[piece.source].place(piece.document) for piece in pieces)
    assert [each.rank for each in ranks[1].replay(2, rank=1)] == [1] * 6
    with pytest.raises(UsageError, match="step -1"):
        ranks[0].replay(-1)


class FailsOnce(TokenStream):
    """A stream whose file cannot be read once."""

    flag: Path

    def __getitem__(self, key: Any) -> Any:
        if not self.flag.exists() and key == self.keys(12)[0]:
            self.flag.touch()
            raise OSError("disk")
        return super().__getitem__(key)


def test_workers_read_the_same_also_after_one_has_failed_and_live_over_epochs(tmp_path: Path) -> None:
    expected = [row for rows in read(loaders(stream, 4, 1, 1), 1, range(16)) for row in rows]
    data = FailsOnce([source(1), source(2)], 16, packing="first_fit", seed=3, weights=[2, 1], epochs=None)
    data.flag = tmp_path / "failed"
    loader = Loader(data, 4, num_workers=1)
    seen: Rows = []
    pids: set[int] = set()
    while len(seen) < 64:
        try:
            for tokens, targets, *_ in loader:
                seen += sorted(map(tuple, torch.cat([tokens, targets], dim=1).tolist()))
                pids.update(worker_pids(loader))
        except OSError:
            assert len(seen) == 12
    assert loader.epoch > 0 and len(pids) == 1
    assert seen[: len(expected)] == expected
    del loader
    gc.collect()  # workers end with their loader, which an error has left in a cycle


def worker_pids(loader: Loader) -> list[int]:
    return loader._workers.pids


def test_weights_change_without_repeating_or_losing_a_sample_and_are_resumed() -> None:
    def run(changes: dict[int, list[float]], restarts: tuple[int, ...], given: list[float] | None = None) -> list[Rows]:
        ranks, rows = loaders(lambda: stream(weights=[2, 1]), 2, 2, 2), []
        for step in range(8):
            for loader in ranks if step in changes else []:
                loader.set_weights(changes[step])
            rows += read(ranks, 2, range(step, step + 1))
            if step in restarts:
                state = ranks[0].state_dict()
                ranks = loaders(lambda: stream(weights=given or [2, 1]), 8, 1, 1)
                ranks[0].load_state_dict(state)
                ranks = loaders(lambda: stream(weights=given or [2, 1]), 2, 2, 2)
                for loader in ranks:
                    loader.load_state_dict(state)
        return rows

    def shares(rows: Rows) -> int:
        return sum(row[0] < 20_000 for row in rows)

    plain = run({}, ())
    changed = run({3: [0, 1]}, ())
    assert changed[:3] == plain[:3]
    assert [shares(rows) for rows in changed[3:]] == [0] * 5
    assert run({3: [0, 1]}, (1, 5)) == changed
    assert run({}, (2,), given=[0, 1]) == changed  # a script with other weights from there on
    seen = [row for rows in changed for row in rows if row[0] >= 20_000]
    assert len(set(seen)) == len(TokenStream(source(2), 16, packing="first_fit"))  # none twice before all were read


def test_skipped_steps_are_left_out_and_the_rest_follow() -> None:
    plain = read(loaders(stream, 2, 2, 2), 2, range(8))
    ranks = loaders(stream, 2, 2, 2)
    read(ranks, 2, range(2))
    state = ranks[0].state_dict()
    read(ranks, 2, range(2, 5))
    for loader in ranks:
        loader.load_state_dict(state)
        loader.skip_steps(3, 5)
    assert read(ranks, 2, range(2, 5)) == [plain[2], plain[5], plain[6]]
    resumed = loaders(stream, 2, 2, 2)
    for loader in resumed:
        loader.load_state_dict(ranks[0].state_dict())
    assert read(resumed, 2, range(5, 6)) == [plain[7]]
    assert sorted(replayed_row(resumed[0], each.sample) for each in resumed[0].replay(3)) == plain[5]
    with pytest.raises(UsageError, match="positions 0 to 8 cannot be skipped: the next one to be read is 64"):
        resumed[0].skip(0, 8)
    with pytest.raises(UsageError, match="steps 2 to 4 cannot be skipped: samples of step 2 have been read"):
        resumed[0].skip_steps(2, 4)
    with pytest.raises(UsageError, match="steps 9 to 9 cannot be skipped: it is no range"):
        resumed[0].skip_steps(9, 9)


def test_steps_of_another_number_of_micro_batches_begin_where_the_last_one_ended() -> None:
    expected = [row for rows in read(loaders(stream, 1, 1, 1), 1, range(10)) for row in rows]
    num_micro = 2
    ranks = [Loader(stream(), 1, rank=rank, world_size=2, num_micro=lambda: num_micro) for rank in range(2)]
    first = read(ranks, 2, range(1))
    num_micro = 3
    second = read(ranks, 3, range(1, 2))
    assert first == [sorted(expected[:4])] and second == [sorted(expected[4:10])]


def test_a_position_inside_of_a_step_goes_on_there_in_the_same_shape_only() -> None:
    def loader(num_micro: int = 4) -> Loader:
        return Loader(stream(), 2, num_micro=lambda: num_micro)

    whole = [batch.tokens.tolist() for _, batch in zip(range(8), RepeatingLoader(loader()), strict=False)]
    first = loader()
    batches = iter(first)
    assert [next(batches).tokens.tolist() for _ in range(6)] == whole[:6]
    assert first.position == 12
    second = loader()
    second.load_state_dict(first.state_dict())
    batches = iter(second)
    assert [next(batches).tokens.tolist() for _ in range(2)] == whole[6:]
    with pytest.raises(UsageError, match="after 2 micro-batches of a step"):
        loader(2).load_state_dict(first.state_dict())


def test_changed_data_are_named() -> None:
    state = Loader(stream(), 2).state_dict()
    changed = TokenStream([source(1), source(2, num=41)], 16, packing="first_fit", seed=3, weights=[2, 1], epochs=None)
    with pytest.raises(UsageError, match="data source 1, 's2', is not what it was"):
        Loader(changed, 2).load_state_dict(state)
    for options, what in (
        ({"packing": "greedy"}, "its packing was first_fit, this run's is greedy"),
        ({"seed": 4}, "its seed was 3"),
        ({"shuffle": False}, "its shuffle was True"),
    ):
        with pytest.raises(UsageError, match=what):
            Loader(stream(**options), 2).load_state_dict(state)
    changed = TokenStream([source(1), source(2, num=41)], 12, packing="none", seed=4, with_documents=False, padding=1)
    with pytest.raises(UsageError) as caught:
        Loader(changed, 2).load_state_dict(state)
    for what in (
        "its sequence_length was 16, this run's is 12",
        "its packing was first_fit, this run's is none",
        "its seed was 3, this run's is 4",
        "its with_documents was True, this run's is False",
        "its padding was 0, this run's is 1",
        "its weights was [2.0, 1.0], this run's is None",
        "its epochs was [None, None], this run's is [1, 1]",
        "data source 1, 's2', is not what it was",
    ):
        assert what in str(caught.value)
    Loader(stream(weights=[1, 1], epochs=2), 2).load_state_dict(state)  # other weights mix from here on
    with pytest.raises(UsageError, match="2 data sources, this run has 1"):
        Loader(TokenStream(source(1), 16, packing="first_fit", seed=3), 2).load_state_dict(state)
    with pytest.raises(UsageError, match="no TokenStream"):
        Loader(stream(), 2).load_state_dict(Loader(list(range(4)), 2).state_dict())  # type: ignore[arg-type]


def test_data_without_samples_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="empty: no document of two tokens"):
        TokenStream([source(1), InMemorySource([[1], [2]], "empty")], 16)
    with pytest.raises(UsageError, match="0 sources"):
        TokenStream([], 16)
    with pytest.raises(UsageError, match="samples of 1 tokens"):
        TokenStream(source(1), 1)
    with pytest.raises(UsageError, match="s2: "):
        TokenStream([source(1), source(2)], 16, weights=[1, 5], num_samples=200)


def test_data_without_lengths_cannot_be_packed() -> None:
    texts = torch.utils.data.TensorDataset(torch.arange(4))
    for sources in (texts, [texts]):
        with pytest.raises(UsageError, match=r"(?s)TensorDataset: its tokens.*data.num_workers") as raised:
            TokenStream(sources, 8)  # type: ignore[arg-type]
        assert raised.value.code == "data-lengths"
