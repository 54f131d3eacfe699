"""Small runs on the simulated accelerator, of what the matrix of streams has no axis for: one or two waits each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

import shoal
from shoal.comm import autograd
from shoal.comm.formats import format_named
from shoal.comm.protocol import Communicator, Message
from shoal.comm.threads import run_ranks
from shoal.comm.wire import Wire
from shoal.comm.world import current_world
from shoal.compat.sequence_parallel import UlyssesSPDataLoaderAdapter
from shoal.data.prefetch import ahead_on
from shoal.engine.peer_state import PeerState
from shoal.memory.host import aligned_empty
from shoal.memory.stream_copies import StreamCopies, copies_of, mark
from shoal.mesh import Mesh
from shoal.parallel.activations import HostStore, HostTensor
from shoal.parallel.expert.gate import topkgating
from shoal.parallel.expert.held import ExpertUsage
from shoal.parallel.expert.losses import global_batch_loss
from shoal.parallel.expert.route import compare_tables
from shoal.parallel.saved_tensors import InPlaceStore, PartitionedStore
from shoal.parallel.sequence.chunks import chunks_of
from shoal.parallel.sequence.ring import RingPlan, ring_attention
from shoal.sharding.placement import Placement
from shoal.simulation.check import StreamCheck
from shoal.streams import host_memory
from tests.helpers.composition import Combination, Run, settings_of
from tests.helpers.models import HIDDEN, VOCABULARY, Plain
from tests.helpers.sparse_models import Both, Tables
from tests.helpers.sparse_models import tokens as words
from tests.helpers.stream_matrix import STREAM_AXES, accelerator_of_thread, checks_of_run, plain
from tests.helpers.training import adamw, batch, config, make, run_steps, sgd, start, start_with
from tests.ranks.parallel.expert.test_balance import engine_of
from tests.ranks.parallel.expert.test_balance import train as train_experts
from tests.ranks.parallel.tensor.test_engine import gpt

CPU = torch.device("cpu")
_VERBS: tuple[Literal["send", "recv"], ...] = ("send", "recv")


def world() -> Communicator:
    """All ranks, as a communicator of the simulated accelerator."""
    found = current_world()
    return found.communicator("dp", Mesh.of(found.size))


# parts of the library alone


def calls_that_block() -> None:
    comm, values = world().blocking, torch.ones(64) * 2
    comm.all_reduce(values, label="values")
    values.mul_(2)


def encoded_sum_that_is_drained(is_blocking: bool) -> None:
    """Before the peers have read what is sent, the script changes it."""
    comm, values = world(), torch.ones(64) * 2
    wire = Wire(format_named("int8", 32))
    if is_blocking:
        comm.blocking.all_reduce(values, label="values", wire=wire)
    else:
        comm.all_reduce(values, label="values", wire=wire).drain()
    values.mul_(2)


def messages_between_hosts_that_are_drained() -> None:
    comm, values = world(), [host_memory(torch.ones(4), is_pinned=False) for _ in range(2)]
    comm.batch(
        [Message(verb, each, 1 - comm.rank, "numbers") for verb, each in zip(_VERBS, values, strict=True)]
    ).drain()
    values[0].mul_(2)


def experts_that_are_used() -> None:
    with ExpertUsage(world()).of([1, 0, 2]):
        pass


def routing_tables_that_are_compared() -> None:
    compare_tables(torch.arange(12).view(6, 2) % 4, world(), "experts")


def exchanges_under_autograd() -> None:
    comm = world()
    tensor = torch.ones(4, 4, requires_grad=True)
    autograd.all_to_all(tensor * 2, comm, split_dim=0, concat_dim=1, label="parts").mul(3).sum().backward()


def capacity_of_dense_experts() -> None:
    found = current_world()
    group = found.process_group("world", Mesh.of(found.size))
    topkgating(torch.randn(6, 4), 2, 1.0, 1, drop_tokens=False, ep_group=group)


def loss_of_experts_over_the_global_batch() -> None:
    probabilities = torch.rand(6, 4, requires_grad=True)
    global_batch_loss(probabilities, torch.arange(12).view(6, 2) % 4, world()).backward()


def partitioned_tensors() -> None:
    store = PartitionedStore(world(), InPlaceStore())
    call = store.begin()
    saved = store.store(torch.ones(3, 5) * 2, call)
    store.fetch(saved, call).mul(2)


def saved_tensor_that_is_dropped_after_it_was_fetched() -> None:
    store = HostStore(copies_of)
    call = store.begin()
    saved = store.store(torch.ones(64) * 2, call)
    assert isinstance(saved, HostTensor)
    saved.release_source()
    saved.prefetch()
    del saved
    torch.ones(64)


def saved_tensor_that_is_read() -> None:
    store = HostStore(copies_of)
    saved = store.store(torch.ones(64) * 2, store.begin())
    assert isinstance(saved, HostTensor)
    saved.release_source()
    saved.get().mul(2)


def copies_within_copies() -> None:
    """A copy that is asked for where copies are queued after a mark, as on a GPU where streams are few and reused."""
    copies = StreamCopies(CPU)
    source = torch.ones(64) * 2
    marked = mark(CPU)
    with copies.after(marked):
        host, done = copies.to_host(source)
    done.block()
    host.add_(1)


def source_that_is_dropped_while_it_is_copied() -> None:
    copies, source = StreamCopies(CPU), torch.ones(64) * 2
    host = aligned_empty(source.nbytes, is_pinned=True).view(torch.float32)
    copies.copy(source, host, is_source_freed=True)
    del source
    torch.ones(64)


def batches_of_a_sequence() -> None:
    found = current_world()
    group = found.process_group("world", Mesh.of(found.size))
    loader = [{"input_ids": torch.arange(8).view(1, 8) * 2}]
    for each in UlyssesSPDataLoaderAdapter(loader, found.rank, group, found.size, "cpu"):
        each["input_ids"].mul(2)


def gradients_of_gathered_keys() -> None:
    comm = world()
    query, key, value = ((torch.ones(1, 2, 4, 8) * scale).requires_grad_() for scale in (0.1, 0.2, 0.3))
    plan = RingPlan(comm, chunks_of(8, comm.size, "balanced"), True, None, 1.0, "all_gather", "attention")
    ring_attention(query, key, value, plan).sum().backward()
    assert key.grad is not None
    key.grad.mul(2)


# the engine


class WithBuffer(nn.Module):
    """Reads a buffer first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((HIDDEN,), 2.0))
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        scale = self.scale * 2
        return (self.embedding(tokens) * scale).square().mean()


def buffers_of_the_model() -> None:
    engine = start(WithBuffer, config(0, units={"names": []}))
    run_steps(engine, 1)
    engine.destroy()


def stream_that_changes_while_units_are_gathered() -> None:
    """Backward on another stream than forward, whose last unit is still gathered."""
    engine = start(lambda: Plain(2), config(3), sgd)
    stream = accelerator_of_thread().stream()
    for index in range(2):
        loss = engine(*batch(index, current_world().rank, current_world().size))
        stream.wait_stream(accelerator_of_thread().current())
        with stream:
            engine.backward(loss)
        engine.step()
    engine.destroy()


class Beside(nn.Module):
    """Two of three units run on a stream of the model's own. Backward enters them around the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.middle = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        accelerator = accelerator_of_thread()
        compute, side = accelerator.current(), accelerator.stream()
        side.wait_stream(compute)
        with side:
            first = self.first(x)
        middle = self.middle(x)
        with side:
            last = self.last(x)
        compute.wait_stream(side)
        for each in (first, last):
            accelerator.record_stream(each, compute)
        return (first + middle + last).square().mean()


def gradients_of_a_stream_of_the_model(stage: int) -> None:
    """A gradient that was allocated on one stream is moved to the sum on another."""
    engine = start(Beside, config(stage, units={"names": ["first", "last", "middle"]}), sgd)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, HIDDEN)))
        engine.step()
    engine.destroy()


class Growing(nn.Module):
    """A unit of larger matrices after one of smaller ones, and a matrix that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 24, bias=False)])
        self.blocks[1].register_parameter("unused", nn.Parameter(torch.ones(4, 4)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.blocks[1](self.blocks[0](x)).square().mean()


def muon_with_buffers_that_grow(stage: int) -> None:
    settings = config(stage, optimizer={"type": "Muon", "params": {"lr": 0.01, "momentum": 0.9}})
    engine = start(Growing, settings, None)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
    engine.destroy()


class OneDenseTable(Tables):
    """The gradient of the words is dense where the micro-batch asks for it, on one rank."""

    def forward(self, tokens: torch.Tensor, with_bag: bool = True) -> Any:
        loss = super().forward(tokens, with_bag)
        return loss + self.words.weight.square().mean() if current_world().rank == 0 else loss


def table_with_a_dense_gradient_on_one_rank() -> None:
    both = partial(Both, tables=partial(torch.optim.SGD, lr=0.1))
    engine = start_with(make(OneDenseTable), config(0, units={"names": []}), both)
    found = current_world()
    for index in range(2):
        engine.backward(engine(words(index, found.rank, found.size)))
        engine.step()
    engine.destroy()


def rows_that_are_summed_over_replicas() -> None:
    parallel = {"dp_shard": 2, "dp_replicate": 2}
    engine = start_with(make(Tables), config(1, units={"names": []}, parallel=parallel), sgd)
    found = current_world()
    for index in range(2):
        engine.backward(engine(words(index, found.rank, found.size)))
        engine.step()
    engine.destroy()


class Spare(Plain):
    """Has a unit that is never used."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return x


def unit_that_is_never_used(stage: int, **zero: Any) -> None:
    engine = start(lambda: Spare(2), config(stage, zero_optimization=zero, gradient_accumulation_steps=2), adamw)
    run_steps(engine, 3)
    engine.destroy()


def gather_that_is_drained() -> None:
    """Of a shard in host memory: after the gather is drained, the script may read."""
    engine = start(lambda: Plain(1), config(3, zero_optimization={"offload_param": {"device": "cpu"}}), sgd)
    run_steps(engine, 1)
    unit = engine.sharded.sharded[0]
    unit.release()
    for group in unit.groups:
        work = group.gather()
        work.drain()
        group.buffer.full.mul_(2)
    engine.destroy()


def ranges_that_are_gathered_and_drained() -> None:
    """Of a shard in host memory: after the gather is drained, the script may write."""
    engine = start(lambda: Plain(1), config(3, zero_optimization={"offload_param": {"device": "cpu"}}), sgd)
    run_steps(engine, 1)
    unit = engine.sharded.sharded[0]
    unit.release()
    for group in unit.groups:
        group.buffer.redistribute(Placement(), ranges=[(0, group.buffer.layout.numel // 2)]).drain()
        group.buffer.full.mul_(2)
    engine.destroy()


def transform_before_parameters_are_gathered() -> None:
    """Of torch.func, after a step whose parameters are gathered by their next use."""
    settings = config(1, units={"names": ["0", "1"]}, zero_optimization={"overlap_param_gather": True})
    engine = start(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), settings, sgd)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()
        torch.func.grad(lambda x: engine.module(x).sum())(torch.ones(2, 64))
    engine.destroy()


def steps_of_their_own(stage: int, zero: dict[str, Any], **section: Any) -> None:
    """Replicas are synchronised after each second step."""
    sections = {"local_steps": {"every": 2, **section}, "parallel": {"dp_replicate": 2}}
    engine = start(lambda: Plain(1), config(stage, zero_optimization=zero, **sections), adamw)
    run_steps(engine, 3)
    engine.destroy()


def replicas_that_are_compared(zero: dict[str, Any]) -> None:
    engine = start(lambda: Plain(1), config(1, zero_optimization=zero, debug={"replica_check_steps": 1}), adamw)
    run_steps(engine, 3)
    engine.destroy()


def states_that_move_while_they_are_saved(folder: str) -> None:
    engine = start(lambda: Plain(1), config(1, checkpoint={"async_save": True}), adamw)
    run_steps(engine, 1)
    engine.save_checkpoint(folder)
    engine.offload_states()
    engine.reload_states()
    run_steps(engine, 1, first=1)
    engine.destroy()


def gradient_that_arrives_after_its_reduction() -> None:
    engine = start(lambda: Plain(1), config(0), sgd)
    engine.scale(engine(*batch(0, 0, 1))).backward()
    engine.scale(next(engine.module.blocks[0].parameters()).square().sum()).backward()
    engine.step()
    engine.destroy()


def gradient_that_is_changed_while_it_moves_to_the_host() -> None:
    """By a second backward pass before the step, and by the script."""
    zero = {"offload_optimizer": {"device": "cpu"}}
    engine = start(lambda: Plain(1), config(1, zero_optimization=zero), adamw)
    for _ in range(2):
        for index in range(2):
            engine.scale(engine(*batch(index, current_world().rank, 2))).backward()
        for parameter in engine.module.parameters():
            engine.access.set_full_gradient(parameter, torch.ones(parameter.shape))
        engine.step()
    engine.destroy()


def change_beside_an_asynchronous_save(stage: int, folder: str, **sections: Any) -> None:
    engine = start(lambda: Plain(1), config(stage, checkpoint={"async_save": True}, **sections), adamw)
    for step in range(2):
        run_steps(engine, 1, first=step)
        engine.save_checkpoint(folder, tag=str(step))
        parameters = list(engine.module.parameters())
        with shoal.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.5)
    engine.destroy()


def in_a_folder(size: int, run: Callable[[str], Any]) -> list[StreamCheck]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        return on_ranks(size, partial(run, name))


class Loopback:
    """A communicator whose messages this rank receives itself, in their order."""

    def __init__(self) -> None:
        self.blocking, self._sent = self, list[torch.Tensor]()

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> None:
        self._sent.append(tensor)

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> None:
        tensor.copy_(self._sent.pop(0))


def state_that_a_replica_gets_of_another(stage: int) -> None:
    """Both before the gathers, and the updates on the host, of a step have ended."""
    zero = {"overlap_param_gather": True, "offload_optimizer": {"device": "cpu"}}
    engine = start(lambda: Plain(1), config(stage, zero_optimization=zero), adamw)
    peer, link = PeerState(engine), Loopback()
    run_steps(engine, 2)
    peer.export().send(link, 0)  # type: ignore[arg-type]  # two methods of a communicator
    run_steps(engine, 1)
    peer.receive(link, 0)  # type: ignore[arg-type]
    run_steps(engine, 1)
    engine.destroy()


def batches_that_are_copied_ahead() -> None:
    batches = ({"tokens": torch.arange(64) + at} for at in range(3))
    for each in ahead_on(CPU, batches):
        each["tokens"].mul(2)


def experts_that_move_beside_an_update_on_the_host() -> None:
    host = {"offload_optimizer": {"device": "cpu"}}
    engine = engine_of("stacked", 2, 2, adamw, every=1, zero_optimization=host)
    train_experts(engine, range(3))
    engine.destroy()


def on_meta(stage: int) -> None:
    """Tensor-parallel ranks each initialize their part of a model that was built on the meta device."""
    with torch.device("meta"):
        model = gpt()
    engine = start_with(model, config(stage, parallel={"tp": 2}), sgd)
    tokens = torch.arange(16).view(2, 8)
    engine.backward(engine(tokens, tokens))
    engine.destroy()


def of_matrix(axes: Combination, **fields: Any) -> list[StreamCheck]:
    """A row of the matrix of streams, with other fields of ``Run`` and, by ``more``, of the config."""
    more = fields.pop("more", {})
    settings, run = settings_of({**plain(), **axes}, STREAM_AXES)
    return checks_of_run({**settings, **more}, Run(**{**run.__dict__, "steps": 3, "blocks": 2, **fields}))


def on_ranks(size: int, run: Callable[[], Any]) -> list[StreamCheck]:
    def rank() -> StreamCheck:
        with shoal.check_streams(raises=False) as check:
            run()
        return check

    return run_ranks(size, rank)


_UNUSED = [(1, {"overlap_param_gather": True}), (2, {"offload_optimizer": {"device": "cpu"}})]
_GPIPE = {"pipeline": {"schedule": "gpipe"}}
_HPZ = {"stage": "3", "hybrid": "hpz"}

CASES: dict[str, Callable[[], list[StreamCheck]]] = {
    run.__name__: partial(on_ranks, size, run)
    for size, run in (
        (2, calls_that_block),
        (2, messages_between_hosts_that_are_drained),
        (2, experts_that_are_used),
        (2, routing_tables_that_are_compared),
        (1, saved_tensor_that_is_read),
        (2, ranges_that_are_gathered_and_drained),
        (2, transform_before_parameters_are_gathered),
        (2, exchanges_under_autograd),
        (2, capacity_of_dense_experts),
        (2, loss_of_experts_over_the_global_batch),
        (2, partitioned_tensors),
        (1, saved_tensor_that_is_dropped_after_it_was_fetched),
        (1, copies_within_copies),
        (1, source_that_is_dropped_while_it_is_copied),
        (2, batches_of_a_sequence),
        (2, gradients_of_gathered_keys),
        (2, buffers_of_the_model),
        (2, stream_that_changes_while_units_are_gathered),
        (2, table_with_a_dense_gradient_on_one_rank),
        (4, rows_that_are_summed_over_replicas),
        (2, gather_that_is_drained),
        (1, gradient_that_arrives_after_its_reduction),
        (1, batches_that_are_copied_ahead),
        (2, experts_that_move_beside_an_update_on_the_host),
        (2, gradient_that_is_changed_while_it_moves_to_the_host),
    )
}
CASES |= {
    **{
        f"an encoded sum that {how}": partial(on_ranks, 2, partial(encoded_sum_that_is_drained, is_blocking))
        for how, is_blocking in (("is drained", False), ("blocks", True))
    },
    "steps of their own": partial(on_ranks, 2, partial(steps_of_their_own, 1, {})),
    "steps of their own, int8, host": partial(
        on_ranks,
        4,
        partial(
            steps_of_their_own,
            1,
            {"overlap_param_gather": True, "offload_optimizer": {"device": "cpu"}},
            wire="int8",
            error_feedback=True,
        ),
    ),
    "replicas that are compared": partial(on_ranks, 2, partial(replicas_that_are_compared, {})),
    "replicas that are compared, host": partial(
        on_ranks,
        2,
        partial(replicas_that_are_compared, {"overlap_param_gather": True, "offload_optimizer": {"device": "cpu"}}),
    ),
    "states that move while they are saved": partial(in_a_folder, 2, states_that_move_while_they_are_saved),
    **{
        f"state that a replica gets of another, stage {stage}": partial(
            on_ranks, 2, partial(state_that_a_replica_gets_of_another, stage)
        )
        for stage in (1, 3)
    },
    "gradients of a stream of the model, stage 0": partial(on_ranks, 2, partial(gradients_of_a_stream_of_the_model, 0)),
    "gradients of a stream of the model, stage 2": partial(on_ranks, 2, partial(gradients_of_a_stream_of_the_model, 2)),
    "muon": partial(on_ranks, 2, partial(muon_with_buffers_that_grow, 1)),
    "on meta": partial(on_ranks, 2, partial(on_meta, 1)),
    **{
        f"an unused unit, stage {stage}, {next(iter(zero))}": partial(
            on_ranks, 2, partial(unit_that_is_never_used, stage, **zero)
        )
        for stage, zero in _UNUSED
    },
    **{
        f"a change beside an asynchronous save, stage {stage}": partial(
            in_a_folder, 2, partial(change_beside_an_asynchronous_save, stage)
        )
        for stage in (1, 3)
    },
    "an asynchronous save of states in int8": partial(
        in_a_folder, 2, partial(change_beside_an_asynchronous_save, 3, precision={"state_dtype": "int8"})
    ),
    "an asynchronous save of states on the host": partial(
        in_a_folder,
        2,
        partial(change_beside_an_asynchronous_save, 1, zero_optimization={"offload_optimizer": {"device": "cpu"}}),
    ),
}

_SUMS = {"reduce": "int8", "between_nodes": "int4", "error_feedback": True}
_GATHERS = {"hierarchical_gather": True}

# Rows of the matrix with values that no axis has.
ROWS: dict[str, Callable[[], list[StreamCheck]]] = {
    "hpz": partial(of_matrix, _HPZ, ranks=4),
    "hpz, parameters on the host": partial(of_matrix, {**_HPZ, "parameters": "host"}, ranks=4),
    **{
        f"two nodes, {name}": partial(of_matrix, axes, ranks=4, more={"wire": {**wire, "ranks_per_node": 2}})
        for name, axes, wire in (
            ("stage 0", {"stage": "0"}, _SUMS),
            ("stage 2", {"stage": "2", "accumulation": "2"}, _SUMS),
            ("stage 3", {"stage": "3"}, {**_SUMS, **_GATHERS, "gather": "int8"}),
            ("gathers", {"stage": "3"}, _GATHERS),
            ("gathers in the step", {"stage": "2", "overlap": "no"}, _GATHERS),
            ("gathers from the host", {"stage": "3", "parameters": "host"}, _GATHERS),
            ("gathers after updates on the host", {"stage": "2", "state": "host"}, _GATHERS),
        )
    },
    "many messages": partial(of_matrix, {"pp": "2"}, more={"gradient_accumulation_steps": 8, **_GPIPE}),
    "an error in a pipeline": partial(
        of_matrix, {"pp": "2"}, between="fail", more={"gradient_accumulation_steps": 6, **_GPIPE}
    ),
    "a script changes parameters, tp": partial(of_matrix, {"stage": "3", "tp": "2"}, between="change"),
    "a script changes parameters, ep": partial(of_matrix, {"stage": "3", "experts": "ep 2"}, ranks=4, between="change"),
}
