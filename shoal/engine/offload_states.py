"""States that leave the device for a while, and come back: room for something else between two parts of a run.

    rests on the device    train ...  offload_states()   another program's work   reload_states()  ... train
    rests on the host                 [ states                                  ]

What a config keeps on the host or on a disk stays there. On a CPU the host's memory is the device's, and nothing moves.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from shoal.engine.log import say_on_rank_0
from shoal.errors import UsageError
from shoal.memory.aligned import aligned_empty, host_too_small
from shoal.memory.available import host_available_nbytes
from shoal.memory.bucket import ParameterBucket
from shoal.memory.placement import Tier
from shoal.text import format_bytes
from shoal.zero.bucket_state import BucketState

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

# DeepSpeed's names, and the ledger's.
KINDS = {
    "optim_states": "optimizer state",
    "hp_params": "master",
    "lp_params": "parameter",
    "lp_grads": "gradient",
    "contiguous_grad_buffer": "buffers in flight",
}
_NEEDS = {
    "forward()": ("lp_params",),
    "backward()": ("lp_params", "lp_grads", "contiguous_grad_buffer"),
    "step()": tuple(KINDS),
    "loading": tuple(KINDS),
}


class OffloadStates:
    """Moves the states of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = cast(Any, weakref.proxy(engine))
        self._away: set[str] = set()
        self._is_apart = engine.plan.zero.is_apart(Tier.HOST, engine.device)

    @property
    def ledger_kinds(self) -> frozenset[str]:
        """The ledger's kinds of what is on the host now and comes back."""
        return frozenset(KINDS[name] for name in self._away) if self._is_apart else frozenset()

    def is_away(self, name: str) -> bool:
        """Was that kind of state moved, and not brought back?"""
        return name in self._away

    def require(self, call: str) -> None:
        """Raises: UsageError: something that ``call`` needs is away."""
        if not self._away:
            return
        missing = [name for name in _NEEDS[call] if name in self._away]
        if missing:
            raise UsageError(
                f"{call} needs {', '.join(missing)}, which offload_states() moved away.",
                where=f"rank {self._engine.global_rank}, step {self._engine.global_steps}",
                do="call engine.reload_states() first.",
                code="states-away",
            )

    # away

    def offload(self, include: Any, device: Any, *, is_pinned: bool) -> None:
        """Move states to the host. Returns when the device's memory is free."""
        wanted = _names(include)
        place = str(getattr(device, "value", device))
        if place == "none":
            say_on_rank_0(self._engine.global_rank, "offload_states(device='none'): nothing was moved.")
            return
        if place.partition(":")[0] != "cpu":
            raise UsageError(
                f"offload_states(device={place!r}): states move to host memory only.",
                do="pass device='cpu'; optimizer state rests on a disk with"
                ' "offload_optimizer": {"device": "nvme"} in the config.',
                code="states-device",
            )
        self.empty_cache(gives_back=False)
        engine = self._engine
        held = [unit.name for unit in engine.sharded.sharded if not unit.is_at_rest]
        if held:
            raise UsageError(
                f"offload_states() while {', '.join(held[:4])}{' ...' if len(held) > 4 else ''} are gathered.",
                do="call it outside of GatheredParameters, and not between a backward pass with create_graph and the"
                " next.",
                code="states-held",
            )
        new = [name for name in KINDS if name in wanted and name not in self._away]
        if not self._is_apart:
            self._away.update(new)
            say_on_rank_0(
                engine.global_rank,
                f"offload_states({', '.join(new)}): nothing was moved: {engine.device} computes in host memory.",
            )
            return
        needed = sum(tensor.nbytes for name in new for tensor in self._on_device(name))
        if needed > host_available_nbytes():
            raise host_too_small(needed)
        for comm in (engine.axes.all, engine.axes.inner, engine.axes.outer):
            if comm is not None:
                comm.drain()  # peers may still be reading what is about to go
        done: set[str] = set()
        try:
            for name in new:
                done.add(name)
                self._move_out(name, is_pinned=is_pinned)
        except BaseException:
            for name in done:
                self._move_back(name)
            raise
        self._away |= done
        engine._device.synchronize()
        gc.collect()  # graphs that only a cycle keeps hold gradients and gathered units
        engine._device.give_cache_back()
        say_on_rank_0(
            engine.global_rank, f"offload_states: {format_bytes(needed)} of rank 0 in host memory: {', '.join(new)}."
        )

    @torch.no_grad()
    def _move_out(self, name: str, *, is_pinned: bool) -> None:
        engine = self._engine
        empty = partial(_host_empty, is_pinned=is_pinned)
        copied = partial(_copied_to_host, is_pinned=is_pinned)
        if name == "lp_params":
            for bucket in self._buckets():
                bucket.move_to_host(empty)
            self._point_at_parameters()
        elif name == "hp_params":
            for state in self._states():
                if state.has_own_master:
                    state.master = copied(state.master)
                    _point(state)
        elif name == "optim_states":
            if engine._optimizer_step is not None:
                engine._optimizer_step.let_state_go()
            for held, key in self._optimizer_tensors():
                held[key] = copied(held[key])
        elif name == "lp_grads":
            for state in engine.bucket_states:
                state.gradient.move_to_host(copied)
        else:
            engine.sharded.pool.clear()
            if engine._optimizer_step is not None:
                engine._optimizer_step.drop_scratch()

    # back

    def reload(self, *, is_blocking: bool) -> None:
        """Move everything back."""
        engine = self._engine
        try:
            for name in reversed(KINDS):  # gradients after parameters: autograd wants them on one device
                if name in self._away and self._is_apart:
                    self._move_back(name)
        except Exception as error:
            if engine._device.is_out_of_memory(error):
                raise engine._out_of_memory(error, "reload_states()") from error
            raise
        self._away.clear()
        if is_blocking:
            engine._device.synchronize()

    @torch.no_grad()
    def _move_back(self, name: str) -> None:
        engine = self._engine
        device = engine.device
        if name == "lp_params":
            for unit in engine.sharded.units:
                for bucket in unit.buckets:
                    if bucket.is_moved:
                        bucket.move_to_device(device)
            self._point_at_parameters()
        elif name == "hp_params":
            for state in self._states():
                if state.has_own_master:
                    state.master = _copied_to_device(state.master, device)
                    _point(state)
        elif name == "optim_states":
            for held, key in self._optimizer_tensors():
                held[key] = _copied_to_device(held[key], device)
        elif name == "lp_grads":
            for state in engine.bucket_states:
                state.gradient.move_to_device()

    # what is gathered

    def empty_cache(self, *, gives_back: bool = True) -> None:
        """Release every unit that nobody holds, and give the allocator's unused memory back."""
        engine = self._engine
        if engine.sharded.in_pass:
            raise UsageError(
                "states were to be moved, or units released, inside a backward pass.",
                do="call it between two passes.",
                code="states-in-pass",
            )
        engine.sharded.release_all()
        if gives_back:
            gc.collect()
            engine._device.give_cache_back()

    # what there is

    def _buckets(self) -> Iterator[ParameterBucket]:
        """Buckets whose parameters rest on the device."""
        for unit in self._engine.sharded.units:
            for bucket in unit.buckets:
                if not bucket.is_shard_apart and not (bucket.is_sharded and unit.row.parameter_tier is not Tier.DEVICE):
                    yield bucket

    def _states(self) -> Iterator[BucketState]:
        """Buckets whose master weights and optimizer state rest on the device, or did."""
        for state in self._engine.bucket_states:
            if not state.is_apart and state.shelf is None:
                yield state

    def _optimizer_tensors(self) -> Iterator[tuple[dict[str, Any], str]]:
        step = self._engine._optimizer_step
        if step is None:
            return
        for state in self._states():
            for piece in state.pieces:
                held = step.optimizer.state.get(piece.param, {})
                for key, value in list(held.items()):
                    if isinstance(value, torch.Tensor) and value.dim():
                        yield held, key

    def _on_device(self, name: str) -> list[torch.Tensor]:
        """What moving a kind out copies."""
        if name == "lp_params":
            return [bucket.shard if bucket.is_sharded else bucket.full for bucket in self._buckets()]
        if name == "hp_params":
            return [state.master for state in self._states() if state.has_own_master]
        if name == "optim_states":
            return [held[key] for held, key in self._optimizer_tensors()]
        if name == "lp_grads":
            return [tensor for state in self._engine.bucket_states for tensor in state.gradient.open_tensors()]
        return []

    def _point_at_parameters(self) -> None:
        """Master weights that are the parameters' own memory are where the parameters are."""
        for state in self._engine.bucket_states:
            if not state.has_own_master and state.shelf is None:
                state.master = state.owned_parameters
                _point(state)


def _point(state: BucketState) -> None:
    for piece in state.pieces:
        piece.param.data = state.master[piece.start : piece.stop]


def _host_empty(numel: int, dtype: torch.dtype, *, is_pinned: bool) -> torch.Tensor:
    return aligned_empty(numel * dtype.itemsize, is_pinned=is_pinned).view(dtype)


def _copied_to_host(source: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
    target = _host_empty(source.numel(), source.dtype, is_pinned=is_pinned).view(source.shape)
    return target.copy_(source, non_blocking=True)


def _copied_to_device(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device=device).copy_(source, non_blocking=True)


def _names(include: Any) -> frozenset[str]:
    """Which kinds, from strings or from members of an enum with such values; None: all.

    >>> sorted(_names(["optim_states", "hp_params"]))
    ['hp_params', 'optim_states']
    """
    if include is None:
        return frozenset(KINDS)
    given: Iterable[Any] = [include] if isinstance(include, str | Enum) else include
    names = [str(getattr(each, "value", each)) for each in given]
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise UsageError(
            f"offload_states(include=...): {', '.join(map(repr, unknown))} is no kind of state.",
            do=f"choose of {', '.join(KINDS)}.",
            code="states-kind",
        )
    return frozenset(names)
