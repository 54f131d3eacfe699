"""Activation recompute: run a function without saving its intermediate results, and again in the backward pass.

    forward    inputs -> function -> outputs          saved: the inputs, in the store that the settings name
    backward   inputs -> function -> intermediate results -> gradients

The recomputation itself is torch's (``torch.utils.checkpoint`` with ``use_reentrant=False``). Shoal adds the stores of
the inputs, byte counts, RNG states, and times. A *segment* is one function that is recomputed.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shoal.comm.protocol import Communicator
from shoal.compiler import untraced
from shoal.config.schema import ActivationCheckpointing
from shoal.device import Device
from shoal.errors import UsageError
from shoal.memory.stream_copies import copies_of as stream_copies_of
from shoal.parallel.activations import CopiesOf, HostStore
from shoal.parallel.host_reads import Tickets, contexts_keeping_tickets
from shoal.parallel.rng_tracker import RngTracker
from shoal.parallel.saved_tensors import InPlaceStore, PartitionedStore, SavedTensors, TensorStore
from shoal.parallel.selective import ContextFn, Contexts, contexts_keeping, operations_of
from shoal.sharding.placement import Tier
from shoal.text import table

logger = logging.getLogger("shoal")

MakeContext = Callable[[], AbstractContextManager[Any]]

OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "early_stop")

# Inside a segment: the outer segment recomputes what an inner segment would save.
_is_inside: ContextVar[bool] = ContextVar("is_inside_segment", default=False)
_scoped: ContextVar[Recompute | None] = ContextVar("scoped_recompute", default=None)


@dataclass(frozen=True)
class RecomputeSettings:
    """What ``activation_checkpointing`` asks for.

    Args:
        is_offloaded: saved inputs are stored in host memory.
        is_partitioned: each rank of the model-parallel axis stores its share of them.
        has_times: segments are timed.
        operations: whose outputs are saved too, so that they are not run again; torch's names.
    """

    is_offloaded: bool = False
    is_partitioned: bool = False
    has_times: bool = False
    operations: tuple[str, ...] = ()

    @classmethod
    def of(cls, section: ActivationCheckpointing) -> RecomputeSettings:
        """Raises: ConfigError: a policy that does not exist."""
        return cls(
            section.cpu_checkpointing, section.partition_activations, section.profile, operations_of(section.policy)
        )


@dataclass
class Times:
    """Sums over the calls of one segment, in seconds. A segment inside another counts in both."""

    calls: int = 0
    forward_seconds: float = 0.0
    recompute_seconds: float = 0.0
    backward_seconds: float = 0.0


class _TimedCall:
    def __init__(self) -> None:
        self.since: float | None = None  # the end of the recomputation, or the last gradient


class SegmentTimes:
    """Measures the segments that run inside its contexts.

    Order: the host waits for the device at both ends of each measurement, so nothing overlaps.
    """

    def __init__(self) -> None:
        self._times: dict[str, Times] = {}
        self._lock = threading.Lock()

    def watched(self, name: str, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], _TimedCall]:
        """The same inputs, with hooks on their gradients that time the backward; without gradients it counts as 0."""
        call = _TimedCall()

        def arrived(gradient: torch.Tensor) -> None:
            if call.since is not None:
                now = self._now(gradient.device)
                with self._lock:
                    self._times[name].backward_seconds += now - call.since
                call.since = now

        watched = []
        for tensor in tensors:
            if tensor.requires_grad:
                tensor = tensor.view_as(tensor)  # a new autograd node: only this segment's share of the gradient
                tensor.register_hook(arrived)
            watched.append(tensor)
        return watched, call

    @contextmanager
    def forward(self, name: str, device: torch.device) -> Iterator[None]:
        start = self._now(device)
        try:
            yield
        finally:
            seconds = self._now(device) - start
            with self._lock:
                times = self._times.setdefault(name, Times())
                times.calls += 1
                times.forward_seconds += seconds

    @contextmanager
    def recompute(self, name: str, device: torch.device, call: _TimedCall) -> Iterator[None]:
        start = self._now(device)
        try:
            yield
        finally:
            call.since = self._now(device)
            with self._lock:
                self._times[name].recompute_seconds += call.since - start

    def _now(self, device: torch.device) -> float:
        Device(device).synchronize()
        return time.perf_counter()

    def take(self) -> dict[str, Times]:
        """The sums by name; resets them."""
        with self._lock:
            taken, self._times = self._times, {name: Times() for name in self._times}
        return {name: times for name, times in taken.items() if times.calls or times.recompute_seconds}


def as_table(times: dict[str, Times]) -> str:
    """Milliseconds a segment took, as text.

    >>> print(as_table({"blocks.0": Times(2, 0.004, 0.003, 0.006)}))
    segment   calls  forward ms  recompute ms  backward ms
    --------  -----  ----------  ------------  -----------
    blocks.0      2         4.0           3.0          6.0
    """
    rows = [
        (
            name,
            each.calls,
            *(f"{1e3 * s:.1f}" for s in (each.forward_seconds, each.recompute_seconds, each.backward_seconds)),
        )
        for name, each in times.items()
    ]
    return table(rows, ["segment", "calls", "forward ms", "recompute ms", "backward ms"])


class Recompute:
    """Runs segments under one configuration and counts the bytes that they save.

    Args:
        model_parallel: the axis whose ranks partition the saved inputs; None, or one rank: none do.
        rng: named random states that are restored for a recomputation.
        copies_of: makes the copies between a device and the host.
    """

    def __init__(
        self,
        settings: RecomputeSettings | None = None,
        *,
        model_parallel: Communicator | None = None,
        rng: RngTracker | None = None,
        copies_of: CopiesOf = stream_copies_of,
    ) -> None:
        self.settings = settings or RecomputeSettings()
        self.rng = rng or RngTracker()
        self.times = SegmentTimes()
        self.num_segments = 0  # outermost ones, run forward with gradients
        store: TensorStore = HostStore(copies_of) if self.settings.is_offloaded else InPlaceStore()
        self.is_partitioned = self.settings.is_partitioned and model_parallel is not None and model_parallel.size > 1
        if self.is_partitioned:
            assert model_parallel is not None
            store = PartitionedStore(model_parallel, store)
        self._saved = SavedTensors(store)
        self._contexts = contexts_keeping(self.settings.operations) if self.settings.operations else None
        self.is_plain = self.settings == RecomputeSettings()  # a compiler needs nothing of Shoal's
        self._has_warned_of_compilers = False

    # memory

    @property
    def saved_bytes(self) -> int:
        """Bytes of saved inputs that wait for their backward pass, on this rank; each tensor counts once.

        Without the outputs that a policy saves, parameters, and tensors inside lists, dicts and objects.
        """
        return self._saved.nbytes

    @property
    def peak_saved_bytes(self) -> int:
        """The peak of ``saved_bytes``."""
        return self._saved.peak_nbytes

    def saved_bytes_by_tier(self) -> dict[Tier, int]:
        """``saved_bytes``, by tier."""
        return self._saved.nbytes_by_tier()

    def notes(self) -> list[str]:
        """Lines for start-up: settings without effect."""
        if self.settings.is_partitioned and not self.is_partitioned:
            return [
                "partition_activations: no effect, because there is one model-parallel rank: no other has the same"
                " activations."
            ]
        return []

    def unused_note(self) -> str | None:
        """A line for after the first step, if there are settings and no segment ran."""
        if self.num_segments or self.is_plain:
            return None
        return (
            "activation_checkpointing is set, but nothing was recomputed: name modules in"
            " activation_checkpointing.modules, or call shoal.checkpointing.checkpoint in the model."
        )

    def reset(self) -> None:
        """Free device memory of copies under way; for forward passes that no backward pass follows."""
        self._saved.reset()

    # running

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, recomputed in the backward pass; see ``shoal.parallel.recompute``."""
        return self.run(_name_of(function), function, args, kwargs)

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As ``checkpoint``. ``name``: of the segment, in tables of times."""
        if torch.compiler.is_compiling():
            if self.is_plain:
                # is_compiling() is also true in other threads meanwhile.
                is_traced = Tickets.are_used and torch.compiler.is_dynamo_compiling()
                keys = {"context_fn": contexts_keeping_tickets} if is_traced else {}
                return torch_checkpoint(function, *args, **{**keys, **kwargs, "use_reentrant": False})
            return self._run_uncompiled(name, function, args, kwargs)
        return self._run(name, function, args, kwargs)

    @untraced
    def _run_uncompiled(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._has_warned_of_compilers:
            self._has_warned_of_compilers = True
            logger.warning(
                "segment %s is inside compiled code and runs uncompiled, because what activation_checkpointing asks for"
                " needs it; compile the function that is recomputed instead of what calls it.",
                name,
            )
        return self._run(name, function, args, kwargs)

    def _run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = {key: kwargs[key] for key in OPTIONS if key in kwargs}
        kwargs = {key: value for key, value in kwargs.items() if key not in OPTIONS}
        if options.pop("use_reentrant", False):
            raise UsageError(
                "use_reentrant=True was asked for, and segments are never recomputed that way here.",
                do="leave it out; or call torch.utils.checkpoint.checkpoint(..., use_reentrant=True) itself.",
                code="recompute-reentrant",
            )
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)

        tensors: list[torch.Tensor] = []
        names, arguments = tuple(kwargs), (args, tuple(kwargs.values()))
        given = [_map(partial(_take_out, tensors), arguments)]
        before = _map(_copied, given[0])
        device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))

        def call(*inputs: torch.Tensor) -> Any:
            arguments = given.pop() if given else _map(_copied, before)
            args, values = _map(lambda leaf: inputs[leaf.index] if isinstance(leaf, _Slot) else leaf, arguments)
            with use_recompute(self), _set(_is_inside, True):
                return function(*args, **dict(zip(names, values, strict=True)))

        around: list[tuple[MakeContext, MakeContext]] = []
        if self.settings.has_times:
            tensors, timed = self.times.watched(name, tensors)
            forward, recompute = self.times.forward, self.times.recompute
            around.append((partial(forward, name, device), partial(recompute, name, device, timed)))
        if states := self.rng.get_states():
            around.append((nullcontext, partial(self.rng.restored, states)))
        make_contexts: ContextFn | None = options.pop("context_fn", self._contexts)
        if around:
            options["context_fn"] = lambda: _joined(around, make_contexts)
        elif make_contexts is not None:
            options["context_fn"] = make_contexts
        is_outermost = not _is_inside.get()
        self.num_segments += is_outermost
        with self._saved.begin() if is_outermost else nullcontext():
            return torch_checkpoint(call, *tensors, use_reentrant=False, **options)


@contextmanager
def use_recompute(recompute: Recompute) -> Iterator[Recompute]:
    """Make ``recompute`` the current one inside the block, for this thread."""
    with _set(_scoped, recompute):
        yield recompute


def scoped_recompute() -> Recompute | None:
    """The one of the innermost ``use_recompute`` block."""
    return _scoped.get()


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class _Entered(AbstractContextManager[None]):
    """Contexts that are made anew each time: a segment is recomputed once for each backward pass through it."""

    def __init__(self, makers: list[MakeContext]) -> None:
        self._makers = makers
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        with stack:
            for make in self._makers:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _joined(around: list[tuple[MakeContext, MakeContext]], inner: ContextFn | None) -> Contexts:
    """The contexts of the forward, and those of the recomputation, each as one."""
    if inner is not None:
        forward, again = inner()
        around = [*around, (lambda: forward, lambda: again)]
    return _Entered([forward for forward, _ in around]), _Entered([again for _, again in around])


@dataclass(frozen=True)
class _Slot:
    """The place of a saved tensor among those of a segment."""

    index: int


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """A tuple of arguments with each leaf changed. Only tuples are searched.

    An object that a function may change in place (a list, a cache) stays the caller's.
    """
    if isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_fields")):
        items = [_map(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return change(value)


def _take_out(tensors: list[torch.Tensor], leaf: Any) -> Any:
    """A slot in place of a tensor, which is appended to ``tensors``. Parameters are not saved."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    tensors.append(leaf)
    return _Slot(len(tensors) - 1)


def _copied(value: Any, *, is_inside: bool = False) -> Any:
    """A copy of a key-value cache of Transformers, to which each run of a function adds; anything else as it is.

    The tensors of the copy are those of the cache.
    """
    if is_inside and type(value) is list:
        return [_copied(each, is_inside=True) for each in value]
    if is_inside and type(value) is dict:
        return {key: _copied(each, is_inside=True) for key, each in value.items()}
    if any(each.__module__ == "transformers.cache_utils" for each in type(value).__mro__):
        made = copy.copy(value)
        vars(made).update(_copied(vars(value), is_inside=True))
        return made
    return value


def _name_of(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__self__", function)
    return type(owner).__name__ if isinstance(owner, nn.Module) else getattr(function, "__qualname__", repr(function))
