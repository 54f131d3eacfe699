"""``comms_logger``: the times of an engine's collectives, and of a script's own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat import finder
from shoal.device import Device
from shoal.mesh import Mesh
from shoal.observe.collectives import CollectiveLog, TimedCommunicator, collective_log, current_log, stragglers
from tests.helpers import models
from tests.helpers.training import STAGES, batch, config, named, start


def on(**more: Any) -> dict[str, Any]:
    return {"comms_logger": {"enabled": True, **more}}


def one_step(settings: dict[str, Any]) -> tuple[CollectiveLog, list[Any], dict[str, torch.Tensor]]:
    """Returns: the log of a step, what the recorder has of it, and the parameters."""
    engine = start(models.Plain, settings)
    log = collective_log(engine.world)
    log.clear()
    with engine.world.recorder.recording() as entries:
        engine.backward(engine(*batch(0, engine.global_rank, engine.world_size)))
        engine.step()
    noted = list(entries)
    log.is_on = False
    engine.destroy()
    return log, noted, {name: parameter.detach().clone() for name, parameter in named(engine).items()}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_every_collective_of_a_step_is_timed_and_the_numbers_stay(stage: int, world: int) -> None:
    def job() -> tuple[dict[str, int], dict[str, int], Any, Any]:
        _, _, plain = one_step(config(stage))
        log, issued, timed = one_step(config(stage, **on()))
        counts = {kind: sum(size[0] for size in sizes.values()) for kind, sizes in log.records.items()}
        expected: dict[str, int] = {}
        for entry in issued:
            expected[entry.op] = expected.get(entry.op, 0) + 1
        return counts, expected, plain, timed

    for counts, expected, plain, timed in run_ranks(world, job):
        assert counts == expected and len(expected) >= 2
        assert all(torch.equal(plain[name], value) for name, value in timed.items())


def test_sizes_are_what_one_rank_puts_in_and_times_are_positive() -> None:
    def job() -> CollectiveLog:
        return one_step(config(3, **on()))[0]

    log = run_ranks(2, job)[0]
    for kind in ("all_gather", "reduce_scatter"):
        for nbytes, (count, milliseconds, algorithm, bus) in log.records[kind].items():
            assert count == len(milliseconds) == len(algorithm) == len(bus)
            assert nbytes % 4 == 0 and min(milliseconds) > 0 and min(algorithm) > min(bus) > 0


def test_only_the_kinds_that_are_named_are_timed_and_the_unit_is_the_caller() -> None:
    def job() -> list[str]:
        settings = on(prof_all=False, prof_ops=["all_gather_into_tensor"], debug=True)
        return list(one_step(config(3, **settings))[0].records)

    names = run_ranks(2, job)[0]
    assert names and all(name.startswith("all_gather | [Caller Func: ") for name in names)
    assert any("blocks" in name for name in names)


def test_verbose_says_each_on_rank_0_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="shoal"):
        logs = run_ranks(2, lambda: one_step(config(2, **on(verbose=True)))[0])
    said = [record.getMessage() for record in caplog.records if "Gbit/s, on the bus" in record.getMessage()]
    of_the_step = sum(size[0] for sizes in logs[0].records.values() for size in sizes.values())
    assert 0 < of_the_step < len(said) < 2 * of_the_step + 10  # of one rank, with the start-up's
    assert "each is waited for at once" in caplog.text


def test_an_engine_without_it_has_its_communicators_as_they_are() -> None:
    def job() -> tuple[bool, bool, bool]:
        plain, timed = start(models.Plain, config(1)), start(models.Plain, config(1, **on()))
        return (
            isinstance(plain.axes.world, TimedCommunicator),
            isinstance(timed.axes.world, TimedCommunicator),
            timed.axes.world is timed.axes.shard,
        )

    assert run_ranks(2, job) == [(False, True, True)] * 2


def test_one_rank_alone_has_nothing_to_time_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="shoal"):
        log, _, _ = run_ranks(1, lambda: one_step(config(1, **on())))[0]
    assert log.records == {}
    assert "with one rank there are no collectives to time" in caplog.text


def test_waiting_for_a_late_rank_is_counted_separately() -> None:
    def job() -> Any:
        world = current_world()
        comm = world.communicator("dp", Mesh.of(world.size))
        log = CollectiveLog()
        log.is_on = True
        timed = TimedCommunicator(comm, log, Device(torch.device("cpu")))
        timed.barrier(label="together")
        log.clear()
        if world.rank == 1:
            time.sleep(0.5)
        timed.all_reduce(torch.ones(8), label="late").wait()
        if world.rank == 1:
            log.add("broadcast", 4, 1.0, size=2)  # of one rank alone: not compared
        return stragglers(log, comm)

    first, second = run_ranks(2, job)
    assert list(first) == list(second) == ["all_reduce"]
    assert first["all_reduce"][32]["count"] == 1
    assert first["all_reduce"][32]["total_straggler_ms"] > 200
    assert second["all_reduce"][32]["total_straggler_ms"] == 0.0
    assert first["all_reduce"][32]["total_comm_lat_ms"] == second["all_reduce"][32]["total_comm_lat_ms"] < 400


def test_deepspeeds_summary_is_of_each_rank_and_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    finder.install(children=False)
    try:
        import deepspeed

        def job() -> Any:
            deepspeed.comm.configure(enabled=True, prof_all=True)
            log = collective_log(current_world())
            assert log.is_on
            engine = start(models.Plain, config(2))
            engine.backward(engine(*batch(0, engine.global_rank, 2)))
            engine.step()
            found = deepspeed.comm.log_summary(show_straggler=True, return_dict=True)
            assert "reduce_scatter" in log.records
            deepspeed.comm.reset_log()
            assert not log.records
            deepspeed.comm.configure(enabled=False)
            assert not log.is_on
            return found

        found = run_ranks(2, job)
    finally:
        finder.uninstall()
    assert [each["metadata"]["rank"] for each in found] == [0, 1]
    assert list(found[0]["summary"]) == list(found[1]["summary"])
    assert found[0]["straggler_analysis"].keys() <= found[0]["summary"].keys()
    assert capsys.readouterr().out.count("collective  ") == 2  # times, and waiting


def of_a_script(rank: int, size: int) -> list[Any]:
    """What a script's own collectives leave in the log, on processes."""
    finder.install(children=False)
    try:
        import deepspeed.comm as dist

        part, whole = torch.ones(4) * (rank + 1), torch.zeros(4 * size)
        dist.all_reduce(part.clone())
        assert not (log := current_log()) or not log.records  # there is one where an engine of this process was
        dist.configure(enabled=True, prof_all=False, prof_ops=["mine", "all_gather_into_tensor"])
        dist.all_reduce(part.clone())  # not among them
        dist.all_reduce(part.clone(), log_name="mine")
        dist.all_reduce(part.clone(), prof=True, async_op=True).wait()
        dist.all_gather_into_tensor(whole, part)
        if rank == 0:
            dist.isend(part, 1).wait()
        else:
            dist.irecv(part, 0).wait()
        dist.barrier(prof=True)
        found = dist.log_summary(return_dict=True)["summary"]
        dist.reset_log()
        dist.configure(enabled=False, prof_all=True, prof_ops=[])
        return [
            whole.tolist(),
            {name: {str(n): each["count"] for n, each in sizes.items()} for name, sizes in found.items()},
        ]
    finally:
        finder.uninstall()


def test_a_scripts_own_collectives_are_timed_by_name_by_kind_or_on_demand(gloo: Any) -> None:
    counted = {"mine": {"16": 1}, "all_reduce": {"16": 1}, "all_gather_into_tensor": {"16": 1}, "barrier": {"0": 1}}
    for whole, found in gloo(2, of_a_script):
        assert whole == [1.0] * 4 + [2.0] * 4
        assert found == counted
