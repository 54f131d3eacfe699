"""The micro-batches of one step of a pipeline: read on each stage, compared over all of them before anything runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shoal.comm.protocol import Communicator
from shoal.device import is_fake, read_vector
from shoal.errors import UsageError
from shoal.pipeline.messages import signature_of
from shoal.pipeline.run import Failure, MicroBatch
from shoal.streams import host_memory

_NO_DATA, _DATA, _ENDED, _RAISED = 0.0, 1.0, 2.0, 3.0  # what a rank's iterator gave


def next_batches(
    source: Iterator[Any] | None,
    batch_fn: Callable[[Any], Any] | None,
    num_micro: int,
    schedule: str,
    arguments: Mapping[str, Any],
    comm: Communicator | None,
) -> tuple[list[MicroBatch], Failure | None]:
    """The next micro-batches, with the signatures that all stages know, and why they cannot be run.

    Args:
        source: None: this rank has no data.
        batch_fn: changes each micro-batch; None: nothing does.
        schedule: what all stages must have alike.
        arguments: of the model, with each micro-batch.
        comm: the ranks along ``pp``; None: there is one.

    Communicates: one exchange of 3 numbers, and one for each micro-batch.
    """
    read: list[Any] = []
    error: Exception | None = None
    state = _NO_DATA if source is None else _DATA
    try:
        while source is not None and len(read) < num_micro:
            batch = next(source)
            read.append(batch if batch_fn is None else batch_fn(batch))
    except StopIteration:
        state = _ENDED
    except Exception as raised:
        state, error = _RAISED, raised
    signatures = [signature_of(batch, arguments) for batch in read] + [0] * (num_micro - len(read))
    number = int.from_bytes(hashlib.sha256(schedule.encode()).digest()[:6], "big")
    rows = [[state, float(len(read)), float(number), *map(float, signatures)]]
    if comm is not None:
        rows = exchange_rows(rows[0], comm, label="micro-batches")
    known = [int(max(row[3 + index] for row in rows)) for index in range(num_micro)]
    read += [None] * (num_micro - len(read))
    batches = [MicroBatch(batch, signature) for batch, signature in zip(read, known, strict=True)]
    return batches, _failure(rows, num_micro, error)


def exchange_rows(mine: list[float], comm: Communicator, *, label: str) -> list[list[float]]:
    """The numbers of every rank.

    Communicates: an exchange of 8 bytes a number, between hosts.
    Order: blocks the host until all ranks have come here, and not for what the device has still to do.
    """
    numbers = host_memory(torch.tensor(mine, dtype=torch.float64), is_pinned=False)
    answers = comm.exchange(numbers, label=label).wait()
    flat = read_vector(answers.view(-1), when_fake=0.0)
    if is_fake(answers):
        return [list(row) for row in comm.gather_objects(mine, label=label)]
    return [flat[at : at + len(mine)] for at in range(0, len(flat), len(mine))]


def _failure(rows: Sequence[Sequence[float]], num_micro: int, error: Exception | None) -> Failure | None:
    ended = {rank: int(row[1]) for rank, row in enumerate(rows) if row[0] == _ENDED}
    with_data = [rank for rank, row in enumerate(rows) if row[0] != _NO_DATA]
    others = {rank for rank, row in enumerate(rows) if row[2] != rows[0][2]}
    if any(row[0] == _RAISED for row in rows):
        return Failure("next(data_iter)", error)  # its rank's error is raised on all
    if others:
        what = f"pipeline stages {sorted(others)} run another schedule than stage 0."
        return Failure("start", UsageError(what, do="give every rank the same config.", code="pipeline-schedule"))
    if not with_data:
        what = "train_batch() has no data on any stage."
        return Failure("start", UsageError(what, do="pass an iterator of micro-batches.", code="pipeline-data"))
    if ended and set(ended.values()) == {0} and set(ended) == set(with_data):
        return Failure("next(data_iter)", StopIteration())
    if ended:
        counts = ", ".join(f"{number} on pipeline rank {rank}" for rank, number in ended.items())
        what = f"the data iterator ended before the {num_micro} micro-batches of a step: {counts}."
        do = "give all stages of a pipeline the same micro-batches, in multiples of gradient_accumulation_steps."
        return Failure("next(data_iter)", UsageError(what, do=do, code="pipeline-data"))
    shapes = [index for index in range(num_micro) if len({row[3 + index] for row in rows if row[3 + index]}) > 1]
    if shapes:
        what = f"the stages of a pipeline read micro-batches of different shapes: micro-batch {shapes[0]}."
        return Failure("start", UsageError(what, do="give all stages the same micro-batches.", code="pipeline-data"))
    return None


def explain_unread(error: Exception, batch: Any) -> None:
    """Add a note to the error of a stage that uses tokens which its loader has not read."""
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(batch)):
        error.add_note(
            "shoal: stages between the first and the last of a pipeline do not read tokens: there tokens and targets of"
            ' a batch are on the meta device. If the model needs them on each stage, set {"data":'
            ' {"read_on_every_stage": true}}.'
        )


def check_length(batch: Any, size: int, longest: int | None) -> None:
    """Under sequence parallelism over ``size`` tensor-parallel ranks, which stages decide on alone.

    Args:
        longest: to how many tokens the model cuts sequences; None: it does not.

    Raises: UsageError: the sequences of token numbers do not divide.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            length = min(leaf.shape[1], longest or leaf.shape[1])
            if length % size:
                raise UsageError(
                    f"a sequence of {length} tokens does not divide by {size} tensor-parallel ranks, over which"
                    " pipeline stages split it.",
                    do=f"pad sequences to a multiple of {size}, also those to evaluate; or turn"
                    " parallel.tp_sequence_parallel off.",
                    code="tensor-parallel",
                )
            return


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches, again and again."""
    while True:
        yield from loader
