"""The interface between formats: named tensors that are read one at a time, and a description of them.

Every reader of a format is a ``Source``, and every writer takes one. The peak memory of a conversion is one tensor.
Where a format has a tensor in slices, its reader says where each lies in the whole, and ``join`` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shoal.checkpoint.rectangles import Rectangle


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class About:
    """What a checkpoint holds besides its tensors. Everything but the parameters may be missing.

    Args:
        parameters: of each parameter (buffers are not in it) the dtype that the model computes in.
        aliases: other names of the same parameter (tied weights), by its name.
        group_of: index of the optimizer's group by parameter name; missing: not trained. The names of a group are in
            the optimizer's order.
        groups: the groups' hyperparameters (``lr``, ``betas``, ...), without their parameters.
        scalars: optimizer state that is one number for a whole parameter: {name: {"step": tensor}}; a 0-d
            tensor stays one.
        optimizer: the class's name, e.g. ``"AdamW"``.
        schedule: the learning rate schedule's ``state_dict()``.
        counters: ``global_steps``, ``global_samples``, ``micro_steps``, ``skipped_steps``, as far as they are known.
        loss_scale: the loss scale's ``state_dict()``.
        client_state: what the client saved.
        num_ranks: that saved it.
        config: of the run that saved it, as JSON has it.
        notes: what was found and is not kept, a sentence each.
        path: the folder or file that is read.
    """

    parameters: dict[str, TensorInfo]
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    group_of: dict[str, int] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizer: str | None = None
    schedule: dict[str, Any] | None = None
    counters: dict[str, int] = field(default_factory=dict)
    loss_scale: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)
    num_ranks: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    path: str = field(default="", compare=False)


@dataclass(frozen=True)
class StridedPlace:
    """Elements of a contiguous tensor, as the arguments of ``torch.as_strided``."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


SlicePlace = Rectangle | StridedPlace


def view_of(tensor: torch.Tensor, place: SlicePlace) -> torch.Tensor:
    """The elements of a contiguous tensor at a place."""
    if isinstance(place, Rectangle):
        return tensor[place.slices()]
    return tensor.as_strided(place.shape, place.strides, tensor.storage_offset() + place.offset)


def join(info: TensorInfo, slices: Iterable[tuple[SlicePlace, torch.Tensor]]) -> torch.Tensor:
    """The tensor that is made of slices.

    Args:
        slices: which elements of the tensor each has, and their values; together they have all of them. A generator
            reads one slice after the other.

    Memory: the tensor, and what the generator holds.
    """
    whole = torch.empty(info.shape, dtype=info.dtype, device="cpu")
    for place, values in slices:
        view_of(whole, place).copy_(values)
    return whole


# PyTorch's own modules keep buffers of floating point under these names only.
_BUFFER_ENDINGS = (".running_mean", ".running_var", ".num_batches_tracked")


def about_bare(
    tensors: Mapping[str, TensorInfo],
    path: str,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    known_parameters: Iterable[str] = (),
) -> About:
    """An ``About`` for bare tensors.

    A tensor counts as a parameter if it is of floating point and not one of PyTorch's running statistics. A buffer of
    floating point by another name counts as one too; a model that is filled from it takes it by name all the same.
    """
    known = set(known_parameters)
    parameters = {
        name: info
        for name, info in tensors.items()
        if name in known or (info.dtype.is_floating_point and not f".{name}".endswith(_BUFFER_ENDINGS))
    }
    return About(parameters=parameters, aliases=dict(aliases or {}), path=path)


class Source(Protocol):
    """A state that can be read."""

    about: About

    def kinds(self) -> Iterable[str]:
        """``"model"`` first, then ``"optimizer/KEY"`` for each key."""
        ...

    def tensors(self, kind: str) -> Mapping[str, TensorInfo]:
        """The tensors of one kind, by name. Kind ``"model"`` has the fp32 master weights where there are any."""
        ...

    def read(self, kind: str, name: str) -> torch.Tensor:
        """One tensor, whole, on CPU. The caller drops it before it asks for the next.

        Raises: CheckpointError: it is damaged.
        """
        ...


class WeightsSource:
    """A source that holds the model alone; a format adds ``read``."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        path: str,
        aliases: Mapping[str, tuple[str, ...]],
        notes: Iterable[str],
    ) -> None:
        self._infos = tensors
        self.about = about_bare(tensors, path, aliases)
        self.about.notes.extend(notes)

    def kinds(self) -> Iterable[str]:
        return ("model",)

    def tensors(self, kind: str) -> Mapping[str, TensorInfo]:
        return self._infos if kind == "model" else {}
