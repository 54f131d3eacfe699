"""The flight recorder."""

from __future__ import annotations

import time

import torch

from shoal.comm.recorder import Entry, Recorder
from shoal.comm.world import current_world, fake_world
from shoal.mesh import Mesh


def test_every_call_is_recorded_with_the_bytes_of_the_protocol() -> None:
    with fake_world(8, rank=3) as world:
        comm = world.communicator("dp", Mesh.of(8))
        full = torch.zeros(80, dtype=torch.bfloat16)
        with world.recorder.recording() as entries:
            comm.all_gather(full, label="gather").wait()
            comm.reduce_scatter(full, torch.zeros(10), label="reduce").wait()
            comm.all_reduce(full, label="all").wait()
            comm.exchange(torch.zeros(3), label="norm").wait()
            comm.broadcast(full, 0, label="from another").wait()
            comm.broadcast(full, 3, label="from this one").wait()
            comm.gather_objects({}, label="names")
            comm.barrier(label="start")
        comm.barrier(label="after")
    assert entries == [
        Entry(0, "dp", "all_gather", "gather", 140, torch.bfloat16, "data"),
        Entry(1, "dp", "reduce_scatter", "reduce", 140, torch.bfloat16, "data"),
        Entry(2, "dp", "all_reduce", "all", 280, torch.bfloat16, "data"),
        Entry(3, "dp", "exchange", "norm", 84, torch.float32, "control"),
        Entry(4, "dp", "broadcast", "from another", 160, torch.bfloat16, "control"),
        Entry(5, "dp", "broadcast", "from this one", 0, torch.bfloat16, "control"),
        Entry(6, "dp", "gather_objects", "names", 0, None, "control"),
        Entry(7, "dp", "barrier", "start", 0, None, "control"),
    ]


def test_the_ring_keeps_the_last_calls_and_recordings_nest() -> None:
    recorder = Recorder(ring=2)
    with recorder.recording() as outer:
        recorder.add("dp", "barrier", "0", 0, None, "control")
        with recorder.recording() as inner:
            recorder.add("dp", "barrier", "1", 0, None, "control")
        recorder.add("dp", "barrier", "2", 0, None, "control")
    recorder.add("dp", "barrier", "3", 0, None, "control")
    assert [entry.label for entry in outer] == ["0", "1", "2"]
    assert [entry.label for entry in inner] == ["1"]
    assert [entry.label for entry in recorder.last] == ["2", "3"]
    assert recorder.num_issued == 4


def test_the_table_has_a_line_a_call() -> None:
    recorder = Recorder()
    recorder.add("dp_shard", "all_gather", "layers.0", 1234567, torch.bfloat16, "data")
    recorder.add("dp", "barrier", "start", 0, None, "control")
    assert recorder.table() == (
        "seq  axis      op          label         bytes  dtype     kind\n"
        "  0  dp_shard  all_gather  layers.0  1,234,567  bfloat16  data\n"
        "  1  dp        barrier     start             0  -         control"
    )


def test_recording_a_call_costs_less_than_two_microseconds() -> None:
    recorder = Recorder()

    def timed() -> float:
        start = time.thread_time()
        for _ in range(2000):
            recorder.add("dp", "all_gather", "layers.0", 1024, torch.float32, "data")
        return (time.thread_time() - start) / 2000

    assert min(timed() for _ in range(20)) < 2e-6


def test_a_single_rank_is_recorded_too_and_receives_nothing() -> None:
    world = current_world()
    comm = world.communicator("dp", Mesh.of(1))
    with world.recorder.recording() as entries:
        comm.all_reduce(torch.ones(4), label="all").wait()
    assert [(entry.op, entry.nbytes) for entry in entries] == [("all_reduce", 0)]
