"""The arithmetic of batch sizes."""

from __future__ import annotations

import pytest

from shoal.config import ConfigProblems, load
from shoal.config.batch import Batch, BatchMismatch, solve


@pytest.mark.parametrize(
    ("train", "micro", "steps", "ranks", "expected"),
    [
        (192, 4, 8, 6, (192, 4, 8)),
        (256, 4, None, 8, (256, 4, 8)),
        (256, None, 8, 8, (256, 4, 8)),
        (None, 4, 8, 8, (256, 4, 8)),
        (32, None, None, 4, (32, 8, 1)),
        (None, 3, None, 5, (15, 3, 1)),
        (None, None, 4, 2, (8, 1, 4)),
        (None, None, None, 3, (3, 1, 1)),
        (1, None, None, 1, (1, 1, 1)),
    ],
)
def test_missing_batch_sizes_follow_from_the_given_ones(
    train: int | None, micro: int | None, steps: int | None, ranks: int, expected: tuple[int, int, int]
) -> None:
    assert solve(Batch(train, micro, steps), ranks) == Batch(*expected)


@pytest.mark.parametrize(
    ("train", "micro", "steps", "ranks", "what", "do"),
    [
        (
            256, 4, 8, 6,
            "train_batch_size 256 is not micro-batch 4 x accumulation 8 x data-parallel 6 = 192; data-parallel 6.",
            "set train_batch_size to 192, or leave it out; nearest valid: 240 (gradient_accumulation_steps 10) or "
            "264 (gradient_accumulation_steps 11).",
        ),
        (
            10, 4, None, 2,
            "train_batch_size 10 does not divide by micro-batch 4 x data-parallel 2 = 8, so no number of accumulation "
            "steps fits; data-parallel 2.",
            "change train_batch_size or train_micro_batch_size_per_gpu; nearest valid: 8 (gradient_accumulation_steps "
            "1) or 16 (gradient_accumulation_steps 2).",
        ),
        (
            10, None, None, 4,
            "train_batch_size 10 does not divide by data-parallel 4 = 4, so no micro-batch fits; data-parallel 4.",
            "change train_batch_size; nearest valid: 8 (micro-batch 2) or 12 (micro-batch 3).",
        ),
        (
            2, None, 3, 2,
            "train_batch_size 2 does not divide by accumulation 3 x data-parallel 2 = 6, so no micro-batch fits; "
            "data-parallel 2.",
            "change train_batch_size; nearest valid: 6 (micro-batch 1).",
        ),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_name_the_nearest_that_do(
    train: int, micro: int | None, steps: int | None, ranks: int, what: str, do: str
) -> None:
    with pytest.raises(BatchMismatch) as caught:
        solve(Batch(train, micro, steps), ranks)
    assert (str(caught.value), caught.value.do) == (what, do)


def test_the_error_says_how_the_number_of_ranks_came_about() -> None:
    with pytest.raises(ConfigProblems, match=r"data-parallel 6 = 24 ranks / \(pp 2 x tp 2\)"):
        load({"train_batch_size": 7, "parallel": {"pp": 2, "tp": 2}}, world_size=24)


def test_sizes_stay_open_until_the_ranks_are_known() -> None:
    config = load({"train_batch_size": 32, "gradient_accumulation_steps": 2})
    assert config.train_micro_batch_size_per_gpu is None
    four, eight = config.with_world_size(4), config.with_world_size(8)
    assert (four.train_micro_batch_size_per_gpu, eight.train_micro_batch_size_per_gpu) == (4, 2)
    assert eight.with_world_size(2).train_micro_batch_size_per_gpu == 8
    assert config.train_micro_batch_size_per_gpu is None


def test_sizes_that_fit_no_number_of_ranks_are_found_without_one() -> None:
    with pytest.raises(ConfigProblems, match="so it fits no number of ranks"):
        load({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1})


def test_the_origin_of_each_size_is_reported() -> None:
    config = load({"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"}, world_size=4)
    assert config.origin("train_batch_size") == "user"
    assert config.origin("train_micro_batch_size_per_gpu") == "auto"
    assert config.origin("gradient_accumulation_steps") == "default"
    derived = load({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, world_size=4)
    assert derived.origin("gradient_accumulation_steps") == "derived"
    assert load({}, world_size=2).origin("train_batch_size") == "derived"


def test_a_file_without_batch_sizes_says_what_is_assumed() -> None:
    assert load({}, world_size=4).notes() == ["no batch size is given: micro-batch 1, global batch 4."]


def test_the_sizes_of_one_process_on_several_ranks_name_the_trainer_that_counts_one() -> None:
    with pytest.raises(BatchMismatch, match=r"those of one process.*use_cpu=True"):
        solve(Batch(6, 2, 3), 2)
    with pytest.raises(BatchMismatch) as caught:
        solve(Batch(8, 2, 3), 2)
    assert "use_cpu" not in caught.value.what
