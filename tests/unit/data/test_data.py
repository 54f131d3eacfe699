"""Text, tokens, samples, and batches that resume anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shoal.data import (
    ByteTokenizer,
    InMemorySource,
    Loader,
    RepeatingLoader,
    default_texts,
    load_tokenizer,
    read_texts,
    shuffled,
    split,
    tokenize,
)
from shoal.data.digest import digest_of
from shoal.errors import UsageError


class Numbers(Dataset[int]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))


def test_samples_that_a_rank_which_is_gone_has_taken_are_taken_again_and_the_epoch_ends_with_them() -> None:
    loaders = [Loader(Numbers(24), 2, rank=rank, world_size=3, seed=5) for rank in range(3)]
    for loader in loaders:
        loader.start_step()
    iterators = [iter(loader) for loader in loaders]
    used = [index for iterator in iterators for _ in range(3) for index in next(iterator).tolist()]
    for loader in loaders:  # a step of one batch, in which rank 1 is lost
        loader.start_step()
    used += [index for rank in (0, 2) for index in next(iterators[rank]).tolist()]
    assert next(iterators[1]).numel() == 2
    state = loaders[0].step_state()
    loaders[0].divide(0, 2, [1])
    loaders[2].divide(1, 2, [1])
    assert len(loaders[0].state_dict()["returned"]) == 2 and loaders[0].state_dict() == loaders[2].state_dict()
    used += [index for rank in (0, 2) for batch in iterators[rank] for index in batch.tolist()]
    assert sorted(used) == list(range(24)) and loaders[0].epoch == 1
    joined = Loader(Numbers(24), 2)
    joined.adopt_step(state)
    joined.divide(0, 1, [1])
    assert [index for batch in joined for index in batch.tolist()] == used[-2:]


def read(loaders: list[Loader], num_batches: int) -> list[int]:
    """What all ranks take together in so many steps, over epochs' ends."""
    repeating = [RepeatingLoader(loader) for loader in loaders]
    taken: list[int] = []
    for _ in range(num_batches):
        for loader in repeating:
            taken += next(loader).tolist()
    return taken


def ranks(num: int, batch_size: int, world_size: int, **options: Any) -> list[Loader]:
    return [
        Loader(Numbers(num), batch_size, rank=rank, world_size=world_size, seed=3, **options)
        for rank in range(world_size)
    ]


def test_without_shuffling_ranks_take_neighbouring_runs_of_each_global_batch() -> None:
    first, second = ranks(8, 2, 2, shuffle=False)
    assert [batch.tolist() for batch in first] == [[0, 1], [4, 5]]
    assert [batch.tolist() for batch in second] == [[2, 3], [6, 7]]


def test_an_epoch_that_does_not_divide_ends_with_a_short_batch_and_the_length_stays_constant() -> None:
    (loader,) = ranks(5, 2, 1, shuffle=False)
    seen = [(batch.tolist(), len(loader)) for batch in loader]
    assert seen == [([0, 1], 3), ([2, 3], 3), ([4], 3)]
    assert (loader.position, loader.epoch) == (5, 1)
    next(iter(loader))
    assert [batch.tolist() for batch in loader] == [[2, 3], [4]]  # a loop that was left goes on


@pytest.mark.parametrize(("num", "batch_size", "world_size"), [(11, 2, 3), (3, 4, 4), (7, 2, 3), (12, 2, 3)])
def test_the_short_batch_is_divided_as_torchs_distributed_sampler_and_loader_divide_it(
    num: int, batch_size: int, world_size: int
) -> None:
    loaders = ranks(num, batch_size, world_size, shuffle=False)
    for rank, loader in enumerate(loaders):
        sampler: DistributedSampler[int] = DistributedSampler(Numbers(num), world_size, rank, shuffle=False)
        torchs = DataLoader(Numbers(num), batch_size, sampler=sampler)
        assert [len(batch) for batch in loader] == [len(batch) for batch in torchs]
        assert len(loader) == len(torchs)
    again = ranks(num, batch_size, world_size, shuffle=False)
    taken = [index for loader in again for batch in loader for index in batch.tolist()]
    assert sorted(set(taken)) == list(range(num))
    assert len(taken) - num < world_size


def test_drop_last_leaves_out_the_ragged_end_and_starts_the_next_epoch_whole() -> None:
    (loader,) = ranks(5, 2, 1, shuffle=False, drop_last=True)
    assert len(loader) == 2
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_each_epoch_has_another_order_and_each_sample_once() -> None:
    (loader,) = ranks(64, 8, 1)
    first, second = read([loader], 8), read([loader], 8)
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second


@settings(max_examples=40)
@given(
    num=st.integers(1, 40),
    legs=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6)), min_size=2, max_size=4
    ),  # (world size, batch size, batches) one after another
)
def test_runs_of_any_world_sizes_one_after_another_read_each_epoch_in_order_and_skip_nothing(
    num: int, legs: list[tuple[int, int, int]]
) -> None:
    state = ranks(num, 1, 1)[0].state_dict()
    taken: dict[int, list[int]] = {}  # by epoch
    for world_size, batch_size, num_batches in legs:
        loaders = ranks(num, batch_size, world_size)
        for loader in loaders:
            loader.load_state_dict(state)
        for _ in range(num_batches):
            taken.setdefault(loaders[0].epoch, []).extend(read(loaders, 1))
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    for epoch, samples in taken.items():
        order = shuffled(range(num), num, 3, epoch).tolist()
        distinct = list(dict.fromkeys(samples))  # an epoch's short batch may repeat some to give each rank its part
        is_over = epoch < max(taken)
        assert distinct == (order if is_over else order[: len(distinct)])


def test_the_position_counts_what_was_handed_out_not_what_workers_read_ahead() -> None:
    loader = Loader(Numbers(32), 2, num_workers=1, shuffle=False)
    batches = iter(loader)
    next(batches)
    assert loader.position == 2


def test_a_position_in_another_data_set_is_refused_with_both_sizes() -> None:
    with pytest.raises(UsageError, match=r"10 samples.*12"):
        Loader(Numbers(12), 1).load_state_dict(Loader(Numbers(10), 1).state_dict())


def test_ranks_share_out_a_stream_and_resume_in_it() -> None:
    def loaders(**options: Any) -> list[Loader]:
        return [Loader(Stream(10), 2, rank=rank, world_size=2, **options) for rank in range(2)]

    whole = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [[batch.tolist() for batch in loader] for loader in loaders(drop_last=True)] == whole
    assert [[batch.tolist() for batch in loader][2:] for loader in loaders()] == [[[8]], [[9]]]
    first = loaders()[0]
    next(iter(first))
    second = Loader(Stream(10), 1)
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == [[4], [5], [6], [7], [8], [9]]


class Samples(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


SAMPLES = [{"tokens": torch.arange(number, number + 4), "name": f"line {number}"} for number in range(8)]


@pytest.mark.parametrize(
    ("samples", "taken", "warning"),
    [
        (SAMPLES, 4, ""),
        (SAMPLES[:4] + SAMPLES[5:], 4, ""),  # nothing of what was taken
        (SAMPLES[1:], 4, "gives another sample at position 0 than before: it is not the stream of which 4 samples"),
        ([*SAMPLES[:3], {**SAMPLES[3], "name": "line 33"}, *SAMPLES[4:]], 4, "gives another sample at position 3"),
        ([{**SAMPLES[0], "tokens": torch.arange(4.0)}, *SAMPLES[1:]], 4, "gives another sample at position 0"),
        (SAMPLES[:3], 4, "ends after 3 samples"),
        (SAMPLES[1:], 8, ""),  # a pass has ended
    ],
)
def test_a_stream_that_is_another_one_after_a_resume_is_named(
    samples: list[Any], taken: int, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Loader(Samples(SAMPLES), 2, collate_fn=list)
    for batch in first:
        batch[-1]["seen"] = True  # what a script does to a sample afterwards is no change of the stream
        if first.position == taken < 8:
            break
    for sample in SAMPLES:
        sample.pop("seen", None)
    second = Loader(Samples(samples), 2, collate_fn=list)
    second.load_state_dict(first.state_dict())
    next(iter(second))
    assert warning in caplog.text and len(caplog.records) == bool(warning)


def test_the_digest_of_a_sample_is_of_its_values_and_not_of_its_objects() -> None:
    def sample(number: int, last: Any = None) -> Any:
        values = [np.arange(3) + number, torch.tensor(2.0, dtype=torch.bfloat16), b"bytes", object(), None, True]
        return values, {"next": (number, last, np.float32(1.5), torch.empty(0, device="meta"))}

    assert digest_of(sample(1)) == digest_of(sample(1)) != digest_of(sample(2))
    assert len({digest_of(sample(1, last)) for last in (1, 1.0, True, "1", b"1", [1], (1,), {1: 1})}) == 8
    assert digest_of(torch.zeros(2, 3)) != digest_of(torch.zeros(3, 2))


def test_the_digest_of_a_whole_batch_is_of_its_ends_too() -> None:
    batch, other = torch.zeros(10_000), torch.zeros(10_000)
    other[-1] = 1
    assert digest_of(batch) == digest_of(other)
    assert digest_of(batch, is_whole=True) != digest_of(other, is_whole=True)
    parts = [list(range(100)), list(range(101))[:-1]]
    parts[1][-1] = 0
    assert digest_of(parts[0]) == digest_of(parts[1])
    assert digest_of(parts[0], is_whole=True) != digest_of(parts[1], is_whole=True)


def test_a_resumed_run_has_the_order_and_the_seed_of_its_workers_of_the_saved_one() -> None:
    whole = Loader(Drawn(12), 2, seed=3, num_workers=1)
    expected = torch.cat(list(whole))
    whole.close()
    first = Loader(Drawn(12), 2, seed=3, num_workers=1)
    taken = [batch for _, batch in zip(range(2), first, strict=False)]
    second = Loader(Drawn(12), 2, seed=4, num_workers=1)
    next(iter(second))  # its worker has a seed
    second.load_state_dict(first.state_dict())
    assert torch.equal(torch.cat([*taken, *second]), expected)
    first.close()
    second.close()


class Drawn(Numbers):
    """A random number with each index."""

    def __getitem__(self, index: int) -> Any:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


def test_too_small_a_data_set_for_a_whole_batch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"3 samples, too few for a global batch of 4"):
        Loader(Numbers(3), 2, world_size=2, drop_last=True)
    with pytest.raises(UsageError, match="0 samples"):
        Loader(Numbers(0), 1)


def test_a_stream_that_gives_no_batch_in_a_pass_is_an_error() -> None:
    with pytest.raises(UsageError, match="a pass over Samples gave 0 samples"):
        list(Loader(Samples([]), 1))
    with pytest.raises(UsageError, match="gave 3 samples, too few for a batch"):
        list(Loader(Samples([1, 2, 3]), 2, world_size=2, drop_last=True))

    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self.samples = iter([1, 2])

        def __iter__(self) -> Iterator[Any]:
            return self.samples

    loader = Loader(Once(), 1)
    assert [batch.tolist() for batch in loader] == [[1], [2]]
    with pytest.raises(UsageError, match="has to begin anew each time"):
        list(loader)


def test_a_loader_that_yields_nothing_is_an_error_not_a_hang() -> None:
    with pytest.raises(UsageError, match="yields no batch"):
        next(RepeatingLoader([]))


def test_validation_is_the_tail_and_shares_no_token_with_training() -> None:
    training, validation = split(torch.arange(100), 0.2, 9)
    assert len(training) == 8  # 80 tokens, the last of which is a target only
    assert len(validation) == 2
    tokens, targets = validation.batch([0])
    assert tokens.tolist() == [[80, 81, 82, 83, 84, 85, 86, 87, 88]]
    assert targets.tolist() == [[81, 82, 83, 84, 85, 86, 87, 88, 89]]
    assert tokens.dtype is torch.int64


def test_documents_of_sources_are_one_run_each_and_mixed_by_weights() -> None:
    many = InMemorySource([[0, 1, 2], [], [3], range(4, 100)], "many")
    training, validation = split([many, InMemorySource([range(100, 300)], "one")], 0.2, 3, weights=[1, 3])
    assert training.batch([1])[0].shape == (1, 3)
    tokens, targets = (each.reshape(-1) for each in training.batch(range(80)))
    assert torch.equal(targets, tokens + 1)  # also across the ends of documents
    assert sorted(tokens[tokens < 100].unique().tolist()) == tokens[tokens < 100].sort().values.tolist()  # each once
    assert training.blend.counts(80) == [20, 60]
    assert validation.batch([0])[0].tolist() == [[260, 261, 262]]
    assert {key.source for key in validation.keys(range(4))} == {0, 1}
    with pytest.raises(UsageError, match=r"(?s)many: 100 tokens are too few.*one: 200 tokens are too few"):
        split([many, InMemorySource([range(100, 300)], "one")], 0.2, 120)


def test_parts_of_sources_may_have_their_documents() -> None:
    lengths = [5, 0, 2, 29, 64]
    begins = np.cumsum([0, *lengths])
    source = InMemorySource([range(100 * n, 100 * n + length) for n, length in enumerate(lengths)], "many")
    training, validation = split([source], 0.2, 8, with_documents=True)
    assert (len(training), len(validation)) == (10, 2)  # 80 of 80 and 16 of 20 tokens
    seen = []
    for part in (training, validation):
        for index in range(len(part)):
            batch: Any = part.batch([index])
            tokens, targets, positions = (each[0].tolist() for each in batch[:3])
            assert batch.documents.begins[0][-1] == 8
            for token, target, position in zip(tokens, targets, positions, strict=True):
                document, place = divmod(token, 100)
                is_last = place + 1 == lengths[document] or int(begins[document]) + place in (79, 95)
                assert target == (-100 if is_last else token + 1)
                assert position <= place
            seen += tokens
    everything = [100 * n + place for n, length in enumerate(lengths) for place in range(length)]
    assert sorted(seen) == everything[:96]
    with_joined = split([source], 0.2, 8)[0].state()["sources"]
    assert training.state()["sources"] != with_joined  # a checkpoint of one is none of the other


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(UsageError, match="19 tokens are too few"):
        split(torch.arange(19), 0.1, 9)


def test_bytes_round_trip_and_a_zero_ends_each_document() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenize(["héllo", "¶"], tokenizer)
    assert tokens.dtype is torch.uint8
    assert tokens.tolist() == [104, 195, 169, 108, 108, 111, 0, 194, 182, 0]
    assert tokenizer.decode(tokens[:6].tolist()) == "héllo"


def test_a_tokenizer_file_that_is_missing_is_refused() -> None:
    with pytest.raises(UsageError, match="tokenizer"):
        load_tokenizer("no/such/tokenizer.json")


def test_default_text_is_here_and_large_enough_to_train_on() -> None:
    text = "".join(default_texts())
    assert len(text) > 500_000
    assert 'The "assert" statement' in text


def test_files_folders_and_patterns_are_read_once_each_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, text in {"b.txt": "B", "a.md": "A", "deep/c.rst": "C", "x.bin": "X", ".hidden/d.txt": "D"}.items():
        (tmp_path / name).write_text(text)
    assert list(read_texts([tmp_path])) == ["A", "B", "C"]
    assert list(read_texts([tmp_path / "x.bin", str(tmp_path / "*.txt"), tmp_path])) == ["X", "B", "A", "C"]


def test_a_source_without_text_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no text file at .*the folder has none"):
        list(read_texts([tmp_path]))
