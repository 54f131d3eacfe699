"""Packing: nothing lost, nothing twice, samples full; and global batches divided evenly over ranks."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.data.packing
from shoal.data.packing import PackedIndex, Packing, balance, pack
from shoal.parallel.sequence.chunks import Documents, chunks_of

ALL: tuple[Packing, ...] = ("concatenate", "greedy", "first_fit", "none")


def samples(index: PackedIndex) -> list[list[tuple[int, int, int]]]:
    return [[tuple(piece) for piece in index.pieces(sample)] for sample in range(len(index))]


def test_the_examples_of_the_module_are_true() -> None:
    assert doctest.testmod(shoal.data.packing).failed == 0


def test_the_picture_of_the_module_is_true() -> None:
    lengths, order = np.array([6, 8, 3, 10, 4]), np.arange(5)
    drawn = {
        packing: ["".join("abcde"[d] * (stop - start) for d, start, stop in each) for each in samples(index)]
        for packing in ALL
        for index in [pack(lengths, 8, packing, order)]
    }
    assert drawn == {
        "concatenate": ["aaaaaabb", "bbbbbbcc", "cddddddd", "dddeeee"],
        "greedy": ["aaaaa", "bbbbbbb", "cc", "dddddddd", "deee"],
        "first_fit": ["dddddddd", "aaaaaeee", "bbbbbbbd", "cc"],
        "none": ["aaaaa", "bbbbbbb", "cc", "dddddddd", "eee"],
    }


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=30),
    room=st.integers(2, 16),
    packing=st.sampled_from(ALL),
    seed=st.integers(0, 5),
)
def test_every_token_is_a_target_once_and_no_sample_is_too_long_or_without_one(
    lengths: list[int], room: int, packing: Packing, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(lengths))
    index = pack(np.array(lengths, dtype=np.int64), room, packing, order)
    packed = samples(index)
    assert all(0 < sum(stop - start for _, start, stop in sample) <= room for sample in packed)
    inputs = [(d, token) for sample in packed for d, start, stop in sample for token in range(start, stop)]
    assert len(set(inputs)) == len(inputs)
    targets = [(d, token + 1) for d, token in inputs if token + 1 < lengths[d]]
    expected = {(d, token) for d, length in enumerate(lengths) for token in range(1, length)}
    assert set(targets) <= expected
    assert len(expected) - len(targets) == index.num_left_out
    assert packing == "none" or index.num_left_out == 0
    assert all(any(stop < lengths[d] or stop > start + 1 for d, start, stop in sample) for sample in packed)
    documents = [d for d in order.tolist() if lengths[d] > 1]
    if packing == "concatenate":
        assert len(packed) == max(-(-(sum(lengths[d] for d in documents) - 1) // room), 0)
        assert [d for d, token in inputs if token == 0] == documents
    if packing == "none":
        assert [sample[0][0] for sample in packed] == documents


def test_the_pairs_of_a_sample_are_the_squares_of_its_lengths_and_of_its_padding() -> None:
    index = pack(np.array([6, 8, 3, 10, 4]), 8, "first_fit", np.arange(5))
    assert index.pairs(np.array([3, 1, 0])).tolist() == [2**2 + 6**2, 5**2 + 3**2, 8**2]


def chat_lengths(num: int) -> np.ndarray:
    """As of a chat set: the median is 500 tokens, one in a hundred above 5,000."""
    return np.clip(np.random.default_rng(0).lognormal(6.2, 1.0, num), 1, 32_768).astype(np.int64)


def test_best_fit_fills_samples_of_chats() -> None:
    lengths, order = chat_lengths(20_000), np.arange(20_000)
    fill = {packing: lengths.sum() / 4096 / len(pack(lengths, 4096, packing, order)) for packing in ALL}
    assert fill["concatenate"] > 0.999
    assert fill["first_fit"] > 0.998
    assert 0.8 < fill["greedy"] < 0.85


@pytest.mark.parametrize(("num_ranks", "num_micro", "size"), [(8, 4, 2), (8, 8, 1), (64, 8, 1), (3, 2, 7)])
@pytest.mark.parametrize("packing", ["concatenate", "greedy", "first_fit"])
def test_the_slowest_rank_has_3_percent_more_than_the_mean_at_most(
    num_ranks: int, num_micro: int, size: int, packing: Packing
) -> None:
    """Work of a model of hidden size 2,048: 12 x 2,048 per token for its matrices, and the document's length."""
    lengths = chat_lengths(40_000)
    index = pack(lengths, 8192, packing, shoal.data.shuffled(range(40_000), 40_000, 0, 0))
    linear = 8192 * 12 * 2048
    together = num_ranks * num_micro * size
    places = shoal.data.shuffled(range(len(index)), len(index), 0, 0)
    for step in range(2):
        pairs = index.pairs(places[step * together : (step + 1) * together])
        parts = balance(pairs, num_ranks, num_micro)
        assert parts.shape == (num_ranks, num_micro, size)
        assert sorted(parts.reshape(-1).tolist()) == list(range(together))
        work = (pairs[parts] + linear).sum(axis=(1, 2))
        assert work.max() / work.mean() < 1.03
        attention = pairs[parts].sum(axis=(1, 2))
        unbalanced = pairs.reshape(num_ranks, -1).sum(axis=1)
        assert attention.max() / attention.mean() < unbalanced.max() / unbalanced.mean()
        micro = (pairs[parts] + linear).sum(axis=2)
        assert micro.max(axis=0).sum() / work.mean() < 1.03  # ranks wait for each other in each micro-batch as well


@pytest.mark.parametrize("packing", ["concatenate", "greedy", "first_fit"])
def test_context_parallel_ranks_have_equal_attention_of_each_row_of_chats(packing: Packing) -> None:
    """Of rows of 32,768 positions, as docs/concepts/sequence-parallelism.md says. Divided by length they do not."""
    length, lengths = 32_768, chat_lengths(20_000)
    index = pack(lengths, length, packing, shoal.data.shuffled(range(20_000), 20_000, 0, 0))
    for num_ranks in (2, 4, 8):
        most = {True: 0.0, False: 0.0}
        for row in shoal.data.shuffled(range(len(index)), len(index), 0, 0)[:20].tolist():
            sizes = [piece.stop - piece.start for piece in index.pieces(row)]
            documents = Documents.of_lengths([[*sizes, length - sum(sizes)]])
            for is_balanced in most:
                ranks = chunks_of(
                    length, num_ranks, "balanced", documents.balanced().chunked_by if is_balanced else None
                )
                keys = np.concatenate(
                    [np.arange(1, size + 1) for size in np.diff(documents.begins[0])]
                )  # of each query
                work = np.array([sum(keys[chunk.start : chunk.stop].sum() for chunk in chunks) for chunks in ranks])
                most[is_balanced] = max(most[is_balanced], work.max() / work.mean())
        assert most[True] < 1.002 < 1.05 < most[False]


def test_a_division_over_more_ranks_has_the_same_samples() -> None:
    work = np.random.default_rng(1).random(48)
    whole = {tuple(sorted(balance(work, ranks, 48 // ranks // 2).reshape(-1).tolist())) for ranks in (1, 2, 3, 6, 24)}
    assert whole == {tuple(range(48))}
