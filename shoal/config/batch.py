"""The arithmetic of batch sizes: train_batch_size = micro-batch x accumulation steps x data-parallel ranks.

>>> solve(Batch(256, 4, None), 8).accumulation
8
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class BatchMismatch(Exception):
    """The sizes contradict each other: ``what`` is the reason, ``do`` the repair."""

    def __init__(self, what: str, do: str) -> None:
        super().__init__(what, do)
        self.what, self.do = what, do

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Batch:
    """The three sizes; None where the file does not set one."""

    train: int | None
    micro: int | None
    accumulation: int | None


def solve(given: Batch, ranks: int, reason: str | None = None) -> Batch:
    """Compute the sizes that are not given, as DeepSpeed does.

    Two sizes give the third; a global batch alone means no accumulation; a micro-batch alone means no accumulation;
    none at all means a micro-batch of 1.

    Args:
        ranks: data-parallel ranks.
        reason: how the number of ranks was computed, for the message.

    Raises: BatchMismatch: the sizes contradict each other.
    """
    train, micro, steps = given.train, given.micro, given.accumulation
    because = f"data-parallel {ranks}" + (f" = {reason}" if reason else "")
    if train is not None and micro is not None and steps is not None:
        if train != micro * steps * ranks:
            if train == micro * steps:
                because += "; the sizes are those of one process, which Transformers' Trainer counts on a CPU unless it"
                because += " is told otherwise: TrainingArguments(use_cpu=True)"
            raise BatchMismatch(
                f"{TRAIN} {train} is not micro-batch {micro} x accumulation {steps} x data-parallel {ranks} "
                f"= {micro * steps * ranks}; {because}.",
                f"set {TRAIN} to {micro * steps * ranks}, or leave it out; {_nearest(train, micro, ranks)}.",
            )
        return given
    if train is not None and micro is not None:
        if train % (micro * ranks):
            raise BatchMismatch(
                f"{TRAIN} {train} does not divide by micro-batch {micro} x data-parallel {ranks} = {micro * ranks}, "
                f"so no number of accumulation steps fits; {because}.",
                f"change {TRAIN} or {MICRO}; {_nearest(train, micro, ranks)}.",
            )
        return Batch(train, micro, train // (micro * ranks))
    if train is not None:
        count = steps or 1
        if train % (count * ranks):
            with_steps = f"accumulation {count} x " if steps is not None else ""
            low = train // (count * ranks)
            near = " or ".join(f"{size * count * ranks} (micro-batch {size})" for size in (low, low + 1) if size > 0)
            raise BatchMismatch(
                f"{TRAIN} {train} does not divide by {with_steps}data-parallel {ranks} = {count * ranks}, "
                f"so no micro-batch fits; {because}.",
                f"change {TRAIN}; nearest valid: {near}.",
            )
        return Batch(train, train // (count * ranks), count)
    micro, steps = micro or 1, steps or 1
    return Batch(micro * steps * ranks, micro, steps)


def _nearest(train: int, micro: int, ranks: int) -> str:
    """Global batches close to the one asked for that the micro-batch allows."""
    low = train // (micro * ranks)
    near = [f"{steps * micro * ranks} ({STEPS} {steps})" for steps in (low, low + 1) if steps > 0]
    if train == low * micro * ranks:
        near = near[:1]
    return f"nearest valid: {' or '.join(near)}"
