"""The real engine on a simulated accelerator: its streams wait for each other where they must, and faults are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.checkpoint.blocks import Snapshot
from shoal.comm.side_stream import CopyDone
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.engine.parts.stream_check import CheckStreams
from shoal.errors import CommError, ShoalError, StreamError, UsageError
from shoal.memory.stream_copies import StreamCopies
from shoal.mesh import Mesh
from shoal.parallel import activations
from shoal.sharding.offloaded_gradient import ShardBuffers
from shoal.sharding.unit import Unit
from shoal.simulation.check import StreamCheck
from shoal.streams import simulation
from tests.helpers.backward_threads import run_in_threads
from tests.helpers.models import Plain
from tests.helpers.training import adamw, are_bit_equal, batch, config, run_steps, start, train_ranks

MATRIX = [
    (stage, tier, steps) for stage in range(4) for tier in ("none", "cpu") for steps in (1, 2) if stage or tier != "cpu"
]


def settings(stage: int, tier: str = "none", accumulation: int = 1, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if tier != "none":
        zero["offload_optimizer"] = {"device": tier}
        if stage == 3:
            zero["offload_param"] = {"device": tier}
    zero.update(more.pop("zero_optimization", {}))
    return config(stage, zero_optimization=zero, gradient_accumulation_steps=accumulation, **more)


def checked(
    made: dict[str, Any],
    between: Callable[[shoal.Engine, int], Any] = lambda engine, step: None,
    *,
    steps: int = 2,
    num_blocks: int = 2,
) -> list[StreamCheck]:
    """Train on two ranks that are threads. Returns: what each rank's check found."""

    def run() -> StreamCheck:
        with shoal.check_streams(raises=False) as check:
            engine = start(lambda: Plain(num_blocks), made, adamw)
            for step in range(steps):
                run_steps(engine, 1, first=step * engine.gradient_accumulation_steps())
                between(engine, step)
            engine.destroy()
        return check

    return run_ranks(2, run)


def reports(checks: list[StreamCheck]) -> str:
    return "\n\n".join(str(finding) for check in checks for finding in check.findings)


@pytest.mark.parametrize(("stage", "tier", "accumulation"), MATRIX)
def test_the_streams_of_every_stage_wait_where_they_must(stage: int, tier: str, accumulation: int) -> None:
    found = checked(settings(stage, tier, accumulation))
    assert reports(found) == ""
    assert min(check.num_operations for check in found) > 250


def test_a_backward_pass_that_tests_run_in_a_thread_of_its_own_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_threads(monkeypatch)
    found = checked(settings(1))
    assert reports(found) == ""
    assert min(check.num_operations for check in found) > 250


@pytest.mark.parametrize(
    "more",
    [
        {"zero_optimization": {"overlap_comm": False}},
        {"zero_optimization": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}},
        {"bf16": {"enabled": True}, "gradient_clipping": 0.1},
        {"fp16": {"enabled": True}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "overlap_param_gather": True}},
        {"offload_activation": {"device": "cpu"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_streams_of_other_options_wait_too(
    stage: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "LEAST_NBYTES", 0)
    assert reports(checked(settings(stage, accumulation=2, **more))) == ""


@pytest.mark.parametrize("every", [1, 2])
def test_blocks_whose_activations_are_kept_recomputed_and_offloaded_wait_for_each_other(
    every: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(activations, "LEAST_NBYTES", 0)
    caplog.set_level("INFO")
    made = settings(3, activation_checkpointing={"memory_budget": 12_000, "offload_every": every})
    assert reports(checked(made, steps=4, num_blocks=8)) == ""
    assert "offloaded" in caplog.text and ", 0 offloaded" not in caplog.text


def test_the_copies_of_gradients_of_a_skipped_step_are_waited_for() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
    assert reports(checked(settings(1, "cpu", fp16=fp16), steps=3)) == ""


def test_the_streams_of_an_evaluation_between_steps_wait_too() -> None:
    def evaluate(engine: shoal.Engine, step: int) -> None:
        engine.eval()
        with torch.no_grad():
            engine(*batch(step, engine.world.rank, 2))
        engine.train()

    assert reports(checked(settings(3, "cpu"), evaluate)) == ""


def test_a_parameter_that_the_script_changes_between_steps_is_gathered_as_without_the_check() -> None:
    def change(engine: shoal.Engine, step: int) -> None:
        with torch.no_grad():
            next(engine.module.parameters()).mul_(0.5)
        assert not next(engine.module.parameters()).isnan().any()

    assert reports(checked(settings(1, zero_optimization={"overlap_param_gather": True}), change)) == ""


def test_a_disk_is_read_and_written_where_it_is_waited_for(tmp_path: Path) -> None:
    on_disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": on_disk, "offload_param": on_disk}
    assert reports(checked(settings(3, zero_optimization=zero))) == ""


def test_the_simulation_changes_no_values() -> None:
    made = settings(3, "cpu", 2)

    def run() -> dict[str, torch.Tensor]:
        with shoal.check_streams():
            engine = start(Plain, made, adamw)
            run_steps(engine, 3)
            model = engine.module
            engine.destroy()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    plain = train_ranks(2, Plain, {**made, "zero_optimization": {**made["zero_optimization"]}}, adamw)[0].parameters
    assert all(are_bit_equal(found, plain) for found in run_ranks(2, run))


# faults, each planted in the library


@contextmanager
def queued_without_a_wait(copies: StreamCopies) -> Iterator[CopyDone]:
    event = copies._streams.event()
    with copies._stream:
        yield CopyDone(event, copies._streams)
        event.record(copies._stream)


@contextmanager
def queued_on_the_compute_stream(copies: StreamCopies) -> Iterator[CopyDone]:
    event = copies._streams.event()
    event.record(copies._stream)  # before the copy, which the current stream carries out
    yield CopyDone(event, copies._streams)


def test_a_prefetch_that_does_not_wait_for_its_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamCopies, "queued", queued_without_a_wait)
    found = reports(checked(settings(3, "cpu")))
    assert "all_gather 'blocks.1' on the stream of collectives on 'dp' writes it before allocation on" in found
    assert "the parameters of unit 'blocks.1', bytes 0 to" in found
    assert "missing: the stream of collectives on 'dp' must wait for the compute stream, before the second" in found


def test_a_copy_to_the_host_on_the_compute_stream_without_a_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamCopies, "queued", queued_on_the_compute_stream)
    found = reports(checked(settings(2, "cpu", 2)))
    assert "a part of the gradient of unit 'blocks.1' on the host" in found
    assert "must wait for the compute stream, before the second operation" in found


def test_a_buffer_that_is_reused_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = ShardBuffers.acquire

    def without_waiting(buffers: ShardBuffers, numel: int, dtype: torch.dtype) -> torch.Tensor:
        for free in buffers._free.values():
            free.extend((flat, CopyDone()) for flat, _ in [free.popleft() for _ in range(len(free))])
        return acquire(buffers, numel, dtype)

    monkeypatch.setattr(ShardBuffers, "acquire", without_waiting)
    found = reports(checked(settings(2, "cpu", 2)))
    assert "must wait for copy stream 0, before the second operation" in found


def test_a_gradient_that_the_host_reads_before_it_has_arrived_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyDone, "block", lambda copied: None)
    found = reports(checked(settings(2, "cpu")))
    assert (
        "on the host's thread shoal-cpu-optimizer_0 reads it before aten.copy_.default on copy stream 0 writes it"
        in found
    )


def test_a_collective_that_another_stream_waits_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = Unit.gather

    def elsewhere(unit: Unit, **keys: Any) -> None:
        unit.start_gather(**keys)
        accelerator = simulation()
        assert accelerator is not None
        with accelerator.stream():
            gather(unit, **keys)

    monkeypatch.setattr(Unit, "gather", elsewhere)
    found = reports(checked(settings(3)))
    assert (
        "on the compute stream reads it before all_gather 'blocks.0' on the stream of collectives on 'dp' wr" in found
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_an_asynchronous_save_that_the_next_step_does_not_wait_for_is_found(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(engine: shoal.Engine, step: int) -> None:
        engine.save_checkpoint(tmp_path / folder, tag=str(step))

    made = settings(stage, bf16={"enabled": True}, checkpoint={"async_save": True})
    folder = "right"
    assert reports(checked(made, save)) == ""
    folder = "wrong"
    monkeypatch.setattr(Snapshot, "wait", lambda snapshot: None)
    found = reports(checked(made, save))
    assert "on the compute stream writes it before aten.copy_.default on copy stream" in found


def test_saved_tensors_that_are_freed_before_they_are_copied_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_NBYTES", 0)
    monkeypatch.setattr(CopyDone, "wait", lambda copied: None)
    found = reports(checked(settings(1, offload_activation={"device": "cpu"})))
    assert "the memory was freed (the last tensor of it is gone), and the compute stream allocates" in found
    assert "or record_stream." in found


def test_ranks_that_issue_different_collectives_are_told_apart_as_without_the_check() -> None:
    def run() -> None:
        world = current_world()
        with shoal.check_streams():
            comm = world.communicator("dp", Mesh.of(world.size))
            comm.all_reduce(torch.ones(4), label=f"of rank {world.rank}").wait()

    with pytest.raises(CommError, match="disagree about call 0") as raised:
        run_ranks(2, run)
    assert raised.value.code == "comm-mismatch"


def test_a_fault_is_raised_at_the_end_of_the_block_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyDone, "block", lambda copied: None)
    raised: list[ShoalError] = []

    def run() -> None:
        try:
            with shoal.check_streams():
                engine = start(Plain, settings(2, "cpu"), adamw)
                run_steps(engine, 1)
                engine.destroy()
        except StreamError as error:
            raised.append(error)

    run_ranks(2, run)
    assert [error.code for error in raised] == ["stream-race"] * 2
    assert "test_stream_check" in str(raised[0]) or "cpu_optimizer.py" in str(raised[0])


def test_the_config_key_checks_from_initialize_to_destroy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that lie there before, and under ``zero.Init``, are checked from then on."""

    def run() -> int:
        made = settings(3, "cpu", debug={"check_streams": True})
        engine = start(Plain, made, adamw)
        check = engine.part(CheckStreams)
        assert check is not None
        run_steps(engine, 2)
        engine.destroy()
        assert simulation() is None
        return check.num_operations

    assert min(run_ranks(2, run)) > 250
    monkeypatch.setattr(CopyDone, "block", lambda copied: None)
    with pytest.raises(StreamError) as raised:
        run_ranks(2, run)
    assert raised.value.code == "stream-race"


def test_the_config_key_leaves_nothing_behind_when_initialize_fails_and_needs_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = settings(2, debug={"check_streams": True})
    with pytest.raises(ShoalError, match="Muon9"):
        shoal.initialize(model=Plain(), config={**made, "optimizer": {"type": "Muon9"}})
    assert simulation() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES") as raised:
        shoal.initialize(model=Plain(), config=made)
    assert raised.value.code == "stream-check"


def test_ranks_that_wait_for_each_other_over_two_communicators_are_found_at_once() -> None:
    def run() -> None:
        world = current_world()
        with shoal.check_streams():
            one, other = (world.communicator(axis, Mesh.of(world.size)) for axis in ("dp", "loss"))
            first, second = (one, other) if world.rank == 0 else (other, one)
            first.all_reduce(torch.ones(4), label=f"first of {world.rank}").wait()
            second.all_reduce(torch.ones(4), label=f"second of {world.rank}").wait()

    with pytest.raises(CommError, match="deadlock, each waiting for the next") as raised:
        run_ranks(2, run)
    assert raised.value.code == "comm-circle"
    text = str(raised.value)
    assert "rank 0 waits for all_reduce 'first of 0'" in text and "rank 1 waits for all_reduce 'first of 1'" in text
    assert text.count("test_stream_check.py") >= 2


@pytest.mark.parametrize("is_alternating", [False, True])
def test_messages_that_only_buffers_let_pass_are_found(is_alternating: bool) -> None:
    """NCCL does the messages of a pair one after the other, and a send ends with its receive."""

    def run() -> list[str]:
        world = current_world()
        with shoal.check_streams(raises=False) as check:
            comm, peer = world.communicator("dp", Mesh.of(world.size)), 1 - world.rank
            mine, theirs = torch.ones(4), torch.empty(4)
            if world.rank == 0 or not is_alternating:
                sent = comm.send(mine, peer, label=f"from {world.rank}")
                received = comm.recv(theirs, peer, label=f"from {peer}")
            else:
                received = comm.recv(theirs, peer, label=f"from {peer}")
                sent = comm.send(mine, peer, label=f"from {world.rank}")
            received.wait()
            sent.drain()
            comm.barrier(label="end")
        return [str(finding) for finding in check.findings]

    found = [text for texts in run_ranks(2, run) for text in texts]
    assert bool(found) == (not is_alternating)
    assert all("collectives deadlock, each waiting for the next, which hangs on NCCL" in text for text in found)
    if found:
        assert "from rank 1 to rank 0" in found[0] and found[0].count("test_stream_check.py") == 4
