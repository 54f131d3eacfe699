"""``GatheredParameters``: sharded parameters, whole inside a block; and those that another module's forward reads."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.errors import UsageError
from shoal.sharding.unit import Unit
from shoal.zero.early import EARLY, EarlyShard
from shoal.zero.registry import OWNERS, Owner


class GatheredParameters:
    """Holds the given parameters whole inside the block. DeepSpeed's signature.

    What is made of them without a copy (``parameter.detach()``) keeps their values, and their unit's memory, as long as
    it lives; within a pass it has to be a copy.

    Args:
        params: one parameter, or any iterable of them, in any order; None, and parameters that are not sharded, are
            left as they are.
        modifier_rank: this rank's in-place changes are given to all ranks on exit; None: changes to sharded
            parameters are lost, and an error on all ranks with ``zero_optimization.enable_sanity_checks``.
        fwd_module: its forward reads the parameters from now on (as ``register_external_parameter``).

    Raises: UsageError: something that is not a parameter; on exit, changes that are lost.
    Communicates: an all_gather per unit; with ``modifier_rank`` a broadcast of each parameter.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else [p for p in _iterate(params) if p is not None]
        self._parameters = list({id(p): p for p in given if isinstance(p, torch.Tensor)}.values())
        if len([p for p in given if not isinstance(p, torch.Tensor)]):
            wrong = next(p for p in given if not isinstance(p, torch.Tensor))
            raise UsageError(
                f"GatheredParameters takes parameters, got {type(wrong).__name__}.",
                do="pass model.parameters().",
                code="gathered-type",
            )
        self._modifier_rank = modifier_rank
        self._enabled = enabled
        self._early: list[torch.Tensor] = []
        self._live: list[tuple[Owner, list[torch.Tensor], list[Unit]]] = []
        self._contexts: list[Any] = []
        self._watched: list[tuple[torch.Tensor, Communicator, int, int]] = []  # with what they were at the beginning
        if fwd_module is not None and enabled:
            for parameter in self._parameters:
                register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> GatheredParameters:
        if not self._enabled:
            return self
        owned: dict[int, tuple[Owner, list[torch.Tensor]]] = {}
        for parameter in self._parameters:
            early = EARLY.get(parameter)
            owner = OWNERS.get(parameter)
            if early is not None:
                self._early.append(parameter)
            elif owner is not None:
                owned.setdefault(id(owner), (owner, []))[1].append(parameter)
        self._early.sort(key=_number)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter in self._early:
                _early(parameter).hold(parameter, self._modifier_rank)
        for owner, parameters in owned.values():
            sharded = owner.sharded
            parameters.sort(key=lambda p: sharded.number_of[id(p)])
            units = list(dict.fromkeys(sharded.unit_of[id(p)] for p in parameters))
            context = sharded.gathered([unit for unit in units if unit.is_sharded], keep_user_views=True)
            context.__enter__()
            self._contexts.append(context)
            self._live.append((owner, parameters, units))
            if self._modifier_rank is not None:
                for parameter in parameters:
                    sharded.begin_change(parameter)
        if self._modifier_rank is None:
            watched = [(p, early.comm) for p in self._early if (early := _early(p)).is_watched]
            for owner, parameters, _ in self._live:
                watched += [(p, owner.sharded.comm) for p in parameters if owner.is_watched and is_away(owner, p)]
            self._watched = [(p, comm, p.data_ptr(), p._version) for p, comm in watched]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enabled:
            return
        is_kept = error is None
        changed = self._lost_changes() if is_kept else None
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter in self._early:
                early = EARLY.get(parameter)
                if early is not None:
                    early.let_go(parameter, self._modifier_rank, is_kept=is_kept)
            if self._modifier_rank is not None:
                for owner, parameters, _ in self._live:
                    for parameter in parameters:
                        num_outer = owner.sharded.end_change(parameter)
                        if is_kept and not num_outer:
                            write_through(owner, parameter, self._modifier_rank)
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)
        self._contexts.clear()
        self._live.clear()
        self._early.clear()
        if changed is not None:
            raise changed

    def _lost_changes(self) -> UsageError | None:
        """An error for all ranks where one of them changed what it will not keep. Communicates: who did."""
        watched, self._watched = self._watched, []
        if not watched:
            return None
        mine = any(p.data_ptr() != pointer or p._version != version for p, _, pointer, version in watched)
        comm = watched[0][1]
        ranks = [i for i, each in enumerate(comm.gather_objects(mine, label="gathered: changes")) if each]
        if not ranks:
            return None
        return UsageError(
            f"in-place modification of sharded parameters inside GatheredParameters on ranks {ranks}, and"
            " modifier_rank=None: it is lost.",
            do="say modifier_rank=0 to give rank 0's changes to all ranks.",
            code="gathered-change",
        )


def is_away(owner: Owner, parameter: torch.Tensor) -> bool:
    """Does the parameter rest sharded?"""
    return owner.sharded.unit_of[id(parameter)].is_sharded


def _early(parameter: torch.Tensor) -> EarlyShard:
    early = EARLY.get(parameter)
    assert early is not None
    return early


def _number(parameter: torch.Tensor) -> int:
    return _early(parameter).number


def _iterate(params: Any) -> Iterable[Any]:
    if not isinstance(params, Iterable):
        raise UsageError(
            f"GatheredParameters takes a parameter or an iterable of them, got {type(params).__name__}.",
            do="pass model.parameters().",
            code="gathered-type",
        )
    return params


@torch.no_grad()
def write_through(owner: Owner, parameter: torch.Tensor, source: int) -> None:
    """Give rank ``source``'s value of a whole parameter to all ranks, their shards and their master weights.

    Master weights change only where the parameter did, so they keep their precision elsewhere.
    """
    unit = owner.sharded.unit_of[id(parameter)]
    for group in unit.groups:
        bucket = group.buffer
        for slot, held in zip(bucket.layout.specs, bucket.parameters, strict=True):
            if held is not parameter or not slot.numel:
                continue
            everyone = owner.sharded.comm
            if parameter.data_ptr() != bucket.full[slot.offset :].data_ptr():
                bucket.full[slot.offset : slot.offset + slot.numel].copy_(parameter.data.reshape(-1))
            value = bucket.full[slot.offset : slot.offset + slot.numel]
            everyone.broadcast(value, source, label=bucket.label).drain()
            bucket.comm.drain()
            low, high = max(slot.offset, bucket.begin), min(slot.offset + slot.numel, bucket.end)
            if low >= high:
                continue
            new = bucket.full[low:high]
            start, stop = low - bucket.begin, high - bucket.begin
            if group.is_trained:
                group.update_main(start, stop, new)
            if bucket.is_sharded:
                with bucket.resident_shard():
                    bucket.shard[start:stop].copy_(new)


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """From now on the forward of ``module`` finds ``parameter`` whole, though it belongs to another module.

    Before ``initialize`` this does nothing: Shoal finds such reads by itself in the first pass.
    """
    owner = OWNERS.get(parameter)
    if owner is None:
        return
    reader = owner.sharded.reader_of(module)
    if reader is not None:
        owner.sharded.add_shared(reader, owner.sharded.unit_of[id(parameter)])


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Undo ``register_external_parameter``."""
    owner = OWNERS.get(parameter)
    if owner is None:
        return
    unit, reader = owner.sharded.unit_of[id(parameter)], owner.sharded.reader_of(module)
    if reader is not None and unit in reader.shared:
        reader.shared.remove(unit)
