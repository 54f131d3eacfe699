"""The rule of reuse against an allocator with blocks: conflicts in a reused block are reported, in random programs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from shoal.simulation.accelerator import SimulatedAccelerator
from shoal.simulation.clocks import Clock, SimulatedStream
from shoal.simulation.modes import watching
from shoal.streams import simulated


@dataclass
class _Block:
    nbytes: int
    accesses: list[tuple[SimulatedStream, int]] = field(default_factory=list)


class _Blocks:
    """PyTorch's caching allocator: a freed block goes to its stream's pool, and the smallest that fits is taken again.

    A block that ``record_stream`` has named is reused only after that stream: here never.
    """

    def __init__(self) -> None:
        self._pools: dict[SimulatedStream, list[_Block]] = {}
        self.num_conflicts = 0

    def allocate(self, stream: SimulatedStream, nbytes: int, clock: Clock) -> _Block:
        size = -(-nbytes // 512) * 512
        fitting = sorted((b for b in self._pools.get(stream, []) if b.nbytes >= size), key=lambda block: block.nbytes)
        if not fitting:
            return _Block(size)
        block = fitting[0]
        self._pools[stream].remove(block)
        self.num_conflicts += any(number > clock.get(other, 0) for other, number in block.accesses)
        block.accesses = []
        return block

    def free(self, stream: SimulatedStream, block: _Block, *, is_recorded: bool) -> None:
        if not is_recorded:
            self._pools.setdefault(stream, []).append(block)


def run(seed: int, *, waits: float) -> tuple[int, int]:
    """A random program. Returns: conflicts in blocks that were reused, and findings."""
    chosen, blocks, accelerator = random.Random(seed), _Blocks(), SimulatedAccelerator()
    live: list[tuple[torch.Tensor, _Block, SimulatedStream, bool]] = []
    with simulated(accelerator), watching(accelerator):
        streams = [accelerator.current(), accelerator.stream(), accelerator.stream()]
        for _ in range(60):
            stream = chosen.choice(streams)
            action = chosen.choice(["allocate", "use", "use", "free", "record"])
            with stream:
                if chosen.random() < waits:
                    stream.wait_stream(chosen.choice(streams))
                if action == "allocate" or not live:
                    tensor = torch.empty(chosen.choice([100, 1000, 3000]), dtype=torch.uint8)
                    block = blocks.allocate(stream, tensor.nbytes, stream.clock)
                    block.accesses.append((stream, stream.clock[stream]))
                    live.append((tensor, block, stream, False))
                    del tensor
                    continue
                at = chosen.randrange(len(live))
                tensor, block, owner, is_recorded = live[at]
                if action == "use":
                    tensor.fill_(1)
                    block.accesses.append((stream, stream.clock[stream]))
                elif action == "free":
                    del live[at], tensor
                    blocks.free(owner, block, is_recorded=is_recorded)
                else:
                    for each in streams:
                        accelerator.record_stream(tensor, each)
                    live[at] = (tensor, block, owner, True)
    reused = sum("the memory was freed" in str(finding) for finding in accelerator.findings.values())
    return blocks.num_conflicts, reused


@pytest.mark.parametrize("waits", [0.0, 0.4, 0.8])
def test_the_rule_of_reuse_finds_what_an_allocator_with_blocks_would(waits: float) -> None:
    found = [run(seed, waits=waits) for seed in range(12)]
    assert all(findings for conflicts, findings in found if conflicts)
    assert sum(conflicts > 0 for conflicts, _ in found) >= 2  # the programs do conflict
    assert sum(findings > 0 for _, findings in found) >= sum(conflicts > 0 for conflicts, _ in found)
