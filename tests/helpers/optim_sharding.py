"""The same model, stepped whole and stepped in shards on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.comm.protocol import Communicator
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.optim.whole import OwnedRange, ParameterPart, WholeTensorOptimizer
from shoal.sharding.layout import BufferLayout, lay_out

Make = Callable[[list[dict[str, Any]]], WholeTensorOptimizer]


@dataclass(frozen=True)
class Case:
    """A unit: parameter shapes by group, the settings of each group, and how often to step.

    ``untouched[step]`` names parameters (in bucket order) that get no gradient in that step.
    """

    groups: Sequence[Sequence[tuple[int, ...]]]
    settings: Sequence[dict[str, Any]]
    num_steps: int = 3
    untouched: tuple[tuple[int, ...], ...] = ()
    alignment: int = 4

    def shapes(self) -> list[tuple[int, ...]]:
        return [shape for group in self.groups for shape in group]

    def tensors(self, seed: int) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=random) for shape in self.shapes()]

    def gradients(self, step: int) -> list[torch.Tensor | None]:
        left = self.untouched[step] if step < len(self.untouched) else ()
        return [None if i in left else grad for i, grad in enumerate(self.tensors(100 + step))]


def step_whole(case: Case, make: Make) -> list[torch.Tensor]:
    """The parameters after the steps of an optimizer that has ordinary parameters."""
    params = [torch.nn.Parameter(tensor) for tensor in case.tensors(0)]
    rest = iter(params)
    groups = [
        {"params": [next(rest) for _ in group], **settings}
        for group, settings in zip(case.groups, case.settings, strict=True)
    ]
    optimizer = make(groups)
    for step in range(case.num_steps):
        for param, grad in zip(params, case.gradients(step), strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


def step_sharded(case: Case, make: Make, size: int, *, knows_layout: bool) -> list[torch.Tensor]:
    """The same on ``size`` ranks; every rank owns one range of one buffer.

    Args:
        knows_layout: the parts say where parameters lie, else the optimizer has to ask.
    """
    entries = [(f"p{g}.{i}", shape, g) for g, group in enumerate(case.groups) for i, shape in enumerate(group)]
    layout = lay_out(entries, num_shards=size, alignment=case.alignment)

    def on_rank() -> torch.Tensor:
        world = current_world()
        comm = world.communicator("dp_shard", Mesh.of(size))
        return _steps(case, make, layout, comm, knows_layout)

    ranges = run_ranks(size, on_rank, timeout=30)
    bucket = torch.cat(ranges)
    return [bucket[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in layout.specs]


def _bucket(layout: BufferLayout, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    bucket = torch.zeros(layout.numel)
    for slot, tensor in zip(layout.specs, tensors, strict=True):
        if tensor is not None:
            bucket[slot.offset : slot.offset + slot.numel] = tensor.flatten()
    return bucket


def _steps(case: Case, make: Make, layout: BufferLayout, comm: Communicator, knows_layout: bool) -> torch.Tensor:
    begin, end = layout.owned(comm.rank)
    master = _bucket(layout, case.tensors(0))[begin:end].clone()
    params = []
    for group in range(len(case.groups)):
        low, high = layout.group_range(group, begin, end)
        params.append((group, low, torch.nn.Parameter(master[low:high])))
    named = [[torch.nn.Parameter(torch.zeros(shape)) for shape in group] for group in case.groups]
    optimizer = make([{"params": m, **s} for m, s in zip(named, case.settings, strict=True)])
    for step in range(case.num_steps):
        grads = case.gradients(step)
        gradient = _bucket(layout, grads)[begin:end]
        parts = []
        for group, low, param in params:
            param.grad = gradient[low : low + param.numel()].clone()
            members = [i for i, slot in enumerate(layout.specs) if slot.group == group]
            slots = [layout.specs[i] for i in members]
            segments = tuple(
                ParameterPart(members.index(s.slot), torch.Size(layout.specs[s.slot].shape), s.start, s.stop, s.offset)
                for s in layout.segments_in(begin + low, begin + low + param.numel())
                if s.slot in members and grads[s.slot] is not None
            )
            parts.append(
                OwnedRange(
                    param,
                    optimizer.param_groups[group],
                    segments,
                    tuple(torch.Size(slot.shape) for slot in slots),
                    tuple(slot.name for slot in slots),
                    tuple(slot.offset for slot in slots) if knows_layout else None,
                    layout.shard_numel if knows_layout else None,
                )
            )
        for _ in optimizer.step_ranges(parts, comm):
            pass
    return master
