"""Changes to the library that a check of streams must notice, other than a wait that is left out (``stream_mutants``).

A change replaces a text in a file. The functions whose code differs get the new code, in this process, until the block
ends: each run takes about a second.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

import shoal
from shoal.comm.protocol import Communicator
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.parallel.sequence.chunks import chunks_of
from shoal.parallel.sequence.ring import RingPlan, ring_attention
from shoal.simulation.check import StreamCheck
from tests.helpers.places import ROOT
from tests.helpers.stream_cases import CASES, ROWS, of_matrix, on_ranks
from tests.helpers.stream_matrix import reports
from tests.helpers.training import adamw, config, start


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _same(one: CodeType, other: CodeType) -> bool:
    """True if two codes do the same, whatever their lines are."""
    if one.co_code != other.co_code or one.co_names != other.co_names or len(one.co_consts) != len(other.co_consts):
        return False
    pairs = zip(one.co_consts, other.co_consts, strict=True)
    return all(
        _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in pairs
    )


def _function(module: ModuleType, name: str) -> Any:
    """What has the code of a function or method of a module, by its qualified name."""
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    return inspect.unwrap(found.fget if isinstance(found, property) else getattr(found, "__func__", found))


@contextmanager
def changed(file: str, old: str, new: str) -> Iterator[None]:
    """Inside the block, ``file`` of the library has ``new`` where it has ``old``, once.

    Raises: AssertionError: the text is not there, or the change is in no function.
    """
    text = (ROOT / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
    module = import_module(file[:-3].replace("/", "."))
    path = str(module.__file__)
    before, after = (list(_codes(compile(each, path, "exec"))) for each in (text, text.replace(old, new)))
    named = {code.co_qualname: code for code in after if "<locals>" not in code.co_qualname}
    differ = {
        code.co_qualname: named[code.co_qualname]
        for code in before
        if code.co_qualname in named and not _same(code, named[code.co_qualname])
    }
    functions = [each for name in differ if not isinstance(each := _function(module, name), type)]
    assert functions, f"no function of {file} has the change"
    kept = [each.__code__ for each in functions]
    try:
        for each in functions:
            each.__code__ = differ[each.__code__.co_qualname]
        yield
    finally:
        for each, code in zip(functions, kept, strict=True):
            each.__code__ = code


# what is run


def _keys(documents: tuple[tuple[int, ...], ...] | None = None, window: int | None = None) -> None:
    """Ring attention, forward and backward."""
    found = current_world()
    comm = found.communicator("cp", Mesh.of(found.size, cp=found.size))
    query, key, value = ((torch.ones(1, 2, 4, 8) * scale).requires_grad_() for scale in (0.1, 0.2, 0.3))
    chunks = chunks_of(4 * comm.size, comm.size, "balanced")
    plan = RingPlan(comm, chunks, True, documents, 1.0, "ring", "attention", window)
    ring_attention(query, key, value, plan).sum().backward()
    assert key.grad is not None
    key.grad.mul(2)


def _collectives() -> None:
    """Reductions into sums of another dtype, two under way, and vectors whose memory is written after the call."""
    found = current_world()
    comm: Communicator = found.communicator("dp", Mesh.of(found.size))
    totals = [torch.ones(2) * 2, torch.ones(2) * 2]
    sources = [torch.ones(4, dtype=torch.bfloat16) * 2 for _ in totals]
    works = [
        comm.reduce_scatter(source, total, scale=1 / 3, accumulate=True, label="gradients")
        for source, total in zip(sources, totals, strict=True)
    ]
    vector = torch.ones(2) * 2
    rows = comm.exchange(vector, label="vector")
    vector.mul_(2)
    for work, source in zip(works, sources, strict=True):
        work.drain()
        source.mul_(2)
    rows.wait().mul(2)


class _Used(nn.Module):
    """All parameters have gradients on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> Any:
        return self.blocks[1](self.blocks[0](x.to(self.blocks[0].weight.dtype))).float().square().mean()


class UsedOnOneRank(_Used):
    """Rank 1 alone uses one layer, and no rank another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.no = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.first(x) if current_world().rank == 1 else x)


def host_reads(settings: dict[str, Any], model: type[nn.Module] = _Used) -> Counter[str]:
    """Where the host waits for values in the third step of two ranks, by line of Python, as rank 0 sees it."""

    def rank() -> Counter[str]:
        with shoal.check_streams() as check:
            engine = start(model, settings, adamw)
            for _ in range(3):  # in the first two forwards the engine reads the placeholders of parameters
                before = check.host_reads
                for _ in range(engine.gradient_accumulation_steps()):
                    engine.backward(engine(torch.ones(2, 8)))
                    engine.step()
            found = check.host_reads - before
            engine.destroy()
        return found

    return run_ranks(2, rank)[0]


def _reports(run: Callable[[], list[StreamCheck]]) -> str:
    return reports(run())


def _reads(settings: dict[str, Any]) -> str:
    """Text if the host waits more than once in a step."""
    found = host_reads(settings)
    return "" if found.total() == 1 else f"the host waits {found.total()} times: {found}"


_RING = partial(_reports, partial(on_ranks, 2, _keys))
_WINDOW = partial(_reports, partial(on_ranks, 2, partial(_keys, window=6)))
_DOCUMENTS = partial(_reports, partial(on_ranks, 6, partial(_keys, documents=((0, 3, 24),))))
_COMM = partial(_reports, partial(on_ranks, 2, _collectives))
_STAGE_2 = partial(_reports, partial(of_matrix, {"stage": "2"}))
_DROPPED = partial(_reports, CASES["source_that_is_dropped_while_it_is_copied"])
_OFFLOADED = partial(
    _reports, partial(of_matrix, {"stage": "3", "state": "host", "parameters": "host", "accumulation": "2"})
)
_REGISTERED = partial(_reports, partial(of_matrix, {"stage": "3", "registered": "yes", "stream": "of the script"}))
_TWO_NODES = partial(_reports, ROWS["two nodes, stage 2"])
_UPDATED = partial(_reports, ROWS["two nodes, gathers after updates on the host"])
_STREAMS = "__import__('shoal.streams', fromlist=['x']).streams_of"


@dataclass(frozen=True)
class Change:
    """Attributes: ``run``: gives what is noticed; empty: nothing. ``says``: a part of it."""

    file: str
    old: str
    new: str
    run: Callable[[], str]
    says: str


NCCL, RING, COPIES = "shoal/comm/nccl.py", "shoal/parallel/sequence/ring.py", "shoal/memory/stream_copies.py"
PROTOCOL, LEVELS = "shoal/comm/protocol.py", "shoal/comm/two_level.py"
_WAIT = """        with self._comm.explained(self._what):
            self._work.wait()
        self._is_waited = True
"""
_WRITE = """        with torch.no_grad():
            self._write(self._out if self._landing is None else self._landing)
"""
CHANGES = {
    # the code that GPUs run
    "NCCL's work is not waited for": Change(NCCL, "self._work.wait()", "pass", _COMM, "before reduce_scatter"),
    "another stream waits for NCCL's work": Change(
        NCCL,
        "            self._work.wait()\n",
        f"            with {_STREAMS}(self._out.device).stream():\n                self._work.wait()\n",
        _COMM,
        "the compute stream must wait for the stream of collectives",
    ),
    "what NCCL wrote is added before it is there": Change(
        NCCL, f"{_WAIT}{_WRITE}", f"{_WRITE}{_WAIT}", _COMM, "before reduce_scatter"
    ),
    "a source may be overwritten before NCCL has read it": Change(
        NCCL,
        "        self.wait()\n",
        "        self._out\n",
        _COMM,
        "reads it is known to be over",
    ),
    "reductions under way share memory": Change(
        NCCL,
        "torch.empty_like(own)",
        "self._factors.setdefault((own.numel(), own.dtype), torch.empty_like(own))",
        _COMM,
        "on the compute stream reads it before reduce_scatter",
    ),
    "a vector is sent from the caller's memory": Change(
        NCCL, "sent.detach().clone()", "sent.detach()", _COMM, "before all_gather 'vector'"
    ),
    "the host reads what NCCL wrote": Change(
        NCCL,
        "        self._landing = None\n        return",
        "        self._landing = None\n        self._out[:1].tolist()\n        return",
        partial(_reads, config(3)),
        "the host waits",
    ),
    # collectives that are issued behind others
    "the last of several collectives is not waited for": Change(
        PROTOCOL, "        self._issued.wait()\n", "", _TWO_NODES, "must wait for"
    ),
    "received bytes are decoded before they are there": Change(
        PROTOCOL,
        "parts = layout.parts(before.wait(), self.size)",
        "parts = layout.parts(received, self.size)",
        _TWO_NODES,
        "must wait for",
    ),
    "what a node has summed is sent before it is there": Change(
        LEVELS, "layout.parts(before.wait(), width)", "layout.parts(received, width)", _TWO_NODES, "must wait for"
    ),
    "memory of a sum is freed while another stream decodes it": Change(
        LEVELS, "            keep_for_current_stream(message, received)\n", "", _TWO_NODES, "the memory was freed"
    ),
    "memory of shards of other nodes is freed while they are sent on": Change(
        LEVELS, "            keep_for_current_stream(mine)\n", "", _UPDATED, "the memory was freed"
    ),
    # sends that are moved or in another order
    "a hop of a ring is received after it is sent": Change(
        RING,
        'Message("send", outgoing, following, label), ',
        'Message("send", outgoing, following, label)]) and comm.batch([',
        _RING,
        "deadlock",
    ),
    "an exchange is received after it is sent": Change(
        RING, "[comm.batch(some)] if some else []", "[comm.batch([one]) for one in some]", _WINDOW, "deadlock"
    ),
    "gradients of documents are added before they are there": Change(
        RING,
        "            for work in works:\n                work.drain()\n            places",
        "            places",
        _DOCUMENTS,
        "must wait for",
    ),
    "keys are packed after they are sent": Change(
        RING,
        "        yield source, *views\n",
        "        packed.fill(current, comm.rank, key, value) if step == 0 else None\n        yield source, *views\n",
        _RING,
        "writes it before batch ",
    ),
    # memory that is freed or reused too early
    "a copied source is freed early": Change(
        COPIES, "        if is_source_freed:\n", "        if False:\n", _DROPPED, "the memory was freed"
    ),
    "a staging buffer is reused before its reduction": Change(
        "shoal/sharding/gradient.py",
        "        self._work = work\n        self.sum.assume(to)\n",
        "        self._work = work\n        self.sum.assume(to)\n        self._staging.release(staging)\n",
        _STAGE_2,
        "before reduce_scatter",
    ),
    "a gather does not wait for what read the registered memory before": Change(
        "shoal/sharding/buffer.py",
        "        if len(todo) == 1:\n            return first()\n",
        f"        if len(todo) == 1:\n            with {_STREAMS}(self.device).stream():\n"
        "                return first()\n",
        _REGISTERED,
        "before allocation on",
    ),
    "a copy does not wait for its source": Change(
        "shoal/comm/side_stream.py", "        self._stream.wait_stream(current)\n", "", _OFFLOADED, "must wait for"
    ),
    # reads of the host
    "the host reads the norm of a unit": Change(
        "shoal/sharding/unit.py",
        "            if group.gradient.wait(at_step=at_step) and group.updates",
        "            is_done = group.gradient.wait(at_step=at_step)\n            group.gradient.owned().sum().item()\n"
        "            if is_done and group.updates",
        partial(_reads, config(2)),
        "unit.py",
    ),
    "the host waits for a gather": Change(
        NCCL,
        "        self._is_waited = True\n        with",
        "        self._is_waited = True\n        bool(self._out.isfinite().all())\n        with",
        partial(_reads, config(3)),
        "the host waits",
    ),
}
