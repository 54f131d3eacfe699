"""The CPU optimizer: one pass over host memory reads gradients, updates fp32 weights and states, writes parameters.

    path        how                                                        threads
    threads     blocks that stay in cache, through torch's fused kernels   Shoal's own, one block each
    blocks      the same                                                   torch's, which share each block
    plain       whole ranges, operation after operation                    torch's

All three give the same bits: those of the optimizer's own ``step()`` in ``shoal.running.step``.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Literal

import torch

from shoal.device import is_fake
from shoal.errors import OptimizerError
from shoal.optim.host_rules import CUT_NUMEL, NUMBERS, Rule, RuleName
from shoal.streams import host_access


class BlockedUpdate:
    """One update of one range, in blocks for threads to take: cast the gradient, run torch's kernel, cast the result.

        memory   gradient (bf16)   main, moments (fp32)     parameter (bf16)
                     | read          | read    ^ written      ^ written
                     v               v         |              |
        cache    scratch (fp32) --> torch's kernel --> main, still in cache

    Any number of threads share one update; each takes the next block that no other thread has, so a delayed thread
    delays one block.

    Args:
        main: fp32. Shape: [numel].
        states: fp32, in the order of ``rule.state_names``. Each [numel].
        gradient: bf16, fp16 or fp32, not modified. Shape: [numel].
        parameter: receives the rounded result; None: no such copy. Shape: [numel].
        gradient_scale: factor of the gradient, applied in fp32.
        block_numel: of one block; a multiple of ``CUT_NUMEL``.
        undo: receives the old main parameters and states, block by block; None: no such copy. Shapes as theirs.
    """

    def __init__(
        self,
        rule: Rule,
        main: torch.Tensor,
        states: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        parameter: torch.Tensor | None,
        *,
        gradient_scale: float,
        block_numel: int,
        undo: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._mains = main.split(block_numel)
        self._states = list(zip(*(state.split(block_numel) for state in states), strict=True))
        self._gradients = gradient.split(block_numel)
        self._parameters = None if parameter is None else parameter.split(block_numel)
        self._undo = None if undo is None else list(zip(*(saved.split(block_numel) for saved in undo), strict=True))
        self._kernel = rule.kernel()
        self._gradient_scale = gradient_scale
        self._is_cast = gradient.dtype != torch.float32
        self._next = itertools.count()
        self.num_blocks = len(self._mains) if main.numel() else 0

    def run(self, scratch: torch.Tensor, kernel_scratch: torch.Tensor | None) -> None:
        """Update blocks until none is left.

        Args:
            scratch, kernel_scratch: fp32, of at least a block each, this thread's own.
        """
        states: Sequence[torch.Tensor] = ()
        with torch.no_grad():
            while (index := next(self._next)) < self.num_blocks:
                main = self._mains[index]
                gradient = self._load(self._gradients[index], scratch)
                if self._states:
                    states = self._states[index]
                if self._undo is not None:
                    for saved, value in zip(self._undo[index], (main, *states), strict=True):
                        saved.copy_(value)
                own_scratch = None if kernel_scratch is None else kernel_scratch[: main.numel()]
                self._kernel(main, gradient, states, own_scratch)
                if self._parameters is not None:
                    self._parameters[index].copy_(main)

    def _load(self, gradient: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        if not self._is_cast and self._gradient_scale == 1.0:
            return gradient
        if gradient.numel() != scratch.numel():
            scratch = scratch[: gradient.numel()]
        if not self._is_cast:
            return torch.mul(gradient, self._gradient_scale, out=scratch)
        scratch.copy_(gradient)
        return scratch if self._gradient_scale == 1.0 else scratch.mul_(self._gradient_scale)


class HostThreads:
    """Threads that each run torch's operations without torch's intra-op threads.

    Memory: a thread's scratch, from its first update on.
    Raises: RuntimeError: no thread could be started.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="shoal-host-step")
        self.scratch_nbytes = 0
        together = threading.Barrier(num_threads)
        number = torch.get_num_threads()
        try:
            for done in [self._pool.submit(_stay_alone, together) for _ in range(num_threads)]:
                done.result()
        finally:
            # torch also stores a number for future threads, which the pool's threads have set to 1: restore it.
            torch.set_num_threads(number)

    def start(self, update: BlockedUpdate, block_numel: int, needs_scratch: bool) -> list[Future[None]]:
        """Start this update: every thread takes its blocks after those of the updates started before."""
        count = min(self.num_threads, update.num_blocks)
        return [self._pool.submit(self._run, update, block_numel, needs_scratch) for _ in range(count)]

    def _run(self, update: BlockedUpdate, block_numel: int, needs_scratch: bool) -> None:
        scratch = self._tensor("scratch", block_numel)
        update.run(scratch, self._tensor("kernel_scratch", block_numel) if needs_scratch else None)

    def _tensor(self, name: str, numel: int) -> torch.Tensor:
        tensors: dict[str, torch.Tensor] = self._local.__dict__
        if name not in tensors or tensors[name].numel() < numel:
            tensors[name] = torch.empty(numel, dtype=torch.float32, device="cpu")
            self.scratch_nbytes += tensors[name].nbytes
        return tensors[name]

    def close(self) -> None:
        """Wait for started updates and end the threads."""
        self._pool.shutdown()


def _stay_alone(together: threading.Barrier) -> None:
    # The first call sets this thread's number to torch's default; only a setting after it stays in effect.
    torch.get_num_threads()
    torch.set_num_threads(1)
    together.wait()  # so that every thread of the pool runs this


UpdatePath = Literal["threads", "blocks", "plain"]

BLOCK_NUMEL = 256 * 1024  # smaller: Python's overhead dominates; larger: scratch and main parameters leave the cache
TEAM_BLOCK_NUMEL = 1024 * 1024  # a block that all of torch's threads share
PLAIN_NUMEL = 16 * 1024 * 1024  # bounds the scratch of the plain path to 64 MiB
TRIAL_NUMEL = 8 * 1024 * 1024  # far larger than most caches
TRIAL_ROUNDS = 3

logger = logging.getLogger("shoal")


@dataclass(frozen=True)
class Choice:
    """The fastest path, and the median milliseconds of each for ``TRIAL_NUMEL`` elements."""

    path: UpdatePath
    milliseconds: Mapping[UpdatePath, float]


class HostWork:
    """An update under way."""

    def __init__(self, parts: Sequence[Future[None]] = ()) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Block until it is done. Raises: the first error of a thread, after all have ended."""
        problems = [part.exception() for part in self._parts]
        for problem in problems:
            if problem is not None:
                raise problem


class HostStep:
    """Updates ranges of main parameters in host memory.

    Args:
        path: "auto": the fastest path, by a measurement of well under a second, once in this process for each rule and
            dtypes.
        num_threads: None: as many as torch uses. "blocks" and "plain" always run on torch's.
        block_numel: elements of one thread's block.

    Memory: a scratch of one block per thread (two for Lion); for "plain" up to ``PLAIN_NUMEL`` elements. Until closed.
    """

    def __init__(
        self,
        path: UpdatePath | Literal["auto"] = "auto",
        *,
        num_threads: int | None = None,
        block_numel: int = BLOCK_NUMEL,
    ) -> None:
        self.path = path
        self.num_threads = num_threads or torch.get_num_threads()
        self.block_numel = -(-block_numel // CUT_NUMEL) * CUT_NUMEL
        self._threads: HostThreads | None = None
        self._scratch: list[torch.Tensor] = []

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of all threads' scratch now."""
        own = 0 if self._threads is None else self._threads.scratch_nbytes
        return own + sum(tensor.nbytes for tensor in self._scratch)

    def start(
        self,
        rule: Rule,
        main: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        parameter: torch.Tensor | None,
        *,
        gradient_scale: float = 1.0,
        undo: Sequence[torch.Tensor] | None = None,
    ) -> HostWork:
        """Update one range of elements in place. All tensors are 1-D, contiguous, on the host and of one length.

        Args:
            rule: with the number of this step of this range. SGD sets its momentum in step 1.
            main: fp32.
            states: fp32, by the optimizer's names (``Rule.state_names``); others are ignored.
            gradient: bf16, fp16 or fp32; not modified.
            parameter: receives the rounded main parameters, bf16, fp16 or fp32; None: no such copy.
            gradient_scale: factor of the gradient, applied in fp32 (clipping, loss scale).
            undo: receives the old main parameters and states (in the rule's order), fp32; None: no such copy.

        Order: with the path "threads" it returns at once; updates run in the order in which they were started, and the
            end of one may overlap with the start of the next. With the other paths it returns when the update is done.
        Memory: none of the range's size, except for "plain".
        Raises: OptimizerError: tensors that do not fit the rule.
        """
        ordered = _check(rule, main, states, gradient, parameter)
        main, gradient = main.detach(), gradient.detach()
        parameter = None if parameter is None else parameter.detach()
        written = [main, *ordered, *(() if parameter is None else (parameter,)), *(undo or ())]
        host_access(f"host update ({rule.kind})", reads=[gradient], writes=written)
        if is_fake(main):
            return HostWork()
        path = self.path
        if path == "auto":
            dtype = None if parameter is None else parameter.dtype
            path = choose_path(rule.kind, gradient.dtype, dtype, self.num_threads).path
        if undo is not None:
            undo = [saved.detach() for saved in undo]
        block = {"threads": self.block_numel, "blocks": TEAM_BLOCK_NUMEL}.get(path, PLAIN_NUMEL)
        update = BlockedUpdate(
            rule, main, ordered, gradient, parameter, gradient_scale=gradient_scale, block_numel=block, undo=undo
        )
        if path == "threads":
            if self._threads is None:
                self._threads = HostThreads(self.num_threads)
            return HostWork(self._threads.start(update, block, rule.needs_scratch))
        update.run(*self._own_scratch(min(block, main.numel()), rule.needs_scratch))
        return HostWork()

    def close(self) -> None:
        """Wait for started updates, end the threads, free the scratch."""
        if self._threads is not None:
            self._threads.close()
        self._threads = None
        self._scratch = []

    def _own_scratch(self, numel: int, needs_scratch: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        count = 2 if needs_scratch else 1
        if len(self._scratch) < count or self._scratch[0].numel() < numel:
            self._scratch = [torch.empty(numel, dtype=torch.float32, device="cpu") for _ in range(count)]
        return self._scratch[0], self._scratch[1] if needs_scratch else None


def _check(
    rule: Rule,
    main: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    gradient: torch.Tensor,
    parameter: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Returns: the states in the rule's order. Raises: OptimizerError: tensors that do not fit the rule."""
    missing = [name for name in rule.state_names if name not in states]
    if missing:
        raise OptimizerError(
            f"{rule.kind} needs the state {', '.join(map(repr, missing))}, and got {sorted(states)}.",
            do="make the state, zeros at first, and pass it.",
            code="host-step-tensors",
        )
    ordered = [states[name] for name in rule.state_names]
    tensors = {"main": main, **dict(zip(rule.state_names, ordered, strict=True)), "gradient": gradient}
    if parameter is not None:
        tensors["parameter"] = parameter
    for name, tensor in tensors.items():
        may_be_narrow = name in ("gradient", "parameter")
        dtypes = (torch.bfloat16, torch.float16, torch.float32) if may_be_narrow else (torch.float32,)
        is_range = tensor.dim() == 1 and tensor.numel() == main.numel() and tensor.is_contiguous()
        if not is_range or tensor.dtype not in dtypes or tensor.device.type != "cpu":
            allowed = ", ".join(str(dtype) for dtype in dtypes)
            raise OptimizerError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and stride {tensor.stride()} on "
                f"{tensor.device}; expected {allowed}, contiguous, of shape ({main.numel()},) on cpu.",
                do="pass flat ranges of one length in host memory.",
                code="host-step-tensors",
            )
    return ordered


@cache
def choose_path(kind: RuleName, gradient: torch.dtype, parameter: torch.dtype | None, num_threads: int) -> Choice:
    """Measure the paths in turn. Returns: the fastest. Once in a process for the same arguments.

    All of them give the same bits, so ranks may choose differently.

    Memory: ``TRIAL_NUMEL`` elements of everything, 240 MiB for AdamW in bf16, until it returns.
    """
    paths: list[UpdatePath] = ["threads"]
    if num_threads == torch.get_num_threads():
        paths = ["threads", "blocks", "plain"] if num_threads > 1 else ["blocks", "plain"]
    hyper: dict[str, Any] = dict.fromkeys(NUMBERS[kind], 1e-3) | {"betas": (0.9, 0.99)}
    rule = Rule.of(kind, hyper, 2)
    tensors = [
        torch.full((TRIAL_NUMEL,), 1e-3, dtype=torch.float32, device="cpu") for _ in range(1 + len(rule.state_names))
    ]
    main, states = tensors[0], dict(zip(rule.state_names, tensors[1:], strict=True))
    grads = torch.full((TRIAL_NUMEL,), 1e-3, dtype=gradient, device="cpu")
    params = None if parameter is None else torch.zeros(TRIAL_NUMEL, dtype=parameter, device="cpu")
    steps: dict[UpdatePath, HostStep] = {path: HostStep(path, num_threads=num_threads) for path in paths}
    times: dict[UpdatePath, list[float]] = {path: [] for path in paths}
    try:
        for number in range(1 + TRIAL_ROUNDS):
            for path, step in steps.items():
                begin = time.perf_counter()
                step.start(rule, main, states, grads, params).wait()
                if number:
                    times[path].append(1e3 * (time.perf_counter() - begin))
    finally:
        for step in steps.values():
            step.close()
    medians = {path: median(values) for path, values in times.items()}
    path = min(medians, key=lambda path: medians[path])
    logger.info(
        "host optimizer: %s takes the path %r on %d threads (%s for %d Mi elements).",
        kind,
        path,
        num_threads,
        ", ".join(f"{name} {value:.1f} ms" for name, value in medians.items()),
        TRIAL_NUMEL >> 20,
    )
    return Choice(path, medians)
