"""Ranks of a world whose other ranks do not exist: nothing is sent; shapes and records are those of a real run.

Received values are made from this rank's own, so that they stay finite where tensors have values: a reduction takes
this rank's own range (as if all others had zeros), a gathered tensor keeps its other values, a receive and the
other ranks' parts of an all_to_all are zeros.

In a dry run of a pipeline one rank of each stage exists: they are threads of which one runs at a time. A message
between stages has no values. The sender says when it begins to send; the receiver waits for that, and its simulated
streams go on from there. A collective of ranks of several stages begins when all stages have issued it. On an axis
within a stage a rank's peers do not exist.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, ClassVar

import torch

from shoal.comm.protocol import (
    Backend,
    Call,
    Communicator,
    FinishedWork,
    Verbs,
    Work,
    own_range,
    split_mismatch,
    split_parts,
)
from shoal.comm.recorder import Recorder
from shoal.comm.sums import RankOrderedSum, is_same_memory
from shoal.errors import CommError, RankFailedError, UsageError


class FakeCommunicator(Backend):
    """``size`` ranks on ``axis``, of which only ``rank`` exists. With one rank every call does what it says."""

    carries_values = False

    def __init__(self, axis: str, rank: int, size: int) -> None:
        super().__init__(axis, rank, size)
        self._sum = RankOrderedSum()

    @property
    def scratch_nbytes(self) -> int:
        return self._sum.nbytes

    def _all_gather(self, call: Call) -> Work:
        own = own_range(call.result, self.rank, self.size)
        if not is_same_memory(own, call.sent):
            own.detach().copy_(call.sent)
        return FinishedWork(call.result)

    def _reduce_scatter(self, call: Call) -> Work:
        own = own_range(call.sent, self.rank, self.size)
        return FinishedWork(self._sum([own], call.result, scale=call.scale, accumulate=call.accumulate))

    def _all_reduce(self, call: Call) -> Work:
        return FinishedWork(self._sum([call.result], call.result, scale=call.scale))

    def _all_to_all(self, call: Call) -> Work:
        own = split_parts(call.sent, call.source_splits, self.size)[self.rank]
        parts = split_parts(call.result, call.out_splits, self.size)
        expected = parts[self.rank].numel()
        if expected != own.numel():
            raise split_mismatch(self.axis, call.label, self.rank, self.rank, own.numel(), expected)
        for peer, part in enumerate(parts):
            if peer != self.rank:
                part.zero_()
            elif not is_same_memory(part, own):
                part.copy_(own)
        return FinishedWork(call.result)

    def _recv(self, call: Call) -> Work:
        call.result.detach().zero_()
        return FinishedWork(call.result)

    def _exchange(self, call: Call) -> Work:
        return FinishedWork(call.sent.detach().repeat(self.size, 1))

    def _keep(self, call: Call) -> Work:
        return FinishedWork(call.result)

    verbs: ClassVar[Verbs] = {
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_reduce": _all_reduce,
        "all_to_all": _all_to_all,
        "send": _keep,
        "recv": _recv,
        "broadcast": _keep,
        "exchange": _exchange,
    }

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        text = json.dumps(value)
        return [json.loads(text) for _ in range(self.size)]

    def barrier(self, *, label: str) -> None:
        return None


class SingleCommunicator(Communicator):
    """The only rank on ``axis``: every collective is done by the call, without a copy where none is needed."""

    def __init__(self, axis: str) -> None:
        super().__init__(FakeCommunicator(axis, 0, 1), Recorder())


class FakeTransport:
    """Opens communicators for rank ``rank`` of a dry run."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def open(
        self, axis: str, groups: Sequence[tuple[int, ...]], max_ctas: int | None = None, number: int = 0
    ) -> Backend:
        ranks = next(group for group in groups if self._rank in group)
        return FakeCommunicator(axis, ranks.index(self._rank), len(ranks))

    def report_failure(self, rank: int, text: str, error: BaseException) -> None:
        return None

    def close(self) -> None:
        return None


class FakeStages:
    """What the stages of one dry run share.

    Args:
        ranks: one of each stage, in order.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.failure: tuple[int, str] | None = None  # rank, traceback
        self.error: BaseException | None = None
        self._turn = threading.Condition()
        self._num_changes = 0
        self._waiting: dict[int, tuple[int, str]] = {}  # by thread: the changes that it knows of, and what it waits for
        self._num_left = 0
        self._sent: dict[object, deque[Any]] = {}
        self._told: dict[object, Any] = {}

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """Run a stage inside the block, when it is its turn. The first error ends the others' waits."""
        with self._turn:
            try:
                yield
            except BaseException as error:
                if self.failure is None:
                    self.failure, self.error = (rank, repr(error)), error
                raise
            finally:
                self._num_left += 1
                self._change()

    def _change(self) -> None:
        self._num_changes += 1
        self._turn.notify_all()

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Let other stages run until something is there. Raises: CommError: no stage will bring it."""
        me = threading.get_ident()
        try:
            while not is_there():
                if self.failure is not None:
                    raise RankFailedError(*self.failure)
                self._waiting[me] = self._num_changes, what
                known = [changes for changes, _ in self._waiting.values()]
                if len(known) + self._num_left == len(self.ranks) and set(known) == {self._num_changes}:
                    texts = "; ".join(text for _, text in self._waiting.values())
                    raise CommError(
                        f"every pipeline stage of the dry run waits for another one: {texts}.",
                        do="call the same methods, with the same micro-batches, on every stage.",
                        code="comm-mismatch",
                    )
                self._turn.wait()
        finally:
            self._waiting.pop(me, None)

    def post(self, key: object, value: Any) -> None:
        """A message. Messages of one key keep their order."""
        self._sent.setdefault(key, deque()).append(value)
        self._change()

    def take(self, key: object, what: str) -> Any:
        """The next message of a key, which may not be there yet."""
        self._wait(lambda: key in self._sent, what)
        messages = self._sent[key]
        if len(messages) == 1:
            del self._sent[key]
        return messages.popleft()

    def tell(self, key: object, value: Any) -> None:
        """What all stages may know from now on."""
        self._told[key] = value
        self._change()

    def hear(self, key: object, what: str) -> Any:
        """What a stage has told, which may be to come."""
        self._wait(lambda: key in self._told, what)
        return self._told[key]


class FakeStageCommunicator(FakeCommunicator):
    """Ranks of which some stand for their pipeline stages and exist. Others do what that of their stage does.

    Args:
        ranks: along the axis.
        apart: tells communicators of these ranks apart.
    """

    def __init__(
        self,
        axis: str,
        rank: int,
        ranks: tuple[int, ...],
        num_ranks: int,
        stages: FakeStages,
        apart: object = None,
    ) -> None:
        super().__init__(axis, ranks.index(rank), len(ranks))
        self._key = axis, ranks, apart
        self._me = rank
        per_stage = num_ranks // len(stages.ranks)
        self._stands_for = [stages.ranks[one // per_stage] for one in ranks]
        self._stages = stages
        self._num_gathers = 0
        self._sent: dict[int, count[int]] = {}  # by peer
        self._expected: dict[int, count[int]] = {}

    def post(self, peer: int, label: str, tensor: torch.Tensor, begin: float) -> None:
        """A tensor is sent to a stage. Args: ``begin``: when, in simulated seconds."""
        number = next(self._sent.setdefault(peer, count()))
        self._stages.post((self._key, self.rank, peer, number), (label, tensor.numel(), tensor.dtype, begin))

    def expect(self, peer: int) -> int:
        """This rank issues a receive. Returns: its number among those from this stage, for ``take``."""
        return next(self._expected.setdefault(peer, count()))

    def take(self, peer: int, number: int, label: str, tensor: torch.Tensor) -> float:
        """Wait until a stage sends. Returns: its ``begin``. Raises: CommError: it sends something else."""
        what = f"stage {self.rank} for {label!r} from stage {peer}"
        *theirs, begin = self._stages.take((self._key, peer, self.rank, number), what)
        mine = [label, tensor.numel(), tensor.dtype]
        if theirs != mine:
            raise CommError(
                f"pipeline stage {peer} sends {theirs} to stage {self.rank}, which receives {mine}.",
                do="call the same methods, with the same micro-batches, on every stage.",
                code="comm-mismatch",
            )
        return float(begin)

    def tell(self, value: Any) -> int:
        """Tell the other ranks a value. Returns: the number of this call, for ``hear``."""
        number, self._num_gathers = self._num_gathers, self._num_gathers + 1
        self._stages.tell((self._key, number, self._me), value)
        return number

    def hear(self, number: int, label: str) -> list[Any]:
        """What each rank told in a call. Waits for those that exist."""
        what = f"rank {self._me} for {label!r} on {self.axis!r}"
        return [self._stages.hear((self._key, number, rank), what) for rank in self._stands_for]

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        return [json.loads(text) for text in self.hear(self.tell(json.dumps(value)), label)]

    def barrier(self, *, label: str) -> None:
        self.gather_objects(None, label=label)


class FakeStageTransport(FakeTransport):
    """Opens communicators for a rank that stands for its stage."""

    def __init__(self, rank: int, num_ranks: int, stages: FakeStages) -> None:
        super().__init__(rank)
        self._num_ranks = num_ranks
        self._stages = stages

    def open(
        self, axis: str, groups: Sequence[tuple[int, ...]], max_ctas: int | None = None, number: int = 0
    ) -> Backend:
        ranks = next(group for group in groups if self._rank in group)
        if axis == "pp" and ranks != self._stages.ranks:
            raise UsageError(
                f"the dry run has {len(self._stages.ranks)} pipeline stages on ranks {list(self._stages.ranks)},"
                f" and the config {len(ranks)} on ranks {list(ranks)}.",
                do="pass the number of pipeline stages of the config (parallel.pp) to shoal.dry_run_pipeline.",
                code="dry-run-pipeline",
            )
        if len(set(ranks) & set(self._stages.ranks)) < 2:
            return super().open(axis, groups, max_ctas, number)
        return FakeStageCommunicator(axis, self._rank, ranks, self._num_ranks, self._stages, (max_ctas, number))
