"""The state of one rank, sent to the same rank of another replica over the wire.

    values     parameters, main parameters, optimizer state, buffers of the model      as bytes, one message each
    numbers    counters, schedule, loss scale, data position, RNG states, parts        as JSON, in the first message

Both ranks have the same layout, so each range has the same name and begins at the same element on both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from shoal.checkpoint import tree
from shoal.checkpoint.local_shards import LocalShard, LocalShards, buffers_of
from shoal.checkpoint.manifest import OPTIMIZER
from shoal.comm.protocol import Communicator
from shoal.engine.accumulation import Accumulation
from shoal.engine.sharding import Sharding
from shoal.running.optimizer import ShardedOptimizer

_LABEL = "state of a replica"


@dataclass(frozen=True)
class ExportedState:
    """What ``send`` sends. ``values`` are the memory itself: it must not change before they are sent."""

    numbers: dict[str, Any]
    values: list[tuple[torch.Tensor, ...]]  # each as 1-D parts

    def send(self, comm: Communicator, peer: int) -> None:
        """Communicates: to ``peer``, the bytes of all values. Blocks until they are received."""
        header = torch.frombuffer(bytearray(json.dumps(self.numbers).encode()), dtype=torch.uint8)
        for message in (torch.tensor([header.numel()], dtype=torch.int64, device="cpu"), header):
            comm.blocking.send(message, peer, label=_LABEL)
        for parts in self.values:
            flat = torch.cat([part.detach().reshape(-1).cpu() for part in parts])
            comm.blocking.send(flat.view(torch.uint8), peer, label=_LABEL)


class PeerState:
    """Takes the state of an engine's rank, and sets it.

    Args:
        engine: a ``shoal.Engine`` with an optimizer.
    """

    def __init__(self, engine: Any) -> None:
        self._sharding: Sharding = engine.sharding
        self._run = engine.run_state
        self._accumulation: Accumulation = engine.accumulation
        self._optimizer: ShardedOptimizer = engine.sharded_optimizer

    def export(self, *, is_start: bool = False) -> ExportedState:
        """Every rank calls, between two steps.

        Args:
            is_start: nothing has run yet: of the numbers none is sent.
        """
        self._sharding.wait()
        shards = self._sharding.local_shards()
        sent = list(_sharded(shards))
        named: dict[str, torch.Tensor] = {}
        own = {**self._run.own({}), "buffers": {}, "gradients": []}
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self._optimizer.param_groups]
        state = {"own": own, "shared": self._run.shared(exclude_frozen=False), "groups": groups}
        numbers = {
            "shards": [[s.kind, s.name, s.begin, s.numel, tree.name_of(s.dtype)] for s in sent],
            "scalars": tree.encode(shards.scalars(), None, "scalars"),
            "state": None if is_start else tree.encode(state, named, "state"),
        }
        named |= {f"buffers/{name}": buffer for name, buffer in buffers_of(self._sharding.module).items()}
        numbers["named"] = [[name, list(value.shape), tree.name_of(value.dtype)] for name, value in named.items()]
        # A forward pass may change these; what is sharded it only reads.
        copies = [(value.detach().to("cpu", copy=True).reshape(-1),) for value in named.values()]
        return ExportedState(numbers, [*(tuple(shard.part(shard.begin, shard.end)) for shard in sent), *copies])

    @torch.no_grad()
    def receive(self, comm: Communicator, peer: int) -> None:
        """Become what ``peer`` exported. Every rank calls.

        Memory: on the host, one value at a time. Communicates: inside of this replica, as a load of a checkpoint.
        """
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        comm.blocking.recv(length, peer, label=_LABEL)
        header = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        comm.blocking.recv(header, peer, label=_LABEL)
        numbers = json.loads(header.numpy().tobytes())

        def value(numel: int, dtype: str) -> torch.Tensor:
            received = torch.empty(numel, dtype=tree.dtype_of(dtype), device="cpu")
            comm.blocking.recv(received.view(torch.uint8), peer, label=_LABEL)
            return received

        sharding, step = self._sharding, self._sharding.step
        assert step is not None
        sharding.wait()
        sharding.prepare_change()
        shards = sharding.local_shards()
        self._allocate(shards, numbers["shards"], tree.decode(numbers["scalars"], _no_tensor))
        mine = {(shard.kind, shard.name, shard.begin): shard for shard in _sharded(shards)}
        for kind, name, begin, numel, dtype in numbers["shards"]:
            received, shard = value(numel, dtype), mine[kind, name, begin]
            parts = shard.part(begin, begin + numel)
            for part, values in zip(parts, received.split([part.numel() for part in parts]), strict=True):
                part.copy_(values)
        named = {name: value(_numel(shape), dtype).view(shape) for name, shape, dtype in numbers["named"]}
        step.state_was_loaded()
        for kept in [kept for group in shards.states for kept in group.kept]:
            kept.restore()
        for group in shards.sharded.groups:
            group.publish()
        for name, buffer in buffers_of(sharding.module).items():
            buffer.copy_(named[f"buffers/{name}"])
        if numbers["state"] is not None:
            self._restore(tree.decode(numbers["state"], named.__getitem__))

    def _allocate(self, shards: LocalShards, sent: Sequence[Sequence[Any]], scalars: dict[str, Any]) -> None:
        """Allocate optimizer state as the peer has it."""
        dtypes: dict[str, dict[str, torch.dtype]] = {}
        for kind, name, _, _, dtype in sent:
            if kind.startswith(OPTIMIZER):
                dtypes.setdefault(name, {})[kind.removeprefix(OPTIMIZER)] = tree.dtype_of(dtype)
        for group in shards.states:
            names = [spec.name for spec in group.buffer.layout.specs]
            of_kept = {key for kept in group.kept for key in kept.saved}
            for kept in group.kept:
                kept.expect({key for name in names for key in dtypes.get(name, {})})
            own = [{k: d for k, d in dtypes.get(name, {}).items() if k not in of_kept} for name in names]
            if any(own) and shards.step is not None:
                shards.step.allocate_state(group, [scalars.get(name, {}) for name in names], own)

    def _restore(self, state: dict[str, Any]) -> None:
        accumulation = self._accumulation
        open_step, num_done = accumulation.own_state(), accumulation.micro_in_step
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=True):
            group.update(values)
        self._run.restore(state["shared"], state["own"], _LABEL, has_schedule=True, num_ranks=0)
        if accumulation.loss_scale is not None:
            self._optimizer.loss_scale = accumulation.loss_scale.scale
        accumulation.resume(open_step, num_done, self._sharding.model.device)


def _sharded(shards: LocalShards) -> list[LocalShard]:
    return [shard for shard in chain(shards.model(), shards.optimizer()) if shard.numel]


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _no_tensor(name: str) -> torch.Tensor:
    raise KeyError(name)
