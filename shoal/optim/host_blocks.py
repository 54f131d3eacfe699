"""One update in blocks that stay in cache: cast the gradient, run torch's kernel, cast the parameter.

    memory   gradient (bf16)   main, moments (fp32)     parameter (bf16)
                 | read          | read    ^ written      ^ written
                 v               v         |              |
    cache    scratch (fp32) --> torch's kernel --> main, still in cache

Any number of threads share one update; each takes the next block that no other thread has, so a delayed thread delays
one block.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shoal.optim.host_rules import Rule


class BlockedUpdate:
    """One update of one range, as blocks for threads to take.

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

    def submit(self, work: Callable[[], None]) -> Future[None]:
        return self._pool.submit(work)

    def _run(self, update: BlockedUpdate, block_numel: int, needs_scratch: bool) -> None:
        scratch = self._tensor("scratch", block_numel)
        update.run(scratch, self._tensor("kernel_scratch", block_numel) if needs_scratch else None)

    def _tensor(self, name: str, numel: int) -> torch.Tensor:
        tensors: dict[str, torch.Tensor] = self._local.__dict__
        if name not in tensors or tensors[name].numel() < numel:
            tensors[name] = torch.empty(numel)
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
