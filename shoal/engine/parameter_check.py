"""Detects changes of the model after it was sharded, at a cost of a few microseconds a forward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import attrgetter

import torch
from torch import nn

from shoal.device import is_fake
from shoal.errors import ModelError
from shoal.running.runtime import ShardedModel
from shoal.streams import is_accelerator
from shoal.text import counted, listed

logger = logging.getLogger("shoal")

_FULL_CHECK_EVERY = 64
_SLICE = 64  # parameters that are checked in each forward, in turn

_version = attrgetter("_version")
# Torch's type stubs leave this function out.
_is_same_memory: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


class ParameterCheck:
    """Compares the model with what was sharded, and copies parameters that a script changes to main parameters.

    Each forward counts modules and parameters, checks that some parameters are still there and in their buffer's
    memory, and compares the version counters of parameters that have a main parameter of their own. Every 64th forward
    checks all parameters. Changes through ``parameter.data`` do not change a version counter.

    Placeholders of sharded parameters are read too, to see that nothing was written to them: on an accelerator in the
    first two forwards only, since the host waits for their values.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._model = sharded.model
        self._sharded = sharded
        self._device = sharded.groups[0].buffer.device if sharded.groups else torch.device("cpu")
        self._home = {
            id(parameter): (group, slot) for group in sharded.groups for slot, parameter in enumerate(group.parameters)
        }
        trained = {id(p) for group in sharded.trained_groups for p in group.parameters}
        frozen = [(name, p) for name, p in sharded.model.named_parameters() if trained and not p.requires_grad]
        self._frozen = {id(p): name for name, p in frozen if id(p) not in trained}
        self._next = 0
        self._forwards = 0
        self._record_model()
        self._followed = [
            (group, slot)
            for group in sharded.trained_groups
            if group.has_own_main and not group.buffer.is_sharded
            for slot in range(len(group.parameters))
        ]
        self._followed_parameters = [group.parameters[slot] for group, slot in self._followed]
        self._versions = list(map(_version, self._followed_parameters))
        self._before: list[int] | None = None  # versions of all parameters before a forward that is checked
        self._has_warned = False

    def _record_model(self) -> None:
        self._modules = list(self._model.modules())
        self._members = [
            (module._parameters, name, parameter)
            for module in self._modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._count = self._counted()

    def _counted(self) -> tuple[int, int]:
        return (
            sum(len(module._parameters) for module in self._modules),
            sum(len(module._modules) for module in self._modules),
        )

    def check(self) -> None:
        """Before a forward. Raises: ModelError: naming what was added, removed, or moved to other memory."""
        is_due = self._forwards % _FULL_CHECK_EVERY < 2
        self._forwards += 1
        if is_due or self._counted() != self._count:
            self._refuse_members()
            self._record_model()
        if is_due and (self._forwards <= 2 or not is_accelerator(self._device)):  # blocks the host
            self._check_placeholders()
        begin = 0 if is_due else self._next
        end = len(self._members) if is_due else begin + _SLICE
        self._next = end if end < len(self._members) else 0
        for parameters, name, parameter in self._members[begin:end]:
            if parameters.get(name) is not parameter:
                self._refuse_members()
            self._check_memory(parameter)
            if self._frozen and parameter.requires_grad and id(parameter) in self._frozen:
                self._warn_of_unfrozen()
        self.follow()
        self._before = [p._version for _, _, p in self._members] if is_due and not self._has_warned else None

    def _warn_of_unfrozen(self) -> None:
        names = [self._frozen[id(p)] for _, _, p in self._members if p.requires_grad and id(p) in self._frozen]
        self._frozen = {}
        if self._sharded.axes.world.rank == 0:
            logger.warning(
                "%s frozen at initialize() and require a gradient now, but have no optimizer state, so they are"
                " not trained: %s. Call requires_grad_() before initialize(), or destroy() the engine and initialize"
                " again.",
                f"{counted(len(names), 'parameter')} {'was' if len(names) == 1 else 'were'}",
                listed(names),
            )

    def _refuse_members(self) -> None:
        """Raises: ModelError: parameters were added to, or taken from, the model after it was sharded."""
        now = {id(parameter): name for name, parameter in self._model.named_parameters()}
        changes = [f"added {name!r}" for key, name in now.items() if key not in self._home]
        changes += [
            f"removed {group.buffer.layout.specs[slot].name!r}"
            for key, (group, slot) in self._home.items()
            if key not in now
        ]
        if changes:
            raise ModelError(
                f"the model was changed after initialize(): {', '.join(changes[:8])}"
                f"{' ...' if len(changes) > 8 else ''}.",
                do="change the model first, then call shoal.initialize(); or destroy() this engine and initialize"
                " again.",
                code="model-changed",
            )

    def _check_memory(self, parameter: nn.Parameter) -> None:
        group, slot = self._home[id(parameter)]
        if _is_same_memory(parameter, group.buffer.full):
            return
        if group.placeholders and _is_same_memory(parameter, group.placeholders[slot]):
            return
        self._refuse_moved()

    def _check_placeholders(self) -> None:
        """Raises: ModelError: a script has set a sharded parameter (``zero_()``, which torch accepts): it is lost."""
        by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
        for group, slot in self._home.values():
            buffer, placeholders = group.buffer, group.placeholders
            if placeholders and buffer.dtype.is_floating_point and not is_fake(placeholders[slot]):
                value = placeholders[slot].as_strided((), ())
                by_dtype.setdefault(buffer.dtype, []).append((buffer.layout.specs[slot].name, value))
        for placed in by_dtype.values():
            is_kept = torch.stack([value for _, value in placed]).isnan()
            if is_kept.all():
                continue
            names = [name for (name, _), kept in zip(placed, is_kept.tolist(), strict=True) if not kept]
            raise ModelError(
                f"{counted(len(names), 'parameter')} that stage 3 keeps sharded {'was' if len(names) == 1 else 'were'}"
                f" written to, and the values are lost: {listed(names)}.",
                do="write inside `with shoal.zero.GatheredParameters([p], modifier_rank=0):`.",
                code="model-changed",
            )

    def _refuse_moved(self) -> None:
        moved = []
        for group, slot in self._home.values():
            homes = [group.buffer.full, *group.placeholders[slot : slot + 1]]
            if not any(_is_same_memory(group.parameters[slot], home) for home in homes):
                moved.append((group, slot))
        names = [group.buffer.layout.specs[slot].name for group, slot in moved]
        dtypes = {group.parameters[slot].dtype for group, slot in moved} - {group.buffer.dtype for group, _ in moved}
        cast = f" as {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}" if dtypes else ""
        raise ModelError(
            f"the model was changed after initialize(): {counted(len(names), 'parameter')} given other memory{cast}, so"
            f" no longer trained: {listed(names)}.",
            do="leave out .to(), .half(), .float() and parameter.data = ... after initialize() (fp16 and bf16 in the"
            " config choose the dtype); set values in place under torch.no_grad(), at stage 3 inside"
            " shoal.zero.GatheredParameters.",
            code="model-changed",
        )

    def follow(self) -> None:
        """Copy parameters changed in place since the last call to their main parameters. Communicates nothing.

        Each rank reads its own copy: all ranks must make the same change, as in plain data parallelism.
        """
        now = list(map(_version, self._followed_parameters))
        if now == self._versions:
            return
        for index, (group, slot) in enumerate(self._followed):
            if now[index] != self._versions[index]:
                buffer = group.buffer
                if (part := buffer.layout.segment_in(slot, buffer.begin, buffer.end)) is not None:
                    low, high = buffer.begin + part.start, buffer.begin + part.stop
                    group.update_main(part.start, part.stop, buffer.full[low:high])
        self._versions = now

    def forget(self) -> None:
        """Drop the references to parameters and main parameters."""
        self._home.clear()
        self._members, self._modules = [], []
        self._followed, self._followed_parameters, self._versions = [], [], []

    def after_forward(self) -> None:
        """Warn once where the model's own forward changes parameters, since no rank sees another rank's change."""
        before, self._before = self._before, None
        if before is None or self._sharded.axes.data.size == 1:
            return
        changed = [p for (_, _, p), version in zip(self._members, before, strict=True) if p._version != version]
        if not changed:
            return
        self._has_warned = True
        homes = [self._home[id(parameter)] for parameter in changed]
        names = ", ".join(dict.fromkeys(group.buffer.layout.specs[slot].name for group, slot in homes))
        fate = (
            "is lost" if any(group.buffer.is_sharded for group, _ in homes) else "differs between ranks until the step"
        )
        logger.warning(
            "rank %d: the forward changes parameters in place (%s), as nn.Embedding does with max_norm. What each rank"
            " changes %s; do it on every rank alike, after the step, inside shoal.zero.GatheredParameters.",
            self._sharded.axes.world.rank,
            names,
            fate,
        )
