"""Named states of a random generator, for regions whose randomness differs between model-parallel ranks.

tracker = get_cuda_rng_tracker()
with tracker.fork():          # dropout on a part of a layer: other elements on other ranks
    x = dropout(x)

Source: the tracker of Megatron-LM, as DeepSpeed has it. Here it also tracks the CPU's generator where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from shoal.device import Device
from shoal.errors import UsageError
from shoal.text import did_you_mean

MODEL_PARALLEL = "model-parallel-rng"
_OFFSET = 2718  # between the seeds of regions with equal and with different randomness on the model-parallel ranks


class RngTracker:
    """States by name. Each a 1-D tensor of uint8, as torch has it."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states = {}
        self._seeds = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states, by name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace all states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state.

        Raises: UsageError: the name or the seed is there already.
        """
        if seed in self._seeds or name in self._states:
            raise UsageError(
                f"the random state {name!r} or the seed {seed} is tracked already: states {sorted(self._states)}, "
                f"seeds {sorted(self._seeds)}.",
                do="add each once, with a seed of its own, or reset() the tracker first.",
                code="rng-tracker",
            )
        self._seeds.add(seed)
        self._states[name] = state_of_seed(seed)

    @contextmanager
    def restored(self, states: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside the block the states are those given: the ones that a function began with, for its second run."""
        before = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the named state inside the block; the generator then goes on as if nothing had been drawn.

        Raises: UsageError: no such state.
        """
        if name not in self._states:
            raise UsageError(
                f"no random state is called {name!r}{did_you_mean(name, self._states) or '.'}",
                do="call model_parallel_cuda_manual_seed(seed), or add(name, seed).",
                code="rng-tracker",
            )
        before = current_state()
        set_current_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = current_state()
            set_current_state(before)

    def seed_model_parallel(self, seed: int, model_parallel_rank: int) -> None:
        """Seed the generator with ``seed``, and the model-parallel state with one that differs from rank to rank."""
        self.reset()
        set_current_state(state_of_seed(seed))
        self.add(MODEL_PARALLEL, seed + _OFFSET + model_parallel_rank)


def _device() -> Device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != "cuda":
        return Device(torch.device("cpu"))
    return Device(torch.device(accelerator.type, torch.accelerator.current_device_index()))


def current_state() -> torch.Tensor:
    device = _device()
    return next(iter(device.generator_states().values())) if device.is_cuda else torch.get_rng_state()


def set_current_state(state: torch.Tensor) -> None:
    device = _device()
    if device.is_cuda:
        device.set_generator_states(dict.fromkeys(device.generator_states(), state))
    else:
        torch.set_rng_state(state)


def state_of_seed(seed: int) -> torch.Tensor:
    return torch.Generator(_device().torch_device).manual_seed(seed).get_state()
