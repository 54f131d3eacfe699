"""``GatheredParameters``: gathers sharded parameters for a block. Parameters that another module's forward reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.running.parameter_owner import OWNERS, ParameterOwner


@dataclass(frozen=True)
class _ParameterVersion:
    """A parameter whose changes are lost, as it was at the beginning."""

    parameter: torch.Tensor
    owner: ParameterOwner
    pointer: int
    version: int
    num_written: int

    @property
    def is_changed(self) -> bool:
        """True if it was changed, and not in an inner block that broadcasts changes."""
        is_same = self.parameter.data_ptr() == self.pointer and self.parameter._version == self.version
        return not is_same and self.owner.num_written == self.num_written


class GatheredParameters:
    """Gathers the given parameters inside the block. DeepSpeed's signature.

    Tensors that share a parameter's memory (``parameter.detach()``) keep their values, and the memory of its unit, as
    long as they live; inside a forward or backward pass, make a copy instead.

    Args:
        params: one parameter, or any iterable of them, in any order; None, and parameters that are not sharded, are
            left as they are.
        modifier_rank: this rank's in-place changes are broadcast to all ranks on exit; None: changes to sharded
            parameters are lost, which is a warning, and with ``zero_optimization.enable_sanity_checks`` an error on all
            ranks. A parameter that is split over tensor-parallel ranks is this rank's part, and is changed by the ranks
            that hold the other parts of the modifier's too (``world.mesh.index("loss", rank)`` is theirs).
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
        wrong = next((p for p in given if not isinstance(p, torch.Tensor)), None)
        if wrong is not None:
            raise UsageError(
                f"GatheredParameters takes parameters, got {type(wrong).__name__}.",
                do="pass model.parameters().",
                code="gathered-type",
            )
        self._modifier_rank = modifier_rank
        self._enabled = enabled
        self._stack = ExitStack()
        self._checked: list[_ParameterVersion] = []
        if fwd_module is not None and enabled:
            for parameter in self._parameters:
                register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> GatheredParameters:
        if not self._enabled:
            return self
        groups = OWNERS.grouped(self._parameters)
        with ExitStack() as stack:
            for owner, parameters in groups:
                stack.enter_context(owner.gathered(parameters, self._modifier_rank))
            self._stack = stack.pop_all()
        if self._modifier_rank is None:
            self._checked = [
                _ParameterVersion(p, owner, p.data_ptr(), p._version, owner.num_written)
                for owner, parameters in groups
                for p in parameters
                if owner.is_sharded(p)
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enabled:
            return
        checked, self._checked = self._checked, []
        changed = _lost_changes(checked) if error is None else None
        self._stack.__exit__(kind, error, trace)
        if changed is not None:
            raise changed


def _lost_changes(checked: Sequence[_ParameterVersion]) -> UsageError | None:
    """An error for all ranks if one of them changed a parameter, with ``enable_sanity_checks``; else a warning here.

    Communicates: with ``enable_sanity_checks``: which ranks did.
    """
    changed = [each for each in checked if each.is_changed]
    comm = next((each.owner.comm for each in checked if each.owner.checks_changes), None)
    if comm is None:
        if changed:
            warnings.warn(
                f"{len(changed)} sharded parameters were changed inside GatheredParameters with modifier_rank=None: the"
                " changes are lost. Pass modifier_rank=0 to broadcast rank 0's.",
                stacklevel=3,
            )
        return None
    is_changed = any(each.owner.checks_changes for each in changed)
    ranks = [rank for rank, each in enumerate(comm.gather_objects(is_changed, label="gathered: changes")) if each]
    if not ranks:
        return None
    return UsageError(
        f"in-place modification of sharded parameters inside GatheredParameters on ranks {ranks}, and"
        " modifier_rank=None: the change is lost.",
        do="pass modifier_rank=0 to broadcast rank 0's changes to all ranks.",
        code="gathered-change",
    )


def _iterate(params: Any) -> Iterable[Any]:
    if not isinstance(params, Iterable):
        raise UsageError(
            f"GatheredParameters takes a parameter or an iterable of them, got {type(params).__name__}.",
            do="pass model.parameters().",
            code="gathered-type",
        )
    return params


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Gather ``parameter``, which belongs to another module, for every forward of ``module`` from now on.

    Before ``initialize`` this does nothing: Shoal finds such reads in the first pass.
    """
    owner = OWNERS.get(parameter)
    if owner is not None:
        owner.share(module, parameter, is_shared=True)


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Undo ``register_external_parameter``."""
    owner = OWNERS.get(parameter)
    if owner is not None:
        owner.share(module, parameter, is_shared=False)
