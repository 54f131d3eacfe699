"""The micro-batches of one step of a pipeline: read, sent to stages that need and do not read them, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shoal.comm.protocol import Communicator
from shoal.device import is_fake, read_vector
from shoal.errors import UsageError
from shoal.pipeline.messages import MessageForm, flatten, pack_into, signature_of, unflatten, unpacked
from shoal.pipeline.run import Failure, MicroBatch
from shoal.streams import host_memory, is_in_host_memory

_NO_DATA, _DATA, _ENDED, _RAISED = 0.0, 1.0, 2.0, 3.0  # what a rank's iterator gave
_SIGNATURES = 4  # of micro-batches, from this column of a row on
_UNSENT = (
    'make batches of tensors, numbers, texts and None, in tuples, lists and dicts; or set {"data":'
    ' {"read_on_every_stage": true}}, and each stage reads.'
)


def next_batches(
    source: Iterator[Any] | None,
    batch_fn: Callable[[Any], Any],
    num_micro: int,
    schedule: str,
    arguments: Mapping[str, Any],
    comm: Communicator | None,
    *,
    device: torch.device,
    needs_all: bool,
) -> tuple[list[MicroBatch], Failure | None]:
    """The next micro-batches, with the signatures that all stages know, and why they cannot be run.

    Args:
        source: None: this rank has no data.
        batch_fn: changes each micro-batch, on each rank; None stays None.
        schedule: what all stages must have alike.
        arguments: of the model, with each micro-batch.
        comm: the ranks along ``pp``; None: there is one.
        device: where micro-batches are put that the first rank has there.
        needs_all: each rank needs micro-batches. If one has read none, it gets those of the first rank that has.

    Communicates: one exchange of 4 numbers, and one for each micro-batch. Where a rank gets them: what ``_sent`` does,
        and an exchange of 1 number.
    """
    given: list[Any] = []
    read: list[Any] = []
    error: Exception | None = None
    message: _Message | UsageError | None = None
    state = _NO_DATA
    try:
        while source is not None and len(given) < num_micro:
            given.append(next(source))
        if any(batch is not None for batch in given):  # else the loader is that of a rank that reads none
            state, message = _DATA, _message_of(given) if needs_all else None  # as they are before batch_fn
        read = [batch_fn(batch) for batch in given]
    except StopIteration:
        state = _ENDED
    except Exception as raised:
        state, error = _RAISED, raised
    signatures = [signature_of(batch, arguments) for batch in read] + [0] * (num_micro - len(read))
    number = int.from_bytes(hashlib.sha256(schedule.encode()).digest()[:6], "big")
    rows = [[state, float(len(given)), float(number), float(needs_all), *map(float, signatures)]]
    if comm is not None:
        rows = exchange_rows(rows[0], comm, label="micro-batches")
    known = [int(max(row[_SIGNATURES + index] for row in rows)) for index in range(num_micro)]
    read += [None] * (num_micro - len(read))
    failure = _failure(rows, num_micro, error)
    if failure is None and comm is not None and any(row[0] == _NO_DATA and row[3] for row in rows):
        try:
            received = _sent(message, next(rank for rank, row in enumerate(rows) if row[0] == _DATA), comm, device)
            read = read if state == _DATA or received is None else [batch_fn(batch) for batch in received]
        except Exception as raised:
            failure = Failure("next(data_iter)", raised)
        failed = exchange_rows([float(failure is not None)], comm, label="micro-batches received")
        failure = failure or (Failure("start", None) if any(row[0] for row in failed) else None)
    return [MicroBatch(batch, signature) for batch, signature in zip(read, known, strict=True)], failure


_Message = tuple[MessageForm, list[torch.Tensor]]


def _message_of(batches: list[Any]) -> _Message | UsageError:
    try:
        return flatten(batches, "the data iterator")
    except UsageError as error:
        what = f"{error.what.removesuffix(' to the next pipeline stage.')} to the stages that do not read it."
        return UsageError(what, where=error.where, do=_UNSENT, code="pipeline-data")


def _sent(
    message: _Message | UsageError | None, source: int, comm: Communicator, device: torch.device
) -> list[Any] | None:
    """The micro-batches of rank ``source``; None: they cannot be sent.

    Raises: UsageError: on ``source``: they cannot be sent.
    Communicates: an exchange of 2 numbers and a broadcast of a few bytes between hosts; a broadcast of all
        micro-batches, between devices if they are there.
    """
    form, tensors = message if isinstance(message, tuple) else (MessageForm(None, ()), [])
    text = form.to_json()
    mine = [float(len(text)) if isinstance(message, tuple) else -1.0, float(not all(map(is_in_host_memory, tensors)))]
    nbytes, is_on_device = exchange_rows(mine, comm, label="micro-batches to send")[source]
    if nbytes < 0:
        if comm.rank == source and isinstance(message, UsageError):
            raise message
        return None
    is_source = comm.rank == source
    header = host_memory(
        torch.tensor(list(text) if is_source else [0] * int(nbytes), dtype=torch.uint8, device="cpu"), is_pinned=False
    )
    comm.broadcast(header, source, label="form of micro-batches").wait()
    form = MessageForm.from_json(header.numpy().tobytes())
    buffer = torch.empty(form.packed_nbytes, dtype=torch.uint8, device=device if is_on_device else "cpu")
    buffer = buffer if is_on_device else host_memory(buffer, is_pinned=False)
    buffer = pack_into(form, tensors, buffer) if is_source else buffer
    comm.broadcast(buffer, source, label="micro-batches").wait()
    batches: list[Any] = unflatten(form.tree, unpacked(form, buffer))
    return batches


def exchange_rows(mine: list[float], comm: Communicator, *, label: str) -> list[list[float]]:
    """The numbers of every rank.

    Communicates: an exchange of 8 bytes a number, between hosts.
    Order: blocks the host until all ranks have come here, and not for what the device has still to do.
    """
    numbers = host_memory(torch.tensor(mine, dtype=torch.float64, device="cpu"), is_pinned=False)
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
    columns = range(_SIGNATURES, _SIGNATURES + num_micro)
    shapes = [at - _SIGNATURES for at in columns if len({row[at] for row in rows if row[at]}) > 1]
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
