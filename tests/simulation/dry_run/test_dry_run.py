"""A dry run: times of a rank's steps on a simulated GPU, from the real engine without values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.compiler import uncompiled
from shoal.errors import CommError, ConfigError, ModelError, OutOfMemoryError, UsageError
from shoal.models import GPT, GPTConfig
from shoal.parallel.expert.stacked import ExpertFeedForward
from shoal.simulation.clocks import SimulatedStream
from shoal.simulation.dry_run import DryRun
from shoal.simulation.machines import GpuNode, machine_of
from shoal.simulation.memory import CachingAllocator, MemoryBlock, MemoryPeak, kept_by_graphs
from shoal.simulation.times import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    DISK,
    HOST,
    KINDS,
    UPDATE,
    Cost,
    StreamTimes,
    directions,
    exposed,
)
from shoal.streams import simulation
from tests.helpers.dry_runs import take_steps
from tests.helpers.training import config
from tests.unit.running.test_fake_step import Tower

H100 = machine_of("h100")
BF16 = torch.bfloat16
MESSAGES = (
    ("send", (0, 8)),
    ("recv", (0, 8)),
    ("all_reduce", (0, 8)),
    ("recv", (0, 8)),
    ("send", (0, 8)),
    ("send", (0, 1)),
)
ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}


def stream(name: str) -> SimulatedStream:
    return SimulatedStream(name, lambda: None, lambda stream: None, lambda stream: None)


def third_step(
    num_ranks: int,
    tokens: int,
    machine: GpuNode = H100,
    make: Callable[[], torch.nn.Module] = Tower,
    ledger: dict[str, int] | None = None,
    max_ctas: dict[str, int] | None = None,
    **zero: Any,
) -> DryRun:
    """Three steps of a model. ``ledger``: gets the engine's bytes by kind."""
    parallel = {"max_ctas": max_ctas or {}}
    with shoal.dry_run(num_ranks, machine=machine) as run:
        model = make()
        made = config(zero["stage"], zero_optimization=zero, bf16={"enabled": True}, parallel=parallel)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine = shoal.initialize(model=model, optimizer=optimizer, config=made)[0]
        batch = torch.zeros(2, tokens, dtype=torch.long)
        take_steps(run, engine, batch, 3)
        if ledger is not None:
            ledger.update(engine.memory_report().by_kind())
        engine.destroy()
    return run


# the times


def test_an_operation_starts_after_what_its_stream_has_waited_for() -> None:
    times, compute, copies = StreamTimes(H100, 1), stream("compute"), stream("copies")
    times.add(compute, "first", Cost(COMPUTE, 2.0))
    times.add(copies, "beside", Cost(COPY, 3.0))
    compute.join(copies.clock)
    times.add(compute, "second", Cost(COMPUTE, 1.0))
    assert [(operation.start, operation.end) for operation in times.operations] == [(0, 2), (0, 3), (3, 4)]


def test_a_wait_is_given_to_what_was_waited_for_and_what_that_waited_for() -> None:
    times, compute, copies, collectives = StreamTimes(H100, 1), stream("a"), stream("b"), stream("c")
    times.add(compute, "first", Cost(COMPUTE, 1.0))
    times.add(copies, "copy", Cost(COPY, 3.0))
    collectives.join(copies.clock)
    times.add(collectives, "gather", Cost(COMMUNICATION, 4.0))
    compute.join(collectives.clock)
    times.add(compute, "second", Cost(COMPUTE, 1.0))
    found = exposed(times.operations, compute, 0.0, 8.0)
    assert found == {**dict.fromkeys(KINDS, 0.0), COMPUTE: 2.0, COPY: 2.0, COMMUNICATION: 4.0}


def test_two_copies_share_the_bus_and_one_that_comes_later_uses_a_gap_before() -> None:
    times, one, other, third = StreamTimes(H100, 1), stream("a"), stream("b"), stream("c")
    times.add(one, "compute", Cost(COMPUTE, 2.0))
    times.add(one, "copy", Cost(COPY, 2.0, ("bus",)))
    times.add(other, "beside", Cost(COPY, 2.0, ("bus",)))
    times.add(third, "behind", Cost(COPY, 1.0, ("bus",)))
    assert [operation.start for operation in times.operations] == [0, 2, 0, 4]


def test_a_rank_sends_and_receives_at_the_same_time_and_a_collective_waits_for_both_directions() -> None:
    times = StreamTimes(H100, 16)
    costs = [replace(times.collective(op, 1, ranks), seconds=2.0) for op, ranks in MESSAGES]
    for number, cost in enumerate(costs):
        times.add(stream(str(number)), "", cost)
    assert [operation.start for operation in times.operations] == [0, 0, 2, 4, 4, 0]


def test_a_kernel_is_slowed_once_while_a_message_is_sent_and_one_received() -> None:
    times, kernels = StreamTimes(replace(H100, overlap=1.5), 16), stream("compute")
    for op, seconds in (("send", 2.0), ("recv", 3.0)):
        times.add(stream(op), op, replace(times.collective(op, 1, (0, 8)), seconds=seconds))
    times.add(kernels, "", Cost(COMPUTE, 4.0))
    assert times.operations[-1].end == 5.5


# memory


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_at_the_peak_is_that_of_the_ledger_and_of_what_backward_needs(stage: int) -> None:
    ledger: dict[str, int] = {}
    peak = third_step(8, 4096, ledger=ledger, stage=stage).steps[-1].memory
    assert sum(peak.by_kind.values()) == peak.allocated <= peak.reserved
    for kind in ("parameter", "master", "optimizer state"):
        assert peak.by_kind[kind] == ledger[kind], kind
    assert peak.by_kind.get("gradient", 0) <= ledger["gradient"]
    # The logits and their gradient in two formats are most of it.
    logits = 2 * 4096 * 1024
    assert 2 * 4 * logits < peak.by_kind["activation"] < 5 * 4 * logits
    assert "softmax" in peak.operation
    assert "engine.py" in peak.place


class Wide(Tower):
    """Units of more than 10 MiB, each a segment of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(4096, 2560), torch.nn.Linear(2560, 4096, bias=False)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(2560, 2560, bias=False) for _ in range(6)])


def test_registered_buffers_take_turns_in_the_same_few_segments_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[MemoryBlock] = []
    allocate = CachingAllocator.allocate

    def noted(self: CachingAllocator, nbytes: int, stream: object, apart: object = None) -> MemoryBlock:
        block = allocate(self, nbytes, stream, apart)
        if apart is not None:
            found.append(block)
        return block

    def train(zero: dict[str, Any]) -> tuple[list[list[int]], dict[str, int], MemoryPeak]:
        steps: list[list[int]] = []
        with shoal.dry_run(8, machine=H100) as run:
            made = config(3, zero_optimization=zero, bf16={"enabled": True}, optimizer=ADAM)
            engine = shoal.initialize(model=Wide(), config=made)[0]
            for _ in range(3):
                before = len(found)
                take_steps(run, engine, torch.zeros(1, 512, dtype=torch.long), 1)
                steps.append([block.address for block in found[before:]])
            ledger = engine.memory_report().by_kind()
            engine.destroy()
        assert run.steps[-1].memory is not None
        return steps, ledger, run.steps[-1].memory

    monkeypatch.setattr(CachingAllocator, "allocate", noted)
    _, plain_ledger, plain = train({"stage3_prefetch_bucket_size": 1})
    assert not found and plain_ledger["registered, free"] == 0
    (_, second, third), ledger, peak = train({"stage3_prefetch_bucket_size": 1, "nccl_ub": True})
    assert second == third and len(third) == 15
    segments = {block.address: block.nbytes for block in found}
    gathered = {address: segments.pop(address) for address in set(third)}  # the others are staging buffers
    assert sorted(gathered.values()) == [14 * 2**20, *[20 * 2**20] * 3]
    assert ledger == {**plain_ledger, "registered, free": sum(gathered.values())}
    assert {**peak.by_kind, "rounding": 0} == {**plain.by_kind, "rounding": 0}
    assert plain.reserved < peak.reserved <= plain.reserved + sum(gathered.values()) + sum(segments.values())


def test_activations_grow_with_the_tokens_and_a_small_device_runs_out() -> None:
    small, large = (third_step(8, tokens, stage=3).steps[-1].memory for tokens in (8192, 32_768))
    assert large.by_kind["activation"] == pytest.approx(4 * small.by_kind["activation"], rel=0.01)
    assert large.by_kind["parameter"] == small.by_kind["parameter"]
    assert not large.is_beyond
    node = replace(H100, gpu_nbytes=small.device_nbytes)
    for tokens, is_beyond in ((8192, False), (32_768, True)):
        run = third_step(8, tokens, machine=node, stage=3)
        assert run.steps[-1].memory.is_beyond is is_beyond
        assert ("OUT OF MEMORY" in run.report()) is is_beyond


def test_what_a_chain_of_layers_keeps_for_backward_is_counted_to_the_byte() -> None:
    rows, width, depth = 8192, 256, 6
    with shoal.dry_run(1) as run:
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(depth)))
        made = config(0, units={"names": ["*"]})
        engine = shoal.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=made)[0]
        batch = torch.zeros(rows, width)
        for _ in range(2):
            with run.step():
                engine.backward(engine(batch).sum())
                engine.step()
        engine.destroy()
    peak = run.steps[-1].memory
    # The batch, each later layer's input, the gradient of the last one's; its weight's gradient; the loss and its own.
    assert peak.by_kind["activation"] == (depth + 1) * rows * width * 4 + width * width * 4 + 2 * 4
    assert peak.by_kind["gradient"] == width * width * 4
    assert peak.operation == "aten.mm.default"


# the engine


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_takes_the_time_of_its_products_and_waits_add_up(stage: int) -> None:
    step = third_step(8, 65_536, stage=stage).steps[-1]
    assert sum(step.by_kind.values()) == pytest.approx(step.seconds)
    products = 6 * 2 * 65_536 * (3 * 256 * 256 + 256 * 1024) / H100.flops(BF16)
    assert products < step.by_kind[COMPUTE] < 40 * products  # small widths: most of it is the memory's time
    assert step.busy[COMMUNICATION] > 0
    received = sum(nbytes for op, nbytes in step.received.items() if op != "exchange")
    assert received == {0: 4, 1: 4, 2: 4, 3: 6}[stage] * 720_896 * 7 // 8 - (stage == 3) * 2 * 262_144 * 7 // 8


def test_a_small_batch_waits_for_the_host_and_a_large_one_does_not() -> None:
    small, large = (third_step(8, tokens, stage=2).steps[-1] for tokens in (128, 262_144))
    assert small.share(HOST) > 0.25
    assert large.share(HOST) < 0.05
    assert large.host_seconds == pytest.approx(small.host_seconds)


def test_an_offloaded_optimizer_updates_on_the_host_and_copies_both_ways() -> None:
    device, host = (
        third_step(1, 128, stage=2, **more).steps[-1] for more in ({}, {"offload_optimizer": {"device": "cpu"}})
    )
    assert device.busy[UPDATE] == 0.0
    nbytes = 720_896 * (2 + 2 * (3 * 4 + 2))  # gradient read, main parameters, two states and parameters written
    assert host.busy[UPDATE] == pytest.approx(nbytes / H100.host_bandwidth, rel=0.01)
    assert host.busy[COPY] > 2 * 720_896 * 2 / H100.bus_bandwidth


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_on_the_host_take_device_memory_of_a_few_blocks_however_many_there_are(
    num_ranks: int, stage: int
) -> None:
    found = []
    for num_layers in (4, 8):
        shape = GPTConfig(vocab_size=512, sequence_length=64, num_layers=num_layers, hidden_size=256, num_heads=4)
        settings = config(stage, bf16={"enabled": True}, gradient_accumulation_steps=2, optimizer=ADAM)
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        with shoal.dry_run(num_ranks) as run:
            engine, *_ = shoal.initialize(model=GPT(shape), config=settings)
            tokens = torch.zeros(1, 64, dtype=torch.long)
            take_steps(run, engine, tokens, 2, num_micro=2)
            engine.destroy()
        found.append(run.steps[-1].memory.by_kind["gradient"])
    assert found[0] == found[1] < 4 * 12 * 256**2 * 4  # of four blocks, in fp32


@pytest.mark.parametrize(("stage", "num_copies"), [(2, 16), (3, 24)], ids=["whole", "sharded"])
def test_parameters_are_copied_beside_the_forward_before_though_their_update_is_pending(
    stage: int, num_copies: int
) -> None:
    """Else the copy of each unit waits for the forward before it, and the next forward for the copy."""
    tier = {"device": "cpu"}
    zero = {"offload_optimizer": tier, **({"offload_param": tier} if stage == 3 else {"overlap_param_gather": True})}
    made = config(stage, zero_optimization=zero, bf16={"enabled": True}, units={"names": ["*"]})
    with shoal.dry_run(1) as run:
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(8)))
        engine = shoal.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=made)[0]
        for _ in range(3):
            with run.step():
                engine.backward(engine(torch.zeros(32_768, 4096, dtype=BF16)).float().square().mean())
                engine.step()
        engine.destroy()
    last = run.steps[-1]
    one_copy = 2 * 4096**2 / H100.bus_bandwidth
    assert last.busy[COPY] > (num_copies - 2) * one_copy  # forward, the gradients; and backward gathers what is sharded
    assert last.by_kind[COPY] < 2 * one_copy  # the first parameters, and the last gradient
    assert last.by_kind[UPDATE] < 0.03 * last.seconds  # the first unit's


def test_a_trace_has_a_row_for_each_stream(tmp_path: Path) -> None:
    run = third_step(8, 128, stage=3)
    events = json.loads(run.write_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"the host", "the compute stream", "the stream of collectives on 'dp'"} <= rows
    assert any(event["name"].startswith("all_gather 'blocks.1'") and event["dur"] > 0 for event in events)
    assert "waiting for communication" in run.report()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_sum_over_replicas_starts_when_the_sum_inside_of_the_shards_ends(stage: int, tmp_path: Path) -> None:
    with shoal.dry_run(64, machine=H100) as run:
        parallel = {"dp_shard": 8, "dp_replicate": 8}
        made = config(stage, parallel=parallel, bf16={"enabled": True}, optimizer=ADAM)
        shape = GPTConfig(vocab_size=512, sequence_length=512, num_layers=3, hidden_size=1024, num_heads=8)
        engine = shoal.initialize(model=GPT(shape), config=made)[0]
        batch = torch.zeros(2, 512, dtype=torch.long)
        take_steps(run, engine, batch, 2)
        engine.destroy()
    run.write_trace(tmp_path / "trace.json")
    begins: dict[str, list[float]] = {}
    ends: dict[str, list[float]] = {}
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        verb = event["name"].partition(" ")[0]
        if event["ph"] == "X" and verb in ("reduce_scatter", "all_reduce"):
            begins.setdefault(verb, []).append(event["ts"])
            ends.setdefault(verb, []).append(event["ts"] + event["dur"])
    assert len(begins["all_reduce"]) == len(begins["reduce_scatter"]) >= 2 * 4
    is_free = [0.0, *ends["all_reduce"][:-1]]  # the stream of the sums over replicas
    expected = [max(pair) for pair in zip(ends["reduce_scatter"], is_free, strict=True)]
    assert begins["all_reduce"] == pytest.approx(expected, abs=30)  # microseconds in which the host issues a small one


def test_host_memory_is_that_of_the_machine() -> None:
    made = config(2, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    with shoal.dry_run(2, machine=replace(H100, host_nbytes=1 << 20)):
        model = Tower()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(OutOfMemoryError, match="host memory is too small"):
            shoal.initialize(model=model, optimizer=optimizer, config=made)


def test_state_on_a_disk_is_read_and_written_in_the_time_of_the_disks(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    run = third_step(1, 128, stage=2, offload_optimizer=disk)
    nbytes = 720_896 * 2 * 3 * 4  # main parameters and two states: read, and written
    assert run.steps[-1].busy[DISK] == pytest.approx(nbytes / H100.disk_bandwidth, rel=0.01)
    assert 0 < run.steps[-1].by_kind[DISK] <= run.steps[-1].busy[DISK]
    assert not list(tmp_path.iterdir())


def test_parameters_on_a_disk_are_read_for_forward_and_backward(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    on_host, on_disk = (
        third_step(1, 128, stage=3, offload_optimizer={"device": "cpu"}, offload_param=more).steps[-1]
        for more in ({"device": "cpu"}, disk)
    )
    assert on_host.busy[DISK] == 0.0
    assert on_disk.busy[DISK] > 2 * 720_896 * 2 / H100.disk_bandwidth  # read once at least, and written
    assert on_disk.seconds > on_host.seconds


def test_one_rank_of_pipeline_stages_is_refused() -> None:
    made = config(1, pipeline={"stages": 2}, optimizer=ADAM)
    with shoal.dry_run(2):
        model = Tower()
        with pytest.raises(UsageError, match="dry run of one rank cannot run a model in pipeline stages"):
            shoal.initialize(model=model, config=made)


def test_what_is_compiled_has_the_times_and_bytes_of_uncompiled_experts() -> None:
    """By the config, or by the script: in place, as a module of the compiler's, and as a whole by the engine."""
    shape = GPTConfig(vocab_size=256, sequence_length=64, num_layers=2, hidden_size=64, num_heads=2, num_experts=8)

    def measured(how: str) -> tuple[Any, ...]:
        with shoal.dry_run(4, machine="h100") as run:
            model = GPT(shape, experts=ExpertFeedForward)
            if how == "script":
                model.blocks[0].compile(backend="eager")
                model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
            more = {"compile": {"enabled": True}} if how == "section" else {}
            made = config(3, parallel={"ep": 2}, optimizer=ADAM, bf16={"enabled": True}, **more)
            engine = shoal.initialize(model=model, config=made)[0]
            if how == "script":
                engine.compile(backend="eager")
            take_steps(run, engine, torch.zeros(2, 64, dtype=torch.long), 3)
            engine.destroy()
        last = run.steps[-1]
        return last.seconds, last.by_kind, last.busy, last.received, last.memory

    assert measured("section") == measured("script") == measured("")


def test_after_the_last_simulation_of_any_thread_the_compiler_compiles_again() -> None:
    def is_compiled() -> bool:
        torch._dynamo.reset()
        called: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            called.append(graph)
            return graph

        assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
        return bool(called)

    first, second = uncompiled(), uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not is_compiled()
    second.__exit__(None, None, None)
    assert is_compiled()


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_get_equally_many_tokens(stage: int) -> None:
    shape = GPTConfig(vocab_size=256, sequence_length=64, num_layers=2, hidden_size=64, num_heads=2, num_experts=8)
    with shoal.dry_run(4) as run:
        model = GPT(shape, experts=ExpertFeedForward)
        engine = shoal.initialize(model=model, config=config(stage, parallel={"ep": 2}, optimizer=ADAM))[0]
        batch = torch.zeros(2, 64, dtype=torch.long)
        take_steps(run, engine, batch, 2)
        engine.destroy()
    sent = 2 * 64 * shape.experts_per_token * 64 * 4 // 2  # half of the choices are of the other rank's experts
    assert run.steps[-1].received["all_to_all"] == 2 * 4 * sent  # of two layers: there and back, twice


@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": {"modules": ["Block"]}}], ids=str)
@pytest.mark.parametrize("ep", [1, 2])
def test_the_host_waits_for_the_rows_of_each_layer_once(ep: int, more: dict[str, Any]) -> None:
    shape = GPTConfig(vocab_size=256, sequence_length=64, num_layers=2, hidden_size=64, num_heads=2, num_experts=8)
    with shoal.dry_run(2, machine="h100") as run:
        made = config(2, parallel={"ep": ep}, optimizer=ADAM, **more)
        engine = shoal.initialize(model=GPT(shape, experts=ExpertFeedForward), config=made)[0]
        take_steps(run, engine, torch.zeros(2, 64, dtype=torch.long), 1)
        accelerator: Any = simulation()
        found = sum(number for line, number in accelerator.host_reads.items() if "route.py" in line)
        engine.destroy()
    assert found == (shape.num_layers if ep > 1 else 0)  # one rank need not know them


def test_experts_launch_as_many_kernels_for_many_tokens_as_for_few(tmp_path: Path) -> None:
    """A CPU gathers and sums the rows of tokens block by block."""
    shape = GPTConfig(vocab_size=256, sequence_length=4096, num_layers=1, hidden_size=256, num_heads=2, num_experts=8)
    kernels = []
    for tokens in (64, 4096):
        with shoal.dry_run(4) as run:
            model = GPT(shape, experts=ExpertFeedForward)
            engine = shoal.initialize(model=model, config=config(1, parallel={"ep": 2}, optimizer=ADAM))[0]
            batch = torch.zeros(1, tokens, dtype=torch.long)
            take_steps(run, engine, batch, 1)
            engine.destroy()
        run.write_trace(path := tmp_path / f"{tokens}.json")
        events = json.loads(path.read_text())["traceEvents"]
        kernels.append(sum("index_select" in event["name"] for event in events))
    assert kernels[0] == kernels[1] > 0


def test_state_that_is_there_before_the_first_step_is_optimizer_state() -> None:
    with shoal.dry_run(4) as run:
        settings = {**config(3), "optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}}
        engine, *_ = shoal.initialize(model=Tower(), config=settings)
        take_steps(run, engine, torch.zeros(2, 8, dtype=torch.long), 2)
        engine.destroy()
    first, second = (step.memory.by_kind for step in run.steps)
    assert first["optimizer state"] == first["parameter"] == second["optimizer state"]


def test_what_reports_on_a_run_writes_nothing_of_a_dry_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its losses have no values, its times are those of this machine, and the files are those of the real run."""
    caplog.set_level("INFO")
    reports: dict[str, Any] = {
        **{name: {"enabled": True, "output_path": f"{tmp_path}/{name}"} for name in ("csv_monitor", "tensorboard")},
        "goodput": {"file": f"{tmp_path}/goodput.jsonl", "rank_times_every": 1},
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "comms_logger": {"enabled": True, "verbose": True},
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "steps_per_print": 1,
        "debug": {"replica_check_steps": 1},
    }
    with shoal.dry_run(4) as run:
        settings = {**config(3), **reports, "optimizer": ADAM}
        engine, *_ = shoal.initialize(model=Tower(), config=settings)
        take_steps(run, engine, torch.zeros(2, 8, dtype=torch.long), 3)
        engine.destroy()
    assert list(tmp_path.iterdir()) == []
    assert "step 1" not in caplog.text
    assert "Gbit/s" not in caplog.text
    assert capfd.readouterr().out == ""
    assert run.steps[-1].received["exchange"] > 0  # of the check of replicas, which runs


def test_bad_arguments_are_errors() -> None:
    with pytest.raises(UsageError, match="no figures of a machine 'h9000'"), shoal.dry_run(2, machine="h9000"):
        pass
    with shoal.dry_run(2), pytest.raises(UsageError, match="simulated one already"), shoal.dry_run(2):
        pass


@pytest.mark.parametrize("stage", [1, 3])
def test_a_tensor_parallel_rank_is_dry_run(stage: int) -> None:
    """Each layer issues two all-reduces in forward and two in backward."""
    shape = GPTConfig(vocab_size=64, sequence_length=16, num_layers=2, hidden_size=64, num_heads=4)
    with shoal.dry_run(4) as run:
        made = config(stage, parallel={"tp": 2}, bf16={"enabled": True}, optimizer=ADAM)
        engine = shoal.initialize(model=GPT(shape), config=made)[0]
        batch = torch.zeros(2, 16, dtype=torch.long)
        take_steps(run, engine, batch, 2)
        entries = [entry for entry in engine.world.recorder.last if entry.axis == "tp" and entry.op == "all_reduce"]
        engine.destroy()
    of_layers = [entry for entry in entries if entry.nbytes == 2 * 16 * 64 * 2]  # of activations
    assert len(of_layers) >= 2 * 2 * (2 + 2)


@pytest.mark.parametrize(
    ("machine", "sequences", "sections", "num_calls"),
    [
        ("h100", 2, {}, 1),  # a sum of 8 MiB
        ("h100", 4, {}, 2),
        ("h100", 16, {}, 4),
        ("h100", 16, {"tensor_parallel": {"tp_overlap_comm": False}}, 1),
        ("h100", 2, {"tensor_parallel": {"tp_overlap_comm": True}}, 4),
        ("cpu", 16, {}, 1),
    ],
)
def test_large_sums_of_split_layers_run_during_their_products(
    machine: str, sequences: int, sections: dict[str, Any], num_calls: int
) -> None:
    shape = GPTConfig(vocab_size=64, sequence_length=2048, num_layers=1, hidden_size=1024, num_heads=8)
    node = replace(H100, is_cpu=True) if machine == "cpu" else H100
    with shoal.dry_run(2, machine=node):
        made = config(1, parallel={"tp": 2}, bf16={"enabled": True}, optimizer=ADAM, **sections)
        engine = shoal.initialize(model=GPT(shape), config=made)[0]
        with engine.world.recorder.recording() as entries:
            engine(*[torch.zeros(sequences, 2048, dtype=torch.long)] * 2)
        engine.destroy()
    sums = [entry.nbytes for entry in entries if entry.label == "blocks.0.feed_forward.down out"]
    assert sums == [sequences * 2048 * 1024 * 2 // num_calls] * num_calls


@pytest.mark.parametrize(
    ("parallel", "sections", "chunk_nbytes"),
    [
        ({}, {}, 8 * 2**20),
        ({}, {"compile": {"enabled": True}}, None),
        ({}, {"wire": {"tensor": "int8"}}, None),
        ({"tp_sequence_parallel": True}, {}, 8 * 2**20),
        ({"tp_sequence_parallel": True}, {"compile": {"enabled": True}}, None),
        ({"tp_sequence_parallel": True}, {"wire": {"tensor": "int8"}}, None),
        ({"tp_sequence_parallel": True}, {"tensor_parallel": {"tp_overlap_comm": True}}, 0),
    ],
)
def test_sums_overlap_by_default_where_blocks_are_not_compiled_and_nothing_is_encoded(
    parallel: dict[str, Any], sections: dict[str, Any], chunk_nbytes: int | None
) -> None:
    shape = GPTConfig(vocab_size=64, sequence_length=16, num_layers=1, hidden_size=64, num_heads=4)
    with shoal.dry_run(2):
        made = config(1, parallel={"tp": 2, **parallel}, **sections)
        engine = shoal.initialize(model=GPT(shape), config=made)[0]
        split = engine.module.get_submodule("blocks.0.feed_forward.down").tensor_split
        engine.destroy()
    assert split.chunk_nbytes == chunk_nbytes


@pytest.mark.parametrize(("sequences", "verbs"), [(4, {"all_gather"}), (5, {"recv", "send"})])
def test_large_products_of_a_split_sequence_are_computed_by_parts(sequences: int, verbs: set[str]) -> None:
    shape = GPTConfig(vocab_size=64, sequence_length=2048, num_layers=1, hidden_size=1024, num_heads=8)
    # 2 x 4 x 1024 tokens x 1024 x 2048 operations are 17.2e9, and 8 MiB x 2400 are 20.1e9
    with shoal.dry_run(2):
        made = config(1, parallel={"tp": 2, "tp_sequence_parallel": True}, bf16={"enabled": True}, optimizer=ADAM)
        engine = shoal.initialize(model=GPT(shape), config=made)[0]
        with engine.world.recorder.recording() as entries:
            engine.backward(engine(*[torch.zeros(sequences, 2048, dtype=torch.long)] * 2))
        engine.destroy()
    up = [entry for entry in entries if entry.label == "blocks.0.feed_forward.up in"]
    assert {entry.op for entry in up} == verbs
    assert sum(entry.nbytes for entry in up) == sequences * 1024 * 1024 * 2
    assert {entry.op for entry in entries if entry.label == "blocks.0.feed_forward.up in again backward"} == {
        "all_gather"
    }


@pytest.mark.parametrize(
    ("parallel", "sections"), [({}, {}), ({"tp_sequence_parallel": True}, {"wire": {"tensor": "int8"}})]
)
def test_products_over_symmetric_memory_need_a_sequence_that_is_split_and_sent_as_it_is(
    parallel: dict[str, Any], sections: dict[str, Any]
) -> None:
    shape = GPTConfig(vocab_size=64, sequence_length=16, num_layers=1, hidden_size=64, num_heads=4)
    sections = {"tensor_parallel": {"tp_overlap_comm": "symmetric_memory"}, **sections}
    with shoal.dry_run(2), pytest.raises(ConfigError, match="symmetric_memory"):
        shoal.initialize(model=GPT(shape), config=config(1, parallel={"tp": 2, **parallel}, **sections))


@pytest.mark.parametrize(("per_node", "verbs"), [(4, {"recv", "send"}), (2, {"all_gather"})])
def test_tensor_parallel_ranks_of_several_nodes_send_one_collective_over_the_network(
    per_node: int, verbs: set[str]
) -> None:
    shape = GPTConfig(vocab_size=64, sequence_length=16, num_layers=1, hidden_size=64, num_heads=4)
    sections = {"tensor_parallel": {"tp_overlap_comm": True}}
    with shoal.dry_run(4, machine=replace(H100, gpus_per_node=per_node)) as run:
        made = config(1, parallel={"tp": 4, "tp_sequence_parallel": True}, optimizer=ADAM, **sections)
        engine = shoal.initialize(model=GPT(shape), config=made)[0]
        batch = torch.zeros(2, 16, dtype=torch.long)
        with engine.world.recorder.recording() as entries:
            take_steps(run, engine, batch, 1)
        engine.destroy()
    assert {entry.op for entry in entries if entry.label == "blocks.0.feed_forward.up in"} == verbs
    assert bool(run.steps[0].links["the network"]) == (per_node == 2)


def test_products_over_symmetric_memory_need_ranks_of_one_node() -> None:
    shape = GPTConfig(vocab_size=64, sequence_length=16, num_layers=1, hidden_size=64, num_heads=4)
    sections = {"tensor_parallel": {"tp_overlap_comm": "symmetric_memory"}}
    made = config(1, parallel={"tp": 4, "tp_sequence_parallel": True}, optimizer=ADAM, **sections)
    with shoal.dry_run(4, machine=replace(H100, gpus_per_node=4)):
        shoal.initialize(model=GPT(shape), config=made)[0].destroy()
    with (
        shoal.dry_run(4, machine=replace(H100, gpus_per_node=2)),
        pytest.raises(CommError, match="on axis 'tp': its ranks are on 2 nodes") as caught,
    ):
        shoal.initialize(model=GPT(shape), config=made)
    assert caught.value.code == "symmetric-memory"


@pytest.mark.parametrize(("per_node", "axes"), [(8, {"dp"}), (2, {"dp", "dp_shard:4x2/0", "dp_shard:4x2/1"})])
def test_gradients_are_sent_in_two_levels_over_the_nodes_of_the_machine(per_node: int, axes: set[str]) -> None:
    with shoal.dry_run(8, rank=5, machine=replace(H100, gpus_per_node=per_node)) as run:
        assert run.world.local_rank == 5 % per_node
        made = config(2, zero_optimization={"stage": 2, "zero_quantized_gradients": True}, optimizer=ADAM)
        engine = shoal.initialize(model=Tower(), config=made)[0]
        batch = torch.zeros(2, 64, dtype=torch.long)
        with engine.world.recorder.recording() as entries:
            take_steps(run, engine, batch, 1)
        engine.destroy()
    assert {entry.axis for entry in entries if entry.label.startswith("head")} == axes


def test_the_ranks_of_a_node_share_its_host_memory() -> None:
    made = config(2, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}, optimizer=ADAM)
    needed = []
    for num_ranks in (8, 16):
        node = replace(H100, host_nbytes=1 << 20)
        with shoal.dry_run(num_ranks, machine=node), pytest.raises(OutOfMemoryError, match="1048576 bytes") as caught:
            shoal.initialize(model=Tower(), config=made)
        needed.append(int(caught.value.what.split("(")[1].split(" bytes")[0]))
    assert needed[1] == needed[0] // 2  # a node has half of the shards


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize(("stage", "is_cpu"), [(2, False), (3, False), (3, True)])
def test_cuda_graphs_are_refused_where_a_gpu_refuses_them(mode: str, stage: int, is_cpu: bool) -> None:
    made = config(stage, compile={"enabled": True, "mode": mode}, optimizer=ADAM)
    with shoal.dry_run(2, machine=replace(H100, is_cpu=is_cpu)):
        if stage < 3 or is_cpu or mode == "max-autotune-no-cudagraphs":
            shoal.initialize(model=Tower(), config=made)[0].destroy()
            return
        with pytest.raises(ModelError, match=r"3 modules are compiled with CUDA graphs.*: blocks\.0, ") as caught:
            shoal.initialize(model=Tower(), config=made)
    assert caught.value.code == "model-cuda-graphs"


def test_cuda_graphs_keep_activations_from_all_else() -> None:
    def step(mode: str, room: int) -> MemoryPeak:
        lamb = {"type": "Lamb", "params": {"lr": 1e-3}}  # its step has memory of its own, when activations are gone
        made = config(0, compile={"enabled": True, "mode": mode}, optimizer=lamb)
        machine = replace(H100, gpu_nbytes=room, context_nbytes=0)
        with shoal.dry_run(1, machine=machine) as run:
            engine, *_ = shoal.initialize(model=Tower(), config=made)
            tokens = torch.zeros(4, 32, dtype=torch.int64)
            take_steps(run, engine, tokens, 2)
        return run.steps[-1].memory

    plain, graphs = step("default", 1 << 30), step("reduce-overhead", 1 << 30)
    assert plain.in_graphs == 0 < graphs.in_graphs
    assert graphs.device_nbytes - plain.device_nbytes == graphs.in_graphs
    assert "kept by CUDA graphs" in graphs.report(None)
    assert not step("default", plain.device_nbytes).is_beyond
    assert step("reduce-overhead", graphs.device_nbytes - 1).is_beyond


def test_what_graphs_keep_is_the_most_of_each_beyond_the_peak() -> None:
    moments = [{"activation": 8, "parameter": 4}, {"activation": 2, "parameter": 4, "gradient": 5}, {"parameter": 4}]
    assert kept_by_graphs(moments) == 8 + 9 - 12


class Accumulating(torch.optim.Optimizer):
    """An elementwise optimizer that Shoal does not know, whose constructor makes its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["sum"].add_(parameter.grad)
                parameter.sub_(self.state[parameter]["sum"], alpha=0.1)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, Accumulating])
def test_state_that_a_constructor_makes_for_a_model_on_the_meta_device_is_dry_run(
    kind: type[torch.optim.Optimizer], stage: int
) -> None:
    with shoal.dry_run(2) as run:
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))
        made = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        engine = shoal.initialize(model=model, optimizer=kind(model.parameters()), config=made)[0]  # type: ignore[call-arg]
        with run.step():
            engine.backward(engine(torch.zeros(4, 512)).square().mean())
            engine.step()
        states = engine.memory_report().by_kind()["optimizer state"]
        engine.destroy()
    assert states >= 3 * 512 * 512 * 4 // (1 if stage == 0 else 2)


def test_attention_takes_the_time_of_its_products() -> None:
    heads, size = 16, 64

    def seconds(length: int, *, is_causal: bool) -> float:
        with shoal.dry_run(1) as run:
            given = [torch.zeros(1, heads, length, size, dtype=BF16, requires_grad=True) for _ in range(3)]
            with run.step():
                out = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=is_causal)
                out.backward(torch.zeros_like(out))
        return run.steps[0].by_kind[COMPUTE]

    share = 2 / H100.attention_forward + 5 / H100.attention_backward
    small = 0.86 + 0.14 * 128 / size  # heads of 64
    waves = 32 * 132 / (heads * 32_768 / 128)  # 4,096 tiles of 128 queries on 132 multiprocessors
    products = waves * share * small * 2 * heads * 32_768**2 * size / H100.flops(BF16)
    assert seconds(32_768, is_causal=False) == pytest.approx(products, rel=0.02)
    assert seconds(32_768, is_causal=True) == pytest.approx(products / 2, rel=0.03)
    assert seconds(65_536, is_causal=True) == pytest.approx(2 * products, rel=0.03)


@pytest.mark.parametrize("is_made_before", [False, True])
def test_a_model_on_the_meta_device_is_dry_run_as_another(is_made_before: bool) -> None:
    def made() -> torch.nn.Module:
        with torch.device("meta"):
            return Tower()

    before = made()
    run = third_step(8, 128, make=(lambda: before) if is_made_before else made, stage=3)
    expected = third_step(8, 128, stage=3).steps[-1]
    assert run.steps[-1].memory.by_kind == expected.memory.by_kind
    assert run.steps[-1].seconds == pytest.approx(expected.seconds, rel=1e-9)  # a later begin rounds differently


def test_tensor_parallel_ranks_with_split_sequences_are_dry_run() -> None:
    hidden, length, batch, layers = 64, 32, 2, 3
    shape = GPTConfig(vocab_size=64, sequence_length=length, num_layers=layers, hidden_size=hidden, num_heads=4)
    made = config(0, bf16={"enabled": True}, parallel={"tp": 2, "tp_sequence_parallel": True})
    with shoal.dry_run(2) as run:
        tokens = torch.zeros(batch, length, dtype=torch.long)
        engine = shoal.initialize(model=GPT(shape), config={**made, "optimizer": ADAM})[0]
        take_steps(run, engine, tokens, 2)
        engine.destroy()
    # Korthikanti et al., section 4.2.2: forward and backward gather and reduce-scatter at both regions of a block, and
    # backward gathers the inputs of both once more; embedding and head have one region more each.
    activation = batch * length * hidden * 2
    assert run.steps[-1].received["reduce_scatter"] >= layers * 4 * activation // 2
    assert run.steps[-1].received["all_gather"] >= layers * 6 * activation // 2


def test_memory_outside_of_the_allocator_has_its_kinds_and_takes_capacity() -> None:
    run = third_step(8, 64, stage=3)
    peak = run.steps[-1].memory
    ring = 24 * 12 * 2**20
    assert peak.outside["CUDA context"] == H100.context_nbytes
    assert peak.outside["NCCL, dp"] % ring == 0
    assert peak.by_kind["cuBLAS"] == 32 * 2**20  # on the compute stream
    assert peak.device_nbytes == peak.reserved + sum(peak.outside.values())
    bounded = third_step(8, 64, stage=3, max_ctas={"fsdp": 8}).steps[-1].memory  # fsdp: the ranks along dp
    assert bounded.outside["NCCL, dp"] * 3 == peak.outside["NCCL, dp"]
    assert run.out_of_memory is None
    assert "NCCL, dp" in run.report()
    scarce = replace(H100, gpu_nbytes=peak.device_nbytes - 2**20)
    with_less = third_step(8, 64, scarce, stage=3)
    assert with_less.out_of_memory is not None
    assert f"first in step {with_less.out_of_memory}" in with_less.report()


def test_views_cost_nothing_and_a_lookup_reads_what_it_takes() -> None:
    with shoal.dry_run(1) as run:
        table, rows = torch.zeros(2**20, 1024, dtype=BF16), torch.zeros(16, dtype=torch.long)
        flat = torch.zeros(4, 2**20, dtype=BF16)
        for make in (
            lambda: torch.ops.aten._unsafe_view(flat, [2**22]),
            lambda: torch.nn.functional.embedding(rows, table),
        ):
            with run.step():
                make()
    views, lookup = run.steps
    assert views.by_kind[COMPUTE] == 0
    assert lookup.by_kind[COMPUTE] < 10e-6  # the whole table takes 750 us


def kernel_bytes(make: Callable[[], object], *, is_fused: bool = False) -> dict[str, int]:
    """The bytes that the kernels of ``make()`` read and write, by operator. What it returns outlives them."""
    with shoal.dry_run(1, is_fused=is_fused) as run:
        with run.step():
            made = make()
        operations = run._times.operations
        del made
    return {each.name: each.nbytes for each in operations if each.kind == COMPUTE and each.nbytes}


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_result_that_is_given_is_written_and_not_read(is_fused: bool) -> None:
    def product() -> object:
        left, right, out = (torch.empty(1024, dtype=BF16) for _ in range(3))
        return torch.mul(left, right, out=out)

    def sum_of_products() -> object:
        out, left, right = (torch.empty(1024) for _ in range(3))
        return torch.addcmul(out, left, right, out=out)

    def largest() -> object:
        values, out, places = torch.empty(8, 1024), torch.empty(8), torch.empty(8, dtype=torch.long)
        return torch.max(values, dim=1, out=(out, places))

    def changed() -> object:
        return torch.empty(1024).add_(torch.empty(1024))

    name = "fused" if is_fused else "aten.{}"
    assert kernel_bytes(product, is_fused=is_fused) == {name.format("mul.out"): 3 * 1024 * 2}
    assert kernel_bytes(sum_of_products, is_fused=is_fused) == {name.format("addcmul.out"): 4 * 1024 * 4}
    assert kernel_bytes(largest) == {"aten.max.dim_max": 8 * 1024 * 4 + 8 * (4 + 8)}
    assert kernel_bytes(changed, is_fused=is_fused) == {name.format("add_.Tensor"): 3 * 1024 * 4}


@pytest.mark.parametrize("has_weight", [True, False])
def test_an_rms_norm_is_one_kernel_forward_and_one_backward(has_weight: bool) -> None:
    rows, width = 4096, 1024
    nbytes, of_weight = rows * width * 2, width * 2 * has_weight

    def make() -> None:
        source = torch.empty(rows, width, dtype=BF16).requires_grad_()
        norm = torch.nn.RMSNorm(width, elementwise_affine=has_weight, dtype=BF16)
        norm(source).backward(torch.empty(rows, width, dtype=BF16))

    found = kernel_bytes(make)
    assert found["aten._fused_rms_norm.default"] == 2 * nbytes + of_weight + rows * 4  # the roots are in fp32
    assert found["aten._fused_rms_norm_backward.default"] == 3 * nbytes + 2 * of_weight + rows * 4
    assert not {name for name in found if "pow" in name or "rsqrt" in name or "mean" in name}


@pytest.mark.parametrize("by_grad", [True, False])
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_norm_that_backward_recomputes_is_one_kernel_too(is_reentrant: bool, by_grad: bool) -> None:
    if is_reentrant and by_grad:
        pytest.skip("torch refuses it")

    def make() -> None:
        source = torch.empty(64, 32, dtype=BF16).requires_grad_()
        norm = torch.nn.RMSNorm(32, dtype=BF16)
        normed = checkpoint(norm, source, use_reentrant=is_reentrant)
        if by_grad:
            torch.autograd.grad(normed, source, torch.empty(64, 32, dtype=BF16))
        else:
            normed.backward(torch.empty(64, 32, dtype=BF16))

    with shoal.dry_run(1) as run:
        with run.step():
            make()
        found = Counter(each.name for each in run._times.operations if each.kind == COMPUTE)
    assert found["aten._fused_rms_norm.default"] == 2
    assert not {name for name in found if "pow" in name or "rsqrt" in name or "mean" in name}


def test_a_dry_run_leaves_how_backward_is_started_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    num_passes = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        return torch.autograd.graph._engine_run_backward(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)
    with shoal.dry_run(1):
        torch.ones(1, requires_grad=True).sum().backward()
    assert num_passes == 1
    assert torch.autograd._engine_run_backward is run  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_an_rms_norm_of_other_dtypes_is_as_many_kernels_as_on_a_gpu() -> None:
    def make() -> None:
        torch.nn.RMSNorm(64)(torch.empty(8, 64, dtype=BF16))

    assert "aten.rsqrt.default" in kernel_bytes(make)


def test_fused_operators_read_and_write_what_crosses_the_kernel() -> None:
    numel = 2**26

    def seconds(*, is_fused: bool) -> float:
        with shoal.dry_run(1, is_fused=is_fused) as run:
            given = torch.zeros(numel, dtype=BF16)
            with run.step():
                out = torch.nn.functional.gelu(given + 1) * 2
                torch.mm(out.view(2**13, 2**13), out.view(2**13, 2**13))
        peaks.append(run.steps[0].memory.allocated)
        return run.steps[0].by_kind[COMPUTE]

    peaks: list[int] = []
    # Fused: one read and one write; otherwise three of each.
    saved = 4 * 2 * numel / H100.memory_bandwidth
    assert seconds(is_fused=False) - seconds(is_fused=True) == pytest.approx(saved, rel=0.05)
    eager, fused = peaks
    assert fused == 3 * 2 * numel + 32 * 2**20  # input, result, product, and cuBLAS's workspace
    assert eager >= fused


def test_a_kernel_takes_longer_while_a_collective_runs() -> None:
    times, compute, other = StreamTimes(replace(H100, overlap=1.5), 8), stream("compute"), stream("collectives")
    times.add(other, "gather", Cost(COMMUNICATION, 2.0, directions("NVLink")))
    times.add(compute, "first", Cost(COMPUTE, 3.0))
    times.add(compute, "second", Cost(COMPUTE, 1.0))
    assert [operation.end for operation in times.operations] == [2.0, 4.0, 5.0]


class OnValues(torch.nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out = super().forward(given)
        return out if out.sum() > 0 else -out  # the line that is named


def test_an_operator_that_needs_values_is_an_error_with_its_line() -> None:
    with shoal.dry_run(1) as run:
        engine = shoal.initialize(
            model=OnValues(4, 4), config={"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM}
        )[0]
        with pytest.raises(UsageError, match=r"aten\._local_scalar_dense.*cannot run in a dry run") as raised:
            with run.step():
                engine(torch.zeros(2, 4))
        line = OnValues.forward.__code__.co_firstlineno + 2
        assert f"test_dry_run.py:{line} in forward" in str(raised.value)


def test_an_operator_that_takes_flops_without_a_formula_is_named() -> None:
    with shoal.dry_run(1) as run:
        given = torch.zeros(16, 16)
        with run.step():
            torch.linalg.inv(given @ given).sin().sum()
    assert run.without_formula == ["aten.linalg_inv_ex.default"]
    assert "no formula for flops: aten.linalg_inv_ex.default" in run.report()


def test_tensor_parallel_ranks_take_a_batch_that_was_made_before_the_dry_run() -> None:
    shape = GPTConfig(vocab_size=64, sequence_length=16, num_layers=1, hidden_size=64, num_heads=4)
    batch = torch.zeros(2, 16, dtype=torch.long)
    with shoal.dry_run(2) as run:
        engine = shoal.initialize(model=GPT(shape), config=config(0, parallel={"tp": 2}, optimizer=ADAM))[0]
        take_steps(run, engine, batch, 1)
    assert run.steps[0].memory.by_kind["optimizer state"] > 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_cpu_rank_has_one_memory_that_offload_does_not_make_smaller(stage: int) -> None:
    cpu = replace(H100, is_cpu=True, context_nbytes=300 << 20, workspace_nbytes=0)
    tiers = ({}, {"offload_optimizer": {"device": "cpu"}})
    device, host = (third_step(2, 256, cpu, stage=stage, **more).steps[-1].memory for more in tiers)
    states = 2 * 4 * 720_896 // 2  # Adam's two, in fp32, of this rank's half
    assert device.by_kind["optimizer state"] == states
    assert host.by_kind["optimizer state"] == pytest.approx(states, rel=0.02)
    assert device.reserved == device.allocated
    assert device.device_nbytes == device.allocated + (300 << 20)
    assert "process" in device.report(None)


def test_parameters_that_zenflow_merges_are_copied_next_to_the_forward() -> None:
    shape = GPTConfig(vocab_size=4096, sequence_length=1024, num_layers=4, hidden_size=2048, num_heads=16)
    zero = {
        "offload_optimizer": {"device": "cpu"},
        "overlap_param_gather": True,
        "zenflow": {"update_interval": 2, "overlap_step": True},
    }
    with shoal.dry_run(1, machine=replace(H100, launch_seconds=0.0)) as run:
        made = config(2, optimizer=ADAM, bf16={"enabled": True}, zero_optimization={"stage": 2, **zero})
        engine = shoal.initialize(model=GPT(shape), config=made)[0]
        take_steps(run, engine, torch.zeros(4, 1024, dtype=torch.long), 6)
        engine.destroy()
    plain, merging = run.steps[2], run.steps[5]
    assert merging.busy[COPY] > 1.9 * plain.busy[COPY]
    assert merging.by_kind[COPY] == pytest.approx(plain.by_kind[COPY], rel=0.05)


@pytest.mark.parametrize("is_building", [True, False])
def test_a_script_converts_its_model(is_building: bool) -> None:
    """torch's own fake tensors refuse it for the first module of a kind."""
    with shoal.dry_run(2) as run:
        with run.building() if is_building else nullcontext():
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
            model = model.to(torch.bfloat16)
        assert {parameter.dtype for parameter in model.half().parameters()} == {torch.float16}
        model.to(torch.bfloat16)(torch.zeros(2, 8, dtype=torch.bfloat16)).sum().backward()
        assert model[0].weight.grad is not None and model[0].weight.grad.dtype is torch.bfloat16
