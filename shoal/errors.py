"""The errors that Shoal raises: what is wrong, where, and what to do.

ShoalError
├── ConfigError            the configuration (all problems at once)
├── ModelError             the model, its parameters, or a change made to them
├── OptimizerError         the optimizer, its groups, or the schedule
├── PlacementError         a move of a buffer, or of a unit's state, that does not exist
├── CommError              a collective: mismatch, timeout, closed connection
│   └── RankFailedError    another rank failed; carries that rank's traceback
│       └── RankLeftError  another rank ended in good order, and this one waits for it
├── CheckpointError        a checkpoint: missing, damaged, of another model, or one that cannot be written
├── TierError              state on a disk that could not be read or written
├── StreamError            work of an accelerator without the order that it needs
├── DeviceError            a device that is slow or computes wrong
├── NonFiniteError         a loss or gradient that is NaN or infinite
├── OutOfMemoryError       no memory; carries the ledger and the change that saves most
├── NotBuiltError          a part of Shoal that is not built yet, by name
└── UsageError             the API called in a way that cannot work
    └── AssertedUsageError a UsageError where DeepSpeed asserts: an AssertionError too
        └── NoOptimizerError  backward() or step() without an optimizer
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

E = TypeVar("E", bound=BaseException)


class ShoalError(Exception):
    """The root of the tree. Every error can be pickled and copied, so that process pools and Ray can return it.

    Args:
        what: one sentence that contains the wrong values.
        where: rank, unit, key or step; empty when ``what`` says it.
        do: the fix, in the imperative.
        code: a stable name, an anchor in ``docs/reference/errors.md``.
    """

    code = "shoal"

    def __init__(self, what: str, *, where: str = "", do: str = "", code: str | None = None) -> None:
        if code is not None:
            self.code = code
        self.what = what
        self.where = where
        self.do = do
        lines = [f"[{self.code}] {what}"]
        if where:
            lines.append(f"  where: {where}")
        if do:
            lines.append(f"  do: {do}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        _, args, *state = cast(tuple[Any, ...], super().__reduce__())
        return _restore, (type(self), args), *state


def _restore(kind: type[E], args: tuple[Any, ...]) -> E:
    """An error with these ``args``, without a call of its constructor, which takes others."""
    builtin: Any = kind
    while builtin.__module__ != "builtins":
        builtin = builtin.__base__
    error: E = builtin.__new__(kind)  # the one that fits the layout: an OSError's is not an Exception's
    error.args = args
    return error


class ConfigError(ShoalError, ValueError):
    code = "config"


class ModelError(ShoalError, ValueError):
    code = "model"


class OptimizerError(ShoalError, ValueError):
    code = "optimizer"


class PlacementError(ShoalError, RuntimeError):
    code = "placement"


class CommError(ShoalError, RuntimeError):
    code = "comm"


class RankFailedError(CommError):
    """Another rank failed; ``remote_traceback`` is what that rank raised."""

    code = "rank-failed"

    def __init__(self, rank: int, remote_traceback: str, *, where: str = "") -> None:
        self.failed_rank = rank
        self.remote_traceback = remote_traceback
        what, do = self._explain(rank, remote_traceback.rstrip())
        super().__init__(what, where=where, do=do)

    def _explain(self, rank: int, text: str) -> tuple[str, str]:
        return (
            f"rank {rank} failed, so this rank stops too. Its traceback:\n{text}",
            f"rank {rank} failed first; fix the error shown for rank {rank}.",
        )


class RankLeftError(RankFailedError):
    """Another rank ended without an error while this one waits for it. ``remote_traceback`` is the calls of both."""

    code = "rank-left"

    def _explain(self, rank: int, text: str) -> tuple[str, str]:
        return (
            f"rank {rank} has ended, and this rank waits for it: {text}",
            "make the same calls on every rank: save_checkpoint(), and whatever else communicates, must not be inside"
            " `if rank == 0:`, and every rank needs the same number of batches.",
        )


class CheckpointError(ShoalError, RuntimeError):
    code = "checkpoint"


class TierError(ShoalError, OSError):
    code = "tier"


class StreamError(ShoalError, RuntimeError):
    code = "stream"


class DeviceError(ShoalError, RuntimeError):
    code = "device-check"


class NonFiniteError(ShoalError, FloatingPointError):
    code = "non-finite"


class OutOfMemoryError(ShoalError, MemoryError):
    code = "out-of-memory"


class NotBuiltError(ShoalError, NotImplementedError):
    code = "not-built"


class UsageError(ShoalError, RuntimeError):
    code = "usage"


class AssertedUsageError(UsageError, AssertionError):
    """A UsageError that scripts written for DeepSpeed know as an AssertionError."""


class NoOptimizerError(AssertedUsageError):
    code = "no-optimizer"
